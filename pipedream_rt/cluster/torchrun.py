"""A job under torchrun: rank 0 becomes the coordinator, and every other rank a worker.

Rank 0 tells the others through torchrun's store where they join: on one machine at a Unix socket,
where they need no secret; on several machines at a port, and the user gives all the same secret.
"""

from __future__ import annotations

import os
import re
import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import torch.distributed as dist

from pipedream_rt.cluster.addresses import (
    UNIX,
    host_to_listen_at,
    interface_towards,
    joined,
    listening,
    resolved,
)
from pipedream_rt.cluster.elsewhere import Elsewhere
from pipedream_rt.cluster.environment import (
    SECRET,
    SECRET_FILE,
    count_of_environment,
    left_over,
    private_folder,
    read_secret,
    secret_of_environment,
    secret_pipe,
)
from pipedream_rt.cluster.identity import Secret
from pipedream_rt.cluster.interface import ClusterSpec
from pipedream_rt.cluster.peer_listeners import listening_at
from pipedream_rt.errors import ConfigError, RendezvousTimeout
from pipedream_rt.job.process_assignment import ProcessAssignment
from pipedream_rt.schema import shown
from pipedream_rt.telling import harmless

_SOCKET_PREFIX = "ranks"
"""Prefix of the name of the Unix socket at which the ranks join."""

_ranks_used = False
"""Whether the other ranks of this job have become workers."""


def under_torchrun() -> bool:
    """Whether this process is one of several ranks, as the variables of torchrun say."""
    values = [os.environ.get(name, "").strip() for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR")]
    return all(values) and values[1] != "1"  # a world of one has nobody to wait for


_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR",
              "MASTER_PORT", "TORCHELASTIC_RUN_ID")  # fmt: skip
"""Variables that a launcher sets for each rank, among others."""

_LAUNCHED = ("TORCHELASTIC_RUN_ID", "LOCAL_WORLD_SIZE", SECRET, SECRET_FILE)
"""One of these is there if the ranks were started for us: the first two are torchrun's, and ranks
of several machines need the secret."""


def _check_ranks() -> None:
    """Refuse a rank that cannot be, and variables that no launcher has set."""
    rank, world = count_of_environment("RANK"), world_size()
    if rank >= world:
        raise ConfigError(
            f"RANK is {rank} and WORLD_SIZE {world}, which no launcher sets; "
            f"{left_over(*_VARIABLES)}"
        )
    if not any(os.environ.get(name) for name in _LAUNCHED):
        raise ConfigError(
            f"this process would be rank {rank} of {world} and wait for the others, which nobody "
            "has started, as torchrun would also have set TORCHELASTIC_RUN_ID; "
            f"{left_over(*_VARIABLES)}. For {world} ranks start the script with `torchrun "
            f'--nproc-per-node {world}`; workers="local" of Pipeline needs none'
        )


class Ranks(Elsewhere):
    """The other ranks of a job under torchrun, which dial rank 0."""

    stays_open = False

    def __init__(self, timeout: timedelta) -> None:
        self._world = world_size()
        self._store, self._key = _store_of_job(timeout)
        self._here = _agrees_by_itself()
        self._secret = Secret.generated() if self._here else secret_of_environment()

    def secret(self) -> Secret:
        return self._secret

    @contextmanager
    def listening(self) -> Iterator[socket.socket]:
        with _listening(self._secret) if self._here else listening(_own_host(), 0) as listener:
            at = listener.getsockname()
            self._store.set(self._key, Path(at).name if isinstance(at, str) else str(at[1]))
            yield listener

    def own(self, count: int) -> list[str]:
        return [f"worker-{i}" for i in range(count - (self._world - 1))]

    def within(self, assignment: ProcessAssignment, work: str) -> ProcessAssignment:
        return _assignment_of_ranks(assignment, work)

    def missing(self) -> str:
        return f"look at what the other ranks say; {left_over(*_VARIABLES)}"


def _assignment_of_ranks(assignment: ProcessAssignment, work: str) -> ProcessAssignment:
    """Return how many workers there are: a rank each, and perhaps one that rank 0 starts."""
    # All ranks come, or torchrun ends the job: so the group is never elastic.
    most, world = assignment.within(world_size()).most, world_size()
    if most - (world - 1) not in (0, 1):
        raise ConfigError(
            f"{work} need {most} or {most + 1} "
            f"ranks, there are {world}; start with --nproc-per-node {most}; "
            f"{left_over(*_VARIABLES)}"
        )
    return replace(assignment, fewest=most, most=most, stays_open=False)


