"""Runs the orders of all workers against each other, without time, and proves that they obey.

What is proved for a finite number of micro-batches: every forward once and before its backward,
every update once and after the backwards that it sums, everything in the order of the micro-batches
(so that gradients are summed as in plain accumulation), no deadlock, no more in flight than stated,
no version read that is not kept, no more versions kept than stated.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from pipedream_rt.errors import ConfigError, ScheduleError, VersionError
from pipedream_rt.schedules.actions import ENDS, SENDS_BACK, Action, Kind
from pipedream_rt.schedules.execution import Executable, Execution
from pipedream_rt.schedules.ledger import VersionLedger
from pipedream_rt.schedules.schedule import (
    Schedule,
    proof_length,
    schedule_named,
    schedule_written,
)
from pipedream_rt.schedules.shape import Shape


class Checkable(Executable, Protocol):
    """What the checker needs to know of a schedule."""

    def reads(self, stage: int, micro_batch: int) -> int:
        """Return the version that a micro-batch reads."""

    def kept(self, stage: int) -> int:
        """Return the most versions that the stage holds."""

    def in_flight(self, stage: int) -> int:
        """Return the most micro-batches in flight."""


class Grid:
    """Worker x time drawing of what was executed; one column per action of unit length.

    With three stages and async-1f1b::

        stage 0  F0 F1 F2 .. .. B0 F3 ..
        stage 1  .. F0 F1 .. B0 F2 ..
        stage 2  .. .. F0 B0 F1 B1 ..
    """

    def __init__(self, shape: Shape) -> None:
        """Start empty."""
        self._shape = shape
        self._rows: list[dict[int, str]] = [{} for _ in range(shape.workers)]

    def place(self, worker: int, time: int, text: str) -> None:
        """Draw one action at a column."""
        self._rows[worker][time] = text

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
            f"{self._shape.name_of(w)}  {lead}"
            + " ".join(cell.ljust(width) for cell in row).rstrip()
            for w, row in enumerate(cells)
        )


class _StageState:
    """How far one stage has come: so many forwards, backwards or input halves, ends, steps."""

    def __init__(self, stage: int, in_flight: int, kept: int) -> None:
        """Nothing done yet; the two bounds are the schedule's."""
        self.most_in_flight, self.most_kept = in_flight, kept
        self.ledger = VersionLedger(stage)
        self.forwards = self.backs = self.ends = self.steps = 0
        self.split = False


class _Checker:
    """The rules, asked of one execution."""

    def __init__(
        self,
        schedule: Checkable,
        micro_batches: int,
        flushes: Sequence[int],
        credits: int | None,
    ) -> None:
        """Take the schedule."""
        self._schedule = schedule
        self._micro_batches = micro_batches
        self._credits = credits
        self._execution = Execution(schedule, micro_batches, flushes=flushes, credits=credits)
        shape = schedule.shape
        self._stages = [
            _StageState(s, schedule.in_flight(s), schedule.kept(s)) for s in range(shape.num_stages)
        ]
        self._clocks = [0] * shape.workers
        # When the actions that neighbours wait for were done, until it is asked for.
        self._sent: dict[tuple[bool, int, int], int] = {}
        self.grid = Grid(shape)

    def run(self) -> None:
        """Check everything.

        Raises:
            ScheduleError: A rule is broken; the message names it and shows the grid.
        """
        for worker, stage, action in self._execution:
            try:
                self._apply(stage, action)
            except (VersionError, _RuleBroken) as error:
                raise self._broken(worker, stage, action, str(error)) from error
            if action.kind is not Kind.STEP:
                self._place(worker, stage, action)
        self._finish()

    def _place(self, worker: int, stage: int, action: Action) -> None:
        """Draw an action of unit length as early as it can be, and note when it is done."""
        goes_forward = action.kind is Kind.FORWARD
        ready = 0
        if goes_forward or action.kind in SENDS_BACK:
            neighbour = stage - 1 if goes_forward else stage + 1
            ready = self._sent.pop((goes_forward, neighbour, action.index), 0)
        start = max(self._clocks[worker], ready)
        self.grid.place(worker, start, str(action))
        self._clocks[worker] = start + 1
        if goes_forward or action.kind in SENDS_BACK:
            self._sent[(goes_forward, stage, action.index)] = start + 1

    def _apply(self, stage: int, action: Action) -> None:
        """Check the rules of one action and note what it does."""
        state, schedule, m = self._stages[stage], self._schedule, action.index
        match action.kind:
            case Kind.FORWARD:
                if m < state.forwards:
                    raise _RuleBroken(f"micro-batch {m} goes forward twice")
                if m > state.forwards:
                    raise _RuleBroken(f"the next forward should be F{state.forwards}")
                state.forwards += 1
                in_flight, most = state.forwards - state.ends, state.most_in_flight
                if in_flight > most:
                    raise _RuleBroken(f"{in_flight} in flight, the schedule states {most}")
                state.ledger.release(schedule.reads(stage, m))
                state.ledger.pin(m, schedule.reads(stage, m))
            case Kind.BACKWARD | Kind.INPUT:
                if m < state.backs:
                    raise _RuleBroken(f"micro-batch {m} goes backward twice")
                if m >= state.forwards:
                    raise _RuleBroken(f"backward before its forward F{m}")
                if m > state.backs:
                    raise _RuleBroken(
                        f"the next backward should be {action.kind.value}{state.backs}"
                    )
                split = action.kind is Kind.INPUT
                if m and split is not state.split:
                    raise _RuleBroken("a backward is split always or never, here it is both")
                state.split = split
                state.backs += 1
            case Kind.WEIGHT:
                if not state.split or m >= state.backs:
                    raise _RuleBroken(f"the weight half before its input half I{m}")
                if m != state.ends:
                    raise _RuleBroken(f"the next weight half should be W{state.ends}")
            case Kind.STEP:
                self._apply_step(state, stage, action)
        if action.kind in ENDS:
            state.ledger.unpin(m)
            state.ends += 1
        kept = len(state.ledger.kept)
        if kept > state.most_kept:
            raise _RuleBroken(f"{kept} versions kept, the schedule states {state.most_kept}")

    def _apply_step(self, state: _StageState, stage: int, action: Action) -> None:
        """Check that an update comes in turn and has all its gradients."""
        if action.index != state.steps:
            raise _RuleBroken(f"the next update should be S{state.steps}")
        letter = "W" if state.split else "B"
        missing = range(state.ends, (action.index + 1) * self._schedule.shape.per_update)
        if missing:
            raise _RuleBroken(
                f"update before its backward {', '.join(f'{letter}{m}' for m in missing)}"
            )
        too_many = range((action.index + 1) * self._schedule.shape.per_update, state.ends)
        if too_many:
            raise _RuleBroken(f"update after {letter}{too_many[0]}, which it does not sum")
        next_read = self._schedule.reads(stage, state.forwards)
        state.ledger.release(next_read)
        state.ledger.advance(next_read)
        state.steps += 1

    def _finish(self) -> None:
        """Check that nothing is left: neither a worker that waits nor an action never done."""
        name_of = self._schedule.shape.name_of
        waiting = self._execution.waiting
        if waiting:
            worker, action = waiting[0]
            stage = worker if action.stage is None else action.stage
            text = "deadlock: " + ", ".join(f"{name_of(w)} waits for {a}" for w, a in waiting)
            if self._credits is not None:
                text += f" (with {self._credits} mini-batches injected ahead, the credits)"
            raise self._broken(worker, stage, action, text)
        updates = self._micro_batches // self._schedule.shape.per_update
        for s, state in enumerate(self._stages):
            for letter, done in (("F", state.forwards), ("B", state.backs), ("W", state.ends)):
                if done < self._micro_batches:
                    raise self._broken(s, s, None, f"stage {s} never does {letter}{done}")
            if state.steps < updates:
                raise self._broken(s, s, None, f"stage {s} never does S{state.steps}")

    def _broken(self, worker: int, stage: int, action: Action | None, rule: str) -> ScheduleError:
        """Make the error: the rule, and the grid with the culprit between > and <."""
        where = f"stage {stage}"
        if action is not None:
            where += f", {action}"
            self.grid.place(worker, self._clocks[worker], f">{action}<")
        return ScheduleError(f"{where}: {rule}\n{self.grid.render(last=24)}")


