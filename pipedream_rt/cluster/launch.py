"""Decides where the stages run, from the ``workers`` argument and the environment."""

from __future__ import annotations

import os
import secrets
import socket
import struct
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeAlias

import torch.distributed as dist

from pipedream_rt.cluster.base import Cluster, Fail
from pipedream_rt.cluster.control import NONCE, interface_towards, parse_address
from pipedream_rt.cluster.fork_server import ForkServer
from pipedream_rt.cluster.in_process import InProcessCluster
from pipedream_rt.cluster.processes import ProcessCluster
from pipedream_rt.cluster.spawn import (
    LISTEN_FD,
    NPROC,
    SECRET,
    SECRET_FD,
    SUPERVISOR_FD,
    read_secret,
    secret_pipe,
)
from pipedream_rt.deadline import Deadline
from pipedream_rt.errors import ConfigError, PeerLost, RendezvousTimeout
from pipedream_rt.schedules import Shape
from pipedream_rt.transport.base import Receive

Workers: TypeAlias = str | Callable[..., Cluster] | None
"""``"local"``, ``"in-process"``, ``"HOST:PORT"``, None to follow the environment, or what makes a
`Cluster` of another kind (called with the shape and the keyword arguments below)."""


def start_cluster(
    workers: Workers,
    *,
    shape: Shape,
    receive: Receive,
    fail: Fail,
    generation: int,
    timeout: timedelta,
    start_timeout: timedelta,
    threads: int,
    heartbeat: timedelta,
    forks: ForkServer,
) -> Cluster:
    """Start the stages' threads or processes, or await workers.

    Under torchrun it does not return on ranks other than 0: their processes become workers.

    Args:
        workers: See `Pipeline`.
        shape: How many workers, and which stages each hosts.
        receive: Takes messages for the coordinator.
        fail: Told of a failure.
        generation: Number of this group in the process.
        timeout: For messages that are sure to come.
        start_timeout: For all workers to join.
        threads: In each worker started here.
        heartbeat: For how long a worker process may be silent.
        forks: Starts worker processes here.

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
        return InProcessCluster(shape, **common)
    if callable(workers):
        return workers(shape, **common)
    common.update(start_timeout=start_timeout, heartbeat=heartbeat, forks=forks)
    if workers == "local":
        return _local(shape, common)
    if workers is not None:
        if not isinstance(workers, str):
            raise ConfigError(
                f'workers must be "local", "in-process" or "HOST:PORT", not {workers!r}'
            )
        address, secret = parse_address(workers), _secret_of_environment()
        with _listening(*address) as listener:
            return ProcessCluster(shape, listener=listener, secret=secret, **common)
    if LISTEN_FD in os.environ:
        return _under_run(shape, common)
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ and "MASTER_ADDR" in os.environ:
        return _under_torchrun(shape, common)
    return _local(shape, common)


def _local(shape: Shape, common: dict[str, Any]) -> Cluster:
    """Start worker processes; they inherit their connections, over which the secret goes."""
    return ProcessCluster(shape, secret=secrets.token_bytes(NONCE), **common)


def _secret_of_environment() -> bytes:
    """The secret that the user has given the script and the workers.

    Raises:
        ConfigError: There is none.
    """
    secret = read_secret(None)
    if secret is None:
        raise ConfigError(
            f"workers that are started elsewhere must know the job's secret: set {SECRET} to the "
            "same random text here and for them. Make one with: "
            'python -c "import secrets; print(secrets.token_hex(32))"'
        )
    return secret


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


def _under_run(shape: Shape, common: dict[str, Any]) -> Cluster:
    """Use the workers of `pipedream-rt run`."""
    available = int(os.environ[NPROC])
    if shape.workers > available:
        raise ConfigError(
            f"{shape.num_stages} stages need {shape.workers} workers, `pipedream-rt run` has "
            f"started {available}; raise --nproc-per-node"
        )
    global _secret_of_run
    if _secret_of_run is None:
        _secret_of_run = read_secret(int(os.environ[SECRET_FD]))
        assert _secret_of_run is not None
    with socket.socket(fileno=os.dup(int(os.environ[LISTEN_FD]))) as listener:
        return ProcessCluster(
            shape, listener=listener, secret=_secret_of_run, replace=_replace_workers, **common
        )


_secret_of_run: bytes | None = None
"""Read once: it comes by a pipe."""


def _replace_workers() -> None:
    """Have `pipedream-rt run` kill its workers and start others.

    Raises:
        PeerLost: It is gone, or does not answer.
    """
    with socket.socket(fileno=os.dup(int(os.environ[SUPERVISOR_FD]))) as supervisor:
        supervisor.settimeout(30)
        try:
            supervisor.sendall(b"r")
            answer = supervisor.recv(1)
        except OSError as error:
            raise PeerLost(f"pipedream-rt run is gone: {error}", peer="run") from error
        if answer != b"r":
            raise PeerLost("pipedream-rt run is gone", peer="run")


def _under_torchrun(shape: Shape, common: dict[str, Any]) -> Cluster:
    """Use the ranks of torchrun: rank 0 coordinates, the others are a worker each.

    With as many workers as ranks, rank 0 starts a worker process for one of them.
    """
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    workers = shape.workers
    own = workers - (world - 1)
    if own not in (0, 1):
        raise ConfigError(
            f"{shape.num_stages} stages on {workers} workers need {workers} or {workers + 1} "
            f"ranks, there are {world}; start with --nproc-per-node {workers}"
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
    deadline = Deadline(common["start_timeout"])
    if rank == 0:
        with _listening(_own_address(), 0) as listener:
            host, port = listener.getsockname()[:2]
            secret = (
                _hand_over(store, key, world - 1, deadline)
                if _agrees_by_itself()
                else _secret_of_environment()
            )
            store.set(key, f"{host}:{port}")
            return ProcessCluster(shape, listener=listener, own=own, secret=secret, **common)
    try:
        by_itself = _agrees_by_itself()
        secret = _be_handed(store, key, deadline) if by_itself else _secret_of_environment()
        address = store.get(key).decode()
    except dist.DistStoreError as error:
        raise RendezvousTimeout(f"rank 0 opened no pipeline in time: {error}", missing=1) from error
    _become_worker(address, rank, common["threads"], secret)
    raise AssertionError("execv does not return")


_torchrun_ranks_used = False
"""Whether the other ranks have become workers."""


def _is_one_machine() -> bool:
    """Whether all ranks of torchrun are here."""
    return os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]


def _agrees_by_itself() -> bool:
    """Whether the ranks of torchrun need no secret of the user's."""
    return _is_one_machine() and read_secret(None) is None


