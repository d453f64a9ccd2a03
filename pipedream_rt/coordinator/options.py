"""The options of `Pipeline`: small values, checked before a worker starts.

Where the script gives None, some options follow environment variables that `pipedream-rt run` and
torchrun set.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TypeAlias

from pipedream_rt.cluster.environment import (
    MAX_RESTARTS,
    PROFILE,
    RESUME,
    TRACE,
    count_of_environment,
)
from pipedream_rt.coordinator.identity import require_acceptable
from pipedream_rt.errors import ConfigError


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


def require_count(name: str, value: int, least: int = 1) -> None:
    """Refuse an option that must be an integer, and not too small, and is not.

    Args:
        name: Name of the option, for the message.
        value: The value that was given.
        least: The smallest that it may be.

    Raises:
        ConfigError: The value is no such integer.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{name} must be an integer of at least {least}, not {value!r}")


def require_decay(value: object) -> None:
    """Refuse the decay of an average that is no number from 0 to 1.

    Raises:
        ConfigError: It is something else.
    """
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if value is not None and not (number and 0 <= value < 1):  # type: ignore[operator]
        raise ConfigError(f"ema must be a number from 0 to less than 1, as 0.999, not {value!r}")


def require_seed(value: object) -> None:
    """Refuse a seed that is no integer, which would make other random numbers in every process.

    Raises:
        ConfigError: It is something else.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"seed must be an integer, not {value!r}")


def require_time(name: str, value: object) -> None:
    """Refuse an option that must be a positive time and is not.

    Raises:
        ConfigError: The value is no positive `timedelta`.
    """
    if not isinstance(value, timedelta) or value <= timedelta(0):
        raise ConfigError(f"{name} must be a positive datetime.timedelta, not {value!r}")


def require_folder(checkpoints: Checkpoints | None) -> None:
    """Refuse a folder for checkpoints in which none could be written.

    Raises:
        ConfigError: Checkpoints are to be made by themselves, and no file can be made there.
    """
    if checkpoints is None or checkpoints.every is None:
        return
    try:
        checkpoints.path.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryFile(dir=checkpoints.path):
            pass
    except OSError as error:
        raise ConfigError(
            f"no checkpoint can be written to {checkpoints.path}: {error.strerror or error}"
        ) from error


def require_choice(name: str, value: object, choices: tuple[object, ...]) -> None:
    """Refuse what is none of several values.

    Raises:
        ConfigError: It is another value.
    """
    if not any(value is choice for choice in choices):
        *others, last = map(repr, choices)
        raise ConfigError(f"{name} must be {', '.join(others)} or {last}, not {value!r}")


def require_instance(name: str, value: object, kind: type) -> None:
    """Refuse an option that is no instance of its class.

    Args:
        name: Name of the option, for the message.
        value: The value that was given.
        kind: Class of the option.

    Raises:
        ConfigError: The value is no instance of the class.
    """
    if not isinstance(value, kind):
        raise ConfigError(f"{name} must be {kind.__name__}(...), not {value!r}")


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


def trace_option(trace: TraceOption) -> tuple[bool, Path | None]:
    """Return whether to record a trace, and the file to write it to.

    Args:
        trace: A file; True to record a trace and write no file; False to record none; None to
            follow `pipedream-rt run --trace`.

    Raises:
        ConfigError: The option is something else, or the file cannot be written.
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


def profile_option() -> Path | None:
    """Return the file that `pipedream-rt profile` wants; None if the script runs for itself.

    Raises:
        ConfigError: The file cannot be written.
    """
    return writable(os.environ[PROFILE], "profile") if PROFILE in os.environ else None


def resume_option(checkpoints: Checkpoints | None) -> bool:
    """Return whether to go on from the newest checkpoint.

    Args:
        checkpoints: The option of the user. With ``resume=None`` the answer is yes under
            `pipedream-rt run --resume`, and where torchrun starts a job again.

    Raises:
        ConfigError: The script runs under `pipedream-rt run --resume` and names no folder.
    """
    if checkpoints is None:
        if RESUME in os.environ:
            raise ConfigError(
                "resume needs the folder of the checkpoints; give Pipeline checkpoint="
            )
        return False
    if checkpoints.resume is not None:
        return bool(checkpoints.resume)
    again = count_of_environment("TORCHELASTIC_RESTART_COUNT", 0) > 0
    return RESUME in os.environ or again


def restart_option(max_restarts: int | None, default: int) -> int:
    """Return the number of failures to recover from.

    Args:
        max_restarts: The option of the user; None follows `pipedream-rt run --max-restarts`.
        default: The number where neither says one.

    Raises:
        ConfigError: The option, or the variable that stands for it, is no integer of at least 0.
    """
    if max_restarts is None:
        return count_of_environment(MAX_RESTARTS, default)
    if isinstance(max_restarts, bool) or not isinstance(max_restarts, int) or max_restarts < 0:
        raise ConfigError(f"max_restarts must be an integer of at least 0, not {max_restarts!r}")
    return max_restarts


_traced_by_run = 0
"""Number of pipelines in this process that are traced because of `pipedream-rt run --trace`."""


def writable(path: str | os.PathLike[str], what: str = "trace") -> Path:
    """Return the absolute path of a file; check before the run that it can be made after it.

    Raises:
        ConfigError: The file cannot be made.
    """
    path = Path(path).absolute()
    if path.is_dir():
        raise ConfigError(f"the {what} must be a file, {path} is a folder")
    if not path.parent.is_dir():
        raise ConfigError(f"the {what} cannot be written to {path}: there is no such folder")
    if not os.access(path.parent, os.W_OK):
        raise ConfigError(f"the {what} cannot be written to {path}: no permission in its folder")
    return path
