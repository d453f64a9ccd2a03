"""A model of emulated layers (see workload.py), and links that are slow.

Both take time and no processor, so 8 to 32 stages run at their own speed on 2 cores, and what is
measured is the runtime: its messages, its waits, its schedule. Kernels that compete for memory or
caches are not emulated.
"""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from torch import nn
from workload import EmulatedLayer

from pipedream_rt.cluster.interface import ClusterSpec
from pipedream_rt.errors import PipelineClosed
from pipedream_rt.lifecycle import Lifecycle
from pipedream_rt.messages.message import Message
from pipedream_rt.schedules import COORDINATOR
from pipedream_rt.serial.in_process import ClusterHere
from pipedream_rt.serial.transport import MemoryTransport


def emulated_model(stages: int, width: int, forward_s: float, backward_s: float) -> nn.Sequential:
    """One layer for each stage, all alike."""
    return nn.Sequential(*(EmulatedLayer(i, width, forward_s, backward_s) for i in range(stages)))


class NarrowLinks(MemoryTransport):
    """An in-memory transport on which messages between stages take their time, one after another.

    Args:
        rate: Bits per second in each direction; 0 for as many as there are.
        delay_s: Seconds under way besides.
    """

    def __init__(self, rate: float, delay_s: float) -> None:
        super().__init__()
        self._rate, self._delay_s = rate, delay_s
        self._free: dict[tuple[int, int], float] = {}
        self._on_their_way: list[tuple[float, int, Message]] = []
        self._numbers = itertools.count()
        self._sent = threading.Condition()
        self._over = False
        self._carrier = threading.Thread(target=self._carry, name="narrow-links", daemon=True)
        self._carrier.start()

    def deliver(self, message: Message) -> None:
        """Let a message arrive, at once or when its link lets it."""
        with self._sent:
            due = self.arrives(message, time.monotonic())
            if due is not None:
                heapq.heappush(self._on_their_way, (due, next(self._numbers), message))
                self._sent.notify()
        if due is None:
            super().deliver(message)

    def arrives(self, message: Message, now: float) -> float | None:
        """Return when the wire has room and the message is over; None for at once.

        One call at a time; what the coordinator sends or gets has another wire.
        """
        way = (message.sender, message.to)
        if COORDINATOR in way:
            return None
        size = sum(tensor.nbytes for tensor in message.tensors)
        transfer_s = size * 8 / self._rate if self._rate else 0.0
        self._free[way] = sent = max(now, self._free.get(way, 0.0)) + transfer_s
        return sent + self._delay_s

    def _carry(self) -> None:
        """Deliver what is due, until closed."""
        while True:
            with self._sent:
                while not self._over and not self._is_due():
                    wait_s = (
                        self._on_their_way[0][0] - time.monotonic() if self._on_their_way else None
                    )
                    self._sent.wait(wait_s)
                if self._over:
                    return
                message = heapq.heappop(self._on_their_way)[2]
            super().deliver(message)

    def _is_due(self) -> bool:
        """Whether a message has been under way for long enough."""
        return bool(self._on_their_way) and self._on_their_way[0][0] <= time.monotonic()

    def close(self) -> None:
        """Stop; what is under way is lost."""
        super().close()
        with self._sent:
            self._over = True
            self._sent.notify()
        self._carrier.join()


class Threads(ClusterHere):
    """Every worker is a thread, and all compute side by side: stages that draw no random numbers.

    Args:
        spec: What the cluster is told.
        transport: Carries the messages.
    """

    def __init__(self, spec: ClusterSpec, transport: MemoryTransport) -> None:
        self._life = Lifecycle("the cluster")
        super().__init__(spec, transport)
        self._threads = []
        for host, name in zip(self._hosts, self.names, strict=True):
            self._open(host, host.inbox.put, host.inbox.close)
            self._threads.append(threading.Thread(target=host.serve, name=name, daemon=True))
        for thread in self._threads:
            thread.start()

    def waiting(self) -> Any:
        """See `Cluster.waiting`."""
        return nullcontext()

    def close(self) -> None:
        """See `Cluster.close`."""
        if not self._life.begin_closing():
            return
        for host in self._hosts:
            host.inbox.close(PipelineClosed("the pipeline was closed"))
        for thread in self._threads:
            thread.join(10)
        self.transport.close()
        self._life.close()

    def kill(self) -> None:
        """See `Cluster.kill`."""
        self.close()


def narrow_links(rate: float, delay_s: float) -> Callable[[ClusterSpec], Threads]:
    """Return what ``workers=`` takes: every stage is a thread, and links are `NarrowLinks`."""
    return lambda spec: Threads(spec, NarrowLinks(rate, delay_s))
