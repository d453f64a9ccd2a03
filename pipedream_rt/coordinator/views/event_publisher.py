"""Telling observers of a run: the one place where the coordinator and its observers meet.

Results are told as they come. Recoveries and checkpoints are read where they are kept, and warnings
are taken from the log, so no other object of the coordinator knows of observers.
"""

from __future__ import annotations

import copy
import functools
import logging
import os
import shlex
import socket
import sys
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

from pipedream_rt.batches.micro_batches import CutBatch
from pipedream_rt.checkpoint.layout import step_of
from pipedream_rt.coordinator.distributed_optimizer import DistributedOptimizer
from pipedream_rt.coordinator.recovery.group import WorkerGroup
from pipedream_rt.coordinator.recovery.recovery import Recovery
from pipedream_rt.coordinator.results import StepResult
from pipedream_rt.job.options import Options
from pipedream_rt.messages.message import CommandName
from pipedream_rt.observers.run_record import RunRecord
from pipedream_rt.schema import printable
from pipedream_rt.software import commit, processor, software
from pipedream_rt.telling import handle_alone, harmless, log_of
from pipedream_rt.tracing.events import (
    Begun,
    Ended,
    Evaluated,
    Event,
    Observer,
    Recovered,
    Saved,
    Stepped,
    Warned,
)
from pipedream_rt.tracing.summary import seconds_text
from pipedream_rt.tracing.trace import Trace

_log = log_of(__name__)

_NOT_SETTINGS = ("example", "observe")
"""Options that say nothing of how a run trains."""


def publisher_of(options: Options) -> EventPublisher:
    """Return the publisher to the observers that the options name."""
    record = RunRecord()
    observers: list[Observer] = [record, *options.observe.to]
    if options.observe.record is not None:
        # A run that shows nothing to anybody loads none of the writers.
        from pipedream_rt.observers.folder import RunFolder

        observers.append(RunFolder(options.observe.record))
    if options.observe.report is not None:
        # As above.
        from pipedream_rt.observers.page.render import ReportFile

        observers.append(ReportFile(options.observe.report, record))
    return EventPublisher(record, observers)


class _FedMiniBatch(NamedTuple):
    """The facts about a mini-batch at its injection."""

    rates: tuple[float, ...]
    samples: int
    micro_batches: int


class EventPublisher:
    """Tells observers of a run.

    The script's thread tells; only `end` may come from another one, when nothing else is told.

    Attributes:
        record: The record so far, for reports meanwhile; the first of the observers.
    """

    def __init__(self, record: RunRecord, observers: Iterable[Observer]) -> None:
        self.record = record
        self._observers = list(observers)
        self._fed: deque[_FedMiniBatch] = deque()
        self._heard: deque[Warned] = deque()
        self._recovery: Recovery | None = None
        self._restarts = self._step = 0
        self._saved: object = None
        self._handler = _Listening(self._heard)
        logging.getLogger("pipedream_rt").addHandler(self._handler)

    def begin(
        self, group: WorkerGroup, options: Options, step: int, credits: int, how: str
    ) -> None:
        self._recovery, self._step = group.recovery, step
        self._saved = group.feed.log.restore_points[-1].folder
        self._tell(
            Begun(
                time=time.time(),
                step=step,
                plan=group.plan.packed(),
                credits=credits,
                how=how,
                workers=tuple(group.cluster.names),
                stages=tuple(group.command(CommandName.STATISTICS)),
                settings=settings_of(options),
                software={
                    "script": Path(sys.argv[0]).name if sys.argv and sys.argv[0] else "",
                    "command": printable(shlex.join(sys.argv), 500),
                    "commit": commit(Path(sys.argv[0]).parent) if sys.argv else "",
                    "versions": software(),
                    "cores": str(len(os.sched_getaffinity(0))),
                    "processor": processor(),
                },
                pid=os.getpid(),
                host=socket.gethostname(),
            )
        )

    def injected(self, cut: CutBatch, optimizer: DistributedOptimizer) -> None:
        """Note an injected mini-batch, until its result comes."""
        filled = cut.filled.values()
        rates = tuple(float(group["lr"]) for group in optimizer.param_groups if "lr" in group)
        self._fed.append(_FedMiniBatch(rates, sum(part.samples for part in filled), len(filled)))

    def came(self, result: StepResult) -> None:
        """Tell of a result; results come in the order of their mini-batches."""
        fed = self._fed.popleft()
        self._step = result.step + 1
        self.look()
        self._tell(
            Stepped(
                time=time.time(),
                step=result.step,
                loss=result.loss,
                rates=fed.rates,
                staleness=result.staleness,
                versions=result.versions,
                busy_s=result.busy_s,
                samples=fed.samples,
                micro_batches=fed.micro_batches,
                fingerprint=result.fingerprint,
            )
        )

    def evaluated(self, step: int, values: Mapping[str, float]) -> None:
        """Tell of an evaluation after ``step`` mini-batches."""
        self.look()
        self._tell(Evaluated(time=time.time(), step=step, values=dict(values)))

    def so_far(self, stages: Sequence[dict[str, Any]], trace: Trace | None) -> RunRecord:
        """Return the record so far, with the present trace and counters of the stages."""
        self.look()
        record = copy.copy(self.record)
        record.trace = trace
        if record.begun is not None:
            record.begun = replace(record.begun, stages=tuple(stages))
        return record

    def finish(self, stages: Sequence[dict[str, Any]], trace: Trace | None) -> None:
        """Tell that a run has ended well; `end` tells of other ends."""
        self.look()
        self._end(Ended(time=time.time(), step=self._step, stages=tuple(stages), trace=trace))

    def end(self, reason: BaseException | None = None) -> None:
        """Tell that a run has ended, unless that was told. Idempotent."""
        if self._recovery is not None and reason is None:
            reason = self._recovery.life.reason
        words = f"{type(reason).__name__}: {reason}" if reason is not None else ""
        self._end(Ended(time=time.time(), step=self._step, reason=words))

    def _end(self, event: Ended) -> None:
        """Tell the last event; nobody is told anything afterwards."""
        self.look()
        self._tell(event)
        self._observers.clear()
        logging.getLogger("pipedream_rt").removeHandler(self._handler)

    def look(self) -> None:
        """Tell of the recoveries and checkpoints that have come since the last look."""
        if self._recovery is None or not self._observers:
            return
        restarts = self._recovery.restarts
        folder = self._recovery.feed.log.restore_points[-1].folder
        for restart in restarts[self._restarts :]:
            self._tell(
                Recovered(
                    time=time.time(),
                    step=self._step,
                    generation=restart.generation,
                    reason=restart.reason,
                    seconds=restart.seconds,
                    replayed=restart.replayed,
                )
            )
        self._restarts = len(restarts)
        if folder is not None and folder != self._saved:
            self._tell(Saved(time=time.time(), step=step_of(folder), folder=str(folder)))
        self._saved = folder

    def _tell(self, event: Event) -> None:
        """Tell every observer of an event, and of the warnings logged meanwhile."""
        heard = [self._heard.popleft() for _ in range(len(self._heard))]
        # The beginning comes first: what comes after it belongs to its run.
        events: list[Event] = [event, *heard] if isinstance(event, Begun) else [*heard, event]
        for each in events:
            for observer in tuple(self._observers):  # one that raises is removed
                self._tell_one(observer, each)

    def _tell_one(self, observer: Observer, event: Event) -> None:
        """Tell one observer; if that raises, it is told no more, and the run goes on."""
        with harmless(functools.partial(self._drop, observer)):
            observer(event)

    def _drop(self, observer: Observer, error: BaseException) -> None:
        """Tell an observer nothing more."""
        self._observers.remove(observer)
        name = getattr(observer, "__qualname__", type(observer).__qualname__)
        _log.warning(
            "the observer %s raised %s: %s; it is told no more, and the run goes on",
            name, type(error).__name__, error,
        )  # fmt: skip


