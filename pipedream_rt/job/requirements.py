"""What an option must be: small checks, each with a message that shows the value given."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from datetime import timedelta
from difflib import get_close_matches
from typing import Any, TypeVar

from pipedream_rt.errors import ConfigError, UnknownOption

T = TypeVar("T")

_NAMES: dict[str, tuple[str, ...]] = {}
"""By owner, as ``Training``, the names of its options."""


def options_of(owner: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Let a constructor refuse an unknown name, and suggest the nearest one that it knows."""

    def decorate(init: Callable[..., None]) -> Callable[..., None]:
        _, *names = inspect.signature(init).parameters
        know_options(owner, names)

        @functools.wraps(init)
        def checked(self: Any, *args: Any, **kwargs: Any) -> None:
            refuse_unknown(owner, kwargs)
            init(self, *args, **kwargs)

        return checked

    return decorate


def option_group(cls: type[T]) -> type[T]:
    """Let a dataclass of options refuse an unknown name; see `options_of`."""
    cls.__init__ = options_of(cls.__name__)(cls.__init__)  # type: ignore[method-assign]
    return cls


def know_options(owner: str, names: Iterable[str]) -> None:
    """Note the names of the options of an owner, for `refuse_unknown`."""
    _NAMES[owner] = tuple(names)


def refuse_unknown(owner: str, given: Iterable[str]) -> None:
    """Refuse a name that the owner does not know."""
    for name in given:
        if name not in _NAMES[owner]:
            raise UnknownOption(_unknown(owner, name))


def _unknown(owner: str, name: str) -> str:
    """Say which option was meant."""
    from pipedream_rt.job.words import MEANINGS  # a table that only this error reads

    word = name.casefold().replace("-", "_")
    if word in MEANINGS and (owner == "Pipeline" or word not in _NAMES["Training"]):
        return f"{owner} has no option {name!r}; {MEANINGS[word]}"
    homes = {option: home for home, names in _NAMES.items() for option in names}
    # A name that several owners have is taken for the option of this one.
    homes.update(dict.fromkeys(_NAMES[owner], owner))
    near = [get_close_matches(name, names, n=1) for names in (_NAMES[owner], homes)]
    meant = name if name in homes else next((found[0] for found in near if found), "")
    home = homes.get(meant, "")
    if not home:
        what = f"there are {', '.join(_NAMES[owner])}"
    elif home == owner:
        what = f"did you mean {meant}?"
    elif owner == "Pipeline":
        given = next(each for each in _NAMES[owner] if home.lower().startswith(each))
        what = f"{meant} belongs to {home}: give {given}={home}({meant}=...)"
    else:
        what = f"{meant} is an option of {home}"
    return f"{owner} has no option {name!r}; {what}"


def require_count(name: str, value: int, least: int = 1) -> None:
    """Refuse an option that must be an integer, and not too small, and is not."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{name} must be an integer of at least {least}, not {value!r}")


def require_range(name: str, value: object) -> None:
    """Refuse an option that must be two rising integers, of at least 1, and is not."""
    whole = isinstance(value, tuple) and [type(each) for each in value] == [int, int]
    if not whole or not 1 <= value[0] <= value[1]:  # type: ignore[index]
        raise ConfigError(
            f"{name} must be the fewest and the most, two integers such as (2, 4), not {value!r}"
        )


def require_decay(value: object) -> None:
    """Refuse the decay of an average that is no number from 0 to less than 1."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if value is not None and not (number and 0 <= value < 1):  # type: ignore[operator]
        raise ConfigError(f"ema must be a number from 0 to less than 1, as 0.999, not {value!r}")


def require_seed(value: object) -> None:
    """Refuse a seed that is no integer, which would make other random numbers in every process."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"seed must be an integer, not {value!r}")


def require_time(name: str, value: object) -> None:
    """Refuse an option that must be a positive time and is not."""
    if not isinstance(value, timedelta) or value <= timedelta(0):
        raise ConfigError(f"{name} must be a positive datetime.timedelta, not {value!r}")


def require_choice(name: str, value: object, choices: tuple[object, ...]) -> None:
    """Refuse an option that is none of several values."""
    # Of the same type: 1 == True, and 1 is not among the choices.
    if not any(type(value) is type(choice) and value == choice for choice in choices):
        *others, last = map(repr, choices)
        raise ConfigError(f"{name} must be {', '.join(others)} or {last}, not {value!r}")


def require_instance(name: str, value: object, kind: type, such_as: str = "...") -> None:
    """Refuse an option that is no instance of its class; ``such_as`` has arguments of one."""
    if not isinstance(value, kind):
        such_as = such_as if len(such_as) < 20 else "..."
        raise ConfigError(f"{name} must be {kind.__name__}({such_as}), not {value!r}")
