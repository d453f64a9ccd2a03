"""Recording a forward of a model: what it does between its layers becomes a program.

The forward of the user's model is called once with example inputs. While it runs,

- every function of torch outside of the layers is called as usual and noted
  (``torch.overrides.TorchFunctionMode``),
- every layer is only asked for the shapes of its outputs: it runs on the meta device, where nothing
  is computed, and the forward goes on with zeros of these shapes.

What Python does between the layers happens once, now: loops, conditions on shapes and options,
lists of results. So a program holds for one *signature* of the inputs: their shapes, their dtypes,
and the values that are not tensors. The recorder looks for what else a forward may depend on, and
refuses it with its line: values of tensors that layers have made, Python's random numbers,
attributes that the forward changes. Values of the inputs may be read; they become guards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from itertools import zip_longest
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from pipedream_rt.containers import is_sparse, parts_of_sparse, sparse_of
from pipedream_rt.errors import ConfigError
from pipedream_rt.models.any_sizes import NotSymbolic, Symbols
from pipedream_rt.models.holders import OF_MODULES
from pipedream_rt.models.kept import (
    PLAIN_LEAVES,
    Attempt,
    Kept,
    content_of,
    leaves_of,
    refuse_kept_values,
)
from pipedream_rt.models.layer_shapes import NotDense, shapes_of, valued
from pipedream_rt.models.mark import quick_mark_of_draws_outside, writes_of
from pipedream_rt.models.modes import Modes
from pipedream_rt.models.preserving_state import (
    MANUAL,
    Left,
    as_it_was,
    called_with,
    line_now,
    mode_set,
    refusal,
    refusal_of_change,
    refusal_of_draws,
    refuse_unfit_modules,
)
from pipedream_rt.models.program import (
    NONE_CARRIED,
    STAND_INS,
    CacheRef,
    ContextRef,
    Guard,
    Number,
    Program,
    Slot,
    Step,
    StoredRef,
    found,
    on_device,
    replaced,
    slots_in,
)
from pipedream_rt.models.recurrent import flattening_forbidden
from pipedream_rt.models.settings import settings_of_devices
from pipedream_rt.models.shipping import dumps
from pipedream_rt.models.tensors import home_of, memory_of, named_tensors
from pipedream_rt.models.torch_contexts import TorchContexts, contexts_now, difference
from pipedream_rt.models.work import work_of
from pipedream_rt.torch_private import TorchDispatchMode, set_grad_enabled

_BATCH, _LAYERS, _DRAWN, _SIZED = 1, 2, 4, 8
"""Flags of what a value depends on: the inputs; layers or weights; random numbers. The last says
that its shape depends on values."""

_OF_SHAPE = {"size", "numel", "nelement", "__len__", "shape", "nbytes", "stride"}
"""The functions and attributes that read the shape of a tensor."""

_CHANGING = {"batch_norm", "instance_norm", "__setitem__", "embedding", "embedding_bag"}
"""Functions that change an argument in place though their names do not end in ``_``."""

_SIZING = {"_pack_padded_sequence"}
"""Functions whose result has a shape that depends on values, though torch does not tag them so."""

_FACTS = {
    "size", "dim", "ndimension", "stride", "numel", "nelement", "is_contiguous", "element_size",
    "is_floating_point", "is_complex", "is_signed", "is_conj", "is_neg", "is_inference",
    "storage_offset", "get_device", "type", "__len__", "is_same_size", "is_pinned", "is_shared",
    "has_names", "result_type", "can_cast", "is_tensor", "is_storage", "__hash__", "__dir__",
    "__deepcopy__", "_is_view", "is_coalesced", "_is_zerotensor", "__torch_function__",
}  # fmt: skip
"""The functions that read only what the signature of the inputs decides."""

_PLACES = {"data_ptr", "storage", "untyped_storage", "is_set_to"}
"""The functions that read where a tensor lies in memory."""


class _Tag:
    """The facts about a tensor that the forward has seen.

    Attributes:
        depends: Flags, such as `_BATCH`.
        after: The numbers of the steps that have changed it in place, through any tensor over it.
    """

    __slots__ = ("after", "depends", "slot")

    def __init__(self, slot: int, depends: int) -> None:
        self.slot = slot
        self.depends = depends
        self.after: set[int] = set()


def record(
    model: nn.Module,
    layers: Mapping[str, nn.Module],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    training: bool | None = None,  # the mode of all modules but `modes`; None for as they are
    grad: bool = True,
    autocast: torch.dtype | None = None,
    carried: Mapping[str, Any] = NONE_CARRIED,
    modes: Modes = Modes(),  # noqa: B008 - a tuple
    read: dict[tuple[str, str], Any] | None = None,
    work: dict[str, int] | None = None,
    symbols: Symbols | None = None,
    kept: Kept | None = None,
) -> Program:
    """Record one forward of a model; the program's inputs are the tensors of ``(args, kwargs)``.

    With ``symbols``, sizes of the inputs and what is computed of them become numbers of it.

    ``read`` gets the values that the forward reads of modules, by the names of module and
    attribute: a program has read them once. The model is afterwards as it was. The objects in
    ``carried`` are as after this forward, with tensors without values. ``kept`` has the state that
    earlier forwards have left. ``work`` gets, by the name of a layer, its work and that of the
    steps up to the next layer, as `work_of` counts it.
    """

    def call(before: Left | None, tells: bool = True) -> tuple[Program, _ForwardRecorder, Left]:
        options = training, grad, autocast, modes
        counted = None if tells else work  # once
        return _recorded(
            model, layers, args, kwargs, carried, symbols, options, before, tells, counted
        )

    def attempt(before: Left | None) -> Attempt:
        _, recorder, left = call(before)
        return Attempt(left, recorder.does)

    program, recorder, left = call(None, tells=False)
    if left.values:
        if carried or symbols is not None:
            raise refusal_of_change(left)
        refuse_kept_values(left, recorder.goes_by_shapes)
        (Kept() if kept is None else kept).require_alike((training, grad), attempt)
    for (number, key), value in recorder.values.items():
        if read is not None:
            read.setdefault((recorder.all_names[number], key), value)
    # Constants of the program travel from the host; each worker moves them to its device.
    away = home_of(model).type != "cpu"
    there: Program = on_device(program, torch.device("cpu")) if away else program
    return there


def _recorded(
    model: nn.Module,
    layers: Mapping[str, nn.Module],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    carried: Mapping[str, Any],
    symbols: Symbols | None,
    options: tuple[bool | None, bool, torch.dtype | None, Modes],
    before: Left | None,
    tells: bool,
    work: dict[str, int] | None,
) -> tuple[Program, _ForwardRecorder, Left]:
    """Record one forward after what another has left; return what this one leaves too."""
    training, grad, autocast, modes = options
    home = home_of(model)
    inputs: list[Tensor] = []
    by_id: dict[int, Tensor] = {}

    def copied(tensor: Tensor) -> Any:
        if is_sparse(tensor):  # its parts are inputs, of which the first steps make it
            kind, parts = parts_of_sparse(tensor)
            return _Sparse(kind, [copied(part) for part in parts])
        if id(tensor) not in by_id:
            # The forward may change inputs in place; the caller's must stay.
            copy = tensor.detach().to(home, copy=True)
            by_id[id(tensor)] = copy if symbols is None else symbols.input(copy)
            inputs.append(by_id[id(tensor)])
        return by_id[id(tensor)]

    args, kwargs = replaced((tuple(args), dict(kwargs)), (Tensor,), copied)
    recorder = _ForwardRecorder(model, layers, inputs, carried, home.type, symbols, tells, work)
    left = Left()
    at_first = {name: dumps(value)[0] for name, value in carried.items()}
    refuse_unfit_modules(model, layers)
    cast = nullcontext() if autocast is None else torch.autocast(home.type, dtype=autocast)
    with (
        as_it_was(model, layers, left, before),
        mode_set(model, training, modes),
        torch.set_grad_enabled(grad),
        cast,
        flattening_forbidden(model),
    ):
        watch = _Watch(recorder)
        fake = nullcontext() if symbols is None else symbols.entered()
        # Two modes. The recorder sees functions as the code calls them, above autograd and
        # autocast: a stage can call those again. `watch` sees the operators below: they alone tell
        # of every new tensor and every draw. It is inside of `fake`, whose tensors it is to see.
        with recorder.called(), fake, watch, recorder:
            recorder.begin(watch)
            args, kwargs = replaced((args, kwargs), (_Sparse,), lambda each: each.made())
            output = called_with(model, args, {**kwargs, **carried})
        program = recorder.finish(output, at_first)
    return program, recorder, left


def refuse_changing(one: Program, other: Program) -> None:
    """Refuse a model whose forward does something else in two calls with the same inputs."""
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
                "that changes from call to call, such as a counter, an iterator or a clock, or a "
                "cache in a global or a decorator, which would be read once, when the forward is "
                "recorded. Keep it in a buffer of a layer that reads it; a table that goes by "
                f"shapes alone may be an attribute of the model, or be computed anew. {MANUAL}"
            )


def _content_of(step: Step | None) -> Any:
    """Return a value that is equal for two steps that do the same."""
    if step is None:
        return None
    target = step.target
    named = target if isinstance(target, str) else getattr(target, "__qualname__", type(target))

    return step.name, named, content_of((step.args, step.kwargs)), step.slots, step.around


class _ForwardRecorder(TorchFunctionMode):
    """The notes of one forward: steps, guards, and what is known of each tensor.

    Attributes:
        paused: Above 0 in calls that are not the forward's own, which are not noted.
        drew: Whether the call that runs has drawn random numbers; `_Watch` sets it.
        sized: Whether it has made a shape that depends on values; `_Watch` sets it.
        all_names: The names of all modules, by ``id``.
        values: The attributes of modules that the forward itself reads, by ``id`` and key.
        does: If it ``tells``, all that depends on more than the inputs: calls with the content of
            their arguments, values that are read, and the result.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Mapping[str, nn.Module],
        inputs: Sequence[Tensor],
        carried: Mapping[str, Any],
        kind: str,
        symbols: Symbols | None = None,
        tells: bool = False,
        work: dict[str, int] | None = None,
    ) -> None:
        super().__init__()
        self.does: list[Any] = []
        self._tells = tells
        self._order: dict[int, int] = {}  # of the slots that depend on more than inputs
        self.work = work
        self._worked = 0  # by the layer that runs
        self._works = False  # whether one does, and not what is done for its shapes
        self._last_layer = ""
        self._kind, self._symbols = kind, symbols
        self._carried = {id(value): (name, value) for name, value in carried.items()}
        self._carried_kinds = tuple({type(value) for value in carried.values()})
        self.steps: list[Step] = []
        self.guards: list[Guard] = []
        self.paused = 0
        self.drew = self.sized = False
        self._layers = layers
        self._names = {id(layer): name for name, layer in layers.items()}
        self.all_names = {id(module): name for name, module in model.named_modules()}
        # Not the modules that are taken apart: their code may go by their class.
        self._modules = list(
            {id(m): m for layer in layers.values() for m in layer.modules()}.values()
        )
        self._calls: dict[str, int] = {}
        self._slots = 0
        self._inputs = inputs
        # By id, each with a reference to its tensor: an id is used again when a tensor has gone.
        self._tags: dict[int, tuple[ref[Tensor], _Tag]] = {}
        self._made: dict[int, tuple[ref[Tensor], str]] = {}
        self._inside = ""  # the layer that runs for its shapes
        # Attributes of layers, by id: those that the forward reads, each with its line, and those
        # that calls of layers change.
        self._read: dict[tuple[int, str], str] = {}
        self.values: dict[tuple[int, str], Any] = {}
        self._changed: set[tuple[int, str]] = set()
        # Objects that layers have returned and that are no tensors, by id, each with its layer.
        self._foreign: dict[int, tuple[str, Any]] = {}
        # Tensors over each storage: a change in place of one is a change of all of them.
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
                self._names_over.setdefault(memory_of(tensor), []).append(name)
        for tensor in inputs:
            self._tag(tensor, _BATCH)

    # -- tags -----------------------------------------------------------------------------------

    def _tag(self, tensor: Tensor, depends: int) -> int:
        """Give a tensor the next slot, also if it had one."""
        # A function in place returns its argument: a step makes a value, so that one is in a slot
        # of its own, and later steps take it from there.
        tag = _Tag(self._slots, depends)
        self._slots += 1
        self._tags[id(tensor)] = (ref(tensor), tag)
        over = self._over.setdefault(memory_of(tensor), [])
        over[:] = [each for each in over if each() is not None and each() is not tensor]
        over.append(ref(tensor))
        return tag.slot

    def tag_of(self, tensor: Tensor) -> _Tag | None:
        """Return the facts about a tensor; None if it is neither an input nor made by a step."""
        there = self._tags.get(id(tensor))
        return there[1] if there is not None and there[0]() is tensor else None

    def note_made(self, tensor: Tensor) -> None:
        """Note that a tensor was made during the forward, by any means."""
        self._made[id(tensor)] = ref(tensor), self._inside

    def note_work(self, amount: int) -> None:
        """Note work of the layer that runs, or else of the steps behind the last layer."""
        if self._works:
            self._worked += amount
        elif self.work is not None and self._last_layer and not self._inside:
            self.work[self._last_layer] += amount

    @contextmanager
    def _working(self) -> Iterator[None]:
        """Count the work of a layer in the body, and not that of an attempt before."""
        self._worked, self._works = 0, True
        try:
            yield
        finally:
            self._works = False

    def _is_held(self, tensor: Tensor) -> bool:
        """Whether a tensor is a weight or a buffer, or shares the memory of one, as ``.data``."""
        return id(tensor) in self._held or memory_of(tensor) in self._names_over

    def _maker_of(self, tensor: Tensor) -> str | None:
        """Return the layer that made a tensor, "" outside of layers; None before the forward."""
        there = self._made.get(id(tensor))
        return there[1] if there is not None and there[0]() is tensor else None

    def _seen(self, value: Any) -> tuple[Any, int, set[int]]:
        """Return a value with stand-ins, its flags, and the steps that have changed it in place."""
        depends, after = 0, set()

        def stand_in(tensor: Any) -> Any:
            nonlocal depends
            if id(tensor) in self._carried:
                depends |= _LAYERS
                return CacheRef(self._carried[id(tensor)][0])
            if isinstance(tensor, nn.Module):
                depends |= _LAYERS
                return self._module(tensor)
            if self._symbols is not None and isinstance(tensor, _SYMBOLIC):
                return self._symbols.number(tensor)
            if not isinstance(tensor, Tensor):
                return tensor
            if (tag := self.tag_of(tensor)) is not None:
                depends |= tag.depends
                after.update(tag.after)
                return Slot(tag.slot)
            if id(tensor) in self._held:
                depends |= _LAYERS
                return StoredRef(self._held[id(tensor)])
            if maker := self._maker_of(tensor):
                raise refusal(
                    f"a tensor is used that layer {maker!r} has made and handed on in another way "
                    "than by returning it, as a hook does that collects outputs. Let the layer "
                    "return it; of a model of transformers, set output_hidden_states, "
                    "output_attentions and output_router_logits to False, in its config too"
                )
            if maker is not None:
                raise refusal(
                    "a tensor was made in a way that cannot be followed, for instance by NumPy or "
                    "in a transform of torch.func"
                )
            if tensor.requires_grad:
                raise refusal(
                    "the forward uses a tensor that requires a gradient and is no parameter of the "
                    "model; make it an nn.Parameter of a module"
                )
            return tensor

        kinds: tuple[type, ...] = (Tensor, nn.Module, *self._carried_kinds)
        kinds += () if self._symbols is None else _SYMBOLIC
        return replaced(value, kinds, stand_in), depends, after

    def goes_by_shapes(self, tensor: Tensor) -> bool:
        """Whether a tensor depends on the shapes of the inputs alone."""
        tag = self.tag_of(tensor)
        made = tag is not None or self._maker_of(tensor) is not None
        known = tag is not None and not tag.depends
        return not tensor.requires_grad and (known or not made)

    def _told(self, value: Any) -> str:
        """Return the content of a value, with numbers for what depends on more than the inputs."""
        if not self._tells:
            return ""

        def stand_in(each: Any) -> Any:
            tag = self.tag_of(each) if isinstance(each, Tensor) else None
            if tag is not None and tag.slot in self._order:
                return Slot(self._order[tag.slot])
            if isinstance(each, nn.Module) or id(each) in self._held:
                return StoredRef(self._held.get(id(each), self.all_names.get(id(each), "")))
            return each

        return content_of(replaced(value, (Tensor, nn.Module), stand_in))

    def _module(self, module: nn.Module) -> Any:
        """Return the stand-in of a module that is passed on; stages then share it."""
        name = self.all_names.get(id(module))
        if name is None:  # the forward has made it
            return module
        if any(layer == name or name.startswith(f"{layer}.") for layer in self._layers):
            return StoredRef(name)
        raise refusal(
            f"the module {name or 'of the whole model'!r} is passed on, and it is taken apart into "
            "layers, so that no stage has it; pass one of its layers, or the values that are needed"
        )

    # -- functions ------------------------------------------------------------------------------

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Call a function of torch; note it if the forward has called it, outside of layers."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", str(func))
        if self.paused or func in _CONTEXTS:
            return func(*args, **kwargs)
        if name == "backward":
            raise refusal(
                "backward() is called in the forward, which no stage can do for layers of others; "
                "put the lines into an nn.Module of their own, which is then a layer"
            )
        if name == "__set__":
            attribute = func.__self__.__name__
            if attribute != "requires_grad":
                raise refusal(f"the forward sets the attribute {attribute!r} of a tensor")
            return self.__torch_function__(Tensor.requires_grad_, types, args, {})
        if name == "__iter__":  # as one step, whose results are the rows
            return iter(self.__torch_function__(Tensor.unbind, types, args, {}))
        if name in _PLACES and self._seen(args)[1]:
            raise refusal(
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
        """Note or refuse a read of a shape that depends on values."""
        tag = self.tag_of(args[0]) if args and isinstance(args[0], Tensor) else None
        if tag is not None and tag.depends & _SIZED:
            given, depends, after = self._seen((args, kwargs))
            self._reads(func, name, given, depends, after, fact)

    def _function(
        self, func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Call and note a function."""
        func = _PICKLED_AS.get(func, func)
        self._refuse_contexts(f"{name.strip('_')}()")
        given, depends, after = self._seen((args, kwargs))
        told = self._told((args, kwargs))
        if any(isinstance(value, torch.Generator) for value in leaves_of((args, kwargs))):
            raise refusal(
                f"{name}() draws from a torch.Generator, which a worker would have a copy of; let "
                "it draw from the default generator, which is seeded for each step"
            )
        changing = name.endswith("_") and not name.endswith("__")
        changing = changing or name in _CHANGING or name.startswith("__i") or "out" in kwargs
        # In the place of tensors without values, and of weights and buffers that the function
        # changes: those of the model must stay.
        copies: dict[int, Tensor] = {}

        def own(tensor: Tensor) -> Tensor:
            if tensor.is_meta or (changing and self._is_held(tensor)):
                made = copies[id(tensor)] = valued(tensor)
                return made.requires_grad_(tensor.requires_grad and tensor.is_leaf)
            return tensor

        tensors = list({id(t): t for t in _tensors_in((args, kwargs))}.values())
        called_with = replaced((args, kwargs), (Tensor,), own)
        # The version counter shows which tensors the function changes, whatever its name says.
        versions = [writes_of(copies.get(id(t), t)) for t in tensors]
        self.drew = self.sized = False
        self.paused += 1  # it may call other functions of torch, which are a part of its step
        try:
            if self._symbols is not None and depends and name in _READING:
                result = self._symbols.read(func)  # tensors have no values now
            else:
                result = func(*called_with[0], **called_with[1])
        finally:
            self.paused -= 1
        changed = [
            t
            for t, before in zip(tensors, versions, strict=True)
            if writes_of(copies.get(id(t), t)) != before
        ]
        depends |= _SIZED if self.sized or name in _SIZING else 0
        results = _tensors_in(result)
        if not results and not changed and name not in _EFFECTS:
            self._reads(func, name, given, depends | (_DRAWN if self.drew else 0), after, result)
            return result
        target, made = (_Silent(func), None) if name in _EFFECTS else (func, result)
        self._add(
            f"({name})", target, given, made, results, depends, after, changed,
            random=self.drew, told=told,
        )  # fmt: skip
        return result

    def _reads(
        self, func: Any, name: str, given: Any, depends: int, after: set[int], value: Any
    ) -> None:
        """Note or refuse a read of values of tensors: the forward may branch on them."""
        if not depends:  # a constant, the same in every forward
            return
        if "nested_tensor" in name:
            raise refusal(
                "a nested tensor is made, as nn.TransformerEncoder does in eval mode where a mask "
                "leaves something out; build it with enable_nested_tensor=False"
            )
        if depends & (_LAYERS | _DRAWN):
            of = "layers have computed" if depends & _LAYERS else "were drawn at random"
            layerdrop = "; of a model of transformers, set layerdrop to 0, in its config"
            raise refusal(
                f"{name.strip('_')}() reads values that {of}, so the way of the forward depends "
                "on data. Let a layer do this, so that it is decided where the values are: move "
                "the lines that depend on it into an nn.Module of their own"
                f"{'' if depends & _LAYERS else layerdrop}"
            )
        if not isinstance(value, bool | int | float | list | tuple):
            raise refusal(f"{name.strip('_')}() takes values of the inputs out of torch")
        args, kwargs = given
        steps = self._leading_to(slots_in(given), after)
        self.does.append((getattr(func, "__name__", ""), value))
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
        told: str,
        moves: tuple[str, ...] = (),
        where: str | None = None,
    ) -> None:
        """Add a step, and give its results their slots."""
        self._refuse_foreign(given)
        if quick_mark_of_draws_outside() != self._drawn:
            raise refusal_of_draws(f"before {line_now()} ")
        if not isinstance(target, str):
            self._objects_in(given)  # refuses what cannot be pickled; of layers that was done
        number = len(self.steps)
        changes = []
        for tensor in changed:
            tag = self.tag_of(tensor)
            if tag is not None:
                changes.append(tag.slot)
            for alias in self._over.get(memory_of(tensor), []):
                other = alias()
                mine = self.tag_of(other) if other is not None else None
                if mine is not None:
                    mine.after.add(number)
                    mine.depends |= depends & ~_SIZED  # a change in place changes no shape
        if changed and not changes and not any(map(self._is_held, changed)):
            raise refusal(
                "the forward changes in place a tensor that is there before it, and neither a "
                "buffer nor an input; register it as a buffer of a layer that changes it"
            )
        depends |= _DRAWN if random else 0
        is_layer = isinstance(target, str)
        fixed = is_layer and not depends & _SIZED
        slots: list[int] = []
        same = {id(t) for t in changed}

        def slot_of(tensor: Tensor) -> Slot:
            # A tensor that was changed in place keeps its shape.
            mask = ~_SIZED if id(tensor) in same else ~0
            return Slot(self._result(tensor, depends & mask, slots))

        made = replaced(result, (Tensor,), slot_of)
        if self._symbols is not None and found(made, *_SYMBOLIC):
            raise NotSymbolic(f"{name} returns what is computed of sizes")
        free = not depends & (_LAYERS | _DRAWN) and name not in _EFFECTS
        if self._tells and not free:
            self.does.append((name, told, self._around()))
            for slot in slots:
                self._order[slot] = len(self._order)
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
                kinds=tuple((self._sizes_of(t), t.dtype) for t in results) if fixed else (),
                random=random or is_layer,
                free=free,
                after=tuple(sorted(after)),
                changes=tuple(changes),
                changes_held=tuple(
                    name
                    for tensor in changed
                    for name in self._names_over.get(memory_of(tensor), ())
                ),
                moves=moves,
                around=self._around(),
                where=line_now() if where is None else where,
            )
        )

    def _sizes_of(self, tensor: Tensor) -> tuple[int | Number, ...]:
        """Return the shape of a layer's result."""
        symbols = self._symbols
        if symbols is None:
            return tuple(tensor.shape)
        return tuple(n if isinstance(n, int) else symbols.number(n) for n in tensor.shape)

    def _result(self, tensor: Tensor, depends: int, slots: list[int]) -> int:
        slots.append(self._tag(tensor, depends))
        return slots[-1]

    def _around(self) -> ContextRef:
        """Return the contexts that the forward has entered itself."""
        grad, cast = torch.is_grad_enabled(), _autocast(self._kind)
        kernels = settings_of_devices()
        return ContextRef(
            None if grad == self._grad else grad,
            None if cast == self._cast else cast,
            tuple(each for each in kernels.items() if each[1] != self._kernels[each[0]]),
        )

    def _refuse_foreign(self, given: Any) -> None:
        """Refuse to pass on an object that a layer has made and that is no tensor."""
        for value in leaves_of(given):
            maker, there = self._foreign.get(id(value), ("", None))
            if there is value and there is not None:
                raise refusal(
                    f"layer {maker!r} returns a {type(value).__name__}, which a later layer takes; "
                    "between layers tensors, numbers and containers of these can pass"
                )

    # -- layers ---------------------------------------------------------------------------------

    @contextmanager
    def called(self) -> Iterator[None]:
        """In the body, record calls of layers by `_layer`, of autograd functions by `_function`."""
        classes: dict[tuple[type, bool], type] = {}
        before = torch.autograd.Function.__dict__["apply"]
        recorder = self

        def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
            original = before.__get__(None, cls)
            if recorder.paused:
                return original(*args, **kwargs)
            # Reentrant checkpointing: the function that is checkpointed comes first.
            if cls.__name__ == "CheckpointFunction":
                return args[0](*args[2:])
            # Within __torch_function__ torch takes the mode off; here the recorder is still on.
            recorder.paused += 1
            try:
                return recorder._function(_Applied(cls), cls.__name__, args, kwargs)
            finally:
                recorder.paused -= 1

        # By subclasses, since Python looks up __call__ on the class, not on the object.
        for module in self._modules:
            cls, is_layer = type(module), id(module) in self._names
            if (cls, is_layer) not in classes:
                methods = {
                    "__getattribute__": self._noting(cls),
                    "__setattr__": self._setting(cls),
                }
                methods |= {"__call__": self._stand_in(cls)} if is_layer else {}
                classes[cls, is_layer] = type(cls.__name__, (cls,), methods)
            module.__class__ = classes[cls, is_layer]

        def grad(*args: Any, **kwargs: Any) -> Any:
            if recorder.paused:
                return derived(*args, **kwargs)
            raise refusal(
                "torch.autograd.grad is called in the forward, which no stage can do for layers of "
                "others; put the lines into an nn.Module of their own, which is then a layer"
            )

        derived, torch.autograd.grad = torch.autograd.grad, grad
        # Patched, as it does not come to __torch_function__.
        torch.autograd.Function.apply = classmethod(apply)  # type: ignore[assignment, method-assign]
        try:
            yield
        finally:
            torch.autograd.grad = derived
            torch.autograd.Function.apply = before  # type: ignore[method-assign]
            for module in self._modules:
                module.__class__ = type(module).__mro__[1]

    def _noting(self, cls: type[nn.Module]) -> Callable[..., Any]:
        """Return a ``__getattribute__`` that notes the attributes of a module that are read."""
        recorder = self

        def read(module: Any, name: str) -> Any:
            value = cls.__getattribute__(module, name)
            if recorder.paused or name in OF_MODULES or hasattr(nn.Module, name):
                return value
            place = id(module), name
            # The first one counts, which the program has read.
            if type(value) in PLAIN_LEAVES:
                recorder.values.setdefault(place, value)
                if place[0] in recorder._names:
                    recorder._read.setdefault(place, line_now())
            elif not callable(value) and name in object.__getattribute__(module, "__dict__"):
                recorder.values.setdefault(place, value)
            return value

        return read

    def _setting(self, cls: type[nn.Module]) -> Callable[..., None]:
        """Return a ``__setattr__`` that refuses changes outside of the layer itself."""
        recorder = self

        def set_(module: Any, name: str, value: Any) -> None:
            held = vars(module)
            places = (held, held["_parameters"], held["_buffers"], held["_modules"])
            now = next((place[name] for place in places if name in place), recorder)
            known = now is value or (
                type(value) in PLAIN_LEAVES and content_of(now) == content_of(value)
            )
            if not (recorder.paused or known or name == "__class__"):
                raise refusal(
                    f"the forward sets the attribute {name!r} of "
                    f"{recorder.all_names.get(id(module), 'a layer')!r}, which is in a layer, and "
                    "the copy on its stage would not see that; pass the value to the layer when "
                    "it is called"
                )
            cls.__setattr__(module, name, value)

        return set_

    def _stand_in(self, cls: type[nn.Module]) -> Callable[..., Any]:
        """Return a ``__call__`` for layers of a class that records the call."""
        recorder = self

        def call(layer: Any, *args: Any, **kwargs: Any) -> Any:
            stand_in = type(layer)
            layer.__class__ = cls  # or the call of the layer below would come here again
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
        name, where = self._names[id(layer)], line_now()
        self._refuse_contexts(f"layer {name!r}")
        self._refuse_other_weights(layer, name)
        given, depends, after = self._seen((args, kwargs))
        told = self._told((args, kwargs))
        objects = self._objects_in(given)
        has_weights = any(True for _ in layer.parameters())
        self.drew, self._inside = False, name
        before_it = dict(vars(layer))
        try:
            result, changed, moved, views = shapes_of(
                layer, (args, kwargs), self._carried, self._working
            )
        except NotDense as error:
            raise refusal(
                f"layer {name!r} returns a {error} tensor, which cannot pass between stages; "
                "return a dense one (to_dense, or to_padded_tensor)"
            ) from None
        except Exception as error:
            raise ConfigError(
                f"layer {name!r} ({type(layer).__name__}), called at {where}, does not take what "
                f"the forward gives it: {error}"
            ) from error
        finally:
            self._inside = ""
        if self.work is not None:
            self.work[name] = self.work.get(name, 0) + self._worked
        self._last_layer = name
        # `finish` refuses a forward that reads what a layer changes: a program would read it once.
        for key, kept in vars(layer).items():
            was = before_it.get(key, self)  # self stands for no attribute
            if type(kept) in PLAIN_LEAVES and (type(was) is not type(kept) or was != kept):
                self._changed.add((id(layer), key))
        for value, before in objects:
            if self._pickled(value) != before:
                raise refusal(
                    f"layer {name!r} changes the {type(value).__name__} that it is given, in which "
                    "a later layer may look; between layers tensors, numbers and containers of "
                    "these can pass"
                )
        for value in leaves_of(result):
            if type(value) not in PLAIN_LEAVES and not isinstance(value, Tensor):
                self._foreign[id(value)] = (name, value)  # alive, so that no other gets its id
        calls = self._calls[name] = self._calls.get(name, 0) + 1
        # A layer without weights or state computes alike anywhere: no stage owns its step.
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
            told=told,
            moves=tuple(self._held[id(layer.get_buffer(short))] for short in moved),
            where=where,
        )
        # The zeros have memory of their own, so tell that they stand for views of the arguments.
        for view, source in views:
            for one, other in ((view, source), (source, view)):
                memory = memory_of(one)
                self._over.setdefault(memory, []).append(ref(other))
        return result

    def _refuse_other_weights(self, layer: nn.Module, name: str) -> None:
        """Refuse to call a layer with other weights than its own, as functional_call does."""
        for short, tensor in (*layer.named_parameters(name), *layer.named_buffers(name)):
            if id(tensor) not in self._held:
                raise refusal(
                    f"layer {name!r} is called with another tensor in the place of {short!r}, as "
                    "torch.func.functional_call does, which a stage would not have; write an "
                    "nn.Module that makes such weights and uses them, which is then a layer"
                )

    def _objects_in(self, given: Any) -> list[tuple[Any, bytes]]:
        """Return each argument that is neither tensor nor plain, and its pickle, to see changes."""
        return [
            (value, self._pickled(value))
            for value in leaves_of(given)
            if type(value) not in PLAIN_LEAVES and not isinstance(value, (*STAND_INS, Tensor))
        ]

    def _pickled(self, value: Any) -> bytes:
        """Pickle an object that a step takes; refuse one that no worker could be sent."""
        try:
            data, tensors = dumps(value)
        except Exception as error:  # a foreign class may raise anything when pickled
            raise refusal(
                f"a {type(value).__name__} is passed on that cannot be pickled: {error}; pass "
                "tensors, numbers or containers of these between layers, or make it picklable"
            ) from error
        if any(each in self._tags or each in self._made for each in tensors):
            raise refusal(
                f"a {type(value).__name__} is passed on that holds tensors which the forward has "
                "made; between layers tensors, numbers and containers of these can pass"
            )
        return data

    # -- the whole ------------------------------------------------------------------------------

    def begin(self, watch: object) -> None:
        """Note the contexts around the forward."""
        self._grad, self._cast, self._ours = (
            torch.is_grad_enabled(),
            _autocast(self._kind),
            (self, watch),
        )
        self._before = self._contexts()
        self._kernels = settings_of_devices()
        self._drawn = quick_mark_of_draws_outside()

    def _contexts(self) -> TorchContexts:
        """Return the contexts around the function or layer that is called now."""
        self.paused += 1  # some readers call functions of torch
        try:
            return contexts_now(self._ours)
        finally:
            self.paused -= 1

    def _refuse_contexts(self, what: str) -> None:
        """Refuse to call something under a context that the stages would not be in."""
        if name := difference(self._contexts(), self._before):
            raise refusal(
                f"{what} is called while {name} is on, without which the stages would compute; put "
                "the lines under it into an nn.Module of their own, which is then a layer"
            )

    def finish(self, output: Any, at_first: dict[str, bytes]) -> Program:
        """Return the program of a forward."""
        if parted := [place for place in self._read if place in self._changed]:
            number, key = parted[0]
            raise ConfigError(
                f"the model cannot be cut into stages: at {self._read[parted[0]]} the forward "
                f"reads the attribute {key!r} of layer {self._names[number]!r}, which the layer "
                "changes when it is called, so it would be read once, when the forward is "
                f"recorded. Let the layer return it, or use it itself. {MANUAL}"
            )
        made, _, after = self._seen(output)
        self.does.append(self._told(output))
        # Each stage has its own carried object, so the result has none.
        made = replaced(made, (CacheRef,), lambda _: None)
        self._refuse_foreign(made)
        return Program(
            inputs=len(self._inputs),
            steps=tuple(self.steps),
            output=made,
            after=tuple(sorted(after)),
            guards=tuple(self.guards),
            carries=at_first,
        )


class _Sparse:
    """Stands for a sparse input until its parts are made one again."""

    def __init__(self, kind: Sequence[Any], parts: Sequence[Tensor]) -> None:
        self._kind, self._parts = kind, parts

    def made(self) -> Tensor:
        return sparse_of(self._kind, self._parts)


class _Applied:
    """A target of steps that applies an autograd function; it can be pickled."""

    def __init__(self, cls: Any) -> None:
        self._cls = cls
        self.__name__ = cls.__name__

    def __call__(self, *args: Any) -> Any:
        return self._cls.apply(*args)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Applied) and other._cls is self._cls

    def __hash__(self) -> int:
        return hash(self._cls)


