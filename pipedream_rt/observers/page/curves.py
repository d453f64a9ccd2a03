"""The curves of a run: loss, metrics, throughput and how busy its stages were."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from pipedream_rt.observers.page.blocks import Panel
from pipedream_rt.observers.page.charts import Line, Mark, line_chart
from pipedream_rt.observers.run_record import Bucket, RunRecord
from pipedream_rt.schema import printable
from pipedream_rt.tracing.events import Begun
from pipedream_rt.tracing.summary import (
    seconds_text,
)

_SMOOTHED, _SLOWLY = 40, 0.1
"""Points from which on a smoothed line is drawn, and the weight of each new point in it."""


_METRICS = 8
"""Metrics of evaluations that get a curve, at most."""


class Curve(NamedTuple):
    """A chart of the page.

    Attributes:
        name: That of its panel, as are ``title`` and ``note``.
        words: What it shows, to be read aloud.
        over_time: Whether its horizontal axis is the time, rather than mini-batches.
        from_zero: Whether its vertical axis begins at 0.
    """

    name: str
    title: str
    words: str
    lines: Sequence[Line]
    over_time: bool = False
    from_zero: bool = False
    note: str = ""


def says_something(line: Line, from_zero: bool) -> bool:
    """Whether a line has values; on an axis that begins at 0, others than 0."""
    values = [value for _, value in line.points if math.isfinite(value)]
    return any(values) if from_zero else bool(values)


def curve_panels(record: RunRecord, begun: Begun, live: bool) -> Iterator[Panel]:
    """Yield the curves over mini-batches and over time; on a live page also empty ones."""
    by_step = _marks(record, lambda event: float(event.step))
    by_time = _marks(record, lambda event: event.time - record.first)
    for curve in table_of_curves(record, len(begun.stages)):
        axis, marks = ("seconds", by_time) if curve.over_time else ("mini-batch", by_step)
        if not (live or any(says_something(line, curve.from_zero) for line in curve.lines)):
            continue
        chart = line_chart(curve.words, curve.lines, axis, marks, from_zero=curve.from_zero)
        yield Panel(curve.name, curve.title, chart, note=curve.note)


def table_of_curves(record: RunRecord, stages: int) -> list[Curve]:
    buckets = list(record.steps)

    def at_step(value: Callable[[Bucket], float]) -> list[tuple[float, float]]:
        return [(float(b.last.step), value(b)) for b in buckets]

    loss = at_step(lambda b: b.loss)
    band = [(b.low, b.high) for b in buckets] if any(b.count > 1 for b in buckets) else []
    evaluated = [(float(e.step), e.values.get("loss", math.nan)) for e in record.evaluations]
    over_time = [(b.last.time - record.first, b.loss) for b in buckets]
    groups = min((len(b.last.rates) for b in buckets), default=0)
    rates = [
        Line(f"group {g}" if groups > 1 else "rate", at_step(lambda b, g=g: b.last.rates[g]))  # type: ignore[misc]
        for g in range(min(groups, 8))
    ]
    busy = [Line(f"stage {s}", p) for s, p in enumerate(_busy(buckets, record.first, stages))]
    return [
        Curve(
            "loss", "Loss", "loss over mini-batches",
            [Line("training", loss, band), Line("evaluation", evaluated), *_smoothed(loss)],
            note="Each point is the mean of neighbouring mini-batches, the band their range."
            if band
            else "",
        ),
        *_evaluated(record),
        Curve(
            "loss-time", "Loss over time", "loss over time", [Line("training", over_time)],
            over_time=True,
        ),
        Curve("rate", "Learning rate", "learning rate over mini-batches", rates),
        Curve(
            "throughput", "Throughput", "samples per second over time",
            [Line("throughput", _throughput(buckets, record.first))],
            over_time=True, from_zero=True,
            note="Samples per second, or mini-batches where samples are not known.",
        ),
        Curve(
            "staleness", "Staleness", "staleness over mini-batches",
            [Line("staleness", at_step(lambda b: float(b.staleness)))],
            from_zero=True,
            note="Updates between the oldest weight version that was read and the one that is "
            "updated.",
        ),
        Curve(
            "busy", "Computing", "share of the time in which each stage computes", busy[:16],
            over_time=True, from_zero=True,
            note="The share of the time in which each stage computes.",
        ),
    ]  # fmt: skip


def _smoothed(points: Sequence[tuple[float, float]]) -> list[Line]:
    """Return the exponential mean of many points as a line; none for few points."""
    if len(points) < _SMOOTHED:
        return []
    found, mean, weight = [], math.nan, 0.0
    for at, value in points:
        if math.isfinite(value):
            # A mean of what there is: the first points would hold the line back at their height.
            weight += (1 - weight) * _SLOWLY
            mean = value if math.isnan(mean) else mean + (value - mean) * _SLOWLY / weight
        found.append((at, mean))
    return [Line("training, smoothed", found)]


def _evaluated(record: RunRecord) -> Iterator[Curve]:
    """Yield a curve for each metric of evaluations, up to `_METRICS`."""
    names = dict.fromkeys(n for e in record.evaluations for n in e.values if n != "loss")
    for number, name in enumerate([*names][:_METRICS]):
        points = [(float(e.step), e.values.get(name, math.nan)) for e in record.evaluations]
        title = f"Evaluation: {printable(name, 40)}"
        yield Curve(
            f"evaluated-{number}", title, f"{title} over mini-batches", [Line(name, points)]
        )


def _marks(record: RunRecord, at: Any) -> list[Mark]:
    """Return the recoveries, checkpoints and evaluations at their places."""
    marks = [
        Mark(
            at(e),
            "recovered",
            f"recovered in {seconds_text(e.seconds)}, and {e.replayed} micro-batches were computed "
            f"again: {e.reason}",
        )
        for e in record.recovered
    ]
    marks += [Mark(at(e), "saved", f"checkpoint {e.step}") for e in record.saved]
    return marks + [Mark(at(e), "evaluated", "evaluation") for e in record.evaluations]


def _throughput(buckets: Sequence[Bucket], first: float) -> list[tuple[float, float]]:
    """Return the samples, or mini-batches, per second, by seconds since the start."""
    # At most 200 points: closer neighbours are taken together.
    found, since = [], 0
    least = (buckets[-1].last.time - buckets[0].last.time) / 200 if buckets else 0.0
    for i in range(1, len(buckets)):
        seconds = buckets[i].last.time - buckets[since].last.time
        if seconds <= 0 or seconds < least:
            continue
        part = buckets[since + 1 : i + 1]
        count = sum(b.samples for b in part) or sum(b.count for b in part)
        found.append((buckets[i].last.time - first, count / seconds))
        since = i
    return found


def _busy(buckets: Sequence[Bucket], first: float, stages: int) -> list[list[tuple[float, float]]]:
    """Return, by stage, the share of the time in which it computed, by seconds since the start."""
    count = min((len(b.last.busy_s) for b in buckets), default=stages)
    found: list[list[tuple[float, float]]] = [[] for _ in range(count)]
    stride = max(1, len(buckets) // 100)
    for before, after in pairwise(buckets[::stride]):
        seconds = after.last.time - before.last.time
        for stage in range(count):
            computed = after.last.busy_s[stage] - before.last.busy_s[stage]
            # After a recovery new workers count from 0.
            share = math.nan if seconds <= 0 or computed < 0 else min(computed / seconds, 1.0)
            found[stage].append((after.last.time - first, share))
    return found
