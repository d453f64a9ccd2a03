"""Engines place and restart the processes of a job; messages, versions and recovery stay ours.

There are two kinds, each behind a small protocol, and one file for each engine:

- An engine that starts the same command everywhere, `pipedream-rt run SCRIPT`, says in the
  environment where each process stands: `Membership`. The first process runs the script, and all
  of them serve it with workers. To add one is a file and a line in `_FINDERS`.
- An engine that the script asks for workers: `Supervisor`. To add one is a file and a line in the
  table of `pipedream_rt.cluster.launch`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from pipedream_rt.cluster.engines import elastic, slurm
from pipedream_rt.cluster.engines.base import Asked, Membership, Node, Supervisor

__all__ = ["Asked", "Membership", "Node", "Supervisor", "membership"]

_FINDERS: tuple[Callable[[Mapping[str, str], Asked], Membership | None], ...] = (
    elastic.found,  # what the user or Kubeflow says comes before what is only found
    slurm.found,
)


def membership(environment: Mapping[str, str], asked: Asked) -> Membership | None:
    """Return what stands for the engine that has started this process."""
    return next((made for find in _FINDERS if (made := find(environment, asked))), None)
