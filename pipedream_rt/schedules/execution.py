"""The execution of the orders of all workers against each other, without a clock.

Which actions are executed, and in which order on each worker, does not depend on time. The checker
adds rules to an execution, and the simulator adds times. Only the table of channels says what an
action waits for; nothing here depends on the kind of a message.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, pairwise
from typing import Any, NamedTuple, TypeAlias

from pipedream_rt.schedules.actions import Action
from pipedream_rt.schedules.channels import OF_ACTIONS
from pipedream_rt.schedules.edges import COORDINATOR, Address, By, EdgeKind, EdgeRule, Need, Titles
from pipedream_rt.schedules.plan import Plan

Done: TypeAlias = tuple[int, Address, Action]
"""An executed action: worker, address, action; worker and address of an injection are
`COORDINATOR`. A plain tuple, because there are millions."""

NO_LIMIT = 1 << 60
"""The credits of a coordinator that never waits: more than any run has mini-batches."""

_BEGIN = {c.kind: 0 if c.by is By.VERSION else -1 for c in OF_ACTIONS}
"""By kind, the number of the last message before the first action: version 0 is there at once."""


class Waiting(NamedTuple):
    """A worker, or the coordinator (then `COORDINATOR`), that waits for ever in an action."""

    worker: int
    address: Address
    action: Action
    need: Need

    def words(self, titles: Titles) -> str:
        """Return ``stage 0 waits in B0 for gradient 0 from stage 1``."""
        return f"{titles(self.address)} waits in {self.action} for {self.need.words(titles)}"


class _Channels:
    """The messages sent so far. Edges are counted here: a list is quicker than a dictionary.

    Attributes:
        sent: By edge, the number of the last message that was sent.
        sleeps: By edge, whether its receiver's worker sleeps until a message comes.
        targets: By edge, its receiver's worker.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._numbers: dict[tuple[EdgeKind, int, int], int] = {}
        self.sent: list[int] = []
        self.sleeps: list[bool] = []
        self.targets: list[int] = []

    def __getitem__(self, row: EdgeRule) -> int:
        """Return the number of a row's edge, a new one for a new edge."""
        kind, source, target = row.edge
        number = self._numbers.get((kind, source, target))
        if number is None:
            number = self._numbers[kind, source, target] = len(self.sent)
            self.sent.append(_BEGIN[kind])
            self.sleeps.append(False)
            is_worker = target != COORDINATOR
            self.targets.append(self._plan.worker_of(target) if is_worker else COORDINATOR)
        return number


class _EdgeRules(NamedTuple):
    """The needs and outputs of an action, by the numbers of edges in `_Channels`.

    Most messages have the number of the action's index; they need no row and are quick to compare.
    The fields ``..._up_to`` have the others.
    """

    needs: tuple[int, ...]
    needs_up_to: tuple[tuple[int, EdgeRule], ...]
    gives: tuple[int, ...]
    gives_up_to: tuple[tuple[int, EdgeRule], ...]


class Execution:
    """An iterable over all actions of a run, in an order in which they can happen.

    Each worker, and the coordinator, follows its order until an action needs a message that is not
    sent yet; then another one goes on. ``look`` is called once with each action, before it waits.

    Attributes:
        waiting: After the iteration, those that wait for ever.
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
        # Credits are part of the plan, because the channel of losses asks it for them.
        self._plan = plan = replace(plan, ahead=NO_LIMIT if credits is None else credits)
        self._look = look
        self._bounds = [0, *flushes, micro_batches]
        self._orders = {
            worker: chain(*[plan.order(worker, a, b) for a, b in pairwise(self._bounds)])
            for worker in (*range(plan.workers), COORDINATOR)
        }
        self.waiting: list[Waiting] = []

    def __iter__(self) -> Iterator[Done]:
        """Yield the actions, each in constant time: a sleeping worker is woken, never polled."""
        plan, orders, look = self._plan, self._orders, self._look
        channels = _Channels(plan)
        sent, sleeps, targets = channels.sent, channels.sleeps, channels.targets
        only = {worker: plan.first_of(worker) for worker in range(plan.workers)}
        only[COORDINATOR] = COORDINATOR
        # By address and kind, with replicas also by the place in the cycle. The coordinator's entry
        # is the last, where its address -1 finds it.
        found: list[dict[Any, _EdgeRules]] = [{} for _ in range(len(plan.addresses) + 1)]
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
                if again is not None:  # it has waited, so `look` has seen it
                    again = None
                elif look is not None:
                    look(worker, address, action)
                key = (kind, m % cycles[address]) if cycles else kind
                rows = found[address].get(key)
                if rows is None:
                    rows = found[address][key] = self._rows(channels, action, address)
                for edge in rows.needs:
                    if sent[edge] < m:
                        break
                else:
                    for edge, row in rows.needs_up_to:
                        if sent[edge] < row.of(m).number and not (
                            row.peek and self._flushed(row, m)
                        ):
                            break
                    else:
                        yield worker, address, action
                        for edge in rows.gives:
                            sent[edge] = m
                            if sleeps[edge]:
                                sleeps[edge] = False
                                ready.append(targets[edge])
                        for edge, row in rows.gives_up_to:
                            sent[edge] = row.of(m).number
                            if sleeps[edge]:
                                sleeps[edge] = False
                                ready.append(targets[edge])
                        continue
                # A loop above was left: `edge` is the first one whose message is missing.
                sleeps[edge] = True
                held[worker] = action, edge
                break
        for worker, entry in held.items():
            if entry is not None:
                action, edge = entry
                address = only[worker] if action.stage is None else action.stage
                needs = (row for row in plan.rows(action, address)[0] if channels[row] == edge)
                need = next(needs).of(action.index)
                self.waiting.append(Waiting(worker, address, action, need))

    def _rows(self, channels: _Channels, action: Action, address: Address) -> _EdgeRules:
        """Split the rows of an action: numbered by its index, or by a count of their own."""
        needs, gives = self._plan.rows(action, address)
        return _EdgeRules(
            needs=tuple(channels[row] for row in needs if row.number is None),
            needs_up_to=tuple((channels[row], row) for row in needs if row.number is not None),
            gives=tuple(channels[row] for row in gives if row.number is None),
            gives_up_to=tuple((channels[row], row) for row in gives if row.number is not None),
        )

    def _flushed(self, row: EdgeRule, update: int) -> bool:
        """Whether a flush comes first, so that there is no micro-batch to peek at."""
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
"""The advice about a deadlock, by the kind of the missing message."""

_OF_SCRIPT = (
    "the script computes the loss of a whole mini-batch, so all its outputs must come before the "
    'first backward: use schedule="gpipe", which does all forwards of a mini-batch first, or '
    "micro_batches=1; or compute the loss on the last stage, by loss_fn="
)
"""The advice where the last stage waits for a gradient from the script."""


def deadlock_of(waiting: Sequence[Waiting], titles: Titles) -> str:
    """Return who waits for what, and what to do; empty if no stage waits."""
    # The coordinator waits only because a stage does.
    stages = [each for each in waiting if each.worker != COORDINATOR]
    if not stages:
        return ""
    edges = [each.need.edge for each in stages]
    text = "deadlock: " + ", ".join(each.words(titles) for each in stages)
    if any(edge.kind is EdgeKind.GRADIENT and edge.source == COORDINATOR for edge in edges):
        return f"{_OF_SCRIPT}\n({text})"  # whatever else is waited for, it is because of that
    hints = {_HINTS[edge.kind] for edge in edges if edge.kind in _HINTS}
    return "\n".join([text, *sorted(hints)])
