"""Drawings of a trace: as text, as SVG, and as Trace Event JSON for Perfetto.

A `Window` is what is drawn, of `Box`es with their labels and places. Text, SVG and the page of a
report (`observers/page/timeline_panel.py`) write it down, each in its own way.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NamedTuple
from xml.sax.saxutils import escape

import numpy as np

from pipedream_rt.errors import TraceError
from pipedream_rt.schedules import Kind, Plan
from pipedream_rt.tracing.spans import NOBODY
from pipedream_rt.tracing.summary import seconds_text
from pipedream_rt.tracing.trace import CODES, DRAIN, INJECTED, LOSS_CAME, PASS, Trace

MOST_DRAWN = 2000
"""The number of actions that a picture without a given end shows; more would blur."""

NAMES = {
    CODES[Kind.FORWARD]: "forward",
    CODES[Kind.BACKWARD]: "backward",
    CODES[Kind.INPUT]: "backward, input half",
    CODES[Kind.WEIGHT]: "backward, weight half",
    CODES[Kind.STEP]: "step",
    CODES[Kind.REDUCE]: "hand gradients over",
    CODES[Kind.TAKE]: "take weights",
    CODES[Kind.APPLY]: "apply",
    DRAIN: "end of a flush",
    PASS: "evaluation, inference",
}
"""The names of actions, by the number of the kind in a span."""
_COLOURS = dict(
    zip(
        NAMES,
        (
            "#8ab4f8",
            "#81c995",
            "#5bb974",
            "#b7e1c1",
            "#f6ae2d",
            "#e8710a",
            "#fdd663",
            "#e6b800",
            "#9aa0a6",
            "#c8c8c8",
        ),
        strict=True,
    )
)


class Box(NamedTuple):
    """One action in a drawing.

    Attributes:
        stage: An address: each replica has one.
        kind: The number of the action's kind in a span.
        start: In nanoseconds from the start of the trace, as is ``end``.
        label: The action, as ``F3``, or ``2:F3`` if the worker hosts several stages.
        tip: All else about it, in words.
        shade: From 0 for the first stage of the worker up to below 1.
    """

    worker: int
    stage: int
    kind: int
    index: int  # type: ignore[assignment]  # nobody looks for an element of a box
    version: int
    start: int
    end: int
    label: str
    tip: str
    shade: float


class Window(NamedTuple):
    """The part of a trace that is drawn. Times are in nanoseconds from the start of the trace.

    Attributes:
        boxes: The actions in it, in the order of their starts.
        length: The length of the whole trace.
    """

    boxes: list[Box]
    begin: int
    end: int
    length: int

    @property
    def kinds(self) -> list[int]:
        """The kinds of the actions in it, in the order of `NAMES`."""
        there = {box.kind for box in self.boxes}
        return [kind for kind in NAMES if kind in there]

    def share(self, ns: int) -> float:
        """Return where a time lies in it, from 0 to 1; what lies outside is at its nearer end."""
        length = max(self.end - self.begin, 1)
        return (min(max(ns, self.begin), self.end) - self.begin) / length

    def __str__(self) -> str:
        """Return the part in words, as ``0 s to 1 ms of 2 s``."""
        shown = f"{seconds_text(self.begin / 1e9)} to {seconds_text(self.end / 1e9)}"
        return f"{shown} of {seconds_text(self.length / 1e9)}"


def window(trace: Trace, begin: float | None = None, end: float | None = None) -> Window:
    """Return a part of a trace to draw, by seconds from its start.

    Without an end it ends with the `MOST_DRAWN`-th action.
    """
    spans = trace.spans[np.isin(trace.spans["kind"], list(NAMES))]
    if not len(spans):
        raise TraceError("there is no action in the trace")
    zero, last = int(spans["start"].min()), int(spans["end"].max())
    first = zero + round((begin or 0.0) * 1e9)
    spans = spans[spans["end"] > first]
    if end is not None:
        stop = zero + round(end * 1e9)
        spans = spans[spans["start"] < stop]
    spans = spans[np.argsort(spans["start"], kind="stable")]
    if end is None:
        spans = spans[:MOST_DRAWN]
        stop = int(spans["end"].max(initial=first))
    if not len(spans):
        raise TraceError(
            f"nothing happened between {begin or 0:g} s and {'the end' if end is None else end} "
            f"of the trace, which is {seconds_text((last - zero) / 1e9)} long"
        )
    names = ("stage", "kind", "index", "version", "start", "end")
    columns = zip(*(spans[name].tolist() for name in names), strict=True)
    boxes = [_box(trace.plan, zero, *values) for values in columns]
    return Window(boxes, first - zero, stop - zero, last - zero)


def _box(
    plan: Plan, zero: int, stage: int, kind: int, index: int, version: int, start: int, end: int
) -> Box:
    """Return the box of a span; ``zero`` is the start of the trace."""
    worker = plan.worker_of(stage)
    siblings, action = plan.stages_of(worker), f"{chr(kind)}{index}"
    took = seconds_text((end - start) / 1e9)
    return Box(
        worker=worker,
        stage=stage,
        kind=kind,
        index=index,
        version=version,
        start=start - zero,
        end=end - zero,
        label=f"{stage}:{action}" if len(siblings) > 1 else action,
        tip=f"{plan.title_of(stage)} {action}, version {version}, {took}",
        shade=siblings.index(stage) / len(siblings),
    )


# -- text ---------------------------------------------------------------------------------------


def text(trace: Trace, view: Window, width: int = 100) -> str:
    """Return a drawing with a row of characters for each worker, ``width`` columns wide.

    A column shows the letter of the action that took the most of its time, or ``.`` if the worker
    was idle.
    """
    plan = trace.plan
    names = [plan.name_of(worker) for worker in range(plan.workers)]
    lead = max(map(len, names)) + 2
    columns = max(width - lead, 10)
    scale = max(view.end - view.begin, 1) / columns
    rows = [["."] * columns for _ in names]
    filled = np.zeros((len(names), columns))
    for box in view.boxes:
        first = max((box.start - view.begin) / scale, 0.0)
        last = min((box.end - view.begin) / scale, float(columns))
        for column in range(int(first), min(int(np.ceil(last)), columns)):
            share = min(last, column + 1) - max(first, column)
            # From a quarter on, so that a column that is almost idle looks idle.
            if share > filled[box.worker, column] and share >= 0.25:
                filled[box.worker, column] = share
                rows[box.worker][column] = chr(box.kind)
        cells = int(last) - int(np.ceil(first))
        if cells > len(box.label):
            at = int(np.ceil(first))
            rows[box.worker][at : at + cells] = list(box.label.ljust(cells, "-"))
    lines = [f"{name:<{lead}}{''.join(row)}" for name, row in zip(names, rows, strict=True)]
    left, right = (seconds_text(t / 1e9) for t in (view.begin, view.end))
    lines.append(f"{'':<{lead}}{left}{right:>{max(columns - len(left), 1)}}")
    return "\n".join(lines)


# -- SVG ----------------------------------------------------------------------------------------

_ROW, _BAR, _LEFT, _TOP = 30, 24, 80, 40


def svg(trace: Trace, view: Window, width: int = 1200) -> str:
    """Return an SVG document with a row of boxes for each worker and a time axis.

    Every box has a tooltip. ``width`` is in pixels.
    """
    workers = trace.plan.workers
    bottom = _TOP + workers * _ROW

    def x(ns: int) -> float:
        return _LEFT + view.share(ns) * (width - _LEFT - 20)

    title = _title(trace, view)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{bottom + 58}" '
        f'viewBox="0 0 {width} {bottom + 58}" font-family="sans-serif" font-size="11">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{width}" height="{bottom + 58}" fill="white"/>',
        f'<text x="{_LEFT}" y="22" font-size="14">{escape(title)}</text>',
    ]
    for w in range(workers):
        y = _TOP + w * _ROW
        parts.append(
            f'<text x="{_LEFT - 10}" y="{y + 16}" text-anchor="end">{trace.plan.name_of(w)}</text>'
            f'<rect x="{_LEFT}" y="{y}" width="{width - _LEFT - 20}" height="{_BAR}" '
            'fill="#f1f3f4"/>'
        )
    parts.extend(_svg_box(box, x) for box in view.boxes)
    parts.extend(_svg_axis(view, x, bottom))
    parts.extend(_svg_legend(view, bottom))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _title(trace: Trace, view: Window) -> str:
    """Return the title of a drawing, fit for XML."""
    kind, plan = "simulated" if trace.simulated else "measured", trace.plan
    stages = plan.in_words if plan.replicated else f"{plan.num_stages} stages"
    title = f"{plan.name}, {stages}, {plan.per_update} micro-batches per update ({kind}; {view})"
    return "".join(c for c in title if c.isprintable())  # XML has no control characters


def _svg_legend(view: Window, bottom: int) -> Iterator[str]:
    """Yield the legend: a box and a name for each kind of action in the drawing."""
    at = float(_LEFT)
    for code in view.kinds:
        words = f"{chr(code)} {NAMES[code]}"
        yield (
            f'<rect x="{at:.1f}" y="{bottom + 38}" width="12" height="12" '
            f'fill="{_COLOURS[code]}"/>'
            f'<text x="{at + 17:.1f}" y="{bottom + 48}">{words}</text>'
        )
        at += 17 + 6.5 * len(words) + 18


def _svg_box(box: Box, x: Any) -> str:
    """Return the box of an action, with its tooltip and, if there is room, its label."""
    left, right = x(box.start), x(box.end)
    y = _TOP + box.worker * _ROW
    # The first stage of a worker has the full colour, each further one a lighter shade.
    opacity = 1 - 0.6 * box.shade
    words = ""
    if right - left > 6.2 * len(box.label):
        words = (
            f'<text x="{(left + right) / 2:.2f}" y="{y + 16}" text-anchor="middle" '
            f'pointer-events="none">{box.label}</text>'
        )
    return (
        f'<rect x="{left:.2f}" y="{y}" width="{max(right - left, 0.3):.2f}" height="{_BAR}" '
        f'fill="{_COLOURS[box.kind]}" fill-opacity="{opacity:.2g}" stroke="white" '
        f'stroke-width="0.5">'
        f"<title>{box.tip}</title></rect>{words}"
    )


def _svg_axis(view: Window, x: Any, bottom: int) -> Iterator[str]:
    """Yield the ticks of the time axis, at round times."""
    length = max(view.end - view.begin, 1)
    step = 10 ** int(np.floor(np.log10(length)))
    for divisor in (1, 2, 5, 10):
        if length / (step / divisor) >= 6:
            step = max(int(step / divisor), 1)
            break
    for tick in range(-(-view.begin // step) * step, view.end + 1, step):
        yield (
            f'<line x1="{x(tick):.2f}" y1="{_TOP}" x2="{x(tick):.2f}" y2="{bottom + 4}" '
            'stroke="#9aa0a6" stroke-width="0.5"/>'
            f'<text x="{x(tick):.2f}" y="{bottom + 18}" text-anchor="middle">'
            f"{seconds_text(tick / 1e9)}</text>"
        )


# -- Perfetto -----------------------------------------------------------------------------------


def perfetto(trace: Trace) -> str:
    """Return the whole trace as Trace Event JSON, which https://ui.perfetto.dev opens.

    It has a process for each worker, a track for each stage with its actions, another one with what
    its device did, a counter of the versions that a stage keeps, and arrows that follow each
    micro-batch. Times are in microseconds, as the format demands.
    """
    return json.dumps({"traceEvents": list(_events(trace)), "displayTimeUnit": "ms"})


def _events(trace: Trace) -> Iterator[dict[str, Any]]:
    """Yield the events: first names, then the spans by start."""
    plan = trace.plan
    for w, facts in enumerate(trace.workers):
        yield _named("process_name", w, 0, f"worker {w}: {facts.name}")
    yield _named("process_name", plan.workers, 0, "coordinator")
    for address in plan.addresses:
        yield _named("thread_name", plan.worker_of(address), address, plan.title_of(address))
    spans = trace.spans[np.isin(trace.spans["kind"], [*NAMES, INJECTED, LOSS_CAME])]
    zero = int(spans["start"].min(initial=0)) if len(spans) else 0
    order = np.argsort(spans["start"], kind="stable")
    columns = (spans[name][order].tolist() for name in _Row._fields)
    for row in map(_Row._make, zip(*columns, strict=True)):
        if row.stage < 0:
            yield _coordinator_event(plan, row, zero)
        else:
            yield from _action_events(plan, row, zero)
    yield from _device_events(trace, zero)


def _device_events(trace: Trace, zero: int) -> Iterator[dict[str, Any]]:
    """Yield the tracks of devices, and the slices of what they did."""
    plan, spans = trace.plan, trace.device_spans
    for address in np.unique(spans["stage"]).tolist():
        name = f"{plan.title_of(address)} on its device"
        yield _named("thread_name", plan.worker_of(address), _of_device(plan, address), name)
    drawn = spans[np.isin(spans["kind"], list(NAMES))]
    columns = (drawn[name].tolist() for name in ("kind", "stage", "index", "start", "end"))
    for kind, stage, index, start, end in zip(*columns, strict=True):
        yield _complete(
            f"{chr(kind)}{index}", NAMES[kind], plan.worker_of(stage), _of_device(plan, stage),
            (start - zero) / 1e3, (end - start) / 1e3, {},
        )  # fmt: skip


def _of_device(plan: Plan, address: int) -> int:
    # Behind the tracks of all stages, whose numbers are their addresses.
    return len(plan.addresses) + address


class _Row(NamedTuple):
    """The values of a span that are written for Perfetto; `SPAN` has their meaning."""

    kind: int
    stage: int
    index: int  # type: ignore[assignment]  # nobody looks for an element of a row
    version: int
    kept: int
    in_flight: int
    waited_for: int
    ready: int
    start: int
    end: int
    bytes: int


def _coordinator_event(plan: Plan, row: _Row, zero: int) -> dict[str, Any]:
    """Return the slice of an injection, or of the arrival of a loss."""
    name = f"inject {row.index}" if row.kind == INJECTED else f"loss {row.index}"
    at, duration = (row.start - zero) / 1e3, (row.end - row.start) / 1e3
    return _complete(name, "coordinator", plan.workers, 0, at, duration, {})


def _action_events(plan: Plan, row: _Row, zero: int) -> Iterator[dict[str, Any]]:
    """Yield the slice of an action, the versions kept after it, and its arrow."""
    at, duration = (row.start - zero) / 1e3, (row.end - row.start) / 1e3
    worker = plan.worker_of(row.stage)
    details = {
        "version": row.version,
        "versions held": row.kept,
        "in flight": row.in_flight,
        "waited us": max(row.start - row.ready, 0) / 1e3,
        "waited for": _cause(plan, row.waited_for),
        "bytes sent": row.bytes,
    }
    label = f"{chr(row.kind)}{row.index}"
    yield _complete(label, NAMES[row.kind], worker, row.stage, at, duration, details)
    yield {
        "ph": "C", "name": f"versions of {plan.title_of(row.stage)}",
        "pid": worker, "tid": row.stage, "ts": row.end / 1e3 - zero / 1e3,
        "args": {"versions": row.kept},
    }  # fmt: skip
    if row.kind in _ON_ITS_WAY:
        phase = _phase(plan, row)
        arrow = {
            "ph": phase, "name": "micro-batch", "cat": "flow", "id": row.index,
            "pid": worker, "tid": row.stage, "ts": at + duration / 2,
        }  # fmt: skip
        # Without "bp" an arrow ends at the slice that begins next, not at the one around its time.
        yield {**arrow, "bp": "e"} if phase == "f" else arrow


_ON_ITS_WAY = (CODES[Kind.FORWARD], CODES[Kind.BACKWARD], CODES[Kind.INPUT])


def _phase(plan: Plan, row: _Row) -> str:
    """Return "s" where the arrows of a micro-batch begin, "t" where they go on, "f" at the end."""
    # They begin and end on the first of the stages that take the model's input.
    if plan.stage_of(row.stage) != plan.entries[0]:
        return "t"
    return "s" if row.kind == CODES[Kind.FORWARD] else "f"


def _cause(plan: Plan, waited_for: int) -> str:
    """Return the name of the stage that an action waited for."""
    if waited_for == NOBODY:
        return "nobody"
    return "coordinator" if waited_for < 0 else plan.title_of(waited_for)


def _named(what: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    """Return a metadata event, which names a process or a track."""
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}}


def _complete(
    name: str, category: str, pid: int, tid: int, at: float, duration: float, args: dict[str, Any]
) -> dict[str, Any]:
    """Return an event with a beginning and a duration."""
    return {
        "ph": "X", "name": name, "cat": category, "pid": pid, "tid": tid,
        "ts": at, "dur": duration, "args": args,
    }  # fmt: skip
