"""The latency and bandwidth between two machines, measured over a link as that of a job."""

from __future__ import annotations

import queue
import time
from collections.abc import Mapping

import torch

from pipedream_rt.doctor.judgement import MeasuredLink
from pipedream_rt.transport.link import Frame
from pipedream_rt.transport.links import Connections, Links

_ASKS, _ANSWERS = range(2)
"""Kinds of frames."""

_TIMEOUT_S = 10.0
_TURNS = 20
_SIZES = (1 << 20, 1 << 24)
"""Bytes that are sent; the larger number only if the smaller one took no more than `_LONG_S`."""

_LONG_S = 0.5


class Probe:
    """Measures the links of this machine to others, and answers their measurements.

    ``problems`` says by rank why others were not reached.
    """

    def __init__(self, connections: Connections, problems: Mapping[int, str]) -> None:
        self._problems = dict(problems)
        self._answers: queue.SimpleQueue[tuple[int, str]] = queue.SimpleQueue()
        self._links = Links(connections, self._receive, self._lost)

    def _receive(self, rank: int, frame: Frame) -> None:
        """Answer a question, or note an answer. On the thread of the links."""
        if frame.kind == _ASKS:
            self._links.send(rank, _ANSWERS, b"")
        else:
            self._answers.put((rank, ""))

    def _lost(self, rank: int, reason: str) -> None:
        self._problems[rank] = reason
        self._answers.put((rank, reason))

    def measure(self, rank: int) -> MeasuredLink:
        """Return the measured link to another machine."""
        try:
            trips = [self._trip(rank, 0) for _ in range(_TURNS)]
            for size in _SIZES:
                took_s = self._trip(rank, size)
                if took_s > _LONG_S:
                    break
        except ConnectionError as error:
            return MeasuredLink(None, 0.0, str(error))
        round_s = min(trips)  # the one that was disturbed the least
        return MeasuredLink(round_s / 2, size / max(took_s - round_s, 1e-9))

    def _trip(self, rank: int, size: int) -> float:
        """Send so many bytes, and return the seconds until the other end has confirmed them."""
        began, body = time.perf_counter(), torch.empty(size, dtype=torch.uint8)
        if (reason := self._links.send(rank, _ASKS, b"", [body])) is not None:
            raise ConnectionError(self._problems.get(rank, reason))
        while True:
            try:
                answered, reason = self._answers.get(timeout=_TIMEOUT_S)
            except queue.Empty:
                raise ConnectionError(f"nothing was answered within {_TIMEOUT_S:g} s") from None
            if answered == rank:  # that of another one came too late for its own turn
                break
        if reason:
            raise ConnectionError(reason)
        return time.perf_counter() - began

    def close(self) -> None:
        self._links.close()
