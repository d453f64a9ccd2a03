"""The split of a sequence of layers into stages of consecutive layers.

A sequence may be an element of a sequence, as a backbone before a head. Its layers are layers of
the model too, under their names in the model, such as ``"0.3"``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from typing import Any, TypeAlias

from torch import nn

from pipedream_rt.errors import ConfigError
from pipedream_rt.models.modes import own_methods
from pipedream_rt.schedules.placement import Tie

Layers: TypeAlias = dict[str, nn.Module]
"""The layers of a model in order, by their names in the unsplit model."""

Inner: TypeAlias = Mapping[str, str]
"""The layers at which no stage can begin, each with a buffer that layers before it and layers from
it on change. Two stages would each have a copy of that buffer."""

NO_INNER: Inner = {}

_CALLING = ("__call__", "_call_impl", "_wrapped_call_impl", "forward", "__iter__")
"""The methods that define how a sequence calls its layers."""


def is_sequence(model: object) -> bool:
    """Whether a model is a sequence of layers, each of which takes what the one before returns."""
    # Not one that calls its layers in its own way: by a class with another forward or __call__, or
    # by one on the object, as after model.forward = wrapper.
    for kind in (nn.Sequential, nn.ModuleList):
        if isinstance(model, kind):
            return not own_methods(model, kind, _CALLING)
    return not isinstance(model, nn.Module)


def is_skippable(module: nn.Module) -> bool:
    """Whether a module may hand values to others past what it returns, by ``@skippable``.

    That is of torchgpipe; FairScale and older versions of torch have the same.
    """
    return hasattr(type(module), "stashable") and hasattr(type(module), "poppable")


def has_skips(layers: nn.Module | Iterable[object]) -> bool:
    """Whether there is such a module in a model, or in a list of layers."""
    roots = layers if isinstance(layers, Sequence) else [layers]  # a generator gives them once
    modules = (each for root in roots if isinstance(root, nn.Module) for each in root.modules())
    return any(map(is_skippable, modules))


def elements_of(model: nn.Module | Iterable[nn.Module]) -> Layers:
    """Return the elements of a model by name; a sequence among them is one element."""
    if isinstance(model, nn.Module) and not isinstance(model, nn.Sequential | nn.ModuleList):
        raise ConfigError(
            f"the model is a {type(model).__name__}; a pipeline is cut between the layers of an "
            "nn.Sequential or of a list of modules, so write the model as one of these"
        )
    if isinstance(model, nn.Module):
        _refuse_more_than_a_sequence(model)
        # named_children would leave out a layer's second place in the sequence.
        layers = {name: layer for name, layer in model._modules.items() if layer is not None}
    else:
        try:
            listed = list(model)
        except TypeError:
            raise ConfigError(
                f"the model is a {type(model).__name__}; give an nn.Sequential or a list of modules"
            ) from None
        layers = {str(i): layer for i, layer in enumerate(listed)}
    layers = {name: _as_layer(name, layer) for name, layer in layers.items()}
    if not layers:
        raise ConfigError("the model has no layers")
    return layers


class FunctionLayer(nn.Module):
    """A layer without weights that calls a function, as ``lambda x: x.flatten(1)`` in a list."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any) -> Any:
        return self.function(*args)

    def extra_repr(self) -> str:
        return getattr(self.function, "__qualname__", None) or repr(self.function)


def _as_layer(name: str, layer: object) -> nn.Module:
    """Return an element of a list as a module; a function is called by a layer of its own."""
    if isinstance(layer, nn.Module):
        return layer
    if isinstance(layer, type):
        raise ConfigError(
            f"layer {name} is the class {layer.__name__}; give an object of it, "
            f"{layer.__name__}(...), or LayerSpec({layer.__name__}, ...)"
        )
    if not callable(layer):
        raise ConfigError(
            f"layer {name} is a {type(layer).__name__}; a layer is an nn.Module or a function of "
            "what the layer before it returns"
        )
    for held, value in _held_by(layer):
        weights = value.parameters() if isinstance(value, nn.Module) else [value]
        if any(isinstance(each, nn.Parameter) and each.requires_grad for each in weights):
            raise ConfigError(
                f"layer {name} is a function that holds weights, by {held}, which no stage would "
                "train: give a module that has them, as one with this function as its forward"
            )
    return FunctionLayer(layer)


