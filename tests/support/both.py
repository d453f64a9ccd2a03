"""A small model in a plain loop and on a pipeline that flushes, whose bits are compared."""

import copy

import torch
from torch import nn
from torch.nn import functional as F

from . import oracle
from .pinned import Flat as Pipeline

SGD = (torch.optim.SGD, {"lr": 0.1})


def batches(count=4):
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(2, 8, 8, generator=generator).unbind() for _ in range(count)]


def plain(model, loss_fn=F.mse_loss, optimizer=None, clip=None, data=None):
    """Losses and weights of a plain loop over a copy of a model.

    clip: the greatest norm of the gradients, and its kind.
    """
    model = copy.deepcopy(model)
    optimizer = optimizer or (lambda m: torch.optim.SGD(m.parameters(), lr=0.1))
    optimizer, losses = optimizer(model), []
    for x, y in data or batches():
        optimizer.zero_grad()
        loss = loss_fn(model(x), y)
        loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), *clip)
        optimizer.step()
        losses.append(loss.item())
    return losses, model.state_dict()


def opened(model, loss_fn=F.mse_loss, **options):
    """A pipeline that flushes, which is as plain PyTorch where the options do not say otherwise."""
    options = {
        "stages": 2, "optimizer": SGD, "schedule": "1f1b", "micro_batches": 1, "workers": "serial",
        **options,
    }  # fmt: skip
    return Pipeline(model, loss_fn=loss_fn, **options)


def losses_of(pipe, data):
    """The losses of all micro-batches of an epoch."""
    return [loss for r in pipe.train_epoch(data) for loss in r.losses]


def learned(pipe, data):
    """These losses, and the weights after them."""
    return losses_of(pipe, data), pipe.state_dict()


def piped(model, loss_fn=F.mse_loss, **options):
    """The same on a pipeline that flushes."""
    data = batches()
    with opened(model, loss_fn, example=data[0], **options) as pipe:
        return [r.loss for r in pipe.train_epoch(data)], pipe.state_dict()


def assert_same(found, expected):
    assert found[0] == expected[0]
    oracle.assert_same(found[1], expected[1])


def layers(*kinds):
    torch.manual_seed(0)
    return [kind(8, 8) for kind in kinds]
