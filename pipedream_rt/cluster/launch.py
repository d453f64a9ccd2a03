"""Decides from the ``workers`` argument and the environment where the stages run."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from datetime import timedelta
from importlib import import_module

from pipedream_rt.cluster.addresses import listening, parse_address
from pipedream_rt.cluster.engines.interface import Supervisor
from pipedream_rt.cluster.environment import (
    ENGINE,
    LISTEN_FD,
    NPROC,
    NPROC_HERE,
    SECRET_FD,
    SUPERVISOR_FD,
    count_of_environment,
    read_secret,
    secret_of_environment,
    socket_of_environment,
    tls_of_environment,
)
from pipedream_rt.cluster.interface import Cluster, ClusterSpec
from pipedream_rt.cluster.keys import JobKey, Secret
from pipedream_rt.cluster.listener import Listener
from pipedream_rt.cluster.processes import ProcessCluster
from pipedream_rt.cluster.supervision import ByHand, ByLauncher
from pipedream_rt.cluster.torchrun import (
    become_worker,
    is_one_machine,
    is_other_rank,
    start_under_torchrun,
    under_torchrun,
    world_size,
)
from pipedream_rt.deadline import Deadline
from pipedream_rt.errors import ConfigError, PeerLost, PipelineClosed
from pipedream_rt.job.options import Workers
from pipedream_rt.lifecycle import close_in_forked_children
from pipedream_rt.serial.cluster import SerialCluster

_REPLACE_TIMEOUT = timedelta(seconds=30)
"""For `pipedream-rt run` to kill its workers and start others."""

_secret_of_run: Secret | None = None
"""The secret that `pipedream-rt run` has made, kept since a pipe can be read only once."""


_ENGINES = {"ray": ("pipedream_rt.cluster.engines.ray", "RayWorkers")}
"""By the name that ``workers`` may have: module and class of an engine, imported when asked for."""


class Launcher:
    """Starts the workers of a pipeline, one generation after another."""

    def __init__(self, workers: Workers) -> None:
        self._workers = workers
        self._engine = _engine_of(workers)
        self._secret = Secret.generated()
        self._open = ExitStack()
        self._door: Listener | None = None
        self._is_closed = self._has_started = False

    def start(self, spec: ClusterSpec) -> Cluster:
        """Start or await the workers of a generation; under torchrun, returns on rank 0 alone."""
        if self._is_closed:
            raise PipelineClosed("the pipeline was closed")
        spec = replace(spec, recovers=self._has_started)
        self._has_started = True
        workers = self._workers
        if self._engine is not None:
            return self._ask_engine(self._engine, spec)
        if workers == "serial":
            return SerialCluster(spec)
        if callable(workers):
            made: Cluster = workers(spec)
            return made
        if workers is not None and workers != "local":
            return self._await_at(workers, spec)
        if starts_here(workers):  # the key goes to them over inherited connections
            return ProcessCluster(spec, door=Listener(key=JobKey.new()))
        if LISTEN_FD in os.environ:
            return self._await_workers_of_run(spec)
        return start_under_torchrun(spec)

    def close(self) -> None:
        """Stop the engine and close the door; the workers are the cluster's. Idempotent."""
        self._is_closed = True
        self._shut()

    def _shut(self) -> None:
        """Close the door, and stop the engine."""
        self._door = None
        self._open.close()

    def _door_at(self, listener: AbstractContextManager[socket.socket], secret: Secret) -> Listener:
        """Open the door, which may stay open from one generation to the next."""
        opened = self._open.enter_context(listener)
        close_in_forked_children(opened)  # one that outlives the script would keep the port
        door = self._door = Listener(secret.job_key(), opened, tls_of_environment())
        self._open.callback(door.close)
        return door

    def _ask_engine(self, engine: Supervisor, spec: ClusterSpec) -> Cluster:
        """Have an engine place workers; those that it starts again join the next generation."""
        door = self._door
        if door is None:
            self._open.callback(engine.stop)
            door = self._door_at(listening(engine.host(), 0), self._secret)
        engine.start(spec.assignment.most, door.address, self._secret, Deadline(spec.start_timeout))
        return ProcessCluster(spec, door=door, keeper=engine)

    def _await_at(self, workers: object, spec: ClusterSpec) -> Cluster:
        """Listen at an address for workers that the user starts elsewhere."""
        if not isinstance(workers, str):
            raise ConfigError(
                f'workers must be "local", "serial", "ray", "HOST:PORT" or an engine, not '
                f"{workers!r}"
            )
        address, secret = parse_address(workers), secret_of_environment()
        door = self._door or self._door_at(listening(*address), secret)
        keeper = ByHand(f"pipedream-rt worker {door.address} --name NAME")
        try:
            return ProcessCluster(spec, door=door, keeper=keeper)
        finally:
            if not spec.assignment.stays_open:
                self._shut()

    def _await_workers_of_run(self, spec: ClusterSpec) -> Cluster:
        """Use the workers of `pipedream-rt run`; on the first of several nodes start its own."""
        plan, available = spec.plan, count_of_environment(NPROC)
        engine = os.environ.get(ENGINE, "")
        spec = replace(spec, assignment=spec.assignment.within(available))
        if spec.assignment.fewest > available:
            raise ConfigError(
                f"{plan.in_words}: {engine or '`pipedream-rt run`'} has started {available}; raise "
                + ("the number of nodes or " if engine else "")
                + "--nproc-per-node"
            )
        global _secret_of_run
        if _secret_of_run is None:
            _secret_of_run = read_secret(count_of_environment(SECRET_FD))
            assert _secret_of_run is not None
        here = min(spec.assignment.most, count_of_environment(NPROC_HERE)) if engine else 0
        door = self._door or self._door_at(socket_of_environment(LISTEN_FD), _secret_of_run)
        own = [f"node-0-{i}" for i in range(here)]
        keeper = ByLauncher(engine or "pipedream-rt run", None if engine else _replace_workers)
        return ProcessCluster(spec, door=door, own=own, keeper=keeper)