def ranks_of_torchrun(spec: ClusterSpec) -> Ranks:
    """Return the other ranks, on rank 0; another rank becomes a worker, and does not return."""
    _check_ranks()
    _assignment_of_ranks(spec.assignment, spec.plan.in_words)  # each rank says it
    if is_other_rank():
        become_worker(spec.threads, spec.start_timeout)
    return Ranks(spec.start_timeout)


@contextmanager
def _listening(secret: Secret) -> Iterator[socket.socket]:
    """Listen for the other ranks of this machine until the block ends."""
    with ExitStack() as opened:
        try:
            path = private_folder() / f"{_SOCKET_PREFIX}-{secret.job}"
            listener = opened.enter_context(listening_at(path))
        except OSError as error:
            raise ConfigError(
                f"rank 0 has no place for a socket at which the other ranks join: {error}; set "
                "TMPDIR to a folder of yours with a short name, or PIPEDREAM_RT_SECRET for all "
                "ranks"
            ) from error
        yield listener


def world_size() -> int:
    """Return the number of ranks of the job."""
    return count_of_environment("WORLD_SIZE")


def is_other_rank() -> bool:
    """Whether torchrun has started this process as another rank than 0."""
    return under_torchrun() and count_of_environment("RANK") != 0


def become_worker(threads: int, timeout: timedelta) -> NoReturn:
    """Become a worker of rank 0, which opens the pipeline."""
    _check_ranks()
    store, key = _store_of_job(timeout)
    _join_rank_0(store, key, count_of_environment("RANK"), threads)


def _store_of_job(timeout: timedelta) -> tuple[dist.Store, str]:
    """Return torchrun's store, and the key of this job's one pipeline in it."""
    _use_ranks_once()
    rank = count_of_environment("RANK")
    count_of_environment("MASTER_PORT")  # torch's own error does not name it
    try:
        store, _, _ = next(
            dist.rendezvous("env://", rank=rank, world_size=world_size(), timeout=timeout)
        )
    except (dist.DistError, ValueError) as error:
        raise RendezvousTimeout(
            f"rank {rank} of {world_size()} has not met the others at MASTER_ADDR "
            f"{os.environ['MASTER_ADDR']!r}, MASTER_PORT {os.environ['MASTER_PORT']}: {error}; "
            f"{left_over(*_VARIABLES)}",
            missing=world_size() - 1,
        ) from error
    store.set_timeout(timeout)
    # The store outlives a restart of the ranks, and has the port of the attempt before.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return store, f"pipedream-rt/{attempt}"


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
    """Whether the ranks need no secret: all run here, and the user has set none."""
    return is_one_machine() and read_secret(None) is None


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


def _join_rank_0(store: dist.Store, key: str, rank: int, threads: int) -> NoReturn:
    """Find out where rank 0 listens, and become its worker."""
    secret: Secret | None = None
    try:
        if not _agrees_by_itself():
            secret = secret_of_environment()
        entry = store.get(key).decode()
        address = _unix_address(entry) if secret is None else joined(_host_of_rank_0(), int(entry))
    except dist.DistStoreError as error:
        raise RendezvousTimeout(
            f"rank 0 opened no pipeline in time: {error}; {left_over(*_VARIABLES)}", missing=1
        ) from error
    except ConfigError as error:
        raise RendezvousTimeout(f"rank {rank} cannot join rank 0: {error}", missing=1) from error
    except ValueError as error:
        raise RendezvousTimeout(
            f"torchrun's store does not say under {key!r} where rank 0 listens: {error}; do all "
            "ranks run the same version of pipedream-rt?",
            missing=1,
        ) from error
    _run_worker(address, rank, threads, secret)


def _unix_address(name: str) -> str:
    """Return the address of a Unix socket of rank 0, whose name is in torchrun's store."""
    # Anybody may have written there, so it must be one in the folder of this user.
    if not re.fullmatch(_SOCKET_PREFIX + "-[0-9a-f]{32}", name):
        raise ValueError(f"{shown(name, 60)} is the name of no socket of rank 0")
    return f"{UNIX}{private_folder() / name}"


def _run_worker(address: str, rank: int, threads: int, secret: Secret | None) -> NoReturn:
    """Replace this process by a worker; only rank 0 runs the rest of the script."""
    for stream in (sys.stdout, sys.stderr):
        with harmless():  # it may be closed
            stream.flush()  # `execv` drops what is buffered
    command = ["-m", "pipedream_rt.workers", address, "--name", f"rank-{rank}"]
    if secret is not None:
        command += ["--secret-fd", str(secret_pipe(secret))]
    if not is_one_machine():
        command += ["--bind", interface_towards(address)]
    os.execv(sys.executable, [sys.executable, *command, "--threads", str(threads)])
