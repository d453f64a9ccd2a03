"""``run --compare-schedules``: the first updates of a script, by two schedules, one after another.

A table of other programs says what staleness may cost. This says what it costs a script.
"""

from __future__ import annotations

import math
import subprocess
import tempfile
from collections import defaultdict, deque
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from datetime import timedelta
from itertools import accumulate
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import click

from pipedream_rt.cluster.environment import LOG_DIR, RECORD, SCHEDULE
from pipedream_rt.cluster.subprocesses import end_processes
from pipedream_rt.cluster.worker_life import shell_code
from pipedream_rt.deadline import Deadline
from pipedream_rt.job.defaults import ASYNCHRONOUS, FLUSHED
from pipedream_rt.observers.folder import EVENTS, Following
from pipedream_rt.schedules import Plan
from pipedream_rt.schedules.recipes import ScheduleName
from pipedream_rt.tracing.events import Begun, Event, Stepped

SCHEDULES: tuple[ScheduleName, ScheduleName] = (FLUSHED, ASYNCHRONOUS)

_LOOK_S = 0.2
"""How often the events of a script are read."""

_END_TIMEOUT = timedelta(seconds=20)
"""For a script to end after SIGTERM; then it is killed."""

_ROWS = 8


class Point(NamedTuple):
    """What is known after a number of mini-batches.

    Attributes:
        updates: The number.
        samples: Of all of them.
        seconds: From the first result to the last one.
        loss: The mean of the last losses.
    """

    updates: int
    samples: int
    seconds: float
    loss: float


class Trial(NamedTuple):
    """What training by one schedule gave."""

    schedule: str
    micro_batches: int
    points: Sequence[Point]


def points_of(steps: Sequence[Stepped]) -> list[Point]:
    """Return a point for each mini-batch; a loss is the mean of a tenth of all of them."""
    losses = deque[float](maxlen=max(1, len(steps) // 10))
    samples = accumulate(max(step.samples, 1) for step in steps)
    points = []
    for number, (step, done) in enumerate(zip(steps, samples, strict=True), 1):
        losses.append(step.loss)
        points.append(Point(number, done, step.time - steps[0].time, fmean(losses)))
    return points


def reached(points: Sequence[Point], loss: float) -> Point | None:
    """The first point at which a loss is reached."""
    return next((point for point in points if point.loss <= loss), None)


def told(one: Trial, other: Trial) -> list[str]:
    """Say where the losses of two trials are, and what the other needs to that of the one.

    The loss that is compared is the lowest that both have reached.
    """
    count = min(len(one.points), len(other.points))
    lines = ["".join([" updates", *(f"  {t.schedule}: loss  seconds" for t in (one, other))])]
    for row in sorted({max(1, count * part // _ROWS) for part in range(1, _ROWS + 1)}):
        cells = [
            f"  {p.loss:{len(t.schedule) + 6}.4f} {p.seconds:8.1f}"
            for t, p in ((t, t.points[row - 1]) for t in (one, other))
        ]
        lines.append(f"{row:8}{''.join(cells)}")
    for trial in (one, other):
        if not all(math.isfinite(point.loss) for point in trial.points):
            return [*lines, f"By {trial.schedule} a loss is not finite: it diverges at this rate."]
    loss = max(min(point.loss for point in trial.points) for trial in (one, other))
    ends = [reached(trial.points, loss) for trial in (one, other)]
    soon = max(1, count // 5)
    if None in ends or any(end is not None and end.updates <= soon for end in ends):
        return [*lines, "The loss falls too little in so few updates to compare the schedules."]
    (_, samples, seconds, _), (_, samples_2, seconds_2, _) = ends  # type: ignore[misc]
    return [
        *lines,
        f"To a loss of {loss:.4f}, {other.schedule} with {other.micro_batches} micro-batches takes "
        f"{samples_2 / samples:.2f} times the samples and {seconds_2 / seconds:.2f} times the time "
        f"of {one.schedule} with {one.micro_batches}.",
    ]


def compare(command: Sequence[str], environment: Mapping[str, str], updates: int) -> int:
    """Run a script by each schedule, for some updates, and say how they compare.

    Returns the exit code of a script that has ended by itself with an error; else 0.
    """
    trials = []
    for schedule in SCHEDULES:
        click.echo(f"{updates} updates by {schedule}:", err=True)
        with tempfile.TemporaryDirectory(prefix="pipedream-rt-") as folder:
            # Workers say at the end that their script is gone, which nobody needs to read.
            given = {LOG_DIR: folder, **environment, SCHEDULE: schedule, RECORD: f"{folder}/run"}
            code, trial = _tried(command, given, folder, updates)
        if code:
            return code
        if trial is None:
            click.echo(
                f"Error: the script has trained nothing by {schedule}: it must make a Pipeline, "
                "and train on a mini-batch and more",
                err=True,
            )
            return 1
        trials.append(trial)
    click.echo("\n".join(told(*trials)))
    return 0


def _tried(
    command: Sequence[str], environment: Mapping[str, str], folder: str, updates: int
) -> tuple[int, Trial | None]:
    """Run a script until it has made so many updates, or has ended; return its code and them."""
    process = subprocess.Popen(command, env=environment)
    steps: defaultdict[Path, list[Stepped]] = defaultdict(list)
    plans: dict[Path, Plan] = {}
    try:
        with closing(_events(process, Path(folder))) as events:
            for path, event in events:
                if isinstance(event, Begun):
                    plans[path] = Plan.unpacked(event.plan)
                elif isinstance(event, Stepped):
                    steps[path].append(event)
                if len(steps[path]) == updates:
                    break
    finally:
        code = process.poll()
        process.terminate()
        end_processes([process], Deadline(_END_TIMEOUT))
    # Of several pipelines the one that has trained longest counts.
    path, trained = max(steps.items(), key=lambda each: len(each[1]), default=(Path(), []))
    if len(trained) < 2:
        trial = None
    else:
        trial = Trial(plans[path].name, plans[path].per_update, points_of(trained))
    return shell_code(code) if code else 0, trial


def _events(
    process: subprocess.Popen[bytes], folder: Path
) -> Generator[tuple[Path, Event], None, None]:
    """Yield the events of a script's pipelines as they come, until it has ended."""
    with ExitStack() as opened:
        following: dict[Path, Following] = {}
        ended = False
        while not ended:
            with suppress(subprocess.TimeoutExpired):
                process.wait(_LOOK_S)
                ended = True  # and what it has written last is read once more
            for path in folder.glob(f"run*/{EVENTS}"):
                if path not in following:
                    following[path] = opened.enter_context(closing(Following(path.parent)))
                for event in following[path].new():
                    yield path, event
