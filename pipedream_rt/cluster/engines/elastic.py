"""Nodes that get their rank as from torchrun: by options, or by ``PET_`` variables.

Kubeflow's Trainer sets these variables, as do the manifests for JobSet and the units of systemd in
``workers/``. See https://docs.pytorch.org/docs/stable/elastic/run.html.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping

from pipedream_rt.cluster.addresses import is_here, joined, parse_address
from pipedream_rt.cluster.environment import secret_of_environment
from pipedream_rt.cluster.identity import Secret
from pipedream_rt.cluster.node_job import EngineRequest, Node
from pipedream_rt.deadline import Deadline
from pipedream_rt.errors import ConfigError
from pipedream_rt.schema import is_count

VARIABLES = ("PET_NNODES", "PET_NODE_RANK", "PET_RDZV_ENDPOINT", "PET_MASTER_ADDR",
             "PET_MASTER_PORT")  # fmt: skip
"""What says which node this is, and where the first is; the first of them is always there."""

_PORT = 29500
"""The default port of torchrun."""


def found(environment: Mapping[str, str], asked: EngineRequest) -> Elastic | None:
    """Return the job of several nodes that options or ``PET_`` variables describe, or None."""
    nodes = _number(environment, "PET_NNODES", asked.nodes, 1)
    if nodes is None or nodes == 1:
        return None
    endpoint = asked.endpoint or environment.get("PET_RDZV_ENDPOINT", "")
    if not endpoint and (host := environment.get("PET_MASTER_ADDR", "")):
        endpoint = joined(host, _number(environment, "PET_MASTER_PORT", None, 1) or _PORT)
    if not endpoint:
        raise ConfigError(
            f"there are {nodes} nodes, and nothing says where the first one is: give all of them "
            "--rdzv-endpoint HOST:PORT, or set PET_MASTER_ADDR and PET_MASTER_PORT"
        )
    host, port = parse_address(endpoint if ":" in endpoint else f"{endpoint}:{_PORT}")
    rank, name = _number(environment, "PET_NODE_RANK", asked.rank), ""
    if rank is None:
        # As in torchrun's own rendezvous, the node that has the address is the first.
        rank = 0 if is_here(host) else 1
        name = "" if rank == 0 else re.sub(r"[^A-Za-z0-9_-]", "-", socket.gethostname())[:80]
    elif rank >= nodes:
        raise ConfigError(
            f"the rank of this node is {rank}, which --node-rank or PET_NODE_RANK says, and there "
            f"are {nodes} nodes, as --nnodes or PET_NNODES says: ranks begin at 0"
        )
    return Elastic(Node(rank=rank, size=nodes, host=host, port=port, name=name))


class Elastic:
    """A job whose nodes know their ranks, or the address of the first."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.title = f"the job of {node.size} nodes at {joined(node.host, node.port)}"

    def secret(self, deadline: Deadline) -> Secret:
        """The secret that the user gives to all nodes."""
        return secret_of_environment()

    def finish(self) -> None:
        """Nothing: the job leaves nothing behind."""


def _number(
    environment: Mapping[str, str], name: str, asked: int | None, least: int = 0
) -> int | None:
    """Return the number of an option, else that of a variable; None if neither is set."""
    text = environment.get(name, "")
    if asked is not None or not text:
        return asked
    low, _, high = text.partition(":")
    if high and low != high:
        raise ConfigError(
            f"{name} is {text!r}: a job has a fixed number of nodes here; a node that is lost is "
            "awaited, or another one in its place"
        )
    if not is_count(low) or int(low) < least:
        raise ConfigError(
            f"{name} must be a number of at least {least}, not {text!r}; if another job has left "
            f"it behind, type: unset {name}"
        )
    return int(low)
