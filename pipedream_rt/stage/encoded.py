"""Values that cross an edge in a coded form through which autograd derives; see `GraphCodec`."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pipedream_rt.codecs.base import GraphCodec, require_same
from pipedream_rt.errors import ConfigError
from pipedream_rt.messages.tree import flatten, unflatten
from pipedream_rt.messages.wire import dtype_of, name_of_dtype


@dataclass(frozen=True, slots=True)
class Encoded:
    """What crosses in the place of a value: plain data and tensors, as any dataclass.

    Attributes:
        structure: The structure of the value.
        tensors: Its tensors, some of them encoded.
        was: For each tensor that is encoded, its dtype and shape before; for others nothing.
    """

    structure: list[Any]
    tensors: list[Tensor]
    was: list[list[Any]]


class GraphCoding:
    """The codecs of the graph on the edges of one stage.

    Args:
        codecs: The codecs, by the stages at both ends of an edge.
        stage: Index of the stage.
        autocast: The device type on which torch's autocast is on; None if it is off.
    """

    def __init__(
        self, codecs: Mapping[tuple[int, int], GraphCodec], stage: int, autocast: str | None
    ) -> None:
        """Take the codecs of the edges of the stage."""
        self._to = {end: codec for (begin, end), codec in codecs.items() if begin == stage}
        self._from = {begin: codec for (begin, end), codec in codecs.items() if end == stage}
        self._stage, self._autocast = stage, autocast
        self._counts = [0, 0, 0]

    def encoded(self, target: int, value: Any) -> Any:
        """Return what goes to a stage in the place of a value; the value itself without a codec.

        Raises:
            ConfigError: The codec does not make a floating-point tensor.
        """
        codec = self._to.get(target)
        if codec is None:
            return value
        structure, tensors = flatten(value)
        made, was = [], []
        with self._as_it_is():
            for tensor in tensors:
                if codec.takes(tensor):
                    was.append([name_of_dtype(tensor.dtype), list(tensor.shape)])
                    made.append(_coded(codec, tensor, f"the edge {self._stage} -> {target}"))
                else:
                    was.append([])
                    made.append(tensor)
        counts = self._counts
        counts[0] += 1
        counts[1] += sum(tensor.nbytes for tensor in tensors)
        counts[2] += sum(tensor.nbytes for tensor in made)
        return Encoded(structure, made, was)

    def statistics(self) -> dict[str, int]:
        """Return how many values were encoded, and their bytes before and behind."""
        names = ("values_encoded", "values_bytes", "values_encoded_bytes")
        return dict(zip(names, self._counts, strict=True))

    def decoded(self, source: int, value: Any) -> Any:
        """Return the value in the place of which `encoded` has sent something.

        Raises:
            ConfigError: The codec gives back another shape or dtype.
        """
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
                found = codec.decode(tensor, shape, dtype)
                # A copy, since layers may change what they are given, and not what has come.
                found = found.clone() if found is tensor else found
                tensors.append(require_same(found, shape, dtype, codec, where))
        return unflatten(value.structure, tensors)

    def _as_it_is(self) -> AbstractContextManager[object]:
        """Return a context in which autocast leaves the dtypes of a codec alone."""
        if self._autocast is None:
            return nullcontext()
        return torch.autocast(self._autocast, enabled=False)


def _coded(codec: GraphCodec, tensor: Tensor, where: str) -> Tensor:
    """Return an encoded tensor.

    Raises:
        ConfigError: It is none that can ask for a gradient.
    """
    found = codec.encode(tensor)
    if isinstance(found, Tensor) and found.is_floating_point():
        return found
    what = f"a tensor of {found.dtype}" if isinstance(found, Tensor) else type(found).__name__
    raise ConfigError(
        f"{where}: the codec {codec!r} must encode as a floating-point tensor, through which "
        f"autograd derives, and made {what}; a codec that packs bytes is a ByteCodec"
    )
