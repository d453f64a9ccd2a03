"""State that a forward keeps in modules that are taken apart, such as a table computed once.

No stage has such a module, so nothing is kept from call to call there: each forward computes the
table again. That is right if the table depends on shapes alone, and if a forward does the same with
it as without it. Both are checked when a forward is recorded: it is called once more with the state
that it has left itself, and with that of a forward of other shapes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from pipedream_rt.containers import is_sparse, opened, parts_of_sparse
from pipedream_rt.models.preserving_state import Left, refusal_of_change
from pipedream_rt.models.program import STAND_INS, replaced

PLAIN_LEAVES = {
    type(None), bool, int, float, str, bytes, complex, slice, range, type(Ellipsis), torch.Size,
    torch.dtype, torch.device, torch.layout, torch.memory_format,
}  # fmt: skip
"""The types of values that are known by their text."""


def leaves_of(value: Any) -> list[Any]:
    """Return everything in a value that is not a container."""
    held = None if isinstance(value, STAND_INS) else opened(value)
    return [value] if held is None else [leaf for part in held[1] for leaf in leaves_of(part)]


def content_of(value: Any) -> str:
    """Return a text that is equal for values with the same content, tensors by their bytes."""

    def plain(value: Any) -> Any:
        if isinstance(value, Tensor) and is_sparse(value):
            kind, parts = parts_of_sparse(value)
            return kind, [plain(part) for part in parts]
        if isinstance(value, Tensor):
            data = value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
            return value.dtype, value.shape, blake2b(data).hexdigest()
        if isinstance(value, set | frozenset):
            return type(value), sorted(map(repr, value))
        return type(value) if type(value) not in PLAIN_LEAVES else repr(value)

    kinds = tuple({type(v) for v in leaves_of(value)} - {*STAND_INS})
    return repr(replaced(value, kinds, plain))


class Attempt(NamedTuple):
    """The state that a forward has left, and its steps that depend on more than the inputs."""

    left: Left
    does: list[Any]


Call: TypeAlias = Callable[[Left | None], Attempt]
"""Calls the forward of some inputs, with the state that another call has left or as at first."""


@dataclass(slots=True)
class Kept:
    """The state that forwards of a model have left, with which later ones are compared.

    Attributes:
        last: The state left by the last forward that left any.
        firsts: By mode, the first such forward, and what it has done.
    """

    last: Left | None = None
    firsts: dict[Any, tuple[Call, list[Any]]] = field(default_factory=dict)

    def require_alike(self, mode: Any, call: Call) -> None:
        """Refuse a forward that does something else with what it, or another one, has left."""
        cold = call(None)
        warm = call(cold.left)
        if content_of(warm.left.values) != content_of(cold.left.values):
            raise refusal_of_change(cold.left, "to something else in each call")
        if warm.does != cold.does:
            raise refusal_of_change(cold.left, "and does something else with it than without it")
        now = cold.left
        if self.last is not None and content_of(self.last.values) != content_of(now.values):
            after = call(self.last)
            alike = after.does == cold.does and all(
                first(after.left).does == does for first, does in self.firsts.values()
            )
            if not alike:
                raise refusal_of_change(now, "and goes by the one of inputs of another shape")
            now = after.left
        self.firsts.setdefault(mode, (call, cold.does))
        self.last = now


def refuse_kept_values(left: Left, goes_by_shapes: Callable[[Tensor], bool]) -> None:
    """Refuse a forward that has left more than plain values and tensors that depend on shapes."""
    for name, value in left.values.items():
        inside = leaves_of([value, list(value)] if isinstance(value, dict) else value)
        for each in [*value] if isinstance(value, set) else inside:
            if type(each) is Tensor and not goes_by_shapes(each):
                raise refusal_of_change(left, "to what it computes of its inputs or layers", name)
            if type(each) is not Tensor and type(each) not in PLAIN_LEAVES:
                raise refusal_of_change(left, "", name)
