"""The channels: for each kind of edge, how its messages are numbered, who needs and who gives them.

This table is the only statement of what waits for what. `Plan.needs` and `Plan.gives` read it, and
the loop of a worker, the execution, the checker, the simulator and the drawings ask these two
alone. So what is proved of a plan is what runs.

An edge is directed, from one address to another, and carries one kind of message. A need is an edge
and a number: *all messages of that edge up to that number* that were not taken yet.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

from pipedream_rt.schedules.actions import ENDS, SENDS_BACK, Kind
from pipedream_rt.schedules.edges import COORDINATOR, Address, By, Edge, EdgeKind, EdgeRule
from pipedream_rt.schedules.placement import Placement

Rows: TypeAlias = Callable[[Placement, Kind, Address, int], Iterable[EdgeRule]]
"""``rows(plan, kind, address, index)``: the rows of an action. They repeat with the period
`Placement.cycle` of the index."""


def _none(plan: Placement, kind: Kind, address: Address, index: int) -> Iterable[EdgeRule]:
    return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Channel:
    """A kind of edge.

    Attributes:
        ends: The addresses at the ends of its edges, in words.
        needed: The rows of the messages that an action waits for.
        given: The rows of the messages that an action sends.
    """

    kind: EdgeKind
    by: By
    ends: str
    needed: Rows = _none
    given: Rows = _none


def _edges(
    kind: EdgeKind, sources: Iterable[Address], targets: Iterable[Address]
) -> list[EdgeRule]:
    """Return a row for each pair; its messages have the index of the action as number."""
    return [EdgeRule(Edge(kind, source, target)) for source in sources for target in targets]


# -- what flows with a micro-batch ----------------------------------------------------------------


def _activations_needed(
    plan: Placement, kind: Kind, address: Address, index: int
) -> Iterable[EdgeRule]:
    stage = plan.stage_of(address)
    if kind is Kind.FORWARD:
        sources = [plan.address_of(p, index) for p in plan.producers(stage)]
        if stage in plan.entries:
            sources.insert(0, COORDINATOR)
        return _edges(EdgeKind.ACTIVATION, sources, [address])
    if kind is Kind.STEP and address not in plan.contributors(stage, index):
        return [_told_by_the_next_one(plan, address, index)]
    return ()


def _told_by_the_next_one(plan: Placement, address: Address, update: int) -> EdgeRule:
    """A replica that has no micro-batch in an update peeks at its next one."""
    # No message of that mini-batch comes to it. It learns of the update from its own next
    # micro-batch, or from a flush before that.
    stage, k = plan.stage_of(address), plan.per_update
    first = plan.next_own(address, update * k)
    sources = [plan.address_of(p, first) for p in plan.producers(stage)] or [COORDINATOR]
    edge = Edge(EdgeKind.ACTIVATION, max(sources), address)
    return EdgeRule(edge, lambda t: plan.next_own(address, t * k), peek=True)


def _activations_given(
    plan: Placement, kind: Kind, address: Address, index: int
) -> Iterable[EdgeRule]:
    if kind is Kind.INJECT:
        entries = [plan.address_of(stage, index) for stage in plan.entries]
        return _edges(EdgeKind.ACTIVATION, [COORDINATOR], entries)
    if kind is Kind.FORWARD:
        consumers = [plan.address_of(c, index) for c in plan.consumers(plan.stage_of(address))]
        return _edges(EdgeKind.ACTIVATION, [address], consumers)
    return ()


def _targets_needed(
    plan: Placement, kind: Kind, address: Address, index: int
) -> Iterable[EdgeRule]:
    at_exit = kind is Kind.FORWARD and plan.stage_of(address) in plan.exits
    takes = at_exit and not plan.loss_in_script
    return _edges(EdgeKind.TARGET, [COORDINATOR], [address]) if takes else ()


def _targets_given(plan: Placement, kind: Kind, address: Address, index: int) -> Iterable[EdgeRule]:
    if kind is not Kind.INJECT or plan.loss_in_script:
        return ()
    return _edges(EdgeKind.TARGET, [COORDINATOR], [plan.address_of(plan.exits[0], index)])


def _gradients_needed(
    plan: Placement, kind: Kind, address: Address, index: int
) -> Iterable[EdgeRule]:
    if kind not in SENDS_BACK:
        return ()
    stage = plan.stage_of(address)
    consumers = [plan.address_of(c, index) for c in plan.consumers(stage)]
    if plan.loss_in_script and stage in plan.exits:
        consumers.append(COORDINATOR)
    return _edges(EdgeKind.GRADIENT, consumers, [address])


def _gradients_given(
    plan: Placement, kind: Kind, address: Address, index: int
) -> Iterable[EdgeRule]:
    if kind is Kind.GRADIENT and plan.loss_in_script:
        return _edges(EdgeKind.GRADIENT, [COORDINATOR], [plan.address_of(plan.exits[0], index)])
    if kind not in SENDS_BACK:
        return ()
    stage = plan.stage_of(address)
    producers = [plan.address_of(p, index) for p in plan.producers(stage)]
    # The script gets the gradient of an input that asks for it.
    if plan.loss_in_script and stage in plan.entries:
        producers.insert(0, COORDINATOR)
    return _edges(EdgeKind.GRADIENT, [address], producers)


def _losses_needed(plan: Placement, kind: Kind, address: Address, index: int) -> Iterable[EdgeRule]:
    """An injection waits for a credit: for the losses of the mini-batch `credits` before it.

    The gradient of an output waits for all outputs of its mini-batch: the loss may be of the whole.
    """
    if kind is Kind.INJECT:
        behind = plan.credits()
    elif kind is Kind.GRADIENT:
        behind = 0
    else:
        return
    for end in plan.addresses_of(plan.exits[0]):
        yield EdgeRule(
            Edge(EdgeKind.LOSS, end, COORDINATOR), functools.partial(_last_paid, plan, end, behind)
        )


def _last_paid(plan: Placement, end: Address, behind: int, micro_batch: int) -> int:
    """Return an exit's last micro-batch, of the mini-batch ``behind`` places before another's.

    The coordinator acts on the other only when it has the loss, or the output, of this one.
    """
    # Below 0 for the first mini-batches, so that they wait for nothing.
    last = (micro_batch // plan.per_update - behind + 1) * plan.per_update - 1
    count = plan.replicas[plan.stage_of(end)]
    # Rounded down to a micro-batch of this replica: its edge carries every r-th loss alone.
    return last - (last - plan.replica_of(end)) % count


def _losses_given(plan: Placement, kind: Kind, address: Address, index: int) -> Iterable[EdgeRule]:
    at_exit = kind is Kind.FORWARD and plan.stage_of(address) in plan.exits
    return _edges(EdgeKind.LOSS, [address], [COORDINATOR]) if at_exit else ()


# -- replicas and shards --------------------------------------------------------------------------


def _partials_needed(
    plan: Placement, kind: Kind, address: Address, index: int
) -> Iterable[EdgeRule]:
    if kind is not Kind.STEP or not plan.others(address):
        return ()
    adding = plan.contributors(plan.stage_of(address), index)
    return _edges(EdgeKind.PARTIAL, [a for a in adding if a != address], [address])


def _partials_given(
    plan: Placement, kind: Kind, address: Address, index: int
) -> Iterable[EdgeRule]:
    return _edges(EdgeKind.PARTIAL, [address], plan.others(address) if kind is Kind.REDUCE else ())


def _sharing(plan: Placement, address: Address) -> tuple[Address, ...]:
    """Return the other replicas of a stage whose optimizer is sharded; else none."""
    return plan.others(address) if plan.shape.shards(plan.stage_of(address)) else ()


def _stepped_needed(
    plan: Placement, kind: Kind, address: Address, index: int
) -> Iterable[EdgeRule]:
    others = _sharing(plan, address) if kind is Kind.TAKE else ()
    return _edges(EdgeKind.STEPPED, others, [address])


def _stepped_given(plan: Placement, kind: Kind, address: Address, index: int) -> Iterable[EdgeRule]:
    applies = kind is plan.applied_by(address)
    return _edges(EdgeKind.STEPPED, [address], _sharing(plan, address) if applies else ())


# -- tied weights ---------------------------------------------------------------------------------


def _itself(update: int) -> int:
    return update


def _one_more(update: int) -> int:
    return update + 1


def _one_less(update: int) -> int:
    return update - 1


def _weights_needed(
    plan: Placement, kind: Kind, address: Address, index: int
) -> Iterator[EdgeRule]:
    """A user of a weight needs the version that its owner reads; a flush needs all versions."""
    if kind is not Kind.FORWARD and kind is not Kind.DRAIN:
        return
    for edge in plan.borrows(plan.stage_of(address)):
        reads = functools.partial(plan.reads, plan.stage_of(edge.source))
        yield EdgeRule(edge, reads if kind is Kind.FORWARD else _itself)


def _weights_given(plan: Placement, kind: Kind, address: Address, index: int) -> Iterator[EdgeRule]:
    if kind is plan.applied_by(address):
        for edge in plan.lends(plan.stage_of(address)):
            yield EdgeRule(edge, _one_more)


def _shares_needed(plan: Placement, kind: Kind, address: Address, index: int) -> Iterator[EdgeRule]:
    edges = plan.shares_for(plan.stage_of(address)) if kind in ENDS else ()
    return _after_updates(plan, edges)


def _shares_given(plan: Placement, kind: Kind, address: Address, index: int) -> Iterator[EdgeRule]:
    edges = plan.shares_of(plan.stage_of(address)) if kind in ENDS else ()
    return _after_updates(plan, edges)


def _after_updates(plan: Placement, edges: Iterable[Edge]) -> Iterator[EdgeRule]:
    """Yield rows that end with the message of the newest ended update."""
    for edge in edges:
        yield EdgeRule(edge, functools.partial(_update_ended_by, plan.per_update))


def _update_ended_by(per_update: int, micro_batch: int) -> int:
    """Return the newest update whose micro-batches have all ended with this one; -1 for none."""
    return (micro_batch + 1) // per_update - 1


# -- the norm of all gradients ----------------------------------------------------------------


def _norms_needed(plan: Placement, kind: Kind, address: Address, index: int) -> Iterable[EdgeRule]:
    behind = plan.stage_of(address) + 1
    if kind is not Kind.STEP or plan.norms == "none" or behind == plan.num_stages:
        return ()
    # From a replica that has a micro-batch of the update: the others may learn of the update late.
    return _edges(EdgeKind.NORM, [plan.address_of(behind, index * plan.per_update)], [address])


def _norms_given(plan: Placement, kind: Kind, address: Address, index: int) -> Iterable[EdgeRule]:
    stage = plan.stage_of(address)
    if kind is not Kind.STEP or plan.norms == "none" or not stage:
        return ()
    if address != plan.address_of(stage, index * plan.per_update):
        return ()
    return _edges(EdgeKind.NORM, [address], plan.addresses_of(stage - 1))


def _totals_needed(plan: Placement, kind: Kind, address: Address, index: int) -> Iterator[EdgeRule]:
    """An update waits for its own total, or for an earlier one to estimate it; a flush for all."""
    if plan.norms == "none" or not plan.stage_of(address):  # stage 0 makes the totals
        return
    edge = Edge(EdgeKind.TOTAL, plan.address_of(0, index * plan.per_update), address)
    # With replicas every update flushes the pipe, and waits for its own total alone. Which replica
    # of stage 0 sends a total depends on the update, so another one may never come on this edge.
    if plan.replicated:
        if kind is Kind.APPLY:
            yield EdgeRule(edge)
    elif kind is Kind.APPLY:
        yield EdgeRule(edge, _itself)
    elif kind is Kind.DRAIN:
        yield EdgeRule(edge, _one_less)
    elif kind is Kind.STEP and plan.norms == "estimated":
        yield EdgeRule(edge, functools.partial(_before, plan.delay))
    elif kind is Kind.STEP:
        yield EdgeRule(edge, functools.partial(_scaled_after, plan))


def _before(delay: int, update: int) -> int:
    return update - delay


def _scaled_after(plan: Placement, update: int) -> int:
    """Return the newest update whose total has set the scale of an update's losses.

    The last stage scales them by the version that it reads. A stage must know that scale too when
    it divides the gradients by it.
    """
    return plan.reads(plan.num_stages - 1, update * plan.per_update) - 1


def _totals_given(plan: Placement, kind: Kind, address: Address, index: int) -> Iterable[EdgeRule]:
    first = plan.address_of(0, index * plan.per_update)
    if kind is not Kind.STEP or plan.norms == "none" or address != first:
        return ()
    behind = [a for a in plan.addresses if plan.stage_of(a)]
    return _edges(EdgeKind.TOTAL, [address], behind)


_TO_EACH, _FROM_EACH = "from the coordinator to each address", "from each address to it"

CHANNELS: tuple[Channel, ...] = (
    Channel(
        kind=EdgeKind.ACTIVATION,
        by=By.MICRO_BATCH,
        ends="from the coordinator to the entries, from producers to consumers",
        needed=_activations_needed,
        given=_activations_given,
    ),
    Channel(
        kind=EdgeKind.TARGET,
        by=By.MICRO_BATCH,
        ends="from the coordinator to the exit",
        needed=_targets_needed,
        given=_targets_given,
    ),
    Channel(
        kind=EdgeKind.GRADIENT,
        by=By.MICRO_BATCH,
        ends="from consumers to producers, and where the script computes the loss, from the "
        "coordinator to the exit and from the entries to it",
        needed=_gradients_needed,
        given=_gradients_given,
    ),
    Channel(
        kind=EdgeKind.LOSS,
        by=By.MICRO_BATCH,
        ends="from the exit to the coordinator; where the script computes it, the output",
        needed=_losses_needed,
        given=_losses_given,
    ),
    Channel(
        kind=EdgeKind.PARTIAL,
        by=By.UPDATE,
        ends="from each replica of a stage to the others",
        needed=_partials_needed,
        given=_partials_given,
    ),
    Channel(
        kind=EdgeKind.STEPPED,
        by=By.UPDATE,
        ends="from each replica of a stage with a sharded optimizer to the others",
        needed=_stepped_needed,
        given=_stepped_given,
    ),
    Channel(
        kind=EdgeKind.WEIGHT,
        by=By.VERSION,
        ends="from the owner of a tied weight to the stages that use it",
        needed=_weights_needed,
        given=_weights_given,
    ),
    Channel(
        kind=EdgeKind.SHARE,
        by=By.UPDATE,
        ends="from a stage that uses a tied weight to the one before it that does",
        needed=_shares_needed,
        given=_shares_given,
    ),
    Channel(
        kind=EdgeKind.NORM,
        by=By.UPDATE,
        ends="from each stage to the one before it",
        needed=_norms_needed,
        given=_norms_given,
    ),
    Channel(
        kind=EdgeKind.TOTAL,
        by=By.UPDATE,
        ends="from the first stage to all others",
        needed=_totals_needed,
        given=_totals_given,
    ),
    # No action waits for these: they come before the order, between two actions, or at any time.
    Channel(kind=EdgeKind.START, by=By.NOTHING, ends=_TO_EACH),
    Channel(kind=EdgeKind.READY, by=By.GENERATION, ends=_FROM_EACH),
    Channel(kind=EdgeKind.COMMAND, by=By.TURN, ends=_TO_EACH),
    Channel(kind=EdgeKind.REPLY, by=By.POSITION, ends=_FROM_EACH),
    Channel(kind=EdgeKind.SAVED, by=By.POSITION, ends=_FROM_EACH),
    Channel(kind=EdgeKind.FAILED, by=By.NOTHING, ends=_FROM_EACH),
)
"""Every channel; those that actions wait for come first."""

OF_ACTIONS = tuple(channel for channel in CHANNELS if channel.given is not _none)
"""The channels whose messages actions need and give."""

TO_STAGES = tuple(channel.kind for channel in CHANNELS if channel.ends == _TO_EACH)
FROM_STAGES = tuple(channel.kind for channel in CHANNELS if channel.ends == _FROM_EACH)
