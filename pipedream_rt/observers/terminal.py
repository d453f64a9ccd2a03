"""The view of a running run in the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from pipedream_rt.observers.page.charts import FARTHEST, number_text
from pipedream_rt.observers.page.panels import head_figures, title_of
from pipedream_rt.observers.run_record import Bucket, RunRecord
from pipedream_rt.schedules import Plan
from pipedream_rt.schema import printable
from pipedream_rt.tracing.summary import WORKER_HEAD, seconds_text, worker_rows

_LEVELS = " ▁▂▃▄▅▆▇█"


def view_of(
    record: RunRecord, workers: Sequence[Mapping[str, Any]] | None = None, width: int = 100
) -> RenderableType:
    """Return the view of a run; ``width`` is that of the terminal, in columns."""
    plan = record.plan
    if plan is None:
        return Text("the run has not begun")
    buckets = list(record.steps)
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="dim")
    facts.add_column(overflow="fold")
    for name, value in head_figures(record).items():
        facts.add_row(name, Text(printable(value)))
    losses = sparkline([b.loss for b in buckets], max(width - 20, 10))
    if losses:
        facts.add_row("losses", Text(losses))
    parts: list[RenderableType] = [facts, _stages(plan, buckets)]
    if workers:
        parts.append(_workers(workers))
    for each in record.recovered[-3:]:
        text = (
            f"recovered in {seconds_text(each.seconds)} at mini-batch {each.step}, and computed "
            f"{each.replayed} micro-batches again: {each.reason}"
        )
        parts.append(Text(printable(text)))
    warned = list(dict.fromkeys(each.text.replace("\n", " ") for each in record.warned))
    parts += [Text(printable(text, 1 << 14), style="yellow") for text in warned[-3:]]
    return Panel(Group(*parts), title=Text(printable(title_of(record))), title_align="left")


def sparkline(values: Sequence[float], width: int) -> str:
    """Return values as a line of block characters; empty for fewer than two."""
    found = [value for value in values if abs(value) < FARTHEST]
    if len(found) < 2:
        return ""
    stride = -(-len(found) // width)
    parts = [found[i : i + stride] for i in range(0, len(found), stride)]
    means = [sum(part) / len(part) for part in parts]
    low, high = min(means), max(means)
    scale = (len(_LEVELS) - 2) / (high - low) if high > low else 0.0
    blocks = "".join(_LEVELS[1 + round((value - low) * scale)] for value in means)
    return f"{blocks} {number_text(means[-1])}"


def _stages(plan: Plan, buckets: Sequence[Bucket]) -> Table:
    """Return a table of the stages, from the last results."""
    table = Table(box=None, padding=(0, 2), header_style="dim")
    for name in ("stage", "worker", "version", "computes"):
        table.add_column(name)
    last = buckets[-1].last if buckets else None
    shares = _busy(buckets[-20:])
    for stage in range(plan.num_stages):
        version = str(last.versions[stage]) if last and stage < len(last.versions) else "-"
        share = f"{shares[stage]:.0%}" if stage < len(shares) else "-"
        worker = plan.worker_of(plan.address_of(stage))
        table.add_row(str(stage), str(worker), version, share)
    return table


def _busy(buckets: Sequence[Bucket]) -> list[float]:
    """Return the share of the time in which each stage computed; empty if it is not known."""
    seconds, computed = 0.0, [0.0] * min((len(b.last.busy_s) for b in buckets), default=0)
    for before, after in pairwise(buckets):
        pairs = zip(after.last.busy_s, before.last.busy_s, strict=False)
        parts = [now - then for now, then in pairs]
        if parts and min(parts) >= 0:  # after a recovery new workers count from 0
            seconds += after.last.time - before.last.time
            computed = [a + b for a, b in zip(computed, parts, strict=False)]
    return [min(each / seconds, 1.0) for each in computed] if seconds > 0 else []


def _workers(workers: Sequence[Mapping[str, Any]]) -> Table:
    """Return a table of what the workers do now."""
    table = Table(box=None, padding=(0, 2), header_style="dim")
    for name in (WORKER_HEAD[0], *WORKER_HEAD[2:]):  # the stages have a table of their own
        table.add_column(name)
    for name, _, *others in worker_rows(workers, 50):
        table.add_row(printable(name, 40), *map(printable, others))
    return table
