"""The benchmarks of parts: a hop, what weight versions cost, slow links, and codecs."""

from __future__ import annotations

import math
from collections.abc import Iterator

from rich.table import Table

from benchmarks.grid import RESULTS, Line, lines_of
from benchmarks.learning import slowdown

from .runs import Benchmark, Case, table_of

# -- a hop ----------------------------------------------------------------------------------------

WAYS = ("shared", "link", "socket", "gloo", "rpc", "memcpy")
SIZES = [1 << exponent for exponent in (10, 16, 20, 22, 24, 26)]


def _hop() -> list[Case]:
    """Every way, for every size."""
    return [
        Case({"way": way, "bytes": size}, ("hop.py", way, str(size)))
        for size in SIZES
        for way in WAYS
    ]


def _hop_table(lines: list[Line]) -> Table:
    """Latency, throughput and processor time by way and size."""
    title = "one way: microseconds (of a processor), and MB/s of many in a row"
    table = table_of(title, "KiB", *WAYS)
    for size in SIZES:
        cells = []
        for way in WAYS:
            found = [
                x for x in lines if x["way"] == way and x["bytes"] == size and "latency_s" in x
            ]
            cells += [
                f"{1e6 * x['latency_s']:.0f} ({1e6 * x['processor_s']:.0f}), "
                f"{x['bytes_per_s'] / 1e6:.0f}"
                for x in found
            ] or [""]
        table.add_row(str(size >> 10), *cells)
    return table


def _latency(lines: list[Line]) -> Iterator[tuple[str, float, float]]:
    """Latency over size."""
    for line in lines:
        if "latency_s" in line:
            yield line["way"], line["bytes"] / 1024, 1e6 * line["latency_s"]


# -- weight versions ------------------------------------------------------------------------------

METHODS = ("none", "ours", "state-dict")
OPTIMIZERS = ("sgd", "momentum", "adamw", "adamw-fused", "muon")


def _stash() -> list[Case]:
    """Every method with every optimizer."""
    return [
        Case({"method": method, "optimizer": optimizer}, ("stash.py", method, optimizer))
        for optimizer in OPTIMIZERS
        for method in METHODS
    ]


def _stash_table(lines: list[Line]) -> Table:
    """The time of a forward, a backward and a step, and the memory of versions."""
    table = table_of(
        "a stage with 3 warm-up forwards: ms of F, B and S; bytes of versions",
        *("<optimizer", "no versions (wrong)", "ours", "ratio", "state dicts", "ratio"),
        *("bytes of ours", "of the formula", "ratio"),
    )
    for i in range(0, len(lines), len(METHODS)):
        none, mine, copied = lines[i : i + len(METHODS)]
        if not all("step_s" in line for line in (none, mine, copied)):
            continue
        formula = (mine["formula_versions"] - 1) * mine["weight_bytes"]
        table.add_row(
            mine["optimizer"],
            *(f"{1e3 * none['step_s']:.2f}", f"{1e3 * mine['step_s']:.2f}"),
            f"{mine['step_s'] / none['step_s']:.3f}",
            *(f"{1e3 * copied['step_s']:.2f}", f"{copied['step_s'] / none['step_s']:.3f}"),
            *(f"{mine['version_bytes']:.0f}", f"{formula:.0f}"),
            f"{mine['version_bytes'] / formula:.3f}",
        )
    return table


# -- slow links -----------------------------------------------------------------------------------

HALF = 70_000_000
"""Bits per second at which a transfer takes half of what a stage computes."""

RATES = (0, 1_000_000_000, 100_000_000, HALF, 20_000_000)
"""Bits per second; 0 is unlimited. At the last a transfer takes longer than a stage computes."""

DELAY_S = 0.025


def _slow_link() -> list[Case]:
    """Two namespaces joined by a link of a rate, and a simulated wire with a rate or a delay."""
    ways = [("namespaces", rate, 0.0) for rate in RATES]
    ways += [("simulated", rate, 0.0) for rate in (0, HALF)]
    ways += [("simulated", 0, DELAY_S)]
    cases = []
    for wire, rate, delay_s in ways:
        for schedule, slack in (("async-1f1b", "0"), ("async-1f1b", "auto"), ("1f1b", "0")):
            facts = {
                "wire": wire,
                "link_bits_per_s": rate,
                "link_delay_s": delay_s,
                "schedule": schedule,
                "asked": slack,
            }
            words = (schedule, str(rate), str(delay_s), "--wire", wire, "--slack", slack)
            cases.append(Case(facts, ("slow_link.py", *words)))
    return cases


def _slow_link_table(lines: list[Line]) -> Table:
    """Throughput of each link over that of an unlimited one."""
    table = table_of(
        "micro-batches per second, and that over an unlimited link",
        *("<wire", "Mbit/s", "delay, ms", "transfer / compute", "<schedule", "slack", "per s"),
        *("over unlimited", "predicted"),
    )
    free: dict[tuple[str, str], float] = {}
    for line in lines:
        if "micro_batches_per_s" not in line:
            continue
        rate, name = line["micro_batches_per_s"], (line["wire"], line["schedule"])
        free.setdefault(name, rate)  # the first of each has no limit, and no slack
        table.add_row(
            line["wire"],
            f"{line['link_bits_per_s'] / 1e6:g}" if line["link_bits_per_s"] else "",
            f"{1e3 * line['link_delay_s']:g}",
            f"{line['transfer_over_compute']:.2f}",
            line["schedule"],
            f"{line['slack']:g}" + (" (chosen)" if line["asked"] == "auto" else ""),
            f"{rate:.2f}",
            f"{rate / free[name]:.2f}",
            f"{line['predicted_micro_batches_per_s']:.2f}",
        )
    return table


