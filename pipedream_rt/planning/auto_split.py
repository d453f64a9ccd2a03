"""The split that ``stages="auto"`` gives: measured, planned, and kept beside the checkpoints.

It is kept so that a script that goes on after a checkpoint gets the split that it had.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import torch

from pipedream_rt.errors import ConfigError
from pipedream_rt.job.conflicts import Facts, facts_of_model, may_replicate
from pipedream_rt.job.options import Options
from pipedream_rt.job.splitting import items_of
from pipedream_rt.job.unsplit_model import UnsplitModel
from pipedream_rt.models.preserving_state import drawing_alone
from pipedream_rt.planning.alternatives import partition_text
from pipedream_rt.planning.cuts import cuts_of
from pipedream_rt.planning.machines import Machines, Worker
from pipedream_rt.planning.partition import Partition
from pipedream_rt.planning.planner import partitions
from pipedream_rt.planning.profiling import first_micro_batch, hash_of, optimizer_choice, profile
from pipedream_rt.schedules import RECIPES, plan_for
from pipedream_rt.schema import checks_of, problem_of, read_file, text, whole, write_file
from pipedream_rt.telling import log_of

_log = log_of(__name__)

PLAN_FILE = "plan.json"
"""The file with the chosen split, beside the checkpoints of the run."""

_COSTED = {
    "async-1f1b": "async-1f1b", "async-1f1b+vertical-sync": "async-1f1b", "2bw": "2bw",
    "1f1b": "1f1b", "gpipe": "1f1b", "zero-bubble": "1f1b",
}  # fmt: skip
"""By schedule, the one whose cost model decides where to cut."""

_SLACK = ("async-1f1b", "async-1f1b+vertical-sync", "2bw", "1f1b")
"""The schedules that take slack."""

_REPLICATED = ("async-1f1b", "async-1f1b+vertical-sync", "2bw", "1f1b", "gpipe")
"""The schedules in which stages may have replicas."""

HOP_S = 0.0004
"""Seconds of a hop between processes of one machine (docs/benchmarks.md, rounded up)."""

_LARGEST = 1 << 24
"""Bytes that a plan file may have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """A split that was chosen.

    Attributes:
        key: The hash of the model and of all else that the choice depends on.
        stages: The first layer of every stage but the first, by name.
        slack: Extra warm-up forwards, by hop.
        replicas: By stage.
        why: The plan as a table, for people.
    """

    key: Annotated[str, text(64)]
    stages: list[Annotated[str, text(10_000)]]
    slack: list[Annotated[int, whole(0, 1 << 20)]]
    replicas: list[Annotated[int, whole(1, 1 << 12)]]
    why: str


_FIELDS = checks_of(Chosen)


def choose_stages(model: UnsplitModel, options: Options, workers: Sequence[int]) -> Chosen:
    """Return the run's earlier split if it was chosen for the same job; else a new one.

    ``workers`` are the numbers of workers that a plan may use, rising.
    """
    schedule, micro_batches, example = options.schedule, options.micro_batches, options.example
    training, loss_fn = options.training, options.loss_fn
    if not isinstance(schedule, str) or schedule not in _COSTED:
        raise ConfigError(
            f'stages="auto" is for the schedules {", ".join(_COSTED)}; give a number or a list'
        )
    if not workers:
        raise ConfigError(
            'stages="auto" is for workers of this machine, as their number and their links are '
            "not known otherwise; plan with `pipedream-rt plan`, and give a number or a list"
        )
    if example is None:
        raise ConfigError(
            'stages="auto" measures the layers on a mini-batch: give example=, a mini-batch as '
            "the loader yields it, or the DataLoader"
        )
    # Where none is given, take the smallest part of a mini-batch that a plan could come to feed.
    if micro_batches is None:
        micro_batches = 1 if RECIPES[schedule].flushes else workers[-1]
    items = items_of(model, loss_fn, options.prepare)
    batch = first_micro_batch(items.example(example), micro_batches)
    made = optimizer_choice(options.optimizer)
    of_model = hash_of(model.whole, batch, made, loss_fn, training.autocast)
    replicas = options.layout.replicas == "auto" and _may_replicate(model, options)
    key = f"{of_model}-{schedule}-{micro_batches}-{_span(workers)}{'-r' * replicas}"
    kept = None if options.kept is None else options.kept.path / PLAN_FILE
    if kept is not None and (found := _read(kept)) is not None and found.key == key:
        _log.info("the stages that %s has:\n%s", kept, found.why)
        return found
    # As many as a worker has: the times are to be those of workers.
    with _threads(options.layout.threads):
        item = (batch.args, batch.kwargs, batch.target)
        measured = profile(
            model.given, item, loss_fn=loss_fn, optimizer=made, autocast=training.autocast
        )
    machines = Machines(workers=(Worker(),) * workers[-1], latency_within=HOP_S)
    # A split is told by the first layers of the stages, so the layers stay in their order.
    cuts, costed = cuts_of(measured, branches=False), _COSTED[schedule]
    best = partitions(
        cuts,
        machines,
        choices=[costed],
        per_update=micro_batches,
        replicas=None if replicas else 1,
        workers=workers,
    )[0]
    alone = partitions(
        cuts, machines, choices=[costed], per_update=micro_batches, replicas=1, workers=[1]
    )[0]
    chosen = Chosen(
        key=key,
        stages=[stage.layers[0] for stage in best.stages[1:]],
        slack=[stage.slack * (schedule in _SLACK) for stage in best.stages[:-1]],
        replicas=[len(stage.workers) for stage in best.stages],
        why=f"{partition_text(best)}\n{_expected(best, alone)}",
    )
    _log.info("the stages that were chosen:\n%s", chosen.why)
    if kept is not None:
        kept.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_file(kept, (json.dumps(asdict(chosen), indent=1) + "\n").encode())
    return chosen


def _expected(best: Partition, alone: Partition) -> str:
    """Return the expected speed of a partition beside one process, in words."""
    if best.workers == 1:
        return "one process was chosen: with these times, no cut would make the run faster"
    return (
        f"expected: {best.throughput / alone.throughput:.2f} times as fast as one process, where "
        f"each of the {best.workers} workers has a core"
    )


def _may_replicate(model: UnsplitModel, options: Options) -> bool:
    """Whether stages may have replicas: no option that the script gives is refused with them."""
    if options.schedule not in _REPLICATED:
        return False
    corrections = options.corrections
    return may_replicate(
        Facts(
            plan=plan_for(options.schedule, num_stages=2, per_update=8, replicas=(2, 1)),
            model=facts_of_model(model.modules, model.parameters),
            training=options.training,
            # Those of "auto" are looked at later.
            corrections=tuple(corrections) if isinstance(corrections, list | tuple) else (),
        )
    )


def _span(workers: Sequence[int]) -> str:
    """Return the numbers of workers as a text: the greatest, and the least if it is not 1."""
    return f"{workers[-1]}" if workers[0] == 1 else f"{workers[0]}..{workers[-1]}"


def _read(path: Path) -> Chosen | None:
    """Return the split in a file; None if the file is missing or holds none."""
    with suppress(OSError, ValueError, RecursionError):
        found = json.loads(read_file(path, _LARGEST))
        if isinstance(found, dict) and not problem_of(found, _FIELDS):
            return Chosen(**{name: found[name] for name in _FIELDS})
        _log.warning("%s holds no plan, so the stages are chosen anew", path)
    return None


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """Let torch have ``count`` threads within the block."""
    with drawing_alone():  # the body draws too
        before = torch.get_num_threads()
        torch.set_num_threads(count)
        try:
            yield
        finally:
            torch.set_num_threads(before)
