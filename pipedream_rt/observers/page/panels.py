"""The panels of the page: what a record and a trace tell of a run."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from markupsafe import Markup

from pipedream_rt.errors import PipelineError, TraceError
from pipedream_rt.observers.page import blocks
from pipedream_rt.observers.page.blocks import Panel, known
from pipedream_rt.observers.page.charts import Line, line_chart, number_text
from pipedream_rt.observers.page.curves import Curve, curve_panels, says_something, table_of_curves
from pipedream_rt.observers.page.timeline_panel import timelines
from pipedream_rt.observers.run_record import Bucket, RunRecord
from pipedream_rt.schedules import COORDINATOR, Kind, Plan
from pipedream_rt.schedules.actions import OF_UPDATES
from pipedream_rt.simulation.predict import predict, what_if
from pipedream_rt.tracing.balance import about_balance, speed_of
from pipedream_rt.tracing.events import Begun
from pipedream_rt.tracing.spans import NOBODY
from pipedream_rt.tracing.summary import (
    PERCENTILES,
    WORKER_HEAD,
    bytes_text,
    seconds_text,
    summarize,
    worker_rows,
)
from pipedream_rt.tracing.trace import CODES, COMPUTES, PASS, Trace

_GAIN = 1.1
"""How many times as fast a simulated change must make a run for the page to advise it."""

_HELD_UP = 0.2
"""The share of its time that a first stage waits for the script before the page says so."""


_COMPARED = ("loss", "evaluated", "rate", "throughput", "staleness")
"""The beginnings of the names of curves that compare runs, by their first lines."""

_RECENT_S = 60.0
"""Seconds over which the current rate is measured."""

_MOST_SIMULATED = 20_000
"""Spans up to which a trace is simulated for the page: that takes a second or two."""


def panels(record: RunRecord, *, live: bool = False) -> list[Panel]:
    """Return the panels of a run; those of a ``live`` page are made often, and simulate nothing."""
    begun, plan = record.begun, record.plan
    if begun is None or plan is None:
        return [Panel("head", "No run", Markup("<p>The run has not begun.</p>"), True)]
    trace = record.trace
    found = [Panel("head", "", _head(record, begun, plan), True)]
    chosen, warned = _warnings(record, begun)
    if texts := [*warned, *_advice(record, plan, trace, live)]:
        found.append(Panel("warnings", "What to look at", _list(texts, "warnings"), True))
    if chosen:
        found.append(Panel("chosen", "Said at the start", _list(chosen, "said"), True))
    found += curve_panels(record, begun, live)
    found += _stages(record, begun, plan)
    if trace is not None:
        found += _of_trace(trace, live)
    found += [
        Panel("plan", "Plan", _plan(begun, plan), True, begun.how),
        *_events(record, begun),
        Panel(
            "settings",
            "Settings",
            blocks.facts(begun.settings or {"options": "none given"}),
            note="What the script gave; everything else had its default.",
        ),
        Panel("software", "Software", blocks.facts(_software(begun))),
    ]
    return found


def compared(records: Mapping[str, RunRecord]) -> list[Panel]:
    """Return the panels that set runs side by side, by name: figures, settings and curves."""
    names = list(records)
    figures = {name: {"run": title_of(r), **head_figures(r)} for name, r in records.items()}
    settings = {n: {} if r.begun is None else r.begun.settings for n, r in records.items()}
    found = [Panel("figures", "The runs", _beside(names, figures), True)]
    differing = {
        name: {k: v for k, v in of_run.items() if any(s.get(k) != v for s in settings.values())}
        for name, of_run in settings.items()
    }
    if any(differing.values()):
        table = _beside(names, differing)
        found.append(Panel("settings", "Settings that differ", table, True))
    curves: dict[str, tuple[Curve, list[Line]]] = {}
    for name, record in records.items():
        for curve in table_of_curves(record, 0):
            if curve.lines and curve.name.startswith(_COMPARED):
                _, lines = curves.setdefault(curve.title, (curve, []))
                lines.append(Line(name, curve.lines[0].points))
    for number, (curve, lines) in enumerate(curves.values()):
        if any(says_something(line, curve.from_zero) for line in lines):
            axis = "seconds" if curve.over_time else "mini-batch"
            chart = line_chart(curve.words, lines, axis, from_zero=curve.from_zero)
            found.append(Panel(f"curve-{number}", curve.title, chart))
    return found


def _beside(names: Sequence[str], values: Mapping[str, Mapping[str, str]]) -> Markup:
    """Return a table of values with a column for each run."""
    rows = dict.fromkeys(key for name in names for key in values[name])
    return blocks.table(
        ("", *names), [(key, *(values[name].get(key, "-") for name in names)) for key in rows]
    )


def title_of(record: RunRecord) -> str:
    plan = record.plan
    return "no run" if plan is None else f"{plan.name}, {plan.in_words}"


def workers_panel(workers: Sequence[Mapping[str, Any]]) -> Panel:
    """Return the panel of the workers, with what they do now."""
    table = blocks.table(WORKER_HEAD, worker_rows(workers, 80))
    return Panel("workers", "Workers now", table, True)


# -- what is above ------------------------------------------------------------------------------


def _head(record: RunRecord, begun: Begun, plan: Plan) -> Markup:
    """Return the figures that are looked at first."""
    started = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.first))
    words = f"{plan.name}, {plan.in_words}, {plan.per_update} micro-batches per update"
    software = begun.software
    commit, cores = software.get("commit"), software.get("cores")
    facts = (
        software.get("command") or software.get("script", ""),
        f"commit {commit}" if commit else "",
        f"process {begun.pid} on {begun.host}" + (f" with {cores} cores" if cores else ""),
        f"begun {started}",
    )
    return Markup("<p class=lead>{}</p><p>{}.</p>{}").format(
        words,
        ", ".join(filter(None, facts)),
        blocks.facts(head_figures(record)),
    )


def head_figures(record: RunRecord) -> dict[str, str]:
    """Return the figures of a run that are looked at first, in words, by name."""
    last = _last(record)
    figures = {
        "state": _state(record),
        "mini-batches": "none yet" if last is None else str(last.last.step + 1),
        "last loss": "-" if last is None else number_text(last.loss),
        "rate, last minute": _rate_text(record),
        "staleness": "-" if last is None else _updates(last.staleness),
        "time": seconds_text(max(record.last_time - record.first, 0.0)),
        "recoveries": str(len(record.recovered)),
        "checkpoints": str(len(record.saved)),
    }
    if record.evaluations:
        values = record.evaluations[-1].values
        figures["evaluated"] = ", ".join(f"{k} {number_text(v)}" for k, v in values.items())
    if (computed := _computed(record)) is not None:
        figures["speed"] = f"{speed_of(*computed[:2]):.2f} times one process, at most"
    if record.scripts > 1:
        figures["scripts"] = f"{record.scripts}, each but the first after a checkpoint"
    return figures


def _computed(record: RunRecord) -> tuple[list[float], float, int] | None:
    """Return the seconds that each stage computed, those that passed, and the micro-batches.

    None where that is not known.
    """
    # Not known in one process, of replicas, and once new workers count from 0.
    buckets, plan = list(record.steps), record.plan
    settings = {} if record.begun is None else record.begun.settings
    if len(buckets) < 2 or plan is None or plan.replicated or settings.get("workers") == "serial":
        return None
    first, last = buckets[0].last, buckets[-1].last
    busy = [b - a for a, b in zip(first.busy_s, last.busy_s, strict=False)]
    seconds, steps = last.time - first.time, last.step - first.step
    if record.recovered or seconds <= 0 or min(busy, default=-1.0) < 0:
        return None
    return busy, seconds, steps * plan.per_update


def _last(record: RunRecord) -> Bucket | None:
    """Return the last bucket of mini-batches."""
    return next(iter([*record.steps][-1:]), None)


def _updates(count: int) -> str:
    """Return a number of updates in words."""
    return "none" if not count else f"{count} update{'s' * (count > 1)}"


def _state(record: RunRecord) -> str:
    """Return the state of a run in words."""
    if record.ended is None:
        return "running" if record.may_run else "killed: its process is gone"
    return f"failed: {record.ended.reason}"[:300] if record.ended.reason else "ended"


def _rate_text(record: RunRecord) -> str:
    """Return the rate of the last `_RECENT_S` seconds in words."""
    buckets = list(record.steps)
    if len(buckets) < 2:
        return "-"
    end = buckets[-1].last.time
    recent = [b for b in buckets if b.last.time >= end - _RECENT_S] or buckets[-1:]
    first = buckets[-len(recent) - 1] if len(recent) < len(buckets) else recent.pop(0)
    seconds = end - first.last.time
    if seconds <= 0 or not recent:
        return "-"
    samples = sum(b.samples for b in recent)
    what, count = (
        ("samples", samples) if samples else ("mini-batches", sum(b.count for b in recent))
    )
    return f"{number_text(count / seconds)} {what}/s"


# -- what to look at ----------------------------------------------------------------------------


def _list(texts: Sequence[str], kind: str) -> Markup:
    return blocks.sentences(texts, kind)


def _warnings(record: RunRecord, begun: Begun) -> tuple[list[str], list[str]]:
    """Return the warnings before the run began, and those after: each text once, in order."""
    before = dict.fromkeys(each.text for each in record.warned if each.time < begun.time)
    after = dict.fromkeys(each.text for each in record.warned if each.time >= begun.time)
    return list(before)[-20:], list(after)[-20:]


def _advice(record: RunRecord, plan: Plan, trace: Trace | None, live: bool) -> Iterator[str]:
    """Yield the advice from the times of the stages, unless the runtime has warned of it."""
    buckets = list(record.steps)
    # A warning is known again by a phrase of its text.
    warned = " ".join(each.text for each in record.warned)
    alone = record.begun is not None and record.begun.settings.get("workers") == "serial"
    if (
        len(buckets) > 3
        and not (alone or plan.replicated)
        and "if all workers computed" not in warned
    ):
        first, last = buckets[min(2, len(buckets) - 2)].last.busy_s, buckets[-1].last.busy_s
        pairs = zip(last[: plan.num_stages], first, strict=False)
        busy = [max(now - then, 0.0) for now, then in pairs]
        if max(busy, default=0.0) > 0:
            yield from about_balance(plan, busy)
    if trace is None:
        return
    try:
        summary = summarize(trace)
    except TraceError:
        return
    if "too small for" in warned:
        # In so small a run a stage waits for messages, however fast the script loads.
        return
    for stage in summary.stages:
        share = stage.waits.get(COORDINATOR, 0.0) / max(summary.makespan, 1e-9)
        if plan.stage_of(stage.stage) in plan.entries and share > _HELD_UP:
            yield (
                f"{plan.title_of(stage.stage)} waited for the script for {share:.0%} of the time: "
                "the loader or the body of the loop holds the pipe up. Load ahead, as with "
                "DataLoader(num_workers=...), or do less in the loop"
            )
    # Workers that share cores (a warning says so) use those during a hop: slack gains nothing.
    if not live and " share " not in warned:
        yield from _slack_advice(trace)


def _slack_advice(trace: Trace) -> Iterator[str]:
    """Yield the advice to use slack, if a simulation says that it hides the hops."""
    plan = trace.plan
    if plan.num_stages < 2 or plan.replicated or plan.shape.slack:
        return
    if len(trace.spans) > _MOST_SIMULATED:
        return
    try:
        same = predict(trace)
        gain = summarize(what_if(trace, {"slack": ["1"]})).throughput / same.predicted
    except (PipelineError, ValueError, ZeroDivisionError, IndexError):
        return
    if gain >= _GAIN:
        yield (
            f"hops take so long that Layout(slack=1) makes the pipe {gain:.2f} times as fast in a "
            "simulation. In an asynchronous schedule gradients are then staler; where "
            "micro_batches is left out, as many are taken as keep them one update stale"
        )


# -- stages -------------------------------------------------------------------------------------


def _stages(record: RunRecord, begun: Begun, plan: Plan) -> Iterator[Panel]:
    """Yield the panel of the stages: versions, staleness, and memory beside the formula."""
    last, now = _last(record), begun.stages
    if record.ended is not None and record.ended.stages:
        now = record.ended.stages
    rows: list[tuple[str, ...]] = []
    for address, counters in zip(plan.addresses, now, strict=False):
        stage = plan.stage_of(address)
        versions = last.last.versions if last is not None else ()
        rows.append(
            (
                plan.label_of(address),
                _name_of(begun, plan.worker_of(address)),
                str(counters.get("device", "cpu")),
                str(versions[stage]) if stage < len(versions) else "-",
                f"{counters['versions_kept_most']} of {known(plan.kept, stage)}",
                f"at most {known(plan.staleness, stage)}",
                f"{counters['parameters']:,}",
                _weights(plan, stage, counters),
                bytes_text(counters["peak_memory_bytes"]),
                _on_device(counters),
            )
        )
    if not any(row[-1] for row in rows):
        rows = [row[:-1] for row in rows]
    head = ("stage", "worker", "device", "version", "versions kept", "staleness", "parameters",
            "weights", "process, peak", "device, peak")  # fmt: skip
    yield Panel(
        "stages",
        "Stages",
        blocks.table(head[: len(rows[0])] if rows else head, rows),
        True,
        "Weights: what the versions kept take, of what the formula says they take at most. "
        "The process has activations, optimizer state and torch itself besides.",
    )


def _weights(plan: Plan, stage: int, counters: Mapping[str, Any]) -> str:
    """Return the bytes of the versions that a stage has kept, and of those that it may keep."""
    size, kept = counters["weight_bytes"], known(plan.kept, stage)
    most = bytes_text(int(kept) * size) if kept.isdecimal() else "?"
    return f"{bytes_text(counters['versions_kept_most'] * size)} of {most}"


def _on_device(counters: Mapping[str, Any]) -> str:
    """Return the peak memory of a stage's device; empty if the device has none of its own."""
    peak = counters.get("peak_device_memory_bytes")
    return "" if peak is None else bytes_text(peak)


