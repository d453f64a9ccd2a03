"""Where the stages are: their workers and replicas, what joins them, and the versions they read.

Address, stage and worker are three numberings. A message goes to an address. A stage has one
address for each of its replicas, and a worker hosts an address. Addresses are counted stage by
stage, so without replicas the address of a stage is its index.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar

from pipedream_rt.errors import ConfigError, ScheduleError
from pipedream_rt.schedules.actions import Kind
from pipedream_rt.schedules.edges import COORDINATOR, Address, Edge, EdgeKind, name_of
from pipedream_rt.schedules.recipes import Recipe
from pipedream_rt.schedules.shape import Shape

T = TypeVar("T")

LOSS_LAYER = "(loss)"
"""The name of a loss that is a module, behind the layers of its stage. No layer of a model has this
name, so the keys of the loss's weights never collide with the model's."""


class Tie(NamedTuple):
    """A trainable weight that several stages use.

    The first of them owns it and steps it. Every use by a micro-batch reads the version that the
    owner reads for that micro-batch. The gradients of a mini-batch go from the last stage to the
    one before it, which adds its own, and so on down to the owner.
    """

    name: str
    stages: tuple[int, ...]


Norms: TypeAlias = Literal["none", "estimated", "exact"]
"""Which norm of all gradients clips an update: none, one estimated from an earlier update, or its
own, for which it may have to wait."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The stages, the workers that host them, what joins them, and the versions that they read.

    It is a `Plan` without the table of channels and without orders.

    Attributes:
        name: The name of the schedule.
        shape: The numbers of workers, stages, replicas and micro-batches per update, and the slack.
        recipe: The order and the version policy; None if a user wrote the schedule and only its
            name is known, as in a trace that was read from a file.
        layers: By stage, the names of its layers in the unsplit model, and of the parameters and
            buffers that it has beside them; empty if there is no model, as in a simulation.
        hosts: By address, the worker that hosts it; if not given, as `Shape.worker_of` deals them.
        links: The pairs of a producer and a consumer of its activations; if not given, a chain. A
            producer has a lower index than its consumers.
        entries: The stages that take inputs of the model; those without a producer always do.
        ties: The trainable weights that several stages use.
        norms: Which norm of all gradients updates need; see `with_norms`.
        ahead: The number of mini-batches that the coordinator injects before it waits for the
            first result; 0 for as many as keep the first stage from waiting. See `credits`.
        loss_in_script: Whether the script computes the loss, in the place of the last stage: the
            exit sends it the output, and gets the gradient back.
        addresses: All addresses but the coordinator's, stage by stage.
        replicas: By stage, the number of its replicas.
        replicated: Whether a stage has several.
    """

    name: str
    shape: Shape
    recipe: Recipe | None = None
    layers: tuple[tuple[str, ...], ...] = ()
    hosts: tuple[int, ...] = ()
    links: tuple[tuple[int, int], ...] | None = None
    entries: tuple[int, ...] = ()
    ties: tuple[Tie, ...] = ()
    norms: Norms = "none"
    ahead: int = 0
    loss_in_script: bool = False
    addresses: tuple[Address, ...] = field(init=False, repr=False, compare=False)
    replicas: tuple[int, ...] = field(init=False, repr=False, compare=False)
    replicated: bool = field(init=False, repr=False, compare=False)
    _firsts: tuple[int, ...] = field(init=False, repr=False, compare=False)
    _producers: tuple[tuple[int, ...], ...] = field(init=False, repr=False, compare=False)
    _consumers: tuple[tuple[int, ...], ...] = field(init=False, repr=False, compare=False)
    _exits: tuple[int, ...] = field(init=False, repr=False, compare=False)
    _weights: dict[Edge, tuple[Tie, ...]] = field(init=False, repr=False, compare=False)
    _shares: dict[Edge, tuple[Tie, ...]] = field(init=False, repr=False, compare=False)
    _cycles: tuple[int, ...] = field(init=False, repr=False, compare=False)
    # Caches in containers, since a frozen instance cannot set a field later.
    _rows: dict[Any, Any] = field(init=False, repr=False, compare=False)
    _delay: list[int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Fill in the attributes that are not given, check all, and compute the edges."""
        stages, put = range(self.shape.num_stages), object.__setattr__
        put(self, "links", tuple(pairwise(stages)) if self.links is None else self.links)
        counts = self.shape.replicas or (1,) * len(stages)
        put(self, "replicas", counts)
        put(self, "replicated", bool(self.shape.replicas))
        put(self, "_firsts", tuple(accumulate((0, *counts[:-1]))))
        put(self, "addresses", tuple(range(len(self.shape.places))))
        put(self, "hosts", self.hosts or tuple(map(self.shape.worker_of, self.addresses)))
        self._refuse_misfits()
        producers: list[list[int]] = [[] for _ in stages]
        consumers: list[list[int]] = [[] for _ in stages]
        for producer, consumer in sorted(self.links or ()):
            producers[consumer].append(producer)
            consumers[producer].append(consumer)
        put(self, "_producers", tuple(map(tuple, producers)))
        put(self, "_consumers", tuple(map(tuple, consumers)))
        first = tuple(s for s in stages if not producers[s])
        put(self, "entries", tuple(sorted({*self.entries, *first})))
        if not {*self.entries} <= {*stages}:
            raise ConfigError(f"entries must be stages, found {list(self.entries)}")
        put(self, "_exits", tuple(s for s in stages if not consumers[s]))
        if len(self.exits) != 1:
            raise ConfigError(
                "one stage must compute the loss, and have no consumer; the stages without a "
                f"consumer are {list(self.exits)}"
            )
        put(self, "_weights", {})
        put(self, "_shares", {})
        for tie in self.ties:
            for user in tie.stages[1:]:
                _append(self._weights, Edge(EdgeKind.WEIGHT, tie.stages[0], user), tie)
            for before, user in pairwise(tie.stages):
                _append(self._shares, Edge(EdgeKind.SHARE, user, before), tie)
        near = [{s, *producers[s], *consumers[s]} for s in stages]
        # Norms go to the stage before, and totals from stage 0 to all.
        if self.norms != "none":
            near = [
                {*nearby, 0, max(0, s - 1), min(s + 1, stages[-1])} for s, nearby in enumerate(near)
            ]
        # Micro-batch m goes to replica m mod r of each neighbour, so routes repeat with their lcm.
        cycles = tuple(math.lcm(*(counts[s] for s in nearby)) for nearby in near)
        put(self, "_cycles", cycles)
        put(self, "_rows", {})
        put(self, "_delay", [])

    def _refuse_misfits(self) -> None:
        assert self.links is not None
        count, workers = self.num_stages, self.shape.workers
        if len(self.hosts) != len(self.addresses):
            what = "replicas of stages" if self.shape.replicas else "stages"
            raise ConfigError(
                f"hosts has {len(self.hosts)} entries, there are {len(self.addresses)} {what}"
            )
        if self.layers and len(self.layers) != count:
            raise ConfigError(f"layers has {len(self.layers)} entries, there are {count} stages")
        if any(not 0 <= host < workers for host in self.hosts):
            raise ConfigError(f"hosts must be workers from 0 to {workers - 1}, found {self.hosts}")
        if self.ties and self.shape.replicas:
            raise ConfigError(
                f"{self.ties[0].name} is used on several stages, so no stage may have replicas; "
                "put the layers that use it into one stage, or use no replicas"
            )
        for link in self.links:
            producer, consumer = link
            if not 0 <= producer < consumer < count:
                raise ConfigError(f"a link must go from a stage to a later one; {link} does not")
        for tie in self.ties:
            rising = all(a < b for a, b in pairwise((-1, *tie.stages, count)))
            if len(tie.stages) < 2 or not rising:
                raise ConfigError(f"a tie joins two or more rising stages; {tie} does not")
        if len(set(self.links)) < len(self.links):
            raise ConfigError("a link is given twice; a stage sends its output once to a consumer")

    # -- replicas -------------------------------------------------------------------------------

    def stage_of(self, address: Address) -> int:
        """Return the stage of which an address has a replica."""
        return self.shape.places[address][0]

    def replica_of(self, address: Address) -> int:
        """Return the number of an address among the replicas of its stage."""
        return self.shape.places[address][1]

    def address_of(self, stage: int, micro_batch: int = 0) -> Address:
        """Return the address of the replica of a stage that a micro-batch goes to.

        It is replica 0 by default: evaluation, inference and questions to a stage go there.
        """
        return self.addresses[self._firsts[stage] + micro_batch % self.replicas[stage]]

    def addresses_of(self, stage: int) -> tuple[Address, ...]:
        """Return the addresses of all replicas of a stage, in rank order."""
        first = self._firsts[stage]
        return self.addresses[first : first + self.replicas[stage]]

    def others(self, address: Address) -> tuple[Address, ...]:
        """Return the addresses of the other replicas of its stage, in rank order."""
        every = self.addresses_of(self.stage_of(address))
        return tuple(other for other in every if other != address)

    def contributors(self, stage: int, update: int) -> tuple[Address, ...]:
        """Return the addresses of the replicas that have micro-batches of an update."""
        first, k = update * self.per_update, self.per_update
        count = min(k, self.replicas[stage])
        return tuple(sorted(self.address_of(stage, m) for m in range(first, first + count)))

    def next_own(self, address: Address, micro_batch: int) -> int:
        """Return the first micro-batch from a number on that goes to an address."""
        if not self.replicated:
            return micro_batch
        # With replicas, the shape counts workers as addresses are counted here.
        return self.shape.first_own(address, micro_batch)

    def next_of_stage(self, address: Address, next_own: int, update: int) -> int:
        """Return the oldest micro-batch that may still read a version once a replica has updated.

        ``next_own`` is the next forward of the replica itself.
        """
        # Versions are kept for the other replicas too: after a flush, replica 0 writes them to
        # checkpoints for all.
        if not self.replicated:
            return next_own
        count = self.replicas[self.stage_of(address)]
        return max(next_own - count + 1, (update + 1) * self.per_update)

    # -- the graph ------------------------------------------------------------------------------

    @property
    def num_stages(self) -> int:
        """The number of stages."""
        return self.shape.num_stages

    @property
    def workers(self) -> int:
        """The number of workers, n."""
        return self.shape.workers

    @property
    def per_update(self) -> int:
        """The number of micro-batches per update, k."""
        return self.shape.per_update

    def producers(self, stage: int) -> tuple[int, ...]:
        """Return the stages whose activations a stage needs, in rising order."""
        return self._producers[stage]

    def consumers(self, stage: int) -> tuple[int, ...]:
        """Return the stages that need a stage's activations, in rising order."""
        return self._consumers[stage]

    @property
    def exits(self) -> tuple[int, ...]:
        """The stages that give the model's output and compute the loss: always one."""
        return self._exits

    def worker_of(self, address: Address) -> int:
        """Return the worker that hosts a stage, or one of its replicas."""
        return self.hosts[address]

    def stages_of(self, worker: int) -> tuple[Address, ...]:
        """Return the addresses that a worker hosts, in the order of the model."""
        return tuple(a for a in self.addresses if self.hosts[a] == worker)

    def name_of(self, worker: int) -> str:
        """Return the name of a worker: ``"stage 2"`` if it hosts one, else ``"worker 1"``."""
        hosted = self.stages_of(worker)
        return self.title_of(hosted[0]) if len(hosted) == 1 else f"worker {worker}"

    def title_of(self, address: Address) -> str:
        """Return the name of an address for people, as ``stage 1, replica 0``."""
        if address == COORDINATOR or not self.replicated:
            return name_of(address)
        stage = self.stage_of(address)
        alone = self.replicas[stage] == 1
        return name_of(stage) + ("" if alone else f", replica {self.replica_of(address)}")

    def label_of(self, address: Address) -> str:
        """Return the number of a stage, with that of the replica if it has several, as ``1.0``."""
        stage = self.stage_of(address)
        alone = self.replicas[stage] == 1
        return str(stage) if alone else f"{stage}.{self.replica_of(address)}"

    @property
    def in_words(self) -> str:
        """The numbers of stages, replicas and workers."""
        replicas = f" with {'-'.join(map(str, self.replicas))} replicas" * bool(self.shape.replicas)
        return f"{self.num_stages} stages{replicas} on {self.workers} workers"

    def first_of(self, worker: int) -> Address:
        """Return the first address of a worker, which does the actions that name no stage."""
        return self.addresses[self.hosts.index(worker)]

    def part(self, named: Mapping[str, T]) -> list[dict[str, T]]:
        """Return, by stage, the entries whose keys name its layers or what is in them.

        Keys are as in the unsplit model: ``"3.weight"``. The stage that computes the loss also has
        `LOSS_LAYER`. An entry with an empty key is for every stage.
        """
        of_stages = [
            (*names, LOSS_LAYER) if stage in self.exits else names
            for stage, names in enumerate(self.layers)
        ]
        return [
            {
                key: value
                for key, value in named.items()
                if not key or key in layers or key.startswith(tuple(f"{name}." for name in layers))
            }
            for layers in of_stages
        ]

    def cycle(self, address: Address) -> int:
        """Return the period, in micro-batches or updates, after which an address's edges repeat."""
        if address == COORDINATOR:
            return math.lcm(*(self.replicas[s] for s in (*self.entries, *self.exits)))
        return self._cycles[self.stage_of(address)]

    def borrows(self, stage: int) -> dict[Edge, tuple[Tie, ...]]:
        """Return the edges on which a stage gets new versions of weights that others own."""
        return {edge: ties for edge, ties in self._weights.items() if edge.target == stage}

    def lends(self, stage: int) -> dict[Edge, tuple[Tie, ...]]:
        """Return the edges on which a stage sends new versions of weights that it owns."""
        return {edge: ties for edge, ties in self._weights.items() if edge.source == stage}

    def shares_for(self, stage: int) -> dict[Edge, tuple[Tie, ...]]:
        """Return the edges on which shares of gradients of tied weights come to a stage."""
        return {edge: ties for edge, ties in self._shares.items() if edge.target == stage}

    def shares_of(self, stage: int) -> dict[Edge, tuple[Tie, ...]]:
        """Return the edges on which a stage sends shares of gradients of tied weights."""
        return {edge: ties for edge, ties in self._shares.items() if edge.source == stage}

    # -- the schedule ---------------------------------------------------------------------------

    @property
    def _known(self) -> Recipe:
        if self.recipe is None:
            raise ScheduleError(
                f"of the schedule {self.name!r}, which a user wrote, only the name is known; give "
                "the schedule itself, or a Replay of the trace"
            )
        return self.recipe

    @property
    def flushes(self) -> bool:
        """Whether the pipe is empty at every update."""
        return self._known.flushes

    @property
    def title(self) -> str:
        """The name of the schedule, with its synchronous updates and the replicas of stages."""
        count, replicas = self.shape.synchronous, "-".join(map(str, self.shape.replicas))
        title = f"{self.name} with {replicas} replicas" if replicas else self.name
        return f"{title} after {count} synchronous updates" if count else title

    def applied_by(self, address: Address) -> Kind:
        """Return the kind of the action that applies an update: the step, or an ``A`` after it.

        It is ``A`` where the update waits for a norm that comes after its step. Stage 0 makes that
        norm, so it never waits.
        """
        waits = self.norms == "exact" and self.stage_of(address) > 0
        return Kind.APPLY if waits else Kind.STEP

    @property
    def delay(self) -> int:
        """D, the pipeline's depth in updates: an estimate for update u uses the total of u - D."""
        # Computed once: to count what is in flight, a user's order may have to be executed.
        if not self._delay:
            self._delay.append(-(-self.in_flight(0) // self.per_update))
        return self._delay[0]

    @property
    def reads_late(self) -> bool:
        """Whether every update is first read when the norm of its gradients is known everywhere.

        The norm of update t is known from micro-batch k (t+1) + w(0) on, since stage 0 does that
        forward after the last backward of the mini-batch. An update that flushes is always read so
        late.
        """
        if self.flushes:
            return True
        k, ahead, first = self.per_update, self.in_flight(0) - 1, self.shape.synchronous
        stages, updates = range(self.num_stages), range(first, first + 4 * self.num_stages + 4)
        return all(self.reads(s, k * (t + 1) + ahead - 1) <= t for s in stages for t in updates)

    def reads(self, stage: int, micro_batch: int) -> int:
        """Return the weight version that a micro-batch reads at a stage."""
        return self._known.versions.reads(stage, self.shape, micro_batch)

    def kept(self, stage: int) -> int:
        """Return the largest number of weight versions that a stage keeps at a time."""
        return self._known.versions.kept(stage, self.shape)

    def staleness(self, stage: int) -> int:
        """Return the most updates by which a gradient is behind the weights that it is applied to.

        That is in the steady phase. At the start of a run, and after synchronous updates, gradients
        are less stale.
        """
        k = self.per_update
        ahead = max(self.in_flight(stage), self.shape.lag(stage))
        # Past the warm-up, which reads newer versions than the steady phase.
        first = self.shape.first_asynchronous + k * (4 + -(-ahead // k))
        return max(m // k - self.reads(stage, m) for m in range(first, first + k))

    def in_flight(self, stage: int) -> int:
        """Return the largest number of micro-batches in flight on a replica of a stage."""
        return self._known.order.in_flight(stage, self.shape)

    def credits(self) -> int:
        """Return the number of mini-batches to inject before waiting for the first result.

        In asynchronous schedules, enough that the first stage never waits for the coordinator. In
        schedules that flush, one: then a learning rate that is set after a result applies to the
        next mini-batch, as in a plain training loop.
        """
        if self.ahead:
            return self.ahead
        if self.flushes:
            return 1
        deepest = max(self.in_flight(s) * self.replicas[s] for s in self.entries)
        return -(-deepest // self.per_update) + 1


def _append(ties: dict[Edge, tuple[Tie, ...]], edge: Edge, tie: Tie) -> None:
    ties[edge] = (*ties.get(edge, ()), tie)
