"""Cutting a program into stages: which steps each stage does, and which values pass between them.

The steps stay in their order, and a stage does those from its first layer up to the first layer of
the next stage. A value that stages need goes from the one that makes it to the first one that needs
it, from there to the next one that does, and so on; its gradient comes back the same way. So the
gradients of a value that several stages use are summed one after another, from the last use to the
first, which is the order of the unsplit model, bit for bit. Stages in between, which do not need
the value, do not see it.

What depends on the model's inputs alone, such as an attention mask, is not sent: each stage that
needs it computes it again from the inputs.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

from torch import nn

from pipedream_rt.errors import ConfigError
from pipedream_rt.models.program import Held, Program, Step, found, slots_in
from pipedream_rt.models.split import has_hooks
from pipedream_rt.schedules import COORDINATOR
from pipedream_rt.schedules.edges import Address


@dataclass(frozen=True, slots=True, kw_only=True)
class StageProgram:
    """What one stage does of a program.

    Attributes:
        takes: The slots that the message of each producer fills, in order.
        output: The result of the forward, on the stage that has it; None on others.
        carries: The objects that the stage has for the steps, pickled as they are at first.
    """

    takes: dict[Address, tuple[int, ...]] = field(default_factory=dict)
    steps: tuple[Step, ...] = ()
    gives: dict[Address, tuple[int, ...]] = field(default_factory=dict)
    output: Any = None
    carries: dict[str, bytes] = field(default_factory=dict)

    @property
    def held(self) -> list[str]:
        """The names of the parameters and buffers that the result holds."""
        return [each.name for each in found(self.output, Held)]


@dataclass(frozen=True, slots=True)
class Cut:
    """A program cut into stages.

    Attributes:
        layers: By stage, the names of the layers that it calls, in order.
    """

    stages: tuple[StageProgram, ...]
    layers: tuple[tuple[str, ...], ...]
    held: tuple[tuple[str, ...], ...]

    @property
    def used(self) -> list[set[str]]:
        """By stage, the names of all that it uses."""
        return [{*layers, *held} for layers, held in zip(self.layers, self.held, strict=True)]

    @property
    def links(self) -> set[tuple[int, int]]:
        """The pairs of a producer and a consumer."""
        return {(s, to) for s, program in enumerate(self.stages) for to in program.gives}

    @property
    def entries(self) -> set[int]:
        """The stages that take inputs of the model."""
        return {s for s, program in enumerate(self.stages) if COORDINATOR in program.takes}


class Ways(NamedTuple):
    """The ways on which values can pass, where the stages are there already.

    A stage sends to the next one in any case, and the first stage takes inputs.
    """

    links: Set[tuple[int, int]]
    entries: Set[int]


def cut(program: Program, homes: dict[str, int], num_stages: int, ways: Ways | None = None) -> Cut:
    """Cut a program."""
    stage_of, now = [], 0
    for step in program.steps:
        if step.layer is not None:
            now = max(now, homes.setdefault(step.layer, now))
        stage_of.append(now)
    return _Cutter(program, stage_of, num_stages, ways).cut()


class _Cutter:
    """Finds out which steps each stage does, and which values pass."""

    def __init__(
        self, program: Program, stage_of: Sequence[int], num_stages: int, ways: Ways | None
    ) -> None:
        self._program = program
        self._ways = ways
        self._stage_of = stage_of
        self._maker = {slot: i for i, step in enumerate(program.steps) for slot in step.filled}
        self._done: list[set[int]] = [set() for _ in range(num_stages)]
        self._inputs: list[set[int]] = [set() for _ in range(num_stages)]
        self._users: dict[int, set[int]] = {}

    def cut(self) -> Cut:
        """Cut the program."""
        steps, last = self._program.steps, len(self._done) - 1
        self._refuse_parted_changes()
        self._refuse_changed_copies()
        for number, step in enumerate(steps):
            if not step.free:
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
        """Let a stage do a step, and have what the step takes."""
        if number in self._done[stage]:
            return
        self._done[stage].add(number)
        step = self._program.steps[number]
        for slot in step.taken:
            self._need(slot, stage, step.after)

    def _need(self, slot: int, stage: int, after: Sequence[int]) -> None:
        """Let a stage have a value."""
        steps = self._program.steps
        free = [number for number in after if steps[number].free]
        if slot < self._program.inputs:
            self._inputs[stage].add(slot)
            for number in free:
                self._do(number, stage)
            return
        maker = self._maker[slot]
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
        """Return, by stage, the slots taken from each producer, and those given to each consumer.

        Each stage sends to the next one, at least an empty message: so the message from the stage
        before tells that all stages before have done the micro-batch.
        """
        count = len(self._done)
        passed: dict[tuple[Address, int], list[int]] = {}
        home = {slot: self._stage_of[self._maker[slot]] for slot in self._users}
        for stage, inputs in enumerate(self._inputs):
            if self._ways is not None and stage not in self._ways.entries:
                for slot in inputs:  # it comes by the first stage
                    self._users.setdefault(slot, set()).add(stage)
                    home[slot] = 0
                    self._inputs[0].add(slot)
                inputs.clear()
        for stage, inputs in enumerate(self._inputs):
            if inputs or stage == 0 or (self._ways is not None and stage in self._ways.entries):
                passed[COORDINATOR, stage] = sorted(inputs)
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
        """Yield the hops of a value that goes from stage to stage."""
        for here, there in pairwise(stages):
            if self._ways is None or (here, there) in self._ways.links:
                yield here, there
            else:
                yield from pairwise(range(here, there + 1))

    def _refuse_parted_changes(self) -> None:
        """Refuse a change in place that does not reach everybody who must see it.

        A value that has gone to another stage is a copy there. So a change is seen by those that
        get the value from the stage that has changed it, and by nobody else: not by a stage that
        gets an input from the coordinator, and not through another view of the same memory.
        """
        steps, last = self._program.steps, len(self._done) - 1
        stage_of = [*self._stage_of, last]
        # What the forward returns is taken on the last stage.
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
        """Refuse to change a weight or a buffer in place on one stage that another one uses.

        Each has a copy of it, and the change would reach that of one stage alone.
        """
        steps = self._program.steps
        for here, step in zip(self._stage_of, steps, strict=True):
            if step.layer is not None:  # what a layer does to its own is looked at on its stage
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
    """Return names without those that were there before."""
    return tuple(dict.fromkeys(names))


# -- layers -------------------------------------------------------------------------------------

_LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


def find_layers(
    model: nn.Module, points: Sequence[str] = (), opens: bool = True
) -> dict[str, nn.Module]:
    """Return the modules of a model that stay whole, by name.

    These are the elements of the lists of modules that the model has (``nn.ModuleList``,
    ``nn.Sequential``, ``nn.ModuleDict``), and the modules beside the lists. What stays whole does
    not depend on the number of stages, so the random numbers that layers draw do not either. An
    element that holds most of the model is taken apart where it has lists itself, as a backbone
    before a head.
    """
    whole = set(getattr(model, "_no_split_modules", None) or ())
    opened = {part for point in points for part in _parents(point)}
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
        # Of a list of another kind nobody can call the whole, so its hooks are refused.
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
    """Return the layer at which a stage begins that the user wants to begin at a module."""
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
