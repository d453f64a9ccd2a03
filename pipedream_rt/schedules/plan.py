"""The plan: which stages there are, where they run, what flows between them, and in which order.

A plan is a pure value. It alone knows which stages come first and last, which worker hosts a stage,
what an action waits for and what it gives. The worker's loop, the checker, the simulator, the
summary and the drawings read that here. A chain of three stages has these edges for micro-batches::

    coordinator ──activation──► 0 ──activation──► 1 ──activation──► 2 ──loss──► coordinator
    coordinator ──────────────────────target──────────────────────► 2
                                0 ◄───gradient─── 1 ◄───gradient─── 2

An edge is a directed way for one kind of message from one address to another. Address, stage and
worker are three things: messages go to addresses, a plan says which stage has which address (its
own index, as long as each stage has one replica) and which worker hosts it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias, TypeVar

from pipedream_rt.errors import ConfigError, ScheduleError
from pipedream_rt.schedules.actions import SENDS_BACK, Action, Kind, until
from pipedream_rt.schedules.recipes import RECIPES, VERTICAL_SYNC, Recipe, describe_schedules
from pipedream_rt.schedules.shape import Shape, slack_of

T = TypeVar("T")

Address: TypeAlias = int
"""Where a message goes: a stage's index, or `COORDINATOR`."""

COORDINATOR: Address = -1
"""The address of the coordinator."""


class EdgeKind(Enum):
    """What an edge carries."""

    ACTIVATION = "activation"  # the input of a forward, from the coordinator or another stage
    TARGET = "target"
    GRADIENT = "gradient"
    LOSS = "loss"
    START = "start"  # what a stage is made of
    READY = "ready"
    COMMAND = "command"
    REPLY = "reply"
    SAVED = "saved"
    FAILED = "failed"

    # By identity: the default, which hashes the name in Python, is slow, and keys are hashed often.
    __hash__ = object.__hash__


class Edge(NamedTuple):
    """A directed way for one kind of message.

    Attributes:
        kind: What it carries.
        source, target: Addresses of its two ends.
    """

    kind: EdgeKind
    source: Address
    target: Address

    def __str__(self) -> str:
        """For messages, as ``gradient from stage 2 to stage 1``."""
        return f"{self.kind.value} from {name_of(self.source)} to {name_of(self.target)}"


def name_of(address: Address) -> str:
    """Return what people call an address: ``the coordinator`` or ``stage 2``."""
    return "the coordinator" if address == COORDINATOR else f"stage {address}"


_TO_STAGES = (EdgeKind.START, EdgeKind.COMMAND)
_FROM_STAGES = (EdgeKind.READY, EdgeKind.REPLY, EdgeKind.SAVED, EdgeKind.FAILED)

