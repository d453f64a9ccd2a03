"""The parts of panels, beside charts: tables, bars, lists, and the drawn plan.

`Markup.format` escapes what it is given, so a name from a run cannot be HTML.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from markupsafe import Markup

from pipedream_rt.errors import PipelineError

_NARROW = 0.09
"""The share of a bar from which on there is room for a number in a part."""

Cell = str | Markup


class BarSegment(NamedTuple):
    """A part of a bar.

    Attributes:
        kind: The class in the style sheet, as ``"forward"``.
        name: In words; the legend has it up to a colon.
        share: Of the whole bar, from 0 to 1.
    """

    kind: str
    name: str
    share: float


class PlanBox(NamedTuple):
    """The box of a stage in the drawing of a plan."""

    title: str
    lines: Sequence[str]


def known(ask: Callable[[int], int], stage: int) -> str:
    """Return what a plan says of a stage, or a question mark."""
    try:  # of a schedule that a user wrote, a read plan knows only the name
        return str(ask(stage))
    except (PipelineError, AttributeError, AssertionError, TypeError):
        return "?"


def table(head: Sequence[str], rows: Iterable[Sequence[Cell]]) -> Markup:
    """Return a table, which scrolls in itself where it is too wide."""
    cells = Markup("").join(Markup("<th scope=col>{}</th>").format(text) for text in head)
    body = Markup("").join(
        Markup("<tr>{}</tr>").format(
            Markup("").join(
                Markup("<th scope=row>{}</th>" if not i else "<td>{}</td>").format(cell)
                for i, cell in enumerate(row)
            )
        )
        for row in rows
    )
    return Markup(
        '<div class="wide" tabindex="0"><table><thead><tr>{}</tr></thead><tbody>{}</tbody></table>'
        "</div>"
    ).format(cells, body)


def bars(rows: Iterable[tuple[str, Sequence[BarSegment]]]) -> Markup:
    """Return a bar for each row, with a legend of the kinds of parts."""
    rows = list(rows)
    names = {part.kind: part.name.partition(":")[0] for _, parts in rows for part in parts}
    legend = Markup("").join(
        Markup('<li><i class="part {}"></i>{}</li>').format(kind, name)
        for kind, name in names.items()
    )
    drawn = Markup("").join(
        Markup('<div class="row"><span class="of">{}</span><div class="bar">{}</div></div>').format(
            label, Markup("").join(map(_part, parts))
        )
        for label, parts in rows
    )
    return Markup('<div class="bars">{}</div><ul class="legend">{}</ul>').format(drawn, legend)


def _part(part: BarSegment) -> Markup:
    words = f"{part.share:.0%}"
    return Markup('<span class="part {}" style="width:{}%" title="{} {}">{}</span>').format(
        part.kind,
        f"{100 * part.share:.2f}",
        part.name,
        words,
        Markup("<b>{}</b>").format(words) if part.share >= _NARROW else "",
    )


def facts(values: Mapping[str, str]) -> Markup:
    """Return names and their values, as a list of definitions."""
    return Markup('<dl class="facts">{}</dl>').format(
        Markup("").join(
            Markup("<div><dt>{}</dt><dd>{}</dd></div>").format(name, value)
            for name, value in values.items()
        )
    )


def sentences(texts: Iterable[str], kind: str) -> Markup:
    """Return a list of sentences; ``kind`` is its class in the style sheet."""
    items = Markup("").join(Markup("<li>{}</li>").format(text) for text in texts)
    return Markup('<ul class="{}">{}</ul>').format(kind, items)


def drawn_plan(workers: Iterable[tuple[str, Sequence[PlanBox]]]) -> Markup:
    """Return the workers with their stages in boxes, in the order of the model."""
    return Markup('<ol class="plan">{}</ol>').format(
        Markup("").join(
            Markup('<li><h3>{}</h3><div class="stages">{}</div></li>').format(
                name, Markup("").join(map(_box, stages))
            )
            for name, stages in workers
        )
    )


def _box(box: PlanBox) -> Markup:
    lines = Markup("").join(Markup("<p>{}</p>").format(line) for line in box.lines)
    return Markup('<div class="stage"><h4>{}</h4>{}</div>').format(box.title, lines)


class Panel(NamedTuple):
    """A part of the page.

    Attributes:
        name: Stays the same while the page is live, so that the panel can be replaced.
        wide: Whether it takes the whole width.
        note: How to read it, in a sentence.
    """

    name: str
    title: str
    body: Markup
    wide: bool = False
    note: str = ""
