"""The split of a sequence of layers into stages of consecutive layers.

A sequence may be an element of a sequence, as a backbone before a head. Its layers are layers of
the model too, under their names in the model, such as ``"0.3"``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import TypeAlias

from torch import nn

from pipedream_rt.errors import ConfigError
from pipedream_rt.models.modes import own_methods
from pipedream_rt.schedules.placement import Tie

Layers: TypeAlias = dict[str, nn.Module]
"""The layers of a model in order, by their names in the unsplit model."""


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
    for name, layer in layers.items():
        if not isinstance(layer, nn.Module):
            raise ConfigError(f"layer {name} is a {type(layer).__name__}, not an nn.Module")
    if not layers:
        raise ConfigError("the model has no layers")
    return layers


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
    """Refuse a model that has more than its layers, which would be lost when it is cut."""
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
    layers: Layers, stages: int | Sequence[int | str], elements: Sequence[str] | None = None
) -> list[int]:
    """Return the index of the first layer of every stage, rising from 0.

    ``stages`` is their number, to balance parameters; or the first layer of every stage but the
    first, by name, or by the index or name of an element. ``elements`` is None if they are the
    layers.
    """
    if not isinstance(stages, int):
        return _explicit(list(layers), stages, list(elements or layers))
    if isinstance(stages, bool) or not 1 <= stages <= len(layers):
        raise ConfigError(
            f"stages must be from 1 to the number of layers, {len(layers)}, not {stages}"
        )
    sizes = [sum(p.numel() for p in layer.parameters()) for layer in layers.values()]
    return balanced(sizes, stages)


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
