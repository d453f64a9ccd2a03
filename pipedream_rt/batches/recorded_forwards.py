"""Forwards of a model that is no sequence: recorded once for each signature of inputs, then cut."""

from __future__ import annotations

import dataclasses
import inspect
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import torch
from torch import nn

from pipedream_rt.batches.forwards import (
    EVAL,
    TOTAL,
    Cache,
    Followed,
    Share,
    _key,
    _key_of_kind,
    without_cache,
)
from pipedream_rt.batches.items import Batch
from pipedream_rt.errors import ConfigError
from pipedream_rt.messages.head import WITH_LOSS, Mode
from pipedream_rt.messages.tree import Structure, Value, flat_copy, unflatten
from pipedream_rt.models import dumps
from pipedream_rt.models.any_sizes import AnySizes, Shapes, Symbols, any_sizes
from pipedream_rt.models.cut import Cut, Routes, StageProgram, cut
from pipedream_rt.models.kept import Kept
from pipedream_rt.models.label_counts import LabelCount, label_count_of
from pipedream_rt.models.modes import Modes
from pipedream_rt.models.program import NONE_CARRIED, Program, Slot
from pipedream_rt.models.recording import record
from pipedream_rt.models.shipping import classes_kept, copying
from pipedream_rt.schedules import COORDINATOR
from pipedream_rt.schedules.edges import name_of
from pipedream_rt.stage.spec import LossFunction, own_loss
from pipedream_rt.telling import log_of

_log = log_of(__name__)

_MOST = 1024
"""The most programs of a model that are known at a time, beside those of the example; also the most
kinds of inputs. The one that was followed longest ago is forgotten, and recorded again when
needed."""

_FIRST = 3
"""How many programs are recorded before one for any sizes is made of them."""

_ATTEMPTS = 4
"""How often that is tried for inputs of one kind: a forward may branch on sizes."""


@dataclass(slots=True)
class _Kind:
    """Inputs that differ in nothing but their sizes.

    Attributes:
        examples: The shapes and the programs that were recorded last.
        found: The programs for any sizes, by number.
        followed: How many signatures have followed one of these.
    """

    examples: deque[tuple[Shapes, Program]] = field(default_factory=lambda: deque(maxlen=_FIRST))
    found: dict[int, AnySizes] = field(default_factory=dict)
    attempts: int = _ATTEMPTS
    followed: int = 0


def picked(loss_fn: LossFunction, output: Any) -> Slot | None:
    """Return the slot that a loss function picks out of a recorded output; None if it computes."""
    if isinstance(loss_fn, nn.Module):
        return None
    try:
        with classes_kept():  # a copy: it may count its calls
            found = copying(loss_fn)()(output, None)
    except Exception:  # the user's, which computes with tensors
        return None
    return found if isinstance(found, Slot) else None


