"""Which weights of a model are matrices for Muon and `RotatedAdamW`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor, nn


def hidden_matrices(model: nn.Module | Sequence[nn.Module]) -> Callable[[str, Tensor], bool]:
    """Return a rule for parameter groups: the matrices inside a model, as of attention and MLPs.

    These are the weights of all `torch.nn.Linear` and the input projections of all
    `torch.nn.MultiheadAttention`, but for the last `torch.nn.Linear` of the model, which makes its
    output, and for weights that an embedding uses too. For example::

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
