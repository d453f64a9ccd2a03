"""Corrections for staleness: when a stage calls their hooks, and how it keeps their state."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pipedream_rt.errors import ConfigError
from pipedream_rt.messages.state_keys import StateKey, StepState, by_name
from pipedream_rt.models.mark import Mark, mark_of_tensors
from pipedream_rt.stage.correction import Correction, Moment, Named, overrides
from pipedream_rt.stage.hyper import Hyper
from pipedream_rt.stage.optimizer import like
from pipedream_rt.stage.parameters import Adjust, VersionedParameters
from pipedream_rt.stage.rules.rule import (
    Context,
    MicroBatchRule,
    RuleOption,
    Update,
    UpdateRule,
)
from pipedream_rt.stage.values import Outgoing

_PART = "corrections"
"""The part of the keys of what is kept for a parameter. Its name is followed by ``state``, the
number of a correction and its own key; or by ``view``, the version and the staleness."""

_FARTHEST = 1000
"""For how many updates at most a version may be read, if corrections change what is read."""


@dataclass(frozen=True, slots=True)
class Correcting(RuleOption):
    """The corrections that every stage makes.

    Attributes:
        corrections: The corrections, in the order in which they are applied.
    """

    corrections: tuple[Correction, ...]

    def rule(self, context: Context) -> Corrections:
        return Corrections(self.corrections, context)

    def things(self) -> Sequence[object]:
        return self.corrections


class Corrections(UpdateRule, MicroBatchRule):
    """The corrections of one stage.

    Attributes:
        at: The hook that is running, or that has raised an error, as ``Class.hook``; else empty.
    """

    def __init__(self, corrections: Sequence[Correction], context: Context) -> None:
        self._all = list(corrections)
        self._plan, self._stage = context.plan, context.stage
        self._own = context.weights.own
        self._parameters = parameters = context.named
        # Other stages have copies of tied weights, which a correction here would not change.
        self.names = [name for name in parameters if name not in context.weights.tied]
        for correction in self._all:
            correction.state = {}
            correction.parameters = {name: parameters[name] for name in self.names}
        self._before_forward = self._with("before_forward")
        self._after_backward = self._with("after_backward")
        self._before_step = self._with("before_step")
        self._after_step = self._with("after_step")
        self._corrected: list[Hyper] = []  # the options that the last step had
        self._own.has_views = bool(self._before_forward and self.names)
        self.at = ""

    def _with(self, hook: str) -> list[Correction]:
        """Return the corrections that have a hook of their own."""
        return [each for each in self._all if overrides(each, hook)]

    def _moment(self, update: int, read: float) -> Moment:
        """Return the moment of an update on this stage."""
        shape = self._plan.shape
        return Moment(
            stage=self._stage,
            num_stages=shape.num_stages,
            micro_batches=shape.per_update,
            update=update,
            read=read,
        )

    def _call(self, correction: Correction, hook: str, at: Moment, *args: Any) -> None:
        """Call a hook; refuse a result, or a tensor in place of a given one: both would be lost."""
        dicts = [each for each in args if isinstance(each, dict)]
        before = [{name: (t, _address(t)) for name, t in each.items()} for each in dicts]
        self.at = f"{type(correction).__name__}.{hook}"
        result = getattr(correction, hook)(at, *args)
        if result is not None:
            raise ConfigError(
                f"{self.at} returned a {type(result).__name__}, which nobody would use; a hook "
                "changes what it is given in place, and returns nothing"
            )
        for each, was in zip(dicts, before, strict=True):
            now = {name: (t, _address(t)) for name, t in each.items()}
            if now.keys() != was.keys() or any(
                now[name][0] is not t or now[name][1] != address
                for name, (t, address) in was.items()
            ):
                raise ConfigError(
                    f"{self.at} put another tensor in the place of one that it was given, which "
                    "would be lost; change it in place, as by tensor.mul_(2) or tensor[...] = value"
                )
        # In the updates 0, 1, 3, 7 and so on: early, and seldom in a long run.
        if at.update & (at.update + 1) == 0:
            self._check_state(correction, (t for each in dicts for t in each.values()))
        self.at = ""

    # -- gradients ------------------------------------------------------------------------------

    def adjust(self, micro_batch: int) -> Adjust | None:
        """Return the ``after_backward`` of all corrections, if the micro-batch is stale."""
        if not self._after_backward:
            return None
        update, read = micro_batch // self._plan.per_update, self._own.ledger.pinned(micro_batch)
        return functools.partial(self._adjusted, update, read) if update > read else None

    def _adjusted(self, update: int, read: int, gradients: Named, then: Named, now: Named) -> None:
        """Change the gradients of a micro-batch in place."""
        at = self._moment(update, read)
        mine = {name: gradients[name] for name in self.names if name in gradients}
        for correction in self._after_backward:
            self._call(correction, "after_backward", at, mine, then, now)

    # -- steps ----------------------------------------------------------------------------------

    @contextmanager
    def around(self, update: Update, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """Call the hooks around a step, and restore the options that they have changed."""
        at, groups = self._moment(update.number, update.mean_read), optimizer.param_groups
        kept = [_options(group) for group in groups]
        before: Named = {}
        with torch.no_grad():
            if self._before_step:
                for group, was in zip(groups, kept, strict=True):
                    _set(group, copy.deepcopy(was))  # a hook may change a tensor or a list in place
            for correction in self._before_step:
                self._call(correction, "before_step", at, optimizer)
            # Options that no hook has changed become the very same objects again. So below an
            # option is a changed one exactly if it is another object.
            for group, was in zip(groups, kept, strict=True):
                group.update({k: v for k, v in was.items() if k in group and _equal(group[k], v)})
            if self._after_step:
                before = {name: p.clone() for name, p in self._parameters.items()}
        self._corrected = [_options(group) for group in groups]
        marks = list(map(_marks, self._corrected))
        try:
            yield
            for group, became, was, mark in zip(groups, self._corrected, kept, marks, strict=True):
                self._refuse_a_second_change(group, became, was, mark)
            with torch.no_grad():
                weights = {name: p.detach() for name, p in self._parameters.items()}
                for correction in self._after_step:
                    self._call(correction, "after_step", at, weights, before)
        finally:
            for group, became, was in zip(groups, self._corrected, kept, strict=True):
                for name in became.keys() - was.keys():
                    group.pop(name, None)
                for name, value in was.items():
                    if became.get(name) is not value:
                        group[name] = value

    def _refuse_a_second_change(
        self, group: Hyper, became: Hyper, was: Hyper, marks: dict[str, Mark]
    ) -> None:
        """Refuse a step that changes an option which corrections have changed for it alone."""
        now = _marks(group)
        for name, value in became.items():
            changed = group.get(name) is not value or now.get(name) != marks.get(name)
            if changed and value is not was.get(name):
                raise ConfigError(
                    f"the step of the optimizer changes its option {name!r}, which corrections "
                    "have changed for this step alone, so what it is to be afterwards is not "
                    "known; use a scheduler instead, or leave these corrections out"
                )

    # -- views ----------------------------------------------------------------------------------

    @torch.no_grad()
    def after(self, update: Update, optimizer: torch.optim.Optimizer | None) -> Outgoing:
        """Make the views of the new version, even if its update was skipped."""
        version = update.number + 1
        for staleness in self._distances(version) if optimizer is not None else ():
            assert optimizer is not None
            self._look_ahead(version, staleness, self._own.add_view(staleness), optimizer)
        return {}

    def _distances(self, version: int) -> list[int]:
        """Return the stalenesses, in updates and above 0, with which a version will be read."""
        if not self._own.has_views:
            return []
        found: set[int] = set()
        k = self._plan.per_update
        for m in range(version * k, (version + _FARTHEST) * k):  # earlier ones read older versions
            read = self._plan.reads(self._stage, m)
            if read > version:
                return sorted(found)
            if read == version and m // k > version:
                found.add(m // k - version)
        raise ConfigError(
            f"stage {self._stage} would read version {version} for {_FARTHEST} updates by the "
            "policy of the schedule, and a correction with before_forward needs a copy of the "
            "weights for each of them; leave it out, or change the policy"
        )

    def _look_ahead(
        self, version: int, distance: int, weights: Named, optimizer: torch.optim.Optimizer
    ) -> None:
        """Let ``before_forward`` change copies of a version's weights."""
        at = self._moment(version + distance, version)
        kept = [_options(group) for group in optimizer.param_groups]
        # Before the first step there are only the options of the next one.
        for group, options in zip(optimizer.param_groups, self._corrected or kept, strict=True):
            _set(group, options)
        mine = {name: weights[name] for name in self.names}
        for correction in self._before_forward:
            self._call(correction, "before_forward", at, mine, optimizer)
        for group, options in zip(optimizer.param_groups, kept, strict=True):
            _set(group, options)

    # -- state ----------------------------------------------------------------------------------

    def state(self) -> StepState:
        """Return the state of all corrections, and the views of versions."""
        found: StepState = {}
        for number, correction in enumerate(self._all):
            self._check_state(correction, ())
            for name, values in correction.state.items():
                for key, value in values.items():
                    found[StateKey(_PART, name, ("state", number, key))] = value
        return found | self.views()

    def views(self, of: int | None = None) -> StepState:
        """Return the views of a version, or of all versions that are kept."""
        return {
            StateKey(_PART, name, ("view", version, staleness)): tensor
            for (version, staleness), named in self._own.views().items()
            if of is None or version == of
            for name, tensor in named.items()
        }

    def lacks_views(self) -> bool:
        """Whether a restore has left out a view that a later micro-batch reads."""
        there = self._own.views()
        return any(
            (version, staleness) not in there
            for version in self._own.ledger.kept
            if version > self._own.loaded
            for staleness in self._distances(version)
        )

    def _check_state(self, correction: Correction, tensors: Iterable[Tensor]) -> None:
        """Refuse state of a correction that would not be the same after a resume."""
        who = f"{type(correction).__name__} on stage {self._stage}"
        seen = set(map(_address, (*tensors, *self._parameters.values())))
        for name, values in correction.state.items():
            if name not in self._parameters:
                raise ConfigError(
                    f"{who} keeps state under {name!r}, which is no parameter of the stage; the "
                    "keys of state are names of them"
                )
            if not isinstance(values, dict):
                raise ConfigError(
                    f"{who} keeps a {type(values).__name__} in state[{name!r}], which must be a "
                    'dictionary, as state[name] = {"average": tensor}'
                )
            for key, value in values.items():
                if not isinstance(key, str):
                    raise ConfigError(
                        f"{who} keeps state of {name!r} under {key!r}, which must be a text"
                    )
                if isinstance(value, Tensor) and (address := _address(value)):
                    if address in seen:
                        raise ConfigError(
                            f"{who} keeps as {key!r} of {name!r} a tensor that shares its memory "
                            "with another one, which it would not do after a resume; keep a clone()"
                        )
                    seen.add(address)

    def statistics(self) -> dict[str, int]:
        """Return the bytes of what corrections remember, and of the views of versions."""
        kept = [v for each in self._all for named in each.state.values() for v in named.values()]
        kept += [t for named in self._own.views().values() for t in named.values()]
        return {"correction_bytes": sum(v.nbytes for v in kept if isinstance(v, Tensor))}

    def load_state(self, state: Mapping[StateKey, Any], step: int) -> None:
        """Replace the state of all corrections, and the views of versions that are kept."""
        kept = by_name(state, _PART, self._parameters)
        for correction in self._all:
            correction.state = {}
        for name, parameter in self._parameters.items():
            for path, value in kept[name].items():
                match path:
                    case ("state", int() as number, str() as key) if 0 <= number < len(self._all):
                        own = self._all[number].state.setdefault(name, {})
                        own[key] = like(parameter, value) if isinstance(value, Tensor) else value
        self._own.restore_views(_views_in(kept, self._own))