def _name_of(begun: Begun, worker: int) -> str:
    return begun.workers[worker] if worker < len(begun.workers) else str(worker)


# -- the trace ----------------------------------------------------------------------------------

_KINDS = (
    ("forward", "forward", (CODES[Kind.FORWARD], PASS)),
    ("backward", "backward", (CODES[Kind.BACKWARD], CODES[Kind.INPUT], CODES[Kind.WEIGHT])),
    ("update", "updating", tuple(CODES[kind] for kind in OF_UPDATES)),
)
"""The parts of the time in which a stage computes: CSS class, name, kinds of spans."""


def _of_trace(trace: Trace, live: bool) -> Iterator[Panel]:
    try:
        summary = summarize(trace)
        drawn = timelines(trace)
    except TraceError:
        return
    plan = trace.plan
    yield Panel(
        "time",
        "Where the time goes",
        blocks.bars([(plan.title_of(a), where_time_goes(trace, a)) for a in plan.addresses]),
        True,
        f"{_window_text(trace)}Forward and backward include sending. Held up: a message had come, "
        "and the worker did not begin yet. Waits of a stage that shares its worker are those of "
        "the worker.",
    )
    yield Panel(
        "bubble",
        "Bubble",
        _bubble(trace, summary.bubble, live),
        note="The share of the time, from the first action to the last, in which a worker did not "
        "compute. Predicted: the same schedule, simulated with the measured costs.",
    )
    hops = {
        f"{p} %" if p < 100 else "longest": seconds_text(v)
        for p, v in zip(PERCENTILES, summary.hops, strict=False)
    }
    if hops:
        note = "The time from the end of an action to the arrival of its message."
        yield Panel("hops", "Hops", blocks.facts(hops), note=note)
    note = "Zoom with the buttons, and scroll. Each action has a tooltip."
    yield Panel("timeline", "Timeline", drawn, True, note)


