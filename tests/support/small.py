"""A small pipeline in this thread, for tests that are about neither its model nor its workers."""

import torch
from torch.nn import functional as F

from .models import mlp
from .pinned import Pipeline

SGD = (torch.optim.SGD, {"lr": 0.1})


def small(model=None, **options):
    """A pipeline of three stages over some linear layers, if the options do not say otherwise."""
    given = {"stages": 3, "loss_fn": F.mse_loss, "optimizer": SGD, "workers": "serial"}
    return Pipeline(mlp() if model is None else model, **{**given, **options})


def losses(pipe, data, **options):
    """Train on an epoch; return its losses."""
    return [result.loss for result in pipe.train_epoch(data, **options)]
