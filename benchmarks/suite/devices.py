"""The benchmark of an accelerator: what decides the design, throughput, bits and recovery."""

from __future__ import annotations

from rich.table import Table

from .runs import Benchmark, Case, Line, table_of

_SCRIPT = "devices.py"


def _cases() -> list[Case]:
    """Every case. torch.distributed.pipelining has a device for each stage, so it needs several."""
    commands: list[tuple[str, ...]] = [("plain",)]
    for stages in ("2", "4"):
        for schedule in ("1f1b", "async-1f1b"):
            commands += [("ours", stages, schedule, on) for on in ("one", "several")]
        commands += [("processes", stages, "async-1f1b"), ("pipelining", stages)]
    others = ("killed", "hop", "memory", "addresses", "bits", "recovery", "sanitizer")
    commands += [(name,) for name in others]
    return [Case({"case": " ".join(each)}, (_SCRIPT, *each)) for each in commands]


def _table(lines: list[Line]) -> Table:
    """A row for each case, with its share of the throughput of one plain process."""
    table = table_of("an accelerator", "<case", "samples/s", "of plain", "<what else was found")
    rates = {line["case"]: line["samples_per_s"] for line in lines if "samples_per_s" in line}
    for line in lines:
        rate = rates.get(line["case"])
        plain = rates.get("plain")
        known = {
            "case", "samples_per_s", "commit", "torch", "python", "kernel", "processor", "cores",
            "repeats",
        }  # fmt: skip
        rest = [
            f"{key} {value:.3g}" if isinstance(value, float) else f"{key} {value}"
            for key, value in line.items()
            if key not in known and not key.endswith(" spread")
        ]
        share = "" if rate is None or plain is None else f"{rate / plain:.2f}"
        table.add_row(line["case"], "" if rate is None else f"{rate:.1f}", share, "; ".join(rest))
    return table


BENCHMARKS = {"devices": Benchmark("an accelerator", _cases(), _table, once=True)}
