"""Recording a forward of a model: what it does between its layers becomes a program.

The forward of the user's model is called once with example inputs. While it runs,

- every function of torch outside of the layers is called as usual and noted
  (``torch.overrides.TorchFunctionMode``),
- every layer is only asked for the shapes of its outputs: it runs on the meta device, where nothing
  is computed, and the forward goes on with zeros of these shapes.

Whatever Python does between the layers is done once, now: loops, conditions on shapes and options,
lists of results. So a program holds for one *signature* of the inputs: their shapes, dtypes, and
values that are no tensors. What else a forward could depend on is looked for, and refused with the
line that does it: values of tensors that layers have made, Python's random numbers, attributes that
the forward changes. Values of the inputs may be read; they become guards.
"""

from __future__ import annotations

import copy
import dataclasses
import random
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from hashlib import blake2b
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple
from weakref import ref

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from pipedream_rt.errors import ConfigError
from pipedream_rt.models.modes import Modes
from pipedream_rt.models.program import (
    NONE_CARRIED,
    Around,
    Carried,
    Guard,
    Held,
    Program,
    Slot,
    Step,
    found,
    replaced,
    slots_in,
)
from pipedream_rt.models.shipping import dumps
from pipedream_rt.models.surroundings import Surroundings, difference, surroundings_now
from pipedream_rt.models.tensors import named_tensors

_BATCH, _LAYERS, _DRAWN, _SIZED = 1, 2, 4, 8
"""What a value depends on: the inputs, layers or weights, random numbers; and whether its shape
depends on values."""

_OF_SHAPE = {"size", "numel", "nelement", "__len__", "shape", "nbytes", "stride"}
"""The functions and attributes that tell of the shape of a tensor."""

_CHANGING = {"batch_norm", "instance_norm", "__setitem__", "embedding", "embedding_bag"}
"""Functions that change what they are given and whose names do not say so by a ``_`` at the end."""

_SIZING = {"_pack_padded_sequence"}
"""Functions whose result has a shape that depends on values, though torch does not tag them so."""

_FACTS = {
    "size", "dim", "ndimension", "stride", "numel", "nelement", "is_contiguous", "element_size",
    "is_floating_point", "is_complex", "is_signed", "is_conj", "is_neg", "is_inference",
    "storage_offset", "get_device", "type", "__len__", "is_same_size", "is_pinned", "is_shared",
    "has_names", "result_type", "can_cast", "is_tensor", "is_storage", "__hash__", "__dir__",
    "__deepcopy__", "_is_view", "is_coalesced", "_is_zerotensor", "__torch_function__",
}  # fmt: skip
"""The functions that tell of a tensor what its signature has."""

_PLACES = {"data_ptr", "storage", "untyped_storage", "is_set_to"}
"""The functions that tell where a tensor lies."""

_OURS = (
    str(Path(__file__).resolve().parent.parent),
    str(Path(torch.__file__).resolve().parent),
)


class _Tag:
    """What is known of a tensor that the forward has seen.

    Attributes:
        slot: Its slot.
        depends: What it depends on.
        after: The steps that have changed it in place through another tensor.
    """

    __slots__ = ("after", "depends", "slot")

    def __init__(self, slot: int, depends: int) -> None:
        """Note what a step has made."""
        self.slot = slot
        self.depends = depends
        self.after: set[int] = set()


def record(
    model: nn.Module,
    layers: Mapping[str, nn.Module],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    training: bool | None = None,
    grad: bool = True,
    autocast: torch.dtype | None = None,
    carried: Mapping[str, Any] = NONE_CARRIED,
    modes: Modes = Modes(),  # noqa: B008 - a tuple
) -> Program:
    """Record one forward of a model; the model is afterwards as it was.

    Args:
        model: The unsplit model.
        layers: The modules that are to stay whole, by name.
        args: Positional arguments of the forward, whose tensors are not changed.
        kwargs: Keyword arguments.
        training: The mode that all modules are set to; None to leave every module as it is.
        grad: Whether gradients are recorded around the forward.
        autocast: The dtype of autocast around the forward; None for none.
        carried: Objects among the keyword arguments in which layers keep what a later forward
            needs, by name. They are afterwards as after this forward, with tensors without values.
        modes: Which modules do not follow a mode that all modules are set to.

    Returns:
        The program. Its inputs are the tensors in ``(args, kwargs)``, in order.

    Raises:
        ConfigError: The forward does not take these inputs, or does something that cannot be
            followed; the message names the line.
    """
    inputs: list[Tensor] = []
    by_id: dict[int, Tensor] = {}

    def copied(tensor: Tensor) -> Tensor:
        if id(tensor) not in by_id:
            by_id[id(tensor)] = tensor.detach().clone()
            inputs.append(by_id[id(tensor)])
        return by_id[id(tensor)]

    args, kwargs = replaced((tuple(args), dict(kwargs)), (Tensor,), copied)
    recorder = _Recorder(model, layers, inputs, carried)
    at_first = {name: dumps(value)[0] for name, value in carried.items()}
    _refuse_unfit_modules(model, layers)
    cast = nullcontext() if autocast is None else torch.autocast("cpu", dtype=autocast)
    with (
        _as_it_was(model, layers),
        _mode(model, training, modes),
        torch.set_grad_enabled(grad),
        cast,
    ):
        watch = _Watch(recorder)
        with recorder.called(), watch, recorder:
            recorder.begin(watch)
            output = _called(model, args, {**kwargs, **carried})
        return recorder.finish(output, at_first)


