"""The events of a run that observers are told: plain values, each with the time it was known.

An `Observer` is any function of one event. It is called in the thread of the script, in the order
of the mini-batches, so it needs no lock::

    def to_wandb(event):
        if isinstance(event, Stepped):
            wandb.log({"loss": event.loss, "lr": event.rates[0]}, step=event.step)

    Pipeline(..., observe=Observe(to=[to_wandb]))
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, TypeAlias

from pipedream_rt.errors import TraceError
from pipedream_rt.schedules import Plan
from pipedream_rt.schema import checks_of, maybe, problem_of, seconds, text, truth, whole
from pipedream_rt.tracing.trace import PLAN, Trace


def _moment(value: Any) -> bool:
    """Whether a value is a time, in seconds since the epoch, that has a date."""
    return seconds(value) and value < 1 << 36


_COUNTERS = {
    **dict.fromkeys(
        ("versions_kept_most", "parameters", "weight_bytes", "peak_memory_bytes"), whole(0)
    ),
    "peak_device_memory_bytes": maybe(whole(0)),
}
"""The checks of the counters of a stage that are shown."""


def _counters(value: Any) -> bool:
    """Whether a value has the shown counters of a stage; others may be anything."""
    return isinstance(value, dict) and not problem_of(value, _COUNTERS)


Moment: TypeAlias = Annotated[float, _moment]
Name: TypeAlias = Annotated[str, text(1 << 12)]
Counters: TypeAlias = Annotated[dict[str, Any], _counters]


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """A script begins to train, or goes on after a checkpoint.

    Attributes:
        time: When, in seconds since the epoch.
        step: The number of the first mini-batch.
        plan: The plan, as `Plan.packed` returns it.
        credits: The number of mini-batches that are injected ahead of their results.
        how: How the model was cut, in words.
        workers: The name of each worker.
        stages: The counters of each stage, and of each replica; see `Pipeline.statistics`.
        settings: The options that were given, in words, by name.
        software: Versions and processor, in words, by name.
        pid: The process of the script.
        host: The machine of the script.
    """

    time: Moment
    step: int
    plan: Annotated[dict[str, Any], PLAN]
    credits: int
    how: str
    workers: tuple[Name, ...]
    stages: tuple[Counters, ...]
    settings: dict[Name, str]
    software: dict[Name, str]
    pid: Annotated[int, whole(1, 2**31 - 1)]
    host: Name


@dataclass(frozen=True, slots=True, kw_only=True)
class Stepped:
    """The result of training on one mini-batch has come.

    Attributes:
        time: When, in seconds since the epoch.
        step: The number of the mini-batch.
        loss: Its loss.
        rates: The learning rate of each parameter group with which it was trained on.
        staleness: Updates between the oldest weight version that was read and the one updated.
        versions: The weight version that the last micro-batch read, by stage.
        busy_s: By stage, the seconds that it has computed since its worker was started.
        samples: The number of samples; 0 where the mini-batch has no first dimension.
        micro_batches: The number of micro-batches with samples.
        fingerprint: See `StepResult`.
    """

    time: Moment
    step: int
    loss: float
    rates: tuple[float, ...]
    staleness: int
    versions: tuple[int, ...]
    busy_s: tuple[float, ...]
    samples: int
    micro_batches: int
    fingerprint: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    """An evaluation has ended.

    Attributes:
        time: When, in seconds since the epoch.
        step: The number of mini-batches injected before.
        values: The mean loss, under ``"loss"``, and the metrics, by name.
    """

    time: Moment
    step: int
    values: dict[Name, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """A checkpoint is whole.

    Attributes:
        time: When that was seen, in seconds since the epoch.
        step: The number of mini-batches before it.
        folder: Its folder.
    """

    time: Moment
    step: int
    folder: Annotated[str, text(1 << 16)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovered:
    """The run has recovered from a failure, or has divided its work anew.

    Attributes:
        time: When that was seen, in seconds since the epoch.
        step: The number of mini-batches whose losses had come.
        generation: The number of the generation that began.
        reason: What had failed, in one line.
        seconds: How long the recovery took.
        replayed: The number of micro-batches that were fed again.
    """

    time: Moment
    step: int
    generation: int
    reason: str
    seconds: float
    replayed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Warned:
    """The runtime has logged a warning.

    Attributes:
        time: When, in seconds since the epoch.
        text: The warning.
    """

    time: Moment
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """The pipeline has ended. It is the last event of a script.

    Attributes:
        time: When, in seconds since the epoch.
        step: The number of mini-batches injected.
        reason: The error that ended it, in words; empty if it was closed.
        stages: As in `Begun`, at the end; empty after a failure.
        trace: What every stage did when; None where that was not recorded, and after a failure.
    """

    time: Moment
    step: int
    reason: str = ""
    stages: tuple[Counters, ...] = ()
    trace: Annotated[Trace | None, truth] = field(default=None, compare=False)


Event: TypeAlias = Begun | Stepped | Evaluated | Saved | Recovered | Warned | Ended

Observer: TypeAlias = Callable[[Event], object]
"""Any function of one event. If it raises, an error or `SystemExit`, that is logged and it is not
called again; the run goes on."""


_NAMES = {kind.__name__.lower(): kind for kind in Event.__args__}

_CHECKS = {kind: checks_of(kind) for kind in Event.__args__}

_NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
"""Numbers that JSON cannot write, by the text that stands for them."""


def packed(event: Event) -> dict[str, Any]:
    """Return an event as plain data for JSON; in place of a trace, whether there is one."""
    record: dict[str, Any] = {"event": type(event).__name__.lower()}
    for each in fields(event):
        value = getattr(event, each.name)
        if each.name == "trace":
            value = value is not None
        elif each.name == "values":
            value = {key: _written(number) for key, number in value.items()}
        elif each.name == "loss":
            value = _written(value)
        record[each.name] = list(value) if isinstance(value, tuple) else value
    return record


def _written(value: float) -> float | str:
    """Return a number, or a text in place of one that JSON cannot write."""
    return value if math.isfinite(value) else str(value)


def unpacked(record: Mapping[str, Any]) -> Event:
    """Return the event that `packed` made a record of, without its trace."""
    found = dict(record)
    kind = _NAMES.get(str(found.pop("event", "")))
    if kind is None:
        raise TraceError("it is no event of a run")
    found = {name: _read(name, value) for name, value in found.items()}
    names = _CHECKS[kind].keys()
    checks = {name: check for name, check in _CHECKS[kind].items() if name in found}
    if problem := problem_of(found, checks):
        raise TraceError(f"it is no event of a run: {problem}")
    values = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in found.items()
        if name in names and name != "trace"
    }
    try:
        event: Event = kind(**values)
        if isinstance(event, Begun):
            _check_plan(event)
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        raise TraceError(f"it is no event of a run: {error}") from error
    return event


def _check_plan(event: Begun) -> None:
    """Refuse a plan that makes no sense, or whose counters or workers are not its own."""
    plan = Plan.unpacked(event.plan)
    if len(event.stages) != len(plan.addresses) or len(event.workers) != plan.workers:
        raise ValueError(f"its counters or workers are not those of {plan.in_words}")


def _read(name: str, value: Any) -> Any:
    """Return a value as it was before `packed`."""
    if name == "loss":
        return _NOT_FINITE.get(value, value) if isinstance(value, str) else value
    if name == "values" and isinstance(value, dict):
        return {k: _NOT_FINITE.get(v, v) if isinstance(v, str) else v for k, v in value.items()}
    return value
