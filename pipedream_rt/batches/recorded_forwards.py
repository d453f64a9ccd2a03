"""Forwards of a model that is no sequence: recorded once for each signature of inputs, then cut."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Any

import torch
from torch import nn

from pipedream_rt.batches.forwards import EVAL, TOTAL, Cache, Followed, Share, _key, without_cache
from pipedream_rt.batches.items import Batch
from pipedream_rt.errors import ConfigError
from pipedream_rt.messages.message import Mode
from pipedream_rt.messages.tree import Structure, Value, flat_copy, unflatten
from pipedream_rt.models import dumps
from pipedream_rt.models.cut import Cut, Routes, StageProgram, cut
from pipedream_rt.models.label_counts import LabelCount, label_count_of
from pipedream_rt.models.modes import Modes
from pipedream_rt.models.program import NONE_CARRIED, Program, Slot
from pipedream_rt.models.recording import record
from pipedream_rt.schedules import COORDINATOR
from pipedream_rt.schedules.edges import name_of
from pipedream_rt.stage.spec import has_own_loss, own_loss

_MOST = 4096
"""Programs that a model may have. One with more makes a new one for every mini-batch."""


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
        autocast: torch.dtype | None = None,
        modes: Modes = Modes(),  # noqa: B008 - a tuple
    ) -> None:
        self._model = model
        self._modes = modes
        self.layers = layers
        self.read: dict[tuple[str, str], Any] = {}
        self.own_loss = self.returns_loss = False
        self.takes_total = TOTAL in inspect.signature(model.forward).parameters
        self._autocast = autocast
        dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()}
        self.dtype = min({autocast or torch.float32, *dtypes}, key=lambda dtype: dtype.itemsize)
        self._given = without_cache(model)
        # By signature; several where a forward goes by values that it reads from its inputs.
        self._programs: dict[bytes, list[tuple[int, Program]]] = {}
        self._countings: dict[int, LabelCount | None] = {}  # by number of a program
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
            training=False if mode in EVAL else training,
            grad=mode is Mode.TRAIN,
            autocast=self._autocast,
            carried=carried,
            modes=self._modes,
            read=self.read,
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
        inputs = flat_copy(self.inputs(batch))
        for mode, program in programs.items():
            self._add(_key(mode, None, inputs), program)
        self._links = {link for each in self.cuts for link in each.links}
        self._entries = {stage for each in self.cuts for stage in each.entries}
        of_cuts = zip(*(each.used for each in self.cuts), strict=True)
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
        return tuple(each.stages[stage] for each in self.cuts)

    def inputs(self, batch: Batch) -> Any:
        return batch.args, batch.kwargs

    def follow(self, inputs: Value, mode: Mode, training: bool | None) -> Followed:
        key, tensors = _key(mode, training, inputs), inputs.tensors
        known = (found for found in self._programs.get(key, ()) if found[1].holds_for(tensors))
        number, program = next(known, (-1, None))
        if program is None:
            args, kwargs = unflatten(inputs.structure, tensors)
            program = self.record(Batch(args, kwargs, None), mode, training)
            number = self._new(key, program)
        if not (self.own_loss and mode.has_target):
            return Followed(number)
        if number not in self._countings:
            self._countings[number] = label_count_of(program)
        if (how := self._countings[number]) is None:
            return Followed(number)
        return Followed(number, how.of(tensors), own_loss(program.output, None) == Slot(how.mean))

    def _new(self, key: bytes, program: Program) -> int:
        """Add a program that stages do not have yet; return its number."""
        number = self._add(key, program)
        self.definitions.append(dumps(self.cuts[number].stages)[0])
        return number

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
                    "which was sent only what the example used there; give an example= that uses "
                    "it on that stage too"
                )
