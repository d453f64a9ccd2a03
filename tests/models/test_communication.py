"""Whether code asks torch.distributed, judged by the names in it."""

import functools

import pytest
import torch
import torch.distributed as group
from torch import nn
from torch.distributed import get_rank

from pipedream_rt.models.communication import communicates


class Named(nn.Module):
    def forward(self, x):
        return x + 1 if torch.distributed.is_initialized() else x


class Aliased(nn.Module):
    def forward(self, x):
        return self.shifted(x)

    def shifted(self, x):
        return x + group.get_rank()


class Imported(nn.Module):
    @property
    def rank(self):
        return get_rank()

    def forward(self, x):
        return x + self.rank


class Imports(nn.Module):
    def forward(self, x):
        import torch.distributed as inside  # as code does that is to run without it

        return x + inside.get_rank()


class Inherits(Aliased):
    def forward(self, x):
        return 2 * super().forward(x)


def by_helper(output, target):
    def inside():
        return ask()

    return (output - target).sum() * inside()


def ask():
    return group.get_world_size()


class Called:
    def __call__(self, output, target):
        return by_helper(output, target)

    def method(self, output, target):
        return self.inner(output, target)

    def inner(self, output, target):
        return group.get_rank()


@pytest.mark.parametrize(
    "value",
    [
        Named(), Aliased(), Imported(), Imports(), Inherits(), nn.SyncBatchNorm(2), by_helper,
        Called(), Called().method, functools.partial(by_helper, 1),
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_code_that_names_it_is_found(value):
    assert communicates(value)


class Saves(nn.Linear):
    def save(self):
        return group.get_rank()


def plain(output, target):
    return torch.nn.functional.mse_loss(output, target)


@pytest.mark.parametrize(
    "value",
    [Saves(2, 2), nn.BatchNorm1d(2), nn.TransformerEncoderLayer(8, 2), plain, print, None],
    ids=["Saves", "BatchNorm1d", "TransformerEncoderLayer", "plain", "print", "None"],
)
def test_other_code_is_not(value):
    """Nor is what a forward does not reach."""
    assert not communicates(value)
