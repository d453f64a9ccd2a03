"""The trainable parameters of a pipeline, which live on workers, and the optimizer over them."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pipedream_rt import extras
from pipedream_rt.cluster.interface import Cluster, Reference
from pipedream_rt.coordinator.distributed_optimizer import DistributedOptimizer
from pipedream_rt.coordinator.feed.feeder import Feeder
from pipedream_rt.coordinator.feed.script_loss import ScriptLoss
from pipedream_rt.coordinator.recovery.feed_log import Role
from pipedream_rt.coordinator.recovery.group import WorkerGroup
from pipedream_rt.errors import ConfigError
from pipedream_rt.job.unsplit_model import UnsplitModel
from pipedream_rt.messages.message import CommandName
from pipedream_rt.messages.state_keys import StepState, by_key
from pipedream_rt.models import dumps
from pipedream_rt.schedules import Plan
from pipedream_rt.stage.hyper import Hyper
from pipedream_rt.stage.optimizer import OptimizerSpec
from pipedream_rt.transport.fence import refusal


def worker_of(stage: int, group: WorkerGroup) -> str:
    """Return the name of the worker that hosts a stage in this generation."""
    return group.cluster.names[group.plan.worker_of(group.plan.address_of(stage))]


@dataclass(frozen=True, slots=True)
class StageHandle:
    """One stage, as the coordinator sees it.

    Attributes:
        index: Number of the stage, 0-based.
        layers: Names of its layers in the unsplit model.
    """

    index: int
    layers: tuple[str, ...]
    _group: WorkerGroup
    _feeder: Feeder

    @property
    def worker(self) -> str:
        """Name of the worker that hosts the stage in this generation."""
        return worker_of(self.index, self._group)

    @property
    def rref(self) -> extras.StageReference:
        """A reference to the stage's module, through which its methods are called."""
        self._group.life.check()
        return extras.StageReference(self.index, self._group, self._feeder)


def refuse_left_out(cluster: Cluster) -> None:
    """Refuse what needs torch RPC."""
    if cluster.without_rpc:
        raise ConfigError(refusal(cluster.without_rpc))


class _Nowhere:
    """A reference to a parameter where torch RPC was left out: it only stands for the name."""

    def __init__(self, why: str) -> None:
        self._why = why

    def to_here(self) -> Any:
        raise ConfigError(refusal(self._why))

    def local_value(self) -> Any:
        return self.to_here()

    def owner_name(self) -> str:
        return str(self.to_here())


