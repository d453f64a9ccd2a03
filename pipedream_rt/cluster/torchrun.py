"""A job under torchrun: rank 0 becomes the coordinator, and every other rank a worker.

Rank 0 tells the others its port through torchrun's store. On one machine it also makes the secret
and hands it to them over a local socket; on several machines the user gives all the same secret.
"""

from __future__ import annotations

import os
import secrets
import socket
import struct
import sys
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from typing import NoReturn

import torch.distributed as dist

from pipedream_rt.cluster.addresses import (
    host_to_listen_at,
    interface_towards,
    joined,
    listening,
    resolved,
)
from pipedream_rt.cluster.environment import (
    count_of_environment,
    private_folder,
    read_secret,
    secret_of_environment,
    secret_pipe,
    tls_of_environment,
)
from pipedream_rt.cluster.interface import Cluster, ClusterSpec
from pipedream_rt.cluster.keys import NONCE, Secret
from pipedream_rt.cluster.listener import Listener
from pipedream_rt.cluster.processes import ProcessCluster
from pipedream_rt.cluster.supervision import ByLauncher
from pipedream_rt.deadline import Deadline
from pipedream_rt.errors import ConfigError, RendezvousTimeout
from pipedream_rt.schema import printable

_SOCKET = "secret-"
"""Prefix of the sockets at which rank 0 hands over the secret."""

_MARK = b"pipedream-rt secret\n"

_ranks_used = False
"""Whether the other ranks of this job have become workers."""


def under_torchrun() -> bool:
    """Whether torchrun, or a launcher that sets the same variables, has started this process."""
    return all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"))


def start_under_torchrun(spec: ClusterSpec) -> Cluster:
    """Make the ranks of torchrun a cluster; on other ranks than 0 a worker replaces the process."""
    # All ranks come, or torchrun ends the job: so the group is never elastic.
    assignment = spec.assignment.within(world_size())
    spec = replace(spec, assignment=replace(assignment, fewest=assignment.most, stays_open=False))
    own = _workers_of_rank_0(spec, world_size())
    if is_other_rank():
        become_worker(spec.threads, spec.start_timeout)
    store, key = _store_of_job(spec.start_timeout)
    deadline = Deadline(spec.start_timeout)
    with listening(_own_host(), 0) as listener:
        port = listener.getsockname()[1]
        secret = (
            _hand_over(store, key, world_size() - 1, deadline)
            if _agrees_by_itself()
            else secret_of_environment()
        )
        store.set(key, str(port))
        names = [f"worker-{i}" for i in range(own)]
        door = Listener(key=secret.job_key(), listener=listener, tls=tls_of_environment())
        return ProcessCluster(spec, door=door, own=names, keeper=ByLauncher("torchrun"))


def world_size() -> int:
    """Return the number of ranks of the job."""
    return count_of_environment("WORLD_SIZE")


def is_other_rank() -> bool:
    """Whether torchrun has started this process as another rank than 0."""
    return under_torchrun() and count_of_environment("RANK") != 0


def become_worker(threads: int, timeout: timedelta) -> NoReturn:
    """Become a worker of rank 0, which opens the pipeline."""
    store, key = _store_of_job(timeout)
    _join_rank_0(store, key, count_of_environment("RANK"), threads, Deadline(timeout))


def _store_of_job(timeout: timedelta) -> tuple[dist.Store, str]:
    """Return torchrun's store, and the key of this job's one pipeline in it."""
    _use_ranks_once()
    rank = count_of_environment("RANK")
    count_of_environment("MASTER_PORT")  # torch's own error does not name it
    try:
        store, _, _ = next(dist.rendezvous("env://", rank=rank, world_size=world_size()))
    except (dist.DistError, ValueError) as error:
        raise RendezvousTimeout(
            f"torchrun's store cannot be reached at MASTER_ADDR {os.environ['MASTER_ADDR']!r}, "
            f"MASTER_PORT {os.environ['MASTER_PORT']}: {error}",
            missing=world_size() - 1,
        ) from error
    store.set_timeout(timeout)
    # The store outlives a restart of the ranks, and has the port of the attempt before.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return store, f"pipedream-rt/{attempt}"


def _workers_of_rank_0(spec: ClusterSpec, world: int) -> int:
    """How many workers rank 0 starts besides the other ranks: one if all ranks are to compute."""
    workers = spec.assignment.most
    own = workers - (world - 1)
    if own not in (0, 1):
        raise ConfigError(
            f"{spec.plan.in_words} need {workers} or {workers + 1} "
            f"ranks, there are {world}; start with --nproc-per-node {workers}"
        )
    return own


def _use_ranks_once() -> None:
    """Refuse a second pipeline: the other ranks are workers of the first."""
    global _ranks_used
    if _ranks_used:
        raise ConfigError(
            "under torchrun a script can open one pipeline, whose workers its ranks become; "
            "start the script with `pipedream-rt run` for several"
        )
    _ranks_used = True


def is_one_machine() -> bool:
    """Whether all ranks of the job run on this machine."""
    return os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]


def _agrees_by_itself() -> bool:
    """Whether rank 0 makes the secret: all ranks run here, and the user has given none."""
    return is_one_machine() and read_secret(None) is None