def where_time_goes(trace: Trace, address: int) -> list[blocks.BarSegment]:
    """Return the parts of a stage's time, from the first action of the trace to the last."""
    plan, spans = trace.plan, trace.spans
    acting = spans[np.isin(spans["kind"], (*COMPUTES, PASS)) & (spans["stage"] >= 0)]
    begin, end = int(acting["start"].min()), int(acting["end"].max())
    whole = max(end - begin, 1)
    mine = acting[acting["stage"] == address]
    parts = []
    for kind, name, codes in _KINDS:
        chosen = mine[np.isin(mine["kind"], codes)]
        share = float((chosen["end"] - chosen["start"]).sum()) / whole
        parts.append(blocks.BarSegment(kind, name, share))
    ready = np.maximum(mine["ready"], begin)
    # Clipped: a message that came before the worker was ready kept nobody waiting, and no wait goes
    # on after the action began.
    arrived = np.clip(mine["arrived"], ready, np.maximum(mine["start"], ready))
    needed = mine["waited_for"] != NOBODY
    for cause in np.unique(mine["waited_for"][needed]).tolist():
        chosen = mine["waited_for"] == cause
        share = float((arrived - ready)[chosen].sum()) / whole
        name = "the script" if cause < 0 else plan.title_of(cause)
        side = "script" if cause < 0 else "before" if cause < address else "after"
        if share > 0.0005:
            words = {"script": "waits for the script", "before": "waits for a stage before",
                     "after": "waits for a stage after"}[side]  # fmt: skip
            parts.append(blocks.BarSegment(f"wait-{side}", f"{words}: {name}", share))
    held = float(np.maximum(mine["start"] - np.where(needed, arrived, ready), 0).sum()) / whole
    parts.append(blocks.BarSegment("held", "held up", held))
    rest = max(1.0 - sum(part.share for part in parts), 0.0)
    parts.append(blocks.BarSegment("rest", "nothing to do, or other stages of its worker", rest))
    return [part for part in parts if part.share > 0.0005]


