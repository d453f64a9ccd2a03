"""Line charts as SVG; colours and sizes are in the page's style sheet.

Lines differ by dashes too, so that a chart can be read without colour.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from markupsafe import Markup, escape

_WIDTH, _HEIGHT = 520, 250
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 14, 14, 42
_LETTER = 6.2
"""The largest width of a letter of a tick, in units of the drawing."""

_THINNED, _APART = ("saved", "evaluated"), 12
"""The kinds of marks that there may be many of, and the least distance of two that are drawn."""

_LOG_FROM, _LOG_OFFERED = 100.0, 1.5
"""The ratio of the largest to the least value for a logarithmic axis, or for a switch to one."""

_SWITCH = '<button type="button" class="axis">other axis</button>'
"""The switch between the drawings with a linear and a logarithmic vertical axis (page.js)."""

FARTHEST = 1e300
"""The largest number on an axis: the distance of two such numbers is finite, too."""

_SUFFIXES = ((1e9, "G"), (1e6, "M"), (1e3, "k"))


class Line(NamedTuple):
    """A line of a chart.

    Attributes:
        points: From left to right; a value that is not finite makes a gap.
        band: The lower and the upper value at each point; empty for no band.
    """

    name: str
    points: Sequence[tuple[float, float]]
    band: Sequence[tuple[float, float]] = ()


class Mark(NamedTuple):
    """An event at a place of the horizontal axis.

    Attributes:
        kind: ``"recovered"``, ``"saved"`` or ``"evaluated"``.
        text: For the tooltip.
    """

    at: float
    kind: str
    text: str


class _Axis(NamedTuple):
    """A range of values, ``low`` to ``high``, drawn from ``first`` to ``last``."""

    low: float
    high: float
    first: float
    last: float
    logarithmic: bool = False

    def at(self, value: float) -> float:
        """Return where a value lies in the drawing; one out of range lies at the end."""
        low, high = self.low, self.high
        if self.logarithmic:
            low, high, value = math.log10(low), math.log10(high), math.log10(value)
        share = (value - low) / (high - low)
        return self.first + min(max(share, 0.0), 1.0) * (self.last - self.first)

    def ticks(self, most: int) -> list[float]:
        """Return round values in the range, about ``most`` of them."""
        if self.logarithmic:
            first, last = math.ceil(math.log10(self.low)), math.floor(math.log10(self.high))
            stride = max(1, math.ceil((last - first + 1) / most))
            return [10.0**power for power in range(first, last + 1, stride)]
        step = _round_step((self.high - self.low) / most)
        # 1e-9: a tick at the very end of the range is not to be lost by rounding.
        count = math.floor(self.high / step + 1e-9) - math.ceil(self.low / step - 1e-9)
        start = math.ceil(self.low / step - 1e-9) * step
        return [start + i * step for i in range(count + 1)]


def _round_step(least: float) -> float:
    """Return the least of ..., 0.5, 1, 2, 5, 10, 20, ... that is not below a value."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(power * digit for digit in (1, 2, 5, 10) if power * digit >= least * (1 - 1e-9))


def number_text(value: float, digits: int = 3) -> str:
    """Return a number in few characters, with so many significant digits at most."""
    if not math.isfinite(value):
        return str(value)
    for unit, suffix in _SUFFIXES:
        if abs(value) >= unit * (1 - 0.5 * 10**-digits):  # what the digits round to the unit
            return f"{value / unit:.{digits}g}{suffix}"
    if value and abs(value) < 1e-3:
        return f"{value:.{digits - 3}e}".replace("e-0", "e-")
    return f"{value:.{digits}g}"


def tick_texts(values: Sequence[float]) -> list[str]:
    """Return the texts of ticks, with as many digits as make them differ."""
    texts: list[str] = []
    for digits in range(3, 7):
        texts = [number_text(value, digits) for value in values]
        if len(set(texts)) == len(texts):
            break
    return texts


