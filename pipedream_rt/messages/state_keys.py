"""Keys: where a value stands in the state of a stage, in memory, in messages and on disk alike.

Everything that a stage keeps for its next steps, beside weights and buffers, is one dictionary from
`StateKey` to a tensor or a plain value. As text a key is its parts, joined by slashes::

    optimizer/0.weight/exp_avg          of a parameter, from its optimizer
    group/1/#0/step                     of the optimizer at address 1 itself, in its group 0
    attribute/1/count                   an attribute of it
    state/1                             what it keeps under keys that are no parameters
    split/1                             the parameters that it steps, by which it is found again
    ema/0.weight                        of a parameter, from a rule
    corrections/0.weight/view/#12/#2    the same; a rule says what comes after the name
    totals//totals                      what all stages have agreed on, kept by the first one
    codecs/0 -> 1/gradient/#1/#0/#0     what packing has lost of tensor 0 on an edge between layers
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, TypeAlias, TypeVar

from pipedream_rt.errors import ConfigError

T = TypeVar("T")

OPTIMIZER = "optimizer"
GROUP, ATTRIBUTE, OWN_STATE, SPLIT = "group", "attribute", "state", "split"
OF_OPTIMIZERS = (GROUP, ATTRIBUTE, OWN_STATE, SPLIT)
"""The parts that belong to an optimizer itself. The name in their keys is its address."""

CODECS = "codecs"
OF_REPLICAS = (CODECS,)
"""The parts of which each replica of a stage has its own."""

_PATHS: dict[str, tuple[tuple[type, ...], ...]] = {
    OPTIMIZER: ((), (str,), (int,)), GROUP: ((int, str),), ATTRIBUTE: ((str,),),
    OWN_STATE: ((),), SPLIT: ((),), CODECS: ((str, int, int, int),),
}  # fmt: skip
"""By part, the types of its possible paths. A rule checks those of its own part."""

_ESCAPED = {"%": "%25", "/": "%2F", "#": "%23"}
_PLAIN = {text: sign for sign, text in _ESCAPED.items()}


class StateKey(NamedTuple):
    """Where a value stands in the state of a stage.

    Attributes:
        part: Whose it is: one of the parts above, or the name of a rule.
        name: The parameter that it belongs to, by its name in the unsplit model; for an optimizer's
            own values its address; empty for what all stages have agreed on.
        path: The place within the part.
    """

    part: str
    name: str = ""
    path: tuple[str | int, ...] = ()

    def __str__(self) -> str:
        """Return the key as text; `key_of` is the inverse."""
        return written(self.part, self.name, *self.path)


StepState: TypeAlias = dict[StateKey, Any]
"""The state of a stage for its next steps, beside weights and buffers: tensors and plain values."""


def can_be_written(part: object) -> bool:
    """Whether a value can be a part of a key: a text, or an integer of 64 bits."""
    if type(part) is int:
        return -(2**63) <= part < 2**63
    return type(part) is str


def written(*parts: str | int) -> str:
    """Return parts of a key as one text; `parsed` is the inverse."""
    for each in parts:
        if not can_be_written(each):
            raise ValueError(f"{each!r} can be no part of a key")
    return "/".join(
        f"#{each}" if isinstance(each, int) else re.sub("[%/#]", lambda m: _ESCAPED[m[0]], each)
        for each in parts
    )


def parsed(text: str) -> tuple[str | int, ...]:
    """Return the parts of a key from its text; ValueError if it is none."""
    return tuple(map(_part_of, text.split("/")))


def _part_of(text: str) -> str | int:
    """Return one part of a key from its text."""
    if text.startswith("#"):
        if not re.fullmatch("#(0|-?[1-9][0-9]{0,18})", text) or not can_be_written(int(text[1:])):
            raise ValueError(f"{text!r} is no number of a key")
        return int(text[1:])
    if re.search("%(?!25|2F|23)|#", text):
        raise ValueError(f"{text!r} is no part of a key")
    return re.sub("%25|%2F|%23", lambda m: _PLAIN[m[0]], text)


def key_of(text: str) -> StateKey:
    """Return the key that `StateKey.__str__` has written; ValueError for another text."""
    match parsed(text):
        case (str() as part, str() as name, *path) if part:
            kinds = tuple(map(type, path))
            if kinds not in _PATHS.get(part, (kinds,)):
                raise ValueError(f"{text!r} is no key: its path is not that of {part}")
            return StateKey(part, name, tuple(path))
    raise ValueError(f"{text!r} is no key: it begins with no part and name")


def by_text(state: Mapping[StateKey, T]) -> dict[str, T]:
    """Return a state by the texts of its keys, as messages and files hold it."""
    return {str(key): value for key, value in state.items()}


def by_key(state: Mapping[str, T]) -> dict[StateKey, T]:
    """Return a state by its keys; the inverse of `by_text`."""
    return {key_of(text): value for text, value in state.items()}


def by_name(
    state: Mapping[StateKey, T], part: str, names: Iterable[str]
) -> dict[str, dict[Any, T]]:
    """Return one part of a state by name, for the given names, and then by path."""
    found: dict[str, dict[Any, T]] = {name: {} for name in names}
    for key, value in state.items():
        if key.part == part and key.name in found:
            found[key.name][key.path] = value
    return found


def optimizer_state(named: Mapping[str, Mapping[Any, Any]]) -> StepState:
    """Return the state that an optimizer keeps for parameters, given by name and its own key."""
    found: StepState = {}
    for name, values in named.items():
        # Whether a parameter has a state, even an empty one, may matter to an optimizer.
        found.update({StateKey(OPTIMIZER, name, (key,)): value for key, value in values.items()})
        if not values:
            found[StateKey(OPTIMIZER, name)] = {}
        if odd := [key for key in values if not can_be_written(key)]:
            raise ConfigError(
                f"the optimizer keeps a value of {name} under {odd[0]!r}, a "
                f"{type(odd[0]).__name__}; only texts and integers of 64 bits can be sent and saved"
            )
    return found
