"""What `Pipeline` is told beside the model: small values, checked before anything starts.

What is not given follows the environment, in which `pipedream-rt run` and torchrun leave word.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TypeAlias

from pipedream_rt.cluster.environment import MAX_RESTARTS, RESUME, TRACE
from pipedream_rt.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """Where checkpoints are kept, and when they are made.

    Attributes:
        folder: Of the run; the coordinator and all workers must share it.
        every: Mini-batches between two checkpoints that are made by themselves; the pipe does not
            stop for them. None for none: `Pipeline.save` makes one when it is called.
        keep: So many of the newest checkpoints are kept; None for all.
        resume: Go on from the newest whole checkpoint in the folder, if there is one. None: what
            `pipedream-rt run --resume` says, or torchrun that starts a job again.

    Raises:
        ConfigError: A number is below 1.
    """

    folder: str | os.PathLike[str]
    every: int | None = None
    keep: int | None = 3
    resume: bool | None = None

    def __post_init__(self) -> None:
        """Refuse what cannot be."""
        if not isinstance(self.folder, str | os.PathLike):
            raise ConfigError(f"the folder of the checkpoints must be a path, not {self.folder!r}")
        for name in ("every", "keep"):
            value = getattr(self, name)
            if value is not None:
                require_count(f"{name}, of the checkpoints,", value)

    @property
    def path(self) -> Path:
        """The folder, absolute."""
        return Path(self.folder).absolute()


CheckpointOption: TypeAlias = str | os.PathLike[str] | Checkpoints | None
"""A folder, or more about checkpoints; None for none."""


@dataclass(frozen=True, slots=True)
class Timeouts:
    """For how long the coordinator waits before it takes something for failed.

    Attributes:
        heartbeat: For a sign of life of a worker process. Workers give one four times as often,
            also while they compute.
        answer: For an answer that is sure to come; a stall longer than that is a failure.
        start: For all workers to join.

    Raises:
        ConfigError: A time is not positive.
    """

    heartbeat: timedelta = timedelta(seconds=10)
    answer: timedelta = timedelta(minutes=5)
    start: timedelta = timedelta(minutes=2)

    def __post_init__(self) -> None:
        """Refuse what cannot be."""
        for name in ("heartbeat", "answer", "start"):
            value = getattr(self, name)
            if not isinstance(value, timedelta) or value <= timedelta(0):
                raise ConfigError(
                    f"the timeout {name} must be a positive datetime.timedelta, not {value!r}"
                )


@dataclass(frozen=True, slots=True)
class ScheduleOptions:
    """What some schedules can be told.

    Attributes:
        vertical_sync: With async-1f1b: every stage reads the version that the first one reads.
        stages_per_worker: With interleaved-1f1b, 2 if None; there are stages / this workers.
        credits: Mini-batches injected before the first result is awaited; None for what the
            schedule needs. The memory for inputs is bounded by it, and a learning rate set after
            result i applies from mini-batch i + credits on.

    Raises:
        ConfigError: A number is below 1.
    """

    vertical_sync: bool = False
    stages_per_worker: int | None = None
    credits: int | None = None

    def __post_init__(self) -> None:
        """Refuse what cannot be; `Shape` does the same for the stages on each worker."""
        if self.credits is not None:
            require_count("credits", self.credits)


def require_count(name: str, value: int) -> None:
    """Refuse what is no positive integer.

    Raises:
        ConfigError: It is something else.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{name} must be an integer of at least 1, not {value!r}")


def require_instance(name: str, value: object, kind: type) -> None:
    """Refuse an option object of another kind.

    Raises:
        ConfigError: It is something else.
    """
    if not isinstance(value, kind):
        raise ConfigError(f"{name} must be {kind.__name__}(...), not {value!r}")


def checkpoint_option(checkpoint: CheckpointOption) -> Checkpoints | None:
    """Return what is said about checkpoints; a plain path is a folder.

    Raises:
        ConfigError: It is something else.
    """
    if checkpoint is None or isinstance(checkpoint, Checkpoints):
        return checkpoint
    return Checkpoints(checkpoint)


TraceOption: TypeAlias = str | os.PathLike[str] | bool | None
"""See `trace_option`."""


def trace_option(trace: TraceOption) -> tuple[bool, Path | None]:
    """Whether to record a trace, and where to write it.

    Args:
        trace: A file, True to record without writing, False not to; None to follow
            `pipedream-rt run --trace`.

    Raises:
        ConfigError: The file cannot be written.
    """
    global _traced_by_run
    if trace is None and TRACE in os.environ:
        path = Path(os.environ[TRACE])
        _traced_by_run += 1
        # A script may open several pipelines, each of which leaves a trace.
        trace = path if _traced_by_run == 1 else path.with_stem(f"{path.stem}-{_traced_by_run}")
    if trace is None or isinstance(trace, bool):
        return bool(trace), None
    if not isinstance(trace, str | os.PathLike):
        raise ConfigError(f"trace must be a file, True or False, not {trace!r}")
    return True, writable(trace)


def resume_option(checkpoints: Checkpoints | None) -> bool:
    """Whether to go on from the last checkpoint.

    Args:
        checkpoints: Where they are; ``resume=None`` there follows `pipedream-rt run --resume`, and
            torchrun when it starts a job again.

    Raises:
        ConfigError: There is no folder, and the command says to go on.
    """
    if checkpoints is None:
        if RESUME in os.environ:
            raise ConfigError(
                "resume needs the folder of the checkpoints; give Pipeline checkpoint="
            )
        return False
    if checkpoints.resume is not None:
        return bool(checkpoints.resume)
    again = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
    return RESUME in os.environ or again


def restart_option(max_restarts: int | None, default: int) -> int:
    """How many failures to recover from; None follows `pipedream-rt run --max-restarts`.

    Raises:
        ConfigError: It is no number of failures.
    """
    if max_restarts is None:
        return int(os.environ.get(MAX_RESTARTS, default))
    if isinstance(max_restarts, bool) or not isinstance(max_restarts, int) or max_restarts < 0:
        raise ConfigError(f"max_restarts must be an integer of at least 0, not {max_restarts!r}")
    return max_restarts


_traced_by_run = 0
"""Pipelines of this process that were traced because `pipedream-rt run` says so."""


def writable(path: str | os.PathLike[str]) -> Path:
    """Check that a file can be made, before a run that ends with making it.

    Raises:
        ConfigError: It cannot.
    """
    path = Path(path).absolute()
    if path.is_dir():
        raise ConfigError(f"trace must be a file, {path} is a folder")
    if not path.parent.is_dir():
        raise ConfigError(f"the trace cannot be written to {path}: there is no such folder")
    if not os.access(path.parent, os.W_OK):
        raise ConfigError(f"the trace cannot be written to {path}: no permission in its folder")
    return path
