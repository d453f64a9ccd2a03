"""The split that `Pipeline` chooses with ``stages="auto"``: measured, planned, and kept."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from pipedream_rt.errors import ConfigError
from pipedream_rt.job.batches import example_of
from pipedream_rt.job.conflicts import facts_of_model, may_replicate
from pipedream_rt.job.options import Options
from pipedream_rt.job.rules import scale_of
from pipedream_rt.job.unsplit_model import UnsplitModel
from pipedream_rt.planning.cuts import cuts_of
from pipedream_rt.planning.explanation import partition_text
from pipedream_rt.planning.machines import Machines, Worker
from pipedream_rt.planning.partition import Partition
from pipedream_rt.planning.planner import partitions
from pipedream_rt.planning.profiling import first_micro_batch, hash_of, optimizer_choice, profile
from pipedream_rt.schedules.recipes import RECIPES
from pipedream_rt.schema import list_of, problem_of, read_file, text, whole, write_file

_log = logging.getLogger(__name__)

PLAN_FILE = "plan.json"
"""The file beside the checkpoints of a run that has the split which was chosen for it."""

_COSTED = {
    "async-1f1b": "async-1f1b", "async-1f1b+vertical-sync": "async-1f1b", "2bw": "2bw",
    "1f1b": "1f1b", "gpipe": "1f1b", "zero-bubble": "1f1b",
}  # fmt: skip
"""By schedule, the one whose costs decide where to cut."""

_SLACK = ("async-1f1b", "async-1f1b+vertical-sync", "2bw", "1f1b")
"""The schedules for which slack is chosen."""

_REPLICATED = ("async-1f1b", "async-1f1b+vertical-sync", "2bw", "1f1b", "gpipe")
"""The schedules in which stages may have replicas."""

HOP_S = 0.0004
"""Seconds of a hop between processes of one machine (docs/benchmarks.md, rounded up)."""

_LARGEST = 1 << 24
_NAMES = list_of(text(10_000))
_FIELDS = {
    "key": text(64), "stages": _NAMES, "slack": list_of(whole(0, 1 << 20)),
    "replicas": list_of(whole(1, 1 << 12)), "why": text(1 << 20),
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """A split that was chosen.

    Attributes:
        stages: The first layer of every stage but the first, by name.
    """

    key: str
    stages: list[str]
    slack: list[int]
    replicas: list[int]
    why: str


def choose_stages(model: UnsplitModel, options: Options, workers: Sequence[int]) -> Chosen:
    """Return the split that a run is to have, which is the one that it has had, if there is one.

    Without a number of micro-batches, the layers are measured on as small a part of a mini-batch as
    there could be.
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
    if micro_batches is None:
        micro_batches = 1 if RECIPES[schedule].flushes else workers[-1]
    batch = first_micro_batch(example_of(example), micro_batches)
    made = optimizer_choice(options.optimizer)
    of_model = hash_of(model.whole, batch, made, loss_fn, training.autocast)
    replicas = options.layout.replicas == "auto" and _may_replicate(model, options)
    key = f"{of_model}-{schedule}-{micro_batches}-{_span(workers)}{'-r' * replicas}"
    kept = None if options.kept is None else options.kept.path / PLAN_FILE
    if kept is not None and (found := _read(kept)) is not None and found.key == key:
        _log.info("the stages that %s has:\n%s", kept, found.why)
        return found
    with _threads(options.threads):
        item = (batch.args, batch.kwargs, batch.target)
        measured = profile(
            model.given, item, loss_fn=loss_fn, optimizer=made, autocast=training.autocast
        )
    machines = Machines(workers=(Worker(),) * workers[-1], latency_within=HOP_S)
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
    """Return what a partition is expected to give, beside one process."""
    if best.workers == 1:
        return "one process was chosen: with these times, no cut would make the run faster"
    return (
        f"expected: {best.throughput / alone.throughput:.2f} times as fast as one process, where "
        f"each of the {best.workers} workers has a core"
    )


def _may_replicate(model: UnsplitModel, options: Options) -> bool:
    """Whether stages may have replicas: nothing of what a script gives is refused then.

    The corrections of ``"auto"`` are looked at later.
    """
    if options.schedule not in _REPLICATED:
        return False
    given = options.corrections
    return may_replicate(
        replace(
            facts_of_model(model.modules, model.parameters),
            num_stages=2,
            flushes=RECIPES[options.schedule].flushes,
            clip=options.training.clip,
            scaled=scale_of(options.training) is not None,
            corrections=given if isinstance(given, list | tuple) else (),
        )
    )


def _span(workers: Sequence[int]) -> str:
    """Return numbers of workers as a text: the greatest, unless there is a least one too."""
    return f"{workers[-1]}" if workers[0] == 1 else f"{workers[0]}..{workers[-1]}"


def _read(path: Path) -> Chosen | None:
    """Return the split in a file; None if there is none, or none that can be read."""
    with suppress(OSError, ValueError, RecursionError):
        found = json.loads(read_file(path, _LARGEST))
        if isinstance(found, dict) and not problem_of(found, _FIELDS):
            return Chosen(**{name: found[name] for name in _FIELDS})
        _log.warning("%s holds no plan, so the stages are chosen anew", path)
    return None


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """Let torch have a number of threads for a while."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
