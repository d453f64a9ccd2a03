"""The summary of a trace: times, bubble, staleness, memory and latencies in numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

import numpy as np
import numpy.typing as npt

from pipedream_rt.errors import TraceError
from pipedream_rt.schedules import Edge, EdgeKind, Kind, Plan
from pipedream_rt.schema import printable
from pipedream_rt.tracing.spans import NOBODY, Spans
from pipedream_rt.tracing.trace import CODES, COMPUTES, DRAIN, PASS, Trace

_COMPUTES = (*COMPUTES, PASS)
_FORWARD, _STEP = CODES[Kind.FORWARD], CODES[Kind.STEP]

_SENDERS = {
    EdgeKind.ACTIVATION: (CODES[Kind.FORWARD],),
    EdgeKind.GRADIENT: (CODES[Kind.BACKWARD], CODES[Kind.INPUT]),
}
"""By kind of message, the kinds of actions that send it, which are also those that wait for it."""

PERCENTILES = (50, 90, 99, 100)
"""The percentiles at which a summary states latencies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSummary:
    """The summary of one stage, or of one of its replicas.

    Attributes:
        stage: Its address in the plan: each replica has one.
        worker: The index of the worker that hosts it.
        busy: Seconds that it computed, sending included.
        waits: Seconds that it waited, by the address whose message was missing; -1 for the
            coordinator.
        versions: The largest number of weight versions kept at a time.
        in_flight: The largest number of micro-batches in flight.
        staleness: The number of micro-batches, by their staleness.
    """

    stage: int
    worker: int
    busy: float
    waits: dict[int, float]
    versions: int
    in_flight: int
    staleness: dict[int, int]
    bytes_sent: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The summary of a run.

    Attributes:
        makespan: Seconds from the start of the first action to the end of the last.
        throughput: Micro-batches per second in the steady phase: from the end of the first update
            to the end of the last one on the first stage, within the longest stretch without a
            flush; 0.0 with fewer than two updates.
        bubble: By worker, the share of the makespan in which it did not compute.
        stages: The summary of each stage.
        hops: Seconds from the end of an action to the arrival of its message at the next stage or
            the one before, at the `PERCENTILES`; empty without hops.
        micro_batches: The number of forwards on the first stage.
    """

    makespan: float
    throughput: float
    bubble: tuple[float, ...]
    stages: tuple[StageSummary, ...]
    hops: tuple[float, ...] = field(default=())
    micro_batches: int = 0

    @property
    def staleness(self) -> dict[int, int]:
        """The number of micro-batches on all stages, by their staleness."""
        total: dict[int, int] = {}
        for stage in self.stages:
            for value, count in stage.staleness.items():
                total[value] = total.get(value, 0) + count
        return dict(sorted(total.items()))


def summarize(trace: Trace) -> Summary:
    """Return the summary of a trace.

    Args:
        trace: A trace, measured or simulated.

    Raises:
        TraceError: There is no action in the trace.
    """
    stages = trace.by_stage()
    acting = [spans[np.isin(spans["kind"], _COMPUTES)] for spans in stages]
    if not any(map(len, acting)):
        raise TraceError("there is no action in the trace")
    begin = min(int(spans["start"].min()) for spans in acting if len(spans))
    end = max(int(spans["end"].max()) for spans in acting if len(spans))
    busy = [int((spans["end"] - spans["start"]).sum()) for spans in acting]
    plan = trace.plan
    per_worker = [sum(busy[s] for s in plan.stages_of(w)) for w in range(plan.workers)]
    makespan = max(end - begin, 1)  # a simulation may take no time at all
    return Summary(
        makespan=(end - begin) / 1e9,
        throughput=throughput(trace, stages[0]),
        bubble=tuple(1 - b / makespan for b in per_worker),
        stages=tuple(_stage(trace, s, spans, busy[s], begin) for s, spans in enumerate(acting)),
        hops=_percentiles(hop_latencies(plan, stages)),
        micro_batches=sum(
            int((stages[a]["kind"] == _FORWARD).sum())
            for a in plan.addresses
            if not plan.stage_of(a)
        ),
    )


def throughput(trace: Trace, first_stage: Spans) -> float:
    """Return micro-batches per second between the first and the last update of the first stage."""
    # Within the longest stretch without a flush: filling and draining are no steady phase.
    stretch = longest_stretch(first_stage)
    ends = stretch["end"][stretch["kind"] == _STEP]
    if len(ends) < 2 or ends[-1] == ends[0]:
        return 0.0
    return float((len(ends) - 1) * trace.plan.per_update / ((ends[-1] - ends[0]) / 1e9))


def longest_stretch(spans: Spans) -> Spans:
    """Return the part of a stage's spans that has the most updates without a flush between them."""
    cuts = np.flatnonzero(spans["kind"] == DRAIN)
    parts = np.split(spans, cuts)
    found: Spans = max(parts, key=lambda part: int((part["kind"] == _STEP).sum()))
    return found


