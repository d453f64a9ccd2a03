"""The command ``timeline``: summarizes a trace, draws it and predicts. It starts no process."""

from __future__ import annotations

import shutil
from typing import Any

import click

from pipedream_rt.cli.shared_options import GivenPath
from pipedream_rt.errors import ConfigError
from pipedream_rt.schema import write_file
from pipedream_rt.simulation.costs import parsed
from pipedream_rt.simulation.predict import changes_of, fit, predict
from pipedream_rt.simulation.predict import what_if as what_if_run
from pipedream_rt.tracing import timeline as drawings
from pipedream_rt.tracing.summary import describe, summarize, table
from pipedream_rt.tracing.trace import Trace


def _seconds(context: click.Context, option: click.Parameter, text: str | None) -> float | None:
    """Read an option that is a time, as ``1.5s``, into seconds."""
    return None if text is None else float(parsed("latency", text))


@click.command(short_help="Sum up and draw the trace of a run.")
@click.argument("file", type=GivenPath(dir_okay=False))
@click.option("--svg", type=GivenPath(dir_okay=False), help="Draw into this file.")
@click.option("--perfetto", type=GivenPath(dir_okay=False),
              help="Write Trace Event JSON, for ui.perfetto.dev.")  # fmt: skip
@click.option("--begin", callback=_seconds, help="Draw from this time on, as 1.5s.")
@click.option("--end", callback=_seconds, help="Draw up to this time.")
@click.option("--width", type=click.IntRange(min=40),
              help="Columns of the text, or pixels of the SVG.")  # fmt: skip
@click.option("--predict", "predicted", is_flag=True,
              help="Fit costs, simulate the same schedule, say how far off it is.")  # fmt: skip
@click.option("--what-if", multiple=True,
              help="NAME=VALUE,...: simulate with these changes, as stages=8 or "
              "schedule=1f1b.")  # fmt: skip
@click.option("--save-costs", type=GivenPath(dir_okay=False),
              help="Write the fitted costs into this file.")  # fmt: skip
def timeline(
    file: str,
    svg: str | None,
    perfetto: str | None,
    begin: float | None,
    end: float | None,
    width: int | None,
    predicted: bool,
    what_if: tuple[str, ...],
    save_costs: str | None,
) -> None:
    """Sum up and draw the trace in FILE, measured or simulated."""
    changes = [changes_of(text) for text in what_if]
    trace = Trace.load(file)
    click.echo(describe(trace))
    if svg is not None:
        view = drawings.window(trace, begin, end)
        write_drawing(svg, drawings.svg(trace, view, width or 1200))
        click.echo(f"{svg}: {view}")
    if perfetto is not None:
        write_drawing(perfetto, drawings.perfetto(trace))
        click.echo(f"{perfetto}: open it in https://ui.perfetto.dev or chrome://tracing")
    if svg is None and perfetto is None:
        click.echo(drawn(trace, begin, end, width))
    if save_costs is not None:
        fit(trace).save(save_costs)
    if predicted or changes:
        click.echo(_predictions(trace, changes, what_if))


def drawn(
    trace: Trace,
    begin: float | None = None,
    end: float | None = None,
    width: int | None = None,
) -> str:
    """Draw a trace, from ``begin`` to ``end`` seconds, as text of ``width`` columns."""
    view = drawings.window(trace, begin, end)
    return drawings.text(trace, view, width or shutil.get_terminal_size((100, 24)).columns)


def _predictions(trace: Trace, changes: list[dict[str, Any]], texts: tuple[str, ...]) -> str:
    """Tabulate the run as measured, as predicted, and with each set of changes."""
    same = predict(trace)
    rows: list[tuple[str, ...]] = [
        ("", "micro-batches/s", "against measured", "bubble", "versions", "staleness", "workers")
    ]
    rows.append(("measured", f"{same.measured:.4g}", "", *_numbers(trace)))
    rows.append(("predicted", f"{same.predicted:.4g}", f"{same.error:+.1%}", *_numbers(same.trace)))
    for text, change in zip(texts, changes, strict=True):
        made = what_if_run(trace, change)
        rate = summarize(made).throughput
        rows.append((f"if {text}", f"{rate:.4g}", f"{rate / same.measured:.2f}x", *_numbers(made)))
    return table(rows)


def _numbers(trace: Trace) -> tuple[str, ...]:
    """Return mean bubble, highest versions and staleness, and number of workers, as texts."""
    summary = summarize(trace)
    return (
        f"{sum(summary.bubble) / len(summary.bubble):.1%}",
        str(max(stage.versions for stage in summary.stages)),
        str(max(summary.staleness)),
        str(trace.plan.workers),
    )


def write_drawing(path: str, text: str) -> None:
    try:
        write_file(path, text.encode(errors="backslashreplace"))
    except OSError as error:
        raise ConfigError(f"cannot write to {path}: {error.strerror}") from error
