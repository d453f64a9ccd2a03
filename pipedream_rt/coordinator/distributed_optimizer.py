"""The optimizer in the user's script: it holds parameter groups, and the stages hold the state."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from pipedream_rt.cluster.base import Reference
from pipedream_rt.errors import ConfigError, PipelineError
from pipedream_rt.stage.optimizer import GroupSpec, Hyper, OptimizerSpec, plain_hyper


class OptimizerLink(Protocol):
    """What the optimizer asks of its pipeline."""

    def optimizer_references(self) -> list[Reference]:
        """Return references to the torch optimizers of the stages."""

    def gather_optimizer_state(self) -> dict[str, dict[str, Any]]:
        """Return the state of every parameter, by name in the unsplit model."""

    def scatter_optimizer_state(self, state: dict[str, dict[str, Any]]) -> None:
        """Replace the state of the given parameters, by name in the unsplit model."""


@dataclass(frozen=True, slots=True)
class _Link:
    """The pipeline that uses the optimizer, with the names of its parameters in group order."""

    pipeline: OptimizerLink
    names: tuple[str, ...]


def _placeholder() -> Tensor:
    """Return what stands for a parameter on a worker: `torch.optim.Optimizer` demands tensors."""
    return nn.Parameter(torch.empty(1, 1))  # of two dimensions, since Muon accepts no others


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
        """Check the arguments by building an optimizer of the class over placeholders."""
        groups = _as_groups(list(params_rref))
        self.params_rref: list[list[Reference]] = [list(group["params"]) for group in groups]
        self._options = [{k: v for k, v in g.items() if k != "params"} for g in groups]
        self._class, self._args, self._kwargs = optimizer_class, args, kwargs
        self._link: _Link | None = None
        prototype = build_prototype(
            optimizer_class,
            [
                {"params": [_placeholder() for _ in references], **options}
                for references, options in zip(self.params_rref, self._options, strict=True)
            ],
            args,
            kwargs,
        )
        super().__init__(prototype.param_groups, prototype.defaults)

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
        )

    def attach(self, pipeline: OptimizerLink, spec: OptimizerSpec) -> None:
        """Belong to a pipeline, whose stages step with this optimizer from now on.

        Args:
            pipeline: The pipeline.
            spec: The description that the stages were given.
        """
        self._link = _Link(pipeline, tuple(n for group in spec.groups for n in group.names))

    def hyper(self) -> list[Hyper]:
        """Return the hyper-parameters of every group, as they travel with a micro-batch."""
        return [plain_hyper(group) for group in self.param_groups]

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        """Do nothing but let schedulers count the update; the stages apply it.

        Raises:
            ConfigError: A closure was given.
        """
        if closure is not None:
            raise ConfigError("a closure cannot be called on several workers; step takes none")

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing: every stage begins each update without gradients."""

    def state_dict(self) -> dict[str, Any]:
        """Flush, and return state and groups as the unsplit model's own optimizer would.

        Raises:
            PipelineError: No pipeline uses this optimizer yet.
        """
        link = self._linked()
        state = link.pipeline.gather_optimizer_state()
        packed = super().state_dict()
        packed["state"] = {i: state[n] for i, n in enumerate(link.names) if n in state}
        return packed

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of this optimizer, or of one over the unsplit model. Flushes.

        Raises:
            PipelineError: No pipeline uses this optimizer yet.
            ValueError: The groups of the state dict are not those of this optimizer.
        """
        link = self._linked()
        state = state_dict["state"]
        super().load_state_dict({**state_dict, "state": {}})
        link.pipeline.scatter_optimizer_state(
            {name: state[i] for i, name in enumerate(link.names) if i in state}
        )

    def _linked(self) -> _Link:
        """Return the pipeline that uses this optimizer.

        Raises:
            PipelineError: No pipeline uses it yet.
        """
        if self._link is None:
            raise PipelineError("no pipeline uses this optimizer; assign it to pipe.optimizer")
        return self._link


def _as_groups(params: list[Any]) -> list[dict[str, Any]]:
    """Return the parameter groups of the constructor's argument: a list of references is one.

    Raises:
        ConfigError: There are no parameters.
    """
    if not params:
        raise ConfigError("the optimizer got no parameters")
    if not isinstance(params[0], dict):
        return [{"params": params}]
    return [{**group, "params": list(group["params"])} for group in params]


def build_prototype(
    optimizer_class: type[torch.optim.Optimizer],
    groups: list[dict[str, Any]],
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
) -> torch.optim.Optimizer:
    """Build an optimizer in this process, which checks its arguments and fills in its defaults.

    Args:
        optimizer_class: Class of the optimizer.
        groups: The parameter groups, over placeholders.
        args: Positional arguments after the groups.
        kwargs: Keyword arguments.

    Raises:
        ConfigError: The class cannot be used in a pipeline, or does not accept these arguments.
    """
    if not (
        isinstance(optimizer_class, type) and issubclass(optimizer_class, torch.optim.Optimizer)
    ):
        raise ConfigError(f"{optimizer_class!r} is no subclass of torch.optim.Optimizer")
    if issubclass(optimizer_class, torch.optim.LBFGS):
        raise ConfigError("LBFGS evaluates the model several times in a step; a pipeline cannot")
    build: Any = optimizer_class
    try:
        prototype: torch.optim.Optimizer = build(groups, *args, **(kwargs or {}))
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(f"{optimizer_class.__name__} refused its arguments: {error}") from error
    return prototype


OptimizerArgument = (
    tuple[type[torch.optim.Optimizer], dict[str, Any]] | torch.optim.Optimizer | None
)
"""What `Pipeline` accepts: a class with keyword arguments, or an optimizer over the model."""


def grouped_names(
    argument: OptimizerArgument, names: dict[int, str]
) -> tuple[type[torch.optim.Optimizer], dict[str, Any], list[tuple[list[str], Hyper]]] | None:
    """Check the optimizer argument of `Pipeline`, before a worker starts, and take it apart.

    Args:
        argument: See `OptimizerArgument`.
        names: Name of each trainable parameter of the model by its ``id``.

    Returns:
        The class, its keyword arguments, and for each group the names of its parameters and its
        options; None without an optimizer.

    Raises:
        ConfigError: The argument is no optimizer, or not one over this model's parameters.
    """
    if argument is None:
        return None
    if isinstance(argument, torch.optim.Optimizer):
        return type(argument), {}, [_named_group(g, names) for g in argument.param_groups]
    if not isinstance(argument, Sequence) or len(argument) != 2:
        raise ConfigError(
            "optimizer must be (class, dict of its arguments) or a torch optimizer over the "
            f"model's parameters, not {argument!r}"
        )
    optimizer_class, kwargs = argument
    build_prototype(optimizer_class, [{"params": [_placeholder()]}], (), kwargs)
    return optimizer_class, dict(kwargs), [(list(names.values()), {})]


def state_by_name(argument: OptimizerArgument, names: dict[int, str]) -> dict[str, dict[str, Any]]:
    """Return the state that an optimizer already has, by name of its parameter.

    Args:
        argument: See `OptimizerArgument`.
        names: Name of each trainable parameter of the model by its ``id``.
    """
    if not isinstance(argument, torch.optim.Optimizer):
        return {}
    return {names[id(p)]: dict(state) for p, state in argument.state.items() if id(p) in names}


def _named_group(group: dict[str, Any], names: dict[int, str]) -> tuple[list[str], Hyper]:
    """Return the parameter names and the options of one group of the user's own optimizer.

    Raises:
        ConfigError: The group has a trainable parameter that is not one of the model's.
    """
    found = []
    for parameter in group["params"]:
        if id(parameter) in names:
            found.append(names[id(parameter)])
        elif parameter.requires_grad:
            raise ConfigError("the optimizer has a parameter that is not one of the model's")
    return found, {k: v for k, v in group.items() if k != "params"}
