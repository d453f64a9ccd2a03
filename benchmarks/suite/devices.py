"""The benchmark of an accelerator: tests, bits and recovery, throughput, the parts of a hop."""

from __future__ import annotations

from rich.markup import escape
from rich.table import Table

from benchmarks.grid import Line

from .runs import Benchmark, Case, table_of

_SCRIPT = "devices.py"


def _case(limit_s: float, *words: str) -> Case:
    return Case({"case": " ".join(words)}, (_SCRIPT, *words), limit_s=limit_s)


_SHORT = [
    _case(130, "throughput", "tf32"),
    _case(90, "throughput", "bf16"),
    _case(60, "host", "--size", "tiny"),
    _case(40, "overlap"),
    _case(40, "memory"),
    _case(60, "start", "--size", "tiny"),
    _case(20, "hop"),
    *(_case(60, "ours", "2", schedule) for schedule in ("1f1b", "async-1f1b")),
    _case(60, "pipelining", "2"),
    _case(60, "sanitizer"),
    _case(100, "bits", "--size", "small"),
    _case(180, "suites"),
]
"""What nothing else can tell comes first. Where there is one device, those for two end at once."""

_SHORT_S = 570
"""Seconds for all of them, as a machine may be lent for ten minutes; the suites have the rest."""

_LONG = [
    *(_case(300, "defaults", "--size", size) for size in ("small", "gpt2")),
    _case(600, "bits", "--size", "gpt2"),
    *(_case(60, each) for each in ("addresses", "killed")),
    *(_case(120, "ours", "4", schedule) for schedule in ("1f1b", "async-1f1b")),
    _case(120, "pipelining", "4"),
    *(_case(120, "processes", stages, "async-1f1b") for stages in ("2", "4")),
]


def _table(lines: list[Line]) -> Table:
    """A row for each case."""
    table = table_of("an accelerator", "<case", "<what was found")
    for line in lines:
        known = {"case", "commit", "torch", "python", "kernel", "processor", "cores", "repeats"}
        rest = [
            f"{key}: {value:.4g}" if isinstance(value, float) else f"{key}: {value}"
            for key, value in line.items()
            if key not in known and not key.endswith(" spread")
        ]
        table.add_row(line["case"], escape("\n".join(rest)))
    return table


BENCHMARKS = {
    "gpu": Benchmark(
        "an accelerator, in short", _SHORT, _table, once=True, file="devices", limit_s=_SHORT_S
    ),
    "devices": Benchmark("an accelerator", [*_SHORT, *_LONG], _table, once=True),
}
