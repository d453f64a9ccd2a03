"""One of the two supervisors: somebody else starts the workers, and starts them again.

Wherever they are, they dial the script. The kinds differ in the address that is dialled, in how
the workers get the secret, and in what is known of those that do not come. The other supervisor is
`local.py`.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Collection
from contextlib import AbstractContextManager

from pipedream_rt import extras
from pipedream_rt.cluster.addresses import listening, parse_address
from pipedream_rt.cluster.environment import (
    ENGINE,
    LISTEN_FD,
    NPROC,
    NPROC_HERE,
    SECRET_FD,
    count_of_environment,
    read_secret,
    secret_of_environment,
    socket_of_environment,
)
from pipedream_rt.cluster.identity import Secret
from pipedream_rt.deadline import Deadline
from pipedream_rt.errors import ConfigError
from pipedream_rt.job.process_assignment import ProcessAssignment

_COMMAND = "pipedream-rt worker HOST:PORT --name NAME"


class Elsewhere:
    """Workers that somebody else starts, and starts again.

    Attributes:
        stays_open: Whether they join the next generation at the same address, so that the script
            goes on listening there.
    """

    stays_open = True

    def secret(self) -> Secret:
        """Return the secret of the job, which the workers have too."""
        return secret_of_environment()

    def listening(self) -> AbstractContextManager[socket.socket]:
        """Listen where the workers dial, until the context ends."""
        raise NotImplementedError

    def start(self, count: int, address: str, secret: Secret, deadline: Deadline) -> None:
        """Start workers that join the script at ``HOST:PORT`` or a path, until so many run.

        Nothing, where the user starts them.
        """

    def own(self, count: int) -> list[str]:
        """The names of the workers that the script starts itself."""
        return []

    def within(self, assignment: ProcessAssignment, work: str) -> ProcessAssignment:
        """Limit an assignment to the workers that there can be; refuse too few for the work."""
        return assignment

    def ending(self, name: str) -> str:
        """How a worker has ended, or what to do about it; empty if nothing is known."""
        return ""

    def missing(self) -> str:
        """Why workers have not come, and what to do."""
        return f"start them with `{_COMMAND}`"

    def replace(self, names: Collection[str]) -> None:
        """Have others started in place of these workers, before the next generation."""

    def stop(self) -> None:
        """End what was started. Idempotent."""


class AtAddress(Elsewhere):
    """Workers that the user starts with a command, and that dial an address of the user's."""

    stays_open = False

    def __init__(self, address: str) -> None:
        self._address = parse_address(address)
        self._command = _COMMAND

    def listening(self) -> AbstractContextManager[socket.socket]:
        return listening(*self._address)

    def start(self, count: int, address: str, secret: Secret, deadline: Deadline) -> None:
        """Nothing; but the port is known now."""
        self._command = _COMMAND.replace("HOST:PORT", address)

    def ending(self, name: str) -> str:
        """What the user can do: nobody reports how the worker ended."""
        return (
            "it was started elsewhere: with --persist it comes back by itself as long as its "
            f"process lives, otherwise start it there again with `{self._command}`"
        )

    def missing(self) -> str:
        return f"start them with `{self._command}`"


_secret_of_run: Secret | None = None
"""The secret that `pipedream-rt run` has passed on, kept since a pipe can be read only once."""


class OnNodes(Elsewhere):
    """The workers of a job of several nodes: an engine has started `pipedream-rt run` on each.

    That command listens where the other nodes dial, and the script has inherited its socket. The
    script starts the workers of its own node.
    """

    def __init__(self) -> None:
        self._available = count_of_environment(NPROC)
        self._here = count_of_environment(NPROC_HERE, 0)
        self._engine = os.environ.get(ENGINE, "")

    def secret(self) -> Secret:
        global _secret_of_run
        if _secret_of_run is None:
            _secret_of_run = read_secret(count_of_environment(SECRET_FD))
        assert _secret_of_run is not None
        return _secret_of_run

    def listening(self) -> AbstractContextManager[socket.socket]:
        return socket_of_environment(LISTEN_FD)

    def own(self, count: int) -> list[str]:
        return [f"node-0-{i}" for i in range(min(count, self._here))]

    def within(self, assignment: ProcessAssignment, work: str) -> ProcessAssignment:
        if assignment.fewest > self._available:
            raise ConfigError(
                f"{work}: {self._engine} has started {self._available}; raise the number of nodes "
                "or --nproc-per-node"
            )
        return assignment.within(self._available)

    def missing(self) -> str:
        why = extras.why_nodes(os.environ)
        return f"look at what the other processes of {self._engine} say{why and f'; {why}'}"
