"""Recurrent layers do not move their weights while another says where these are.

On CUDA a recurrent layer moves weights that its forward has not seen before into one piece of
memory, by assigning their ``.data``; scripts ask for it too, by `flatten_parameters`. Weights of
which several versions are kept would then be in two places.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import nn


def recurrent_layers(module: nn.Module) -> list[nn.RNNBase]:
    """Return the recurrent layers in a module, which are about to be left apart.

    Those with a `flatten_parameters` of the user's own are left to it.
    """
    found = [each for each in module.modules() if isinstance(each, nn.RNNBase)]
    if any(weight.is_cuda for each in found for weight in each.parameters()):
        # It asks for what must not be done, and the copies that it speaks of are cheap.
        warnings.filterwarnings("ignore", message="RNN module weights are not part of single")
    return [each for each in found if "flatten_parameters" not in each.__dict__]


def leave_apart(layers: Iterable[nn.RNNBase]) -> None:
    """Let layers leave their weights where they are, until `join_again`."""
    for layer in layers:
        layer.__dict__["flatten_parameters"] = _nothing


def join_again(layers: Iterable[nn.RNNBase]) -> None:
    """Let layers move their weights as they do by themselves."""
    for layer in layers:
        layer.__dict__.pop("flatten_parameters", None)


@contextmanager
def left_apart(module: nn.Module) -> Iterator[None]:
    """Let the recurrent layers in a module leave their weights where they are in the body."""
    layers = recurrent_layers(module)
    leave_apart(layers)
    try:
        yield
    finally:
        join_again(layers)


def _nothing() -> None:
    """Stand for `flatten_parameters`."""
