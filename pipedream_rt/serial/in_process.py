"""Stages in this process: the part of a cluster that does not give them their turns."""

from __future__ import annotations

import time
from typing import Any

import torch

from pipedream_rt.cluster.interface import ClusterSpec, Reference
from pipedream_rt.errors import PipelineError
from pipedream_rt.models.settings import refuse_global_hooks, refuse_other_settings, settings_now
from pipedream_rt.schedules import COORDINATOR
from pipedream_rt.stage.host import StageHost
from pipedream_rt.tracing.clock import Reading
from pipedream_rt.transport.interface import GenerationSender, Lost, Receive, Transport


class _LocalReference:
    """A `Reference` to a value in this process."""

    def __init__(self, value: Any, owner: str) -> None:
        self._value = value
        self._owner = owner

    def to_here(self) -> Any:
        """Return the value; of a tensor, a copy."""
        return (
            self._value.detach().clone() if isinstance(self._value, torch.Tensor) else self._value
        )

    def local_value(self) -> Any:
        return self._value

    def owner_name(self) -> str:
        return self._owner


class ClusterHere:
    """The part of a `Cluster` that is the same however stages in this process get their turns."""

    without_rpc = ""

    def __init__(self, spec: ClusterSpec, transport: Transport) -> None:
        self._plan = plan = spec.plan
        self._settings = settings_now()  # of torch, when the pipeline was opened
        self.transport = transport
        transport.open(COORDINATOR, spec.receive, spec.fail)
        self._hosts = [
            StageHost(
                worker,
                plan.name_of(worker),
                plan.stages_of(worker),
                spec.generation,
                GenerationSender(transport, spec.generation),
                spec.timeout,
                spec.threads,
            )
            for worker in range(plan.workers)
        ]
        self.names = tuple(host.plain_name for host in self._hosts)
        self.host_ids = ("",) * len(self._hosts)

    def check_settings_unchanged(self) -> None:
        """Refuse changed settings of torch and global hooks, which would act on stages here too."""
        refuse_other_settings(self._settings)
        refuse_global_hooks()

    def _open(self, host: StageHost, receive: Receive, lost: Lost) -> None:
        """Begin to receive for the stages of a host."""
        for stage in self._plan.stages_of(host.worker):
            self.transport.open(stage, receive, lost)

    def name_loss(self, error: PipelineError) -> PipelineError:
        """Return the error as it is: a worker in this process is never lost."""
        return error

    def stories(self) -> list[str]:
        return [f"{host.name}: {host.inbox.story()}" for host in self._hosts]

    def status(self) -> list[dict[str, Any]]:
        """Empty, as there are no worker processes."""
        return []

    def clocks(self) -> list[Reading]:
        """The clock of this process, for all workers."""
        now = time.monotonic_ns()
        return [Reading(now, now, now)] * self._plan.workers

    def newcomers(self) -> int:
        return 0

    def reference(self, stage: int, part: str) -> Reference:
        worker = self._plan.worker_of(stage)
        return _LocalReference(self._hosts[worker].part(stage, part), self.names[worker])

    def parameter_references(self, stage: int) -> list[Reference]:
        worker = self._plan.worker_of(stage)
        parameters = self._hosts[worker].part(stage, "parameters")
        return [_LocalReference(p, self.names[worker]) for p in parameters]
