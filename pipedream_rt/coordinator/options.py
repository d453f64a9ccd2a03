"""What the constructor of `Pipeline` leaves to the environment, or to be checked before a start."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TypeAlias

from pipedream_rt.cluster.environment import MAX_RESTARTS, RESUME, TRACE
from pipedream_rt.errors import ConfigError

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


def resume_option(resume: bool | None, has_folder: bool) -> bool:
    """Whether to go on from the last checkpoint.

    Args:
        resume: None follows `pipedream-rt run --resume`, and torchrun when it starts a job again.
        has_folder: Whether the script says where its checkpoints are.

    Raises:
        ConfigError: It does not, and was asked to go on.
    """
    again = has_folder and int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
    wanted = RESUME in os.environ or again if resume is None else bool(resume)
    if wanted and not has_folder:
        raise ConfigError("resume needs the folder of the checkpoints; give it as checkpoint")
    return wanted


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