def refuse_changing(one: Program, other: Program) -> None:
    """Refuse a model whose forward does something else in two calls with the same inputs.

    Args:
        one: What was recorded of the first call.
        other: What was recorded of the second.

    Raises:
        ConfigError: It does; the message names the line.
    """
    for first, second in zip_longest(one.steps, other.steps):
        if _content_of(first) != _content_of(second):
            step = first or second
            assert step is not None
            lines = " and then ".join(
                f"`{each}`" if each else "nothing" for each in (first, second)
            )
            raise ConfigError(
                f"the model cannot be cut into stages: at {step.where} its forward did {lines} "
                "when it was called twice with the same inputs, so it depends on something else "
                "that changes from call to call, such as a counter, an iterator or a clock, which "
                "would be read once, when the forward is recorded. Keep it in a buffer of a layer "
                f"that reads it. {MANUAL}"
            )


def _content_of(step: Step | None) -> Any:
    """Return what two steps have in common that do the same."""
    if step is None:
        return None
    target = step.target
    named = target if isinstance(target, str) else getattr(target, "__qualname__", type(target))

    def plain(value: Any) -> Any:
        if isinstance(value, Tensor):
            data = value.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()
            return value.dtype, value.shape, blake2b(data).hexdigest()
        return type(value) if type(value) not in _PLAIN_LEAVES else repr(value)

    given = (step.args, step.kwargs)
    kinds = tuple({type(v) for v in _leaves_of(given)} - {Slot, Held, Carried})
    return step.name, named, repr(replaced(given, kinds, plain)), step.slots, step.around


