"""The shapes of a layer's outputs, found without computing anything: on the meta device."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from pipedream_rt.models.program import found, replaced
from pipedream_rt.models.settings import autocasts


def changes_of(tensor: Tensor) -> int:
    """Return how often a tensor was changed in place; 0 for inference tensors."""
    return 0 if tensor.is_inference() else tensor._version


class NotDense(Exception):
    """A layer has returned a tensor that is not dense; the text is "nested" or "sparse"."""


class Shaped(NamedTuple):
    """What a layer has made of tensors without values.

    Attributes:
        result: What it has returned, with zeros in the place of tensors.
        changed: The given tensors that it has changed in place.
        changed_buffers: Whether it has changed its buffers.
        views: Tensors of the result that lie over the memory of a given one, each with that one.
    """

    result: Any
    changed: list[Tensor]
    changed_buffers: bool
    views: list[tuple[Tensor, Tensor]]


def shapes_of(layer: nn.Module, given: Any, carried: Mapping[int, tuple[str, Any]]) -> Shaped:
    """Run a layer on the meta device; on copies with values if it cannot run there.

    ``carried`` has objects in which the layer may keep something, by ``id``, each with its name.
    """
    kinds = tuple({type(value) for _, value in carried.values()})

    def attempt(copy_of: Callable[[Tensor], Tensor]) -> Shaped:
        # On copies, since an attempt that fails half-way must not have changed the objects.
        copies = {number: copy.deepcopy(value) for number, (_, value) in carried.items()}
        mine = replaced(given, kinds, lambda each: copies.get(id(each), each)) if copies else given
        shaped = _run_on(layer, mine, copy_of)
        for number, changed in copies.items():
            vars(carried[number][1]).update(vars(changed))
        return shaped

    try:
        if autocasts():  # it does nothing on the meta device, so dtypes would be others
            return attempt(valued)
        with _without_autocast():
            return attempt(lambda tensor: tensor.detach().to("meta"))
    # It holds tensors in attributes, reads values, or turns autocast on.
    except (NotImplementedError, RuntimeError, ValueError):
        return attempt(valued)


@contextmanager
def _without_autocast() -> Iterator[None]:
    """Raise an error where the body turns autocast on, which has no effect on the meta device."""
    before = torch.autocast.__enter__

    def enter(self: Any) -> None:
        if self._enabled:
            raise NotImplementedError("autocast on the meta device")
        before(self)  # type: ignore[no-untyped-call]

    torch.autocast.__enter__ = enter  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.autocast.__enter__ = before  # type: ignore[method-assign]


def _run_on(layer: nn.Module, given: Any, copy_of: Callable[[Tensor], Tensor]) -> Shaped:
    """Run a layer on copies of its weights, its buffers and its arguments."""
    copies: dict[int, tuple[Tensor, Tensor]] = {}

    def copied(tensor: Tensor) -> Tensor:
        if id(tensor) not in copies:
            copies[id(tensor)] = tensor, copy_of(tensor)
        return copies[id(tensor)][1]

    args, kwargs = replaced(given, (Tensor,), copied)
    taken = list(copies.values())
    buffers = {name: copied(t) for name, t in layer.named_buffers()}
    weights = {name: copied(t) for name, t in layer.named_parameters()}
    before = {id(made): changes_of(made) for _, made in copies.values()}
    with torch.no_grad():
        result = functional_call(layer, {**weights, **buffers}, args, kwargs)
    for each in found(result, Tensor):
        if each.is_nested or each.layout is not torch.strided:
            raise NotDense("nested" if each.is_nested else "sparse")
    back = {id(made): tensor for tensor, made in taken}
    given_on = [tensor.device for tensor, _ in copies.values() if not tensor.is_meta]
    home = given_on[0] if given_on else torch.device("cpu")

    def zeros(tensor: Tensor) -> Tensor:
        if id(tensor) in back:  # a layer may return what it was given
            return back[id(tensor)]
        like = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=home)
        memory = tensor.untyped_storage()._cdata
        for source, made in taken:  # a view of what the layer was given
            if made.untyped_storage()._cdata == memory and made.numel():
                views.append((like, source))
        # Times 1, so that it is no leaf, as the result of a layer is none.
        learns = wanted and (like.is_floating_point() or like.is_complex())
        return like.zero_().requires_grad_() * 1 if learns and not views else like.zero_()

    views: list[tuple[Tensor, Tensor]] = []
    wanted = torch.is_grad_enabled() and (
        any(p.requires_grad for p in layer.parameters()) or any(t.requires_grad for t, _ in taken)
    )
    return Shaped(
        replaced(result, (Tensor,), zeros),
        [tensor for tensor, made in taken if changes_of(made) != before[id(made)]],
        any(changes_of(buffer) != before[id(buffer)] for buffer in buffers.values()),
        views,
    )


def valued(tensor: Tensor) -> Tensor:
    """Return a copy of a tensor; zeros if it has no values."""
    if tensor.is_meta:
        return torch.zeros_like(tensor, device="cpu")
    return tensor.detach().clone()
