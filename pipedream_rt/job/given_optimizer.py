"""The optimizer that a script gives to `Pipeline`: checked, and taken apart by names."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from pipedream_rt.errors import ConfigError
from pipedream_rt.stage.hyper import Hyper, pack_group
from pipedream_rt.stage.optimizer import own_attributes


def placeholder() -> Tensor:
    """Return what stands for a parameter in an optimizer that never steps."""
    # Two dimensions, since Muon accepts no others.
    return nn.Parameter(torch.empty(1, 1, device="cpu"))


def build_prototype(
    optimizer_class: type[torch.optim.Optimizer],
    groups: list[dict[str, Any]],
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
) -> torch.optim.Optimizer:
    """Build an optimizer in this process, to check its arguments and fill in its defaults."""
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


GroupRule: TypeAlias = tuple[str | Callable[[str, Tensor], bool], dict[str, Any]]
"""Which parameters are in a group, and its options. Which ones: a pattern of names, in which ``*``
stands for any letters, as ``"*.bias"``; or a function of a name and a parameter."""

OptimizerArgument: TypeAlias = (
    tuple[type[torch.optim.Optimizer], dict[str, Any]]
    | tuple[type[torch.optim.Optimizer], dict[str, Any], Sequence[GroupRule]]
    | torch.optim.Optimizer
    | None
)
"""What `Pipeline` accepts: a class with keyword arguments, and rules for its parameter groups; or
an optimizer over the model."""


class OptimizerParts(NamedTuple):
    """An optimizer argument taken apart.

    Attributes:
        groups: For each group the names of its parameters, and its options.
        attributes: Attributes that the optimizer of every stage gets after it was built.
    """

    optimizer_class: type[torch.optim.Optimizer]
    kwargs: dict[str, Any]
    groups: list[tuple[list[str], Hyper]]
    attributes: Hyper

    @property
    def options(self) -> list[Hyper]:
        """The options of each group, as they were given: without the defaults of the class."""
        return [{**self.kwargs, **own} for _, own in self.groups]


def grouped_names(
    argument: OptimizerArgument, names: dict[int, str], parameters: Mapping[str, Tensor]
) -> OptimizerParts | None:
    """Check the argument ``optimizer`` of `Pipeline`, and take it apart; `names` are by ``id``."""
    if argument is None:
        return None
    if not names:
        raise ConfigError(
            "no parameter of the model requires a gradient, so an optimizer has nothing to step; "
            "unfreeze some, or pass optimizer=None for inference alone"
        )
    if isinstance(argument, torch.optim.Optimizer):
        if "accelerator_state" in vars(argument):
            raise ConfigError(
                "this is the optimizer that accelerate's prepare() returned, which steps by rules "
                "of its own: give Pipeline the optimizer as it was before, or optimizer.optimizer. "
                "Of prepare(), a pipeline needs nothing but the loader"
            )
        return _parts_of(argument, names)
    several = argument.values() if isinstance(argument, Mapping) else argument
    if isinstance(several, Iterable) and any(
        isinstance(each, torch.optim.Optimizer) for each in several
    ):
        raise ConfigError(
            "optimizer must be one, and not several: give one class with a rule for each group, "
            '(class, dict, [("head.*", {"lr": 0.1})]), or one torch optimizer with a group for '
            'each, as SGD([{"params": a.parameters()}, {"params": b.parameters(), "lr": 0.1}])'
        )
    if not isinstance(argument, Sequence) or len(argument) not in (2, 3):
        raise ConfigError(
            "optimizer must be (class, dict of its arguments), the same with rules for groups, or "
            f"a torch optimizer over the model's parameters, {_instead_of(argument)}"
        )
    optimizer_class, kwargs, rules = argument if len(argument) == 3 else (*argument, ())
    if not isinstance(kwargs, dict):
        raise ConfigError(f"the arguments of the optimizer must be a dict, not {kwargs!r}")
    if groups := [name for name in ("params", "param_groups") if name in kwargs]:
        raise ConfigError(
            f"the arguments of the optimizer have {groups[0]!r}; for parameter groups give rules, "
            '(class, dict, [("*.bias", {"weight_decay": 0.0})]), or an optimizer over the model\'s '
            "parameters"
        )
    parts = _by_rules(list(names.values()), parameters, rules)
    prototype = [{"params": [placeholder()], **options} for _, options in parts]
    build_prototype(optimizer_class, prototype, (), kwargs)
    return OptimizerParts(optimizer_class, dict(kwargs), parts, {})


def _instead_of(argument: Any) -> str:
    """Say what to type instead, if a class or a `functools.partial` was given."""
    made: Any = argument
    kwargs: dict[str, Any] = {}
    if isinstance(made, functools.partial) and not made.args:
        made, kwargs = made.func, made.keywords
    if not (isinstance(made, type) and issubclass(made, torch.optim.Optimizer)):
        return f"not {argument!r}"
    given = ", ".join(f"{name!r}: {value!r}" for name, value in kwargs.items())
    return f"as optimizer=({made.__name__}, {{{given}}}), not {argument!r}"


def _by_rules(
    names: Sequence[str], parameters: Mapping[str, Tensor], rules: Sequence[GroupRule]
) -> list[tuple[list[str], Hyper]]:
    """Return one group for each rule, of what it fits first, and one for the rest."""
    left, groups = list(names), []
    for rule in rules:
        if not (isinstance(rule, tuple | list) and len(rule) == 2 and isinstance(rule[1], dict)):
            raise ConfigError(
                "a rule for a parameter group is a pair of a pattern of names, or a function of "
                f"name and parameter, and a dict of options; it is {rule!r}"
            )
        which, options = rule
        if isinstance(which, str):
            mine = [name for name in left if fnmatchcase(name, which)]
        elif callable(which):
            mine = [name for name in left if which(name, parameters[name])]
        else:
            raise ConfigError(f"{which!r} is neither a pattern of names nor a function")
        if not mine:
            raise ConfigError(
                f"the rule {which!r} fits no parameter that earlier rules have left; there are "
                f"{', '.join(names[:20])}{', ...' if len(names) > 20 else ''}"
            )
        left = [name for name in left if name not in set(mine)]
        groups.append((mine, dict(options)))
    return [*groups, (left, {})] if left else groups


def refuse_patched_step(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer whose step was replaced on the object, by anything but a scheduler."""
    # torch's schedulers replace the step of any optimizer.
    patched = vars(optimizer).get("step")
    if patched is not None and not hasattr(patched, "_wrapped_by_lr_sched"):
        raise ConfigError(
            "the optimizer's step was replaced on the object, which the stages would not know; "
            "override it in a subclass"
        )


