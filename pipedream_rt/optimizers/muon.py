"""Muon for matrices, and AdamW for all other parameters, in one optimizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pipedream_rt.optimizers.adamw import AdamWBeside


class _Parts:
    """torch's optimizers, by number of the group. The state is in `Muon`, so this pickles empty."""

    def __init__(self) -> None:
        self.made: dict[int, torch.optim.Optimizer] = {}

    def __reduce__(self) -> tuple[type[_Parts], tuple[()]]:
        return _Parts, ()


class Muon(AdamWBeside):
    """`torch.optim.Muon` on groups with ``matrices=True``, AdamW on all others.

    torch's own takes no parameters but matrices. The options ``lr`` and ``weight_decay`` are for
    both: the rate is scaled for matrices so that updates have the root mean square of AdamW's
    (``adjust_lr_fn="match_rms_adamw"``).

    Sources: Jordan, Muon: An optimizer for hidden layers in neural networks (2024); Liu et al.,
    Muon is Scalable for LLM Training (arXiv 2502.16982), section 2.2 (the scale of the rate). For
    stale gradients: One-step delay is not a barrier (arXiv 2606.30634).

    Args:
        params: The parameters, or groups; a group of matrices has ``matrices=True``.
        lr: The learning rate.
        momentum: The momentum of matrices.
        betas: Those of AdamW.
        eps: That of AdamW.
        weight_decay: The decay of weights.

    Raises:
        ValueError: An option makes no sense.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.95, 0.99),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        options = {
            "lr": lr,
            "momentum": momentum,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
        }
        super().__init__(params, options)
        self._parts = _Parts()

    def check(self, group: dict[str, Any]) -> None:
        """Refuse options of a group that make no sense, with `ValueError`."""
        super().check(group)
        if not 0.0 <= group["momentum"] < 1.0:
            raise ValueError(f"momentum must be from 0 to less than 1, not {group['momentum']!r}")

    def step_matrices(self, group: dict[str, Any]) -> None:
        """Step a group of matrices by torch's Muon."""
        part = self._part(group)
        # This group over torch's own defaults; the state is shared, so that it is saved here.
        part.param_groups = [{**part.param_groups[0], **group}]
        part.state = self.state
        part.step()

    def _part(self, group: dict[str, Any]) -> torch.optim.Optimizer:
        """Return torch's Muon for a group, which is made once."""
        number = next(i for i, each in enumerate(self.param_groups) if each is group)
        if number not in self._parts.made:
            self._parts.made[number] = torch.optim.Muon(
                group["params"], adjust_lr_fn="match_rms_adamw"
            )
        return self._parts.made[number]

    def expected_step_of_matrix(self, parameter: Tensor, group: dict[str, Any]) -> Tensor:
        """Return what the next step subtracts if no gradient comes: the buffer, made orthogonal."""
        # Without momentum a step takes the gradient as it is, so the buffer stands in for it.
        probe = parameter.detach().clone().requires_grad_()
        probe.grad = self.state[parameter]["momentum_buffer"].clone()
        muon = torch.optim.Muon(
            [probe],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            momentum=0.0,
            nesterov=False,
            adjust_lr_fn="match_rms_adamw",
        )
        muon.step()
        return parameter.detach() - probe.detach()


def hidden_matrices(model: nn.Module | Sequence[nn.Module]) -> Callable[[str, Tensor], bool]:
    """Return a rule for parameter groups: the matrices inside a model, as of attention and MLPs.

    These are the weights of all `torch.nn.Linear` and the input projections of all
    `torch.nn.MultiheadAttention`, but for the last `torch.nn.Linear` of the model (it makes the
    output) and for weights that an embedding uses too. For example::

        optimizer=(Muon, {"lr": 1e-3}, [(hidden_matrices(model), {"matrices": True})])

    Args:
        model: The unsplit model, or its layers.
    """
    if not isinstance(model, nn.Module):
        model = nn.Sequential(*model)
    embedded = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    linear = [m for m in model.modules() if isinstance(m, nn.Linear)]
    found = {id(m.weight) for m in linear[:-1]}
    found |= {
        id(m.in_proj_weight)
        for m in model.modules()
        if isinstance(m, nn.MultiheadAttention) and m.in_proj_weight is not None
    }
    names = {n for n, p in model.named_parameters() if id(p) in found - embedded}
    return lambda name, parameter: name in names
