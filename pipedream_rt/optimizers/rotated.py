"""AdamW in the basis of the eigenvectors of its gradients' second moments."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pipedream_rt.optimizers.adamw import AdamWBeside


class RotatedAdamW(AdamWBeside):
    """AdamW that steps matrices in a rotated basis; all other parameters as AdamW does.

    For a matrix W (m, n) with the gradient G, U and V are the eigenvectors of moving averages of
    G G' (m, m) and G' G (n, n). With G~ = U' G V and the first moment M rotated likewise::

        V2 = beta2 V2 + (1 - beta2) G~^2
        W  = (1 - lr weight_decay) W - lr U (M~^ / (sqrt(V2^) + eps)) V'

    M is kept in the original basis, V2 in the rotated one. Every ``refresh`` steps the bases follow
    the averages by one step of the power iteration and a QR decomposition, after the eigenvectors
    were sorted by falling eigenvalue; V2 is permuted with them. The first time they are computed
    whole. A side longer than ``longest`` is not rotated.

    Stale gradients harm Adam where its coordinates are not those of the curvature, because a step
    along one then changes the gradient along others; in the rotated basis they harm less.

    Sources: Basis rotation (ICML 2026), the code's rules for refreshes; the optimizer without
    delays is SOAP: Vyas et al., SOAP: Improving and Stabilizing Shampoo using Adam (ICLR 2025),
    algorithm 3.

    Args:
        params: The parameters, or groups; a group of matrices has ``matrices=True``.
        lr: The learning rate.
        betas: The decays of the first and of the second moments.
        eps: What is added to the root of the second moment.
        weight_decay: The decay of weights.
        refresh: The number of steps between two refreshes of the bases.
        longest: The longest side of a matrix that is rotated.

    Raises:
        ValueError: An option makes no sense.
    """

    matrix_types = (torch.float32, torch.float64)  # torch.linalg.eigh takes no halves

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.95, 0.99),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        refresh: int = 10,
        longest: int = 4096,
    ) -> None:
        options = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "refresh": refresh,
            "longest": longest,
        }
        super().__init__(params, options)

    def check(self, group: dict[str, Any]) -> None:
        """Refuse options of a group that make no sense, with `ValueError`."""
        super().check(group)
        for name, least in (("refresh", 1), ("longest", 0)):
            if not (isinstance(group[name], int) and group[name] >= least):
                raise ValueError(f"{name} must be an int of at least {least}, not {group[name]!r}")

    def step_matrices(self, group: dict[str, Any]) -> None:
        """Step a group of matrices in their rotated bases."""
        first, second = group["betas"]
        for weight in group["params"]:
            gradient = weight.grad
            if gradient is None:
                continue
            state = self.moments(weight)
            state["step"] += 1
            state["exp_avg"].lerp_(gradient, 1 - first)
            for side, product in _products(gradient, group["longest"]):
                if f"{side}_mean" in state:
                    state[f"{side}_mean"].lerp_(product, 1 - second)
                else:
                    state[f"{side}_mean"] = product.clone()
            self._refresh(state, group)
            rotated = _turned(gradient, state)
            state["exp_avg_sq"].mul_(second).addcmul_(rotated, rotated, value=1 - second)
            step = self._direction(state, group)
            weight.mul_(1 - group["lr"] * group["weight_decay"])
            weight.sub_(group["lr"] * step)

    def _refresh(self, state: dict[str, Any], group: dict[str, Any]) -> None:
        """Let the bases follow the averages, every ``refresh`` steps."""
        number = int(state["step"])
        for dim, side in enumerate(_SIDES):
            if f"{side}_mean" not in state:
                continue
            mean = state[f"{side}_mean"]
            if f"{side}_basis" not in state:
                # eigh sorts by rising eigenvalue, the refreshes below by falling.
                state[f"{side}_basis"] = torch.linalg.eigh(mean).eigenvectors.flip(1).contiguous()
            elif number % group["refresh"] == 0:
                basis = state[f"{side}_basis"]
                eigenvalues = (basis * (mean @ basis)).sum(0)
                order = eigenvalues.argsort(descending=True, stable=True)
                # The second moments belong to the columns of the basis, so they move with them.
                state["exp_avg_sq"].copy_(state["exp_avg_sq"].index_select(dim, order))
                basis.copy_(torch.linalg.qr(mean @ basis[:, order]).Q)

    def _direction(self, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        """Return U (M~^ / (sqrt(V2^) + eps)) V'."""
        first, second = (1 - beta ** float(state["step"]) for beta in group["betas"])
        moment = _turned(state["exp_avg"], state) / first
        scale = (state["exp_avg_sq"] / second).sqrt() + group["eps"]
        return _turned_back(moment / scale, state)

    def expected_step_of_matrix(self, parameter: Tensor, group: dict[str, Any]) -> Tensor:
        """Return what the next step subtracts from a matrix if no gradient comes."""
        step = self._direction(self.state[parameter], group) + group["weight_decay"] * parameter
        result: Tensor = group["lr"] * step
        return result


_SIDES = ("left", "right")


def _products(gradient: Tensor, longest: int) -> list[tuple[str, Tensor]]:
    """Return G G' as ``left`` and G' G as ``right``, but for sides that are too long."""
    rows, columns = gradient.shape
    left = [("left", gradient @ gradient.T)] if rows <= longest else []
    return left + ([("right", gradient.T @ gradient)] if columns <= longest else [])


def _turned(matrix: Tensor, state: dict[str, Any]) -> Tensor:
    """Return U' matrix V."""
    if "left_basis" in state:
        matrix = state["left_basis"].T @ matrix
    return matrix @ state["right_basis"] if "right_basis" in state else matrix


def _turned_back(matrix: Tensor, state: dict[str, Any]) -> Tensor:
    """Return U matrix V'."""
    if "left_basis" in state:
        matrix = state["left_basis"] @ matrix
    return matrix @ state["right_basis"].T if "right_basis" in state else matrix
