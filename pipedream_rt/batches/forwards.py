"""What the forwards of a model do, and what of their inputs goes to which stage.

There are two ways to cut a model. A *sequence* of layers is cut between two of them; what passes is
what a layer returns. Of any other model, forwards are recorded (`models/recording.py`): one for
each mode and each signature of the inputs: their shapes, and what is no tensor in them. A
recorded forward is a program with a number; a stage gets a program together with the first
micro-batch that follows it.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, NamedTuple, Protocol, TypeAlias

import msgpack
import torch
from torch import Tensor, nn

from pipedream_rt.batches.items import Batch
from pipedream_rt.errors import ConfigError
from pipedream_rt.messages.message import MicroBatch, Mode
from pipedream_rt.messages.tree import Structure, flat_copy, unflatten
from pipedream_rt.models import dumps
from pipedream_rt.models.cut import Cut, Routes, StageProgram, cut
from pipedream_rt.models.label_counts import Counting, counting
from pipedream_rt.models.modes import Modes
from pipedream_rt.models.program import NONE_CARRIED, Program, Slot
from pipedream_rt.models.recording import record
from pipedream_rt.schedules import COORDINATOR
from pipedream_rt.schedules.edges import Address, name_of
from pipedream_rt.stage.spec import has_own_loss, own_loss

Share: TypeAlias = tuple[Address, Structure, tuple[Tensor, ...]]
"""The share of one stage of the inputs: its address, the structure of a value, its tensors."""

TOTAL = "num_items_in_batch"
"""The argument of a forward by which a loss is told what the whole mini-batch weighs."""

_MOST = 4096
"""Programs that a model may have. One with more makes a new one for every mini-batch."""


class Fed(NamedTuple):
    """The flattened inputs of a micro-batch, of which each stage gets its share.

    Attributes:
        program: The number of its program; 0 for a sequence.
        definition: The pickled program, if the stages do not have it yet; else empty.
        tensors: Copies.
        labels: The number of labels that the model's own loss is a mean over; None if not known.
        only_labels: Whether that loss is such a mean and nothing else.
    """

    program: int
    definition: bytes
    structure: Structure
    tensors: tuple[Tensor, ...]
    labels: int | None = None
    only_labels: bool = False


@dataclass(slots=True)
class Cache:
    """What the script knows of the caches of keys and values that the stages have.

    Attributes:
        name: The keyword argument of the model that takes the cache.
        value: A cache of `transformers` with the layers of all stages; its tensors have no values.
    """

    name: str
    value: Any

    def grow(self, length: int) -> None:
        """Grow as a forward over so many positions would let it grow."""
        for layer in self.value.layers:
            if getattr(layer, "keys", None) is not None:
                new = [
                    torch.empty(
                        (*t.shape[:-2], length, t.shape[-1]), dtype=t.dtype, device=t.device
                    )
                    for t in (layer.keys, layer.values)
                ]
                layer.update(*new)


class Forwards(Protocol):
    """What the forwards of a model do.

    Attributes:
        own_loss: Whether the model computes its loss itself.
        takes_total: Whether its forward has the argument `TOTAL`.
        dtype: The coarsest dtype in which it computes.
        layers: The modules that stay whole, by name; empty for a sequence.
        definitions: The pickled programs that were made since the start.
        first_defined: The number of the first of these.
    """

    own_loss: bool
    is_sequence: bool
    takes_total: bool
    dtype: torch.dtype
    layers: dict[str, nn.Module]
    definitions: list[bytes]
    first_defined: int

    @property
    def how(self) -> str:
        """How the model was cut, in words."""

    def fed(self, batch: Batch, mode: Mode, training: bool | None) -> Fed:
        """Flatten the inputs of a micro-batch, and find or record its program."""

    def shares(self, head: MicroBatch, tensors: Sequence[Tensor]) -> Iterator[Share]:
        """Yield the share of each stage that takes inputs of a micro-batch."""

    def cached(self, batch: Batch, cache: Cache, length: int) -> Fed:
        """As `fed`, for inference with a cache, which grows by `length` positions."""

    def stage_programs(self, stage: int) -> tuple[StageProgram, ...]:
        """Return the programs with which a stage begins; none for a sequence of layers."""

    def program(self) -> str:
        """Return the first program as text, stage by stage."""


@dataclass(slots=True)
class SequenceForwards:
    """The forwards of a sequence of layers: one program, which every stage knows."""

    own_loss: bool = False
    is_sequence: bool = True
    takes_total: bool = False
    dtype: torch.dtype = torch.float32  # read only where the model computes its loss itself
    layers: dict[str, nn.Module] = field(default_factory=dict)
    definitions: list[bytes] = field(default_factory=list)
    first_defined: int = 1

    @property
    def how(self) -> str:
        return "cut between the layers of a sequence"

    def program(self) -> str:
        return "the layers are called one after another"

    def fed(self, batch: Batch, mode: Mode, training: bool | None) -> Fed:
        if len(batch.args) != 1 or batch.kwargs:
            raise ConfigError(
                "a sequence of layers takes pairs (x, y), of which x goes to the first layer; it "
                "may be a tuple or a dict: prepare=lambda item: (item, item['labels'])"
            )
        return Fed(0, b"", *flat_copy(batch.args[0]))

    def cached(self, batch: Batch, cache: Cache, length: int) -> Fed:
        raise ConfigError("a sequence of layers has no cache, so it cannot generate")

    def shares(self, head: MicroBatch, tensors: Sequence[Tensor]) -> Iterator[Share]:
        yield 0, head.structure, tuple(tensors)

    def stage_programs(self, stage: int) -> tuple[StageProgram, ...]:
        return ()


class RecordedForwards:
    """The recorded forwards of a model.

    Attributes:
        homes: The stage of each layer that was called so far, by name.
        cuts: The programs so far, cut into stages, by number.
    """

    is_sequence: bool = False

    def __init__(
        self,
        model: nn.Module,
        layers: dict[str, nn.Module],
        own_loss: bool,
        autocast: torch.dtype | None = None,
        modes: Modes = Modes(),  # noqa: B008 - a tuple
    ) -> None:
        self._model = model
        self._modes = modes
        self.layers = layers
        self.own_loss = own_loss
        self.takes_total = TOTAL in inspect.signature(model.forward).parameters
        self._autocast = autocast
        dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()}
        self.dtype = min({autocast or torch.float32, *dtypes}, key=lambda dtype: dtype.itemsize)
        self._given = without_cache(model)
        # By signature; several where a forward goes by values that it reads from its inputs.
        self._programs: dict[bytes, list[tuple[int, Program]]] = {}
        self._countings: dict[int, Counting | None] = {}  # by number of a program
        # Of forwards with a cache: programs by signature and content; by signature, the one that
        # was taken last, and the one that holds for all lengths of the cache.
        self._by_content: dict[bytes, int] = {}
        self._last: dict[bytes, int] = {}
        self._for_all_lengths: dict[bytes, tuple[int, Program]] = {}
        self._num_stages = 1
        self._links: set[tuple[int, int]] = set()
        self._entries: set[int] = set()
        self._has: list[set[str]] = []  # by stage, the names of what it was sent
        self._began = False
        self.homes: dict[str, int] = {}
        self.cuts: list[Cut] = []
        self.definitions: list[bytes] = []
        self.first_defined = 0

    @property
    def how(self) -> str:
        guards = sum(len(p.guards) for programs in self._programs.values() for _, p in programs)
        reads = f", {guards} values of inputs are read" if guards else ""
        return f"cut by a recorded forward: {len(self.cuts)} programs so far{reads}"

    def program(self) -> str:
        lines = []
        for stage, program in enumerate(self.cuts[0].stages):
            for source, slots in program.takes.items():
                lines.append(f"stage {stage} takes {list(slots)} from {name_of(source)}")
            lines += [f"    {step}" for step in program.steps]
            for target, slots in program.gives.items():
                lines.append(f"stage {stage} gives {list(slots)} to {name_of(target)}")
        return "\n".join([*lines, f"    return {self.cuts[0].stages[-1].output!r}"])

    def record(
        self,
        batch: Batch,
        mode: Mode,
        training: bool | None = None,
        carried: Mapping[str, Any] = NONE_CARRIED,
    ) -> Program:
        """Record a forward; refuse one that has no loss where the model has to compute it."""
        program = record(
            self._model,
            self.layers,
            batch.args,
            {**self._given, **batch.kwargs},
            training=False if mode in _EVAL else training,
            grad=mode is Mode.TRAIN,
            autocast=self._autocast,
            carried=carried,
            modes=self._modes,
        )
        if mode.has_target and self.own_loss and not has_own_loss(program.output):
            raise ConfigError(
                "loss_fn is not given, and what the model returns has no loss: give loss_fn, or "
                "the inputs with which the model computes one (such as labels)"
            )
        return program

    def begin(self, batch: Batch, programs: dict[Mode, Program], firsts: Sequence[str]) -> None:
        """Cut the programs of an example at `firsts`, the first layers of the stages from 1 on."""
        self._num_stages = len(firsts) + 1
        self.homes.update({name: stage for stage, name in enumerate(firsts, 1)})
        structure, tensors = flat_copy((batch.args, batch.kwargs))
        for mode, program in programs.items():
            self._add(_key(mode, None, structure, tensors), program)
        self._links = {link for each in self.cuts for link in each.links}
        self._entries = {stage for each in self.cuts for stage in each.entries}
        of_cuts = zip(*(each.used for each in self.cuts), strict=True)
        self._has = [set().union(*of_stage) for of_stage in of_cuts]
        self._began = True
        self.first_defined = len(self.cuts)

    @property
    def links(self) -> tuple[tuple[int, int], ...]:
        """The pairs of a producer and a consumer."""
        return tuple(sorted(self._links))

    @property
    def entries(self) -> tuple[int, ...]:
        """The stages that take inputs of the model."""
        return tuple(sorted(self._entries))

    def stage_programs(self, stage: int) -> tuple[StageProgram, ...]:
        return tuple(each.stages[stage] for each in self.cuts)

    def fed(self, batch: Batch, mode: Mode, training: bool | None) -> Fed:
        structure, tensors = flat_copy((batch.args, batch.kwargs))
        key = _key(mode, training, structure, tensors)
        known = (found for found in self._programs.get(key, ()) if found[1].holds_for(tensors))
        number, program = next(known, (-1, None))
        definition = b""
        if program is None:
            args, kwargs = unflatten(structure, tensors)
            program = self.record(Batch(args, kwargs, None), mode, training)
            number, definition = self._new(key, program)
        labels, only = None, False
        if self.own_loss and mode.has_target:
            if number not in self._countings:
                self._countings[number] = counting(program)
            if how := self._countings[number]:
                labels, only = how.of(tensors), own_loss(program.output, None) == Slot(how.mean)
        return Fed(number, definition, structure, tensors, labels, only)

    def _new(self, key: bytes, program: Program) -> tuple[int, bytes]:
        """Add a program that stages do not have yet; return its number and its definition."""
        number = self._add(key, program)
        definition = dumps(self.cuts[number].stages)[0]
        self.definitions.append(definition)
        return number, definition

    def cached(self, batch: Batch, cache: Cache, length: int) -> Fed:
        structure, tensors = flat_copy((batch.args, batch.kwargs))
        before = cache.value.get_seq_length()
        how = b"cached" if before else b"cached, at first"
        key = how + _key(Mode.INFER, None, structure, tensors)
        # What a cache holds may change the forward, so each is recorded until two in a row, with
        # different lengths in the cache, give the same program. That one then serves other lengths
        # too. It is recorded again at powers of two, and always where layers see only a window of
        # the cache. Only of transformers' models is it known that they look at no other length.
        known = type(self._model).__module__.startswith("transformers.")
        looks = not known or before & (before - 1) == 0 or any(cache.value.is_sliding)
        if key in self._for_all_lengths and not looks:
            number, program = self._for_all_lengths[key]
            if program.holds_for(tensors):
                cache.grow(length)
                return Fed(number, b"", structure, tensors)
        args, kwargs = unflatten(structure, tensors)
        program = self.record(
            Batch(args, kwargs, None), Mode.INFER, carried={cache.name: cache.value}
        )
        if before:  # `carries` would begin a new cache on the stages
            program = dataclasses.replace(program, carries={})
        content, definition = blake2b(key + dumps(program)[0]).digest(), b""
        if content not in self._by_content:
            self._by_content[content], definition = self._new(key, program)
        number = self._by_content[content]
        if self._last.get(key) == number:
            self._for_all_lengths[key] = number, program
        else:
            self._for_all_lengths.pop(key, None)
        self._last[key] = number
        return Fed(number, definition, structure, tensors)

    def shares(self, head: MicroBatch, tensors: Sequence[Tensor]) -> Iterator[Share]:
        stages = self.cuts[head.program].stages
        for stage in self.entries:
            slots = stages[stage].takes.get(COORDINATOR, ())
            structure: Structure = ["t", [["T", i] for i in range(len(slots))]]
            if len(slots) == 1:
                structure = ["T", 0]
            yield stage, structure, tuple(tensors[slot] for slot in slots) if tensors else ()

    def _add(self, key: bytes, program: Program) -> int:
        """Cut a program, and return its number."""
        if len(self.cuts) >= _MOST:
            raise ConfigError(
                f"the model has taken {_MOST} ways so far: the shapes of its inputs, or what it "
                "reads from them, differ in every mini-batch. Pad the inputs to a few lengths"
            )
        homes = dict(self.homes)  # a copy: a program that is refused leaves no trace
        ways = Routes(self._links, self._entries) if self._began else None
        made = cut(program, homes, self._num_stages, ways)
        if self._began:
            self._require_fit(made, homes)
        self.homes = homes
        self.cuts.append(made)
        self._programs.setdefault(key, []).append((len(self.cuts) - 1, program))
        return len(self.cuts) - 1

    def _require_fit(self, made: Cut, homes: dict[str, int]) -> None:
        """Refuse a program that uses what its stage was not sent."""
        if new := sorted(homes.keys() - self.homes.keys()):
            raise ConfigError(
                f"this mini-batch makes the model call {', '.join(new)}, which it did not call "
                "with the example, so no stage has it; give an example= that uses all layers"
            )
        for stage, used in enumerate(made.used):
            if missing := sorted(used - self._has[stage]):
                raise ConfigError(
                    f"this mini-batch makes the model use {', '.join(missing)} on stage {stage}, "
                    "which it did not with the example, so the stage has it not; give such a "
                    "mini-batch as example="
                )


_EVAL = (Mode.EVALUATE, Mode.EVALUATE_AND_KEEP, Mode.INFER)


def _key(
    mode: Mode, training: bool | None, structure: Structure, tensors: Sequence[Tensor]
) -> bytes:
    """Return the signature of inputs and of the mode in which the model takes them."""
    how = ["eval"] if mode in _EVAL else [mode is Mode.TRAIN, training]
    of_tensors = [[str(t.dtype), list(t.shape), list(t.stride())] for t in tensors]
    key: bytes = msgpack.packb([how, structure, of_tensors])
    return key


def without_cache(model: nn.Module) -> dict[str, Any]:
    """Return what keeps a Hugging Face model from filling a cache of keys and values."""
    # Its layers would fill it one after another, and only generation uses it.
    parameters = inspect.signature(model.forward).parameters
    takes = "use_cache" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    config = getattr(model, "config", None)
    return {"use_cache": False} if takes and hasattr(config, "use_cache") else {}


def sizes_of(program: Program, layers: dict[str, nn.Module]) -> dict[str, int]:
    """Return the number of parameters of each layer that a program calls, in order."""
    seen: set[int] = set()  # a parameter that several layers have counts for the first of them
    sizes = {}
    for name in program.layers():
        own = [p for p in layers[name].parameters() if id(p) not in seen]
        seen.update(map(id, own))
        sizes[name] = sum(p.numel() for p in own)
    return sizes


def default_example(model: nn.Module) -> Batch | None:
    """Return the example that a model brings along, as those of Hugging Face do; else None."""
    inputs = getattr(model, "dummy_inputs", None)
    if isinstance(inputs, dict) and all(
        isinstance(v, Tensor | int | bool) for v in inputs.values()
    ):
        return Batch((), dict(inputs), None)
    return None
