"""The numbers that an order and a version policy depend on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from pipedream_rt.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The numbers of workers, stages and micro-batches that a schedule is for, and its slack.

    The stages are dealt to the workers in turn, as in Megatron's interleaving, so that the stage
    after one is on the next worker, and after the last worker on the first again::

        3 workers, 2 stages each     worker 0   worker 1   worker 2
                                     stage 0    stage 1    stage 2
                                     stage 3    stage 4    stage 5

    Attributes:
        workers: The number of workers, n.
        per_update: The number of micro-batches per update, k.
        stages_per_worker: The number of stages on each worker, v.
        slack: The extra warm-up forwards e_j before the hop from stage j to stage j+1, one number
            for each of the n-1 hops; empty for none. Only with one stage on each worker.
        synchronous: The number of updates at the start of a run of which each flushes the pipe, in
            a schedule that flushes no more after them.

    Raises:
        ConfigError: A number is out of range, or slack has too many or too few numbers.
    """

    workers: int
    per_update: int = 1
    stages_per_worker: int = 1
    slack: tuple[int, ...] = ()
    synchronous: int = 0
    _warm_ups: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Check the numbers, and compute the warm-ups, which are asked for often."""
        for what, value in (
            ("stages", self.workers),
            ("micro_batches", self.per_update),
            ("stages_per_worker", self.stages_per_worker),
        ):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"{what} must be an integer of at least 1, not {value!r}")
        count = self.synchronous
        if not isinstance(count, int) or isinstance(count, bool) or count < 0:
            raise ConfigError(
                f"synchronous_updates must be an integer of at least 0, not {count!r}"
            )
        slack = slack_of(self.slack, self.num_stages)
        if any(slack) and self.stages_per_worker > 1:
            raise ConfigError("slack is for schedules with one stage on each worker")
        object.__setattr__(self, "slack", slack if any(slack) else ())
        hops = (0, *(1 + extra for extra in reversed(slack)))
        object.__setattr__(self, "_warm_ups", tuple(accumulate(hops))[::-1])

    @property
    def num_stages(self) -> int:
        """The number of stages of the model, n v."""
        return self.workers * self.stages_per_worker

    def warm_up(self, stage: int) -> int:
        """Return w(s) = (n-1-s) + sum of e_j for j >= s.

        A 1F1B order does so many forwards on a stage before it begins to alternate forwards and
        backwards; one micro-batch more is then in flight there at most. The formula holds for n
        stages, one on each worker.
        """
        return self._warm_ups[stage]

    @property
    def first_asynchronous(self) -> int:
        """The first micro-batch after the synchronous updates."""
        return self.synchronous * self.per_update

    def work(self, micro_batches: int) -> int:
        """Return how many steps and ends of micro-batches (``B`` or ``W``) a worker has to do.

        Args:
            micro_batches: Number of the micro-batches, a multiple of ``per_update``.
        """
        return self.stages_per_worker * (micro_batches + micro_batches // self.per_update)

    def worker_of(self, stage: int) -> int:
        """Return the worker that a stage is dealt to; a plan may let another one host it."""
        return stage % self.workers

    def stages_of(self, worker: int) -> range:
        """Return the stages that are dealt to a worker, in the order of the model."""
        return range(worker, self.num_stages, self.workers)


def slack_of(slack: int | Sequence[int], num_stages: int) -> tuple[int, ...]:
    """Return the slack of every hop.

    Args:
        slack: One number for all hops, or a number for each hop; an empty sequence for no slack.
        num_stages: Number of stages, between which there is one hop less.

    Returns:
        One number for each hop.

    Raises:
        ConfigError: A number is negative or no integer, or there are too many or too few.
    """
    hops = num_stages - 1
    given = list(slack) if isinstance(slack, Sequence) else [slack]
    for value in given:
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise ConfigError(f"slack must be integers of at least 0, not {value!r}")
    if isinstance(slack, int) or not given:
        given = (given or [0]) * hops
    if len(given) != hops:
        raise ConfigError(
            f"slack has {len(given)} numbers, but {num_stages} stages have {hops} hops between "
            "them; give one number for each hop, or one for all"
        )
    return tuple(given)


def parse_slack(texts: Sequence[str]) -> int | tuple[int, ...]:
    """Return slack from the texts of its numbers.

    Args:
        texts: One number for all hops, or a number for each hop.

    Returns:
        One integer if there is one text, else all of them.

    Raises:
        ConfigError: A text is no integer of at least 0.
    """
    for text in texts:
        if not (text.strip().isascii() and text.strip().isdecimal()):
            raise ConfigError(f"slack must be integers of at least 0, not {text!r}")
    numbers = tuple(map(int, texts))
    return numbers[0] if len(numbers) == 1 else numbers