def _held_by(function: Any) -> Iterator[tuple[str, Any]]:
    """Yield the values that a function reads beside its arguments, by name."""
    if isinstance(function, functools.partial):
        yield from _held_by(function.func)
        yield from ((f"its argument {i}", value) for i, value in enumerate(function.args))
        yield from function.keywords.items()
        return
    if (owner := getattr(function, "__self__", None)) is not None:
        yield f"its object, a {type(owner).__name__}", owner
    function = getattr(function, "__func__", function)
    code = getattr(function, "__code__", None)
    if code is None:
        return
    cells = zip(code.co_freevars, function.__closure__ or (), strict=True)
    for name, cell in cells:
        with suppress(ValueError):  # an empty cell
            yield name, cell.cell_contents
    yield from (function.__kwdefaults__ or {}).items()
    yield from ((f"a default of {function.__name__}", v) for v in function.__defaults__ or ())
    yield from ((n, function.__globals__[n]) for n in code.co_names if n in function.__globals__)


def layers_of(elements: Layers, whole: Set[str] = frozenset()) -> Layers:
    """Return the elements of a model; sequences not in ``whole`` are replaced by their layers."""
    return {
        name: layer
        for key, element in elements.items()
        for name, layer in ([(key, element)] if key in whole else _opened(key, element))
    }


