"""A schedule that repeats the order and the weight versions of a trace."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from pipedream_rt.errors import ConfigError, TraceError
from pipedream_rt.schedules import Action, Kind, Shape
from pipedream_rt.schedules.actions import OF_ORDERS
from pipedream_rt.tracing.trace import CODES, Trace


class Replay:
    """The order and the weight versions of a trace, as a schedule for `Pipeline` or the simulator.

    The schedule ends where the trace ends. It has the shape of the trace's plan, slack included.

    Args:
        trace: The trace of a run from its first micro-batch on, without overwritten spans.

    Attributes:
        name: The name for messages and traces.
        micro_batches: The number of micro-batches after which the schedule ends.
        versions: The version policy.
        takes_slack: True, because the order includes the slack of the trace.

    Raises:
        TraceError: The trace does not begin with micro-batch 0, or spans are missing.
    """

    def __init__(self, trace: Trace) -> None:
        if trace.dropped:
            raise TraceError(
                f"the trace cannot be replayed: its first {trace.dropped} spans were overwritten"
            )
        plan = trace.plan
        if plan.replicated:
            raise TraceError(
                "the trace cannot be replayed: its stages have replicas, which the schedules "
                "async-1f1b, 2bw, 1f1b and gpipe alone can have"
            )
        self.name = f"replay of {plan.name}"
        # The recorded order itself says where the pipe was flushed.
        self._shape = replace(trace.plan.shape, synchronous=0)
        self._orders = [
            [action for action in trace.actions(w) if action.kind in OF_ORDERS]  # the plan adds A
            for w in range(plan.workers)
        ]
        reads, kept = [], []
        for stage, spans in enumerate(trace.by_stage()):
            forwards = spans[spans["kind"] == CODES[Kind.FORWARD]]
            if not len(forwards) or forwards["index"].tolist() != list(range(len(forwards))):
                raise TraceError(
                    f"the trace cannot be replayed: the forwards of stage {stage} do not count "
                    "from 0 on without a gap"
                )
            reads.append(forwards["version"].tolist())
            kept.append(int(spans["kept"].max()))
        self.micro_batches = min(map(len, reads))
        self.versions = _Recorded(reads, kept)

    takes_slack = True

    def order(self, worker: int, shape: Shape, start: int) -> Iterator[Action]:
        """Yield the actions that a worker did from micro-batch ``start`` on."""
        k = shape.per_update
        for action in self._orders[worker]:
            if action.index >= (start // k if action.kind is Kind.STEP else start):
                yield action

    def require(self, shape: Shape) -> None:
        """Refuse a shape other than that of the trace.

        Raises:
            ConfigError: The shape is another one.
        """
        if shape != self._shape:
            raise ConfigError(
                f"the trace was made with {self._shape}, this pipeline has {shape}; give the same "
                f"numbers, and slack={list(self._shape.slack) or 0}"
            )


class _Recorded:
    """The version policy of a replay: the versions read, by stage and micro-batch."""

    def __init__(self, reads: list[list[int]], kept: list[int]) -> None:
        self._reads = reads
        self._kept = kept

    def reads(self, stage: int, shape: Shape, micro_batch: int) -> int:
        """Return the version that was read; past the end, one for which none older is kept."""
        recorded = self._reads[stage]
        if micro_batch < len(recorded):
            return recorded[micro_batch]
        return micro_batch // shape.per_update + 1

    def kept(self, stage: int, shape: Shape) -> int:
        return self._kept[stage]

    def require(self, shape: Shape) -> None:
        """Accept every shape; `Replay.require` checks it."""
