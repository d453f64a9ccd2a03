"""The meaning of a loader's items: the inputs of the model, and the target of the loss.

Only this file reads the form of an item. It goes by the item, and by the signatures of the forward
and of the loss. An item that fits in two ways is refused, and the error shows both.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn, TypeAlias

from torch import Tensor, nn
from torch.utils.data import TensorDataset

from pipedream_rt.batches.looking import is_loader, looking
from pipedream_rt.batches.marks import Along, Whole
from pipedream_rt.devices.hosted import on_host
from pipedream_rt.errors import ConfigError
from pipedream_rt.telling import log_of

_log = log_of(__name__)

Prepare: TypeAlias = Callable[[Any], Any]
"""Turns an item of a loader into something that `Items` understands."""

FORMS = (
    "pairs (x, y), dicts of the model's keyword arguments, or triples ((a, b), {}, y) of its "
    "positional arguments, its keyword arguments and the target"
)
"""The items that a loader may yield, for errors."""

_TARGETS = ("y", "label", "labels", "target", "targets")
"""The names that libraries give to the target among the entries of an item."""


class Batch(NamedTuple):
    """A mini-batch, or the example of one.

    Attributes:
        target: What the loss takes beside the output; of a dict, the dict itself.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    target: Any


class ScriptCall(Batch):
    """An example of what the model gets where the script computes the loss, whatever it returns."""


class Accumulated(NamedTuple):
    """A mini-batch whose parts are not joined: the gradients of all of them are added up.

    Their tensors may have different shapes. Each part is cut into its share of the micro-batches.

    Attributes:
        of: The number of parts of a mini-batch that is not short.
        factor: The factor of the loss of each part.
    """

    parts: tuple[Batch, ...]
    of: int
    factor: float = 1.0