def _engine_of(workers: object) -> Supervisor | None:
    """Return the engine that ``workers`` names or is; None if it is none."""
    if isinstance(workers, str) and workers in _ENGINES:
        module, name = _ENGINES[workers]
        make: Callable[[], Supervisor] = getattr(import_module(module), name)
        return make()
    return workers if isinstance(workers, Supervisor) else None


def starts_here(workers: Workers) -> bool:
    """Whether a `Launcher` itself starts all worker processes, on this machine."""
    elsewhere = LISTEN_FD in os.environ or under_torchrun()
    return workers == "local" or (workers is None and not elsewhere)


def cores_for(workers: Workers) -> int:
    """Return how many cores of this machine its worker processes share; 0 if they are elsewhere."""
    of_run = workers is None and LISTEN_FD in os.environ and NPROC_HERE not in os.environ
    here = starts_here(workers) or of_run or _are_ranks_here(workers)
    return len(os.sched_getaffinity(0)) if here else 0


def workers_of_run(workers: Workers) -> int:
    """Return how many workers `pipedream-rt run` has started for a script; 0 if none."""
    return count_of_environment(NPROC, 0) if workers is None else 0


_CHOOSING = timedelta(minutes=30)
"""How long other ranks wait for rank 0 to choose the plan; torchrun ends them if that fails."""


def leave_to_rank_0(workers: Workers, threads: int) -> None:
    """Return where the plan is chosen; another rank of torchrun becomes a worker before that."""
    if _are_ranks_here(workers) and is_other_rank():
        become_worker(threads, _CHOOSING)


def _are_ranks_here(workers: Workers) -> bool:
    """Whether the workers are ranks of torchrun, all on this machine."""
    given = workers is not None or LISTEN_FD in os.environ
    return not given and under_torchrun() and is_one_machine()


def numbers_of_workers(workers: Workers) -> Sequence[int]:
    """Return how many workers a plan that is to be chosen may have; empty if nothing says so."""
    if workers == "serial" or starts_here(workers):
        return range(1, len(os.sched_getaffinity(0)) + 1)
    if workers is None and NPROC in os.environ:
        return range(1, count_of_environment(NPROC) + 1)
    if _are_ranks_here(workers):
        return range(max(world_size() - 1, 1), world_size() + 1)
    return ()


def _replace_workers() -> None:
    """Have `pipedream-rt run` kill its workers and start others."""
    with socket_of_environment(SUPERVISOR_FD) as supervisor:
        supervisor.settimeout(_REPLACE_TIMEOUT.total_seconds())
        try:
            supervisor.sendall(b"r")
            answer = supervisor.recv(1)
        except TimeoutError as error:
            raise PeerLost(
                "pipedream-rt run has not replaced its workers within "
                f"{_REPLACE_TIMEOUT.total_seconds():g} s; is it stopped?",
                peer="run",
            ) from error
        except OSError as error:
            raise PeerLost(f"pipedream-rt run is gone: {error}", peer="run") from error
        if answer != b"r":
            raise PeerLost("pipedream-rt run is gone", peer="run")
