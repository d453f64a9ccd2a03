"""A schedule that does again what a trace says was done: same order, same versions."""

from __future__ import annotations

from collections.abc import Iterator

from pipedream_rt.errors import ConfigError, TraceError
from pipedream_rt.observe.trace import CODES, Trace
from pipedream_rt.schedules import Action, Kind, Shape


class Replay:
    """The order and the versions of a trace, as a schedule for `Pipeline` or the simulator.

    The schedule ends where the trace ends. It has the slack that the trace's own plan had.

    Args:
        trace: Of a run from its first micro-batch on, with nothing overwritten.

    Raises:
        TraceError: It does not begin with micro-batch 0, or spans are missing.
    """

    def __init__(self, trace: Trace) -> None:
        """Take the actions and the versions out of the spans."""
        if trace.dropped:
            raise TraceError(
                f"the trace cannot be replayed: its first {trace.dropped} spans were overwritten"
            )
        plan = trace.plan
        self.name = f"replay of {plan.name}"
        self._shape = plan.shape
        self._orders = [list(trace.actions(w)) for w in range(plan.workers)]
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
        """See `Order.order`."""
        k = shape.per_update
        for action in self._orders[worker]:
            if action.index >= (start // k if action.kind is Kind.STEP else start):
                yield action

    def require(self, shape: Shape) -> None:
        """The shape must be the trace's."""
        if shape != self._shape:
            raise ConfigError(f"the trace is of {self._shape}, this is {shape}")


class _Recorded:
    """The versions that were read; each is kept as long as it is needed for that."""

    def __init__(self, reads: list[list[int]], kept: list[int]) -> None:
        """Args: reads: By stage and micro-batch. kept: The most, by stage."""
        self._reads = reads
        self._kept = kept

    def reads(self, stage: int, shape: Shape, micro_batch: int) -> int:
        """See `VersionPolicy.reads`; past the end nothing is read, so no old version is needed."""
        recorded = self._reads[stage]
        if micro_batch < len(recorded):
            return recorded[micro_batch]
        return micro_batch // shape.per_update + 1

    def kept(self, stage: int, shape: Shape) -> int:
        """See `VersionPolicy.kept`."""
        return self._kept[stage]

    def require(self, shape: Shape) -> None:
        """See `VersionPolicy.require`; the order says what is to be said."""
