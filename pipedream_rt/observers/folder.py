"""The folder of a run: its events, as JSON lines, and its trace.

A run writes a line for each event as it comes. So what a killed script has done can be read, and
another process can follow a run: `pipedream-rt watch` and `pipedream-rt report` only read this.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import secrets
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from pipedream_rt.errors import ConfigError, TraceError
from pipedream_rt.lifecycle import close_in_forked_children
from pipedream_rt.observers.run_record import RunRecord
from pipedream_rt.schedules import Plan
from pipedream_rt.schema import open_file, open_to_append
from pipedream_rt.telling import log_of
from pipedream_rt.tracing.events import Begun, Ended, Event, packed, unpacked
from pipedream_rt.tracing.spans import SpanFolder, newest_spans
from pipedream_rt.tracing.trace import Trace, WorkerFacts, fitting

_log = log_of(__name__)

EVENTS, TRACE = "events.jsonl", "trace"
"""The files of a folder."""

_LONGEST = 1 << 26
"""Bytes that a line may have."""

_LINE = re.compile(rb'\{"event": "[a-z]+", "time": ')
"""How every line begins, whichever version has written it."""


class RunFolder:
    """Writes the events of a run into a folder, which it makes and locks. An `Observer`.

    A script that goes on after a checkpoint adds to what is there.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder).absolute()
        path = self.folder / EVENTS
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._shown = Path(SpanFolder.in_folder(self.folder).folder)
            self._refuse_others()
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
            # Unbuffered: a killed script loses no line.
            self._file = open(open_to_append(path, flags), "ab", buffering=0)  # noqa: SIM115
            close_in_forked_children(self._file)  # or a child would hold the lock of a dead script
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_cut(path):  # or the next line would be lost with the cut one
                self._file.write(b"\n")
            self._forget_what_was_shown()
            self._shown.mkdir(exist_ok=True)
        except BlockingIOError:
            self._file.close()
            raise ConfigError(
                f"another run is recorded in {self.folder}; give each a folder of its own"
            ) from None
        except OSError as error:
            raise ConfigError(
                f"the run cannot be recorded in {self.folder}: {error.strerror}"
            ) from error

    def __call__(self, event: Event) -> None:
        """Write an event."""
        if isinstance(event, Begun):
            if not event.step and self._file.tell():
                _log.warning(
                    "%s has the record of an earlier run: reports show this one from now on, and "
                    "%s keeps the lines of both. Give each run a folder of its own to see both",
                    self.folder, EVENTS,
                )  # fmt: skip
            (self.folder / TRACE).unlink(missing_ok=True)
        if isinstance(event, Ended) and event.trace is not None:
            part = self.folder / f".{secrets.token_hex(8)}.part"
            event.trace.save(part)
            # `TRACE` may be a link by now, which `save` would follow.
            part.replace(self.folder / TRACE)
        self._file.write(json.dumps(packed(event)).encode() + b"\n")
        if isinstance(event, Ended):
            if event.trace is not None:
                self._forget_what_was_shown()
            self.close()

    def _refuse_others(self) -> None:
        """Refuse a folder in which something has a name of ours, and no run has written it."""
        path = self.folder / EVENTS
        found = [f"{self._shown} is a link"] if self._shown.is_symlink() else []
        try:
            with open_file(path, follow=False) as file:
                if (begin := file.read(100)) and not _LINE.match(begin):
                    found.append(f"{path} was not written by pipedream-rt")
        except FileNotFoundError:  # then no run was here, and what there is belongs to others
            others = filter(os.path.lexists, [self.folder / TRACE, *self._of_workers()])
            found += [f"{each} is of no run that was recorded there" for each in others]
        except OSError as error:
            found.append(f"{path} cannot be read ({error.strerror})")
        if found:
            raise ConfigError(
                f"{found[0]}, and has a name that a record needs; give the run a folder of its own"
            )

    def _of_workers(self) -> list[Path]:
        """Return the files in which the script and the workers show their spans."""
        return [self._shown / "script", *self._shown.glob("worker-*")]

    def _forget_what_was_shown(self) -> None:
        """Remove the spans that were shown, and their folder if nothing else is in it."""
        for path in self._of_workers():
            path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self._shown.rmdir()

    def close(self) -> None:
        """Close the file, so that another run may write it. Idempotent."""
        self._file.close()


