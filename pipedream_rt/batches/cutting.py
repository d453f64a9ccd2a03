"""How a mini-batch is cut: each of its values along a dimension, or not at all.

A tensor is cut along its first dimension; a value without samples goes to every micro-batch.
Anything else is ambiguous: a list of eight numbers may have one for each of eight samples, or be a
shape. The user marks such a value, or it is refused.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pipedream_rt.batches.items import Batch
from pipedream_rt.batches.marks import Along, Whole
from pipedream_rt.containers import is_sparse, opened, place_in
from pipedream_rt.errors import ConfigError
from pipedream_rt.models.code import is_installed
from pipedream_rt.models.code_reading import names_used
from pipedream_rt.models.holders import OF_MODULES
from pipedream_rt.models.program import found, replaced
from pipedream_rt.models.tensors import named_tensors
from pipedream_rt.torch_private import BatchNorm

MARKS = (
    "mark it in the loader or in prepare=: pipedream_rt.Whole(value) goes to every micro-batch as "
    "it is, pipedream_rt.Along(value, dim) is cut along a dimension (a list along its entries); or "
    'give micro_batches=1, schedule="gpipe", which leaves mini-batches whole'
)
"""The advice of errors about an ambiguous value."""


_CUT = (Whole, Along, Tensor)


def unmarked(batch: Batch) -> Batch:
    """Return a mini-batch without marks."""
    found: Batch = replaced(batch, (Whole, Along), lambda mark: mark.value)
    return found


def is_marked(batch: Batch) -> bool:
    """Whether the user has marked how an input is cut."""
    return bool(found((batch.args, batch.kwargs), Whole, Along))


def is_cut_elsewhere(batch: Batch) -> bool:
    """Whether a value of a mini-batch is to be cut along another dimension than its first."""
    return any(isinstance(each, Along) and each.dim != 0 for each in found(batch, *_CUT))


def samples_in(value: Any) -> int | None:
    """Return the number of samples by the first value that is cut; None if there is none."""
    for each in found(value, *_CUT):
        if isinstance(each, Along):
            return each.samples
        if isinstance(each, Tensor) and each.dim():
            return each.size(0)
    return None


def samples_of(batch: Batch) -> int | None:
    """Return the number of samples of a mini-batch, by its inputs; None if none of them tells."""
    return samples_in((batch.args, batch.kwargs))


def cut_batch(batch: Batch, sizes: Sequence[int]) -> list[Batch]:
    """Cut a mini-batch into micro-batches of these sizes (0: an empty one); tensors are views."""
    total, made = sum(sizes), dict[int, Sequence[Any]]()
    places = _places(batch)

    def parts_of(value: Any) -> Sequence[Any]:
        if isinstance(value, Whole) or (isinstance(value, Tensor) and not value.dim()):
            return [value.value if isinstance(value, Whole) else value] * len(sizes)
        along = value if isinstance(value, Along) else Along(value)
        if len(sizes) == 1:
            return [along.value]
        if isinstance(along.value, Tensor) and is_sparse(along.value):
            raise ConfigError(
                f"{places.get(id(value), 'a tensor')} of the mini-batch is a sparse tensor, which "
                f"is not cut into micro-batches: {MARKS}"
            )
        if along.samples != total:
            raise ConfigError(
                f"{places.get(id(value), 'a tensor')} of the mini-batch has {along.samples} "
                f"samples where {total} are expected, so it cannot be cut into micro-batches: "
                f"{MARKS}"
            )
        return along.parts(sizes)

    def part(number: int) -> Batch:
        def of(value: Any) -> Any:
            if id(value) not in made:  # a tensor that occurs twice is one tensor in each part
                made[id(value)] = parts_of(value)
            return made[id(value)][number]

        found: Batch = replaced(batch, _CUT, of)
        return found

    return [part(number) for number in range(len(sizes))]


def micro_batch_sizes(samples: int, micro_batches: int, *, pairs: bool = False) -> list[int]:
    """Return the number of samples of each micro-batch: equal ones, then a short one, then 0."""
    # 30 samples in 4 micro-batches give 8, 8, 8, 6; 5 samples give 2, 2, 1, 0.
    size = -(-samples // micro_batches)
    count = -(-samples // size)
    if pairs and samples > 1 and samples - (count - 1) * size == 1:
        # BatchNorm needs two samples: 13 in 4 give 4, 3, 3, 3 rather than 4, 4, 4, 1.
        count = min(count, samples // 2)
        sizes = [samples // count + (i < samples % count) for i in range(count)]
        return sizes + [0] * (micro_batches - count)
    return [max(0, min(size, samples - i * size)) for i in range(micro_batches)]


def has_batch_norm(module: nn.Module) -> bool:
    """Whether there is BatchNorm in a module."""
    return any(isinstance(each, BatchNorm) for each in module.modules())


def kept_by_forward(module: nn.Module) -> tuple[list[str], list[str]]:
    """Return the plain attributes, and the buffers, that a forward of a module reads and changes.

    Judged by the names in its code; modules inside of it, and those of libraries, are left out.
    """
    cls: type = type(module)
    if is_installed(cls.__module__):
        return [], []
    loaded, stored = names_used(cls)
    own = [name for name in vars(module) if name not in OF_MODULES and name in loaded & stored]
    in_place = not _IN_PLACE.isdisjoint(loaded)
    buffers = [n for n in module._buffers if n in stored or (in_place and n in loaded)]
    return own, buffers


_IN_PLACE = {
    "copy_", "add_", "sub_", "mul_", "div_", "lerp_", "fill_", "zero_", "addcmul_", "addcdiv_",
    "index_add_", "index_copy_", "scatter_", "scatter_add_",
}  # fmt: skip
"""Methods by which a forward changes a buffer, as a moving average."""


def keeps_state(module: nn.Module) -> bool:
    """Whether forwards of a module, or of one inside it, read state that earlier ones have left."""
    return has_batch_norm(module) or any(any(kept_by_forward(m)) for m in module.modules())


def needs_pairs(model: nn.Module, batch: Batch) -> bool:
    """Whether a model cannot be trained on one sample, as BatchNorm over samples alone cannot."""
    if not has_batch_norm(model):
        return False
    # A forward on the meta device tells: it checks shapes, and computes nothing.
    tensors = [t for _, t in named_tensors(model)]
    there = {id(t): torch.empty_like(t, device="meta") for t in tensors}
    samples = samples_of(batch) or 1
    one = unmarked(cut_batch(batch, [1, samples - 1])[0])
    args, kwargs = replaced((one.args, one.kwargs), (Tensor,), lambda t: t.to("meta"))
    try:
        with torch.no_grad():
            copy.deepcopy(model, there)(*args, **kwargs)
    except Exception as error:  # any other error comes again with the mini-batch itself
        return "more than 1 value per channel" in str(error)
    return False


class Lists:
    """Refuses lists that may, or may not, have an entry for each sample."""

    def __init__(self) -> None:
        # Places of lists that once had another length than the mini-batch: no entry per sample.
        self._whole: set[str] = set()

    def refuse_unclear(self, batch: Batch, samples: int) -> None:
        """Refuse a list as long as the mini-batch, unless an earlier one in its place was not."""
        for place, value in _lists_in(batch):
            if len(value) != samples or samples < 2:
                self._whole.add(place)
            elif place not in self._whole:
                raise ConfigError(
                    f"{place} of the mini-batch is a {type(value).__name__} of {samples} entries, "
                    f"as many as there are samples, so it is not clear whether each micro-batch "
                    f"gets its own entries or all of them: {MARKS}"
                )


def _named(batch: Batch) -> Iterator[tuple[str, Any]]:
    """Yield the values of a mini-batch, with their names in errors."""
    for i, value in enumerate(batch.args):
        yield "the input" if len(batch.args) == 1 else f"input {i}", value
    for name, value in batch.kwargs.items():
        yield name, value
    target = batch.target
    if batch.kwargs and isinstance(target, dict):  # a dict is both
        left = {n: v for n, v in target.items() if batch.kwargs.get(n) is not v}
        target = left or None
    yield "the target", target


def _inside(place: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield a value and all that is in it, with expressions for them."""
    yield place, value
    held = opened(value) if isinstance(value, dict | list | tuple) else None
    for key, each in zip(*(held or ((), ()))):
        yield from _inside(place + place_in(value, key), each)


def _places(batch: Batch) -> dict[int, str]:
    """Return the names of the tensors and marks of a mini-batch, by ``id``."""
    return {
        id(each): place
        for name, value in _named(batch)
        for place, each in _inside(name, value)
        if isinstance(each, _CUT)
    }


def _lists_in(batch: Batch) -> Iterator[tuple[str, Sequence[Any]]]:
    """Yield the lists and tuples of a mini-batch that have no tensor in them."""
    for name, value in _named(batch):
        for place, each in _inside(name, value):
            if type(each) in (list, tuple) and each and not found(each, *_CUT):
                yield place, each
