"""The optimizer in the user's script: it holds parameter groups, and the stages hold the state."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from pipedream_rt.cluster.interface import Reference
from pipedream_rt.dynamo import dynamo_spared
from pipedream_rt.errors import ConfigError, PipelineError
from pipedream_rt.job.given_optimizer import build_prototype, placeholder
from pipedream_rt.messages.state_keys import (
    GROUP,
    OPTIMIZER,
    StateKey,
    StepState,
    by_name,
    optimizer_state,
)
from pipedream_rt.models.code import code_of
from pipedream_rt.stage.hyper import Hyper, pack_group, pack_values, set_hyper
from pipedream_rt.stage.optimizer import GroupSpec, OptimizerSpec
from pipedream_rt.stage.stepping import step


class OptimizerLink(Protocol):
    """The part of a pipeline that its optimizer uses."""

    def optimizer_references(self) -> list[Reference]:
        """Return references to the torch optimizers of the stages."""

    def gather_optimizer_state(self) -> StepState:
        """Return the state of the optimizers of all stages."""

    def scatter_optimizer_state(self, state: StepState) -> None:
        """Replace the state of the optimizers of all stages."""

    def drop_gradients(self) -> None:
        """Drop the gradients of an update of forwards by hand."""


@dataclass(frozen=True, slots=True)
class _PipelineInUse:
    """The pipeline that uses the optimizer, with the names of its parameters in group order."""

    pipeline: OptimizerLink
    names: tuple[str, ...]


class _Placeholder(nn.Parameter):
    """Stands for a parameter on a worker, since `torch.optim.Optimizer` demands tensors."""

    @property
    def grad(self) -> Tensor | None:  # type: ignore[override]
        raise ConfigError(
            "the parameters in pipe.optimizer live on workers, so they have no gradients to clip "
            "or to read here; clipping by value or norm can be done by a hook of the parameter "
            "(register_hook) or in a subclass of the optimizer"
        )


class DistributedOptimizer(torch.optim.Optimizer):
    """An optimizer over parameters that live on workers.

    It has the constructor of `torch.distributed.optim.DistributedOptimizer`, and is itself a
    `torch.optim.Optimizer`: learning-rate schedulers and ``param_groups`` work as usual. Each stage
    steps by itself, with an ordinary optimizer of the given class. The hyper-parameters that the
    groups have when a mini-batch is injected travel with its micro-batches, and apply to its update
    at every stage. The pipeline calls `step` at each injection; the call only lets learning-rate
    schedulers see that a step was made.

    The tensors in ``param_groups`` are placeholders, in the order of ``params_rref``.

    Args:
        optimizer_class: Any subclass of `torch.optim.Optimizer` that needs no closure.
        params_rref: The references from `Pipeline.parameter_rrefs`, or a list of groups: dicts
            that have references under ``"params"`` and options of the class under other keys.
        *args: Positional arguments of the class after the parameters.
        **kwargs: Keyword arguments of the class.

    Attributes:
        params_rref: The references to the parameters of each group.
        attributes: Attributes that every stage's optimizer gets after it was built.
        given: The hyper-parameters of each group as the constructor was given them, packed.

    Raises:
        ConfigError: The class does not accept the arguments, or there are no parameters.
    """

    def __init__(
        self,
        optimizer_class: type[torch.optim.Optimizer],
        params_rref: Iterable[Reference] | Iterable[dict[str, Any]],
        *args: Any,
        **kwargs: Any,
    ) -> None:
        groups = _as_groups(list(params_rref))
        self.params_rref: list[list[Reference]] = [list(group["params"]) for group in groups]
        self._options = [{k: v for k, v in g.items() if k != "params"} for g in groups]
        self._class, self._args, self._kwargs = optimizer_class, args, kwargs
        self._link: _PipelineInUse | None = None
        self.attributes: Hyper = {}
        prototype = build_prototype(
            optimizer_class,
            [
                {"params": [placeholder() for _ in references], **options}
                for references, options in zip(self.params_rref, self._options, strict=True)
            ],
            args,
            kwargs,
        )
        super().__init__(
            [
                {
                    **group,
                    "params": [
                        # Of two dimensions, since Muon accepts no others.
                        _Placeholder(torch.empty(1, 1, device="cpu"))
                        for _ in group["params"]
                    ],
                }
                for group in prototype.param_groups
            ],
            prototype.defaults,
        )
        self._injecting = False
        self._is_read = True
        self.given = self.groups()
        self.begin_anew()

    @property
    def state(self) -> defaultdict[Tensor, Any]:
        """No state is kept here; it is on the stages.

        Raises:
            ConfigError: Always, but for torch's own methods.
        """
        if vars(self).get("_is_read"):  # not set yet while torch's constructor runs
            raise ConfigError(
                "the state of pipe.optimizer is on the stages, so there is none to read or to set "
                "here; pipe.optimizer.state_dict()['state'] gathers it, by the number of the "
                "parameter, and load_state_dict() sets it"
            )
        return self._nothing

    @state.setter
    def state(self, state: defaultdict[Tensor, Any]) -> None:
        """Keep what torch's constructor sets."""
        self._nothing = state

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Let torch's own methods, called in the body, read an empty state."""
        before, self._is_read = self._is_read, False
        try:
            yield
        finally:
            self._is_read = before

    @property
    def optimizer_class(self) -> type[torch.optim.Optimizer]:
        """The class of which every stage has an instance."""
        return self._class

    @property
    def remote_optimizers(self) -> list[Reference]:
        """References to the stages' own torch optimizers, each on its worker.

        Raises:
            PipelineError: No pipeline uses this optimizer yet.
        """
        return self._linked().pipeline.optimizer_references()

    def spec(self, name_of: Callable[[Reference], str]) -> OptimizerSpec:
        """Return the description from which each stage builds its own optimizer.

        Args:
            name_of: Returns the name in the unsplit model of a referenced parameter.
        """
        return OptimizerSpec(
            optimizer_class=self._class,
            args=self._args,
            kwargs=self._kwargs,
            groups=tuple(
                GroupSpec(names=tuple(map(name_of, references)), options=options)
                for references, options in zip(self.params_rref, self._options, strict=True)
            ),
            attributes=self.attributes,
            code=code_of([self._class]),
        )

    def names(self) -> list[list[str]]:
        """Return the names of the parameters, by group, once a pipeline uses the optimizer."""
        names = iter(self._linked().names)
        return [[next(names) for _ in references] for references in self.params_rref]

    def attach(self, pipeline: OptimizerLink, spec: OptimizerSpec) -> None:
        """Belong to a pipeline, whose stages step with this optimizer from now on.

        Args:
            pipeline: The pipeline.
            spec: The description that the stages were given.
        """
        self._link = _PipelineInUse(
            pipeline, tuple(n for group in spec.groups for n in group.names)
        )

    def begin_anew(self) -> None:
        """Note that the stages have the groups as they are now."""
        self._at_stages = self.groups()
        self._unpackable = [
            {name: id(group[name]) for name in group if name not in ("params", *packed)}
            for group, packed in zip(self.param_groups, self._at_stages, strict=True)
        ]
        self._changed: list[set[str]] = [set() for _ in self.param_groups]

    def insist(self, saved: Sequence[Hyper]) -> None:
        """From now on send the values that differ from other groups, as changes by the script.

        Args:
            saved: The other groups, packed.
        """
        for changed, mine, theirs in zip(self._changed, self.groups(), saved):
            changed.update(name for name, value in mine.items() if theirs.get(name) != value)

    def groups(self) -> list[Hyper]:
        """Return all hyper-parameters of every group, packed by `pack_hyper`."""
        return [pack_group(group) for group in self.param_groups]

    def hyper(self) -> list[Hyper]:
        """Return those hyper-parameters of every group that the script has ever changed, packed.

        The others are left to the optimizers on the stages, which may keep values of their own in
        their groups, such as a count of steps.

        Raises:
            ConfigError: One has a value that cannot be sent to the stages.
        """
        found = []
        groups = zip(
            self.param_groups, self._at_stages, self._unpackable, self._changed, strict=True
        )
        for group, before, odd, changed in groups:
            # What cannot be packed stays with the stages until it is replaced.
            sent = {n: v for n, v in group.items() if n != "params" and odd.get(n) != id(v)}
            packed = pack_values(sent)
            changed.update(n for n, v in packed.items() if n not in before or before[n] != v)
            found.append({name: value for name, value in packed.items() if name in changed})
        return found

    def count_step(self) -> None:
        """Let learning-rate schedulers see that a step was made; the pipeline calls this."""
        self._injecting = True
        try:
            step(self)
        finally:
            self._injecting = False

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        """Do nothing; the stages step by themselves.

        Raises:
            ConfigError: The script has called it.
        """
        if not self._injecting:
            raise ConfigError(
                "pipe.optimizer.step() has nothing to do: every stage steps by itself once a "
                "mini-batch is through; remove the call. In a loop of forward() by hand, "
                "pipe.step() makes the update"
            )

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Refuse a `torch.amp.GradScaler`, which asks for this before it steps."""
        raise ConfigError(
            "a GradScaler cannot step pipe.optimizer, since gradients are on the stages: leave the "
            "scaler out, and give Pipeline training=Training(autocast=torch.float16), which scales "
            "losses there by LossScale()"
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; only the constructor does.

        Raises:
            ConfigError: The stages have their optimizers already.
        """
        if hasattr(self, "_at_stages"):
            raise ConfigError(
                "the stages have built their optimizers, so no group can be added; assign a new "
                "one: pipe.optimizer = DistributedOptimizer(cls, [{'params': [...]}, ...])"
            )
        super().add_param_group(param_group)

    def register_step_pre_hook(self, hook: Any) -> Any:
        """Refuse a hook, which would be called in the script, where no step is made.

        Raises:
            ConfigError: Always.
        """
        raise _no_hooks()

    def register_step_post_hook(self, hook: Any) -> Any:
        """Refuse a hook, which would be called in the script, where no step is made.

        Raises:
            ConfigError: Always.
        """
        raise _no_hooks()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of the forwards by hand since the last `Pipeline.step`.

        Without such forwards there is nothing to do: every stage begins each update without
        gradients.

        Raises:
            ConfigError: A backward has gone to the stages already, for the gradient of an input.
        """
        if self._link is not None:
            self._link.pipeline.drop_gradients()

    @dynamo_spared()
    def state_dict(self) -> dict[str, Any]:
        """Flush, and return state and groups as the unsplit model's own optimizer would.

        Raises:
            PipelineError: No pipeline uses this optimizer yet.
        """
        link = self._linked()
        state = link.pipeline.gather_optimizer_state()
        with self._reading():
            packed: dict[str, Any] = super().state_dict()
        for number, group in enumerate(packed["param_groups"]):
            own = {k: v for k, v in state.items() if k.part == GROUP and k.path[0] == number}
            # Each stage keeps its own values of a group; those of one stand for all.
            first = min((key.name for key in own), default="")
            set_hyper(group, {str(k.path[1]): v for k, v in own.items() if k.name == first})
        found = by_name(state, OPTIMIZER, link.names)
        packed["state"] = {
            i: {path[0]: value for path, value in found[name].items()}
            for i, name in enumerate(link.names)
            if any(found[name])
        }
        return packed

    @dynamo_spared()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of this optimizer, or of one over the unsplit model. Flushes.

        Raises:
            PipelineError: No pipeline uses this optimizer yet.
            ConfigError: It is no state dict of an optimizer.
            ValueError: The groups of the state dict are not those of this optimizer.
        """
        link = self._linked()
        if not (isinstance(state_dict, dict) and {"state", "param_groups"} <= state_dict.keys()):
            raise ConfigError(
                "the state dict of an optimizer is a dict with 'state' and 'param_groups', not "
                f"{_shown(state_dict)}"
            )
        state, mine = state_dict["state"], self.param_groups
        super().load_state_dict({**state_dict, "state": {}})  # the stages get the state
        for group, loaded in zip(mine, self.param_groups, strict=True):
            group |= loaded  # an optimizer that shares the groups sees the new values
        self.param_groups = mine
        groups = {
            StateKey(GROUP, path=(number, name)): value
            for number, group in enumerate(self.groups())
            for name, value in group.items()
        }
        named = {name: state[i] for i, name in enumerate(link.names) if i in state}
        link.pipeline.scatter_optimizer_state(optimizer_state(named) | groups)
        self.begin_anew()

    def _linked(self) -> _PipelineInUse:
        """Return the pipeline that uses this optimizer."""
        if self._link is None:
            raise PipelineError("no pipeline uses this optimizer; assign it to pipe.optimizer")
        return self._link


def _shown(value: object) -> str:
    """Return a value in few words, for an error."""
    return (
        f"one with {sorted(map(str, value))[:5]}" if isinstance(value, dict) else repr(value)[:80]
    )


def _no_hooks() -> ConfigError:
    return ConfigError(
        "a hook on the steps of pipe.optimizer would be called in the script, but every stage "
        "steps by itself; subclass the optimizer and do it in its step, or hook the parameters"
    )


def _as_groups(params: list[Any]) -> list[dict[str, Any]]:
    """Return the groups of the constructor's argument; a list of references is one group."""
    if not params:
        raise ConfigError("the optimizer got no parameters")
    if not isinstance(params[0], dict):
        return [{"params": params}]
    return [{**group, "params": list(group["params"])} for group in params]