class _RuleBroken(Exception):
    """A rule, in words; the place is added where it is known."""


def check(
    schedule: Checkable,
    micro_batches: int,
    flushes: Sequence[int] = (),
    credits: int | None = None,
) -> Grid:
    """Prove that a schedule obeys the rules for so many micro-batches.

    Args:
        schedule: What to check.
        micro_batches: How many, a multiple of k.
        flushes: Multiples of k at which the pipe is flushed on the way.
        credits: Mini-batches injected before the first loss is waited for; None for no limit.

    Returns:
        The drawing of the execution, unit time per action.

    Raises:
        ScheduleError: A rule is broken; the message shows the grid with the culprit marked.
    """
    checker = _Checker(schedule, micro_batches, flushes, credits)
    checker.run()
    return checker.grid


def schedule_for(
    schedule: str | Any,
    *,
    num_stages: int,
    per_update: int = 1,
    stages_per_worker: int | None = None,
    vertical_sync: bool = False,
    credits: int | None = None,
) -> Schedule:
    """Look a schedule up, or take and check one that a user wrote.

    Args:
        schedule: A name, or an object (see `schedule_written`).
        num_stages: Number of stages.
        per_update: Micro-batches per update.
        stages_per_worker: Model chunks on each worker; None for what the schedule has by itself.
        vertical_sync: An option of async-1f1b.
        credits: With which a written schedule is checked too; None for its own.

    Returns:
        The schedule.

    Raises:
        ConfigError: There is no such schedule.
        ScheduleError: The user's order breaks a rule; the message shows where.
    """
    if isinstance(schedule, str):
        return schedule_named(
            schedule,
            num_stages=num_stages,
            per_update=per_update,
            stages_per_worker=stages_per_worker,
            vertical_sync=vertical_sync,
        )
    if vertical_sync:
        raise ConfigError("vertical_sync is an option of async-1f1b, not of a written schedule")
    made = schedule_written(
        schedule,
        num_stages=num_stages,
        per_update=per_update,
        stages_per_worker=stages_per_worker,
    )
    _prove(made, proof_length(made.shape, schedule), credits)
    return made


def _prove(schedule: Schedule, length: int, credits: int | None) -> None:
    """Check warm-up, steady state and drain, with the credits, and with a flush on the way."""
    check(schedule, length)
    check(schedule, length, credits=credits or schedule.credits())
    k = schedule.shape.per_update
    middle = length // 2 // k * k
    if 0 < middle < length:
        check(schedule, length, flushes=(middle,))
