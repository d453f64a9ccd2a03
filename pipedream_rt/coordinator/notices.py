"""What a pipeline says at the start of a run, and once when it has seen how long its stages take.

A sentence is said where something was chosen for the user, or where what was chosen costs more than
one would think; and it has what to type. Nothing depends on what is said here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from pipedream_rt.coordinator.results import StepResult
from pipedream_rt.corrections import Correction
from pipedream_rt.messages.tree import micro_batch_sizes
from pipedream_rt.schedules import Plan
from pipedream_rt.schedules.edges import name_of
from pipedream_rt.schedules.recipes import RECIPES

_LOST = 0.2
"""The share of the throughput from which on unequal stages are told of."""

_FROM, _UPDATES, _BUSY_S = 3, 10, 1.0
"""The update from which on stages are measured; and for how many updates and seconds at least."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """Which options of `Pipeline` the user has left out.

    Attributes:
        micro_batches: Whether ``micro_batches`` was.
        corrections: Whether ``corrections`` was.
    """

    micro_batches: bool
    corrections: bool


def about_plan(plan: Plan, corrections: Sequence[Correction], left_out: LeftOut) -> list[str]:
    """Return what is said of the schedule of a run that trains.

    Args:
        plan: The plan.
        corrections: The corrections for staleness.
        left_out: What the user has left out.
    """
    if plan.workers == 1:
        return []
    stalest = max(map(plan.staleness, range(plan.num_stages)))
    if plan.flushes:
        return _about_flushes(plan) if left_out.micro_batches and plan.per_update == 1 else []
    said = []
    chosen = []
    if left_out.micro_batches:
        chosen.append(f"micro_batches={plan.per_update}")
    if left_out.corrections and corrections:
        named = ", ".join(type(each).__name__ for each in corrections)
        chosen.append(f'corrections="auto" ({named})')
    if chosen:
        least = "; no gradient is more than one update stale" if stalest <= 1 else ""
        said.append(
            f"{plan.name} with {' and '.join(chosen)}, as nothing else was given{least}. "
            "micro_batches=1, corrections=() gives an update for each mini-batch as it is, and "
            "more staleness"
        )
    if stalest > 1:
        enough = plan.shape.longest_lag + 1
        helps = plan.name in RECIPES and enough > plan.per_update
        said.append(
            f"gradients are up to {stalest} updates stale, which costs samples; "
            + (
                f"with micro_batches={enough} they are one update stale at most"
                if helps
                else "a schedule that flushes, such as 1f1b, has no staleness"
            )
        )
    return said


def _about_flushes(plan: Plan) -> list[str]:
    """Return what is said of a schedule that flushes, with one micro-batch per update."""
    return [
        f"{plan.name} with micro_batches=1, as nothing else was given: the bits are those of plain "
        f"PyTorch, and no two workers compute at once. With micro_batches={2 * plan.workers} they "
        "do; the gradients of the micro-batches are then added up, which is rounded otherwise"
    ]


def about_cores(workers: int, threads: int, cores: int) -> list[str]:
    """Return what is said where workers of this machine have to share its cores.

    Args:
        workers: The number of workers that are started here.
        threads: The number of threads of each.
        cores: The number of cores that this process may use.
    """
    if workers * threads <= cores or workers == 1:
        return []
    of_each = f" of {threads} threads" if threads > 1 else ""
    return [
        f"{workers} workers{of_each} share {cores} core{'s' * (cores > 1)} of this machine, so no "
        f"more than {max(1, cores // threads)} of them compute at a time; fewer stages would be as "
        "fast"
    ]


def about_micro_batches(
    modules: Mapping[str, nn.Module], samples: int, per_update: int
) -> list[str]:
    """Return what is said of a model whose layers see that a mini-batch is cut.

    Args:
        modules: The layers, and the loss if it is a module, by name.
        samples: The number of samples in the first mini-batch.
        per_update: The number of micro-batches.
    """
    size = micro_batch_sizes(samples, per_update)[0]
    if size == samples:
        return []
    named = [pair for name, whole in modules.items() for pair in whole.named_modules(prefix=name)]
    said = []
    norms = [name for name, each in named if isinstance(each, _BatchNorm) and each.training]
    if norms:
        said.append(
            f"BatchNorm ({_some(norms)}) sees micro-batches of {size} samples, not mini-batches of "
            f"{samples}, and its statistics move {per_update} times per update; micro_batches=1 "
            "gives it whole mini-batches"
        )
    in_time = [name for name, each in named if getattr(each, "batch_first", True) is False]
    if in_time:
        said.append(
            f"mini-batches are cut along dimension 0, which is {samples} long, and "
            f"{_some(in_time)} takes time there (batch_first=False); if dimension 0 of what the "
            "loader yields is time, put samples first, or use micro_batches=1"
        )
    return said


def _some(names: Sequence[str]) -> str:
    """Return the first of some names of modules, and how many more there are."""
    return (names[0] or "the model") + (f" and {len(names) - 1} more" if len(names) > 1 else "")


class Balance:
    """Says once, from what stages have computed so far, that they take too unequal times.

    Args:
        plan: The plan.
        say: Called with the sentence.
    """

    def __init__(self, plan: Plan, say: Callable[[str], object]) -> None:
        """Measure nothing yet."""
        self._plan = plan
        self._say: Callable[[str], object] | None = say
        self._first: StepResult | None = None

    def __call__(self, result: StepResult) -> None:
        """Look at the result of a mini-batch, which come in order."""
        if self._say is None:
            return
        if self._first is None:
            # The first mini-batches pay for memory and code that is not there yet. Replicas take
            # turns, so that of each the whole is looked at.
            self._first = result if result.step >= _FROM or self._plan.replicated else None
            return
        since = result.step - self._first.step
        before = (0.0,) * len(result.busy_s) if self._plan.replicated else self._first.busy_s
        busy = [now - then for now, then in zip(result.busy_s, before, strict=True)]
        if since < _UPDATES or max(busy) < _BUSY_S:
            return
        say, self._say = self._say, None
        for text in about_balance(self._plan, busy):
            say(text)


def about_balance(plan: Plan, busy_s: Sequence[float]) -> list[str]:
    """Return what is said of stages of which some compute much longer than others.

    Args:
        plan: The plan.
        busy_s: By stage, the seconds that it has computed, or one of its replicas.
    """
    of_worker = [0.0] * plan.workers
    for stage, seconds in enumerate(busy_s):
        for worker in {plan.worker_of(a) for a in plan.addresses if plan.stage_of(a) == stage}:
            of_worker[worker] += seconds
    mean, most = sum(of_worker) / len(of_worker), max(of_worker)
    if mean >= (1 - _LOST) * most:
        return []
    slowest, fastest = (pick(range(len(busy_s)), key=busy_s.__getitem__) for pick in (max, min))
    alone = ""
    if plan.layers and len(layers := plan.layers[slowest]) == 1:
        alone = f"its one layer, {layers[0]}, can have several workers, by replicas=; or "
    return [
        f"{name_of(slowest)} has computed {busy_s[slowest]:.2g} s, and {name_of(fastest)} "
        f"{busy_s[fastest]:.2g} s: if all workers computed equally long, the pipe would be "
        f"{most / mean:.1f} times as fast. To move layers, {alone}measure "
        " them: `pipedream-rt profile -o model.profile SCRIPT`, then `pipedream-rt plan "
        f"model.profile --workers {plan.workers}` says where to cut; or let the pipeline do both: "
        'stages="auto" with example='
    ]