def _window_text(trace: Trace) -> str:
    """Return how much of the run a trace covers; empty if all of it."""
    spans = trace.spans
    if not trace.dropped or not len(spans):
        return ""
    seconds = (int(spans["end"].max()) - int(spans["start"].min())) / 1e9
    return f"Of the last {seconds_text(seconds)} that were recorded. "


def _bubble(trace: Trace, measured: Sequence[float], live: bool) -> Markup:
    """Return the bubble of each worker, as measured and as predicted."""
    predicted: Sequence[float] = ()
    if not (live or trace.simulated) and len(trace.spans) <= _MOST_SIMULATED:
        try:
            predicted = summarize(predict(trace).trace).bubble
        except (PipelineError, ValueError, ZeroDivisionError, IndexError):
            predicted = ()
    rows = [
        (
            trace.plan.name_of(worker),
            f"{bubble:.1%}",
            f"{predicted[worker]:.1%}" if worker < len(predicted) else "-",
        )
        for worker, bubble in enumerate(measured)
    ]
    return blocks.table(("worker", "measured", "predicted"), rows)


# -- the plan, and what happened ----------------------------------------------------------------


def _plan(begun: Begun, plan: Plan) -> Markup:
    workers = []
    for worker in range(plan.workers):
        hosted = [a for a in plan.addresses if plan.worker_of(a) == worker]
        boxes = [_box(begun, plan, address) for address in hosted]
        workers.append((f"worker {worker}: {_name_of(begun, worker)}", boxes))
    return blocks.drawn_plan(workers)