def _hand_over(store: dist.Store, key: str, others: int, deadline: Deadline) -> bytes:
    """Make a secret and hand it to the other ranks, on this machine.

    It goes over a socket whose ends the kernel vouches for: both must belong to the same user.

    Raises:
        RendezvousTimeout: A rank did not come for it.
    """
    secret = secrets.token_bytes(NONCE)
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{folder}/secret")
        listener.listen(others)
        store.set(f"{key}/secret", f"{folder}/secret")
        while others:
            listener.settimeout(deadline.remaining_s() or 1e-3)
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                text = f"{others} ranks did not come for the secret in time"
                raise RendezvousTimeout(text, missing=others) from None
            with connection:
                if _is_ours(connection):
                    connection.sendall(secret)
                    others -= 1
    return secret


def _be_handed(store: dist.Store, key: str, deadline: Deadline) -> bytes:
    """The other end of `_hand_over`.

    Raises:
        RendezvousTimeout: It did not come.
    """
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(deadline.remaining_s() or 1e-3)
        try:
            connection.connect(store.get(f"{key}/secret").decode())
            secret = connection.recv(NONCE) if _is_ours(connection) else b""
        except OSError as error:
            raise RendezvousTimeout(f"rank 0 gave no secret: {error}", missing=1) from error
    if len(secret) != NONCE:
        raise RendezvousTimeout("rank 0 gave no secret", missing=1)
    return secret


def _is_ours(connection: socket.socket) -> bool:
    """Whether the other end of a local socket belongs to the user of this process."""
    credentials = connection.getsockopt(
        socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")
    )
    return bool(struct.unpack("3i", credentials)[1] == os.geteuid())


def _own_address() -> str:
    """Address that the other ranks reach this machine at: the one torchrun was told."""
    return socket.gethostbyname(os.environ["MASTER_ADDR"])


def _become_worker(address: str, rank: int, threads: int, secret: bytes) -> None:
    """Replace this rank's process by a worker; what follows in the script is for rank 0."""
    sys.stdout.flush()
    sys.stderr.flush()
    command = ["-m", "pipedream_rt.workers", address, "--name", f"rank-{rank}"]
    command += ["--secret-fd", str(secret_pipe(secret))]
    if not _is_one_machine():
        command += ["--bind", interface_towards(address)]
    os.execv(sys.executable, [sys.executable, *command, "--threads", str(threads)])
