"""The shapes of a layer's outputs, found without computing anything: on the meta device."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from pipedream_rt.models.mark import writes_of
from pipedream_rt.models.program import found, replaced
from pipedream_rt.models.settings import autocasts
from pipedream_rt.models.tensors import memory_of
from pipedream_rt.torch_private import NormWithBuffers


class NotDense(Exception):
    """A layer has returned a tensor that is not dense; the text is "nested" or "sparse"."""


class Shaped(NamedTuple):
    """The results of a layer that was called with tensors without values.

    Attributes:
        result: Its output, with zeros in the place of tensors.
        changed: The given tensors that it has changed in place.
        moved: The names in it of the buffers that it has changed.
        views: Pairs of a tensor of the result, and a given one over whose memory it lies.
    """

    result: Any
    changed: list[Tensor]
    moved: list[str]
    views: list[tuple[Tensor, Tensor]]


def shapes_of(
    layer: nn.Module,
    given: Any,
    carried: Mapping[int, tuple[str, Any]],
    around: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Shaped:
    """Run a layer on the meta device; on copies with values if it cannot run there.

    ``carried`` has objects in which the layer may keep something, by ``id``, each with its name.
    Each attempt to call the layer is in a context of ``around``.
    """
    kinds = tuple({type(value) for _, value in carried.values()})

    def attempt(copy_of: Callable[[Tensor], Tensor]) -> Shaped:
        # On copies, since an attempt that fails half-way must not have changed the objects.
        copies = {number: copy.deepcopy(value) for number, (_, value) in carried.items()}
        mine = replaced(given, kinds, lambda each: copies.get(id(each), each)) if copies else given
        shaped = _run_on(layer, mine, copy_of, around)
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


def _run_on(
    layer: nn.Module,
    given: Any,
    copy_of: Callable[[Tensor], Tensor],
    around: Callable[[], AbstractContextManager[None]],
) -> Shaped:
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
    before = {id(made): writes_of(made) for _, made in copies.values()}
    with torch.no_grad(), around():
        result = functional_call(layer, {**weights, **buffers}, args, kwargs)
    returned = {id(made) for _, made in taken}
    for each in found(result, Tensor):
        if id(each) in returned:
            continue
        if each.is_nested or each.layout is not torch.strided:
            raise NotDense("nested" if each.is_nested else "sparse")
    back = {id(made): tensor for tensor, made in taken}
    given_on = [tensor.device for tensor, _ in copies.values() if not tensor.is_meta]
    home = given_on[0] if given_on else torch.device("cpu")

    def zeros(tensor: Tensor) -> Tensor:
        if id(tensor) in back:  # a layer may return what it was given
            return back[id(tensor)]
        like = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=home)
        memory = memory_of(tensor)
        sources = [  # of a view of what the layer was given
            source for source, made in taken if memory_of(made) == memory and made.numel()
        ]
        asks = any(source.requires_grad for source in sources) if sources else learns
        like.zero_()
        if asks and torch.is_grad_enabled() and (like.is_floating_point() or like.is_complex()):
            # No leaf, as the result of a layer is none, and with the strides that it has.
            places = zip(like.shape, like.stride(), strict=True)
            reach = 1 + sum((size - 1) * stride for size, stride in places) if like.numel() else 0
            flat = torch.zeros(reach, dtype=like.dtype, device=home, requires_grad=True)
            like = (flat * 1).as_strided(like.shape, like.stride())
        views.extend((like, source) for source in sources)
        return like

    # On the meta device the statistics of a norm stay as they are.
    counting = {
        name
        for where, module in layer.named_modules()
        if isinstance(module, NormWithBuffers) and module.training
        for name, _ in module.named_buffers(where)
    }
    views: list[tuple[Tensor, Tensor]] = []
    learns = any(p.requires_grad for p in layer.parameters()) or any(
        tensor.requires_grad for tensor, _ in taken
    )
    return Shaped(
        replaced(result, (Tensor,), zeros),
        [tensor for tensor, made in taken if writes_of(made) != before[id(made)]],
        [n for n, b in buffers.items() if writes_of(b) != before[id(b)] or n in counting],
        views,
    )


def valued(tensor: Tensor) -> Tensor:
    """Return a copy of a tensor; zeros if it has no values."""
    if tensor.is_meta:
        return torch.zeros_like(tensor, device="cpu")
    return tensor.detach().clone()
