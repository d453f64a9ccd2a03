"""The timeline of the page: a lane for each worker. To zoom in is to make the lanes wider."""

from __future__ import annotations

from markupsafe import Markup

from pipedream_rt.errors import TraceError
from pipedream_rt.tracing.summary import seconds_text
from pipedream_rt.tracing.timeline import NAMES, Box, Window, window
from pipedream_rt.tracing.trace import COMPUTES, Trace

ACTIONS = 400
"""Actions in a drawing."""

_TICKS = 5


def timelines(trace: Trace) -> Markup:
    """Draw a short run whole, else its beginning and middle, or its end if no more is known."""
    spans = trace.spans[(trace.spans["stage"] >= 0)]
    acting = spans[[int(kind) in COMPUTES for kind in spans["kind"]]] if len(spans) else spans
    if not len(acting):
        raise TraceError("there is no action in the trace")
    ends = sorted((acting["end"] - spans["start"].min()).tolist())
    if trace.dropped:  # there is no beginning
        begin = ends[-ACTIONS - 1] / 1e9 if len(ends) > ACTIONS else 0.0
        return _drawn(trace, window(trace, begin, ends[-1] / 1e9), "The last moments")
    if len(ends) <= 2 * ACTIONS:
        return _drawn(trace, window(trace), "All of it")
    first = window(trace, end=ends[ACTIONS - 1] / 1e9)
    half = len(ends) // 2
    middle = window(trace, ends[half] / 1e9, ends[half + ACTIONS] / 1e9)
    return _drawn(trace, first, "The beginning") + _drawn(trace, middle, "The middle")


def _drawn(trace: Trace, view: Window, words: str) -> Markup:
    """Return one drawing, with buttons to zoom."""
    plan = trace.plan
    length = max(view.end - view.begin, 1)
    by_worker: list[list[Box]] = [[] for _ in range(plan.workers)]
    for box in view.boxes:
        by_worker[box.worker].append(box)
    lanes = Markup("").join(
        Markup('<div class="lane" aria-label="{}"><div class="acts">{}</div></div>').format(
            plan.name_of(worker), Markup("").join(_act(box, view) for box in boxes)
        )
        for worker, boxes in enumerate(by_worker)
    )
    names = Markup("").join(
        Markup("<span>{}</span>").format(plan.name_of(worker)) for worker in range(plan.workers)
    )
    ticks = Markup("").join(
        Markup('<span style="left:{}%">{}</span>').format(
            f"{100 * i / _TICKS:g}", seconds_text((view.begin + length * i / _TICKS) / 1e9)
        )
        for i in range(_TICKS)
    )
    legend = Markup("").join(
        Markup('<li><i class="act k{}">{}</i>{}</li>').format(chr(kind), chr(kind), NAMES[kind])
        for kind in view.kinds
    )
    return Markup(
        '<div class="timeline"><div class="tools"><span>{} ({})</span>'
        '<button type="button" data-zoom="2" aria-label="zoom in">+</button>'
        '<button type="button" data-zoom="0.5" aria-label="zoom out">-</button>'
        '<button type="button" data-zoom="0">all</button></div>'
        '<div class="lanes"><div class="names">{}</div><div class="scroll" tabindex="0">'
        '<div class="zoomed">{}<div class="ticks">{}</div></div></div></div>'
        '<ul class="legend">{}</ul></div>'
    ).format(words, str(view), names, lanes, ticks, legend)


def _act(box: Box, view: Window) -> Markup:
    left, right = view.share(box.start), view.share(box.end)
    return Markup(
        '<span class="act k{}" style="left:{}%;width:{}%" title="{}"><b>{}</b></span>'
    ).format(
        chr(box.kind),
        f"{100 * left:.3f}",
        f"{100 * max(right - left, 0.0003):.3f}",  # or a short action would be invisible
        box.tip,
        box.label,
    )
