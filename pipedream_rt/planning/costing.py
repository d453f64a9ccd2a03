"""The costs of a stage in our runtime: its period, its memory, and the messages behind it.

Times are in seconds for each micro-batch that the whole pipe does, sizes in bytes. A stage has r
replicas; micro-batch m goes to replica m mod r. With k micro-batches per update and ``after``
workers on the stages behind it:

    busy       compute / (r speed) + step / (k speed)
    period     max(busy, exchange / min(k, r)), or busy + exchange / k with a flush
    exchange   (r-1) P / B + L               per update: each replica sends its gradients to all
    transfer   Y / (min(r, r') B)            each way, between r replicas and r' behind them
    w          ceil(after / r)               warm-up forwards of each replica
    in flight  w + 1                         on each replica
    lag        w if r = 1, else r (w + 1)    micro-batches from a forward to the update it reads
    versions   ceil(lag / k) + 1             asynchronous; 2 in 2bw, for lag < k; 1 with a flush
    gradients  1 if r = 1, else r + 2        those summed, handed over, received, and their sum
    memory     (versions + gradients) P + U + O + (w + 1) A + 2 (X + Y), and that of the process

So that replicas can compute while their gradients are sent, each does one micro-batch more before
it reads the update. P are the bytes of the weights, U of frozen weights and buffers, O of
the optimizer's state, A of what a forward keeps, X and Y those that come in and go out; B is the
bandwidth of a link, and L its latency. The slowest replica of a stage counts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from pipedream_rt.errors import ConfigError
from pipedream_rt.planning.cuts import Cuts, Floats, spans
from pipedream_rt.planning.machines import Machines
from pipedream_rt.schedules.shape import lag_of, warm_up_of

EVERY: Any = np.s_[:, :]
"""Every span. ``where`` selects spans by row and column (`cuts.spans`): all, a row, or one."""

SCHEDULES = ("async-1f1b", "2bw", "1f1b")
"""The schedules that plans are made for."""


@dataclass(frozen=True)
class Costing:
    """The costs of all stages that a model can have.

    Attributes:
        per_update: The number of micro-batches per update, k.
        copies: Copies of the weights that corrections for staleness keep.
    """

    cuts: Cuts
    machines: Machines
    schedule: str = "async-1f1b"
    per_update: int = 1
    copies: float = 0.0

    def __post_init__(self) -> None:
        """Refuse an unknown schedule and numbers out of range."""
        if self.schedule not in SCHEDULES:
            raise ConfigError(
                f"plans are made for {', '.join(SCHEDULES)}, not for {self.schedule!r}"
            )
        if self.per_update < 1:
            raise ConfigError(f"micro-batches per update must be at least 1, not {self.per_update}")
        if not 0 <= self.copies < math.inf:
            raise ConfigError(f"copies must be a number of at least 0, not {self.copies}")

    # -- what depends on the layers alone: by row (cut before, plus one) and cut behind --------
    # Letters as P are those of the formulas above.

    def _spans(self, *names: str) -> Floats:
        """Return the sums of some costs over each span of layers."""
        return spans(np.sum([self.cuts.sums(name) for name in names], axis=0))

    @cached_property
    def _is_stage(self) -> Floats:
        """0 for each span that can be a stage, else infinite."""
        possible = np.vstack([np.ones(len(self.cuts), bool), self.cuts.includes])
        return np.where(possible, 0.0, math.inf)

    @cached_property
    def _compute(self) -> Floats:
        """Seconds of a forward and a backward."""
        return self._spans("forward", "backward_input", "backward_weight")

    @cached_property
    def _forward(self) -> Floats:
        return self._spans("forward")

    @cached_property
    def _step(self) -> Floats:
        """Seconds of an update."""
        return self._spans("step")

    @cached_property
    def _weights(self) -> Floats:
        """P, in bytes."""
        return self._spans("parameter_bytes")

    @cached_property
    def _fixed(self) -> Floats:
        """U + O + 2 (X + Y), and the bytes of a process without a stage."""
        passing = self.cuts.passing
        messages = np.append(0.0, passing)[:, None] + passing[None, :]
        held = self._spans("frozen_bytes", "optimizer_bytes") + self.cuts.profile.process_bytes
        return held + 2 * messages

    @cached_property
    def _saved(self) -> Floats:
        """A, in bytes."""
        return self._spans("saved_bytes")

    # -- stages --------------------------------------------------------------------------------
    # `after` counts the workers on the stages behind, and the slack of the hops up to there.
    # `start` and `end` are the cuts around a stage; start is -1 at the beginning of the model.

    def in_flight(self, replicas: int, after: int) -> int:
        """Return the most micro-batches in flight on a replica."""
        most = warm_up_of(replicas, after) + 1
        return min(most, -(-self.per_update // replicas)) if self.flushes else most

    def is_possible(self, replicas: int, after: int) -> bool:
        """Whether the schedule allows it: 2bw, with its two versions, needs a lag below k."""
        return self.schedule != "2bw" or lag_of(replicas, after) < self.per_update

    def staleness(self, replicas: int, after: int) -> int:
        """Return the most updates between the version that is read and the one that is updated."""
        if self.schedule != "async-1f1b":
            return int(self.schedule == "2bw")
        return -(-lag_of(replicas, after) // self.per_update)

    def versions(self, replicas: int, after: int) -> int:
        """Return the weight versions that a replica keeps."""
        return self.staleness(replicas, after) + 1

    def period(self, workers: Sequence[int], where: Any = EVERY) -> Floats:
        """Return the period of each span as a stage on some workers; infinite if it is none."""
        slowest, k = self._slowest(workers), self.per_update
        compute, step = self._compute[where], self._step[where]
        busy = compute / (len(workers) * slowest) + step / (k * slowest)
        exchange = self._exchange(workers, where)
        if self.flushes:  # the pipe is empty, so nothing hides the exchange
            together = busy + exchange / k
        else:  # it must end within one more micro-batch of each replica, and before the next one
            together = np.maximum(busy, exchange / min(k, len(workers)))
        found: Floats = together + self._is_stage[where]
        return found

    def _slowest(self, workers: Sequence[int]) -> float:
        """Return the speed of the slowest of some workers."""
        return min(self.machines.workers[w].speed for w in workers)

    def _exchange(self, workers: Sequence[int], where: Any) -> Floats:
        """Return the seconds of the all-reduce of the gradients of each span."""
        count, weights = len(workers), self._weights[where]
        sent = (count - 1) * weights
        latency = self.machines.latency_of(workers) * (count > 1)
        found: Floats = sent / self.machines.bandwidth_of(workers) + latency * (weights > 0)
        return found

    @property
    def flushes(self) -> bool:
        """Whether the pipe is empty at every update."""
        return self.schedule == "1f1b"

    def alone(self, workers: Sequence[int], start: int, end: int) -> tuple[float, float]:
        """Return the seconds of a forward, and of a backward, of a stage on its slowest worker."""
        both, forward = self._compute[start + 1, end], self._forward[start + 1, end]
        speed = self._slowest(workers)
        return float(forward) / speed, float(both - forward) / speed

    def exchange(self, workers: Sequence[int], start: int, end: int) -> float:
        """Return the seconds of an all-reduce of the gradients of a stage."""
        return float(self._exchange(workers, (start + 1, end)))

    def update(self, workers: Sequence[int], start: int, end: int) -> float:
        """Return the seconds of an update of a stage, without the exchange of gradients."""
        return float(self._step[start + 1, end]) / self._slowest(workers)

    def latency(self, workers: Sequence[int], following: Sequence[int], cut: int) -> float:
        """Return the seconds that one message takes from a stage to the next, or back."""
        both = [*workers, *following]
        seconds = self._crossing(self.machines.bandwidth_of(both))
        return self.machines.latency_of(both) + float(seconds[cut])

    def memory(self, replicas: int, after: int, where: Any = EVERY) -> Floats:
        """Return the memory that each span takes on a replica."""
        gradients = 1 if replicas == 1 else replicas + 2
        copies = self.versions(replicas, after) + gradients + self.copies * (after > 0)
        in_flight = self.in_flight(replicas, after)
        weights, saved, fixed = self._weights[where], self._saved[where], self._fixed[where]
        found: Floats = copies * weights + in_flight * saved + fixed
        return found

    def room(self, workers: Sequence[int]) -> float:
        """Return the memory of the smallest of some workers."""
        return min(self.machines.workers[w].memory for w in workers)

    def transfers(self, workers: Sequence[int], following: Sequence[int]) -> Floats:
        """Return, by cut, the seconds per micro-batch that a link between two stages is busy."""
        seconds = self._crossing(self.machines.bandwidth_of([*workers, *following]))
        return seconds / min(len(workers), len(following))

    def _crossing(self, bandwidth: float) -> Floats:
        """Return, by cut, the seconds in which a value crosses, coded where that is sooner."""
        # Coding counts as time of the link, which is more than it costs where both ends would idle.
        plain: Floats = self.cuts.passing / bandwidth
        coded = self._coded(bandwidth)
        return plain if coded is None else np.minimum(plain, coded)

    def _coded(self, bandwidth: float) -> Floats | None:
        """Return, by cut, the seconds in which a coded value crosses; None without a codec."""
        codec = self.machines.codec
        if codec is None:
            return None
        found: Floats = self.cuts.passing * (codec.ratio / bandwidth + codec.seconds_per_byte)
        return found

    def is_coded(self, workers: Sequence[int], following: Sequence[int], cut: int) -> bool:
        """Whether the codec pays on the links between two stages."""
        bandwidth = self.machines.bandwidth_of([*workers, *following])
        coded = self._coded(bandwidth)
        return coded is not None and bool(coded[cut] < self.cuts.passing[cut] / bandwidth)
