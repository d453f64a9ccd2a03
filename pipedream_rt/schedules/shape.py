"""The shape of a schedule: the numbers that an order and a version policy depend on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from pipedream_rt.errors import ConfigError
from pipedream_rt.schema import is_count, shown

MOST_STAGES = 1 << 16
"""The most stages of a model, and the most workers of a job."""

_MOST_MICRO_BATCHES = 1 << 20
_MOST_SLACK = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The numbers of workers, stages and micro-batches that a schedule is for, and its slack.

    The stages are dealt to the workers in turn, as in Megatron's interleaving: the next stage is on
    the next worker, and after the last worker on the first again::

        3 workers, 2 stages each     worker 0   worker 1   worker 2
                                     stage 0    stage 1    stage 2
                                     stage 3    stage 4    stage 5

    Or each worker has one replica of a stage. Micro-batch m goes to replica m mod r of a stage with
    r replicas. Workers are counted stage by stage::

        replicas (2, 1)              worker 0             worker 1             worker 2
                                     stage 0, replica 0   stage 0, replica 1   stage 1

    Attributes:
        workers: The number of workers, n.
        per_update: The number of micro-batches per update, k.
        stages_per_worker: The number of stages on each worker, v.
        slack: The extra warm-up forwards e_j before the hop from stage j to stage j+1, one number
            for each of the n-1 hops; empty for none. Only with one stage on each worker.
        synchronous: The number of updates at the start of a run that flush the pipe, in a schedule
            that never flushes after them.
        replicas: By stage, the number of its replicas, r; empty if each stage has one.
        shard_optimizer: Whether each of several replicas steps its own part of the weights.
        places: The stages on all workers, each of its replicas alone, stage by stage: pairs of a
            stage and the number of a replica.

    Raises:
        ConfigError: A number is out of range, or slack has too many or too few numbers.
    """

    workers: int
    per_update: int = 1
    stages_per_worker: int = 1
    slack: tuple[int, ...] = ()
    synchronous: int = 0
    replicas: tuple[int, ...] = ()
    shard_optimizer: bool = False
    places: tuple[tuple[int, int], ...] = field(init=False, repr=False, compare=False)
    _warm_ups: tuple[int, ...] = field(init=False, repr=False, compare=False)
    _lags: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Check the numbers, and compute what is asked for often."""
        for what, value, most in (
            ("stages", self.workers, MOST_STAGES),
            ("micro_batches", self.per_update, _MOST_MICRO_BATCHES),
            ("stages_per_worker", self.stages_per_worker, MOST_STAGES),
        ):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"{what} must be an integer of at least 1, not {value!r}")
            if value > most:
                raise ConfigError(f"{what} must be {most} at the most, not {value}")
        if (stages := self.workers * self.stages_per_worker) > MOST_STAGES:
            raise ConfigError(f"there can be {MOST_STAGES} stages at the most, not {stages}")
        count = self.synchronous
        if not isinstance(count, int) or isinstance(count, bool) or count < 0:
            raise ConfigError(
                f"synchronous_updates must be an integer of at least 0, not {count!r}"
            )
        put = object.__setattr__
        put(self, "replicas", self._checked_replicas())
        slack = slack_of(self.slack, self.num_stages)
        if any(slack) and self.stages_per_worker > 1:
            raise ConfigError("slack is for schedules with one stage on each worker")
        put(self, "slack", slack if any(slack) else ())
        counts = self.replicas or (1,) * self.num_stages
        places = tuple((stage, q) for stage, count in enumerate(counts) for q in range(count))
        put(self, "places", places)
        # By stage, the workers behind it, with the slack of the hops up to there.
        hops = (0, *(r + e for r, e in zip(reversed(counts[1:]), reversed(slack), strict=True)))
        behind = tuple(accumulate(hops))[::-1]
        pairs = tuple(zip(counts, behind, strict=True))
        put(self, "_warm_ups", tuple(warm_up_of(r, after) for r, after in pairs))
        put(self, "_lags", tuple(lag_of(r, after) for r, after in pairs))

    def _checked_replicas(self) -> tuple[int, ...]:
        """Return the numbers of replicas; empty if each stage has one."""
        for count in self.replicas:
            if not isinstance(count, int) or isinstance(count, bool) or count < 1:
                raise ConfigError(f"replicas must be integers of at least 1, not {count!r}")
        if not self.replicas or set(self.replicas) == {1}:
            return ()
        if self.stages_per_worker > 1:
            raise ConfigError("replicas are for schedules with one stage on each worker")
        if sum(self.replicas) != self.workers:
            raise ConfigError(
                f"{sum(self.replicas)} replicas, one on each worker, are not {self.workers} workers"
            )
        return self.replicas

    @property
    def num_stages(self) -> int:
        """The number of stages of the model: n v, unless some have replicas."""
        return len(self.replicas) or self.workers * self.stages_per_worker

    def warm_up(self, stage: int) -> int:
        """Return w(s), the warm-up forwards of a stage.

        Without replicas it is (n-1-s) + sum of e_j for j >= s; with replicas see `warm_up_of`.
        """
        return self._warm_ups[stage]

    def lag(self, stage: int) -> int:
        """Return the lag of a stage; see `lag_of`."""
        return self._lags[stage]

    @property
    def longest_lag(self) -> int:
        """The largest lag of a stage."""
        return max(self._lags)

    def place_of(self, worker: int) -> tuple[int, int, int]:
        """Return the first stage of a worker, which replica of it, and how many it has."""
        stage, replica = self.places[worker]
        return stage, replica, self.replicas[stage] if self.replicas else 1

    def first_own(self, worker: int, start: int) -> int:
        """Return the first micro-batch from ``start`` on that goes to a worker."""
        _, replica, count = self.place_of(worker)
        return start + (replica - start) % count

    @property
    def first_asynchronous(self) -> int:
        """The first micro-batch after the synchronous updates."""
        return self.synchronous * self.per_update

    def work(self, worker: int, start: int, stop: int) -> int:
        """Return how many steps, ``T``, and ends of micro-batches (``B`` or ``W``) a worker has.

        Args:
            worker: Index of the worker.
            start: The first micro-batch, a multiple of ``per_update``.
            stop: One past the last micro-batch, a multiple of ``per_update``.
        """
        stage, _, count = self.place_of(worker)
        own = len(range(self.first_own(worker, start), stop, count))
        each = 2 if self.shards(stage) else 1  # S and T, or S
        return self.stages_per_worker * (own + each * ((stop - start) // self.per_update))

    def shards(self, stage: int) -> bool:
        """Whether the optimizer of a stage is sharded over its replicas."""
        return self.shard_optimizer and bool(self.replicas) and self.replicas[stage] > 1

    def worker_of(self, place: int) -> int:
        """Return the worker that a stage or replica is dealt to; a plan may let another host it."""
        return place % self.workers

    def stages_of(self, worker: int) -> range:
        """Return the stages or replicas that are dealt to a worker, in the order of the model."""
        return range(worker, len(self.places), self.workers)


def warm_up_of(replicas: int, after: int) -> int:
    """Return the forwards of each replica before its order alternates with backwards.

    It is ceil(after / replicas), where ``after`` counts the workers on later stages and the slack
    of the hops up to there. At most one micro-batch more is then in flight.

    Source: Narayanan et al., PipeDream (SOSP 2019), section 3.2 (1F1B-RR).
    """
    return -(-after // replicas)


def lag_of(replicas: int, after: int) -> int:
    """Return by how many micro-batches the newest update that a forward may read is behind it."""
    # Each of several replicas does one more micro-batch, while gradients are reduced: r (w + 1).
    warm_up = warm_up_of(replicas, after)
    return warm_up if replicas == 1 else replicas * (warm_up + 1)


def slack_of(slack: int | Sequence[int], num_stages: int) -> tuple[int, ...]:
    """Return the slack of every hop, from one number for all or a number for each."""
    hops = num_stages - 1
    values = list(slack) if isinstance(slack, Sequence) else [slack]
    for value in values:
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise ConfigError(f"slack must be integers of at least 0, not {value!r}")
        if value > _MOST_SLACK:
            raise ConfigError(f"slack must be {_MOST_SLACK} at the most, not {value}")
    if isinstance(slack, int) or not values:
        values = (values or [0]) * hops
    if len(values) != hops:
        raise ConfigError(
            f"slack has {len(values)} numbers, but {num_stages} stages have {hops} hops between "
            "them; give one number for each hop, or one for all"
        )
    return tuple(values)


def parse_slack(texts: Sequence[str]) -> int | tuple[int, ...]:
    """Return slack from texts: one number for all hops, or a number for each."""
    for text in texts:
        if not is_count(text.strip()):
            raise ConfigError(f"slack must be integers of at least 0, not {shown(text, 60)}")
    numbers = tuple(map(int, texts))
    return numbers[0] if len(numbers) == 1 else numbers
