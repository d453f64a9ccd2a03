"""Runs the orders of all stages against each other, without time, and proves that they obey.

Any object with the methods of `Schedule` can be checked, a user's own too. What is proved for a
finite number of micro-batches: every forward once and before its backward, every update once and
after the backwards that it sums, no deadlock, no more in flight than stated, no version read that
is not kept, no more versions kept than stated.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from pipedream_rt.errors import ScheduleError, VersionError
from pipedream_rt.schedules.actions import Action, Kind
from pipedream_rt.schedules.ledger import VersionLedger


class Checkable(Protocol):
    """What the checker needs to know of a schedule."""

    @property
    def num_stages(self) -> int:
        """Number of stages, n."""

    @property
    def per_update(self) -> int:
        """Micro-batches per update, k."""

    def order(self, stage: int, start: int = 0, stop: int | None = None) -> Iterator[Action]:
        """Yield what a stage does."""

    def reads(self, stage: int, micro_batch: int) -> int:
        """Return the version that a micro-batch reads."""

    def kept(self, stage: int) -> int:
        """Return the most versions that the stage holds."""

    def in_flight(self, stage: int) -> int:
        """Return the most micro-batches in flight."""


class Grid:
    """Stage x time drawing of what was executed; one column per action of unit length.

    With three stages and async-1f1b::

        stage 0  F0 F1 F2 .. .. B0 F3 ..
        stage 1  .. F0 F1 .. B0 F2 ..
        stage 2  .. .. F0 B0 F1 B1 ..
    """

    def __init__(self, num_stages: int) -> None:
        """Start empty."""
        self._rows: list[dict[int, str]] = [{} for _ in range(num_stages)]

    def place(self, stage: int, time: int, text: str) -> None:
        """Draw one action at a column."""
        self._rows[stage][time] = text

    def render(self, last: int | None = None) -> str:
        """Return the drawing.

        Args:
            last: Draw only so many of the last columns, to keep a message short.
        """
        end = max((max(row, default=-1) for row in self._rows), default=-1) + 1
        begin = 0 if last is None else max(0, end - last)
        cells = [[row.get(t, ".") for t in range(begin, end)] for row in self._rows]
        width = max((len(cell) for row in cells for cell in row), default=1)
        lead = "... " if begin else ""
        return "\n".join(
            f"stage {s}  {lead}" + " ".join(cell.ljust(width) for cell in row).rstrip()
            for s, row in enumerate(cells)
        )


class _StageState:
    """How far one stage has come."""

    def __init__(self, schedule: Checkable, stage: int, micro_batches: int) -> None:
        """Nothing done yet."""
        self.order = schedule.order(stage, 0, micro_batches)
        self.next: Action | None = next(self.order, None)
        self.ledger = VersionLedger(stage)
        self.forwards: dict[int, int] = {}
        self.backwards: dict[int, int] = {}
        self.steps = 0
        self.clock = 0


class Execution:
    """Executes the orders of all stages, a unit of time per forward and backward, none per step.

    Args:
        schedule: What to execute.
        micro_batches: How many there are, a multiple of ``schedule.per_update``.
    """

    def __init__(self, schedule: Checkable, micro_batches: int) -> None:
        """Take the first action of every stage."""
        self._schedule = schedule
        self._micro_batches = micro_batches
        self._stages = [_StageState(schedule, s, micro_batches) for s in range(schedule.num_stages)]
        self.grid = Grid(schedule.num_stages)

    def run(self) -> Grid:
        """Execute to the end.

        Returns:
            The drawing of the whole run.

        Raises:
            ScheduleError: A rule is broken; the message names it and shows the grid.
        """
        progress = True
        while progress:
            progress = False
            for stage in range(len(self._stages)):
                while self._try(stage):
                    progress = True
        self._finish()
        return self.grid

    def _try(self, stage: int) -> bool:
        """Execute the next action of a stage if what it waits for is there."""
        state = self._stages[stage]
        action = state.next
        if action is None:
            return False
        ready = self._ready_at(stage, action)
        if ready is None:
            return False
        try:
            self._apply(stage, state, action)
        except VersionError as error:
            raise self._broken(stage, action, str(error)) from error
        if action.kind is not Kind.STEP:
            start = max(state.clock, ready)
            self.grid.place(stage, start, str(action))
            done = state.forwards if action.kind is Kind.FORWARD else state.backwards
            state.clock = done[action.index] = start + 1
        state.next = next(state.order, None)
        return True

    def _ready_at(self, stage: int, action: Action) -> int | None:
        """When the message that an action waits for was sent, or None if it was not yet."""
        if action.kind is Kind.FORWARD and stage > 0:
            return self._stages[stage - 1].forwards.get(action.index)
        if action.kind is Kind.BACKWARD and stage < len(self._stages) - 1:
            return self._stages[stage + 1].backwards.get(action.index)
        return 0

    def _apply(self, stage: int, state: _StageState, action: Action) -> None:
        """Check the rules of one action and note what it does."""
        schedule, m = self._schedule, action.index
        match action.kind:
            case Kind.FORWARD:
                if m in state.forwards:
                    raise self._broken(stage, action, f"micro-batch {m} goes forward twice")
                expected = len(state.forwards)
                if m != expected:
                    raise self._broken(stage, action, f"the next forward should be F{expected}")
                in_flight, bound = len(state.ledger.in_flight) + 1, schedule.in_flight(stage)
                if in_flight > bound:
                    text = f"{in_flight} in flight, the schedule states {bound}"
                    raise self._broken(stage, action, text)
                state.ledger.release(schedule.reads(stage, m))
                state.ledger.pin(m, schedule.reads(stage, m))
            case Kind.BACKWARD:
                if m in state.backwards:
                    raise self._broken(stage, action, f"micro-batch {m} goes backward twice")
                if m not in state.forwards:
                    raise self._broken(stage, action, f"backward before its forward F{m}")
                state.ledger.unpin(m)
            case Kind.STEP:
                self._apply_step(stage, state, action)
        kept, bound = len(state.ledger.kept), schedule.kept(stage)
        if kept > bound:
            raise self._broken(stage, action, f"{kept} versions kept, the schedule states {bound}")

    def _apply_step(self, stage: int, state: _StageState, action: Action) -> None:
        """Check that an update comes in turn and has all its gradients."""
        if action.index != state.steps:
            raise self._broken(stage, action, f"the next update should be S{state.steps}")
        per_update = self._schedule.per_update
        summed = range(action.index * per_update, (action.index + 1) * per_update)
        missing = [m for m in summed if m not in state.backwards]
        if missing:
            text = f"update before its backward {', '.join(f'B{m}' for m in missing)}"
            raise self._broken(stage, action, text)
        next_read = self._schedule.reads(stage, len(state.forwards))
        state.ledger.release(next_read)
        state.ledger.advance(next_read)
        state.steps += 1

    def _finish(self) -> None:
        """Check that nothing is left: neither a stage that waits nor an action never done."""
        waiting = [(s, state.next) for s, state in enumerate(self._stages) if state.next]
        if waiting:
            stage, action = waiting[0]
            text = "deadlock: " + ", ".join(f"stage {s} waits for {a}" for s, a in waiting)
            raise self._broken(stage, action, text)
        updates = self._micro_batches // self._schedule.per_update
        for s, state in enumerate(self._stages):
            for letter, done in (("F", state.forwards), ("B", state.backwards)):
                missing = [m for m in range(self._micro_batches) if m not in done]
                if missing:
                    raise self._broken(s, None, f"stage {s} never does {letter}{missing[0]}")
            if state.steps != updates:
                raise self._broken(s, None, f"stage {s} never does S{state.steps}")

    def _broken(self, stage: int, action: Action | None, rule: str) -> ScheduleError:
        """Make the error: the rule, and the grid with the culprit between > and <."""
        where = f"stage {stage}"
        if action is not None:
            where += f", {action}"
            state = self._stages[stage]
            self.grid.place(stage, state.clock, f">{action}<")
        return ScheduleError(f"{where}: {rule}\n{self.grid.render(last=24)}")


def check(schedule: Checkable, micro_batches: int) -> Grid:
    """Prove that a schedule obeys the rules for so many micro-batches.

    Args:
        schedule: What to check.
        micro_batches: How many, a multiple of ``schedule.per_update``.

    Returns:
        The drawing of the execution, unit time per action.

    Raises:
        ScheduleError: A rule is broken; the message shows the grid with the culprit marked.
    """
    return Execution(schedule, micro_batches).run()
