"""Decides from the ``workers`` argument and the environment where the stages run."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta

from pipedream_rt import extras
from pipedream_rt.cluster.control_loop import ControlLoop
from pipedream_rt.cluster.elsewhere import AtAddress, Elsewhere, OnNodes
from pipedream_rt.cluster.environment import LISTEN_FD, NPROC, THREADS, count_of_environment
from pipedream_rt.cluster.identity import Secret
from pipedream_rt.cluster.interface import Cluster, ClusterSpec
from pipedream_rt.cluster.listener import Listener
from pipedream_rt.cluster.torchrun import (
    become_worker,
    is_one_machine,
    is_other_rank,
    ranks_of_torchrun,
    under_torchrun,
    world_size,
)
from pipedream_rt.deadline import Deadline
from pipedream_rt.errors import ConfigError, PipelineClosed
from pipedream_rt.job.options import Workers
from pipedream_rt.lifecycle import close_in_forked_children

_ENGINES = {"ray": "RayWorkers"}
"""By the name that ``workers`` may have: the class of the engine, in `pipedream_rt.extras`."""


class Generations:
    """Starts the workers of a pipeline, one generation after another."""

    def __init__(self, workers: Workers) -> None:
        self._workers = workers
        self._elsewhere = _elsewhere_of(workers)
        self._open = ExitStack()
        self._loop: ControlLoop | None = None
        self._listener: Listener | None = None
        self._is_closed = False

    def start(self, spec: ClusterSpec) -> Cluster:
        """Start or await the workers of a generation; under torchrun, returns on rank 0 alone."""
        if self._is_closed:
            raise PipelineClosed("the pipeline was closed")
        if self._elsewhere is not None:
            return self._await(self._elsewhere, spec)
        if self._workers == "serial":
            from pipedream_rt.serial.cluster import SerialCluster  # the stages, for these alone

            return SerialCluster(spec)
        if callable(self._workers):
            made: Cluster = self._workers(spec)
            return made
        if starts_here(self._workers):
            return self._start_here(spec)
        return self._await(ranks_of_torchrun(spec), spec)

    def close(self) -> None:
        """End what was started elsewhere, and listen no more; the workers are the cluster's.

        Idempotent.
        """
        self._is_closed = True
        self._shut()
        if self._loop is not None:
            self._loop.close()

    def _control(self) -> ControlLoop:
        """The event loop of the control plane, made with the first workers."""
        if self._loop is None:
            self._loop = ControlLoop()
        return self._loop

    def _shut(self) -> None:
        """Listen no more, and end what was started elsewhere."""
        self._listener = None
        self._open.close()

    def _start_here(self, spec: ClusterSpec) -> Cluster:
        """Start workers on this machine, which inherit their connections."""
        allowed = workers_of_run(self._workers)
        if allowed and spec.assignment.fewest > allowed:
            raise ConfigError(
                f"{spec.plan.in_words}: `pipedream-rt run` may start {allowed}; raise "
                "--nproc-per-node"
            )
        if allowed:
            threads = count_of_environment(THREADS, spec.threads)
            spec = replace(spec, assignment=spec.assignment.within(allowed), threads=threads)
        if self._listener is None:
            self._listener = Listener(Secret.generated())
        names = [f"worker-{i}" for i in range(spec.assignment.most)]
        return self._processes(spec, self._listener, names, Elsewhere())

    def _processes(
        self, spec: ClusterSpec, listener: Listener, own: Sequence[str], elsewhere: Elsewhere
    ) -> Cluster:
        """Gather worker processes; those that this process starts are ``own``."""
        from pipedream_rt.cluster.processes import ProcessCluster  # sockets, for these alone

        return ProcessCluster(
            spec, loop=self._control(), listener=listener, own=own, elsewhere=elsewhere
        )

    def _await(self, elsewhere: Elsewhere, spec: ClusterSpec) -> Cluster:
        """Await workers that somebody else starts."""
        assignment = elsewhere.within(spec.assignment, spec.plan.in_words)
        spec, listener = replace(spec, assignment=assignment), self._listener
        if listener is None:
            secret = elsewhere.secret()
            self._open.callback(elsewhere.stop)
            listening = self._open.enter_context(elsewhere.listening())
            close_in_forked_children(listening)  # one that outlives the script would keep the port
            control = self._control()
            listener = self._listener = Listener(secret, listening)
            self._open.callback(lambda: control.run(listener.close()))
        deadline = Deadline(spec.start_timeout)
        elsewhere.start(assignment.most, listener.address, listener.secret, deadline)
        own = elsewhere.own(assignment.most)
        try:
            return self._processes(spec, listener, own, elsewhere)
        finally:
            if not (elsewhere.stays_open or assignment.stays_open):
                self._shut()


def _elsewhere_of(workers: Workers) -> Elsewhere | None:
    """Who starts the workers elsewhere; None if the script or torchrun does."""
    if isinstance(workers, Elsewhere):
        return workers
    if isinstance(workers, str) and workers in _ENGINES:
        made: Elsewhere = getattr(extras, _ENGINES[workers])()
        return made
    if workers is None:
        return OnNodes() if LISTEN_FD in os.environ else None
    if workers in ("local", "serial") or callable(workers):
        return None
    if not isinstance(workers, str):
        raise ConfigError(
            f'workers must be "local", "serial", "ray", "HOST:PORT" or an engine, not {workers!r}'
        )
    return AtAddress(workers)


def starts_here(workers: Workers) -> bool:
    """Whether `Generations` itself starts all worker processes, on this machine."""
    elsewhere = LISTEN_FD in os.environ or under_torchrun()
    return workers == "local" or (workers is None and not elsewhere)


def cores_for(workers: Workers) -> int:
    """Cores of this machine that its worker processes share; 0 if they are elsewhere."""
    here = starts_here(workers) or _are_ranks_here(workers)
    return len(os.sched_getaffinity(0)) if here else 0


def workers_of_run(workers: Workers) -> int:
    """Workers that `pipedream-rt run` has for a script; 0 if it has not started it."""
    return count_of_environment(NPROC, 0) if workers is None else 0


_CHOOSING = timedelta(minutes=30)
"""How long other ranks wait for rank 0 to choose the plan; torchrun ends them if that fails."""


def leave_to_rank_0(workers: Workers, threads: int) -> None:
    """Leave the choice of the plan to rank 0: another rank of torchrun becomes a worker here."""
    if _are_ranks_here(workers) and is_other_rank():
        become_worker(threads, _CHOOSING)


def _are_ranks_here(workers: Workers) -> bool:
    """Whether the workers are ranks of torchrun, all on this machine."""
    are_elsewhere = workers is not None or LISTEN_FD in os.environ
    return not are_elsewhere and under_torchrun() and is_one_machine()


def numbers_of_workers(workers: Workers) -> Sequence[int]:
    """The numbers of workers that a chosen plan may have; empty if none is known."""
    if allowed := workers_of_run(workers):
        return range(1, allowed + 1)
    if workers == "serial" or starts_here(workers):
        return range(1, len(os.sched_getaffinity(0)) + 1)
    if _are_ranks_here(workers):
        return range(max(world_size() - 1, 1), world_size() + 1)
    return ()