def _called(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call the model.

    Raises:
        ConfigError: It does not take these inputs.
    """
    try:
        return model(*args, **kwargs)
    except ConfigError:
        raise
    except Exception as error:  # the user's code may raise anything
        place = traceback.extract_tb(error.__traceback__)
        own = [frame for frame in place if not frame.filename.startswith(_OURS)]
        at = f" at {own[-1].filename}:{own[-1].lineno} in {own[-1].name}" if own else ""
        how = "" if torch.is_grad_enabled() else " in eval mode, without gradients"
        raise ConfigError(
            f"the forward of the model, a {type(model).__name__}, does not take the example or the "
            f"mini-batch{how}{at}: {type(error).__name__}: {error}"
        ) from error


class _Recorder(TorchFunctionMode):
    """The notes of one forward.

    Args:
        model: The unsplit model.
        layers: The layers, by name.
        inputs: The input tensors.
        carried: The objects in which layers keep something, by name.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Mapping[str, nn.Module],
        inputs: Sequence[Tensor],
        carried: Mapping[str, Any],
    ) -> None:
        """Note the inputs."""
        super().__init__()
        self._carried = {id(value): (name, value) for name, value in carried.items()}
        self._carried_kinds = tuple({type(value) for value in carried.values()})
        self.steps: list[Step] = []
        self.guards: list[Guard] = []
        self.paused = 0
        self.drew = self.sized = False
        self._layers = layers
        self._names = {id(layer): name for name, layer in layers.items()}
        self._all_names = {id(module): name for name, module in model.named_modules()}
        self._calls: dict[str, int] = {}
        self._slots = 0
        self._inputs = inputs
        self._tags: dict[int, tuple[ref[Tensor], _Tag]] = {}
        self._made: dict[int, ref[Tensor]] = {}
        self._foreign: dict[int, tuple[str, Any]] = {}
        self._over: dict[int, list[ref[Tensor]]] = {}
        self._held = {
            id(t): name
            for named in (
                model.named_parameters(remove_duplicate=False),
                model.named_buffers(remove_duplicate=False),
            )
            for name, t in reversed(list(named))  # the first name of a tensor counts
        }
        self._names_over: dict[int, list[str]] = {}
        for name, tensor in named_tensors(model):
            if not tensor.is_meta:
                self._names_over.setdefault(tensor.untyped_storage()._cdata, []).append(name)
        for tensor in inputs:
            self._tag(tensor, _BATCH)

    # -- tags -----------------------------------------------------------------------------------

    def _tag(self, tensor: Tensor, depends: int) -> int:
        """Give a tensor the next slot."""
        tag = _Tag(self._slots, depends)
        self._slots += 1
        self._tags[id(tensor)] = (ref(tensor), tag)
        over = self._over.setdefault(tensor.untyped_storage()._cdata, [])
        over[:] = [each for each in over if each() is not None and each() is not tensor]
        over.append(ref(tensor))
        return tag.slot

    def tag_of(self, tensor: Tensor) -> _Tag | None:
        """Return what is known of a tensor; None if it was there before the forward."""
        there = self._tags.get(id(tensor))
        return there[1] if there is not None and there[0]() is tensor else None

    def note_made(self, tensor: Tensor) -> None:
        """Note that a tensor was made during the forward, by whatever means."""
        self._made[id(tensor)] = ref(tensor)

    def _is_held(self, tensor: Tensor) -> bool:
        """Whether a tensor is a weight or a buffer, or lies over one's memory as ``.data`` does."""
        return id(tensor) in self._held or tensor.untyped_storage()._cdata in self._names_over

    def _was_made(self, tensor: Tensor) -> bool:
        """Whether a tensor was made during the forward."""
        there = self._made.get(id(tensor))
        return there is not None and there() is tensor

    def _seen(self, value: Any) -> tuple[Any, int, set[int]]:
        """Return a value with slots and names in the place of tensors.

        Returns:
            The value; what it depends on; the steps that have changed it in place.

        Raises:
            ConfigError: A tensor was made in a way that cannot be followed.
        """
        depends, after = 0, set()

        def stand_in(tensor: Any) -> Any:
            nonlocal depends
            if id(tensor) in self._carried:
                depends |= _LAYERS
                return Carried(self._carried[id(tensor)][0])
            if isinstance(tensor, nn.Module):
                depends |= _LAYERS
                return self._module(tensor)
            if not isinstance(tensor, Tensor):
                return tensor
            if (tag := self.tag_of(tensor)) is not None:
                depends |= tag.depends
                after.update(tag.after)
                return Slot(tag.slot)
            if id(tensor) in self._held:
                depends |= _LAYERS
                return Held(self._held[id(tensor)])
            if self._was_made(tensor):
                raise _refusal(
                    "a tensor was made in a way that cannot be followed, for instance by NumPy or "
                    "in a transform of torch.func"
                )
            if tensor.requires_grad:
                raise _refusal(
                    "the forward uses a tensor that requires a gradient and is no parameter of the "
                    "model; make it an nn.Parameter of a module"
                )
            return tensor

        kinds: tuple[type, ...] = (Tensor, nn.Module, *self._carried_kinds)
        return replaced(value, kinds, stand_in), depends, after

    def _module(self, module: nn.Module) -> Any:
        """Return what stands for a module that is passed to a layer, which stages then share.

        Raises:
            ConfigError: It is taken apart, so that no stage has it.
        """
        name = self._all_names.get(id(module))
        if name is None:  # it was made by the forward, and has nothing of the model
            return module
        if any(layer == name or name.startswith(f"{layer}.") for layer in self._layers):
            return Held(name)
        raise _refusal(
            f"the module {name or 'of the whole model'!r} is passed on, and it is taken apart into "
            "layers, so that no stage has it; pass one of its layers, or the values that are needed"
        )

    # -- functions ------------------------------------------------------------------------------

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Call a function of torch, and note it if the forward called it outside of layers."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", str(func))
        if self.paused or func in _CONTEXTS:
            return func(*args, **kwargs)
        if name == "backward":
            raise _refusal(
                "backward() is called in the forward, which no stage can do for layers of others; "
                "put the lines into an nn.Module of their own, which is then a layer"
            )
        if name == "__set__":
            raise _refusal("the forward sets an attribute of a tensor, such as x.data")
        if name == "__iter__":
            return iter(self.__torch_function__(Tensor.unbind, types, args, {}))
        if name in _PLACES and self._seen(args)[1]:
            raise _refusal(
                f"{name}() tells where a tensor lies, which is another place in each call; a model "
                "that depends on it cannot be followed"
            )
        casts = name == "type" and len(args) + len(kwargs) > 1
        if not casts and (name in _FACTS or (name == "__get__" and not _is_view_getter(func))):
            fact = func(*args, **kwargs)
            what = getattr(getattr(func, "__self__", None), "__name__", name)
            if what in _OF_SHAPE or name in _OF_SHAPE:
                self._tells_shape(func, what, args, kwargs, fact)
            return fact
        return self._function(func, name, args, kwargs)

    def _tells_shape(
        self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], fact: Any
    ) -> None:
        """Note or refuse that the forward reads a shape that depends on values."""
        tag = self.tag_of(args[0]) if args and isinstance(args[0], Tensor) else None
        if tag is not None and tag.depends & _SIZED:
            given, depends, after = self._seen((args, kwargs))
            self._reads(func, name, given, depends, after, fact)

    def _function(
        self, func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Call and note a function."""
        func = _PICKLED_AS.get(func, func)
        self._refuse_surroundings(f"{name.strip('_')}()")
        given, depends, after = self._seen((args, kwargs))
        if any(isinstance(value, torch.Generator) for value in _leaves_of((args, kwargs))):
            raise _refusal(
                f"{name}() draws from a torch.Generator, which a worker would have a copy of; let "
                "it draw from the default generator, which is seeded for each step"
            )
        changing = name.endswith("_") and not name.endswith("__")
        changing = changing or name in _CHANGING or name.startswith("__i") or "out" in kwargs
        # The weights and buffers of the user's model do not change while it is recorded.
        copies: dict[int, Tensor] = {}

        def own(tensor: Tensor) -> Tensor:
            if tensor.is_meta or (changing and self._is_held(tensor)):
                made = copies[id(tensor)] = _valued(tensor)
                return made.requires_grad_(tensor.requires_grad and tensor.is_leaf)
            return tensor

        tensors = list({id(t): t for t in _tensors_in((args, kwargs))}.values())
        called_with = replaced((args, kwargs), (Tensor,), own)
        versions = [_version_of(copies.get(id(t), t)) for t in tensors]
        self.drew = self.sized = False
        self.paused += 1
        try:
            result = func(*called_with[0], **called_with[1])
        finally:
            self.paused -= 1
        changed = [
            t
            for t, before in zip(tensors, versions, strict=True)
            if _version_of(copies.get(id(t), t)) != before
        ]
        depends |= _SIZED if self.sized or name in _SIZING else 0
        results = _tensors_in(result)
        if not results and not changed and name not in _EFFECTS:
            self._reads(func, name, given, depends | (_DRAWN if self.drew else 0), after, result)
            return result
        target, made = (_Silent(func), None) if name in _EFFECTS else (func, result)
        self._add(
            f"({name})", target, given, made, results, depends, after, changed, random=self.drew
        )
        return result

    def _reads(
        self, func: Any, name: str, given: Any, depends: int, after: set[int], value: Any
    ) -> None:
        """Note or refuse what the forward reads from tensors, on which its way may depend.

        Raises:
            ConfigError: It depends on layers or on random numbers, or cannot be compared.
        """
        if not depends:
            return
        if "nested_tensor" in name:
            raise _refusal(
                "a nested tensor is made, as nn.TransformerEncoder does in eval mode where a mask "
                "leaves something out; build it with enable_nested_tensor=False"
            )
        if depends & (_LAYERS | _DRAWN):
            of = "layers have computed" if depends & _LAYERS else "were drawn at random"
            raise _refusal(
                f"{name.strip('_')}() reads values that {of}, so the way of the forward depends "
                "on data. Let a layer do this, so that it is decided where the values are: move "
                "the lines that depend on it into an nn.Module of their own"
            )
        if not isinstance(value, bool | int | float | list | tuple):
            raise _refusal(f"{name.strip('_')}() takes values of the inputs out of torch")
        args, kwargs = given
        steps = self._leading_to(slots_in(given), after)
        guard = Guard(steps=steps, read=func, args=args, kwargs=kwargs, value=value)
        self.guards.append(guard)

    def _leading_to(self, slots: Sequence[int], after: set[int]) -> tuple[int, ...]:
        """Return the steps that compute some slots, in order."""
        maker = {slot: i for i, step in enumerate(self.steps) for slot in step.filled}
        wanted, leading = [maker[s] for s in slots if s in maker] + list(after), set()
        while wanted:
            number = wanted.pop()
            if number not in leading:
                leading.add(number)
                step = self.steps[number]
                wanted += [maker[s] for s in step.taken if s in maker]
                wanted += step.after
        return tuple(sorted(leading))

    def _add(
        self,
        name: str,
        target: Any,
        given: Any,
        result: Any,
        results: Sequence[Tensor],
        depends: int,
        after: set[int],
        changed: Sequence[Tensor],
        *,
        random: bool,
        where: str | None = None,
    ) -> None:
        """Add a step, and give its results their slots."""
        self._refuse_foreign(given)
        if not isinstance(target, str):
            self._objects_in(given)
        number = len(self.steps)
        changes = []
        for tensor in changed:
            tag = self.tag_of(tensor)
            if tag is not None:
                changes.append(tag.slot)
            for alias in self._over.get(tensor.untyped_storage()._cdata, []):
                other = alias()
                mine = self.tag_of(other) if other is not None else None
                if mine is not None:
                    mine.after.add(number)
                    mine.depends |= depends & ~_SIZED  # a change in place changes no shape
        if changed and not changes and not any(map(self._is_held, changed)):
            raise _refusal(
                "the forward changes in place a tensor that is there before it, and neither a "
                "buffer nor an input; register it as a buffer of a layer that changes it"
            )
        depends |= _DRAWN if random else 0
        is_layer = isinstance(target, str)
        fixed = is_layer and not depends & _SIZED
        slots: list[int] = []
        same = {id(t) for t in changed}

        def slot_of(tensor: Tensor) -> Slot:
            mask = ~_SIZED if id(tensor) in same else ~0
            return Slot(self._result(tensor, depends & mask, slots))

        made = replaced(result, (Tensor,), slot_of)
        if not is_layer:
            name = f"{name[:-1]} {number})"
        self.steps.append(
            Step(
                name=name,
                target=target,
                args=given[0],
                kwargs=given[1],
                slots=tuple(slots),
                made=_without_foreign(made),
                kinds=tuple((tuple(t.shape), t.dtype) for t in results) if fixed else (),
                random=random or is_layer,
                free=not depends & (_LAYERS | _DRAWN) and name not in _EFFECTS,
                after=tuple(sorted(after)),
                changes=tuple(changes),
                changes_held=tuple(
                    name
                    for tensor in changed
                    for name in self._names_over.get(tensor.untyped_storage()._cdata, ())
                ),
                around=self._around(),
                where=_line() if where is None else where,
            )
        )

    def _result(self, tensor: Tensor, depends: int, slots: list[int]) -> int:
        """Give a result its slot."""
        slots.append(self._tag(tensor, depends))
        return slots[-1]

    def _around(self) -> Around:
        """Return the contexts of torch that the forward has entered by itself."""
        grad, cast = torch.is_grad_enabled(), _autocast()
        return Around(None if grad == self._grad else grad, None if cast == self._cast else cast)

    def _refuse_foreign(self, given: Any) -> None:
        """Refuse to hand an object on that a layer has made and that is no tensor."""
        for value in _leaves_of(given):
            maker, there = self._foreign.get(id(value), ("", None))
            if there is value and there is not None:
                raise _refusal(
                    f"layer {maker!r} returns a {type(value).__name__}, which a later layer takes; "
                    "between layers tensors, numbers and containers of these can pass"
                )

    # -- layers ---------------------------------------------------------------------------------

    @contextmanager
    def called(self) -> Iterator[None]:
        """Let the layers call `layer` while the body runs, and autograd functions `_function`."""
        classes: dict[type, type] = {}
        before = torch.autograd.Function.__dict__["apply"]
        recorder = self

        def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
            original = before.__get__(None, cls)
            if recorder.paused:
                return original(*args, **kwargs)
            if cls.__name__ == "CheckpointFunction":  # it computes what its first argument does
                return args[0](*args[2:])
            recorder.paused += 1  # no mode is left for the recorder's own calls, as otherwise
            try:
                return recorder._function(_Applied(cls), cls.__name__, args, kwargs)
            finally:
                recorder.paused -= 1

        for layer in self._layers.values():
            cls = type(layer)
            if cls not in classes:
                classes[cls] = type(cls.__name__, (cls,), {"__call__": self._stand_in(cls)})
            layer.__class__ = classes[cls]

        def grad(*args: Any, **kwargs: Any) -> Any:
            if recorder.paused:
                return derived(*args, **kwargs)
            raise _refusal(
                "torch.autograd.grad is called in the forward, which no stage can do for layers of "
                "others; put the lines into an nn.Module of their own, which is then a layer"
            )

        derived, torch.autograd.grad = torch.autograd.grad, grad
        torch.autograd.Function.apply = classmethod(apply)  # type: ignore[assignment, method-assign]
        try:
            yield
        finally:
            torch.autograd.grad = derived
            torch.autograd.Function.apply = before  # type: ignore[method-assign]
            for layer in self._layers.values():
                layer.__class__ = type(layer).__mro__[1]

    def _stand_in(self, cls: type[nn.Module]) -> Callable[..., Any]:
        """Return what is called in the place of a layer of a class."""
        recorder = self

        def call(layer: Any, *args: Any, **kwargs: Any) -> Any:
            stand_in = type(layer)
            layer.__class__ = cls
            try:
                if recorder.paused:
                    return layer(*args, **kwargs)
                recorder.paused += 1
                try:
                    return recorder._layer(layer, args, kwargs)
                finally:
                    recorder.paused -= 1
            finally:
                layer.__class__ = stand_in

        return call

    def _layer(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Note the call of a layer; return zeros of the shapes of its outputs."""
        name, where = self._names[id(layer)], _line()
        self._refuse_surroundings(f"layer {name!r}")
        self._refuse_other_weights(layer, name)
        given, depends, after = self._seen((args, kwargs))
        objects = self._objects_in(given)
        has_weights = any(True for _ in layer.parameters())
        self.drew = False
        try:
            result, changed, moved, views = _shapes_of(layer, (args, kwargs), self._carried)
        except _NotDense as error:
            raise _refusal(
                f"layer {name!r} returns a {error} tensor, which cannot pass between stages; "
                "return a dense one (to_dense, or to_padded_tensor)"
            ) from None
        except Exception as error:
            raise ConfigError(
                f"layer {name!r} ({type(layer).__name__}), called at {where}, does not take what "
                f"the forward gives it: {error}"
            ) from error
        for value, before in objects:
            if self._pickled(value) != before:
                raise _refusal(
                    f"layer {name!r} changes the {type(value).__name__} that it is given, in which "
                    "a later layer may look; between layers tensors, numbers and containers of "
                    "these can pass"
                )
        for value in _leaves_of(result):
            if type(value) not in _PLAIN_LEAVES and not isinstance(value, Tensor):
                self._foreign[id(value)] = (name, value)
        calls = self._calls[name] = self._calls.get(name, 0) + 1
        depends |= _LAYERS if has_weights or moved else 0
        self._add(
            name if calls == 1 else f"{name}#{calls}",
            name,
            given,
            result,
            _tensors_in(result),
            depends,
            after,
            changed,
            random=self.drew,
            where=where,
        )
        for view, source in views:
            for one, other in ((view, source), (source, view)):
                memory = one.untyped_storage()._cdata
                self._over.setdefault(memory, []).append(ref(other))
        return result

    def _refuse_other_weights(self, layer: nn.Module, name: str) -> None:
        """Refuse to call a layer with other weights than its own, as functional_call does."""
        for short, tensor in (*layer.named_parameters(name), *layer.named_buffers(name)):
            if id(tensor) not in self._held:
                raise _refusal(
                    f"layer {name!r} is called with another tensor in the place of {short!r}, as "
                    "torch.func.functional_call does, which a stage would not have; write an "
                    "nn.Module that makes such weights and uses them, which is then a layer"
                )

    def _objects_in(self, given: Any) -> list[tuple[Any, bytes]]:
        """Return the objects among arguments that are neither tensors nor plain, pickled."""
        return [
            (value, self._pickled(value))
            for value in _leaves_of(given)
            if type(value) not in _PLAIN_LEAVES
            and not isinstance(value, Slot | Held | Carried | Tensor)
        ]

    def _pickled(self, value: Any) -> bytes:
        """Pickle an object that a step takes, as for a worker.

        Raises:
            ConfigError: It cannot be pickled, or holds a tensor that the forward has made, which no
                step could give it.
        """
        try:
            data, tensors = dumps(value)
        except Exception as error:  # a foreign class may raise anything when pickled
            raise _refusal(
                f"a {type(value).__name__} is passed on that cannot be pickled: {error}"
            ) from error
        if any(each in self._tags or each in self._made for each in tensors):
            raise _refusal(
                f"a {type(value).__name__} is passed on that holds tensors which the forward has "
                "made; between layers tensors, numbers and containers of these can pass"
            )
        return data

    # -- the whole ------------------------------------------------------------------------------

    def begin(self, watch: object) -> None:
        """Note the contexts around the forward.

        Args:
            watch: The mode that notes what is made.
        """
        self._grad, self._cast, self._ours = torch.is_grad_enabled(), _autocast(), (self, watch)
        self._before = self._surroundings()

    def _surroundings(self) -> Surroundings:
        """Return what is on around the function or layer that is called now."""
        self.paused += 1  # to read some of it calls functions of torch
        try:
            return surroundings_now(self._ours)
        finally:
            self.paused -= 1

    def _refuse_surroundings(self, what: str) -> None:
        """Refuse to call something under a context that the stages would not be in."""
        if name := difference(self._surroundings(), self._before):
            raise _refusal(
                f"{what} is called while {name} is on, without which the stages would compute; put "
                "the lines under it into an nn.Module of their own, which is then a layer"
            )

    def finish(self, output: Any, at_first: dict[str, bytes]) -> Program:
        """Return the program of a forward.

        Args:
            output: What it has returned.
            at_first: The objects in which layers keep something, pickled as they were before.
        """
        made, _, after = self._seen(output)
        # Each stage keeps its own, so none of them is a result.
        made = replaced(made, (Carried,), lambda _: None)
        self._refuse_foreign(made)
        return Program(
            inputs=len(self._inputs),
            steps=tuple(self.steps),
            output=made,
            after=tuple(sorted(after)),
            guards=tuple(self.guards),
            carries=at_first,
        )


class _Applied:
    """Calls an autograd function; it can be pickled.

    Args:
        cls: The class of the function.
    """

    def __init__(self, cls: Any) -> None:
        """Keep the class."""
        self._cls = cls
        self.__name__ = cls.__name__

    def __call__(self, *args: Any) -> Any:
        """Apply the function."""
        return self._cls.apply(*args)

    def __eq__(self, other: object) -> bool:
        """Whether both apply the same function."""
        return isinstance(other, _Applied) and other._cls is self._cls

    def __hash__(self) -> int:
        """Return the hash of the class."""
        return hash(self._cls)


class _Silent:
    """Calls a function for its effect, as to hook a tensor; it can be pickled.

    Args:
        function: The function, whose result is of no use to later steps.
    """

    def __init__(self, function: Any) -> None:
        """Keep the function."""
        self._function = function
        self.__name__ = function.__name__

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Call the function."""
        self._function(*args, **kwargs)


class _Watch(TorchDispatchMode):
    """Notes every tensor that is made, and whether random numbers are drawn.

    Args:
        recorder: Where it notes them.
    """

    def __init__(self, recorder: _Recorder) -> None:
        """Note nothing yet."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._recorder = recorder

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Call an operator, and note what it makes."""
        if torch.Tag.nondeterministic_seeded in func.tags:
            self._recorder.drew = True
        if _SHAPED_BY_VALUES & {*func.tags} and not _is_index_of_integers(func, args):
            self._recorder.sized = True
        result = func(*args, **(kwargs or {}))
        for tensor in _tensors_in(result):
            self._recorder.note_made(tensor)
        return result


_SHAPED_BY_VALUES = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}


def _is_index_of_integers(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether an operator takes elements by numbers: the shape of numbers says how many."""
    if func.overloadpacket is not torch.ops.aten.index:
        return False
    masks = (torch.bool, torch.uint8)
    return all(index is None or index.dtype not in masks for index in args[1])


_PICKLED_AS: dict[Any, Any] = {torch.ops.aten.lift_fresh.default: torch.clone}
"""Operators of torch that calls of a forward come down to, and functions that do the same. What
torch makes of an array of NumPy is lifted."""

_CONTEXTS = {torch._C._set_grad_enabled}
_EFFECTS = {"register_hook", "retain_grad", "register_post_accumulate_grad_hook"}
_PLAIN_LEAVES = {
    type(None), bool, int, float, str, bytes, complex, slice, range, type(Ellipsis), torch.Size,
    torch.dtype, torch.device, torch.layout, torch.memory_format,
}  # fmt: skip


def _is_view_getter(func: Any) -> bool:
    """Whether the getter of an attribute of tensors returns a tensor, as that of ``T`` does."""
    owner = getattr(func, "__self__", None)
    return getattr(owner, "__name__", "") in ("T", "H", "mT", "mH", "real", "imag", "data")


def _tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors in a value, in order."""
    return found(value, Tensor)


def _leaves_of(value: Any) -> list[Any]:
    """Return everything in a value that is no container."""
    there: list[Any] = []

    def note(each: Any) -> None:
        if isinstance(each, dict):
            each = each.values()
        elif dataclasses.is_dataclass(each) and not isinstance(each, type | Slot | Held | Carried):
            each = [getattr(each, f.name) for f in dataclasses.fields(each)]
        elif not isinstance(each, tuple | list):
            there.append(each)
            return
        for item in each:
            note(item)

    note(value)
    return there


def _without_foreign(made: Any) -> Any:
    """Return the shape of a result in which objects that cannot be compared are their classes."""

    def plain(each: Any) -> Any:
        return type(each)

    kinds = tuple({type(v) for v in _leaves_of(made)} - _PLAIN_LEAVES - {Slot, Held, Carried})
    return replaced(made, kinds, plain) if kinds else made


def _version_of(tensor: Tensor) -> int:
    """Return the number of changes in place of a tensor."""
    return 0 if tensor.is_inference() else tensor._version


class _NotDense(Exception):
    """A layer has returned a tensor that is not dense; the text says of which kind."""


class _Shaped(NamedTuple):
    """What a layer has made of tensors without values.

    Attributes:
        result: Its result, with zeros in the place of tensors.
        changed: The tensors that it has changed in place.
        moved: Whether it has changed its buffers.
        views: Tensors of the result that lie over the memory of one that it was given, with that.
    """

    result: Any
    changed: list[Tensor]
    moved: bool
    views: list[tuple[Tensor, Tensor]]


def _shapes_of(layer: nn.Module, given: Any, carried: Mapping[int, tuple[str, Any]]) -> _Shaped:
    """Run a layer on the meta device.

    A layer that cannot run there, as it holds tensors in attributes or looks at values, is run on
    the values that there are.

    Args:
        layer: The layer.
        given: Its arguments and keyword arguments.
        carried: The objects in which it may keep something, by ``id``.
    """
    kinds = tuple({type(value) for _, value in carried.values()})

    def attempt(copy_of: Callable[[Tensor], Tensor]) -> _Shaped:
        copies = {number: copy.deepcopy(value) for number, (_, value) in carried.items()}
        mine = replaced(given, kinds, lambda each: copies.get(id(each), each)) if copies else given
        shaped = _run_on(layer, mine, copy_of)
        for number, changed in copies.items():
            vars(carried[number][1]).update(vars(changed))
        return shaped

    try:
        if torch.is_autocast_enabled("cpu"):  # which knows nothing of the meta device
            return attempt(_valued)
        with _without_autocast():
            return attempt(lambda tensor: tensor.detach().to("meta"))
    except (NotImplementedError, RuntimeError, ValueError):
        return attempt(_valued)


@contextmanager
def _without_autocast() -> Iterator[None]:
    """Raise an error where the body turns autocast on, which does nothing on the meta device."""
    before = torch.autocast.__enter__

    def enter(self: Any) -> None:
        if self._enabled:
            raise NotImplementedError("autocast on the meta device")
        before(self)  # type: ignore[no-untyped-call]

    torch.autocast.__enter__ = enter  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.autocast.__enter__ = before  # type: ignore[method-assign]


def _run_on(layer: nn.Module, given: Any, copy_of: Callable[[Tensor], Tensor]) -> _Shaped:
    """Run a layer on copies of its weights, its buffers and its arguments."""
    copies: dict[int, tuple[Tensor, Tensor]] = {}

    def copied(tensor: Tensor) -> Tensor:
        if id(tensor) not in copies:
            copies[id(tensor)] = tensor, copy_of(tensor)
        return copies[id(tensor)][1]

    args, kwargs = replaced(given, (Tensor,), copied)
    taken = list(copies.values())
    buffers = {name: copied(t) for name, t in layer.named_buffers()}
    weights = {name: copied(t) for name, t in layer.named_parameters()}
    before = {id(made): _version_of(made) for _, made in copies.values()}
    with torch.no_grad():
        result = functional_call(layer, {**weights, **buffers}, args, kwargs)
    for each in _tensors_in(result):
        if each.is_nested or each.layout is not torch.strided:
            raise _NotDense("nested" if each.is_nested else "sparse")
    back = {id(made): tensor for tensor, made in taken}

    def zeros(tensor: Tensor) -> Tensor:
        if id(tensor) in back:  # a layer may return what it was given
            return back[id(tensor)]
        like = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
        memory = tensor.untyped_storage()._cdata
        for source, made in taken:  # a view of what the layer was given
            if made.untyped_storage()._cdata == memory and made.numel():
                views.append((like, source))
        # As the result of a layer: it requires a gradient, and is no leaf.
        learns = wanted and (like.is_floating_point() or like.is_complex())
        return like.zero_().requires_grad_() * 1 if learns and not views else like.zero_()

    views: list[tuple[Tensor, Tensor]] = []
    wanted = torch.is_grad_enabled() and (
        any(p.requires_grad for p in layer.parameters()) or any(t.requires_grad for t, _ in taken)
    )
    return _Shaped(
        replaced(result, (Tensor,), zeros),
        [tensor for tensor, made in taken if _version_of(made) != before[id(made)]],
        any(_version_of(buffer) != before[id(buffer)] for buffer in buffers.values()),
        views,
    )


def _valued(tensor: Tensor) -> Tensor:
    """Return a copy of a weight; zeros if it has no values."""
    if tensor.is_meta:
        return torch.zeros_like(tensor, device="cpu")
    return tensor.detach().clone()


def _autocast() -> tuple[str, bool, torch.dtype]:
    """Return whether autocast is on for the CPU, and its dtype."""
    return "cpu", torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")


def _line() -> str:
    """Return the line of the user's code, or of a library that is not torch, that runs now."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if not code.co_filename.startswith(_OURS) and not code.co_filename.startswith("<frozen"):
            return f"{code.co_filename}:{frame.f_lineno} in {code.co_name}"
        frame = frame.f_back
    return "an unknown line"


MANUAL = (
    "Or give Pipeline a list of modules, each of which takes what the one before it gives "
    "(docs/guide/any-model.md shows how)"
)
"""The way out where a forward cannot be followed."""


def _refusal(what: str) -> ConfigError:
    """Make the error about something that the forward does, with its line."""
    return ConfigError(f"the model cannot be cut into stages: at {_line()} {what}. {MANUAL}")


def _inside(layers: Mapping[str, nn.Module]) -> set[int]:
    """Return the ``id`` of each module that is a layer or in one."""
    return {id(each) for layer in layers.values() for each in layer.modules()}


def _refuse_unfit_modules(model: nn.Module, layers: Mapping[str, nn.Module]) -> None:
    """Refuse modules of torch.jit; and compiled modules and hooks where it is taken apart."""
    inside = _inside(layers)
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise ConfigError(
                f"{name or 'the model'} is a module of torch.jit, which keeps its weights where "
                "versions of them cannot be put; give the module as it was before"
            )
        compiled = module._compiled_call_impl is not None or hasattr(module, "_orig_mod")
        if compiled and id(module) not in inside:
            raise ConfigError(
                f"{name or 'the model'} is compiled as a whole, and it is taken apart into layers; "
                "give the model as it was before, and Training(compile=True), with which each "
                "worker compiles its layers"
            )
        hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks)
        if id(module) not in inside and (any(hooks) or module._backward_pre_hooks):
            raise ConfigError(
                f"{name or 'the model'} has hooks, and it is taken apart into layers, so that no "
                f"stage calls it; put them on one of the layers, such as {next(iter(layers), name)}"
            )


