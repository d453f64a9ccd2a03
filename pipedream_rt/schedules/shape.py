"""How many workers, stages and micro-batches a schedule is for."""

from __future__ import annotations

from dataclasses import dataclass

from pipedream_rt.errors import ConfigError

COORDINATOR = -1
"""Stands where a stage would: as an address, in a span. Stages have theirs from 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The numbers that an order and a version policy depend on.

    Stages are dealt to the workers in turn, so that neighbours in the model are neighbours in the
    ring of workers (Megatron's interleaving)::

        3 workers, 2 stages each     worker 0   worker 1   worker 2
                                     stage 0    stage 1    stage 2
                                     stage 3    stage 4    stage 5

    Attributes:
        workers: n; each has one thread that computes.
        per_update: k, micro-batches per update.
        stages_per_worker: v, model chunks on each worker.
    """

    workers: int
    per_update: int = 1
    stages_per_worker: int = 1

    def __post_init__(self) -> None:
        """Refuse numbers below 1."""
        for what, value in (
            ("stages", self.workers),
            ("micro_batches", self.per_update),
            ("stages_per_worker", self.stages_per_worker),
        ):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"{what} must be an integer of at least 1, not {value!r}")

    @property
    def num_stages(self) -> int:
        """Stages of the model, n v."""
        return self.workers * self.stages_per_worker

    def name_of(self, worker: int) -> str:
        """``"stage 2"``, or ``"worker 1"`` where workers host several stages."""
        return f"{'stage' if self.stages_per_worker == 1 else 'worker'} {worker}"

    def worker_of(self, stage: int) -> int:
        """Return the worker that hosts a stage."""
        return stage % self.workers

    def stages_of(self, worker: int) -> range:
        """Return the stages that a worker hosts, in the order of the model."""
        return range(worker, self.num_stages, self.workers)
