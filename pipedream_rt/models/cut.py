"""Cutting a program into stages: the steps of each stage, and the values that pass between stages.

The steps stay in their order: a stage does those from its first layer up to the first layer of the
next stage. A value goes from its own stage to the first stage that uses it, from there to the next
user, and so on; its gradient comes back the same way. So the gradients of a value that several
stages use are summed one after another, from the last use to the first. That is the order of the
unsplit model, so the sum has the same bits. Stages in between that do not use the value do not get
it.

A value that depends on the model's inputs alone, such as an attention mask, is not sent: each of
its users computes it again from the inputs.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

from torch import nn

from pipedream_rt.errors import ConfigError
from pipedream_rt.models.program import Program, Step, StoredRef, found, slots_in
from pipedream_rt.models.split import has_hooks, is_skippable
from pipedream_rt.schedules import COORDINATOR
from pipedream_rt.schedules.edges import Address


@dataclass(frozen=True, slots=True, kw_only=True)
class StageProgram:
    """The part of a program that one stage does.

    Attributes:
        takes: By producer, the slots that its message fills, in order.
        gives: By consumer, the slots whose values go to it, in order.
        output: The result of the forward, on the stage that has it; None on others.
        carries: By name, the stage's objects for the steps, pickled in their first state.
    """

    takes: dict[Address, tuple[int, ...]] = field(default_factory=dict)
    steps: tuple[Step, ...] = ()
    gives: dict[Address, tuple[int, ...]] = field(default_factory=dict)
    output: Any = None
    carries: dict[str, bytes] = field(default_factory=dict)

    @property
    def held(self) -> list[str]:
        """The names of the parameters and buffers that the result holds."""
        return [each.name for each in found(self.output, StoredRef)]


@dataclass(frozen=True, slots=True)
class Cut:
    """A program cut into stages.

    Attributes:
        layers: By stage, the names of the layers that it calls, in order.
        held: By stage, the names of the parameters and buffers that it uses outside of layers.
    """

    stages: tuple[StageProgram, ...]
    layers: tuple[tuple[str, ...], ...]
    held: tuple[tuple[str, ...], ...]

    @property
    def used(self) -> list[set[str]]:
        """By stage, the names of the layers, parameters and buffers that it uses."""
        return [{*layers, *held} for layers, held in zip(self.layers, self.held, strict=True)]

    @property
    def links(self) -> set[tuple[int, int]]:
        """The pairs of a producer and a consumer."""
        return {(s, to) for s, program in enumerate(self.stages) for to in program.gives}

    @property
    def entries(self) -> set[int]:
        """The stages that take inputs of the model."""
        return {s for s, program in enumerate(self.stages) if COORDINATOR in program.takes}


class Routes(NamedTuple):
    """The only edges on which values can pass, once the stages have started.

    Each stage sends to the next one, and the first stage takes inputs, in any case.

    Attributes:
        links: The pairs of a producer and a consumer, by stage.
        entries: The stages that take inputs of the model.
    """

    links: Set[tuple[int, int]]
    entries: Set[int]


def cut(
    program: Program, homes: dict[str, int], num_stages: int, ways: Routes | None = None
) -> Cut:
    """Cut a program; add the layers that it meets to ``homes``, the stage of each known layer."""
    stage_of, now = [], 0
    for step in program.steps:
        if step.layer is not None:
            now = max(now, homes.setdefault(step.layer, now))
        stage_of.append(now)
    return _Cutter(program, stage_of, num_stages, ways).cut()


class _Cutter:
    """Finds the steps of each stage, and the values that pass; ``stage_of`` is by step."""

    def __init__(
        self, program: Program, stage_of: Sequence[int], num_stages: int, ways: Routes | None
    ) -> None:
        self._program = program
        self._ways = ways
        self._stage_of = stage_of
        self._maker = {slot: i for i, step in enumerate(program.steps) for slot in step.filled}
        self._done: list[set[int]] = [set() for _ in range(num_stages)]
        self._inputs: list[set[int]] = [set() for _ in range(num_stages)]
        self._users: dict[int, set[int]] = {}

    def cut(self) -> Cut:
        steps, last = self._program.steps, len(self._done) - 1
        self._refuse_parted_changes()
        self._refuse_changed_copies()
        for number, step in enumerate(steps):
            if not step.free:  # a free step is done where its result is needed
                self._do(number, self._stage_of[number])
        for slot in slots_in(self._program.output):
            self._need(slot, last, self._program.after)
        takes, gives = self._passed()
        stages = tuple(
            StageProgram(
                takes=takes[s],
                steps=tuple(steps[i] for i in sorted(done)),
                gives=gives[s],
                output=self._program.output if s == last else None,
                carries=self._program.carries,
            )
            for s, done in enumerate(self._done)
        )
        return Cut(
            stages,
            tuple(_unique(step.layer for step in s.steps if step.layer) for s in stages),
            tuple(_unique([*(n for step in s.steps for n in step.held), *s.held]) for s in stages),
        )

    def _do(self, number: int, stage: int) -> None:
        """Let a stage do a step and get what the step takes."""
        if number in self._done[stage]:
            return
        self._done[stage].add(number)
        step = self._program.steps[number]
        for slot in step.taken:
            self._need(slot, stage, step.after)

    def _need(self, slot: int, stage: int, after: Sequence[int]) -> None:
        """Let a stage get a value, after the steps that change it in place."""
        steps = self._program.steps
        free = [number for number in after if steps[number].free]
        if slot < self._program.inputs:
            self._inputs[stage].add(slot)
            # Each stage gets the input unchanged, and repeats what was done to it in place.
            for number in free:
                self._do(number, stage)
            return
        maker = self._maker[slot]
        # The value is free only if every change of it in place is.
        if steps[maker].free and len(free) == len(after):
            for number in (maker, *after):
                self._do(number, stage)
            return
        home = self._stage_of[maker]
        for number in (maker, *free):
            self._do(number, home)
        if home != stage:
            self._users.setdefault(slot, set()).add(stage)

    def _passed(self) -> tuple[list[dict[Address, tuple[int, ...]]], ...]:
        """Return, by stage, the slots taken from each producer and those given to each consumer."""
        count = len(self._done)
        passed: dict[tuple[Address, int], list[int]] = {}
        home = {slot: self._stage_of[self._maker[slot]] for slot in self._users}
        for stage, inputs in enumerate(self._inputs):
            if self._ways is not None and stage not in self._ways.entries:
                for slot in inputs:  # the first stage takes it and sends it on
                    self._users.setdefault(slot, set()).add(stage)
                    home[slot] = 0
                    self._inputs[0].add(slot)
                inputs.clear()
        for stage, inputs in enumerate(self._inputs):
            if inputs or stage == 0 or (self._ways is not None and stage in self._ways.entries):
                passed[COORDINATOR, stage] = sorted(inputs)
        # Each stage sends to the next one, if only an empty message: so the message of the stage
        # before tells that all stages before have done the micro-batch.
        for hop in pairwise(range(count)):
            passed[hop] = []
        for slot, users in sorted(self._users.items()):
            for hop in self._hops([home[slot], *sorted(users)]):
                passed.setdefault(hop, []).append(slot)
        takes: list[dict[Address, tuple[int, ...]]] = [{} for _ in range(count)]
        gives: list[dict[Address, tuple[int, ...]]] = [{} for _ in range(count)]
        for (producer, consumer), slots in passed.items():
            takes[consumer][producer] = tuple(slots)
            if producer != COORDINATOR:
                gives[producer][consumer] = tuple(slots)
        return takes, gives

    def _hops(self, stages: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Yield the hops of a value along stages: straight where there is a link, else by each."""
        for here, there in pairwise(stages):
            if self._ways is None or (here, there) in self._ways.links:
                yield here, there
            else:
                yield from pairwise(range(here, there + 1))

    def _refuse_parted_changes(self) -> None:
        """Refuse a change in place that does not reach every later step that takes the value.

        Another stage has a copy of the value. It sees the change only if it gets the value from
        the stage that has changed it: not where an input comes from the coordinator, nor through
        another view of the same memory.
        """
        steps, last = self._program.steps, len(self._done) - 1
        stage_of = [*self._stage_of, last]
        # The result is like a last step on the last stage.
        end = Step(
            name="the result", target="", args=(self._program.output,), slots=(),
            after=self._program.after, where="its end",
        )  # fmt: skip
        for number, step in enumerate(steps):
            if not step.changes or step.free:
                continue
            here = stage_of[number]
            for later, user in list(enumerate((*steps, end)))[number + 1 :]:
                if number not in user.after:
                    continue
                for slot in user.taken:
                    maker = self._maker.get(slot)
                    made = COORDINATOR if maker is None else stage_of[maker]
                    same = slot in step.changes
                    if made == here == stage_of[later] or (made == here and not same):
                        continue
                    if same and (made != COORDINATOR or stage_of[later] == here):
                        continue
                    raise ConfigError(
                        f"{step.name}, at {step.where}, changes in place on stage {here} what "
                        f"{user.name}, at {user.where}, takes on stage {stage_of[later]}; there it "
                        "is another copy, which the change does not reach. Change a copy "
                        "(x = x + 1 in the place of x += 1), or choose split points that keep "
                        "both in one stage"
                    )

    def _refuse_changed_copies(self) -> None:
        """Refuse to change a weight or a buffer in place where another stage has a copy of it."""
        steps = self._program.steps
        for here, step in zip(self._stage_of, steps, strict=True):
            if step.layer is not None:  # what a layer changes of its own is checked on its stage
                continue
            for there, user in zip(self._stage_of, steps, strict=True):
                whole = [*user.held, *([] if user.layer is None else [user.layer])]
                for name in step.changes_held if there != here else ():
                    if any(name == each or name.startswith(f"{each}.") for each in whole):
                        raise ConfigError(
                            f"{step.name}, at {step.where}, changes {name} in place on stage "
                            f"{here}, and {user.name} uses it on stage {there}, which has a copy "
                            "that the change does not reach. Do it in the layer that has it, for "
                            "instance in its forward, or choose split points that keep both in one "
                            "stage"
                        )


