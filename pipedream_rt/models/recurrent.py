"""Keeping recurrent layers from moving their weights while weight versions are kept.

On CUDA the forward of a recurrent layer moves weights that it has not seen before into one piece of
memory, by assigning their ``.data``; scripts ask for it too, by `flatten_parameters`. The leaves of
a weight version are such weights, and must stay over the memory of their version.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import nn


def recurrent_layers(module: nn.Module) -> list[nn.RNNBase]:
    """Return the recurrent layers in a module, but for those whose `flatten_parameters` is set."""
    found = [each for each in module.modules() if isinstance(each, nn.RNNBase)]
    if any(weight.is_cuda for each in found for weight in each.parameters()):
        # The warning asks for flatten_parameters, which must not be; the copies are cheap.
        warnings.filterwarnings("ignore", message="RNN module weights are not part of single")
    return [each for each in found if "flatten_parameters" not in each.__dict__]


def forbid_flattening(layers: Iterable[nn.RNNBase]) -> None:
    """Keep layers from moving their weights, until `allow_flattening`."""
    for layer in layers:
        layer.__dict__["flatten_parameters"] = _nothing


def allow_flattening(layers: Iterable[nn.RNNBase]) -> None:
    """Undo `forbid_flattening`."""
    for layer in layers:
        layer.__dict__.pop("flatten_parameters", None)


@contextmanager
def flattening_forbidden(module: nn.Module) -> Iterator[None]:
    """Keep the recurrent layers in a module from moving their weights in the body."""
    layers = recurrent_layers(module)
    forbid_flattening(layers)
    try:
        yield
    finally:
        allow_flattening(layers)


def _nothing() -> None:
    """Do nothing, in the place of `flatten_parameters`."""
