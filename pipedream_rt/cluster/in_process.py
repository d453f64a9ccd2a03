"""Stages on threads of this process: every worker is a thread."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta

import torch

from pipedream_rt.cluster.base import Fail
from pipedream_rt.cluster.here import ClusterHere
from pipedream_rt.deadline import Deadline
from pipedream_rt.errors import PipelineClosed
from pipedream_rt.lifecycle import Lifecycle
from pipedream_rt.schedules import Plan
from pipedream_rt.stage.seeds import kept_generator_state
from pipedream_rt.transport.base import Receive
from pipedream_rt.transport.memory import MemoryTransport

_log = logging.getLogger(__name__)

_STOP_TIMEOUT = timedelta(seconds=5)
"""For the stages to end the action at hand. A thread that takes longer cannot be killed."""

_LOOK_S = 0.1
"""How often a stage that waits for its turn looks whether the pipeline is closing."""


class _Baton:
    """Lets one thread of the process run at a time: the user's own or that of one worker.

    torch has one default random generator in a process. A stage seeds it for every layer, and the
    user's loader may draw from it at any time; were both to run at once, the data would depend on
    timing. So stages compute only while the coordinator waits for them, one at a time, and leave
    the generator as they found it.

    Args:
        life: Of the cluster; no stage begins to compute when that is not open any more.
    """

    def __init__(self, life: Lifecycle) -> None:
        """Give the baton to the calling thread."""
        self._lock = threading.Lock()
        self._lock.acquire()
        self._given_away = False
        self._life = life

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Hold the baton, on a stage's thread.

        Raises:
            PipelineClosed: The pipeline is closing. The waiting stage looks for that at intervals,
                because a signal handler may close the pipeline at the instant at which the
                coordinator has taken the baton back.
        """
        while not self._lock.acquire(timeout=_LOOK_S):
            if not self._life.is_open:
                raise PipelineClosed("the pipeline was closed")
        try:
            with kept_generator_state():
                yield
        finally:
            self._lock.release()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Give the baton away, on the coordinator's thread.

        Inside another `waiting`, as when a signal handler closes the pipeline, it does nothing.
        After an error it waits for the baton for one second only: a stage that is stuck must not
        hold the error back.
        """
        if self._given_away:
            yield
            return
        self._given_away = True
        self._lock.release()
        try:
            yield
        except BaseException:
            self._given_away = not self._lock.acquire(timeout=1)
            raise
        self._lock.acquire()
        self._given_away = False


class InProcessCluster(ClusterHere):
    """Every worker is a thread of this process.

    The threads are daemons, though `close` joins them: the interpreter joins all other threads
    before it runs what closes a pipeline that its user forgot to close.

    Args:
        plan: Which workers there are, and which stages each hosts.
        receive: Takes messages for the coordinator.
        fail: Called with the error when the coordinator's messages cannot be handed over.
        generation: Number of this group in the process.
        timeout: How long to wait for a message that is sure to come.
        threads: Number of threads for torch's own parallel loops.
        shuffle_seed: See `MemoryTransport`.
        transport: Carries the messages; None for a `MemoryTransport` with that seed.
        exclusive: Whether one stage computes at a time, and only while the coordinator waits. False
            is for stages that draw no random numbers, which then compute side by side.
    """

    def __init__(
        self,
        plan: Plan,
        receive: Receive,
        fail: Fail,
        *,
        generation: int,
        timeout: timedelta,
        threads: int,
        shuffle_seed: int | None = None,
        transport: MemoryTransport | None = None,
        exclusive: bool = True,
    ) -> None:
        """Start the threads."""
        self._life = Lifecycle("the cluster")
        self._baton = _Baton(self._life)
        self._torch_threads = torch.get_num_threads()
        super().__init__(
            plan,
            transport or MemoryTransport(shuffle_seed),
            receive,
            fail,
            generation=generation,
            timeout=timeout,
            threads=threads,
            computing=self._baton.computing if exclusive else nullcontext,
        )
        self._threads = []
        for host, name in zip(self._hosts, self.names, strict=True):
            self._open(host, host.inbox.put, host.inbox.close)
            self._threads.append(threading.Thread(target=host.serve, name=name, daemon=True))
        for thread in self._threads:
            thread.start()

    def waiting(self) -> AbstractContextManager[None]:
        """See `Cluster.waiting`."""
        return self._baton.waiting()

    def close(self) -> None:
        """See `Cluster.close`."""
        if not self._life.begin_closing():
            return
        for host in self._hosts:
            host.inbox.close(PipelineClosed("the pipeline was closed"))
        deadline = Deadline(_STOP_TIMEOUT)
        with self.waiting():
            for thread in self._threads:
                thread.join(deadline.remaining_s())
                if thread.is_alive():
                    _log.warning("%s computes without end and is left behind", thread.name)
            self.transport.close()
        torch.set_num_threads(self._torch_threads)
        self._life.close()

    def kill(self) -> None:
        """See `Cluster.kill`; a thread cannot be killed, so this is `close`."""
        self.close()