def _box(begun: Begun, plan: Plan, address: int) -> blocks.PlanBox:
    stage = plan.stage_of(address)
    layers = plan.layers[stage] if stage < len(plan.layers) else ()
    lines = []
    if layers:
        names = layers[0] if len(layers) == 1 else f"{layers[0]} to {layers[-1]}"
        lines.append(f"{names} ({len(layers)} layer{'s' * (len(layers) > 1)})")
    if address < len(begun.stages):
        lines.append(f"{begun.stages[address]['parameters']:,} parameters")
    links = [b for a, b in plan.links or () if a == stage and b != stage + 1]
    if links:
        lines.append(f"also gives to stage {', '.join(map(str, links))}")
    lines += [f"shares {tie.name}" for tie in plan.ties if stage in tie.stages]
    return blocks.PlanBox(plan.title_of(address), lines)


def _events(record: RunRecord, begun: Begun) -> Iterator[Panel]:
    """Yield the tables of recoveries, checkpoints and evaluations, if there are any."""

    def at(moment: float) -> str:
        return seconds_text(max(moment - record.first, 0.0))

    rows: list[tuple[str, ...]]
    if record.recovered:
        rows = [
            (at(e.time), str(e.step), seconds_text(e.seconds), str(e.replayed), e.reason)
            for e in record.recovered[-20:]
        ]
        took = ("after", "mini-batch", "took", "computed again", "because")
        yield Panel("recoveries", "Recoveries", blocks.table(took, rows), True)
    if record.saved:
        rows = [(at(e.time), str(e.step), e.folder) for e in record.saved[-10:]]
        saved = ("after", "mini-batches", "folder")
        yield Panel("checkpoints", "Checkpoints", blocks.table(saved, rows), True)
    if record.evaluations:
        names = list(dict.fromkeys(name for e in record.evaluations for name in e.values))
        rows = []
        for e in record.evaluations[-20:]:
            values = [number_text(e.values[n]) if n in e.values else "-" for n in names]
            rows.append((at(e.time), str(e.step), *values))
        table = blocks.table(("after", "mini-batches", *names), rows)
        yield Panel("evaluations", "Evaluations", table)


def _software(begun: Begun) -> dict[str, str]:
    """Return the software, and the machine of the script."""
    return {**begun.software, "machine": begun.host}
