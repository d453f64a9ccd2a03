"""Optimizers that bear stale gradients better, for ``Pipeline(optimizer=(class, options, ...))``.

They are ordinary `torch.optim.Optimizer` classes, and work without a pipeline too.
"""

from pipedream_rt.optimizers.muon import Muon, hidden_matrices
from pipedream_rt.optimizers.rotated import RotatedAdamW

__all__ = ["Muon", "RotatedAdamW", "hidden_matrices"]
