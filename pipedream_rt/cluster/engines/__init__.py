"""Engines: what places and restarts the processes of a job. Messages and recovery stay ours.

For the script their workers are `Elsewhere`. There are two kinds, with one file for each engine:

- `NodeJob`: an engine that starts the same command everywhere, `pipedream-rt run SCRIPT`, and
  says in the environment which node each process is. The first process runs the script, and all
  of them run its workers. A new one takes a file and a line in `_FINDERS`.
- An engine that the script asks for workers is an `Elsewhere` that starts them. A new one takes a
  file, and a line in `pipedream_rt.extras` and in the table of `pipedream_rt.cluster.generations`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from pipedream_rt.cluster.engines import elastic, slurm
from pipedream_rt.cluster.environment import left_over
from pipedream_rt.cluster.node_job import EngineRequest, Node, NodeJob

__all__ = ["EngineRequest", "Node", "NodeJob", "node_job", "why_nodes"]

_FINDERS: tuple[Callable[[Mapping[str, str], EngineRequest], NodeJob | None], ...] = (
    elastic.found,  # first: what the user or Kubeflow says outranks what is only detected
    slurm.found,
)


def why_nodes(environment: Mapping[str, str]) -> str:
    """The variables that make this process a node of a job, for messages; empty for none."""
    for names in (elastic.VARIABLES, slurm.VARIABLES[1:]):
        if environment.get(names[0]):
            return left_over(*names)
    return ""


def node_job(environment: Mapping[str, str], asked: EngineRequest) -> NodeJob | None:
    """Return the job whose engine has started this process; None if there is none."""
    return next((made for find in _FINDERS if (made := find(environment, asked))), None)
