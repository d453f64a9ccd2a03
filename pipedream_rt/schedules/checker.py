"""The checker, which proves that a plan's schedule obeys the rules.

It executes the orders of all workers against each other, without a clock, for a finite number of
micro-batches. The rules are:

- Every stage does each forward once, and before the backward of that micro-batch.
- Every stage does each update once, after the backwards that it sums and before any later one.
- Every stage does all of this in the order of the micro-batches, so that gradients are summed as in
  plain gradient accumulation.
- There is no deadlock.
- Every forward reads a version that is kept.
- Every replica sends its gradients of an update after it has summed them, and takes those of the
  others before it steps.
- No stage has more micro-batches in flight, or keeps more versions, than the schedule states.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from typing_extensions import assert_never

from pipedream_rt.errors import ConfigError, ScheduleError, VersionError
from pipedream_rt.schedules.actions import ENDS, OF_UPDATES, Action, Kind
from pipedream_rt.schedules.custom import proof_length, written_recipe
from pipedream_rt.schedules.edges import COORDINATOR, Address, Edge
from pipedream_rt.schedules.execution import Execution, deadlock_of
from pipedream_rt.schedules.ledger import VersionLedger
from pipedream_rt.schedules.plan import Plan, plan_of, replicas_of
from pipedream_rt.schedules.recipes import RECIPES, schedule_named


class _StageState:
    """The progress of one replica of a stage, which gets every r-th micro-batch.

    Attributes:
        replicas: The number of replicas of the stage, r.
        most_in_flight: The number of micro-batches in flight that the schedule allows.
        most_kept: The number of versions kept that the schedule allows.
        forwards: The micro-batch of the next forward.
        backs: The micro-batch of the next backward, or of the next input half.
        ends: The micro-batch of the next backward, or of the next weight half.
        steps: The number of updates whose step is done.
        applied: The number of updates applied, which is the newest version.
        reduced: One past the last update whose gradients this replica has sent.
        whole: The newest version of which this replica has all weights.
    """

    def __init__(self, plan: Plan, address: Address) -> None:
        self.stage = stage = plan.stage_of(address)
        self.replicas = 1 + len(plan.others(address))
        self.most_in_flight, self.most_kept = plan.in_flight(stage), plan.kept(stage)
        self.ledger = VersionLedger(stage)
        self.forwards = self.backs = self.ends = plan.next_own(address, 0)
        self.steps = self.applied = self.reduced = self.whole = 0
        self.split = False
        self.applied_by = plan.applied_by(address)


class _Checker:
    """The check of one execution against the rules, with the drawing of it."""

    def __init__(
        self,
        plan: Plan,
        micro_batches: int,
        flushes: Sequence[int],
        credits: int | None,
    ) -> None:
        self._plan = plan
        self._micro_batches = micro_batches
        self._credits = credits
        self._execution = Execution(
            plan, micro_batches, flushes=flushes, credits=credits, look=self._look
        )
        self._stages = [_StageState(plan, address) for address in plan.addresses]
        self._clocks = [0] * plan.workers
        # When each message was sent, by edge and number, until an action needs it.
        self._sent: dict[tuple[Edge, int], int] = {}
        self.grid = Grid([plan.name_of(worker) for worker in range(plan.workers)])

    def run(self) -> None:
        for worker, stage, action in self._execution:
            if action.kind not in OF_UPDATES and worker != COORDINATOR:
                self._draw(worker, stage, action)
        self._finish()

    def _look(self, worker: int, stage: Address, action: Action) -> None:
        # Before the action waits for anything: where an action breaks a rule and would deadlock
        # too, the rule is what the user has to know.
        if worker == COORDINATOR:
            return
        try:
            self._apply(stage, action)
        except (VersionError, _RuleBroken) as error:
            raise self._broken(worker, stage, action, str(error)) from error

    def _draw(self, worker: int, stage: int, action: Action) -> None:
        """Draw an action of length 1 as early as its messages allow."""
        m = action.index
        arrivals = [self._sent.pop((each.edge, m), 0) for each in self._plan.needs(action, stage)]
        start = max(self._clocks[worker], *arrivals, 0)
        self.grid.place(worker, start, str(action))
        self._clocks[worker] = start + 1
        # Actions on updates are not drawn, so their messages delay nothing here.
        for edge, number, _ in self._plan.gives(action, stage):
            if edge.target != COORDINATOR and number == m:
                self._sent[(edge, m)] = start + 1

    def _apply(self, stage: int, action: Action) -> None:
        """Check the rules for one action, and count it."""
        state, m = self._stages[stage], action.index
        r = state.replicas
        if action.kind not in OF_UPDATES and r > 1 and self._plan.next_own(stage, m) != m:
            raise _RuleBroken(f"micro-batch {m} goes to another replica")
        match action.kind:
            case Kind.FORWARD:
                if m < state.forwards:
                    raise _RuleBroken(f"micro-batch {m} goes forward twice")
                if m > state.forwards:
                    raise _RuleBroken(f"the next forward should be F{state.forwards}")
                state.forwards += r
                in_flight, most = (state.forwards - state.ends) // r, state.most_in_flight
                if in_flight > most:
                    raise _RuleBroken(
                        f"{in_flight} micro-batches in flight, but in_flight({state.stage}) of the "
                        f"plan says {most}"
                    )
                version = self._plan.reads(state.stage, m)
                # A version above `applied` does not exist yet; the ledger refuses that one.
                if state.whole < version <= state.applied:
                    raise _RuleBroken(f"reads version {version} before T{version - 1}")
                state.ledger.read(m, version)
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
                # The first backward decides.
                if m and split is not state.split:
                    raise _RuleBroken("a backward is split always or never, here it is both")
                state.split = split
                state.backs += r
            case Kind.WEIGHT:
                if not state.split or m >= state.backs:
                    raise _RuleBroken(f"the weight half before its input half I{m}")
                if m != state.ends:
                    raise _RuleBroken(f"the next weight half should be W{state.ends}")
            case Kind.REDUCE:
                self._require_whole(state, action)
                if stage not in self._plan.contributors(state.stage, m):
                    raise _RuleBroken(f"this replica has no micro-batch of update {m}")
                if m < state.reduced:
                    raise _RuleBroken(f"the gradients of update {m} are handed over twice")
                state.reduced = m + 1
            case Kind.STEP:
                if m != state.steps:
                    raise _RuleBroken(f"the next update should be S{state.steps}")
                if r == 1:
                    self._require_whole(state, action)
                elif stage in self._plan.contributors(state.stage, m) and m >= state.reduced:
                    raise _RuleBroken(f"update before R{m}, by which its gradients are handed over")
                state.steps += 1
                if state.applied_by is Kind.STEP:
                    self._apply_update(stage, state, m)
            case Kind.APPLY:
                if m != state.applied or m >= state.steps:
                    raise _RuleBroken(f"the next update to apply should be A{state.applied}")
                self._apply_update(stage, state, m)
            case Kind.DRAIN:
                if min(state.forwards, state.ends) < m * self._plan.per_update:
                    raise _RuleBroken("a flush ends while micro-batches are in flight")
                if state.applied != m:
                    raise _RuleBroken(f"a flush ends after {state.applied} updates")
            case Kind.TAKE:
                if m != state.whole or m >= state.applied:
                    raise _RuleBroken(
                        f"takes weights out of turn, the next should be T{state.whole}"
                    )
                state.whole += 1
            case Kind.INJECT | Kind.GRADIENT:
                raise _RuleBroken(f"{action} is an action of the coordinator, and of no stage")
            case _:
                assert_never(action.kind)
        if action.kind in ENDS:
            state.ledger.unpin(m)
            state.ends += r
        kept = len(state.ledger.kept)
        if kept > state.most_kept:
            raise _RuleBroken(
                f"{kept} versions kept, but kept() of the version policy says {state.most_kept}"
            )

    def _apply_update(self, address: Address, state: _StageState, update: int) -> None:
        following = self._plan.next_of_stage(address, state.forwards, update)
        state.ledger.update(self._plan.reads(state.stage, following))
        state.applied += 1
        # With a sharded optimizer, a version is whole only after its T.
        if not self._plan.shape.shards(state.stage) or state.replicas == 1:
            state.whole = state.applied

    def _require_whole(self, state: _StageState, action: Action) -> None:
        """Check that exactly the gradients of an update are summed by now."""
        letter = "W" if state.split else "B"
        update, k, r = action.index, self._plan.per_update, state.replicas
        end = (update + 1) * k
        missing = range(state.ends, end, r)
        if missing:
            raise _RuleBroken(
                f"update before its backward {', '.join(f'{letter}{m}' for m in missing)}"
            )
        too_many = range(state.ends - r, end - 1, -r)  # from the last one back
        if too_many:
            m = too_many[-1]
            raise _RuleBroken(
                f"update {update} must come before {letter}{m}, which belongs to update {m // k}"
            )

    def _finish(self) -> None:
        """Refuse a deadlock, and actions that were never done."""
        # The coordinator waits for a loss only because a stage waits; the error names the stage.
        waiting = [each for each in self._execution.waiting if each.worker != COORDINATOR]
        if waiting:
            first, text = waiting[0], deadlock_of(waiting, self._plan.title_of)
            if self._credits is not None:
                text += f" (with {self._credits} mini-batches injected ahead, the credits)"
            raise self._broken(first.worker, first.address, first.action, text)
        updates = self._micro_batches // self._plan.per_update
        for address, state in zip(self._plan.addresses, self._stages, strict=True):
            where = self._plan.title_of(address)
            for letter, done in (("F", state.forwards), ("B", state.backs), ("W", state.ends)):
                if done < self._micro_batches:
                    raise self._error(where, f"{where} never does {letter}{done}")
            if min(state.steps, state.whole) < updates:
                raise self._error(where, f"{where} never does S{state.steps}")

    def _broken(self, worker: int, address: Address, action: Action, rule: str) -> ScheduleError:
        """Return the error about an action, which the grid marks with > and <."""
        self.grid.place(worker, self._clocks[worker], f">{action}<")
        return self._error(f"{self._plan.title_of(address)}, {action}", rule)

    def _error(self, where: str, rule: str) -> ScheduleError:
        """Return the error with the last columns of the grid, which keeps it short."""
        return ScheduleError(f"{where}: {rule}\n{self.grid.render(last=24)}")


class _RuleBroken(Exception):
    """The rule that an action breaks; `_Checker._broken` adds the place."""


def check(
    plan: Plan,
    micro_batches: int,
    flushes: Sequence[int] = (),
    credits: int | None = None,
) -> Grid:
    """Prove that a plan's schedule obeys the rules for a number of micro-batches.

    Args:
        plan: The plan to check.
        micro_batches: The number of micro-batches, a multiple of k.
        flushes: The micro-batches before which the pipe is flushed, multiples of k.
        credits: The number of mini-batches that the coordinator injects before it waits for the
            first loss; None for no limit.

    Returns:
        The drawing of the execution, with one unit of time for each action.

    Raises:
        ScheduleError: A rule is broken; the message shows the grid with the action marked.
    """
    checker = _Checker(plan, micro_batches, flushes, credits)
    checker.run()
    return checker.grid


def plan_for(
    schedule: str | Any,
    *,
    num_stages: int,
    per_update: int | None = 1,
    stages_per_worker: int | None = None,
    synchronous: int = 0,
    slack: int | Sequence[int] = 0,
    replicas: int | Sequence[int] = (),
    shard_optimizer: bool = False,
    credits: int | None = None,
    proved: bool = True,
) -> Plan:
    """Return the plan of a chain of stages with a schedule.

    Args:
        schedule: The name of a schedule; or an object that a user wrote (see `WrittenSchedule`),
            which is then checked.
        num_stages: Number of stages.
        per_update: Number of micro-batches per update; None for the default of `Pipeline`. In
            built-in schedules that never flush, that is w(0) + 1, the least number with which no
            micro-batch reads weights more than one update old; in all others it is 1.
        stages_per_worker: Number of stages on each worker; None for what the schedule says.
        synchronous: The number of updates at the start that flush the pipe.
        slack: Extra warm-up forwards before each hop: one number for all, or one for each.
        replicas: The number of replicas of each stage, or one number for all; empty for one.
        shard_optimizer: Whether each of several replicas steps its own part of the weights.
        credits: The credits with which a user's schedule is checked; None for `Plan.credits`.
        proved: Whether a user's schedule is checked here. If not, call `prove` once the plan has
            its links, ties and norms.

    Returns:
        The plan, without names of layers.

    Raises:
        ConfigError: A number is out of range, or there is no such schedule for these numbers.
        ScheduleError: The user's order breaks a rule; the message shows where.
    """
    if isinstance(schedule, str):
        name = schedule_named(schedule)
        recipe = RECIPES[name]
    else:
        if synchronous:
            raise ConfigError(
                "synchronous_updates is an option of built-in schedules; a written schedule says "
                "such things itself"
            )
        if replicas_of(replicas, num_stages):
            raise ConfigError(
                "replicas are for async-1f1b, 2bw, 1f1b and gpipe; a written schedule has "
                "one replica of each stage"
            )
        name, recipe = written_recipe(schedule)
        per_update = 1 if per_update is None else per_update
    made = plan_of(
        name, recipe, num_stages, per_update, stages_per_worker, synchronous, slack, replicas,
        shard_optimizer,
    )  # fmt: skip
    if proved and not isinstance(schedule, str):
        prove(made, schedule, credits)
    return made


def prove(plan: Plan, schedule: str | Any, credits: int | None = None) -> None:
    """Prove a plan together with its links, ties, norms and replicas.

    ``schedule`` is what the plan was made of, as in `plan_for`.
    """
    credits, k = credits or plan.credits(), plan.per_update
    if isinstance(schedule, str):
        # Built-in orders obey the rules; but ties, norms and a loss in the script make stages wait,
        # which may deadlock.
        if plan.ties or plan.norms != "none" or plan.loss_in_script:
            _refuse_deadlock(plan, k * (3 + 2 * plan.num_stages), credits)
        return
    length = proof_length(plan.shape, schedule)
    # Credits, and a flush, make workers wait where an execution without them goes on.
    check(plan, length)
    check(plan, length, credits=credits)
    middle = length // 2 // k * k
    if 0 < middle < length:
        check(plan, length, flushes=(middle,))


def _refuse_deadlock(plan: Plan, micro_batches: int, credits: int) -> None:
    """Execute a plan without the rules, with a flush in the middle."""
    middle = micro_batches // 2 // plan.per_update * plan.per_update
    execution = Execution(plan, micro_batches, flushes=(middle,), credits=credits)
    for _ in execution:
        pass
    if text := deadlock_of(execution.waiting, plan.title_of):
        raise ScheduleError(f"with the schedule {plan.title}, stages would wait for ever: {text}")


class Grid:
    """A drawing of an execution: a row for each worker, a column for each unit of time.

    With three stages and async-1f1b::

        stage 0  F0 F1 F2 .. .. B0 F3 ..
        stage 1  .. F0 F1 .. B0 F2 ..
        stage 2  .. .. F0 B0 F1 B1 ..
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._rows: list[dict[int, str]] = [{} for _ in names]

    def place(self, worker: int, time: int, text: str) -> None:
        """Write a text into the row of a worker and the column of a time."""
        self._rows[worker][time] = text

    def render(self, last: int | None = None) -> str:
        """Return the drawing, or its ``last`` columns alone."""
        end = max((max(row, default=-1) for row in self._rows), default=-1) + 1
        begin = 0 if last is None else max(0, end - last)
        cells = [[row.get(t, ".") for t in range(begin, end)] for row in self._rows]
        width = max((len(cell) for row in cells for cell in row), default=1)
        lead = "... " if begin else ""
        return "\n".join(
            f"{self._names[w]}  {lead}" + " ".join(cell.ljust(width) for cell in row).rstrip()
            for w, row in enumerate(cells)
        )