def _unique(names: Iterable[str]) -> tuple[str, ...]:
    """Return each name once, in the order of first occurrence."""
    return tuple(dict.fromkeys(names))


# -- layers -------------------------------------------------------------------------------------

_LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


def find_layers(
    model: nn.Module, points: Sequence[str] = (), opens: bool = True
) -> dict[str, nn.Module]:
    """Return the modules of a model that stay whole, by name.

    These are the elements of the lists of modules (``nn.ModuleList``, ``nn.Sequential``,
    ``nn.ModuleDict``), and the modules beside the lists. One that is `is_skippable` is taken apart,
    so that its values go from step to step. If ``opens``, an element that has lists
    itself and most of the parameters is taken apart too, as a backbone before a head; so is each
    module that has one of ``points`` inside.
    """
    # The number of stages plays no part: layers are seeded by name, so their random numbers do not
    # depend on it either.
    whole = set(getattr(model, "_no_split_modules", None) or ())
    skippable = [f"{n}.module" for n, m in model.named_modules() if is_skippable(m)]
    opened = {part for name in (*points, *skippable) for part in _parents(name)} | {*skippable}
    half = sum(p.numel() for p in model.parameters()) / 2
    layers: dict[str, nn.Module] = {}
    seen: set[int] = set()

    def visit(module: nn.Module, name: str, in_list: bool) -> None:
        if id(module) in seen:
            return
        seen.add(id(module))
        pure = type(module) in _LISTS
        lists = pure or any(isinstance(each, _LISTS) for each in module.modules())
        called_as_whole = has_hooks(module) or module._compiled_call_impl is not None
        called_as_whole |= hasattr(module, "_orig_mod")
        stays = type(module).__name__ in whole or not lists
        if in_list and not stays:
            may_open = opens and not called_as_whole
            stays = not (may_open and sum(p.numel() for p in module.parameters()) > half)
        # A ModuleList or ModuleDict cannot be called: `refuse_unfit_modules` refuses its hooks.
        if isinstance(module, nn.Sequential) and called_as_whole:
            pure, stays = False, True
        if name and name not in opened and stays and not pure:
            layers[name] = module
            return
        listed = isinstance(module, _LISTS)
        for key, child in module._modules.items():
            if child is not None:
                visit(child, f"{name}.{key}" if name else key, listed)

    visit(model, "", False)
    return layers


def _parents(name: str) -> Iterator[str]:
    """Yield the names of the modules that a module is inside of."""
    parts = name.split(".")
    for i in range(1, len(parts)):
        yield ".".join(parts[:i])


def first_layer(name: str, program: Program, modules: Mapping[str, nn.Module]) -> str:
    """Return the first layer of the stage that the user wants to begin at a module."""
    called = program.layers()
    inside = [layer for layer in called if layer == name or layer.startswith(f"{name}.")]
    if inside:
        return inside[0]
    if name in modules:
        raise ConfigError(
            f"no stage can begin at {name!r}: the forward does not call it, nor a layer in it. It "
            f"calls {', '.join(called)}"
        )
    near = difflib.get_close_matches(name, [*called, *modules], n=3, cutoff=0.4)
    hint = (
        f"did you mean {' or '.join(map(repr, near))}?" if near else f"it has {', '.join(called)}"
    )
    raise ConfigError(f"the model has no module {name!r}; {hint}")