def _stage(trace: Trace, stage: int, spans: Spans, busy: int, begin: int) -> StageSummary:
    # A worker may have been ready before the run began: that is no waiting.
    waited = np.maximum(spans["start"] - np.maximum(spans["ready"], begin), 0)
    waits = {
        int(cause): float(waited[spans["waited_for"] == cause].sum() / 1e9)
        for cause in np.unique(spans["waited_for"])
        if cause != NOBODY
    }
    forwards = spans[spans["kind"] == _FORWARD]
    applied_to = forwards["index"] // trace.plan.per_update
    staleness, counts = np.unique(
        np.maximum(applied_to - forwards["version"], 0), return_counts=True
    )
    return StageSummary(
        stage=stage,
        worker=trace.plan.worker_of(stage),
        busy=busy / 1e9,
        waits=waits,
        versions=int(spans["kept"].max(initial=0)),
        in_flight=int(spans["in_flight"].max(initial=0)),
        staleness=dict(zip(staleness.tolist(), counts.tolist(), strict=True)),
        bytes_sent=int(spans["bytes"].sum()),
    )


def hops_between(plan: Plan) -> tuple[Edge, ...]:
    """Return the edges between stages, in both directions, in the order of the producers."""
    forth = [edge for edge in plan.edges(EdgeKind.ACTIVATION) if edge.source >= 0]
    found = []
    for edge in forth:
        found += [edge, Edge(EdgeKind.GRADIENT, edge.target, edge.source)]
    return tuple(found)


def hop_times(edge: Edge, sender: Spans, receiver: Spans) -> npt.NDArray[Any]:
    """Return the nanoseconds from the ends of the sender's actions to the arrival of messages."""
    kinds = _SENDERS[edge.kind]
    sent = sender[np.isin(sender["kind"], kinds)]
    taken = receiver[np.isin(receiver["kind"], kinds)]
    _, i, j = np.intersect1d(sent["index"], taken["index"], return_indices=True)
    # In one process a message may arrive before the end of its action is noted.
    latencies: npt.NDArray[Any] = np.maximum(taken["arrived"][j] - sent["end"][i], 0)
    return latencies


def hop_latencies(plan: Plan, stages: list[Spans]) -> npt.NDArray[Any]:
    """Return the times of all hops between stages, in both directions, in nanoseconds."""
    found = [np.zeros(0, np.int64)]
    found += [hop_times(e, stages[e.source], stages[e.target]) for e in hops_between(plan)]
    return np.concatenate(found)


def _percentiles(nanoseconds: npt.NDArray[Any]) -> tuple[float, ...]:
    """Return seconds at the `PERCENTILES`; nothing for no values."""
    if not len(nanoseconds):
        return ()
    return tuple(float(v) / 1e9 for v in np.percentile(nanoseconds, PERCENTILES))


def seconds_text(seconds: float) -> str:
    """Return a time for people, with three digits and a unit."""
    for unit, name in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if abs(seconds) >= unit:
            return f"{seconds / unit:.3g} {name}"
    return f"{seconds / 1e-9:.3g} ns" if seconds else "0 s"


def bytes_text(size: float) -> str:
    """Return a size for people, with three digits, or all before the point, and a unit."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if size >= unit:
            number = size / unit
            return f"{number:.3g} {name}" if number < 999.5 else f"{number:.0f} {name}"
    return f"{size:.0f} B"


class Lines(str):
    """A text that a notebook shows line by line."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        return f"<pre>{escape(self)}</pre>"


WIDTH = 80
"""The columns of text that a run prints unasked."""


