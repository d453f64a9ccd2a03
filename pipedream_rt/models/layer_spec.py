"""Layers that are built on their workers, so that no process holds the whole model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from pipedream_rt.errors import ConfigError
from pipedream_rt.models.code_reading import names_used
from pipedream_rt.models.mark import mark_of_draws_outside


class LayerSpec:
    """A layer that is built by the worker that needs it.

    Example::

        layers = [LayerSpec(nn.Embedding, 50_000, 1024),
                  *[LayerSpec(Block, 1024) for _ in range(48)],
                  LayerSpec(nn.Linear, 1024, 50_000, bias=False, tied={"weight": "0.weight"})]
        with Pipeline(layers, stages=8, ...) as pipe: ...

    Each worker builds the layers in order, up to its last one, and keeps its own. So the weights
    are the same as if one process called ``torch.manual_seed(seed)``, with the ``seed`` of the
    pipeline, and built the whole list. No process holds more than its part and one layer.

    Args:
        factory: A class of modules, or a function that returns a module.
        *args: Positional arguments of the factory.
        tied: Parameters that the layer shares with an earlier layer: the name in this layer,
            mapped to the name of the other in the model.
        **kwargs: Keyword arguments of the factory.

    Raises:
        ConfigError: The factory cannot be called.
    """

    def __init__(
        self,
        factory: Callable[..., nn.Module],
        *args: Any,
        tied: Mapping[str, str] | None = None,
        **kwargs: Any,
    ) -> None:
        if not callable(factory):
            raise ConfigError(
                f"a LayerSpec needs a class or a function that makes a layer, not {factory!r}"
            )
        self.factory = factory
        self.args = args
        self.kwargs = kwargs
        self.tied = dict(tied or {})

    def build(self) -> nn.Module:
        """Build the layer, without tying anything.

        Raises:
            ConfigError: The factory does not return a module.
        """
        layer = self.factory(*self.args, **self.kwargs)
        if not isinstance(layer, nn.Module):
            raise ConfigError(
                f"{self!r} has built a {type(layer).__name__}, which is not an nn.Module"
            )
        return layer

    def __repr__(self) -> str:
        name = getattr(self.factory, "__name__", repr(self.factory))
        given = [*map(repr, self.args), *(f"{k}={v!r}" for k, v in self.kwargs.items())]
        return f"LayerSpec({', '.join([name, *given])})"


@dataclass(frozen=True, slots=True)
class Blueprint:
    """The list of layers from which every worker builds its own.

    Attributes:
        specs: By name in the model, in order: random numbers are drawn in that order.
    """

    specs: dict[str, LayerSpec] = field(default_factory=dict)
    seed: int = 0

    def on_meta(self) -> dict[str, nn.Module]:
        """Build all layers on the meta device, where they have no values, and tie them."""
        layers: dict[str, nn.Module] = {}
        for name, spec in self.specs.items():
            try:
                # Twice: a factory that counts makes another layer in each call.
                with torch.device("meta"), _drawing_nothing(name):
                    layers[name], again = spec.build(), spec.build()
                _refuse_other_attributes(name, layers[name], again)
            except ConfigError:
                raise
            except Exception as error:  # a factory may raise anything
                raise ConfigError(f"layer {name}, {spec!r}, cannot be built: {error}") from error
            for own, other in spec.tied.items():
                holder, _, rest = other.partition(".")
                if holder not in layers or holder == name:
                    raise ConfigError(
                        f"layer {name} ties {own!r} to {other!r}, but {holder!r} is not the name "
                        "of a layer before it"
                    )
                parameter = _parameter_of(layers[holder], rest, other)
                _put_parameter(name, layers[name], own, parameter, other)
        return layers

    def build(
        self, wanted: Sequence[str], dropped: Callable[[], None] = lambda: None
    ) -> dict[str, nn.Module]:
        """Build some of the layers, with the values that they have if all are built.

        ``dropped`` is called after an unwanted layer was built and freed.
        """
        torch.manual_seed(self.seed)
        left, built = set(wanted) & self.specs.keys(), {}
        # Tied parameters are kept until the layers that share them are built.
        sources = {other for name in left for other in self.specs[name].tied.values()}
        kept: dict[str, nn.Parameter] = {}
        for name, spec in self.specs.items():
            if not left:
                break
            layer = spec.build()  # unwanted ones too: they draw random numbers before the others
            for own, other in spec.tied.items():
                if other in kept:
                    _put_parameter(name, layer, own, kept[other], other)
            for other in sources:
                holder, _, rest = other.partition(".")
                if holder == name:
                    kept[other] = _parameter_of(layer, rest, other)
            if name in left:
                left.remove(name)
                built[name] = layer
            del layer  # before the next one is built, so that only one is there beside the part
            if name not in built:
                dropped()
        return built


@contextmanager
def _drawing_nothing(name: str) -> Iterator[None]:
    """Refuse a factory that draws random numbers of Python or NumPy in the body."""
    before = mark_of_draws_outside()
    yield
    if before != mark_of_draws_outside():
        raise ConfigError(
            f"the factory of layer {name} draws random numbers of Python or NumPy, and each worker "
            "that builds the layer would draw others; draw them with torch, which is seeded there, "
            "or give them to LayerSpec as arguments"
        )


def _refuse_other_attributes(name: str, one: nn.Module, other: nn.Module) -> None:
    """Refuse a factory that has made two layers with different values."""
    for module, again in zip(one.modules(), other.modules(), strict=False):
        cls: type = type(module)
        # What the forward does not read may differ.
        for key in sorted(vars(module).keys() & names_used(cls)[0]):
            value = vars(module)[key]
            kept = vars(again).get(key)
            # kept == kept: NaN differs from itself, and is no count.
            if isinstance(value, bool | int | float | str | None) and value != kept == kept:
                raise ConfigError(
                    f"the factory of layer {name} has given {key!r} the value {value!r}, and "
                    f"{kept!r} when it was called once more, as one does that counts: each worker "
                    "that builds the layer would count from another number. Give the value to "
                    "LayerSpec as an argument"
                )


def _parameter_of(layer: nn.Module, name: str, full: str) -> nn.Parameter:
    """Return a parameter of a layer; ``full`` is its name in the error."""
    try:
        return layer.get_parameter(name)
    except AttributeError:
        raise ConfigError(f"there is no parameter {full!r} to tie another one to") from None


def _put_parameter(
    name: str, layer: nn.Module, own: str, parameter: nn.Parameter, other: str
) -> None:
    """Replace the parameter ``own`` of a layer by ``other`` of the model, of the same shape."""
    try:
        shape = tuple(layer.get_parameter(own).shape)
    except AttributeError:
        raise ConfigError(f"layer {name} has no parameter {own!r}, which tied= names") from None
    if shape != tuple(parameter.shape):
        raise ConfigError(
            f"layer {name} ties {own!r} of shape {shape} to {other!r} of shape "
            f"{tuple(parameter.shape)}; tied parameters must have one shape"
        )
    path, _, short = own.rpartition(".")
    setattr(layer.get_submodule(path), short, parameter)
