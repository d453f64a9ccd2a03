"""A forward as a list of steps, which can be cut into stages between any two of them.

A *program* is what one forward of the unsplit model does between its layers, in order. Each *step*
calls a layer, or a function of torch, with values that earlier steps have made. Values stand in
numbered *slots*; the input tensors of the model stand in the first ones. The forward ::

    def forward(self, ids, mask):
        x = self.embed(ids)
        x = x + self.positions[: ids.shape[1]]
        return self.head(self.block(x, mask=mask))

becomes, for ids of shape (8, 5)::

    2 = embed(0)
    3 = getitem(<positions>, slice(None, 5))
    4 = add(2, 3)
    5 = block(4, mask=1)
    6 = head(5)
    return 6

The inside of a layer is not recorded. A program is pure data: it can be compared, pickled and
shown.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from pipedream_rt.containers import opened, put_together
from pipedream_rt.errors import ConfigError
from pipedream_rt.models.settings import autocasts, settings_applied


@dataclass(frozen=True, slots=True)
class Slot:
    """Stands for the value of a slot in arguments and results."""

    number: int

    def __repr__(self) -> str:
        return str(self.number)


@dataclass(frozen=True, slots=True)
class StoredRef:
    """Stands for a parameter, buffer or module, by its name in the unsplit model."""

    name: str

    def __repr__(self) -> str:
        return f"<{self.name}>"


@dataclass(frozen=True, slots=True)
class CacheRef:
    """Stands for an object in which layers keep what a later call needs, such as a KV cache.

    Every stage has an object of its own, for its layers.

    Attributes:
        name: The keyword argument of the model that takes it.
    """

    name: str

    def __repr__(self) -> str:
        return f"<{self.name} of this stage>"


@dataclass(frozen=True, slots=True)
class Number:
    """Stands for a number that a micro-batch brings, computed from the sizes of its inputs."""

    index: int

    def __repr__(self) -> str:
        return f"n{self.index}"


def numbered(numbers: Sequence[int]) -> dict[int, Any]:
    """Return the values of a micro-batch's numbers: those of slots have numbers from 0 on."""
    return {~index: number for index, number in enumerate(numbers)}


class ContextRef(NamedTuple):
    """The contexts of torch around a step, where they differ from those around the forward.

    Attributes:
        grad: Whether gradients are recorded; None for the same as around the forward.
        autocast: The device type, whether autocast is on, and its dtype; None for the same.
        settings: Those of CUDA kernels that differ, by name and value.
    """

    grad: bool | None = None
    autocast: tuple[str, bool, torch.dtype] | None = None
    settings: tuple[tuple[str, Any], ...] = ()

    @contextmanager
    def entered(self) -> Iterator[None]:
        grad: Any = nullcontext() if self.grad is None else torch.set_grad_enabled(self.grad)
        cast: Any = nullcontext()
        if self.autocast is not None:
            device, enabled, dtype = self.autocast
            cast = torch.autocast(device, enabled=enabled, dtype=dtype)
        kernels: Any = settings_applied(dict(self.settings)) if self.settings else nullcontext()
        with grad, cast, kernels:
            yield


Target: TypeAlias = "str | Callable[..., Any]"
"""What a step calls: a layer, by its name in the unsplit model; or a function."""