def _parts_of(optimizer: torch.optim.Optimizer, names: dict[int, str]) -> OptimizerParts:
    """Take an optimizer of the user's apart; its hooks and a patched step are refused."""
    refuse_patched_step(optimizer)
    hooks = [name for name, value in vars(optimizer).items() if name.endswith("_hooks") and value]
    if hooks:
        raise ConfigError(
            f"the optimizer has hooks ({hooks[0].strip('_')}), which would be called in the "
            "script, but every stage steps by itself; subclass it and do it in its step"
        )
    groups = [_named_group(g, names) for g in optimizer.param_groups]
    like = build_prototype(
        type(optimizer),
        [{"params": [placeholder() for _ in named], **options} for named, options in groups],
    )
    return OptimizerParts(type(optimizer), {}, groups, own_attributes(optimizer, like))


class GivenOptimizer:
    """The optimizer that the script gave to `Pipeline`, of which the stages have copies.

    A scheduler or a line that changes it later would have no effect, so that is refused.

    Attributes:
        is_there: Whether the script has given one, rather than a class.
    """

    def __init__(self, argument: OptimizerArgument) -> None:
        given = argument if isinstance(argument, torch.optim.Optimizer) else None
        self.is_there = given is not None
        self._groups = [] if given is None else given.param_groups
        self._before = [pack_group(group) for group in self._groups]

    def refuse_changes(self) -> None:
        if len(self._groups) != len(self._before):
            raise ConfigError(
                "a parameter group was added to the optimizer that was given to Pipeline; the "
                "stages step with pipe.optimizer, so add it before, or assign a new one to it"
            )
        for number, (group, before) in enumerate(zip(self._groups, self._before, strict=True)):
            now = pack_group(group)
            name = next((n for n in now if n in before and now[n] != before[n]), None)
            if name is not None:
                raise ConfigError(
                    f"{name!r} of group {number} was changed in the optimizer that was given to "
                    "Pipeline; the stages step with pipe.optimizer, so change its param_groups, "
                    "and make schedulers with it: LRScheduler(pipe.optimizer, ...)"
                )


def state_by_name(argument: OptimizerArgument, names: dict[int, str]) -> dict[str, dict[str, Any]]:
    """Return the state that an optimizer already has, by name of its parameter."""
    if not isinstance(argument, torch.optim.Optimizer):
        return {}
    return {names[id(p)]: dict(state) for p, state in argument.state.items() if id(p) in names}


def _named_group(group: dict[str, Any], names: dict[int, str]) -> tuple[list[str], Hyper]:
    """Return the parameter names and the options of a group; frozen parameters are left out."""
    found = []
    for parameter in group["params"]:
        if id(parameter) in names:
            found.append(names[id(parameter)])
        elif parameter.requires_grad:
            raise ConfigError("the optimizer has a parameter that is not one of the model's")
    # Copied, because a scheduler changes a rate that is a tensor in place.
    return found, {k: copy.deepcopy(v) for k, v in group.items() if k != "params"}
