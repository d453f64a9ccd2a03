"""The benchmarks that train: against peers, against the limit, and what a micro-batch costs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from rich.table import Table

from benchmarks.grid import Line
from benchmarks.workload import Workload

from .runs import Benchmark, Case, table_of

TRANSFORMER = Workload(
    "transformer",
    stages=2,
    micro_batches=4,
    updates=10,
    samples=4,
    width=256,
    context=128,
    layers=8,
)
EMULATED = Workload(
    "emulated", stages=8, micro_batches=8, updates=12, samples=8, width=256,
    forward_s=0.010, backward_s=0.020,
)  # fmt: skip
WHOLE = ("DistributedDataParallel", "one process")
"""Those that have the whole model in each process."""

SAME_NAME = ("1f1b", "gpipe", "interleaved-1f1b", "zero-bubble")
"""The schedules that both torch.distributed.pipelining and we have."""


def workers(w: Workload, schedule: str) -> Workload:
    """The workload for as many processes with two stages on each, if the schedule wants that."""
    if schedule != "interleaved-1f1b":
        return w
    halves = {"forward_s": w.forward_s / 2, "backward_s": w.backward_s / 2}
    return replace(w, stages=2 * w.stages, **halves)


def ours(w: Workload, schedule: str) -> Case:
    """Our pipeline."""
    facts = _facts(w, "pipedream-rt", schedule)
    return Case(facts, ("ours.py", workers(w, schedule).to_json(), schedule))


def torchs(w: Workload, schedule: str) -> Case:
    """torch.distributed.pipelining; its zero-bubble has two stages on each rank too."""
    facts = _facts(w, "torch.distributed.pipelining", schedule)
    shape = workers(w, "interleaved-1f1b" if schedule == "zero-bubble" else schedule)
    script = "peers/torch_pipelining.py"
    return Case(facts, (script, shape.to_json(), schedule))


def other(w: Workload, who: str, script: str, foreign: bool = False) -> Case:
    """Another peer."""
    command = (f"peers/{script}.py", w.to_json())
    return Case(_facts(w, who, ""), command, foreign)


def _facts(w: Workload, who: str, schedule: str) -> Line:
    """What tells a case from others."""
    return {
        "model": w.model,
        "workers": w.stages,
        "micro_batches": w.micro_batches,
        "updates": w.updates,
        "who": who,
        "schedule": schedule,
    }


def rate(line: Line) -> float:
    """Micro-batches per second, from an empty pipe to an empty pipe."""
    return float(line["updates"] * line["micro_batches"] / line["seconds"])


# -- peers ----------------------------------------------------------------------------------------


def _peers() -> list[Case]:
    """Everybody on two workloads; a few over the number of micro-batches per update."""
    cases = []
    for w in (TRANSFORMER, EMULATED):
        cases += [ours(w, schedule) for schedule in ("async-1f1b", *SAME_NAME)]
        cases += [torchs(w, schedule) for schedule in SAME_NAME]
        cases += [
            other(w, "torch.distributed.rpc", "torch_rpc"),
            other(w, "DeepSpeed", "deepspeed_pipe", foreign=True),
            other(w, "DistributedDataParallel", "ddp"),
            other(w, "FairScale Pipe", "fairscale_pipe", foreign=True),
            other(w, "one process", "one_process"),
        ]
    for count in (16, 64):
        w = replace(EMULATED, micro_batches=count, updates=max(2, 128 // count))
        cases += [ours(w, schedule) for schedule in ("async-1f1b", "1f1b")]
        cases.append(torchs(w, "1f1b"))
    return cases


def _peers_table(lines: list[Line]) -> Table:
    """Each against the best peer on the same workload that cuts the model too."""
    table = table_of(
        "micro-batches per second; a ratio is that over the best peer",
        *("<model", "workers", "per update", "<who", "<schedule", "per s", "spread"),
        *("ratio", "of the same name", "full pipe"),
    )
    for line in lines:
        alike = [
            each
            for each in lines
            if all(each[k] == line[k] for k in ("model", "workers", "micro_batches"))
            and each["who"] not in ("pipedream-rt", *WHOLE)
            and "seconds" in each
        ]
        if "seconds" not in line:
            cells = [line.get("unavailable", ""), "", "", "", ""]
        else:
            best = max(map(rate, alike), default=float("nan"))
            same = [each for each in alike if each["schedule"] == line["schedule"] != ""]
            is_ours = line["who"] == "pipedream-rt"
            full = line.get("steady_per_s") if line["schedule"].startswith("async") else None
            spread = rate(line) * line.get("seconds spread", 0.0) / line["seconds"]
            cells = [
                f"{rate(line):.2f}",
                f"{spread:.2f}",
                f"{rate(line) / best:.2f}",
                f"{rate(line) / rate(same[0]):.2f}" if same and is_ours else "",
                f"{full:.2f} ({full / best:.2f})" if full else "",
            ]
        heads = (line["model"], line["workers"], line["micro_batches"], line["who"])
        table.add_row(*map(str, heads), line["schedule"], *cells)
    return table


def _over_micro_batches(lines: list[Line]) -> Iterator[tuple[str, float, float]]:
    """Rates over the number of micro-batches per update, with eight emulated stages."""
    for line in lines:
        drawn = line["who"] in ("pipedream-rt", "torch.distributed.pipelining")
        if line["model"] == "emulated" and drawn and "seconds" in line:
            name = f"{line['who']}, {line['schedule']}"
            yield name, line["micro_batches"], rate(line)


# -- the limit ------------------------------------------------------------------------------------


def _limit() -> list[Case]:
    """The asynchronous pipeline and the parts of the same model alone, for each size."""
    cases = []
    sizes = [replace(TRANSFORMER, updates=24)]
    sizes += [replace(EMULATED, stages=stages, updates=40) for stages in (4, 8, 16, 32)]
    for w in sizes:
        cases += [ours(w, "async-1f1b"), other(w, "the parts alone", "halves")]
    return cases


def _limit_table(lines: list[Line]) -> Table:
    """Throughput of the full pipe over that of the slowest part."""
    table = table_of(
        "throughput of a full pipe over that of the slowest stage alone",
        *("<model", "workers", "the parts alone, per s", "pipe, per s", "spread", "ratio"),
    )
    for mine, parts in zip(lines[::2], lines[1::2], strict=True):
        if "steady_per_s" not in mine or "seconds" not in parts:
            continue
        table.add_row(
            mine["model"], str(mine["workers"]), f"{rate(parts):.2f}",
            f"{mine['steady_per_s']:.2f}", f"{mine.get('steady_per_s spread', 0):.2f}",
            f"{mine['steady_per_s'] / rate(parts):.3f}",
        )  # fmt: skip
    return table


# -- the cost of a micro-batch --------------------------------------------------------------------


def _overhead() -> list[Case]:
    """Layers that cost nothing: one small linear layer, and products of tensors of many sizes."""
    cases = []
    for stages in (2, 4, 8, 16, 32):
        count = max(400, 4000 // stages)
        cases += _costs(Workload("linear", stages, 1, updates=count, samples=8, width=256))
    for kib in (1, 16, 256, 4096, 16384):
        count = 1000 if kib < 1024 else 60
        cases += _costs(Workload("emulated", 2, 1, updates=count, samples=1, width=256 * kib))
    return cases


def _costs(w: Workload) -> list[Case]:
    """Our pipeline and a plain loop, with the size of what passes between stages as a fact."""
    kib = {"kib": 4 * w.samples * w.width // 1024}
    both = (ours(w, "async-1f1b"), other(w, "a plain loop", "one_process"))
    return [replace(case, facts={**case.facts, **kib}) for case in both]


def _overhead_table(lines: list[Line]) -> Table:
    """Processor time by thread, beside that of a loop without a pipeline."""
    table = table_of(
        "milliseconds of a processor for each micro-batch",
        *("<layers", "stages", "KiB passed", "plain loop, a stage", "worker"),
        *("compute thread", "links thread", "coordinator", "main thread"),
    )
    for mine, plain in zip(lines[::2], lines[1::2], strict=True):
        if "worker_ms" not in mine or "seconds" not in plain:
            continue
        alone = 1e3 / rate(plain) / plain["workers"]
        figures = (alone, *(mine[f"{part}_ms"] for part in PARTS))
        table.add_row(
            mine["model"], str(mine["workers"]), str(mine["kib"]), *(f"{f:.2f}" for f in figures)
        )
    return table


# -- a loss in the script -------------------------------------------------------------------------


def _script() -> list[Case]:
    """The same loss on the last stage and in the script; then one that only a script computes."""
    cases = []
    for stages in (2, 8):
        w = replace(EMULATED, stages=stages, micro_batches=1, updates=120)
        cases += [_placed(w, "async-1f1b", place) for place in ("stage", "script")]
    for count in (1, 8):
        times = {"forward_s": 0.08 / count, "backward_s": 0.16 / count}
        w = replace(EMULATED, stages=4, micro_batches=count, samples=256 // count, **times)
        cases.append(_placed(w, "gpipe", "contrastive"))
    return cases


def _placed(w: Workload, schedule: str, place: str) -> Case:
    """A loss that is computed at a place."""
    facts = {**_facts(w, "pipedream-rt", schedule), "place": place}
    return Case(facts, ("ours.py", w.to_json(), schedule, place))


def _script_table(lines: list[Line]) -> Table:
    """Throughput, beside that of the case before it on the same number of stages."""
    table = table_of(
        "mini-batches per second of a full pipe, and that over the case above",
        *("<schedule", "stages", "micro-batches", "<loss", "per s", "spread", "ratio"),
        *("coordinator, ms of a processor", "worker, ms"),
    )
    for i, line in enumerate(lines):
        if "steady_per_s" not in line:
            continue
        ratio = f"{line['steady_per_s'] / lines[i - 1]['steady_per_s']:.3f}" if i % 2 else ""
        table.add_row(
            line["schedule"], str(line["workers"]), str(line["micro_batches"]), line["place"],
            f"{line['steady_per_s']:.2f}", f"{line.get('steady_per_s spread', 0):.2f}", ratio,
            f"{line['coordinator_ms']:.2f}", f"{line['worker_ms']:.2f}",
        )  # fmt: skip
    return table


PARTS = ("worker", "stages", "links", "coordinator", "main")

BENCHMARKS: dict[str, Benchmark] = {
    "peers": Benchmark(
        "Against other pipelines", _peers(), _peers_table, _over_micro_batches,
        ("micro-batches per update", "micro-batches per second"),
    ),
    "limit": Benchmark("Against the layers alone", _limit(), _limit_table),
    "overhead": Benchmark("What a micro-batch costs", _overhead(), _overhead_table),
    "script": Benchmark("A loss that the script computes", _script(), _script_table),
}  # fmt: skip
