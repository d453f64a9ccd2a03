"""The collection of the workers' spans into one trace, on the coordinator's clock."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from pipedream_rt.coordinator.feed.feeder import Feeder
from pipedream_rt.coordinator.recovery.group import WorkerGroup
from pipedream_rt.errors import ConfigError
from pipedream_rt.messages.message import CommandName
from pipedream_rt.schedules import Plan
from pipedream_rt.tracing.clock import ClockMap, Reading
from pipedream_rt.tracing.spans import SPAN, Recorder, Spans
from pipedream_rt.tracing.trace import Trace, WorkerFacts


class TraceCollection:
    """Collects the trace of a run; without a recorder nothing is recorded."""

    def __init__(self, group: WorkerGroup, feeder: Feeder, recorder: Recorder | None) -> None:
        self._group = group
        self._feeder = feeder
        self._recorder = recorder
        self._clocks: dict[int, list[Reading]] = {}
        if recorder is not None:
            self._first_readings()  # early, since the drift is interpolated up to the last ones

    @property
    def is_recorded(self) -> bool:
        return self._recorder is not None

    def _first_readings(self) -> list[Reading]:
        """Return the first reading of each worker's clock in this generation."""
        generation = self._group.recovery.generation
        if generation not in self._clocks:
            self._clocks[generation] = self._group.call(lambda cluster: cluster.clocks())
        return self._clocks[generation]

    def collect(self) -> Trace:
        """Flush, and return the trace of the run so far; see `Pipeline.trace`."""
        if self._recorder is None:
            raise ConfigError(
                "nothing is recorded; give observe=Observe(trace=...), True or a file"
            )
        self._feeder.flush()
        recorded = self._group.command(CommandName.TRACE)
        first = self._first_readings()
        last = self._group.call(lambda cluster: cluster.clocks())
        return put_together(
            self._group.plan,
            self._feeder.credits,
            self._group.cluster.names,
            recorded,
            self._recorder,
            list(zip(first, last, strict=True)),
        )


def put_together(
    plan: Plan,
    credits: int,
    names: Sequence[str],
    recorded: Sequence[dict[str, Any]],
    coordinator: Recorder,
    clocks: Sequence[tuple[Reading, Reading]],
) -> Trace:
    """Put the spans of all stages and of the coordinator together into one trace."""
    maps = [ClockMap(first, last) for first, last in clocks]
    parts: list[Spans] = [coordinator.spans().copy()]
    on_devices: list[Spans] = []
    for stage, reply in enumerate(recorded):
        to_ours = maps[plan.worker_of(stage)].to_ours
        for found, key in ((parts, "spans"), (on_devices, "device_spans")):
            # A copy, since a view of bytes is read-only.
            spans = np.frombuffer(reply[key].numpy().tobytes(), dtype=SPAN).copy()
            for name in ("ready", "arrived", "start", "end"):
                spans[name] = to_ours(spans[name])
            found.append(spans)
    workers = tuple(
        WorkerFacts(
            name=name,
            dropped=int(recorded[plan.first_of(worker)]["dropped"]),
            clock_error_ns=maps[worker].error,
            peak_memory_bytes=int(recorded[plan.first_of(worker)]["peak_memory_bytes"]),
        )
        for worker, name in enumerate(names)
    )
    return Trace(
        plan=plan,
        credits=credits,
        simulated=False,
        workers=workers,
        spans=np.concatenate(parts),
        device_spans=np.concatenate(on_devices),
        stage_bytes=tuple(
            int(recorded[plan.address_of(stage)]["parameter_bytes"])
            for stage in range(plan.num_stages)
        ),
    )
