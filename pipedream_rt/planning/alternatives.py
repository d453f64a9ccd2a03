"""Partitions as text: tables, the bottleneck, and what would change the answer."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from pipedream_rt.errors import ConfigError
from pipedream_rt.planning.machines import MOST_WORKERS, Machines, Worker
from pipedream_rt.planning.partition import Partition, PlannedStage
from pipedream_rt.schema import printable
from pipedream_rt.tracing.summary import WIDTH, Lines, bytes_text, seconds_text, table

Plan = Callable[[Machines, int | None], list[Partition]]
"""Plans for other machines and another number of micro-batches per update; None: the default."""


def choices_text(found: Sequence[Partition]) -> str:
    """Return a table of partitions, the best one first."""
    rows: list[tuple[str, ...]] = [
        ("schedule", "replicas", "micro-batches/s", "staleness", "slowdown", "worth/s", "memory")
    ]
    rows += [
        (
            each.schedule,
            each.shape,
            f"{each.throughput:.4g}",
            f"{each.staleness:.2g}",
            f"{each.slowdown:.2f}",
            f"{each.worth:.4g}",
            bytes_text(each.memory),
        )
        for each in found
    ]
    return table(rows)


def partition_text(partition: Partition) -> str:
    """Return a partition as a table with a row for each stage."""
    rows: list[tuple[str, ...]] = [
        (
            *("stage", "layers", "workers", "period", "link", "slack"),
            *("in flight", "versions", "staleness", "memory"),
        )
    ]
    for number, stage in enumerate(partition.stages):
        is_last = number + 1 == len(partition.stages)
        rows.append(
            (
                str(number),
                _layers_text(stage),
                _workers_text(stage.workers),
                seconds_text(stage.period),
                "" if is_last else seconds_text(stage.transfer) + " coded" * stage.coded,
                "" if is_last else str(stage.slack),
                str(stage.in_flight),
                str(stage.versions),
                str(stage.staleness),
                bytes_text(stage.memory),
            )
        )
    head = (
        f"{partition.schedule}, {partition.per_update} micro-batches per update: "
        f"{partition.throughput:.4g} micro-batches/s on {partition.workers} workers"
    )
    edges = ", ".join(f"{edge}: codec" for edge in partition.codecs(None))
    coded = [f"the codec pays, as Layout(codecs={{{edges}}})"] if edges else []
    return "\n".join([head, table(rows, WIDTH), *coded])


def partition_html(partition: Partition) -> str:
    """Return the text of a partition as HTML."""
    return Lines(partition_text(partition))._repr_html_()


def _layers_text(stage: PlannedStage) -> str:
    """Return the layers of a stage in words: how many, the first and the last."""
    names = [printable(name, 27) for name in stage.layers]
    return names[0] if len(names) == 1 else f"{len(names)}: {names[0]} .. {names[-1]}"


def _workers_text(workers: Sequence[int]) -> str:
    """Return workers as ``3``, ``3-7`` or, if they have gaps, ``3,5``."""
    first, last = workers[0], workers[-1]
    if len(workers) == 1:
        return str(first)
    rising = last - first == len(workers) - 1
    return f"{first}-{last}" if rising else ",".join(map(str, workers))


def explained(found: Sequence[Partition], machines: Machines, plan: Plan) -> str:
    """Return what limits the best partition, the runner-up, and what would change the answer."""
    best = found[0]
    slowest = max(stage.period for stage in best.stages)
    shares = sum(s.period * len(s.workers) for s in best.stages)
    idle = 1 - shares / (slowest * best.workers) if slowest else 0.0
    lines = [
        f"the bottleneck is {best.bottleneck}; with the others as even as layers allow, workers "
        f"wait for it {idle:.0%} of the time"
    ]
    if len(found) > 1:
        second = found[1]
        lines.append(
            f"the next best choice is {second.schedule} {second.shape}, which is worth "
            f"{second.worth / best.worth:.0%} of this"
        )
    lines.append("what would change the answer:")
    rows: list[tuple[str, ...]] = []
    for what, (other, per_update) in _changes(machines, best.per_update).items():
        try:
            then = plan(other, per_update)[0]
        except ConfigError:
            rows.append((f"  {what}", "no plan fits"))
            continue
        same = (then.schedule, then.shape) == (best.schedule, best.shape)
        answer = "the same" if same else f"{then.schedule} {then.shape}"
        rows.append((f"  {what}", answer, f"{then.worth / best.worth:.2f} of the worth"))
    width = max(map(len, rows))
    return "\n".join([*lines, table([row + ("",) * (width - len(row)) for row in rows])])


def _changes(machines: Machines, per_update: int) -> Mapping[str, tuple[Machines, int | None]]:
    """Return changed machines and micro-batches per update to plan for, by the change in words."""
    workers = machines.workers
    changes: dict[str, tuple[Machines, int | None]] = {}
    for what, factor in (("twice", 2.0), ("half", 0.5)):
        faster = replace(
            machines,
            bandwidth=factor * machines.bandwidth,
            bandwidth_within=factor * machines.bandwidth_within,
        )
        changes[f"{what} the bandwidth"] = (faster, per_update)
        if any(math.isfinite(worker.memory) for worker in workers):
            resized = tuple(replace(w, memory=factor * w.memory) for w in workers)
            changes[f"{what} the memory"] = (replace(machines, workers=resized), per_update)
    if len(workers) > 1:
        changes["a worker less"] = (replace(machines, workers=workers[:-1]), per_update)
    if len(workers) < MOST_WORKERS:
        changes["a worker more"] = (_with_one_more(machines), per_update)
    changes["twice the micro-batches per update"] = (machines, 2 * per_update)
    if per_update > 1:
        changes["one micro-batch per update"] = (machines, 1)
    return changes


def _with_one_more(machines: Machines) -> Machines:
    """Return machines with a second worker like the last one."""
    last: Worker = machines.workers[-1]
    return replace(machines, workers=(*machines.workers, last))
