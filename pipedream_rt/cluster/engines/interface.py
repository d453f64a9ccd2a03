"""The protocols of engines: what the rest of the package knows of them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from pipedream_rt.cluster.keys import Secret
from pipedream_rt.deadline import Deadline


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """The options of a command line on the nodes of a job, as torchrun's.

    Attributes:
        nodes: Number of nodes; None if not given.
        rank: Number of this node, 0-based; None if not given.
        endpoint: ``HOST:PORT`` of the first node; empty if not given.
    """

    nodes: int | None = None
    rank: int | None = None
    endpoint: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One of the processes that an engine has started for a job.

    Attributes:
        rank: 0 for the first, which runs the script. Where the engine gives no ranks, 1 for all
            others.
        size: Number of nodes.
        host: Name or numeric address of the first node's machine, as all machines know it.
        port: Port at which the first node listens.
        name: Prefix of its workers' names, unique in the job; ``node-RANK`` if empty. Stages go to
            workers in the natural order of their names.
    """

    rank: int
    size: int
    host: str
    port: int
    name: str = ""

    def name_of_worker(self, index: int) -> str:
        return f"{self.name or f'node-{self.rank}'}-{index}"

    @property
    def is_first(self) -> bool:
        """Whether this process runs the script."""
        return self.rank == 0


class Membership(Protocol):
    """A job of an engine that starts the same command everywhere.

    Attributes:
        title: The job in words, as ``Slurm job 12.0``.
    """

    title: str
    node: Node

    def secret(self, deadline: Deadline) -> Secret:
        """Return the secret of the job, which its processes alone get."""

    def finish(self) -> None:
        """Remove what the job has left behind; the first node calls it when the job is over."""


class Keeper(Protocol):
    """Whoever starts the workers that are no children of the script, and starts them again."""

    def ending(self, name: str) -> str:
        """Say in words how a worker has ended, or what to do; empty if there is nothing to say."""

    def missing(self) -> str:
        """Say why workers have not come, and what to do."""

    def replace(self, names: Collection[str]) -> None:
        """Start others in place of these workers, before the next generation."""


@runtime_checkable
class Supervisor(Keeper, Protocol):
    """An engine that the script asks for workers, which join the script at its address."""

    def host(self) -> str:
        """Return the numeric address of this machine at which its workers reach the script."""

    def start(self, count: int, address: str, secret: Secret, deadline: Deadline) -> None:
        """Place and start workers; leave those that are there already."""

    def stop(self) -> None:
        """End all workers. Idempotent."""
