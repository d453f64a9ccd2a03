"""A record of the events of a run, in a size that does not grow with its length."""

from __future__ import annotations

import math
import os
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from pipedream_rt.schedules import Plan
from pipedream_rt.tracing.events import (
    Begun,
    Ended,
    Evaluated,
    Event,
    Recovered,
    Saved,
    Stepped,
    Warned,
)
from pipedream_rt.tracing.trace import Trace

MOST = 600
"""Buckets that are kept at least, if there are as many mini-batches; more blur in a picture."""

_MOST_EVENTS = 1000
"""The last events of each other kind that are kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Neighbouring mini-batches, summed up.

    Attributes:
        last: The last of them.
        loss: The mean; ``low`` and ``high`` are the least and the largest.
        staleness: The largest.
        samples: Of all of them, as are ``micro_batches``.
    """

    last: Stepped
    count: int
    loss: float
    low: float
    high: float
    staleness: int
    samples: int
    micro_batches: int

    @staticmethod
    def of(step: Stepped) -> Bucket:
        """Return the bucket of one mini-batch."""
        return Bucket(
            last=step,
            count=1,
            loss=step.loss,
            low=step.loss,
            high=step.loss,
            staleness=step.staleness,
            samples=step.samples,
            micro_batches=step.micro_batches,
        )

    def and_then(self, later: Bucket) -> Bucket:
        """Return the bucket of this one and the next together."""
        count = self.count + later.count
        return Bucket(
            last=later.last,
            count=count,
            loss=(self.loss * self.count + later.loss * later.count) / count,
            low=_outermost(min, self.low, later.low),
            high=_outermost(max, self.high, later.high),
            staleness=max(self.staleness, later.staleness),
            samples=self.samples + later.samples,
            micro_batches=self.micro_batches + later.micro_batches,
        )


def _outermost(pick: Callable[[float, float], float], one: float, other: float) -> float:
    """Return the least or the largest of two numbers; if one is NaN, the other."""
    if math.isnan(one) or math.isnan(other):
        return other if math.isnan(one) else one
    return pick(one, other)


class Buckets:
    """Mini-batches in buckets of one width, which doubles whenever there are 2 ``most`` buckets."""

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._width = 1
        self._full: list[Bucket] = []
        self._open: Bucket | None = None

    def add(self, step: Stepped) -> None:
        """Add the next mini-batch."""
        one = Bucket.of(step)
        self._open = one if self._open is None else self._open.and_then(one)
        if self._open.count < self._width:
            return
        self._full.append(self._open)
        self._open = None
        if len(self._full) >= 2 * self._most:
            pairs = zip(self._full[::2], self._full[1::2], strict=True)
            self._full = [one.and_then(other) for one, other in pairs]
            self._width *= 2

    def forget_from(self, step: int) -> None:
        """Forget the mini-batches from a number on, and the whole bucket that it lies in."""
        if self._open is not None and self._open.last.step >= step:
            self._open = None
        while self._full and self._full[-1].last.step >= step:
            self._full.pop()

    def __iter__(self) -> Iterator[Bucket]:
        """Yield the buckets, oldest first."""
        yield from self._full
        if self._open is not None:
            yield self._open


@dataclass(slots=True)
class RunRecord:
    """The record of a run, made of its events. An `Observer`.

    Attributes:
        begun: The beginning of the last script; None before it.
        plan: The plan of that script; a schedule of the user's has its name alone.
        ended: The end of the last script; None while it runs, and if it was killed.
        first: When the first script has begun, in seconds since the epoch.
        evaluations: The last evaluations.
        saved: The last checkpoints.
        recovered: The last recoveries.
        warned: The last warnings.
        scripts: The number of scripts so far that have trained in this run.
        trace: What every stage did when; None if that is not known.
    """

    begun: Begun | None = None
    plan: Plan | None = None
    ended: Ended | None = None
    first: float = 0.0
    steps: Buckets = field(default_factory=Buckets)
    evaluations: list[Evaluated] = field(default_factory=list)
    saved: list[Saved] = field(default_factory=list)
    recovered: list[Recovered] = field(default_factory=list)
    warned: list[Warned] = field(default_factory=list)
    scripts: int = 0
    trace: Trace | None = None

    def __call__(self, event: Event) -> None:
        """Take note of an event."""
        match event:
            case Begun():
                self._begin(event)
            case Stepped():
                self.steps.add(event)
            case Evaluated():
                _append(self.evaluations, event)
            case Saved():
                _append(self.saved, event)
            case Recovered():
                _append(self.recovered, event)
            case Warned():
                _append(self.warned, event)
            case Ended():
                self.trace = event.trace
                self.ended = replace(event, trace=None)

    def _begin(self, event: Begun) -> None:
        """Begin a run, or go on with one: what came from that mini-batch on is forgotten."""
        if not event.step:
            self.first, self.scripts = event.time, 0
            self.recovered, self.warned = [], []
        self.scripts += 1
        self.begun, self.ended, self.trace = event, None, None
        self.plan = Plan.unpacked(event.plan)
        self.steps.forget_from(event.step)
        # Of a new run, with step 0, nothing earlier is kept.
        self.evaluations = [each for each in self.evaluations if 0 < each.step <= event.step]
        self.saved = [each for each in self.saved if 0 < each.step <= event.step]

    @property
    def may_run(self) -> bool:
        """Whether the script may still run: no if it has ended, or its process here is gone."""
        if self.begun is None or self.ended is not None:
            return False
        if self.begun.host != socket.gethostname():
            return True
        try:
            os.kill(self.begun.pid, 0)  # signal 0 only asks whether there is such a process
        except ProcessLookupError:
            return False
        except PermissionError:  # it is there, and another user's
            return True
        return True

    @property
    def last_time(self) -> float:
        """When the last event came, in seconds since the epoch."""
        times = [bucket.last.time for bucket in [*self.steps][-1:]]
        for events in (self.evaluations, self.saved, self.recovered, self.warned):
            times += [each.time for each in events[-1:]]
        times += [each.time for each in (self.begun, self.ended) if each is not None]
        return max(times, default=0.0)


def _append(events: list, event: Event) -> None:  # type: ignore[type-arg]
    """Add an event; forget the oldest beyond `_MOST_EVENTS`."""
    events.append(event)
    if len(events) > _MOST_EVENTS:
        del events[0]