# -- signatures -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Takes:
    """The arguments that a forward takes, by its signature; by default one, by position.

    Attributes:
        what: Its name in errors.
        fewest: The least number of positional arguments.
        most: The greatest.
        names: The names that it takes; None for any.
        needed: Those of them that it requires.
    """

    what: str = "a sequence of layers"
    fewest: int = 1
    most: float = 1
    names: frozenset[str] | None = frozenset()
    needed: frozenset[str] = frozenset()

    @classmethod
    def of(cls, model: nn.Module) -> Takes:
        """Read the signature of a model's forward."""
        what = f"the forward of {type(model).__name__}"
        kinds = _parameters(model)
        if kinds is None:
            return cls(what)
        positional = [p for p in kinds if p.kind in _POSITIONAL]
        by_name = [p for p in kinds if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        needed = [p for p in kinds if p.default is p.empty and p.kind not in _ANY]
        only_by_name = any(p.kind is p.KEYWORD_ONLY for p in needed)
        open_ended = any(p.kind is p.VAR_POSITIONAL for p in kinds)
        return cls(
            what,
            fewest=sum(p.kind in _POSITIONAL for p in needed),
            most=-1 if only_by_name else math.inf if open_ended else len(positional),
            names=None if any(p.kind is p.VAR_KEYWORD for p in kinds) else _names(by_name),
            needed=_names(needed),
        )

    def takes(self, count: int) -> bool:
        """Whether it can be called with some number of positional arguments, and nothing else."""
        return self.fewest <= count <= self.most

    def of_entries(self, entries: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the entries that it takes by name; None if it takes none, or needs others too."""
        names = entries.keys() if self.names is None else self.names
        taken = {key: value for key, value in entries.items() if key in names}
        return taken if taken and self.needed <= taken.keys() else None

    @property
    def count(self) -> str:
        """The numbers of positional arguments, in words."""
        if self.most < self.fewest:
            return f"{self.fewest} and others by name"
        if self.most == self.fewest:
            return str(self.fewest)
        return f"{self.fewest} {'or more' if self.most == math.inf else f'to {self.most}'}"


_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_ANY = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def _parameters(called: Any) -> list[inspect.Parameter] | None:
    """Return the parameters of a function or of a module's forward; None if nobody can tell."""
    try:
        signature = inspect.signature(called.forward if isinstance(called, nn.Module) else called)
    except (TypeError, ValueError):  # a function that is written in C
        return None
    return list(signature.parameters.values())


def _names(parameters: Iterable[inspect.Parameter]) -> frozenset[str]:
    return frozenset(p.name for p in parameters)


def _takes_only_a_tensor(loss_fn: Any) -> bool:
    """Whether a loss takes a tensor as its target, by its signature; those of torch do."""
    positional = [p for p in _parameters(loss_fn) or () if p.kind in _POSITIONAL]
    needed = [p.name for p in positional if p.default is p.empty]
    if len(needed) > 2:
        raise ConfigError(
            f"loss_fn takes {' and '.join(needed[1:])} beside the output, and a loss is called "
            "with the output and one target, which may be a tuple: give "
            "loss_fn=lambda output, target: loss(output, *target)"
        )
    return len(positional) > 1 and positional[1].annotation in (Tensor, "Tensor", "torch.Tensor")


# -- items ----------------------------------------------------------------------------------------


class Items:
    """Reads items for one forward, a sequence of layers by default, and one loss."""

    def __init__(
        self, forward: Takes | None = None, loss_fn: Any = None, prepare: Prepare | None = None
    ) -> None:
        if prepare is not None and not callable(prepare):
            raise ConfigError(
                f"prepare must be a function of an item of the loader, not {prepare!r:.80}"
            )
        self._forward, self._prepare = forward or Takes(), prepare
        # An x of another length than the forward has arguments is one value, and so then are all.
        self._is_one_value = self._has_told = False
        self._has_loss = loss_fn is not None
        self._only_a_tensor = self._has_loss and _takes_only_a_tensor(loss_fn)

    def for_loss(self, loss_fn: Any) -> Items:
        """Return the reader of the same items for another loss."""
        other = copy.copy(self)
        other._has_loss, other._only_a_tensor = True, _takes_only_a_tensor(loss_fn)
        return other

    def batch(self, item: Any, prepare: Prepare | None = None) -> Batch:
        """Return the mini-batch of an item; `prepare` goes before that of the pipeline."""
        return self._read(item, prepare, alone=False)

    def inputs(self, item: Any, prepare: Prepare | None = None) -> Batch:
        """Return the mini-batch of an item that may be without a target."""
        return self._read(item, prepare, alone=True)

    def example(self, example: Any) -> Batch:
        """Return the mini-batch of the argument ``example`` of `Pipeline`."""
        _refuse_samples(example, "example=")
        if isinstance(example, Batch) or not is_loader(example):
            return self._of_example(example)
        items = looking(example, 1)
        if not items:
            raise ConfigError("the loader given as example yields nothing")
        return self.batch(items[0])

    def _of_example(self, example: Any) -> Batch:
        """Read an example that is no loader."""
        try:
            return self.inputs(example)
        except ConfigError:
            raise
        except Exception as error:  # the user's function
            raise ConfigError(
                f"prepare raised {type(error).__name__}: {error}, for the example; with prepare=, "
                "the example is an item as the loader yields it, or the loader"
            ) from error

    def _read(self, item: Any, prepare: Prepare | None, *, alone: bool) -> Batch:
        if isinstance(item, Batch):  # of the library itself
            return on_host(item)
        prepare = prepare or self._prepare
        item = item if prepare is None else prepare(item)
        if (entries := _entries_of(item)) is not None:
            return on_host(self._of_entries(entries, alone))
        if isinstance(item, tuple | list):
            if (
                len(item) == 3
                and isinstance(item[0], tuple | list)
                and isinstance(item[1], Mapping)
            ):
                return on_host(Batch(tuple(item[0]), dict(item[1]), item[2]))
            if len(item) == 2:
                return on_host(self._of_pair(item[0], item[1], alone))
            if len(item) > 2 and (found := self._of_several(item, alone)) is not None:
                return on_host(found)
            if alone and len(item) == 1:
                return on_host(Batch(tuple(item), {}, None))
        elif alone and isinstance(item, Tensor | Along | Whole):
            return on_host(Batch((item,), {}, None))
        length = f" of {len(item)}" if isinstance(item, tuple | list) else ""
        taken = f", and {self._forward.what} takes {self._forward.count}" if length else ""
        self._refuse(f"this item is a {type(item).__name__}{length}{taken}", [_in_parts(item)])

    def _of_pair(self, x: Any, y: Any, alone: bool) -> Batch:
        """Read a pair of x and the target; x may hold several arguments."""
        takes, apart = self._forward.takes, Batch((x,), {}, y)
        one, parts = takes(1), False
        if type(x) in (tuple, list) and len(x) > 1:
            parts, apart = takes(len(x)), Batch(tuple(x), {}, y)
            self._is_one_value |= one and not parts
            by = "(*item[0],), {}, item[1]"
        elif (entries := _entries_of(x)) is not None:
            found = self._forward.of_entries(entries)
            one = one and isinstance(x, dict)  # nothing else of that kind can be sent as it is
            parts = found is not None and (not one or len(found) == len(entries))
            apart, by = Batch((), found or {}, y), "(), item[0], item[1]"
        if one and parts and not self._is_one_value:
            self._refuse(
                f"x is a {type(x).__name__} of {len(x)}, and {self._forward.what} takes it as one "
                "value or in its parts",
                ["((item[0],), {}, item[1])", f"({by})"],
            )
        if parts and not one:
            return apart
        if not one and takes(2) and (alone or not self._has_loss):
            return Batch((x, y), {}, None)
        return Batch((x,), {}, y)

    def _of_several(self, item: Sequence[Any], alone: bool) -> Batch | None:
        """Read three or more values: the first are for the model, the last for the loss."""
        count, takes = len(item), self._forward.takes
        splits = [
            i
            for i in range(1, count + (not self._has_loss))
            if takes(i) and (i >= count - 1 or not self._only_a_tensor)
        ]
        if not splits and alone and takes(count):
            splits = [count]
        if len(splits) > 1:
            words = [_in_code(count, split) for split in splits]
            self._refuse(
                f"this item is a {type(item).__name__} of {count}, of which {self._forward.what} "
                f"takes {self._forward.count}, and the loss may take what is left",
                words,
            )
        for split in splits:
            left = tuple(item[split:])
            target = left[0] if len(left) == 1 else left or None
            return Batch(tuple(item[:split]), {}, target)
        return None

    def _of_entries(self, entries: dict[str, Any], alone: bool) -> Batch:
        """Read a dict: the forward takes entries by name; the loss gets all, or the tensor left."""
        taken = self._forward.of_entries(entries)
        if taken is None:  # the forward itself, or the sequence, says what it lacks
            return Batch((), entries, entries)
        if len(taken) == len(entries):
            taken = entries
        left = [key for key in entries if key not in taken]
        if left and not self._has_told:
            self._has_told = True
            _log.info(
                "%s takes no %s of an item: the model gets the others", self._forward.what,
                " and no ".join(map(repr, left)),
            )  # fmt: skip
        if not self._only_a_tensor:
            return Batch((), taken, entries)
        found = [key for key in left if key in _TARGETS] or left
        if len(found) != 1 and not alone:
            lacks = (
                "it is not clear which of them is the target"
                if found
                else "the model takes all of them, so none of its entries is left to be the target"
            )
            names = found or [key for key in entries if key in _TARGETS] or ["labels"]
            kept = "{" + ", ".join(f"{key!r}: item[{key!r}]" for key in taken) + "}"
            self._refuse(
                f"this item has the entries {', '.join(map(repr, entries))}, and {lacks}, as "
                "loss_fn takes a tensor",
                [f"((), {kept}, item[{name!r}])" for name in names],
            )
        return Batch((), taken, entries[found[0]] if len(found) == 1 else None)

    @staticmethod
    def _refuse(found: str, forms: Sequence[str]) -> NoReturn:
        """Refuse an item, and show which forms it may be given."""
        which = "which says how" if len(forms) > 1 else "which makes one of these"
        raise ConfigError(
            f"the loader must yield {FORMS}; {found}. Give prepare= to Pipeline or to the call, "
            f"{which}: " + ", or ".join(f"prepare=lambda item: {form}" for form in forms)
        )


def batch_of(item: Any) -> Batch:
    """Return the mini-batch of an item by its form alone."""
    return Items().batch(item)


def _entries_of(item: Any) -> dict[str, Any] | None:
    """Return the entries of a dict, or of an object that can give them, as a graph; else None."""
    if not isinstance(item, Mapping):
        # A batch of graphs (torch_geometric) has entries, and is no mapping.
        makes = None if isinstance(item, Tensor | tuple | list) else getattr(item, "to_dict", None)
        item = makes() if callable(makes) else None
    return None if item is None else {str(key): value for key, value in item.items()}


def _in_code(count: int, split: int) -> str:
    """Return the code of a triple for an item of so many entries; the model gets the first."""
    args, left = ([f"item[{i}]" for i in which] for which in (range(split), range(split, count)))
    target = left[0] if len(left) == 1 else f"({', '.join(left)})" if left else "None"
    return f"(({', '.join(args)}{',' * (split == 1)}), {{}}, {target})"


def _in_parts(item: Any) -> str:
    """Return the code that makes a triple of an item of another form."""
    several = isinstance(item, tuple | list) and len(item) > 1
    return _in_code(len(item), len(item) - 1) if several else "((item.a, item.b), {}, item.y)"


def require_loader(loader: Any, what: str) -> None:
    """Refuse a loader that cannot be iterated over; nothing is drawn from it."""
    if not hasattr(type(loader), "__iter__") and not hasattr(type(loader), "__getitem__"):
        raise ConfigError(
            f"{what} takes a loader, something that yields mini-batches, as a DataLoader or a list "
            f"of pairs (x, y); it was given {loader!r:.80}"
        )
    _refuse_samples(loader, what)


def _refuse_samples(loader: Any, what: str) -> None:
    """Refuse a data set in the place of a loader over it."""
    if isinstance(loader, TensorDataset):
        raise ConfigError(
            f"{what} takes a loader, which yields mini-batches, and a TensorDataset yields single "
            "samples: give DataLoader(dataset, batch_size=32, shuffle=True)"
        )
