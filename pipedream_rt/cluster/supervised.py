"""The workers of a pipeline that an engine places for it, over all of its generations."""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import ExitStack
from importlib import import_module

from pipedream_rt.cluster.addresses import joined, listening
from pipedream_rt.cluster.base import Cluster, ClusterSpec
from pipedream_rt.cluster.engines.base import Supervisor
from pipedream_rt.cluster.environment import tls_of_environment
from pipedream_rt.cluster.keys import Secret
from pipedream_rt.cluster.processes import ProcessCluster
from pipedream_rt.deadline import Deadline

_BY_NAME = {"ray": ("pipedream_rt.cluster.engines.ray", "RayWorkers")}
"""The engines that have a name, and what makes each; a name is a value of ``workers``."""


def supervised(workers: object) -> Supervised | None:
    """Return the workers of an engine; None if the argument means no engine.

    Args:
        workers: See `Pipeline`.

    Raises:
        ConfigError: What the engine needs is not installed.
    """
    if isinstance(workers, str) and workers in _BY_NAME:
        module, name = _BY_NAME[workers]
        make: Callable[[], Supervisor] = getattr(import_module(module), name)
        return Supervised(make())
    return Supervised(workers) if isinstance(workers, Supervisor) else None


class Supervised:
    """Makes a cluster of each generation, with workers that stay from one to the next.

    The script listens all the time, so that a worker that comes back waits for the next generation.

    Args:
        supervisor: The engine.
    """

    def __init__(self, supervisor: Supervisor) -> None:
        """Ask the engine for nothing yet."""
        self._supervisor = supervisor
        self._secret = Secret.generated()
        self._open = ExitStack()
        self._listener: socket.socket | None = None

    def __call__(self, spec: ClusterSpec) -> Cluster:
        """Start the workers of a generation.

        Raises:
            ConfigError: The engine cannot be reached.
            RendezvousTimeout: Some workers could not be placed, or did not join in time.
            WorkerLost: A worker died on the way.
        """
        if self._listener is None:
            self._listener = self._open.enter_context(listening(self._supervisor.host(), 0))
        host, port = self._listener.getsockname()[:2]
        deadline = Deadline(spec.start_timeout)
        self._supervisor.start(spec.plan.workers, joined(host, port), self._secret, deadline)
        return ProcessCluster(
            spec,
            listener=self._listener,
            key=self._secret.job_key(),
            supervisor=self._supervisor,
            tls=tls_of_environment(),
        )

    def stop(self) -> None:
        """End all workers. Idempotent."""
        self._open.close()
        self._supervisor.stop()
