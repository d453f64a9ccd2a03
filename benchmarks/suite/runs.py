"""Cases of benchmarks: they run one after another, several times, and every result is kept.

A case is a command that prints one JSON object as its last line. Repeats are taken in turn (A B C A
B C), because a shared machine changes its speed. Results are lines of a file, so a second call goes
on where the first was stopped.
"""

from __future__ import annotations

import functools
import math
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from rich.table import Table

from benchmarks.grid import RESULTS, Line, keep, lines_of, said

HERE = Path(__file__).resolve().parent.parent
DEADLINE_S = 900
UNAVAILABLE = 3
"""The exit code of a case that cannot run on this machine, and says why."""


@dataclass(frozen=True)
class Case:
    """Something to measure.

    Args:
        facts: What tells it from all other cases of its benchmark.
        command: A script of this folder, and its arguments.
        foreign: Whether it runs in the environment of the peers.
        limit_s: Seconds after which it is killed.
    """

    facts: Line
    command: tuple[str, ...]
    foreign: bool = False
    limit_s: float = DEADLINE_S


@dataclass(frozen=True)
class Benchmark:
    """A set of cases that one table shows.

    Args:
        title: What is measured.
        cases: What it is measured on.
        table: Makes the table of results.
        curve: Yields name, x and y of points, for a picture; None if there is no picture.
        axes: What the picture has on its two axes.
        once: Whether each case is measured once, however many repeats are asked for; how it failed,
            or what it had found until its limit, is its result then.
        file: Of its results, where others share it; that of its name otherwise.
        limit_s: Seconds for all cases together; a case has no more than is left of them.
    """

    title: str
    cases: Sequence[Case]
    table: Callable[[list[Line]], Table]
    curve: Callable[[list[Line]], Iterator[tuple[str, float, float]]] | None = None
    axes: tuple[str, str] = ("", "")
    once: bool = False
    file: str | None = None
    limit_s: float = math.inf


def table_of(title: str, *heads: str) -> Table:
    """Return an empty table; figures stand at the right, but for heads that begin with ``<``."""
    table = Table(title=title)
    for head in heads:
        name = head.removeprefix("<")
        table.add_column(name, justify="right" if name == head else "left")
    return table


@functools.cache
def machine() -> Line:
    """Where the measurements are taken, and on what."""
    git: Line = {"stdout": subprocess.PIPE, "text": True, "cwd": HERE.parent}
    try:
        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], **git).stdout.strip()
    except FileNotFoundError:
        commit = ""
    # What was measured before does not make it another commit.
    others = ("--", ".", ":!benchmarks/results")
    if commit and subprocess.run(["git", "status", "--porcelain", "-uno", *others], **git).stdout:
        commit += "-dirty"
    names = [
        line for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line
    ]
    return {
        "commit": commit or "unknown",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "kernel": platform.release(),
        "processor": names[0].partition(": ")[2] if names else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
    }


def results_of(name: str) -> Path:
    """Where results are kept: in the folder that $OUT names, if it is set."""
    return Path(os.environ.get("OUT") or RESULTS) / f"{name}.jsonl"


def measure(case: Case, peers: Path) -> Line:
    """Run a case once.

    Args:
        case: The case.
        peers: The interpreter of the environment of the peers.

    Returns:
        The last of its objects; with ``error`` if it failed, with ``unfinished`` if it was killed.
    """
    script, *arguments = case.command
    interpreter = peers if case.foreign else Path(sys.executable)
    outcome, code, errors = said(
        [interpreter, "-W", "ignore", HERE / script, *arguments], case.limit_s,
        {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}, apart=True,
    )  # fmt: skip
    if code is None:
        outcome["unfinished"] = f"killed after {case.limit_s:g} s"
    elif code not in (0, UNAVAILABLE):
        outcome["error"] = f"exit code {code}: {errors[-2000:]}"
    elif not outcome:
        outcome["error"] = "it printed no result"
    return outcome


def run(name: str, benchmark: Benchmark, repeats: int, peers: Path) -> Iterator[str]:
    """Measure what is not measured yet at this commit; keep each result.

    Args:
        name: Name of the benchmark.
        benchmark: The benchmark.
        repeats: How often to measure each case.
        peers: The interpreter of the environment of the peers.

    Yields:
        What is measured next.
    """
    path, commit = results_of(benchmark.file or name), machine()["commit"]
    clean = commit != "unknown" and not commit.endswith("-dirty")
    known = [line for line in lines_of(path) if clean and line["commit"] == commit]
    until = time.monotonic() + benchmark.limit_s
    for number in range(1 if benchmark.once else repeats):
        for case in benchmark.cases:
            if len(_of(case, known)) > number:
                continue
            if case.foreign and not peers.exists():
                yield f"{name}: {case.command[0]} is left out, as {peers} does not exist"
                continue
            yield f"{name} {number + 1}: {' '.join(case.command)}"
            left = max(until - time.monotonic(), 0)
            outcome = measure(replace(case, limit_s=min(case.limit_s, left)), peers)
            if not benchmark.once and (failed := outcome.get("error", outcome.get("unfinished"))):
                raise SystemExit(f"{' '.join(case.command)} failed: {failed}")
            line = {**case.facts, **outcome, **machine()}
            known.append(line)
            keep(path, line)


def _of(case: Case, lines: Sequence[Line]) -> list[Line]:
    """The results of a case."""
    return [line for line in lines if all(line.get(k) == v for k, v in case.facts.items())]


def newest(benchmark: Benchmark, name: str) -> list[list[Line]]:
    """The results of each case at the commit at which it was measured last, cases in order."""
    lines, found = lines_of(results_of(benchmark.file or name)), []
    for case in benchmark.cases:
        mine = _of(case, lines)
        found.append([line for line in mine if line["commit"] == mine[-1]["commit"]])
        if benchmark.once:  # of changes that are in no commit there may be several
            found[-1] = mine[-1:]
    return found


def summed_up(lines: Sequence[Line]) -> Line:
    """The median of each number of several results of one case, and the spread of it.

    Of a number ``x``, ``x`` is the median and ``x spread`` the largest less the smallest.
    """
    if not lines:
        return {}
    merged = dict(lines[0])
    for key, value in lines[0].items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        values = [line[key] for line in lines]
        if len(set(values)) > 1:  # else it stays as it is written
            merged[key] = statistics.median(values)
        merged[f"{key} spread"] = max(values) - min(values)
    return {**merged, "repeats": len(lines)}
