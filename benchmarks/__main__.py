"""The benchmark suite, as one command.

    python -m benchmarks                        measure what is missing, and show all tables
    python -m benchmarks limit hop --repeats 9  some of it
    python -m benchmarks --show                 measure nothing
    python -m benchmarks peers --show --plot FILE

Results are kept in ``benchmarks/results``, one JSON line each, with versions and machine; a call
that was stopped goes on where it was. Peers that are not part of torch need an environment of their
own (``benchmarks/peers/README.md``), whose interpreter ``--peers`` names.
"""

from __future__ import annotations

import json
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from .grid import Line, end_by_signals, pyplot_of_svg
from .suite.devices import BENCHMARKS as OF_DEVICES
from .suite.parts import BENCHMARKS as OF_PARTS
from .suite.runs import newest, run, summed_up
from .suite.training import BENCHMARKS as OF_TRAINING

BENCHMARKS = {**OF_TRAINING, **OF_PARTS, **OF_DEVICES}


def markdown(table: Table) -> str:
    """Return a table as a page of the documentation has it."""
    heads = [str(column.header) for column in table.columns]
    rules = ["---:" if column.justify == "right" else "---" for column in table.columns]
    rows = zip(*(map(str, column.cells) for column in table.columns), strict=True)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (heads, rules, *rows))


def plot(name: str, lines: list[Line], output: Path) -> None:
    """Draw the curve of a benchmark."""
    pyplot = pyplot_of_svg()

    benchmark = BENCHMARKS[name]
    if benchmark.curve is None:
        raise click.UsageError(f"{name} has no picture")
    figure, axes = pyplot.subplots(figsize=(7, 4.2), layout="constrained")
    curves: dict[str, list[tuple[float, float]]] = {}
    for curve, x, y in benchmark.curve(lines):
        curves.setdefault(curve, []).append((x, y))
    for curve, points in curves.items():
        if len(points) > 1:
            axes.plot(*zip(*sorted(points), strict=True), marker="o", markersize=3, label=curve)
    axes.set_xscale("log", base=2)
    axes.set_xlabel(benchmark.axes[0])
    axes.set_ylabel(benchmark.axes[1])
    axes.legend(fontsize="small")
    figure.savefig(output, metadata={"Date": None})


@click.command()
@click.argument("names", nargs=-1, type=click.Choice(list(BENCHMARKS)))
@click.option("--repeats", default=5, show_default=True, help="Of each case; they run in turn.")
@click.option("--show", is_flag=True, help="Measure nothing; show what is kept.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object for each case.")
@click.option("--markdown", "as_markdown", is_flag=True, help="Tables as a page has them.")
@click.option(
    "--peers",
    default="peers/bin/python",
    show_default=True,
    type=click.Path(path_type=Path),
    help="The interpreter of the environment of the peers.",
)
@click.option("--plot", "picture", type=click.Path(path_type=Path), help="Write a picture (SVG).")
def main(
    names: tuple[str, ...],
    repeats: int,
    show: bool,
    as_json: bool,
    as_markdown: bool,
    peers: Path,
    picture: Path | None,
) -> None:
    """Measure, and show tables. NAMES are those of benchmarks; all if there are none."""
    end_by_signals()
    console = Console(width=140)
    for name in names or BENCHMARKS:
        benchmark = BENCHMARKS[name]
        if not show:
            for what in run(name, benchmark, repeats, peers):
                click.echo(what, err=True)
        lines = [
            summed_up(results) or case.facts
            for case, results in zip(benchmark.cases, newest(benchmark, name), strict=True)
        ]
        if picture is not None:
            plot(name, lines, picture)
        if as_json:
            for line in lines:
                click.echo(json.dumps({"benchmark": name, **line}))
        elif as_markdown:
            click.echo(f"{markdown(benchmark.table(lines))}\n")
        else:
            console.print(f"[bold]{benchmark.title}")
            console.print(benchmark.table(lines))


if __name__ == "__main__":
    main()
