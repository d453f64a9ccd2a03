"""The plan: the stages, the workers that host them, the edges between them, and the schedule.

A plan is a pure value. It alone knows which stages come first and last, which worker hosts a stage,
and which messages an action needs and gives. The worker's loop, the checker, the simulator, the
summary and the drawings ask it. A chain of three stages has these edges for micro-batches::

    coordinator ──activation──► 0 ──activation──► 1 ──activation──► 2 ──loss──► coordinator
    coordinator ──────────────────────target──────────────────────► 2
                                0 ◄───gradient─── 1 ◄───gradient─── 2

Where the script computes the loss, it is one more place behind the last stage::

    2 ──output, on the edge of losses──► coordinator ──gradient──► 2

A plan is a placement (`placement.py`, where the stages are) with orders and with the table of
channels (`channels.py`, what an action needs and gives).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, TypeAlias

from pipedream_rt.errors import ConfigError
from pipedream_rt.schedules.actions import (
    OF_COORDINATOR,
    OF_STAGES,
    OF_UPDATES,
    Action,
    Kind,
    apply,
    drain,
    gradient,
    inject,
    until,
)
from pipedream_rt.schedules.channels import FROM_STAGES, OF_ACTIONS, TO_STAGES
from pipedream_rt.schedules.edges import COORDINATOR, Address, Edge, EdgeKind, EdgeRule, Need
from pipedream_rt.schedules.placement import Placement, Tie
from pipedream_rt.schedules.recipes import RECIPES, Recipe
from pipedream_rt.schedules.shape import Shape, slack_of

_Rows: TypeAlias = tuple[tuple[EdgeRule, ...], tuple[EdgeRule, ...]]
"""The needs of an action, then its outputs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan(Placement):
    """The placement, the edges and the schedule of one generation; `Placement` has the attributes.

    Raises:
        ConfigError: The parts do not fit each other.
    """

    # -- edges ----------------------------------------------------------------------------------

    def needs(self, action: Action, address: Address | None = None) -> tuple[Need, ...]:
        """Return what an action needs, as the table of channels says.

        Args:
            action: The action.
            address: The address that does it; None if the action names its stage.
        """
        index = action.index
        return tuple(row.of(index) for row in self.rows(action, address)[0])

    def gives(self, action: Action, address: Address | None = None) -> tuple[Need, ...]:
        """Return the messages that an action sends, as the table of channels says.

        A message whose number is below 0, or was sent before, is not sent.

        Args:
            action: The action.
            address: The address that does it; None if the action names its stage.
        """
        index = action.index
        return tuple(row.of(index) for row in self.rows(action, address)[1])

    def rows(self, action: Action, address: Address | None = None) -> _Rows:
        """Return the rows of the table of channels for an action, each made once."""
        kind, index, named = action
        doer = named if address is None else address
        assert doer is not None
        # Without replicas every index has the same edges.
        place = index % self.cycle(doer) if self.replicated else 0
        found = self._rows.get((kind, doer, place))
        if found is None:
            doer = self.addresses[doer] if doer != COORDINATOR else doer
            found = self._rows[kind, doer, place] = (
                tuple(row for each in OF_ACTIONS for row in each.needed(self, kind, doer, place)),
                tuple(row for each in OF_ACTIONS for row in each.given(self, kind, doer, place)),
            )
        return found

    def edges(self, kind: EdgeKind) -> tuple[Edge, ...]:
        """Return all edges of a kind, in the order of the addresses that they go to."""
        if kind in TO_STAGES:
            return tuple(Edge(kind, COORDINATOR, a) for a in self.addresses)
        if kind in FROM_STAGES:
            return tuple(Edge(kind, a, COORDINATOR) for a in self.addresses)
        (channel,) = (each for each in OF_ACTIONS if each.kind is kind)
        found = {
            row.edge
            for address in (COORDINATOR, *self.addresses)
            for action in (OF_COORDINATOR if address == COORDINATOR else OF_STAGES)
            for place in range(self.cycle(address))
            # Every update concerns each replica; of micro-batches, only its own do.
            if action in OF_COORDINATOR
            or action in OF_UPDATES
            or self.next_own(address, place) == place
            for row in channel.given(self, action, address, place)
        }
        return tuple(sorted(found, key=lambda edge: (edge.target, edge.source)))

    # -- the schedule ---------------------------------------------------------------------------

    def with_norms(self) -> Plan:
        """Return this plan with updates that need the norm of all gradients of the model.

        The norm is exact where every update is read late enough for that, else estimated. A single
        stage has all gradients itself, so its plan stays the same.
        """
        if self.num_stages == 1:
            return self
        return replace(self, norms="exact" if self.reads_late else "estimated")

    @property
    def cuts_backward(self) -> bool:
        """Whether backwards are computed in two halves, for the inputs and for the weights."""
        # Each stage may do it or not: an order that a user wrote need not cut all of them.
        return any(
            action.kind is Kind.INPUT
            for worker in range(self.workers)
            for action in self.order(worker, 0, self.per_update)
        )

    @property
    def outputs_come_first(self) -> bool:
        """Whether the last stage does all forwards of an update before its first backward."""
        exit_, k = self.exits[0], self.per_update
        if self.replicated and len(self.addresses_of(exit_)) > 1:
            return False  # no replica has all of them
        worker = self.worker_of(self.address_of(exit_))
        done = 0
        for action in self.order(worker, 0, 2 * k):
            if action.stage not in (None, self.address_of(exit_)):
                continue
            done += action.kind is Kind.FORWARD
            if action.kind in (Kind.BACKWARD, Kind.INPUT) and done < (action.index // k + 1) * k:
                return False
        return True

    def order(self, worker: int, start: int = 0, stop: int | None = None) -> Iterator[Action]:
        """Return an iterator over the actions of a worker, in order.

        Args:
            worker: Index of the worker, 0-based.
            start: The first micro-batch, a multiple of ``per_update``; nothing is in flight before
                it.
            stop: One past the last micro-batch, a multiple of ``per_update``; None for no end.

        Raises:
            ScheduleError: Only the name of the schedule is known.
        """
        if worker == COORDINATOR:
            return self._order_of_coordinator(start, stop)
        endless = self._known.order.order(worker, self.shape, start)
        if apart := [a for a in self.stages_of(worker) if self.applied_by(a) is Kind.APPLY]:
            endless = with_applies(self, endless, apart, self.first_of(worker), start)
        if stop is None:
            return endless
        return self.rest(endless, worker, stop, self.work(worker, start, stop))

    def _order_of_coordinator(self, start: int, stop: int | None) -> Iterator[Action]:
        """Yield the injections; where the script computes the loss, with its gradients between.

        With one micro-batch for each update and two mini-batches ahead::

            N0 N1 G0 N2 G1 N3 G2 ...
        """
        k, answered = self.per_update, start
        ahead = self.credits() * k
        for m in count(start) if stop is None else range(start, stop):
            if self.loss_in_script and m - answered >= ahead:
                yield from map(gradient, range(answered, answered + k))
                answered += k
            yield inject(m)
        if self.loss_in_script and stop is not None:
            yield from map(gradient, range(answered, stop))

    def rest(self, order: Iterator[Action], worker: int, stop: int, left: int) -> Iterator[Action]:
        """Yield the rest of a worker's endless order when the micro-batches end: the drain.

        With the last action nothing is in flight; then each stage of the worker ends the flush.

        Args:
            order: The rest of the order.
            worker: Index of the worker.
            stop: One past the last micro-batch, a multiple of ``per_update``.
            left: How much of `work` is left.
        """
        yield from until(order, stop, self.per_update, left)
        hosted = self.stages_of(worker)
        for address in hosted:
            yield drain(stop // self.per_update, address if len(hosted) > 1 else None)

    def work(self, worker: int, start: int, stop: int) -> int:
        """Return how many steps, ``T``, ``A`` and ends of micro-batches a worker has to do.

        Args:
            worker: Index of the worker.
            start: The first micro-batch, a multiple of ``per_update``.
            stop: One past the last micro-batch, a multiple of ``per_update``.
        """
        apart = sum(self.applied_by(a) is Kind.APPLY for a in self.stages_of(worker))
        return self.shape.work(worker, start, stop) + apart * ((stop - start) // self.per_update)

    # -- as plain data --------------------------------------------------------------------------

    def packed(self) -> dict[str, Any]:
        """Return the plan as plain data that msgpack and JSON can write; see `unpacked`."""
        shape = self.shape
        return {
            "name": self.name,
            "workers": shape.workers,
            "per_update": shape.per_update,
            "stages_per_worker": shape.stages_per_worker,
            "slack": list(shape.slack),
            "synchronous": shape.synchronous,
            "layers": [list(names) for names in self.layers],
            "hosts": list(self.hosts),
            "links": [list(link) for link in self.links or ()],
            "entries": list(self.entries),
            "ties": [[tie.name, list(tie.stages)] for tie in self.ties],
            "replicas": list(self.replicas),
            "shard_optimizer": shape.shard_optimizer,
            "norms": self.norms,
            "loss_in_script": self.loss_in_script,
        }

    @staticmethod
    def unpacked(data: Mapping[str, Any]) -> Plan:
        """Return the plan that `packed` has turned into data.

        Of a schedule that a user wrote, the data have only the name.

        Raises:
            KeyError: The data are no plan.
            TypeError: The data are no plan.
            ValueError: The data are no plan.
            ConfigError: The parts of the plan do not fit each other.
        """
        return Plan(
            name=data["name"],
            shape=Shape(
                workers=data["workers"],
                per_update=data["per_update"],
                stages_per_worker=data["stages_per_worker"],
                slack=tuple(data["slack"]),
                synchronous=data.get("synchronous", 0),
                replicas=tuple(data["replicas"]) if data["stages_per_worker"] == 1 else (),
                shard_optimizer=data.get("shard_optimizer", False),
            ),
            recipe=RECIPES.get(data["name"]),
            layers=tuple(map(tuple, data["layers"])),
            hosts=tuple(data["hosts"]),
            links=tuple((producer, consumer) for producer, consumer in data["links"]),
            entries=tuple(data.get("entries", ())),
            ties=tuple(Tie(name, tuple(stages)) for name, stages in data.get("ties", ())),
            # Data from before norms were estimated may say "delayed".
            norms="estimated" if data.get("norms") == "delayed" else data.get("norms", "none"),
            loss_in_script=data.get("loss_in_script", False),
        )


def plan_of(
    name: str,
    recipe: Recipe,
    num_stages: int,
    per_update: int | None,
    stages_per_worker: int | None,
    synchronous: int,
    slack: int | Sequence[int],
    replicas: int | Sequence[int],
    shard_optimizer: bool,
) -> Plan:
    """Return the plan of a chain of stages with a recipe; the numbers are those of `plan_for`."""
    counts = replicas_of(replicas, num_stages)
    if synchronous and recipe.flushes:
        raise ConfigError(
            f"every update of {name} flushes the pipe, so it has no use for synchronous_updates"
        )
    each = recipe.stages_per_worker if stages_per_worker is None else stages_per_worker
    if isinstance(each, int) and each > 1 and num_stages % each:
        raise ConfigError(
            f"{num_stages} stages cannot be dealt to workers with {each} each; choose a multiple "
            f"of {each}, or another stages_per_worker"
        )
    # Checked before they are divided, so that errors show the numbers that the caller gave.
    Shape(workers=num_stages, stages_per_worker=each)
    shape = Shape(
        workers=sum(counts) or num_stages // each,
        stages_per_worker=each,
        slack=slack_of(slack, num_stages),
        synchronous=synchronous,
        replicas=counts,
        shard_optimizer=shard_optimizer,
    )
    if per_update is None:
        per_update = 1 if recipe.flushes else shape.longest_lag + 1
    if shard_optimizer and (recipe.flushes or synchronous) and per_update < max(counts, default=1):
        raise ConfigError(
            f"shard_optimizer with {name} needs at least as many micro-batches per update as a "
            f"stage has replicas: micro_batches is {per_update}, replicas are "
            f"{'-'.join(map(str, counts))}"
        )
    shape = replace(shape, per_update=per_update)
    recipe.order.require(shape)
    recipe.versions.require(shape)
    return Plan(name=name, shape=shape, recipe=recipe)


def replicas_of(replicas: int | Sequence[int], num_stages: int) -> tuple[int, ...]:
    """Return the numbers of replicas by stage, checked; empty if each stage has one."""
    counts = tuple(replicas) if isinstance(replicas, Sequence) else (replicas,) * num_stages
    if any(not isinstance(r, int) or isinstance(r, bool) or r < 1 for r in counts):
        raise ConfigError(f"replicas must be integers of at least 1, not {replicas!r}")
    if counts and len(counts) != num_stages:
        raise ConfigError(
            f"replicas has {len(counts)} numbers, but there are {num_stages} stages; give one "
            "number for each stage"
        )
    return () if set(counts) == {1} else counts


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
