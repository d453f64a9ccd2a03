"""What a script that goes on from a checkpoint must give again, and what it may change.

A checkpoint keeps what the script gave to `Pipeline`. If the script that resumes gives something
else, the run would silently become another one. A difference that changes results in a way nobody
asks for is refused; any other is logged with both values. Either can be accepted by name.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, field
from hashlib import blake2b
from typing import Any

import torch
from torch import nn

from pipedream_rt.errors import CheckpointError, ConfigError
from pipedream_rt.stage.fingerprint import fingerprint
from pipedream_rt.stage.hyper import Hyper, unpack_hyper
from pipedream_rt.telling import log_of

_log = log_of(__name__)

_REFUSED = {
    "seed": "the random numbers of layers would be others",
    "optimizer": "its state is of another kind",
    "groups": "the parameters are grouped otherwise, so rates and state would be mixed up",
}
_LOGGED = {
    "loss": "the run goes on with the loss of the script",
    "hyper_parameters": "the run goes on with those of the checkpoint",
    "schedule": "the run goes on with the schedule of the script",
    "corrections": "the run goes on with those of the script",
    "codecs": "the run goes on with those of the script",
    "threads": "the bits may be others",
    "torch": "the bits may be others",
}
ACCEPTABLE = (*_REFUSED, *_LOGGED, "values")
"""The names of what can be accepted to differ; values of the script stand beside its identity."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """What a script has given to `Pipeline`, in plain data.

    Attributes:
        optimizer: The name of the optimizer's class; empty for none.
        groups: The names of the parameters of each group.
        hyper_parameters: By group, as the script gave them, packed.
        loss: The name of the loss function and a digest of its code.
        corrections: As they print.
        codecs: As they print.
        threads: The number of threads of each worker.
    """

    seed: int
    optimizer: str = ""
    groups: list[list[str]] = field(default_factory=list)
    hyper_parameters: list[Hyper] = field(default_factory=list)
    loss: str = ""
    schedule: str = ""
    corrections: list[str] = field(default_factory=list)
    codecs: list[str] = field(default_factory=list)
    threads: int = 1
    torch: str = torch.__version__

    def plain(self) -> dict[str, Any]:
        """Return it as a manifest holds it."""
        return asdict(self)

    def compare(self, saved: dict[str, Any], where: object, accept: Collection[str]) -> None:
        """Refuse or log what differs from the script that made a checkpoint, unless accepted."""
        mine = self.plain()
        for name in (*_REFUSED, *_LOGGED):
            # What an older checkpoint did not save cannot be compared.
            if name in accept or name not in saved or _are_same(name, saved[name], mine[name]):
                continue
            before, now = _shown(name, saved[name], mine[name])
            text = f"{where} was made with the {_words(name)} {before}, this script has {now}"
            if name in _REFUSED:
                raise CheckpointError(
                    f"{text}: {_REFUSED[name]}. Give the same, or say that you mean it: "
                    f"Checkpoints(..., accept=[{name!r}]), or load(..., accept=[{name!r}])"
                )
            _log.warning("%s: %s; accept=[%r] %s", text, _LOGGED[name], name, _accepting(name))


def _are_same(name: str, one: Any, other: Any) -> bool:
    # A class of the script is in __main__ where the script is run, and in its module where it is
    # imported.
    if name == "optimizer" and any(str(v).startswith("__main__.") for v in (one, other)):
        return str(one).rpartition(".")[2] == str(other).rpartition(".")[2]
    return bool(one == other)


def require_acceptable(accept: object) -> tuple[str, ...]:
    """Check the names of what may differ, and return them."""
    names = accept if isinstance(accept, list | tuple | set | frozenset) else [accept]
    for name in names:
        if name not in ACCEPTABLE:
            raise ConfigError(
                f"accept is a list of what may differ from the checkpoint, of {list(ACCEPTABLE)}; "
                f"not {accept!r}"
            )
    return tuple(names)


def _accepting(name: str) -> str:
    """What it means to accept that something differs."""
    if name == "hyper_parameters":
        return "takes those of the script instead"
    return "ends this warning"


def _words(name: str) -> str:
    """The name of a part of an identity, in words."""
    return name.replace("_", "-")


def _shown(name: str, before: Any, now: Any) -> tuple[str, str]:
    """Return two different values in words, as far as they differ."""
    if name == "groups":
        return f"of {[len(g) for g in before]} parameters", f"those of {[len(g) for g in now]}"
    if name == "hyper_parameters" and len(before) == len(now):
        for number, (one, two) in enumerate(zip(before, now, strict=True)):
            for key in sorted(one.keys() | two.keys()):
                if one.get(key) != two.get(key):
                    values = (unpack_hyper(group.get(key)) for group in (one, two))
                    return tuple(f"{key} = {v!r} in group {number}" for v in values)  # type: ignore[return-value]
    return repr(before), repr(now)


def name_of_class(cls: type | None) -> str:
    """Return the full name of a class; empty for None."""
    return "" if cls is None else f"{cls.__module__}.{cls.__qualname__}"


def names_of(things: Sequence[object]) -> list[str]:
    """Name corrections or codecs: by their own repr; without one, by class and digest."""
    return [
        f"{name_of_class(type(each))} {_short([_plain_of(each)])}"
        if type(each).__repr__ is object.__repr__
        else _repr_without_addresses(each)
        for each in things
    ]


def name_of_loss(loss_fn: Callable[..., Any] | None) -> str:
    """Name a loss so that another one very likely has another name; empty for None."""
    if loss_fn is None:
        return ""
    if isinstance(loss_fn, functools.partial):
        values = [_repr_without_addresses(v) for v in (*loss_fn.args, *loss_fn.keywords.items())]
        return f"partial({name_of_loss(loss_fn.func)}, {', '.join(values)})"
    if isinstance(loss_fn, nn.Module):
        parts = [_plain_of(each) for _, each in loss_fn.named_modules()]
        return f"{name_of_class(type(loss_fn))} {_repr_without_addresses(loss_fn)} {_short(parts)}"
    bound = getattr(loss_fn, "__self__", None)
    qualified = getattr(loss_fn, "__qualname__", None)
    if qualified is None:  # an object that can be called
        return f"{name_of_class(type(loss_fn))} {_short([_plain_of(loss_fn)])}"
    # The name of a function stays when its code is edited, so a digest of the code goes with it.
    name, code = f"{loss_fn.__module__}.{qualified}", getattr(loss_fn, "__code__", None)
    if code is None:
        return name
    cells = [_contents(cell) for cell in getattr(loss_fn, "__closure__", None) or ()]
    values = [*code.co_consts, *(getattr(loss_fn, "__defaults__", None) or ()), *cells]
    told = [code.co_code.hex(), *code.co_names, *map(_plain_text, values), _plain_of(bound)]
    return f"{name} {_short(told)}"


def _short(parts: Sequence[str]) -> str:
    """Return a digest of texts, 8 hexadecimal digits."""
    return blake2b("|".join(parts).encode(), digest_size=4).hexdigest()


def _contents(cell: Any) -> Any:
    """Return what a cell of a closure holds; None if nothing yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _plain_of(value: object) -> str:
    """Return the plain attributes and the buffers of an object as one text."""
    attributes = getattr(value, "__dict__", {})
    own = {n: v for n, v in attributes.items() if n not in ("training", "_parameters", "_buffers")}
    buffers = attributes.get("_buffers") or {}
    return "|".join(f"{n}={_plain_text(v)}" for n, v in sorted({**own, **buffers}.items()))


def _plain_text(value: object) -> str:
    """Return a plain value or the digest of a tensor as a text; empty for everything else."""
    if isinstance(value, torch.Tensor):
        return fingerprint({"": value})
    plain = (type(None), bool, int, float, complex, str, bytes)
    if isinstance(value, plain):
        return repr(value)
    if isinstance(value, tuple | list) and all(isinstance(v, plain) for v in value):
        return repr(value)
    return ""


def _repr_without_addresses(value: object) -> str:
    """Return what a value prints, without addresses, which differ from process to process."""
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))