def line_chart(
    title: str,
    lines: Sequence[Line],
    x_words: str,
    marks: Sequence[Mark] = (),
    *,
    from_zero: bool = False,
) -> Markup:
    """Return a chart, or a sentence where there is nothing to draw; ``title`` is read aloud."""
    drawn = [(i, line) for i, line in enumerate(lines) if any(map(_is_drawn, line.points))]
    if not drawn:
        return Markup('<p class="none">Nothing to draw yet.</p>')
    x = _axis([at for _, line in drawn for at, _ in line.points], _LEFT, _WIDTH - _RIGHT)
    values = [y for _, line in drawn for _, y in line.points if math.isfinite(y)]
    for _, line in drawn:
        values += [y for pair in line.band for y in pair if math.isfinite(y)]
    vertical = functools.partial(_axis, values, _HEIGHT - _BOTTOM, _TOP, from_zero=from_zero)
    usual = vertical(log_from=_LOG_FROM)
    other = vertical(log_from=math.inf if usual.logarithmic else _LOG_OFFERED)
    shown = list(_apart(x, [mark for mark in marks if x.low <= mark.at <= x.high]))
    switch = other.logarithmic != usual.logarithmic
    parts = [_SWITCH] if switch else []
    for kind, y in (("usual", usual), ("other", other))[: 1 + switch]:
        words = f"{x_words}; the vertical axis is logarithmic" if y.logarithmic else x_words
        parts += [
            f'<svg class="chart {kind}" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" '
            f'aria-label="{escape(title)}">',
            *_grid(x, y, words),
            *(_mark(x, mark) for mark in shown),
            *(part for i, line in drawn for part in _line(i, line, x, y)),
            "</svg>",
        ]
    return Markup("".join([*parts, *_legend(drawn, {mark.kind for mark in shown})]))


def _is_drawn(point: tuple[float, float]) -> bool:
    """Whether a point has a place in the drawing."""
    return math.isfinite(point[0]) and math.isfinite(point[1])


def _axis(
    values: Sequence[float],
    first: float,
    last: float,
    *,
    from_zero: bool = False,
    log_from: float | None = None,
) -> _Axis:
    """Return an axis over some values; ``log_from`` is None for a horizontal one."""
    low, high = (min(max(v, -FARTHEST), FARTHEST) for v in (min(values), max(values)))
    if log_from is not None and not from_zero and low > 0 and high / low >= log_from:
        return _Axis(low / 1.1, high * 1.1, first, last, True)
    if from_zero:
        low = min(low, 0.0)
    if high - low <= 1e-12 * max(abs(high), abs(low)):
        # (Almost) one value: an axis without length would divide by zero.
        room = abs(high) / 2 or 1.0
        return _Axis(low if from_zero else low - room, high + room, first, last)
    if log_from is not None:
        room = (high - low) * 0.05
        return _Axis(low if from_zero else low - room, high + room, first, last)
    return _Axis(low, high, first, last)


def _grid(x: _Axis, y: _Axis, x_words: str) -> Iterator[str]:
    """Yield the grid with the ticks of both axes, and the words below."""
    bottom = _HEIGHT - _BOTTOM
    values = y.ticks(5)
    for value, text in zip(values, tick_texts(values), strict=True):
        at = y.at(value)
        yield (
            f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>'
            f'<text x="{_LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{text}</text>'
        )
    free = 0.0  # from where on there is room for the next text
    values = x.ticks(6)
    for value, text in zip(values, tick_texts(values), strict=True):
        at = x.at(value)
        half = len(text) * _LETTER / 2
        yield f'<line class="grid" x1="{at:.1f}" x2="{at:.1f}" y1="{_TOP}" y2="{bottom}"/>'
        if at - half > free and at + half < _WIDTH:
            yield f'<text x="{at:.1f}" y="{bottom + 16}" text-anchor="middle">{text}</text>'
            free = at + half + 4
    yield (
        f'<text class="words" x="{_WIDTH - _RIGHT}" y="{_HEIGHT - 6}" text-anchor="end">'
        f"{escape(x_words)}</text>"
    )


