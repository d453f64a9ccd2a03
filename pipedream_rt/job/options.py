"""The options of `Pipeline`: small values, checked before a worker starts."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TypeAlias

from pipedream_rt.errors import ConfigError
from pipedream_rt.job.identity import require_acceptable
from pipedream_rt.job.requirements import require_choice, require_count, require_time


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """Where checkpoints are kept, and when they are made.

    Attributes:
        folder: Folder of the run, which the coordinator and all workers must share.
        every: Number of mini-batches after which a checkpoint is made, without stopping the pipe;
            None if only `Pipeline.save` makes checkpoints.
        keep: Number of the newest checkpoints to keep; None to keep all.
        resume: Whether to go on from the newest whole checkpoint in the folder, if there is one.
            None: yes under `pipedream-rt run --resume`, and where torchrun starts a job again.
        accept: What may differ between the script that made the checkpoint and the one that goes
            on, of ``"seed"``, ``"optimizer"``, ``"groups"``, ``"loss"``, ``"hyper_parameters"``,
            ``"schedule"``, ``"threads"`` and ``"torch"``. Another seed, optimizer or grouping is
            refused otherwise, and the others are logged with both values. With another optimizer
            accepted, its state starts empty; with other hyper-parameters, those of the script hold.
        attempts: Number of checkpoints in a row that may fail to be written; the last of them ends
            the loop with its `CheckpointError`. None to go on for ever.
        grace: With ``every``, how long SIGTERM waits for a checkpoint: the run makes one after the
            next mini-batch and ends with exit code 143, or ends without one after this time.

    Raises:
        ConfigError: The folder is no path, a number is below 1, or a name is unknown.
    """

    folder: str | os.PathLike[str]
    every: int | None = None
    keep: int | None = 3
    resume: bool | None = None
    accept: Sequence[str] = ()
    attempts: int | None = 3
    grace: timedelta = timedelta(seconds=20)

    def __post_init__(self) -> None:
        """Check the values."""
        require_acceptable(self.accept)
        require_time("the grace time of the checkpoints", self.grace)
        if not isinstance(self.folder, str | os.PathLike):
            raise ConfigError(f"the folder of the checkpoints must be a path, not {self.folder!r}")
        require_choice("resume, of the checkpoints,", self.resume, (True, False, None))
        for name in ("every", "keep", "attempts"):
            value = getattr(self, name)
            if value is not None:
                require_count(f"{name}, of the checkpoints,", value)

    @property
    def path(self) -> Path:
        """The folder as an absolute path."""
        return Path(self.folder).absolute()


CheckpointOption: TypeAlias = str | os.PathLike[str] | Checkpoints | None
"""The folder of the checkpoints, or `Checkpoints`; None for no checkpoints."""


@dataclass(frozen=True, slots=True)
class Timeouts:
    """The times for which the coordinator waits before it counts something as failed.

    Attributes:
        heartbeat: How long a worker process may be silent. Workers send four signs of life in that
            time, also while they compute.
        answer: How long to wait for a message that is sure to come.
        start: How long to wait for all workers to join.

    Raises:
        ConfigError: A time is no positive `timedelta`.
    """

    heartbeat: timedelta = timedelta(seconds=10)
    answer: timedelta = timedelta(minutes=5)
    start: timedelta = timedelta(minutes=2)

    def __post_init__(self) -> None:
        """Check the values."""
        for name in ("heartbeat", "answer", "start"):
            require_time(f"the timeout {name}", getattr(self, name))


@dataclass(frozen=True, slots=True)
class ScheduleOptions:
    """Options that apply to some schedules.

    Attributes:
        vertical_sync: With ``async-1f1b``, whether every stage reads the weight version that the
            first stage reads.
        synchronous_updates: With ``async-1f1b`` and ``2bw``, the number of updates at the start of
            a run of which each flushes the pipe, as in ``1f1b``: no gradient is stale while weights
            move fast.
        stages_per_worker: With ``interleaved-1f1b``, the number of stages on each worker; 2 if
            None.
        credits: Number of mini-batches that are injected before the first result is awaited; None
            for what the schedule needs. It bounds the memory for inputs, and a learning rate that
            is set after result i applies from mini-batch i + credits on.

    Raises:
        ConfigError: A number is below 1.
    """

    vertical_sync: bool = False
    synchronous_updates: int = 0
    stages_per_worker: int | None = None
    credits: int | None = None

    def __post_init__(self) -> None:
        """Check the credits; `Shape` checks the stages on each worker."""
        require_choice("vertical_sync", self.vertical_sync, (True, False))
        if self.credits is not None:
            require_count("credits", self.credits)


def checkpoint_option(checkpoint: CheckpointOption) -> Checkpoints | None:
    """Return the option ``checkpoint`` of `Pipeline` as `Checkpoints`; a path is their folder.

    Raises:
        ConfigError: The option is neither a path nor `Checkpoints`.
    """
    if checkpoint is None or isinstance(checkpoint, Checkpoints):
        return checkpoint
    return Checkpoints(checkpoint)


TraceOption: TypeAlias = str | os.PathLike[str] | bool | None
"""A file to write the trace to, or whether to record one; None follows the environment."""