class _Listening(logging.Handler):
    """Keeps the warnings of this package until they are told."""

    def __init__(self, heard: deque[Warned]) -> None:
        super().__init__(logging.WARNING)
        self._heard = heard

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a warning, and print it where nobody else would."""
        self._heard.append(Warned(time=record.created, text=record.getMessage()))
        # With any handler installed, Python prints nothing by itself.
        if self._is_alone(record.name):
            handle_alone(record)

    def _is_alone(self, name: str) -> bool:
        """Whether this is the first handler of a logger, and all others are of this kind."""
        logger: logging.Logger | None = logging.getLogger(name)
        found: list[logging.Handler] = []
        while logger is not None:
            found += logger.handlers
            logger = logger.parent if logger.propagate else None
        return found[:1] == [self] and all(isinstance(each, _Listening) for each in found)


def settings_of(options: Options) -> dict[str, str]:
    """Return the given options in words, by name; those of groups as ``group.name``."""
    found: dict[str, str] = {}
    plain = Options()
    for each in fields(Options):
        value, default = getattr(options, each.name), getattr(plain, each.name)
        if each.name in _NOT_SETTINGS or value is default:
            continue
        if is_dataclass(value) and type(value) is type(default):
            for part in fields(value):
                value_of_part = getattr(value, part.name)
                if value_of_part != getattr(default, part.name):
                    found[f"{each.name}.{part.name}"] = _words(value_of_part)
        elif not _is_same(value, default):
            found[each.name] = _words(value)
    return found


def _is_same(value: Any, default: Any) -> bool:
    """Whether an option has its default; a value that cannot be compared has not."""
    try:
        return bool(value == default)
    except Exception:  # a foreign class may raise anything
        return False


def _words(value: Any) -> str:
    """Return an option in words; functions and classes by name."""
    if isinstance(value, tuple | list):
        inner = ", ".join(map(_words, value))
        return f"({inner})" if isinstance(value, tuple) else f"[{inner}]"
    if isinstance(value, timedelta):
        return seconds_text(value.total_seconds())
    if is_dataclass(value) and not isinstance(value, type):
        pairs = [(f.name, getattr(value, f.name)) for f in fields(value) if f.repr]
        inner = ", ".join(f"{name}={_words(v)}" for name, v in pairs if v is not None)
        return f"{type(value).__name__}({inner})"
    name = getattr(value, "__qualname__", None)
    return str(name) if isinstance(name, str) else " ".join(repr(value)[:300].split())