def _opened(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the layers of a sequence; a module itself if it must be called as a whole."""
    inner = [(key, child) for key, child in module._modules.items() if child is not None]
    kept = module._parameters or module._buffers or _any_hooks(module)
    if not inner or kept or not isinstance(module, nn.Sequential) or _differs(module):
        yield name, module
        return
    for key, child in inner:
        yield from _opened(f"{name}.{key}", child)


def _any_hooks(module: nn.Module) -> bool:
    """Whether a module has hooks of any kind: on its calls, its backward, or its state dict."""
    return any(held for key, held in vars(module).items() if key.endswith("_hooks"))


def _differs(module: nn.Sequential) -> bool:
    """Whether a sequence overrides a method of `nn.Sequential`; ``__init__`` does not count."""
    named = [n for n in dir(nn.Sequential) if not n.startswith("__")]
    return bool(own_methods(module, nn.Sequential, [*named, *_CALLING]))


def has_hooks(module: nn.Module) -> bool:
    """Whether a module has hooks on its calls or its backward."""
    kinds = ("forward", "forward_pre", "backward", "backward_pre")
    return any(getattr(module, f"_{kind}_hooks") for kind in kinds)


def _refuse_more_than_a_sequence(model: nn.Module) -> None:
    """Refuse a model that has more than its layers: the rest would be lost when it is cut."""
    lost = []
    if model._parameters or model._buffers:
        lost.append("parameters or buffers")
    if has_hooks(model):
        lost.append("hooks")
    if lost:
        raise ConfigError(
            f"the model, a {type(model).__name__}, has {' and '.join(lost)} of its own beside its "
            "layers, which would be lost when it is cut; put them into a layer"
        )


def split_points(
    layers: Layers,
    stages: int | Sequence[int | str],
    elements: Sequence[str] | None = None,
    inner: Inner = NO_INNER,
    work: Mapping[str, int] | None = None,
) -> list[int]:
    """Return the index of the first layer of every stage, rising from 0.

    ``stages`` is their number, to balance the ``work`` of the layers, or else parameters; or the
    first layer of every stage but the first, by name, or by the index or name of an element.
    ``elements`` is None if they are the layers.
    """
    names = list(layers)
    if not isinstance(stages, int):
        points = _explicit(names, stages, list(elements or layers))
        refuse_inner([names[point] for point in points], names, inner)
        return points
    if isinstance(stages, bool) or not 1 <= stages <= len(layers):
        raise ConfigError(
            f"stages must be from 1 to the number of layers, {len(layers)}, not {stages}"
        )
    sizes = {name: sum(p.numel() for p in layer.parameters()) for name, layer in layers.items()}
    return [names.index(first) for first in balanced_firsts(work or sizes, stages, inner)]


def inner_layers(first: Mapping[str, int], users: Mapping[str, Sequence[int]]) -> Inner:
    """Return the layers inside of a span that one stage must have.

    ``first`` is the place of the first call of each layer, and ``users`` by buffer those of the
    layers that have it.
    """
    return {
        layer: name
        for layer, place in first.items()
        for name, places in reversed([*users.items()])  # the first buffer of a norm is the one told
        if min(places) < place <= max(places)
    }


def balanced_firsts(sizes: Mapping[str, int], stages: int, inner: Inner) -> list[str]:
    """Return the first layer of each stage, with the largest stage as small as it can be."""
    firsts: list[str] = []
    sums: list[int] = []
    for name, size in sizes.items():
        if name in inner:
            sums[-1] += size
        else:
            firsts.append(name)
            sums.append(size)
    if stages > len(firsts):
        # The name of one layer says enough.
        layer, buffer = next(iter(inner.items()))
        raise ConfigError(
            f"the model can be cut into {len(firsts)} stage{'s' * (len(firsts) > 1)}, not "
            f"{stages}: {_reason(layer, buffer)}. {_ways_out(list(sizes), inner)}"
        )
    return [firsts[i] for i in balanced(sums, stages)]


def refuse_inner(firsts: Sequence[str], names: Sequence[str], inner: Inner) -> None:
    """Refuse to begin a stage inside of what one stage must have."""
    for layer in firsts:
        if layer in inner:
            raise ConfigError(
                f"no stage can begin at {layer!r}: {_reason(layer, inner[layer])}. "
                f"{_ways_out(names, inner)}"
            )


def _reason(layer: str, buffer: str) -> str:
    return (
        f"the buffer {buffer} is changed by calls before {layer} and after that, and two stages "
        "would each have a copy, which would part"
    )


def _ways_out(names: Sequence[str], inner: Inner) -> str:
    """Say at which layers stages can begin, and how to cut elsewhere."""
    at = [name for name in names if name not in inner][1:]
    listed = f"Give stages={at}, or some of these" if at else "Give stages=1"
    return f"{listed}, or take a norm without such a buffer, as nn.GroupNorm"


def listed_points(stages: object) -> list[int | str]:
    """Check the list of split points that the user gave, each an index or a name."""
    if isinstance(stages, str) or not isinstance(stages, Sequence):
        raise ConfigError(
            "stages must be a number or a list, which has the first layer of every stage but the "
            f"first; it is {stages!r}"
        )
    for point in stages:
        if isinstance(point, bool) or not isinstance(point, str | int):
            raise ConfigError(f"a split point is the index or the name of a layer, not {point!r}")
    return list(stages)


def _explicit(names: list[str], stages: Sequence[int | str], elements: Sequence[str]) -> list[int]:
    """Return the indices of the layers at the split points; an index counts elements."""
    points = [0]
    for point in listed_points(stages):
        if isinstance(point, int) and not 0 < point < len(elements):
            raise ConfigError(f"split points lie between 1 and {len(elements) - 1}, found {point}")
        name = point if isinstance(point, str) else elements[point]
        inside = [i for i, each in enumerate(names) if f"{each}.".startswith(f"{name}.")]
        if not inside and isinstance(point, str):
            raise ConfigError(f"no layer is called {point!r}; the layers are {', '.join(names)}")
        if not inside:
            raise ConfigError(f"split point {point} is {name!r}, in which there is no layer")
        index, before = inside[0], points[-1]
        if index <= before:
            raise ConfigError(
                f"split points must rise: {point!r} begins at layer {names[index]}, which does not "
                f"come after {names[before]}, where the stage before it begins; found "
                f"{list(stages)}"
            )
        points.append(index)
    return points


def balanced(sizes: Sequence[int], stages: int) -> list[int]:
    """Return the index of the first layer of each part, so that the largest part is smallest.

    Among such cuts it takes one whose longest part has the fewest layers, which spreads layers
    without parameters. Dynamic programming over (parts, layers) takes O(stages x spare^2), where
    spare is the number of layers beyond one for each part.
    """
    count = len(sizes)
    prefix = [0]
    for size in sizes:
        prefix.append(prefix[-1] + size)

    def cost(first: int, end: int) -> tuple[int, int]:
        return prefix[end] - prefix[first], end - first

    spare = count - stages  # the parts before an end have at most so many layers more than one
    best = {end: (cost(0, end), [0]) for end in range(1, spare + 2)}
    for parts in range(2, stages + 1):
        best = {
            end: min(
                (
                    (
                        (
                            max(best[cut][0][0], cost(cut, end)[0]),
                            max(best[cut][0][1], cost(cut, end)[1]),
                        ),
                        [*best[cut][1], cut],
                    )
                    for cut in range(parts - 1, min(end, parts + spare))
                ),
                key=lambda candidate: candidate[0],
            )
            for end in range(parts, parts + spare + 1)
        }
    return best[count][1]


def ties_of(parts: Sequence[nn.Module], names: Mapping[int, str]) -> tuple[Tie, ...]:
    """Return the trainable weights that several stages have; ``names`` is by ``id``."""
    users: dict[int, list[int]] = {}
    for stage, part in enumerate(parts):
        for parameter in part.parameters():
            if parameter.requires_grad:
                users.setdefault(id(parameter), []).append(stage)
    return tuple(Tie(names[i], tuple(stages)) for i, stages in users.items() if len(stages) > 1)
