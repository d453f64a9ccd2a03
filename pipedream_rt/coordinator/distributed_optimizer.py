"""The optimizer as the coordinator sees it: parameter groups here, states on the stages."""

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
    """What the optimizer needs of its pipeline."""

    def optimizer_references(self) -> list[Reference]:
        """Return references to the torch optimizers of the stages."""

    def gather_optimizer_state(self) -> dict[str, dict[str, Any]]:
        """Return the state of every parameter, by name in the unsplit model."""

    def scatter_optimizer_state(self, state: dict[str, dict[str, Any]]) -> None:
        """Replace it."""


@dataclass(frozen=True, slots=True)
class _Link:
    """Names of the parameters in the order of the groups, once a pipeline uses the optimizer."""

    pipeline: OptimizerLink
    names: tuple[str, ...]


def _placeholder() -> Tensor:
    """Stands for a parameter that lives on a worker: torch's own class wants tensors."""
    return nn.Parameter(torch.empty(1, 1))  # of two dimensions, since Muon takes no others


class DistributedOptimizer(torch.optim.Optimizer):
    """An optimizer over parameters that live on workers.

    It has the constructor of `torch.distributed.optim.DistributedOptimizer`, and is itself a
    `torch.optim.Optimizer`: learning-rate schedulers and ``param_groups`` work as usual. The
    stages step by themselves, each with an ordinary optimizer of the class given; the values of
    the groups at the moment when a micro-batch is injected travel with it and apply to its update
    at every stage. `step` is therefore called by the pipeline, at each injection, and does nothing
    but count for schedulers.

    The tensors in ``param_groups`` are placeholders, in the order of ``params_rref``.

    Args:
        optimizer_class: Any subclass of `torch.optim.Optimizer` that needs no closure.
        params_rref: From `Pipeline.parameter_rrefs`; or groups, dicts with ``"params"``.
        *args: Positional arguments of the class after the parameters.
        **kwargs: Its keyword arguments.

    Raises:
        ConfigError: The arguments do not fit the class.
    """

    def __init__(
        self,
        optimizer_class: type[torch.optim.Optimizer],
        params_rref: Iterable[Reference] | Iterable[dict[str, Any]],
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Check the arguments by building the class over placeholders."""
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
        """Describe it for the stages.

        Args:
            name_of: Name in the unsplit model of a referenced parameter.
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
        """Called by the pipeline whose stages step with it from now on."""
        self._link = _Link(pipeline, tuple(n for group in spec.groups for n in group.names))

    def hyper(self) -> list[Hyper]:
        """Return the plain values of every group, as they travel with a micro-batch."""
        return [plain_hyper(group) for group in self.param_groups]

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        """Count an update for schedulers; the stages do the work.

        Raises:
            ConfigError: A closure was given.
        """
        if closure is not None:
            raise ConfigError("a closure cannot be called on several workers; step takes none")

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing: every stage starts an update without gradients."""

    def state_dict(self) -> dict[str, Any]:
        """Return state and groups as the unsplit model's own optimizer would. Flushes the pipe.

        Raises:
            PipelineError: No pipeline uses this optimizer yet.
        """
        link = self._linked()
        state = link.pipeline.gather_optimizer_state()
        packed = super().state_dict()
        packed["state"] = {i: state[n] for i, n in enumerate(link.names) if n in state}
        return packed

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` of this or of the unsplit model's optimizer gave.

        Raises:
            PipelineError: No pipeline uses this optimizer yet.
            ValueError: The groups differ.
        """
        link = self._linked()
        state = state_dict["state"]
        super().load_state_dict({**state_dict, "state": {}})
        link.pipeline.scatter_optimizer_state(
            {name: state[i] for i, name in enumerate(link.names) if i in state}
        )

    def _linked(self) -> _Link:
        """The pipeline, or an error that says how to get one."""
        if self._link is None:
            raise PipelineError("no pipeline uses this optimizer; assign it to pipe.optimizer")
        return self._link


def _as_groups(params: list[Any]) -> list[dict[str, Any]]:
    """Accept references or groups of references."""
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
    """Build an optimizer here, to have its arguments checked and its defaults filled in.

    Raises:
        ConfigError: The class cannot be used, or does not take these arguments.
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
"""What `Pipeline` takes: a class with keyword arguments, or an optimizer over the model."""


def grouped_names(
    argument: OptimizerArgument, names: dict[int, str]
) -> tuple[type[torch.optim.Optimizer], dict[str, Any], list[tuple[list[str], Hyper]]] | None:
    """Check the optimizer argument of `Pipeline`, before anything starts.

    Args:
        argument: See `OptimizerArgument`.
        names: Name of each trainable parameter of the model by its ``id``.

    Returns:
        Class, keyword arguments, and for each group the names of its parameters and its options;
        None without an optimizer.

    Raises:
        ConfigError: It cannot be used for this model.
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
    """Return the state that an optimizer brings along, as when training is resumed.

    Args:
        argument: See `OptimizerArgument`.
        names: Name of each trainable parameter of the model by its ``id``.
    """
    if not isinstance(argument, torch.optim.Optimizer):
        return {}
    return {names[id(p)]: dict(state) for p, state in argument.state.items() if id(p) in names}


def _named_group(group: dict[str, Any], names: dict[int, str]) -> tuple[list[str], Hyper]:
    """One group of an optimizer that the user built."""
    found = []
    for parameter in group["params"]:
        if id(parameter) in names:
            found.append(names[id(parameter)])
        elif parameter.requires_grad:
            raise ConfigError("the optimizer has a parameter that is not one of the model's")
    return found, {k: v for k, v in group.items() if k != "params"}