def _is_cut(path: Path) -> bool:
    """Whether the last line of a file has no end, as after its writer was killed."""
    with open_file(path) as file:
        if not file.seek(0, os.SEEK_END):
            return False
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"


class Following:
    """A reader of the folder of a run, which may be going on.

    Attributes:
        unreadable: The number of lines that are no events.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        try:
            self._file = open_file(self.folder / EVENTS)
        except (OSError, ValueError) as error:
            raise TraceError(_why_not(self.folder, error)) from error
        self._rest = b""
        self.unreadable = 0

    def new(self) -> Iterator[Event]:
        """Yield the events that have come since the last call, without any trace."""
        while block := self._file.read(1 << 20):
            # The last piece may be a line that is not whole yet.
            *lines, self._rest = (self._rest + block).split(b"\n")
            if len(self._rest) > _LONGEST:
                self._rest, self.unreadable = b"", self.unreadable + 1
                self._file.seek(0, os.SEEK_END)  # past the rest of it, which may be a TiB
            for line in lines:
                yield from self._read(line)

    def _read(self, line: bytes) -> Iterator[Event]:
        """Yield the event of a line; nothing, and count it, if it has none."""
        if not line.strip():
            return
        try:
            yield unpacked(json.loads(line))
        except (ValueError, TypeError, AttributeError, RecursionError):
            self.unreadable += 1

    def close(self) -> None:
        self._file.close()


def _why_not(folder: Path, error: OSError | ValueError) -> str:
    """Return why the record of a run cannot be read, and how one is made."""
    if folder.is_file():
        return f"{folder} is a file; a run is recorded in a folder, with {EVENTS} in it"
    missing = isinstance(error, FileNotFoundError)
    reason = f"there is no {EVENTS}" if missing else getattr(error, "strerror", None) or error
    if not folder.exists():
        reason = "there is no such folder"
    elif missing and any(folder.glob("step-*")):
        reason = f"it has checkpoints, and no {EVENTS}"
    return (
        f"no run was recorded in {folder}: {reason}. A pipeline records one with "
        f"observe=Observe(record={str(folder)!r}), or `pipedream-rt run --record {folder} SCRIPT`"
    )


def read_run(folder: str | os.PathLike[str]) -> RunRecord:
    """Return the record of the run in a folder, with its trace, or else its last moments."""
    record, following = RunRecord(), Following(folder)
    try:
        for event in following.new():
            record(event)
    finally:
        following.close()
    if record.begun is None and following.unreadable:
        raise TraceError(
            f"the {following.unreadable} lines of {Path(folder, EVENTS)} are no events of this "
            "version of pipedream-rt"
        )
    if record.begun is None:
        raise TraceError(f"the run in {folder} has not begun")
    record.trace = trace_in(folder) or newest_trace_in(folder, record.begun)
    return record


def trace_in(folder: str | os.PathLike[str]) -> Trace | None:
    """Return the trace in the folder of a run; None if there is none, or it cannot be read."""
    path = Path(folder) / TRACE
    try:
        return Trace.load(path) if path.exists() else None
    except TraceError:
        return None


def newest_trace_in(folder: str | os.PathLike[str], begun: Begun) -> Trace | None:
    """Return the last moments of a run, as far as workers of this machine show them; else None."""
    plan = Plan.unpacked(begun.plan)
    shown = Path(SpanFolder.in_folder(folder).folder)
    parts = []
    for name in ("script", *(f"worker-{worker}" for worker in range(plan.workers))):
        with contextlib.suppress(OSError, ValueError):
            spans = newest_spans(shown / name)
            spans = spans[spans["stage"] < len(plan.addresses)]
            if len(spans):
                parts.append(spans)
    if not parts:
        return None
    # Each file goes back another while: begin where all have spans.
    since = max(int(spans["start"].min()) for spans in parts)
    trace = Trace(
        plan=plan,
        credits=begun.credits,
        simulated=False,
        # `dropped` says that the trace does not have the beginning of the run.
        workers=tuple(WorkerFacts(name=name, dropped=1) for name in begun.workers),
        spans=np.concatenate([spans[spans["start"] >= since] for spans in parts]),
    )
    with contextlib.suppress(ValueError):
        return fitting(trace)
    return None
