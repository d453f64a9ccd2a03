"""Puts ``A`` into orders whose updates wait for a norm that comes after their step."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from pipedream_rt.schedules.actions import Action, Kind, apply
from pipedream_rt.schedules.edges import Address
from pipedream_rt.schedules.placement import Placement


def with_applies(
    plan: Placement, order: Iterator[Action], apart: Collection[Address], first: Address, start: int
) -> Iterator[Action]:
    """Yield an endless order, with an ``A`` before the first forward that reads an update.

    ``apart`` are the addresses of the worker that apply their updates by ``A``, and ``first`` is
    the address of actions that name no stage. The last stage of three with vertical sync, k = 1::

        F0 B0 S0 F1 B1 S1 F2 B2 S2 A0 F3 B3 S3 A1 F4 ...
    """
    # Each update is applied as late as possible. The total that it waits for is made of the steps
    # of other stages: right after its own step, it could wait for a stage of the same worker that
    # has yet to step.
    stepped = dict.fromkeys(apart, start // plan.per_update)
    applied = dict(stepped)
    for action in order:
        kind, index, named = action
        address = first if named is None else named
        if address in stepped:
            if kind is Kind.STEP:
                stepped[address] = index + 1
            elif kind is Kind.FORWARD:
                read = plan.reads(plan.stage_of(address), index)
                for update in range(applied[address], min(read, stepped[address])):
                    applied[address] = update + 1
                    yield apply(update, named)
        yield action
    for address in apart:  # the order of a replay is finite, and its last updates have no reader
        named = None if len(plan.stages_of(plan.worker_of(address))) == 1 else address
        for update in range(applied[address], stepped[address]):
            yield apply(update, named)
