"""Values that cross an edge encoded by a `GraphCodec`, whose work autograd differentiates."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pipedream_rt.messages.tree import flatten, unflatten
from pipedream_rt.messages.wire import dtype_of, name_of_dtype
from pipedream_rt.stage.codec import GraphCodec, Sizes, naming, require_floating, require_same


@dataclass(frozen=True, slots=True)
class Encoded:
    """The coded form of a value: plain data and tensors, which cross as any dataclass does.

    Attributes:
        was: By tensor, ``[dtype, shape]`` before it was encoded; empty if it was not.
    """

    structure: list[Any]
    tensors: list[Tensor]
    was: list[list[Any]]


class GraphCoding:
    """The codecs of the graph on the edges of one stage."""

    def __init__(
        self, codecs: Mapping[tuple[int, int], GraphCodec], stage: int, autocast: str | None
    ) -> None:
        # The codecs come by (source, target) stage; `autocast` is the device type where it is on.
        self._to = {end: codec for (begin, end), codec in codecs.items() if begin == stage}
        self._from = {begin: codec for (begin, end), codec in codecs.items() if end == stage}
        self._stage, self._autocast = stage, autocast
        self._sizes = {target: Sizes() for target in self._to}

    def encoded(self, target: int, value: Any) -> Any:
        """Return a value encoded for a target stage; the value itself without a codec."""
        codec = self._to.get(target)
        if codec is None:
            return value
        structure, tensors = flatten(value)
        made, was = [], []
        with self._as_it_is():
            for tensor in tensors:
                if codec.takes(tensor):
                    was.append([name_of_dtype(tensor.dtype), list(tensor.shape)])
                    where = f"the edge {self._stage} -> {target}"
                    with naming(codec, where):
                        found = codec.encode(tensor)
                    made.append(require_floating(found, codec, where))
                else:
                    was.append([])
                    made.append(tensor)
        if torch.is_grad_enabled():  # a micro-batch that is trained on
            self._sizes[target].add(tensors, made)
        return Encoded(structure, made, was)

    def statistics(self) -> dict[str, Any]:
        """Return by edge: source, target, direction, micro-batches, bytes before and after."""
        rows = self._sizes.items()
        return {"encoded": [[self._stage, to, "forward", *sizes.counts] for to, sizes in rows]}

    def decoded(self, source: int, value: Any) -> Any:
        """Return a value from a source stage, decoded if the edge has a codec."""
        codec = self._from.get(source)
        if codec is None or not isinstance(value, Encoded):
            return value
        tensors = []
        where = f"the edge {source} -> {self._stage}"
        with self._as_it_is():
            for tensor, was in zip(value.tensors, value.was, strict=True):
                if not was:
                    tensors.append(tensor)
                    continue
                dtype, shape = dtype_of(was[0]), torch.Size(was[1])
                with naming(codec, where):
                    found = codec.decode(tensor, shape, dtype)
                # A copy, since layers may change what they are given, and not what has come.
                found = found.clone() if found is tensor else found
                tensors.append(require_same(found, shape, dtype, codec, where))
        return unflatten(value.structure, tensors)

    def _as_it_is(self) -> AbstractContextManager[object]:
        """Return a context without autocast, which would change the dtypes of a codec."""
        if self._autocast is None:
            return nullcontext()
        return torch.autocast(self._autocast, enabled=False)
