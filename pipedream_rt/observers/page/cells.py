"""Plans, results and traces as HTML, for the cells of a notebook."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from markupsafe import Markup

from pipedream_rt.errors import PipelineError
from pipedream_rt.observers.page.blocks import known, table
from pipedream_rt.observers.page.charts import number_text
from pipedream_rt.schedules import Plan
from pipedream_rt.tracing.timeline import svg, window
from pipedream_rt.tracing.trace import Trace

_STYLE = (
    "<style>.pdrt td,.pdrt th{text-align:left!important;padding:2px 14px 2px 0!important}"
    ".pdrt svg{max-width:100%;height:auto}</style>"
)


class Result(Protocol):
    """The parts of a mini-batch's result that are shown."""

    step: int
    loss: float
    staleness: int
    versions: Sequence[int]
    losses: Sequence[float]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], caption: str) -> Markup:
    """Return a table with words above it."""
    return Markup(_STYLE) + Markup('<div class="pdrt"><p>{}</p>{}</div>').format(
        caption, table(head, rows)
    )


def text_html(text: str) -> Markup:
    """Return a text whose columns stay aligned."""
    return Markup("<pre>{}</pre>").format(text)


def explanation_html(
    before: Sequence[str], rows: Sequence[Sequence[str]], after: Sequence[str], program: str
) -> Markup:
    """Return lines, the table that stands between them, and a program if there is one."""
    head, *stages = rows
    above, below = (Markup("<br>").join(lines) for lines in (before, after))
    shown = _table(head, stages, above) + Markup("<p>{}</p>").format(below)
    return shown + text_html(program) if program else shown


def plan_html(plan: Plan) -> Markup:
    """Return a plan as a table of its stages."""
    rows = []
    for address in plan.addresses:
        stage = plan.stage_of(address)
        layers = plan.layers[stage] if stage < len(plan.layers) else ()
        names = (
            "" if not layers else layers[0] if len(layers) == 1 else f"{layers[0]}..{layers[-1]}"
        )
        rows.append(
            (
                plan.label_of(address),
                str(plan.worker_of(address)),
                names,
                f"<= {known(plan.in_flight, stage)}",
                f"<= {known(plan.staleness, stage)}",
                f"<= {known(plan.kept, stage)}",
            )
        )
    head = ("stage", "worker", "layers", "in flight", "staleness", "versions")
    caption = f"{plan.name}, {plan.in_words}, {plan.per_update} micro-batches per update"
    return _table(head, rows, caption)


def result_html(result: Result) -> Markup:
    """Return the result of a mini-batch as a table."""
    row = (
        str(result.step),
        number_text(result.loss),
        str(result.staleness),
        ", ".join(map(str, result.versions)),
        ", ".join(map(number_text, result.losses)),
    )
    head = ("mini-batch", "loss", "staleness", "versions read, by stage", "losses of micro-batches")
    return _table(head, [row], "")


def trace_html(trace: Trace) -> Markup:
    """Return the beginning of a trace, drawn."""
    try:
        drawn = svg(trace, window(trace), 1200)
    except PipelineError as error:
        return text_html(str(error))
    return Markup(_STYLE) + Markup('<div class="pdrt">{}</div>').format(Markup(drawn))
