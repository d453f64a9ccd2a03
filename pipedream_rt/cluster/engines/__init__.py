"""Engines: what places and restarts the processes of a job. Messages and recovery stay ours.

There are two kinds, each behind a small protocol, and one file for each engine:

- `Membership`: an engine that starts the same command everywhere, `pipedream-rt run SCRIPT`, and
  says in the environment which node each process is. The first process runs the script, and all
  of them run its workers. A new one takes a file and a line in `_FINDERS`.
- `Supervisor`: an engine that the script asks for workers. A new one takes a file and a line in
  the table of `pipedream_rt.cluster.launch`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from pipedream_rt.cluster.engines import elastic, slurm
from pipedream_rt.cluster.engines.interface import EngineRequest, Membership, Node, Supervisor

__all__ = ["EngineRequest", "Membership", "Node", "Supervisor", "membership"]

_FINDERS: tuple[Callable[[Mapping[str, str], EngineRequest], Membership | None], ...] = (
    elastic.found,  # first: what the user or Kubeflow says outranks what is only detected
    slurm.found,
)


def membership(environment: Mapping[str, str], asked: EngineRequest) -> Membership | None:
    """Return the job whose engine has started this process; None if there is none."""
    return next((made for find in _FINDERS if (made := find(environment, asked))), None)