SEQUENCE = ContextRef()
"""The contexts of a step that is called under those of the forward itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step of a program.

    Attributes:
        name: The name that seeds the random numbers of the step: that of the layer, with ``#2`` at
            its second call; or ``(function N)`` with the number N of the step.
        args: The positional arguments, with `Slot`, `StoredRef` and `CacheRef` as stand-ins.
        kwargs: The keyword arguments, in the same way.
        slots: The slot of the whole result; or the slots of the tensors in the result, in order.
        made: The result with `Slot` in the place of tensors; None if ``slots`` is one number.
        kinds: The shape and the dtype of each tensor of a layer's result, with `Number` for what
            the sizes of inputs decide; empty for a function, and where a shape depends on values.
        random: Whether it may draw random numbers; layers always may.
        free: Whether every stage can compute it alike: from the model's inputs alone, without
            weights, layers that have some, or random numbers.
        after: The earlier steps, by number, that have changed in place what this one takes.
        changes: The slots whose values it changes in place.
        changes_held: The parameters and buffers that it changes in place, by all of their names.
        moves: The buffers of its layer that the call of it changes, by their first names.
        where: The line of the user's code that makes the step, for messages.
    """

    name: str
    target: Target
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    slots: int | tuple[int, ...]
    made: Any = None
    kinds: tuple[tuple[tuple[int | Number, ...], torch.dtype], ...] = ()
    random: bool = True
    free: bool = False
    after: tuple[int, ...] = ()
    changes: tuple[int, ...] = ()
    changes_held: tuple[str, ...] = ()
    moves: tuple[str, ...] = field(default=(), compare=False)
    around: ContextRef = SEQUENCE
    where: str = ""

    @property
    def layer(self) -> str | None:
        """The name of the layer that is called; None for a function."""
        return self.target if isinstance(self.target, str) else None

    @property
    def taken(self) -> list[int]:
        return slots_in((self.args, self.kwargs))

    @property
    def held(self) -> list[str]:
        """The names of the parameters, buffers and modules among its arguments."""
        return [h.name for h in found((self.args, self.kwargs), StoredRef)]

    @property
    def filled(self) -> tuple[int, ...]:
        return (self.slots,) if isinstance(self.slots, int) else self.slots

    def __str__(self) -> str:
        """Return the step as a line of code."""
        target = self.target
        name = target if isinstance(target, str) else getattr(target, "__name__", repr(target))
        given = [*map(repr, self.args), *(f"{k}={v!r}" for k, v in self.kwargs.items())]
        return f"{', '.join(map(str, self.filled)) or '_'} = {name}({', '.join(given)})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Guard:
    """A value that the forward has read from its inputs: with another it may do other steps.

    Attributes:
        steps: The numbers of the steps that compute the arguments of ``read``, in order.
    """

    steps: tuple[int, ...]
    read: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    value: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """One forward of the unsplit model.

    Attributes:
        inputs: The number of input tensors, which stand in the first slots.
        output: The result, with `Slot` in the place of tensors.
        after: The steps, by number, that have changed in place what the result holds.
        carries: By name, the objects that stages have for the steps, pickled in their first state.
    """

    inputs: int
    steps: tuple[Step, ...]
    output: Any
    after: tuple[int, ...] = ()
    guards: tuple[Guard, ...] = ()
    carries: dict[str, bytes] = field(default_factory=dict)

    def layers(self) -> list[str]:
        """Return the names of the layers in the order of their first calls."""
        return list(dict.fromkeys(step.layer for step in self.steps if step.layer is not None))

    def holds_for(self, inputs: Sequence[Any], numbers: Sequence[int] = ()) -> bool:
        """Whether every guard reads the recorded value from these inputs."""
        with torch.no_grad():
            for guard in self.guards:
                changes = any(self.steps[number].changes for number in guard.steps)
                # The caller's tensors must stay as they are.
                values = dict(
                    enumerate(t.clone() for t in inputs) if changes else enumerate(inputs)
                )
                values |= numbered(numbers)
                for number in guard.steps:
                    step = self.steps[number]
                    assert callable(step.target)
                    args, kwargs = filled((step.args, step.kwargs), values, {})
                    with step.around.entered():
                        put(step, step.target(*args, **kwargs), values)
                args, kwargs = filled((guard.args, guard.kwargs), values, {})
                if guard.read(*args, **kwargs) != guard.value:
                    return False
        return True

    def __str__(self) -> str:
        """Return the program as lines of code."""
        return "\n".join([*map(str, self.steps), f"return {self.output!r}"])


# -- values -------------------------------------------------------------------------------------


def replaced(value: Any, kinds: tuple[type, ...], by: Callable[[Any], Any]) -> Any:
    """Return a value with every object of some kinds in it replaced by ``by(object)``, in order.

    A container without such an object is returned itself.
    """
    if isinstance(value, kinds):
        return by(value)
    held = opened(value)
    if held is None:
        return value
    keys, parts = held
    made = [replaced(part, kinds, by) for part in parts]
    if all(map(operator.is_, made, parts)):
        return value
    return put_together(value, keys, made)