class _Silent:
    """A target of steps that drops its result, as the handle of a hook; it can be pickled."""

    def __init__(self, function: Any) -> None:
        self._function = function
        self.__name__ = function.__name__

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        self._function(*args, **kwargs)


class _Watch(TorchDispatchMode):
    """Tells the recorder of every new tensor, of drawn random numbers and of shapes from values."""

    def __init__(self, recorder: _ForwardRecorder) -> None:
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
        tensors = _tensors_in(result)
        for tensor in tensors:
            self._recorder.note_made(tensor)
        if self._recorder.work is not None:
            self._recorder.note_work(work_of(func, args, kwargs or {}, result, tensors))
        return result


_SHAPED_BY_VALUES = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}


def _is_index_of_integers(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether an operator is an index without masks: the shape of its result is known."""
    if func.overloadpacket is not torch.ops.aten.index:
        return False
    masks = (torch.bool, torch.uint8)
    return all(index is None or index.dtype not in masks for index in args[1])


_PICKLED_AS: dict[Any, Any] = {torch.ops.aten.lift_fresh.default: torch.clone}
"""Operators that a forward comes down to, and the functions that stand for them in a program. torch
calls lift_fresh on what it makes of an array of NumPy."""

_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
_READING = {
    "item", "tolist", "equal", "is_nonzero", "allclose", "numpy", "__bool__", "__int__",
    "__float__", "__index__", "__complex__", "__contains__", "__array__", "__format__", "__repr__",
}  # fmt: skip
"""The functions that read values of tensors."""

_CONTEXTS = {set_grad_enabled}
_EFFECTS = {"register_hook", "retain_grad", "register_post_accumulate_grad_hook"}


def _is_view_getter(func: Any) -> bool:
    """Whether the getter of a tensor's attribute returns a tensor, as that of ``T`` does."""
    owner = getattr(func, "__self__", None)
    return getattr(owner, "__name__", "") in ("T", "H", "mT", "mH", "real", "imag", "data")


def _tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors in a value, in order."""
    return found(value, Tensor)


def _without_foreign(made: Any) -> Any:
    """Return a result with classes in the place of objects that may not compare as equal."""

    def plain(each: Any) -> Any:
        return type(each)

    kinds = tuple({type(v) for v in leaves_of(made)} - PLAIN_LEAVES - {*STAND_INS})
    return replaced(made, kinds, plain) if kinds else made


def _autocast(kind: str) -> tuple[str, bool, torch.dtype]:
    """Return the kind of device, whether autocast is on for it, and its dtype."""
    return kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