def table(rows: Sequence[tuple[str, ...]], width: int | None = None) -> str:
    """Return rows of texts with their columns aligned.

    Columns beyond ``width`` follow below, in a table that begins with the first column again.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    ends = [sum(widths[: n + 1]) + 2 * n for n in range(len(widths))]
    if width is not None and ends[-1] > width and len(widths) > 2:
        fit = max(2, sum(end <= width for end in ends))
        below = [(row[0], *row[fit:]) for row in rows]
        return f"{table([row[:fit] for row in rows])}\n{table(below, width)}"
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


WORKER_HEAD = ("worker", "stages", "process", "heard", "memory", "doing")
"""The head of a table whose rows are those of `worker_rows`."""


def worker_rows(workers: Sequence[Mapping[str, Any]], most: int = 60) -> list[tuple[str, ...]]:
    """Return rows about what workers do now; ``most`` letters of it at most."""
    return [
        (
            str(each["name"]),
            str(each["stages"]),
            str(each["process"]),
            f"{each['silent_s']:.1f} s ago",
            bytes_text(each["rss"]) if each["rss"] else "-",
            printable(each["doing"].partition(";")[0], most) or "-",
        )
        for each in workers
    ]


def describe(trace: Trace) -> str:
    """Return the summary of a trace as text.

    Raises:
        TraceError: There is no action in the trace.
    """
    summary = summarize(trace)
    lines = [_headline(trace, summary), _stage_table(trace, summary)]
    if summary.hops:
        parts = (
            f"{'max' if p == 100 else f'p{p}'} {seconds_text(v)}"
            for p, v in zip(PERCENTILES, summary.hops, strict=True)
        )
        lines.append(f"hop latency: {', '.join(parts)}")
    total = sum(summary.staleness.values())
    shares = (f"{value}: {count / total:.1%}" for value, count in summary.staleness.items())
    lines.append(f"staleness, share of micro-batches x stages: {', '.join(shares)}")
    lines += _caveats(trace)
    return "\n".join(lines)


def _headline(trace: Trace, summary: Summary) -> str:
    """Return the line about the whole run: its schedule, its time and its speed."""
    plan = trace.plan
    slack = f"slack {', '.join(map(str, plan.shape.slack))}, " if plan.shape.slack else ""
    return (
        f"{'simulated' if trace.simulated else 'measured'}: {plan.name}, "
        f"{plan.in_words}, {plan.per_update} micro-batches "
        f"per update, {slack}{summary.micro_batches} micro-batches in "
        f"{seconds_text(summary.makespan)}; "
        f"steady state {summary.throughput:.4g} micro-batches/s"
    )


def _stage_table(trace: Trace, summary: Summary) -> str:
    """Return the table with a row for each stage: how busy it was, and for whom it waited."""
    makespan = summary.makespan or 1.0  # 0 in a simulation in which nothing takes time
    rows: list[tuple[str, ...]] = [
        ("stage", "worker", "busy", "bubble", "waits for", "versions", "in flight", "memory")
    ]
    for stage in summary.stages:
        waits = ", ".join(
            f"{'coordinator' if cause < 0 else trace.plan.title_of(cause)} {share:.1%}"
            for cause, waited in sorted(stage.waits.items())
            if (share := waited / makespan) >= 0.001
        )
        rows.append(
            (
                trace.plan.label_of(stage.stage),
                trace.workers[stage.worker].name,
                f"{stage.busy / makespan:.1%}",
                f"{summary.bubble[stage.worker]:.1%}",
                waits or "nobody",
                str(stage.versions),
                str(stage.in_flight),
                _memory(trace, stage),
            )
        )
    return table(rows)


def _caveats(trace: Trace) -> list[str]:
    """Return lines about the exactness of the times, and about missing spans."""
    lines = []
    error = max(worker.clock_error_ns for worker in trace.workers)
    if not trace.simulated:
        lines.append(
            f"clocks: within {seconds_text(error / 1e9)} of the coordinator's"
            if error
            else "clocks: one clock for all workers"
        )
    if trace.dropped:
        lines.append(f"the oldest {trace.dropped} spans were overwritten and are not counted")
    return lines


def _memory(trace: Trace, stage: StageSummary) -> str:
    """Return a stage's peak memory: that of its process, in a simulation that of the costs."""
    measured = trace.workers[stage.worker].peak_memory_bytes
    if measured:
        return bytes_text(measured)
    if not any(trace.stage_bytes) and not any(trace.activation_bytes):
        return "?"
    of = trace.plan.stage_of(stage.stage)
    stash = trace.stage_bytes[of] * stage.versions
    return f"{bytes_text(stash)} + {bytes_text(trace.activation_bytes[of] * stage.in_flight)}"
