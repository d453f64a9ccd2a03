"""The execution of the orders of all workers against each other, without a clock.

Which actions are executed, and in which order on each worker, does not depend on time. The checker
adds rules to an execution, and the simulator adds times. What an action waits for is what the plan
says of it (`Plan.needs`); the execution knows of no kind of message.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, pairwise
from typing import Any, NamedTuple, TypeAlias

from pipedream_rt.schedules.actions import Action
from pipedream_rt.schedules.channels import OF_ACTIONS
from pipedream_rt.schedules.edges import COORDINATOR, Address, By, EdgeKind, Need, Row, Titles
from pipedream_rt.schedules.plan import Plan

Done: TypeAlias = tuple[int, Address, Action]
"""An executed action: worker, address and action, in a plain tuple because there are millions. Of
an injection, worker and address are `COORDINATOR`."""

NO_LIMIT = 1 << 60
"""The credits of a coordinator that waits for nothing."""

_BEGIN = {c.kind: 0 if c.by is By.VERSION else -1 for c in OF_ACTIONS}
"""The number of the last message of a kind that is there before the first action."""


class Waiting(NamedTuple):
    """A worker that waits for ever."""

    worker: int
    address: Address
    action: Action
    need: Need

    def words(self, titles: Titles) -> str:
        """Return it for people: ``stage 0 waits in B0 for gradient 0 from stage 1``."""
        return f"{titles(self.address)} waits in {self.action} for {self.need.words(titles)}"


class _Ways:
    """What has been sent so far, by edge. An edge is a number here, which is quick to look up.

    Attributes:
        given: By edge, the number of the last message that was sent.
        sleeps: By edge, whether the worker of its receiver sleeps until one comes.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._numbers: dict[tuple[EdgeKind, int, int], int] = {}
        self.given: list[int] = []
        self.sleeps: list[bool] = []
        self.targets: list[int] = []

    def __getitem__(self, row: Row) -> int:
        """Return the number of the edge of a row."""
        kind, source, target = row.edge
        number = self._numbers.get((kind, source, target))
        if number is None:
            number = self._numbers[kind, source, target] = len(self.given)
            self.given.append(_BEGIN[kind])
            self.sleeps.append(False)
            is_worker = target != COORDINATOR
            self.targets.append(self._plan.worker_of(target) if is_worker else COORDINATOR)
        return number


class _Rows(NamedTuple):
    """What an action needs and gives, by the numbers of edges.

    Most actions need and give the message with their own number alone, which is quick.
    """

    needs: tuple[int, ...]
    needs_up_to: tuple[tuple[int, Row], ...]
    gives: tuple[int, ...]
    gives_up_to: tuple[tuple[int, Row], ...]


class Execution:
    """An iterable over all actions of a run, in an order in which they can happen.

    Each worker, and the coordinator, follows its order until an action needs a message that is not
    sent yet; then another one, which can go on, does so.
    """

    def __init__(
        self,
        plan: Plan,
        micro_batches: int,
        *,
        flushes: Sequence[int] = (),
        credits: int | None = None,
        look: Callable[[int, Address, Action], None] | None = None,
    ) -> None:
        self._plan = plan = replace(plan, ahead=NO_LIMIT if credits is None else credits)
        self._look = look
        self._bounds = [0, *flushes, micro_batches]
        self._orders = {
            worker: chain(*[plan.order(worker, a, b) for a, b in pairwise(self._bounds)])
            for worker in (*range(plan.workers), COORDINATOR)
        }
        self.waiting: list[Waiting] = []

    def __iter__(self) -> Iterator[Done]:
        """Yield the actions, each in constant time."""
        plan, orders, look = self._plan, self._orders, self._look
        ways = _Ways(plan)
        given, sleeps, targets = ways.given, ways.sleeps, ways.targets
        only = {worker: plan.first_of(worker) for worker in range(plan.workers)}
        only[COORDINATOR] = COORDINATOR
        # By address, of which the coordinator's is the last, and by kind; with replicas also by the
        # place in the cycle.
        found: list[dict[Any, _Rows]] = [{} for _ in range(len(plan.addresses) + 1)]
        cycles = [plan.cycle(a) for a in (*plan.addresses, COORDINATOR)] if plan.replicated else []
        held: dict[int, tuple[Action, int] | None] = dict.fromkeys(orders)
        ready = list(orders)
        while ready:
            worker = ready.pop()
            again, held[worker] = held[worker], None
            first = only[worker]
            for action in chain(() if again is None else (again[0],), orders[worker]):
                kind, m, named = action
                address = first if named is None else named
                if again is not None:
                    again = None
                elif look is not None:
                    look(worker, address, action)
                key = (kind, m % cycles[address]) if cycles else kind
                rows = found[address].get(key)
                if rows is None:
                    rows = found[address][key] = self._rows(ways, action, address)
                for edge in rows.needs:
                    if given[edge] < m:
                        break
                else:
                    for edge, row in rows.needs_up_to:
                        if given[edge] < row.of(m).number and not (
                            row.peek and self._flushed(row, m)
                        ):
                            break
                    else:
                        yield worker, address, action
                        for edge in rows.gives:
                            given[edge] = m
                            if sleeps[edge]:
                                sleeps[edge] = False
                                ready.append(targets[edge])
                        for edge, row in rows.gives_up_to:
                            given[edge] = row.of(m).number
                            if sleeps[edge]:
                                sleeps[edge] = False
                                ready.append(targets[edge])
                        continue
                sleeps[edge] = True
                held[worker] = action, edge
                break
        for worker, entry in held.items():
            if entry is not None:
                action, edge = entry
                address = only[worker] if action.stage is None else action.stage
                needs = (row for row in plan.rows(action, address)[0] if ways[row] == edge)
                need = next(needs).of(action.index)
                self.waiting.append(Waiting(worker, address, action, need))

    def _rows(self, ways: _Ways, action: Action, address: Address) -> _Rows:
        """Return the rows of an action."""
        needs, gives = self._plan.rows(action, address)
        return _Rows(
            needs=tuple(ways[row] for row in needs if row.number is None),
            needs_up_to=tuple((ways[row], row) for row in needs if row.number is not None),
            gives=tuple(ways[row] for row in gives if row.number is None),
            gives_up_to=tuple((ways[row], row) for row in gives if row.number is not None),
        )

    def _flushed(self, row: Row, update: int) -> bool:
        """Whether a flush comes in the place of the message that an update would peek at."""
        assert row.number is not None
        after = bisect_right(self._bounds, update * self._plan.per_update)
        return row.number(update) >= self._bounds[after]


_HINTS = {
    EdgeKind.NORM: "where gradients are clipped by the norm of the model, or losses are scaled, a "
    "step waits for that of the next stage: a worker must do the steps of an update from its last "
    "stage to its first",
    EdgeKind.SHARE: "stages that use one weight wait for each other's gradients of it at the end "
    "of an update: let the later stage end its backwards earlier, or put the layers that use the "
    "weight into one stage",
}
"""What to do about a deadlock, by the kind of message that is waited for."""


def deadlock_of(waiting: Sequence[Waiting], titles: Titles) -> str:
    """Return who waits for what, for people, and what to do; empty if no stage waits."""
    stages = [each for each in waiting if each.worker != COORDINATOR]
    if not stages:
        return ""
    hints = {_HINTS[e.need.edge.kind] for e in stages if e.need.edge.kind in _HINTS}
    return "\n".join(["deadlock: " + ", ".join(e.words(titles) for e in stages), *sorted(hints)])