_Edges: TypeAlias = dict[Kind, tuple[tuple[Edge, ...], ...]]
"""For each kind of action, by stage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The stages, their places, the edges between them, and the schedule, for one generation.

    Attributes:
        name: Of the schedule.
        shape: Workers, stages, micro-batches per update, slack.
        recipe: Order and version policy; None where a schedule that a user wrote is known by its
            name only, as in a trace that was read from a file.
        layers: By stage, the names of its layers in the unsplit model; empty where there is no
            model, as for a simulation.
        hosts: By stage, the worker that hosts it; as `Shape.worker_of` deals them if not given.
        links: Pairs of stages, producer and consumer, of activations; a chain if not given. A
            producer has a lower index than its consumers.
        replicas: By stage, how many copies of it there are; 1 each, more are not supported yet.

    Raises:
        ConfigError: The parts do not fit each other.
    """

    name: str
    shape: Shape
    recipe: Recipe | None = None
    layers: tuple[tuple[str, ...], ...] = ()
    hosts: tuple[int, ...] = ()
    links: tuple[tuple[int, int], ...] | None = None
    replicas: tuple[int, ...] = ()
    _producers: tuple[tuple[int, ...], ...] = field(init=False, repr=False, compare=False)
    _consumers: tuple[tuple[int, ...], ...] = field(init=False, repr=False, compare=False)
    _entries: tuple[int, ...] = field(init=False, repr=False, compare=False)
    _exits: tuple[int, ...] = field(init=False, repr=False, compare=False)
    _needs: _Edges = field(init=False, repr=False, compare=False)
    _gives: _Edges = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Fill in what was not given, and look every edge up once."""
        stages, put = range(self.shape.num_stages), object.__setattr__
        put(self, "hosts", self.hosts or tuple(map(self.shape.worker_of, stages)))
        put(self, "links", tuple(pairwise(stages)) if self.links is None else self.links)
        put(self, "replicas", self.replicas or (1,) * len(stages))
        self._refuse_misfits()
        producers: list[list[int]] = [[] for _ in stages]
        consumers: list[list[int]] = [[] for _ in stages]
        for producer, consumer in sorted(self.links or ()):
            producers[consumer].append(producer)
            consumers[producer].append(consumer)
        put(self, "_producers", tuple(map(tuple, producers)))
        put(self, "_consumers", tuple(map(tuple, consumers)))
        put(self, "_entries", tuple(s for s in stages if not producers[s]))
        put(self, "_exits", tuple(s for s in stages if not consumers[s]))
        if len(self.exits) != 1:
            raise ConfigError(
                f"one stage must compute the loss, but stages {list(self.exits)} send nothing on"
            )
        into, out_of = self._edges_into(), self._edges_out_of()
        nothing: tuple[tuple[Edge, ...], ...] = ((),) * len(stages)
        put(self, "_needs", dict.fromkeys(Kind, nothing))
        put(self, "_gives", dict.fromkeys(Kind, nothing))
        self._needs[Kind.FORWARD] = into
        self._gives[Kind.FORWARD] = out_of
        for kind in SENDS_BACK:
            self._needs[kind] = tuple(_reversed_edges(edges) for edges in out_of)
            self._gives[kind] = tuple(_reversed_edges(edges) for edges in into)

    def _refuse_misfits(self) -> None:
        """Refuse parts that do not fit each other."""
        assert self.links is not None
        count, workers = self.num_stages, self.shape.workers
        for what, values in (("hosts", self.hosts), ("replicas", self.replicas)):
            if len(values) != count:
                raise ConfigError(f"{what} has {len(values)} entries, there are {count} stages")
        if self.layers and len(self.layers) != count:
            raise ConfigError(f"layers has {len(self.layers)} entries, there are {count} stages")
        if any(not 0 <= host < workers for host in self.hosts):
            raise ConfigError(f"hosts must be workers from 0 to {workers - 1}, found {self.hosts}")
        if set(self.replicas) != {1}:
            raise ConfigError(f"each stage has one replica for now, not {self.replicas}")
        for link in self.links:
            producer, consumer = link
            if not 0 <= producer < consumer < count:
                raise ConfigError(f"a link goes from a stage to a later one, {link} does not")
        if len(set(self.links)) < len(self.links):
            raise ConfigError("a link is there twice; a stage sends its output once to another")

    def _edges_into(self) -> tuple[tuple[Edge, ...], ...]:
        """By stage, what a forward needs: activations by producer, then the target."""
        return tuple(
            (
                *(Edge(EdgeKind.ACTIVATION, p, s) for p in self.producers(s) or (COORDINATOR,)),
                *(() if self.consumers(s) else (Edge(EdgeKind.TARGET, COORDINATOR, s),)),
            )
            for s in range(self.num_stages)
        )

    def _edges_out_of(self) -> tuple[tuple[Edge, ...], ...]:
        """By stage, what a forward gives: activations by consumer, or the loss."""
        return tuple(
            tuple(Edge(EdgeKind.ACTIVATION, s, c) for c in self.consumers(s))
            or (Edge(EdgeKind.LOSS, s, COORDINATOR),)
            for s in range(self.num_stages)
        )

    # -- the graph ------------------------------------------------------------------------------

    @property
    def num_stages(self) -> int:
        """Stages of the model."""
        return self.shape.num_stages

    @property
    def workers(self) -> int:
        """Workers that are needed."""
        return self.shape.workers

    @property
    def per_update(self) -> int:
        """Micro-batches per update, k."""
        return self.shape.per_update

    def producers(self, stage: int) -> tuple[int, ...]:
        """Return the stages whose activations a stage takes, in rising order."""
        return self._producers[stage]

    def consumers(self, stage: int) -> tuple[int, ...]:
        """Return the stages that take a stage's activations, in rising order."""
        return self._consumers[stage]

    @property
    def entries(self) -> tuple[int, ...]:
        """The stages that take the model's input."""
        return self._entries

    @property
    def exits(self) -> tuple[int, ...]:
        """The stages that give the model's output and compute the loss: one."""
        return self._exits

    def worker_of(self, stage: int) -> int:
        """Return the worker that hosts a stage."""
        return self.hosts[stage]

    def stages_of(self, worker: int) -> tuple[int, ...]:
        """Return the stages that a worker hosts, in the order of the model."""
        return tuple(s for s, host in enumerate(self.hosts) if host == worker)

    def name_of(self, worker: int) -> str:
        """Return ``"stage 2"`` for the worker that hosts it alone, else ``"worker 1"``."""
        stages = self.stages_of(worker)
        return f"stage {stages[0]}" if len(stages) == 1 else f"worker {worker}"

    def part(self, named: Mapping[str, T]) -> list[dict[str, T]]:
        """Return, by stage, the entries whose names are of the stage's layers.

        Args:
            named: By name in the unsplit model, as ``"3.weight"``.
        """
        prefixes = [tuple(f"{layer}." for layer in layers) for layers in self.layers]
        return [{k: v for k, v in named.items() if k.startswith(own)} for own in prefixes]

    # -- edges ----------------------------------------------------------------------------------

    def needs(self, action: Action, stage: int | None = None) -> tuple[Edge, ...]:
        """Return the edges whose message an action waits for.

        Args:
            action: What is to be done; the number of the messages is its micro-batch.
            stage: That does it; None where the action names it.
        """
        doer = action.stage if stage is None else stage
        assert doer is not None
        return self._needs[action.kind][doer]

    def gives(self, action: Action, stage: int | None = None) -> tuple[Edge, ...]:
        """Return the edges on which an action sends; see `needs`."""
        doer = action.stage if stage is None else stage
        assert doer is not None
        return self._gives[action.kind][doer]

    def neighbours(self, kind: Kind) -> tuple[tuple[int, ...], ...]:
        """Return, by stage, the stages whose message an action of a kind waits for."""
        return tuple(
            tuple(edge.source for edge in edges if edge.source != COORDINATOR)
            for edges in self._needs[kind]
        )

    def edges(self, kind: EdgeKind) -> tuple[Edge, ...]:
        """Return all edges of a kind, by stage: as many as messages are to be expected."""
        stages = range(self.num_stages)
        if kind in _TO_STAGES:
            return tuple(Edge(kind, COORDINATOR, s) for s in stages)
        if kind in _FROM_STAGES:
            return tuple(Edge(kind, s, COORDINATOR) for s in stages)
        found = (e for edges in self._needs.values() for row in edges for e in row)
        given = (e for edges in self._gives.values() for row in edges for e in row)
        return tuple(dict.fromkeys(edge for edge in (*found, *given) if edge.kind is kind))

    # -- the schedule ---------------------------------------------------------------------------

    @property
    def _known(self) -> Recipe:
        """Order and versions, or an error that says that they are not known."""
        if self.recipe is None:
            raise ScheduleError(
                f"the schedule {self.name!r} is known by name only: it was written by a user, and "
                "its class is not here; give the schedule itself, or a Replay of the trace"
            )
        return self.recipe

    @property
    def flushes(self) -> bool:
        """Whether the pipe is empty at every update."""
        return self._known.flushes

    def order(self, worker: int, start: int = 0, stop: int | None = None) -> Iterator[Action]:
        """Yield what a worker does, in order.

        Args:
            worker: Index, 0-based.
            start: First micro-batch, a multiple of ``per_update``; nothing is in flight before it.
            stop: One past the last micro-batch, a multiple of ``per_update``; None for no end.

        Returns:
            The actions, lazily.
        """
        endless = self._known.order.order(worker, self.shape, start)
        if stop is None:
            return endless
        k = self.per_update
        left = self.shape.stages_per_worker * (stop - start + (stop - start) // k)
        return until(endless, stop, k, left)

    def reads(self, stage: int, micro_batch: int) -> int:
        """Return the weight version that a micro-batch reads at a stage."""
        return self._known.versions.reads(stage, self.shape, micro_batch)

    def kept(self, stage: int) -> int:
        """Return the most weight versions that a stage holds."""
        return self._known.versions.kept(stage, self.shape)

    def in_flight(self, stage: int) -> int:
        """Return the most micro-batches in flight on a stage."""
        return self._known.order.in_flight(stage, self.shape)

    def credits(self) -> int:
        """Return how many mini-batches to inject before the first result is waited for.

        Enough that the first stage never waits for the coordinator, and one where the pipe is
        flushed anyway: then a learning rate set after a result applies to the very next
        mini-batch, as in a plain training loop.
        """
        if self.flushes:
            return 1
        return max(-(-self.in_flight(s) // self.per_update) for s in self.entries) + 1

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
            "layers": [list(names) for names in self.layers],
            "hosts": list(self.hosts),
            "links": [list(link) for link in self.links or ()],
            "replicas": list(self.replicas),
        }

    @staticmethod
    def unpacked(data: Mapping[str, Any]) -> Plan:
        """Return the plan that `packed` was asked of.

        A schedule that a user wrote is then known by its name alone.

        Raises:
            KeyError, TypeError, ValueError: The data are no plan.
            ConfigError: Its parts do not fit each other.
        """
        return Plan(
            name=data["name"],
            shape=Shape(
                workers=data["workers"],
                per_update=data["per_update"],
                stages_per_worker=data["stages_per_worker"],
                slack=tuple(data["slack"]),
            ),
            recipe=RECIPES.get(data["name"]),
            layers=tuple(map(tuple, data["layers"])),
            hosts=tuple(data["hosts"]),
            links=tuple((producer, consumer) for producer, consumer in data["links"]),
            replicas=tuple(data["replicas"]),
        )


def _reversed_edges(edges: tuple[Edge, ...]) -> tuple[Edge, ...]:
    """Return the gradients that answer the activations among some edges."""
    return tuple(
        Edge(EdgeKind.GRADIENT, edge.target, edge.source)
        for edge in edges
        if edge.kind is EdgeKind.ACTIVATION and edge.source != COORDINATOR
    )


def plan_named(
    name: str,
    *,
    num_stages: int,
    per_update: int = 1,
    stages_per_worker: int | None = None,
    vertical_sync: bool = False,
    slack: int | Sequence[int] = 0,
) -> Plan:
    """Look a schedule up by its name and make the plan of a chain of stages with it.

    Args:
        name: A key of `RECIPES`.
        num_stages: Number of stages, at least 1.
        per_update: Micro-batches per update, at least 1.
        stages_per_worker: For interleaved-1f1b, 2 if None.
        vertical_sync: Means ``name + "+vertical-sync"``, for async-1f1b: every stage reads the
            version that the first one reads.
        slack: Extra warm-up forwards before each hop: one number for all, or one for each.

    Returns:
        The plan, without names of layers.

    Raises:
        ConfigError: Unknown name, a number out of range, or no such schedule for these numbers.
    """
    if name not in RECIPES:
        raise ConfigError(f"unknown schedule {name!r}; the known ones are\n{describe_schedules()}")
    if vertical_sync and not name.endswith(VERTICAL_SYNC):
        if name + VERTICAL_SYNC not in RECIPES:
            raise ConfigError(f"vertical_sync is an option of async-1f1b, not of {name}")
        name += VERTICAL_SYNC
    return chain(name, RECIPES[name], num_stages, per_update, stages_per_worker, slack)


def chain(
    name: str,
    recipe: Recipe,
    num_stages: int,
    per_update: int,
    stages_per_worker: int | None,
    slack: int | Sequence[int],
) -> Plan:
    """Make the plan of a chain of stages, if the recipe has a schedule for these numbers.

    Raises:
        ConfigError: It has none.
    """
    each = recipe.stages_per_worker if stages_per_worker is None else stages_per_worker
    if isinstance(each, int) and each > 1 and num_stages % each:
        raise ConfigError(
            f"{num_stages} stages cannot be dealt to workers with {each} each; choose a multiple "
            f"of {each}, or another stages_per_worker"
        )
    Shape(workers=num_stages, stages_per_worker=each)  # both numbers, in words of the caller
    shape = Shape(
        workers=num_stages // each,
        per_update=per_update,
        stages_per_worker=each,
        slack=slack_of(slack, num_stages),
    )
    recipe.order.require(shape)
    recipe.versions.require(shape)
    return Plan(name=name, shape=shape, recipe=recipe)