def on_device(value: Any, device: torch.device) -> Any:
    """Move a value, such as a program, to a device: its tensors, device arguments and contexts."""

    def meant(each: Tensor | torch.device | ContextRef | str) -> Any:
        if isinstance(each, Tensor):
            return each.to(device)
        if isinstance(each, str):  # "cuda:1"; a bare "cuda" means the current device already
            return str(device) if with_number.fullmatch(each) else each
        if isinstance(each, torch.device):
            return each if each.type == "meta" else device
        if each.autocast is None:
            return each
        return each._replace(autocast=(device.type, *each.autocast[1:]))

    with_number = re.compile(rf"{re.escape(device.type)}:\d+")
    return replaced(value, (Tensor, torch.device, ContextRef, str), meant)


def found(value: Any, *kinds: type) -> list[Any]:
    """Return the objects of some classes in a value, in order."""
    there: list[Any] = []

    def note(each: Any) -> Any:
        there.append(each)
        return each

    replaced(value, kinds, note)
    return there


def slots_in(value: Any) -> list[int]:
    """Return the numbers of the slots in a value, in order."""
    return [slot.number for slot in found(value, Slot)]


NONE_CARRIED: Mapping[str, Any] = {}

STAND_INS = (Slot, Number, StoredRef, CacheRef)
"""The objects that stand in a program for a value that is not there yet."""


def filled(
    value: Any,
    values: dict[int, Any],
    held: dict[str, Any],
    carried: Mapping[str, Any] = NONE_CARRIED,
) -> Any:
    """Return a value with its stand-ins, such as `Slot`, replaced by what they stand for."""

    def meant(each: Slot | Number | StoredRef | CacheRef) -> Any:
        if isinstance(each, Slot):
            return values[each.number]
        if isinstance(each, Number):
            return values[~each.index]
        return held[each.name] if isinstance(each, StoredRef) else carried[each.name]

    return replaced(value, STAND_INS, meant)


def held_by(model: nn.Module, name: str) -> Any:
    """Return the parameter, the buffer or the module that a `StoredRef` stands for."""
    path, _, short = name.rpartition(".")
    return getattr(model.get_submodule(path), short)


def put(step: Step, result: Any, values: dict[int, Any]) -> None:
    """Put the result of a step into its slots; refuse one that is built otherwise than recorded."""
    if isinstance(step.slots, int):
        values[step.slots] = result
        return
    tensors = []

    def number(tensor: Tensor) -> Slot:
        tensors.append(tensor)
        return Slot(step.slots[len(tensors) - 1] if len(tensors) <= len(step.slots) else -1)  # type: ignore[arg-type, index]

    made = replaced(result, (Tensor,), number)
    if len(tensors) != len(step.slots) or not _alike(made, step.made):
        raise ConfigError(
            f"{step.name} has returned {made!r}, and {step.made!r} when the forward of the model "
            "was recorded; what a layer returns beside tensors must not change, because the steps "
            "after it were made for that"
        )
    for tensor, (sizes, dtype) in zip(tensors, step.kinds):
        shape = tuple(values[~n.index] if isinstance(n, Number) else n for n in sizes)
        # Under autocast a layer has other dtypes on a device than on the host that recorded it.
        elsewhere = not tensor.is_cpu and (autocasts() or step.around.autocast is not None)
        cast = elsewhere and tensor.is_floating_point() and dtype.is_floating_point
        if tensor.shape != shape or (tensor.dtype != dtype and not cast):
            raise ConfigError(
                f"{step.name} has returned a {tensor.dtype} tensor of shape {tuple(tensor.shape)}, "
                f"and a {dtype} one of shape {shape} when the forward of the model was "
                "recorded with inputs of these shapes; a shape that depends on values must stay "
                "inside of one layer"
            )
    values.update(zip(step.slots, tensors))


def _alike(one: Any, other: Any) -> bool:
    """Whether two results are equal; what cannot be compared counts as equal."""
    try:
        return bool(one == other)
    except Exception:  # a foreign class may raise anything when compared
        return True
