"""Puts together what the workers have recorded, on one clock."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from pipedream_rt.observe.clock import ClockMap, Reading
from pipedream_rt.observe.spans import SPAN, Recorder, Spans
from pipedream_rt.observe.trace import Trace, WorkerFacts
from pipedream_rt.schedules import Schedule

SPANS_KEPT = 1 << 17
"""Spans that each process keeps: the last 131,072 of each worker, 8 MiB."""


def put_together(
    schedule: Schedule,
    credits: int,
    names: Sequence[str],
    recorded: Sequence[dict[str, Any]],
    coordinator: Recorder,
    clocks: Sequence[tuple[Reading, Reading]],
) -> Trace:
    """Make a trace.

    Args:
        schedule: Of the run.
        credits: Mini-batches injected ahead.
        names: Of the workers.
        recorded: What each stage replied to the command ``trace``.
        coordinator: What was recorded here.
        clocks: By worker, a reading at the start and one at the end.

    Returns:
        The trace, on the coordinator's clock.
    """
    shape = schedule.shape
    maps = [ClockMap(first, last) for first, last in clocks]
    parts: list[Spans] = [coordinator.spans().copy()]
    for stage, reply in enumerate(recorded):
        spans = np.frombuffer(reply["spans"].numpy().tobytes(), dtype=SPAN).copy()
        to_ours = maps[shape.worker_of(stage)].to_ours
        for name in ("ready", "arrived", "start", "end"):
            spans[name] = to_ours(spans[name])
        parts.append(spans)
    workers = tuple(
        WorkerFacts(
            name=name,
            dropped=int(recorded[worker]["dropped"]),
            clock_error_ns=maps[worker].error,
            peak_memory_bytes=int(recorded[worker]["peak_memory_bytes"]),
        )
        for worker, name in enumerate(names)
    )
    return Trace(
        schedule=schedule.name,
        shape=shape,
        credits=credits,
        simulated=False,
        workers=workers,
        spans=np.concatenate(parts),
        stage_bytes=tuple(int(reply["parameter_bytes"]) for reply in recorded),
    )