class RecordedForwards:
    """The recorded forwards of a model.

    Attributes:
        homes: The stage of each layer that was called so far, by name.
        cuts: The programs that are known, cut into stages, by number.
        picks: Picks the loss out of an output, where the model computes it.
    """

    is_sequence: bool = False

    def __init__(
        self,
        model: nn.Module,
        layers: dict[str, nn.Module],
        autocast: torch.dtype | None = None,
        modes: Modes = Modes(),  # noqa: B008 - a tuple
    ) -> None:
        self._model = model
        self._modes = modes
        self.layers = layers
        self.read: dict[tuple[str, str], Any] = {}
        self.own_loss = self.returns_loss = False
        self.picks: LossFunction = own_loss
        self.takes_total = TOTAL in inspect.signature(model.forward).parameters
        self._autocast = autocast
        dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()}
        self.dtype = min({autocast or torch.float32, *dtypes}, key=lambda dtype: dtype.itemsize)
        self._without_cache = without_cache(model)
        # By signature; several where a forward goes by values that it reads from its inputs.
        self._programs: dict[bytes, list[tuple[int, Program]]] = {}
        self._kinds: dict[bytes, _Kind] = {}
        # By number of a program, where it is in one of these; in the order of their last use.
        self._uses: dict[int, bytes] = {}
        self._recent: set[int] = set()  # used since the stages were told last
        self._gone: list[int] = []  # forgotten, and the stages are not told yet
        self._count = 0
        # By number of a program, what counts its labels, and whether its loss is their mean alone.
        self._countings: dict[int, tuple[LabelCount | None, bool]] = {}
        # Of forwards with a cache: programs by signature and content; by signature, the one that
        # was taken last, and the one that holds for all lengths of the cache.
        self._by_content: dict[bytes, int] = {}
        self._last: dict[bytes, int] = {}
        self._for_all_lengths: dict[bytes, tuple[int, Program]] = {}
        self._kept = Kept()
        self._num_stages = 1
        self._links: set[tuple[int, int]] = set()
        self._entries: set[int] = set()
        self._has: list[set[str]] = []  # by stage, the names of what it was sent
        self._began = False
        self.homes: dict[str, int] = {}
        self.cuts: dict[int, Cut] = {}
        self.definitions: dict[int, bytes] = {}

    @property
    def how(self) -> str:
        guards = sum(len(p.guards) for programs in self._programs.values() for _, p in programs)
        reads = f", {guards} values of inputs are read" if guards else ""
        return f"cut by a recorded forward: {self._count} programs so far{reads}"

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
        symbols: Symbols | None = None,
        work: dict[str, int] | None = None,
    ) -> Program:
        """Record a forward; refuse one that has no loss where the model has to compute it."""
        program = record(
            self._model,
            self.layers,
            batch.args,
            {**self._without_cache, **batch.kwargs},
            training=False if mode in EVAL else training,
            grad=mode is Mode.TRAIN,
            autocast=self._autocast,
            carried=carried,
            modes=self._modes,
            read=self.read,
            work=work,
            symbols=symbols,
            kept=self._kept,
        )
        if mode in WITH_LOSS and self.own_loss and picked(self.picks, program.output) is None:
            raise ConfigError(
                "the model is to compute the loss, and what it returns has none: give it the "
                "inputs with which it computes one (such as labels), or another loss_fn"
            )
        return program

    def begin(self, batch: Batch, programs: dict[Mode, Program], firsts: Sequence[str]) -> None:
        """Cut the programs of an example at `firsts`, the first layers of the stages from 1 on."""
        self._num_stages = len(firsts) + 1
        self.homes.update({name: stage for stage, name in enumerate(firsts, 1)})
        inputs = flat_copy(self.inputs(batch))
        for mode, program in programs.items():
            number = self._cut(program)
            self._programs.setdefault(_key(mode, None, inputs), []).append((number, program))
        cuts = self.cuts.values()
        self._links = {link for each in cuts for link in each.links}
        self._entries = {stage for each in cuts for stage in each.entries}
        of_cuts = zip(*(each.used for each in cuts), strict=True)
        self._has = [set().union(*of_stage) for of_stage in of_cuts]
        self._began = True

    @property
    def links(self) -> tuple[tuple[int, int], ...]:
        """The pairs of a producer and a consumer."""
        return tuple(sorted(self._links))

    @property
    def entries(self) -> tuple[int, ...]:
        """The stages that take inputs of the model."""
        return tuple(sorted(self._entries))

    def stage_programs(self, stage: int) -> tuple[StageProgram, ...]:
        return tuple(each.stages[stage] for each in self.cuts.values())

    def inputs(self, batch: Batch) -> Any:
        return batch.args, batch.kwargs

    def follow(self, inputs: Value, mode: Mode, training: bool | None) -> Followed:
        tensors = inputs.tensors
        found = self._known(inputs, mode, training) or self._recorded(inputs, mode, training)
        number, program, numbers = found
        if number in self._uses:  # not of those with which the stages begin, which stay
            self._use(number)
        if not (self.own_loss and mode in WITH_LOSS):
            return Followed(number, numbers=numbers)
        if number not in self._countings:
            how = label_count_of(program)
            only = how is not None and picked(self.picks, program.output) == Slot(how.mean)
            self._countings[number] = how, only
        how, only = self._countings[number]
        labels = None if how is None else how.of(tensors, numbers)
        return Followed(number, labels, only, numbers)

    def _known(
        self, inputs: Value, mode: Mode, training: bool | None
    ) -> tuple[int, Program, tuple[int, ...]] | None:
        """Find the program for inputs, with its numbers for them."""
        tensors = inputs.tensors
        for number, program in self._programs.get(_key(mode, training, inputs), ()):
            if program.holds_for(tensors):
                return number, program, ()
        kind = self._kind(_key_of_kind(mode, training, inputs))
        for number, each in kind.found.items():
            numbers = each.numbers([t.shape for t in tensors])
            if numbers is not None and each.program.holds_for(tensors, numbers):
                kind.followed += 1
                # Looked at again now and then: code may take a symbol for no number.
                looks = kind.followed & (kind.followed - 1) == 0
                return None if looks else (number, each.program, numbers)
        return None

    def _recorded(
        self, inputs: Value, mode: Mode, training: bool | None
    ) -> tuple[int, Program, tuple[int, ...]]:
        """Record the forward of inputs that have no program yet."""
        args, kwargs = unflatten(inputs.structure, inputs.tensors)
        batch = Batch(args, kwargs, None)
        program = self.record(batch, mode, training)
        number = self._new(_key(mode, training, inputs), program)
        if all(t.is_contiguous() for t in inputs.tensors):
            self._learn(batch, mode, training, inputs, program)
        return number, program, ()

    def _learn(
        self, batch: Batch, mode: Mode, training: bool | None, inputs: Value, program: Program
    ) -> None:
        """Compare a recorded program with those for any sizes, or make one after the first few."""
        key = _key_of_kind(mode, training, inputs)
        kind = self._kind(key)
        example = [tuple(t.shape) for t in inputs.tensors], program
        kind.examples.append(example)
        served = False
        for number, each in list(kind.found.items()):
            agrees = each.agrees_with(*example)
            served = served or bool(agrees)
            if agrees is False:
                _log.warning(
                    "the forward takes another way with inputs of shapes %s than torch's symbolic "
                    "shapes had shown, as code does that asks for the class of a size; from now on "
                    "it is recorded for each shape", example[0],
                )  # fmt: skip
                kind.attempts = 0
                # Stages forget it later: a micro-batch that follows it may not be fed yet.
                del kind.found[number]
        if served or len(kind.examples) < _FIRST or not kind.attempts:
            return
        read = [[guard.value for guard in each.guards] for _, each in kind.examples]
        if read.count(read[-1]) < 2:  # it would be a program for this example alone
            return
        kind.attempts -= 1
        made = any_sizes(
            lambda symbols: self.record(batch, mode, training, symbols=symbols), kind.examples
        )
        if made is not None:
            number = self._define(made.program)
            kind.found[number] = made
            self._uses[number] = key

    def _kind(self, key: bytes) -> _Kind:
        """Return the kind with a key, and note it as the one used last."""
        kind = self._kinds[key] = self._kinds.pop(key, _Kind())
        if len(self._kinds) > _MOST:
            del self._kinds[next(iter(self._kinds))]
        return kind

    def _new(self, key: bytes, program: Program) -> int:
        """Add a program that stages do not have yet; return its number."""
        number = self._define(program)
        self._programs.setdefault(key, []).append((number, program))
        self._uses[number] = key
        self._use(number)
        return number

    def _use(self, number: int) -> None:
        """Note that a program is followed now."""
        self._uses[number] = self._uses.pop(number)  # as the last one
        self._recent.add(number)

    def _define(self, program: Program) -> int:
        """Cut a program for stages that do not have it yet; return its number."""
        number = self._cut(program)
        self.definitions[number] = dumps((number, self.cuts[number].stages))[0]
        return number

    def unused(self) -> list[int]:
        too_many = len(self._uses) - _MOST
        oldest = [n for n in list(self._uses)[: max(too_many, 0)] if n not in self._recent]
        for number in oldest:
            self._forget(number)
        self._recent.clear()
        self._gone, gone = [], self._gone
        return gone

    def _forget(self, number: int) -> None:
        """Have later inputs follow other programs than this one."""
        key = self._uses.pop(number)
        self._gone.append(number)
        self._countings.pop(number, None)
        if (kind := self._kinds.get(key)) is not None and number in kind.found:
            del kind.found[number]
            return
        left = [each for each in self._programs.get(key, ()) if each[0] != number]
        if left:
            self._programs[key] = left
        else:
            self._programs.pop(key, None)
        for known in (self._by_content, self._last):
            for each in [each for each, n in known.items() if n == number]:
                del known[each]
        for each in [each for each, (n, _) in self._for_all_lengths.items() if n == number]:
            del self._for_all_lengths[each]

    def drop(self, program: int) -> None:
        del self.cuts[program], self.definitions[program]

    def cached(self, inputs: Value, cache: Cache, length: int) -> int:
        before = cache.value.get_seq_length()
        how = b"cached" if before else b"cached, at first"
        key = how + _key(Mode.INFER, None, inputs)
        # What a cache holds may change the forward, so each is recorded until two in a row, with
        # different lengths in the cache, give the same program. That one then serves other lengths
        # too. It is recorded again at powers of two, and always where layers see only a window of
        # the cache. Only of transformers' models is it known that they look at no other length.
        known = type(self._model).__module__.startswith("transformers.")
        looks = not known or before & (before - 1) == 0 or any(cache.value.is_sliding)
        if key in self._for_all_lengths and not looks:
            number, program = self._for_all_lengths[key]
            if program.holds_for(inputs.tensors):
                self._use(number)
                cache.grow(length)
                return number
        args, kwargs = unflatten(inputs.structure, inputs.tensors)
        program = self.record(
            Batch(args, kwargs, None), Mode.INFER, carried={cache.name: cache.value}
        )
        if before:  # `carries` would begin a new cache on the stages
            program = dataclasses.replace(program, carries={})
        content = blake2b(key + dumps(program)[0]).digest()
        if content not in self._by_content:
            self._by_content[content] = self._new(key, program)
        number = self._by_content[content]
        self._use(number)
        if self._last.get(key) == number:
            self._for_all_lengths[key] = number, program
        else:
            self._for_all_lengths.pop(key, None)
        self._last[key] = number
        return number

    def shares(self, program: int, inputs: Value) -> Iterator[Share]:
        stages, tensors = self.cuts[program].stages, inputs.tensors
        for stage in self.entries:
            slots = stages[stage].takes.get(COORDINATOR, ())
            structure: Structure = ["t", [["T", i] for i in range(len(slots))]]
            if len(slots) == 1:
                structure = ["T", 0]
            yield stage, structure, tuple(tensors[slot] for slot in slots) if tensors else ()

    def _cut(self, program: Program) -> int:
        """Cut a program, and return its number."""
        homes = dict(self.homes)  # a copy: a program that is refused leaves no trace
        routes = Routes(self._links, self._entries) if self._began else None
        made = cut(program, homes, self._num_stages, routes)
        if self._began:
            self._require_fit(made, homes)
        self.homes = homes
        number, self._count = self._count, self._count + 1
        self.cuts[number] = made
        return number

    def _require_fit(self, made: Cut, homes: dict[str, int]) -> None:
        """Refuse a program that uses layers or weights which its stage was not sent."""
        if new := sorted(homes.keys() - self.homes.keys()):
            raise ConfigError(
                f"this mini-batch makes the model call {', '.join(new)}, which it did not call "
                "with the example, so no stage has it; give an example= that uses all layers"
            )
        for stage, used in enumerate(made.used):
            if missing := sorted(used - self._has[stage]):
                raise ConfigError(
                    f"this mini-batch makes the model use {', '.join(missing)} on stage {stage}, "
                    "which was sent only what the example used there; give an example= that uses "
                    "it on that stage too"
                )