def _views_in(
    kept: Mapping[str, Mapping[tuple[Any, ...], Any]], parameters: VersionedParameters
) -> dict[tuple[int, int], dict[str, Tensor]]:
    """Return the views in a state, by version and staleness, that are whole and still needed."""
    found: dict[tuple[int, int], dict[str, Tensor]] = {}
    for name, parameter in parameters.named.items():
        for path, value in kept[name].items():
            match path:
                case ("view", int() as version, int() as staleness) if (
                    isinstance(value, Tensor) and value.shape == parameter.shape
                ):
                    found.setdefault((version, staleness), {})[name] = value
    return {
        (version, staleness): named
        for (version, staleness), named in found.items()
        if version in parameters.ledger.kept and len(named) == len(parameters.named)
    }


def _address(tensor: Tensor) -> int:
    """Return where a tensor's storage begins in memory; 0 if it has none, or is sparse."""
    dense = tensor.layout is torch.strided
    return tensor.untyped_storage().data_ptr() if dense and tensor.numel() else 0


def _options(group: Hyper) -> Hyper:
    """Return a group without its parameters."""
    return {name: value for name, value in group.items() if name != "params"}


def _set(group: Hyper, options: Hyper) -> None:
    """Give a group these options, and no others."""
    for name in _options(group).keys() - options.keys():
        del group[name]
    group.update(options)


def _equal(one: Any, other: Any) -> bool:
    """Whether two values of an option are equal, of the same type and dtype."""
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        both = isinstance(one, Tensor) and isinstance(other, Tensor)
        return both and one.dtype is other.dtype and torch.equal(one, other)
    return type(one) is type(other) and bool(one == other)


def _marks(options: Hyper) -> dict[str, Mark]:
    """Return by name the mark of each option that is a tensor."""
    return mark_of_tensors((n, v) for n, v in options.items() if isinstance(v, Tensor))
