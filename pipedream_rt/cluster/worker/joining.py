"""How a worker finds its coordinator and joins its group, and how often it tries.

Imports torch only when a coordinator has admitted the worker, so a waiting worker is small.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from pipedream_rt.cluster.control import Control
from pipedream_rt.cluster.dial import (
    DialOptions,
    NotAdmitted,
    NotOfThisJob,
    ask_to_join,
    expect,
    pause,
    reached,
)
from pipedream_rt.cluster.identity import Secret
from pipedream_rt.cluster.worker_life import WorkerEnd
from pipedream_rt.deadline import Deadline
from pipedream_rt.errors import PeerLost, TransportError
from pipedream_rt.software import processor
from pipedream_rt.telling import log_of
from pipedream_rt.transport.fence import obstacle
from pipedream_rt.transport.limits import ensure_descriptors

_log = log_of("pipedream_rt.worker")

_LONGEST_PAUSE_S = 30.0
"""Longest pause between two attempts to join a coordinator that does not admit the worker."""

_EAGER_S = 120.0
"""Seconds for which a worker that has lost its group tries often, since the group waits for it."""

_SHORTEST_EAGER_S, _LONGEST_EAGER_S = 0.1, 0.5


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """The settings of a worker, from its command.

    Attributes:
        name: Unique in the job.
        threads: Number of threads for torch's own parallel loops.
        secret: The secret of the job; None over a connection within the machine, which brings it.
        bind: Network interface to listen on for other workers; None for loopback.
        job: The public name of the job, where the secret does not tell; empty if neither does.
    """

    name: str
    threads: int
    secret: Secret | None = None
    bind: str | None = None
    job: str = ""


@dataclass(frozen=True, slots=True)
class JoinAttempts:
    """How often a worker has failed to join, and whether a group waits for it.

    Attributes:
        failures: Failed attempts in a row.
        lost: When the worker lost its last group, in seconds of the monotonic clock of this
            machine; None if it never was in one.
    """

    failures: int = 0
    lost: float | None = None

    def failed(self) -> JoinAttempts:
        """Count one more failure."""
        return replace(self, failures=self.failures + 1)

    def after(self, code: int, now: float) -> JoinAttempts:
        """Count an attempt by its exit code: a failure before a group, or the end of a group."""
        if code == WorkerEnd.AGAIN:
            return self.failed()
        return JoinAttempts(lost=now if code == WorkerEnd.COORDINATOR_LOST else None)

    def group_waits(self, now: float) -> bool:
        """Whether the worker has lost its group so recently that a recovery waits for it."""
        return self.lost is not None and now - self.lost < _EAGER_S

    def pause_s(self, now: float) -> float:
        """Return the seconds to wait before the next attempt: exponential backoff.

        A worker that has lost its group comes back at once and tries often, since a recovery waits
        for it.
        """
        if not self.failures:
            return 0.0
        first, factor, longest = (
            (_SHORTEST_EAGER_S, 1.5, _LONGEST_EAGER_S)
            if self.group_waits(now)
            else (1.0, 2.0, _LONGEST_PAUSE_S)
        )
        # The exponent is bounded, since a power that is too large for a float raises.
        return float(min(longest, first * factor ** min(self.failures - 1, 60)))


def serve_at(options: DialOptions, settings: WorkerSettings, tries: JoinAttempts) -> int:
    """Join a coordinator once it listens and admits the worker; host stages until it ends them.

    Return the exit code.
    """
    is_logged = tries.failures > 0
    if options.warm or tries.group_waits(time.monotonic()):
        _import_torch()  # now, while the coordinator may be out of reach
    while True:
        pause(min(tries.pause_s(time.monotonic()), options.longest_pause_s))
        try:
            control = reached(options, "the coordinator", settings.secret)
            try:
                return serve(control, settings, options.persist)
            finally:
                control.close()
        except NotAdmitted as problem:
            if not options.persist:
                raise
            if not is_logged:
                level = logging.WARNING if isinstance(problem, NotOfThisJob) else logging.INFO
                _log.log(level, "%s; trying again, now and then", problem)
                is_logged = True
            tries = tries.failed()


def serve(control: Control, settings: WorkerSettings, returns: bool = False) -> int:
    """Join the group of a coordinator; host stages until it ends them.

    Return the exit code. ``returns``: whether the worker joins again by itself when a generation
    ends.
    """
    secret = ask_to_join(control, settings.name, settings.secret, returns, settings.job)
    host_stage = _import_torch()  # now, while the others join: a waiting worker stays small
    ensure_descriptors(0)  # for the sockets with which `obstacle` tries what this process may do
    try:
        control.send({"type": "ready", "processor": processor(), "obstacle": obstacle()})
        welcome = control.receive(Deadline(None))
    except PeerLost:
        _log.info("the job ended before it began")
        return WorkerEnd.AGAIN
    except TransportError as error:
        raise NotAdmitted(f"the coordinator's answer to 'ready' cannot be read: {error}") from error
    if welcome["type"] in ("stop", "exit"):
        _log.info("the coordinator gave up before all workers had joined")
        return WorkerEnd.AGAIN
    expect(welcome, "welcome")
    try:
        return host_stage(control, welcome, settings.threads, secret, settings.bind)
    except PeerLost as error:
        _log.error("%s", error)
        return WorkerEnd.COORDINATOR_LOST


def _import_torch() -> Callable[..., int]:
    """Import torch, which takes seconds, and return the life of a worker in a group."""
    # torch reads it when imported. A worker need not log that other processes end.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    # It imports torch, for which a worker that waits has no use.
    from pipedream_rt.cluster.worker.process import host_stage

    life: Callable[..., int] = host_stage
    return life