_SHAPES = {
    "recovered": "h4 l-4,9 l-4,-9 z",
    "saved": "l4,4 l-4,4 l-4,-4 z",
    "evaluated": "v3 m-1.5,0 h3 v3 h-3 z",
}
"""By kind of mark, the path that is drawn from the middle of its upper edge on."""

_NAMES = {"recovered": "recovery", "saved": "checkpoint", "evaluated": "evaluation"}


def _apart(x: _Axis, marks: Sequence[Mark]) -> Iterator[Mark]:
    """Yield marks; of a kind that may be many, only those far enough from the last one."""
    last: dict[str, float] = {}
    for mark in sorted(marks, key=lambda each: each.at):
        at = x.at(mark.at)
        if mark.kind not in _THINNED or at - last.get(mark.kind, -math.inf) >= _APART:
            last[mark.kind] = at
            yield mark


def _mark(x: _Axis, mark: Mark) -> str:
    """Return the shape of a mark, with a line down from it, or a tick if there may be many."""
    at = x.at(mark.at)
    end = _TOP + 5 if mark.kind in _THINNED else _HEIGHT - _BOTTOM
    return (
        f'<g class="mark {mark.kind}"><title>{escape(mark.text)}</title>'
        f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{_TOP}" y2="{end}"/>'
        f'<path d="M{at:.1f},{_TOP - 9} {_SHAPES[mark.kind]}"/></g>'
    )


def _line(number: int, line: Line, x: _Axis, y: _Axis) -> Iterator[str]:
    """Yield the band and the path of a line."""
    if line.band:
        pairs = list(zip(line.points, line.band, strict=True))
        pairs = [p for p in pairs if _is_drawn(p[0]) and all(map(math.isfinite, p[1]))]
        up = [f"{x.at(p[0]):.1f},{y.at(band[1]):.1f}" for p, band in pairs]
        down = [f"{x.at(p[0]):.1f},{y.at(band[0]):.1f}" for p, band in reversed(pairs)]
        yield f'<polygon class="band l{number % 8}" points="{" ".join([*up, *down])}"/>'
    path, joined = [], False
    for point in line.points:
        if _is_drawn(point):
            path.append(f"{'L' if joined else 'M'}{x.at(point[0]):.1f},{y.at(point[1]):.1f}")
        joined = _is_drawn(point)
    # A single point needs a path of length 0, which round line ends draw as a dot.
    d = "".join(path) + ("h0" if len(path) == 1 else "")
    yield f'<path class="line l{number % 8}" d="{d}"/>'


def _last(line: Line) -> str:
    """Return the last value of a line, to stand behind its name; empty if it has none."""
    values = [y for at, y in line.points if _is_drawn((at, y))]
    return f" {number_text(values[-1])}" if values else ""


def _legend(drawn: Sequence[tuple[int, Line]], marked: Collection[str]) -> Iterator[str]:
    """Yield the names of the lines, if there are several, and of the marks."""
    if len(drawn) < 2 and not marked:
        return
    yield '<ul class="legend">'
    for i, line in drawn if len(drawn) > 1 else ():
        yield (
            f'<li><svg viewBox="0 0 28 8" aria-hidden="true"><path class="line l{i % 8}" '
            f'd="M1,4H27"/></svg>{escape(line.name)}{_last(line)}</li>'
        )
    for kind in (kind for kind in _NAMES if kind in marked):
        yield (
            f'<li><svg viewBox="0 0 28 10" aria-hidden="true"><g class="mark {kind}">'
            f'<path d="M14,1 {_SHAPES[kind]}"/></g></svg>{_NAMES[kind]}</li>'
        )
    yield "</ul>"
