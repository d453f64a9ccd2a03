"""An older checkout against this one: the same benchmarks, in turn, as ratios of each pair.

The older checkout needs an environment of its own in ``.venv`` (``make .venv/installed`` there).
Every pair is added as a JSON line to a file in ``benchmarks/results``; a second call goes on where
the first was stopped.

    git clone . ../old && (cd ../old && git checkout COMMIT && make .venv/installed)
    python benchmarks/compare.py ../old --pairs 5
"""

from __future__ import annotations

import statistics
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import click
from grid import RESULTS, keep, lines_of, said
from rich.console import Console
from rich.table import Table
from workload import Workload

HERE = Path(__file__).resolve().parent


class Case(NamedTuple):
    """A benchmark that prints one JSON line.

    Attributes:
        command: Of a file in ``benchmarks`` or ``benchmarks/studies``.
        metric: Which value of the line counts.
        more_is_better: Whether a higher value is better.
        ours: Whether this checkout's file is taken for the older one too.
    """

    command: tuple[str, ...]
    metric: str
    more_is_better: bool
    ours: bool = False


SMALL = Workload("linear", 2, micro_batches=1, updates=2000, samples=8, width=256).to_json()
"""Layers that cost next to nothing, so that all else is seen."""

EMULATED = Workload(
    "emulated", 8, micro_batches=16, updates=12, samples=8, width=256, forward_s=0.020,
    backward_s=0.040,
).to_json()  # fmt: skip
"""Layers that take time and no processor."""

OPENING = ("start.py", "--json", "--repeats", "1", "--how")

CASES = {
    "2 stages that compute, async-1f1b": Case(
        ("async_vs_sync.py", "--repeats", "1", "--only", "async-1f1b", "--json"),
        "micro_batches_per_s",
        True,
    ),
    "2 stages that compute, 1f1b": Case(
        ("async_vs_sync.py", "--repeats", "1", "--only", "1f1b", "--json"),
        "micro_batches_per_s",
        True,
    ),
    "8 emulated stages, async-1f1b": Case(
        ("ours.py", EMULATED, "async-1f1b"), "steady_per_s", True
    ),
    "8 emulated stages, 1f1b": Case(("ours.py", EMULATED, "1f1b"), "steady_per_s", True),
    "first opening, prepared": Case((*OPENING, "prepared"), "first_s", False, ours=True),
    "first opening, not prepared": Case((*OPENING, "not prepared"), "first_s", False, ours=True),
    "second opening": Case((*OPENING, "prepared"), "second_s", False, ours=True),
    "recovery": Case(("recovery.py", "--kills", "6", "--pairs", "0", "--json"), "median_s", False),
    "processor time of a worker": Case(("ours.py", SMALL, "async-1f1b"), "worker_ms", False),
    "processor time of the coordinator": Case(
        ("ours.py", SMALL, "async-1f1b"), "coordinator_ms", False
    ),
}


def run(checkout: Path, case: Case) -> float:
    """Run a case in a checkout; with this checkout's file where the other has none."""
    folder, name = checkout / "benchmarks", case.command[0]
    there = [folder / "studies" / name, folder / name]  # an older one has all in one folder
    ours = [HERE / "studies" / name, HERE / name]
    script = next(filter(Path.exists, ours if case.ours else [*there, *ours]))
    command = [checkout / ".venv/bin/python", script, *case.command[1:]]
    ended = said(command, folder=checkout)  # there, since workers import what lies in the folder
    if ended.code:
        raise SystemExit(f"{script} ended with {ended.code}: {ended.errors}")
    return float(ended.found[case.metric])


def commit_of(checkout: Path) -> str:
    """The commit that a checkout stands at."""
    command = ["git", "-C", str(checkout), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


@click.command()
@click.argument("old", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--pairs", default=5, show_default=True)
@click.option("--only", multiple=True, type=click.Choice(list(CASES)), help="Leave others out.")
def main(old: Path, pairs: int, only: tuple[str, ...]) -> None:
    """Compare the checkout OLD with this one."""
    old, new = old.resolve(), HERE.parent
    commits = {"old": commit_of(old), "new": commit_of(new)}
    results = RESULTS / f"compare-{commits['old']}.jsonl"
    lines = [line for line in lines_of(results) if line["new"] == commits["new"]]
    for name in only or CASES:
        for number in range(sum(line["case"] == name for line in lines), pairs):
            # The first of a pair takes turns too.
            order = (old, new) if number % 2 else (new, old)
            values = {checkout: run(checkout, CASES[name]) for checkout in order}
            line = {"case": name, **commits, "metric": CASES[name].metric}
            line |= {"old_value": values[old], "new_value": values[new]}
            lines.append(line)
            keep(results, line)
            print(line, file=sys.stderr)
    table = Table(title=f"{commits['new']} against {commits['old']}; above 1 is better")
    for head in ("benchmark", "old", "new", "ratio, median", "min", "max"):
        table.add_column(head, justify="left" if head == "benchmark" else "right")
    for name, case in CASES.items():
        mine = [line for line in lines if line["case"] == name]
        if not mine:
            continue
        ratios = [line["new_value"] / line["old_value"] for line in mine]
        ratios = ratios if case.more_is_better else [1 / ratio for ratio in ratios]
        medians = (
            statistics.median(line[side] for line in mine) for side in ("old_value", "new_value")
        )
        table.add_row(
            name, *(f"{value:.3f}" for value in medians), f"{statistics.median(ratios):.3f}",
            f"{min(ratios):.3f}", f"{max(ratios):.3f}",
        )  # fmt: skip
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