@contextmanager
def _mode(model: nn.Module, training: bool | None, modes: Modes) -> Iterator[None]:
    """Set the mode of every module while the body runs, but of those that do not follow it."""
    before = [(module, module.training) for module in model.modules()]
    others = modes.in_training if training else modes.in_eval
    try:
        if training is not None:
            for module, _ in before:
                module.training = training
            for name in others:
                model.get_submodule(name).training = not training
        yield
    finally:
        for module, mode in before:
            module.training = mode


@contextmanager
def _as_it_was(model: nn.Module, layers: Mapping[str, nn.Module]) -> Iterator[None]:
    """Leave the model and the random generators as they were, and refuse what is kept in between.

    Raises:
        ConfigError: The forward has changed an attribute of a module outside of the layers, or has
            drawn random numbers of Python or NumPy.
    """
    inside = _inside(layers)
    before = [
        (name, module, dict(vars(module)), {k: dict(vars(module)[k]) for k in _DICTS})
        for name, module in model.named_modules()
    ]
    contents = [
        (name, module, key, value, copy.copy(value))
        for name, module in model.named_modules()
        for key, value in vars(module).items()
        if type(value) in (list, dict, set) and key not in _DICTS and not key.endswith("_hooks")
    ]
    drawn = torch.get_rng_state(), random.getstate(), np.random.get_state()
    seed = torch.initial_seed()
    changed: list[str] = []
    finished = False

    def note(module: nn.Module, name: str, key: str) -> None:
        if id(module) not in inside:  # a layer may keep what it likes
            changed.append(f"{key!r} of {name or 'the model'}")

    try:
        yield
        finished = True
    finally:
        for name, module, attributes, dicts in before:
            now = vars(module)
            for key, entries in dicts.items():
                if not _same_content(now[key], entries):
                    note(module, name, key.strip("_"))
                    now[key].clear()
                    now[key].update(entries)
            for key in [*now]:
                same = key in attributes and now[key] is attributes[key]
                if not same and key not in ("training", *_DICTS):
                    note(module, name, key)
                if key not in attributes:
                    del now[key]
            now.update(attributes)
        for name, module, key, value, content in contents:
            if not _same_content(value, content):
                note(module, name, key)
                value.clear()
                value.extend(content) if isinstance(value, list) else value.update(content)
        python, numpy = random.getstate(), np.random.get_state()
        seeded = torch.initial_seed() != seed
        torch.set_rng_state(drawn[0])
        random.setstate(drawn[1])
        np.random.set_state(drawn[2])
    if finished and changed:
        raise ConfigError(
            f"the model cannot be cut into stages: its forward changes the attribute {changed[0]}, "
            "and no stage has the whole module. Keep such state in a layer that has it to itself, "
            f"or in a buffer of one. {MANUAL}"
        )
    if finished and seeded:
        raise ConfigError(
            "the model cannot be cut into stages: its forward calls torch.manual_seed, which would "
            "hold for one stage alone; every step is seeded by itself, by the number of the "
            f"micro-batch and its name. {MANUAL}"
        )
    if finished and (python != drawn[1] or str(numpy) != str(drawn[2])):
        raise ConfigError(
            "the model cannot be cut into stages: its forward draws random numbers of Python or "
            "NumPy, so its way differs from call to call. Draw them with torch inside a layer. "
            f"{MANUAL}"
        )


def _same_content(one: Any, other: Any) -> bool:
    """Whether two lists, dicts or sets have the same objects in them."""
    if isinstance(one, set):
        return bool(one == other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(one[key] is other[key] for key in one)
    return len(one) == len(other) and all(a is b for a, b in zip(one, other, strict=True))


_DICTS = ("_parameters", "_buffers", "_modules")
