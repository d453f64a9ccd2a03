"""The benchmark of an accelerator: what decides the design, throughput, bits and recovery."""

from __future__ import annotations

from rich.table import Table

from .runs import Benchmark, Case, Line, table_of

_SCRIPT = "devices.py"


def _cases() -> list[Case]:
    """Every case. torch.distributed.pipelining has a device for each stage, so it needs several."""
    commands: list[tuple[str, ...]] = [
        *(("bits", "--size", size) for size in ("small", "gpt2")), ("recovery", "--size", "small"),
        *((name,) for name in ("throughput", "hop", "memory", "addresses", "killed", "sanitizer")),
    ]  # fmt: skip
    for stages in ("2", "4"):
        commands += [("ours", stages, schedule) for schedule in ("1f1b", "async-1f1b")]
        commands += [("processes", stages, "async-1f1b"), ("pipelining", stages)]
    return [Case({"case": " ".join(each)}, (_SCRIPT, *each)) for each in commands]


def _table(lines: list[Line]) -> Table:
    """A row for each case."""
    table = table_of("an accelerator", "<case", "<what was found")
    for line in lines:
        known = {"case", "commit", "torch", "python", "kernel", "processor", "cores", "repeats"}
        rest = [
            f"{key} {value:.3g}" if isinstance(value, float) else f"{key} {value}"
            for key, value in line.items()
            if key not in known and not key.endswith(" spread")
        ]
        table.add_row(line["case"], "; ".join(rest))
    return table


BENCHMARKS = {"devices": Benchmark("an accelerator", _cases(), _table, once=True)}
