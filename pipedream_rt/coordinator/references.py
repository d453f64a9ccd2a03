"""References to what the workers hold, and the optimizer that steps there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cloudpickle
import torch

from pipedream_rt.cluster.base import Reference
from pipedream_rt.coordinator.distributed_optimizer import DistributedOptimizer
from pipedream_rt.coordinator.feed_log import Role
from pipedream_rt.coordinator.feeder import Feeder
from pipedream_rt.coordinator.group import Lease
from pipedream_rt.errors import ConfigError
from pipedream_rt.messages.message import CommandName
from pipedream_rt.stage.optimizer import Hyper


@dataclass(frozen=True, slots=True)
class StageHandle:
    """One stage, as the coordinator sees it.

    Attributes:
        index: 0-based.
        layers: Names of its layers in the unsplit model.
    """

    index: int
    layers: tuple[str, ...]
    _lease: Lease

    @property
    def worker(self) -> str:
        """Name of the worker that hosts it now."""
        group = self._lease.group
        return group.cluster.names[group.plan.worker_of(self.index)]

    @property
    def rref(self) -> Reference:
        """RRef to the sub-module; for inspection, and dead after a failure. Flush before reading.

        In-process pipelines give an object with the same methods.
        """
        return self._lease.group.call(lambda cluster: cluster.reference(self.index, "module"))


class References:
    """The references of a pipeline, and its optimizer, which is given over them.

    Args:
        lease: Of the workers.
        feeder: Sends the optimizer's hyper-parameters along with micro-batches, and flushes.
        names: Names of the trainable parameters, in the order of the unsplit model.
    """

    def __init__(self, lease: Lease, feeder: Feeder, names: list[str]) -> None:
        """Ask for none yet."""
        self._lease = lease
        self._feeder = feeder
        self._group = lease.group
        self._names = names
        self._by_generation: dict[int, list[tuple[Reference, str]]] = {}

    def handles(self) -> list[StageHandle]:
        """Return a handle of every stage."""
        layers = self._group.plan.layers
        return [StageHandle(s, names, self._lease) for s, names in enumerate(layers)]

    def of_parameters(self) -> list[tuple[Reference, str]]:
        """Return references to the trainable parameters, with their names.

        They are made once in each generation, since they are compared by identity.
        """
        group = self._group
        references = group.call(
            lambda cluster: (
                [
                    reference
                    for stage in range(group.plan.num_stages)
                    for reference in cluster.parameter_references(stage)
                ]
                if group.generation not in self._by_generation
                else []
            )
        )
        if group.generation not in self._by_generation:
            named = list(zip(references, self._names, strict=True))
            self._by_generation[group.generation] = named
        return self._by_generation[group.generation]

    def build_optimizer(
        self,
        optimizer_class: type[torch.optim.Optimizer],
        kwargs: dict[str, Any],
        groups: list[tuple[list[str], Hyper]],
    ) -> DistributedOptimizer:
        """Return an optimizer over references to named parameters.

        Args:
            optimizer_class: Of which every stage has an instance.
            kwargs: Its keyword arguments.
            groups: Names of the parameters of each group, and its options.
        """
        by_name = {name: reference for reference, name in self.of_parameters()}
        return DistributedOptimizer(
            optimizer_class,
            [{"params": [by_name[name] for name in names], **options} for names, options in groups],
            **kwargs,
        )

    def use(self, optimizer: DistributedOptimizer) -> None:
        """Let the stages step with an optimizer, whose state starts empty. Flushes.

        Raises:
            ConfigError: It is something else, or has references of another pipeline.
        """
        if not isinstance(optimizer, DistributedOptimizer):
            raise ConfigError(
                "assign a DistributedOptimizer over pipe.parameter_rrefs(), not a "
                f"{type(optimizer).__name__}"
            )
        # Those of earlier generations too: the optimizer may have been made before a recovery.
        self.of_parameters()
        every = self._by_generation.values()
        names = {id(reference): name for named in every for reference, name in named}
        try:
            spec = optimizer.spec(lambda reference: names[id(reference)])
        except KeyError:
            raise ConfigError("the optimizer has references of another pipeline") from None
        self._feeder.flush()
        self._group.command(CommandName.OPTIMIZER, cloudpickle.dumps(spec))
        optimizer.attach(self, spec)
        self._feeder.optimizer = optimizer

    # -- what the optimizer asks of its pipeline ------------------------------------------------

    def optimizer_references(self) -> list[Reference]:
        """See `OptimizerLink`."""
        stages = range(self._group.plan.num_stages)
        return self._group.call(
            lambda cluster: [cluster.reference(stage, "optimizer") for stage in stages]
        )

    def gather_optimizer_state(self) -> dict[str, dict[str, Any]]:
        """See `OptimizerLink`."""
        self._feeder.flush()
        state: dict[str, dict[str, Any]] = {}
        for part in self._group.command(CommandName.OPTIMIZER_STATE):
            state.update(part)
        return state

    def scatter_optimizer_state(self, state: dict[str, dict[str, Any]]) -> None:
        """See `OptimizerLink`."""
        if state:
            self._feeder.flush()
            self._group.command(CommandName.LOAD_OPTIMIZER_STATE, state, Role.OWN)
