"""What the rest of the package knows of an engine that starts the same command on every node."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from pipedream_rt.cluster.identity import Secret
from pipedream_rt.deadline import Deadline


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """The options of a command line on the nodes of a job, as torchrun's.

    Attributes:
        nodes: Number of nodes; None if not set.
        rank: Number of this node, 0-based; None if not set.
        endpoint: ``HOST:PORT`` of the first node; empty if not set.
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


class NodeJob(Protocol):
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
