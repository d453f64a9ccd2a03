"""Decides where the stages run, from the ``workers`` argument and the environment."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeAlias

import torch.distributed as dist

from pipedream_rt.cluster import Cluster, Fail, InProcessCluster
from pipedream_rt.control import parse_address
from pipedream_rt.errors import ConfigError, RendezvousTimeout
from pipedream_rt.processes import ProcessCluster
from pipedream_rt.spawn import LISTEN_FD, NPROC
from pipedream_rt.transport.base import Receive

Workers: TypeAlias = str | Callable[..., Cluster] | None
"""``"local"``, ``"in-process"``, ``"HOST:PORT"``, None to follow the environment, or what makes a
`Cluster` of another kind (called with the number of stages and the keyword arguments below)."""


def start_cluster(
    workers: Workers,
    *,
    num_stages: int,
    receive: Receive,
    fail: Fail,
    generation: int,
    timeout: timedelta,
    start_timeout: timedelta,
    threads: int,
) -> Cluster:
    """Start the stages' threads or processes, or await workers.

    Under torchrun it does not return on ranks other than 0: their processes become workers.

    Args:
        workers: See `Pipeline`.
        num_stages: One worker for each.
        receive: Takes messages for the coordinator.
        fail: Told of a failure.
        generation: Number of this group in the process.
        timeout: For messages that are sure to come.
        start_timeout: For all workers to join.
        threads: In each worker started here.

    Raises:
        ConfigError: The argument or the environment makes no sense.
        RendezvousTimeout: Workers that did not come.
    """
    common: dict[str, Any] = {
        "receive": receive,
        "fail": fail,
        "generation": generation,
        "timeout": timeout,
        "threads": threads,
    }
    if workers == "in-process":
        return InProcessCluster(num_stages, **common)
    if callable(workers):
        return workers(num_stages, **common)
    common["start_timeout"] = start_timeout
    if workers == "local":
        return ProcessCluster(num_stages, **common)
    if workers is not None:
        if not isinstance(workers, str):
            raise ConfigError(
                f'workers must be "local", "in-process" or "HOST:PORT", not {workers!r}'
            )
        with _listening(*parse_address(workers)) as listener:
            return ProcessCluster(num_stages, listener=listener, **common)
    if LISTEN_FD in os.environ:
        return _under_run(num_stages, common)
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ and "MASTER_ADDR" in os.environ:
        return _under_torchrun(num_stages, common)
    return ProcessCluster(num_stages, **common)


@contextmanager
def _listening(host: str, port: int) -> Iterator[socket.socket]:
    """A socket that workers can join at."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=128)
    except OSError as error:
        raise ConfigError(f"cannot listen at {host}:{port}: {error}") from error
    with listener:
        yield listener


def _under_run(num_stages: int, common: dict[str, Any]) -> Cluster:
    """Use the workers of `pipedream-rt run`."""
    available = int(os.environ[NPROC])
    if num_stages > available:
        raise ConfigError(
            f"{num_stages} stages need as many workers, `pipedream-rt run` has started "
            f"{available}; raise --nproc-per-node"
        )
    with socket.socket(fileno=os.dup(int(os.environ[LISTEN_FD]))) as listener:
        return ProcessCluster(num_stages, listener=listener, **common)


def _under_torchrun(num_stages: int, common: dict[str, Any]) -> Cluster:
    """Use the ranks of torchrun: rank 0 coordinates, the others host a stage each.

    With as many stages as ranks, rank 0 starts a worker process for one of them.
    """
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    own = num_stages - (world - 1)
    if own not in (0, 1):
        raise ConfigError(
            f"{num_stages} stages need {num_stages} or {num_stages + 1} ranks, there are {world}; "
            f"start with --nproc-per-node {num_stages}"
        )
    global _torchrun_ranks_used
    if _torchrun_ranks_used:
        raise ConfigError(
            "under torchrun a script can open one pipeline, whose workers its ranks become; "
            "start the script with `pipedream-rt run` for several"
        )
    _torchrun_ranks_used = True
    store, _, _ = next(dist.rendezvous("env://", rank=rank, world_size=world))
    store.set_timeout(common["start_timeout"])
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    key = f"pipedream-rt/{attempt}/{common['generation']}"
    if rank == 0:
        with _listening(_own_address(), 0) as listener:
            host, port = listener.getsockname()[:2]
            store.set(key, f"{host}:{port}")
            return ProcessCluster(num_stages, listener=listener, own=own, **common)
    try:
        address = store.get(key).decode()
    except dist.DistStoreError as error:
        raise RendezvousTimeout(f"rank 0 opened no pipeline in time: {error}", missing=1) from error
    _become_worker(address, rank, common["threads"])
    raise AssertionError("execv does not return")


_torchrun_ranks_used = False
"""Whether the other ranks have become workers."""


def _own_address() -> str:
    """Address that the other ranks reach this machine at: the one torchrun was told."""
    return socket.gethostbyname(os.environ["MASTER_ADDR"])


def _become_worker(address: str, rank: int, threads: int) -> None:
    """Replace this rank's process by a worker; what follows in the script is for rank 0."""
    sys.stdout.flush()
    sys.stderr.flush()
    command = ["-m", "pipedream_rt.workers", address, "--name", f"rank-{rank}"]
    os.execv(sys.executable, [sys.executable, *command, "--threads", str(threads)])