def _hand_over(store: dist.Store, key: str, others: int, deadline: Deadline) -> Secret:
    """Make a secret and hand it to the other ranks on this machine, over a Unix socket."""
    secret = Secret.generated()
    with ExitStack() as stack:
        listener = stack.enter_context(socket.socket(socket.AF_UNIX))
        try:
            place = private_folder() / f"{_SOCKET}{os.getpid()}-{secrets.token_hex(4)}"
            listener.bind(str(place))
        except OSError as error:
            raise ConfigError(
                f"rank 0 has no place for a socket over which the other ranks get the secret: "
                f"{error}; set TMPDIR to a folder of yours with a short name, or "
                "PIPEDREAM_RT_SECRET for all ranks"
            ) from error
        stack.callback(place.unlink, missing_ok=True)
        listener.listen(others)
        store.set(f"{key}/secret", place.name)
        while others:
            listener.settimeout(deadline.remaining_s() or 1e-3)  # 0 would not block
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                text = f"{others} ranks did not come for the secret in time"
                raise RendezvousTimeout(text, missing=others) from None
            with connection:
                if _is_ours(connection):  # anybody else is let go, and not counted
                    connection.sendall(_MARK + secret.text.encode())
                    others -= 1
    return secret


def _be_handed(store: dist.Store, key: str, deadline: Deadline) -> Secret:
    """Get the secret that rank 0 hands over."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(deadline.remaining_s() or 1e-3)  # 0 would not block
        try:
            # Anybody may have written into torchrun's store, so the name must be that of a socket
            # in this user's private folder. Other sockets there speak first too, hence the mark.
            name = store.get(f"{key}/secret").decode()
            if not (name.startswith(_SOCKET) and "/" not in name and "\0" not in name):
                raise OSError(f"the store names no socket of rank 0: {printable(name, 60)}")
            connection.connect(str(private_folder() / name))
            if not _is_ours(connection):
                raise OSError("its socket is of another user")
            said = connection.recv(len(_MARK) + 2 * NONCE)
        except (OSError, UnicodeDecodeError) as error:
            raise RendezvousTimeout(f"rank 0 gave no secret: {error}", missing=1) from error
    if not said:
        raise RendezvousTimeout(
            "rank 0 gave no secret: it closed the connection; look at its output", missing=1
        )
    if not said.startswith(_MARK) or len(said) != len(_MARK) + 2 * NONCE:
        raise RendezvousTimeout(
            f"rank 0 gave no secret: it sent {len(said)} other bytes than the "
            f"{len(_MARK) + 2 * NONCE} of one; do all ranks run the same version of pipedream-rt?",
            missing=1,
        )
    return Secret(said.removeprefix(_MARK).decode("ascii", "replace"))


def _is_ours(connection: socket.socket) -> bool:
    """Whether the other end of a Unix socket is of this user, as the kernel says."""
    credentials = connection.getsockopt(
        socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")
    )
    return bool(struct.unpack("3i", credentials)[1] == os.geteuid())


def _own_host() -> str:
    """Address at which rank 0 listens, after a check that its name can be looked up."""
    _host_of_rank_0()
    return host_to_listen_at(os.environ["MASTER_ADDR"], alone=is_one_machine())


def _host_of_rank_0() -> str:
    """Numeric address of the machine of rank 0, as this machine looks it up."""
    name = os.environ["MASTER_ADDR"]
    try:
        return str(resolved(name, None)[1][0])
    except OSError as error:
        raise ConfigError(
            f"MASTER_ADDR is {name!r}, which this machine cannot look up: {error}; give torchrun "
            "an --rdzv-endpoint and a --local-addr that all machines know"
        ) from error


def _join_rank_0(
    store: dist.Store, key: str, rank: int, threads: int, deadline: Deadline
) -> NoReturn:
    """Get the secret and the port from rank 0, and become its worker."""
    try:
        by_itself = _agrees_by_itself()
        secret = _be_handed(store, key, deadline) if by_itself else secret_of_environment()
        address = joined(_host_of_rank_0(), int(store.get(key)))
    except dist.DistStoreError as error:
        raise RendezvousTimeout(f"rank 0 opened no pipeline in time: {error}", missing=1) from error
    except ConfigError as error:
        raise RendezvousTimeout(f"rank {rank} cannot join rank 0: {error}", missing=1) from error
    except ValueError as error:
        raise RendezvousTimeout(
            f"torchrun's store has no port of rank 0 under {key!r}: {error}; do all ranks run the "
            "same version of pipedream-rt?",
            missing=1,
        ) from error
    _run_worker(address, rank, threads, secret)


def _run_worker(address: str, rank: int, threads: int, secret: Secret) -> NoReturn:
    """Replace this process by a worker; only rank 0 runs the rest of the script."""
    sys.stdout.flush()  # `execv` drops what is buffered
    sys.stderr.flush()
    command = ["-m", "pipedream_rt.workers", address, "--name", f"rank-{rank}"]
    command += ["--secret-fd", str(secret_pipe(secret))]
    if not is_one_machine():
        command += ["--bind", interface_towards(address)]
    os.execv(sys.executable, [sys.executable, *command, "--threads", str(threads)])
