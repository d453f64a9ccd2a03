"""Options from the environment where the script leaves them None, and checks before a run.

`pipedream-rt run` and torchrun set the variables. Whether folders and files can be written is tried
before a run, so that it does not fail at its end.
"""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import cast

from pipedream_rt.cluster.environment import (
    MAX_RESTARTS,
    PROFILE,
    RECORD,
    RESUME,
    SCHEDULE,
    TRACE,
    count_of_environment,
)
from pipedream_rt.errors import ConfigError
from pipedream_rt.job.options import Checkpoints, Options, TraceOption
from pipedream_rt.paths import given_path
from pipedream_rt.schedules.recipes import ScheduleName
from pipedream_rt.schema import takes_output


def tried(options: Options) -> Options:
    """Return the options with which a schedule is tried, if one is: its events alone are kept.

    Checkpoints go to where the events go, so that nothing of the script's is written over.
    """
    if SCHEDULE not in os.environ:
        return options
    kept, folder = options.kept, given_path(os.environ[RECORD], RECORD).parent / "checkpoints"
    return replace(
        options,
        schedule=cast(ScheduleName, os.environ[SCHEDULE]),  # which `Options` checks
        is_tried=True,
        checkpoint=None if kept is None else replace(kept, folder=folder, resume=False),
        observe=replace(options.observe, record=None, report=None, trace=False),
    )


def resolved(options: Options) -> Options:
    """Fill in the options that the script leaves to the environment."""
    kept, recovery, observe = options.kept, options.recovery, options.observe
    resume = resume_option(kept)
    restarts = restart_option(recovery.max_restarts, 3 if options.makes_checkpoints else 0)
    record = record_option(observe.record)
    report = None if observe.report is None else writable(observe.report, "report")
    # What shows a run shows its trace too, unless that is not wanted.
    shown = observe.trace is None and TRACE not in os.environ and bool(record or report)
    traced, path = trace_option(True if shown else observe.trace)
    return replace(
        options,
        checkpoint=None if kept is None else replace(kept, resume=resume),
        recovery=replace(recovery, max_restarts=restarts),
        observe=replace(observe, trace=path or traced, record=record, report=report),
        # The script of `pipedream-rt profile` trains nothing.
        workers=options.workers if profile_option() is None else "serial",
    )


def take_place(options: Options) -> None:
    """Make the checkpoint folder, and count the paths taken, once nothing else can be refused."""
    require_folder(options.kept)
    for option, name in ((options.observe.record, RECORD), (options.observe.trace, TRACE)):
        if option is None and name in os.environ:
            _taken[name] += 1


def require_folder(checkpoints: Checkpoints | None) -> None:
    """Refuse a folder for checkpoints in which none could be written."""
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


def trace_option(trace: TraceOption) -> tuple[bool, Path | None]:
    """Return whether to record a trace, and the file to write it to."""
    if trace is None:
        trace = _of_environment(TRACE)
    if trace is None or isinstance(trace, bool):
        return bool(trace), None
    return True, writable(trace)


def record_option(record: str | os.PathLike[str] | None) -> Path | None:
    """Return the folder in which a run is recorded; None for none."""
    if record is None:
        record = _of_environment(RECORD)
    return None if record is None else given_path(record, "the folder of the record").absolute()


def _of_environment(name: str) -> Path | None:
    """Return the path in a variable; each later pipeline of a script adds its number."""
    if name not in os.environ:
        return None
    path, number = given_path(os.environ[name], name), _taken[name] + 1
    return path if number == 1 else path.with_stem(f"{path.stem}-{number}")


def profile_option() -> Path | None:
    """Return the file that `pipedream-rt profile` wants; None if the script does not run for it."""
    return writable(os.environ[PROFILE], "profile") if PROFILE in os.environ else None


def resume_option(checkpoints: Checkpoints | None) -> bool:
    """Return whether to go on from the newest checkpoint."""
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
    """Return the number of failures to recover from."""
    return count_of_environment(MAX_RESTARTS, default) if max_restarts is None else max_restarts


_taken: Counter[str] = Counter()
"""By variable, the number of pipelines in this process that took a path from it."""


def writable(path: str | os.PathLike[str], what: str = "trace") -> Path:
    """Return the absolute path of a file, after a check that it can be written."""
    path = given_path(path, f"the {what}").absolute()
    if path.is_dir():
        raise ConfigError(f"the {what} must be a file, {path} is a folder")
    if not path.parent.is_dir():
        raise ConfigError(
            f"the {what} cannot be written to {path}: there is no folder {path.parent}"
        )
    there = path.exists()
    if there and not takes_output(path.stat().st_mode):
        kind = "a socket" if path.is_socket() else "a disk"
        raise ConfigError(f"the {what} cannot be written to {path}: it is {kind}")
    # A device, or a file that is mounted by itself, is written in place, whatever its folder.
    if not os.access(path.parent, os.W_OK) and not (there and os.access(path, os.W_OK)):
        raise ConfigError(f"the {what} cannot be written to {path}: no permission in its folder")
    return path