# -- links that bind ------------------------------------------------------------------------------

WIRES = {
    "namespaces": (
        ("torch", "1f1b", ""),
        ("ours", "1f1b", ""),
        ("ours", "async-1f1b", ""),
        ("ours", "async-1f1b", "bfloat16"),
        ("ours", "async-1f1b", "int8 with feedback"),
    ),
    "emulated": (
        ("ours", "1f1b", ""),
        ("ours", "1f1b", "int8 with feedback"),
        ("ours", "async-1f1b", ""),
        ("ours", "async-1f1b", "bfloat16"),
        ("ours", "async-1f1b", "int8 with feedback"),
        ("ours", "async-1f1b", "top 10 % with feedback"),
        ("ours", "async-1f1b", "20 of 64 columns, bfloat16"),
        ("ours", "async-1f1b", "36 of 64 columns, int8"),
    ),
}
"""By wire, who trains, with which schedule and codec. The first of each is what others are over."""


def _wire() -> list[Case]:
    """Eight emulated stages on two wires, with and without codecs."""
    cases = []
    for wire, rows in WIRES.items():
        for who, schedule, codec in rows:
            facts = {"wire": wire, "who": who, "schedule": schedule, "codec": codec}
            words = (wire, who, schedule, "--codec", codec)
            cases.append(Case(facts, ("wire.py", *words)))
    return cases


def _updates_needed() -> dict[tuple[str, str], float]:
    """By schedule and codec, how many times the updates of synchronous training a loss needs."""
    every = lines_of(RESULTS / "learning_codecs.jsonl")
    curve = sorted((e["updates"], e["final"]) for e in every if e["stages"] == 1)
    return {
        (e["schedule"], e["codec"]): slowdown(curve, e["updates"], e["final"]) or math.nan
        for e in every
        if e["stages"] > 1 or e["updates"] == max(curve)[0]
    }


def _wire_table(lines: list[Line]) -> Table:
    """Seconds of an update, and the time to the loss of synchronous training."""
    table = table_of(
        "64 micro-batches per update, 8 workers; how many times sooner than the first of its wire",
        *("<wire", "<who", "<schedule", "<codec", "slack", "KiB", "s per update", "of the wire"),
        *("sooner", "updates needed", "sooner at the loss"),
    )
    needed = _updates_needed()
    first: dict[str, float] = {}
    for line in lines:
        if "update_s" not in line:
            continue
        seconds = line["update_s"]
        before = first.setdefault(line["wire"], seconds)
        wire_s = 64 * line["transfer_s"] * line["bytes"] / line["dense_bytes"]
        times = needed.get((line["schedule"], line["codec"]), math.nan)
        table.add_row(
            line["wire"], line["who"], line["schedule"], line["codec"] or "none",
            f"{line['slack']:g}", f"{line['bytes'] / 1024:.0f}", f"{seconds:.2f}",
            f"{wire_s / seconds:.2f}", f"{before / seconds:.2f}", f"{times:.2f}",
            f"{before / seconds / times:.2f}",
        )  # fmt: skip
    return table


# -- what the defaults cost in samples ------------------------------------------------------------

TASKS = ("text", "pictures")
LEARNERS = ("adamw", "adam", "momentum", "nadam")


def _defaults() -> list[Case]:
    """Two tasks, four optimizers, 4 and 8 stages, with all options left out."""
    return [
        Case(
            {"task": task, "optimizer": name, "stages": stages},
            ("first_touch.py", "one", task, name, str(stages)),
        )
        for task in TASKS
        for name in LEARNERS
        for stages in (4, 8)
    ]


def _defaults_table(lines: list[Line]) -> Table:
    """Times the updates of plain training, to the same held-out loss."""
    title = "updates to the held-out loss that was reached, over those of plain training"
    table = table_of(title, "<task", "<optimizer", "4 stages", "8 stages")
    for task in TASKS:
        for name in LEARNERS:
            mine = {x["stages"]: x for x in lines if (x["task"], x["optimizer"]) == (task, name)}
            cells = [f"{mine[n]['slowdown']:.2f}" if "slowdown" in mine[n] else "" for n in (4, 8)]
            table.add_row(task, name, *cells)
    return table


# -- mini-batches of a new shape ------------------------------------------------------------------


def _shapes() -> list[Case]:
    """A model of bags of words, and one of batches of graphs."""
    return [Case({"model": name}, ("shapes.py", name)) for name in ("bags", "graphs")]


def _shapes_table(lines: list[Line]) -> Table:
    """Processor time of a step of a shape that was seen, and of a new one."""
    table = table_of(
        "milliseconds of a processor for a step of two stages",
        *("<model", "plain PyTorch", "a shape that was seen", "a new shape"),
        *("new over seen", "new over plain"),
    )
    for line in lines:
        if "new_ms" not in line:
            continue
        plain, seen, new = (line[f"{kind}_ms"] for kind in ("plain", "seen", "new"))
        figures = (plain, seen, new, new / seen, new / plain)
        table.add_row(line["model"], *(f"{f:.2f}" for f in figures))
    return table


BENCHMARKS: dict[str, Benchmark] = {
    "hop": Benchmark(
        "From one process to another", _hop(), _hop_table, _latency,
        ("KiB of a tensor", "microseconds one way"),
    ),
    "stash": Benchmark("What weight versions cost", _stash(), _stash_table),
    "slow_link": Benchmark("Slow links", _slow_link(), _slow_link_table),
    "wire": Benchmark("Links that bind, and codecs", _wire(), _wire_table),
    "shapes": Benchmark("Mini-batches of a new shape", _shapes(), _shapes_table),
    "defaults": Benchmark("What the defaults cost in samples", _defaults(), _defaults_table),
}  # fmt: skip