class Parameters:
    """The parameters of a pipeline: a reference to each, and the optimizer over these."""

    def __init__(
        self,
        group: WorkerGroup,
        feeder: Feeder,
        model: UnsplitModel,
        names: Sequence[str],
        script_loss: ScriptLoss | None,
    ) -> None:
        self._model = model
        self._feeder = feeder
        self._group = group
        self._script_loss = script_loss
        self._names = names  # of the trainable parameters, stage by stage
        self._by_generation: dict[int, list[tuple[Reference, str]]] = {}

    def handles(self) -> list[StageHandle]:
        """Return a handle for every stage, in order."""
        layers = self._group.plan.layers
        return [StageHandle(s, names, self._group, self._feeder) for s, names in enumerate(layers)]

    def of_parameters(self) -> list[tuple[Reference, str]]:
        """Return a reference to each trainable parameter, with its name."""
        # References are compared by identity, so each is made once in a generation.
        group = self._group
        if why := group.cluster.without_rpc:
            # They lead nowhere, so those of "generation 0" hold in all.
            if 0 not in self._by_generation:
                names = self._model.names.values()
                self._by_generation[0] = [(_Nowhere(why), name) for name in names]
            return self._by_generation[0]
        references = group.call(
            # Looked up inside, since the call may recover, and the generation is then another.
            lambda cluster: (
                [
                    reference
                    for stage in range(group.plan.num_stages)
                    for reference in cluster.parameter_references(group.plan.address_of(stage))
                ]
                if group.recovery.generation not in self._by_generation
                else []
            )
        )
        if group.recovery.generation not in self._by_generation:
            by_name = dict(zip(self._names, references, strict=True))
            # In the order of the unsplit model.
            named = [(by_name[name], name) for name in self._model.names.values()]
            self._by_generation[group.recovery.generation] = named
        return self._by_generation[group.recovery.generation]

    def build_optimizer(
        self,
        optimizer_class: type[torch.optim.Optimizer],
        kwargs: dict[str, Any],
        groups: list[tuple[list[str], Hyper]],
        attributes: Hyper,
    ) -> DistributedOptimizer:
        """Return an optimizer over references to named parameters."""
        by_name = {name: reference for reference, name in self.of_parameters()}
        optimizer = DistributedOptimizer(
            optimizer_class,
            [{"params": [by_name[name] for name in names], **options} for names, options in groups],
            **kwargs,
        )
        optimizer.attributes = attributes
        optimizer.defaults = copy.deepcopy(attributes.get("defaults", optimizer.defaults))
        return optimizer

    def use(self, optimizer: DistributedOptimizer) -> None:
        """Flush, and let the stages step with an optimizer from now on; its state starts empty."""
        if not isinstance(optimizer, DistributedOptimizer):
            raise ConfigError(
                "assign a DistributedOptimizer over pipe.parameter_rrefs(), not a "
                f"{type(optimizer).__name__}"
            )
        # References of earlier generations count too: the optimizer may be older than a recovery.
        self.of_parameters()
        every = self._by_generation.values()
        names = {id(reference): name for named in every for reference, name in named}
        try:
            spec = optimizer.spec(lambda reference: names[id(reference)])
        except KeyError:
            raise ConfigError("the optimizer has references of another pipeline") from None
        data, tensors = dumps(spec)
        if name := next((self._model.names[t] for t in tensors if t in self._model.names), ""):
            raise ConfigError(
                f"the optimizer holds the parameter {name} in an option or an attribute; stages "
                "would get copies of it, so keep what it needs by name or in its state"
            )
        self._feeder.flush()
        stepped = self._group.command(CommandName.OPTIMIZER, data)
        refuse_not_stepped_once(spec, self._group.plan, stepped)
        optimizer.attach(self, spec)
        self._feeder.optimizer = optimizer

    # -- what the optimizer asks of its pipeline ------------------------------------------------

    def optimizer_references(self) -> list[Reference]:
        """Return references to the torch optimizers of the stages."""
        plan = self._group.plan
        refuse_left_out(self._group.cluster)
        return self._group.call(
            lambda cluster: [cluster.reference(address, "optimizer") for address in plan.addresses]
        )

    def drop_gradients(self) -> None:
        """Drop the gradients of an update of forwards by hand, if one is open."""
        if self._script_loss is not None:
            self._script_loss.zero()

    def gather_optimizer_state(self) -> StepState:
        """Flush, and return the state of the optimizers of all stages."""
        self._feeder.flush()
        state: StepState = {}
        # Replicas have the same, or each has a shard of the stage's.
        for part in self._group.command(CommandName.OPTIMIZER_STATE):
            state.update(by_key(part))
        return state

    def scatter_optimizer_state(self, state: StepState) -> None:
        """Flush, and replace the state of the optimizers of all stages."""
        if state:
            self._feeder.flush()
            named: dict[str, dict[str, Any]] = {}
            for key, value in state.items():
                named.setdefault(key.name, {})[str(key)] = value
            self._group.command(CommandName.LOAD_OPTIMIZER_STATE, named, Role.OWN)


def refuse_not_stepped_once(spec: OptimizerSpec, plan: Plan, stepped: Sequence[list[str]]) -> None:
    """Refuse an optimizer if a parameter is stepped by no stage, or by several."""
    counts: Counter[str] = Counter()
    for address, names in enumerate(stepped):
        stage = plan.stage_of(address)
        # Unless the optimizer is sharded, each replica steps all parameters: one of them counts.
        if plan.shape.shards(stage) or plan.replica_of(address) == 0:
            counts.update(names)
    for name in (name for group in spec.groups for name in group.names):
        if counts[name] != 1:
            stages = [plan.stage_of(a) for a, names in enumerate(stepped) if name in names]
            raise ConfigError(
                f"the parameter {name} is in a group of the optimizer and must be stepped by one "
                f"stage, and it is stepped by {f'the stages {stages}' if stages else 'none'}; "
                "this is an error of pipedream-rt, so please report it with the model"
            )
