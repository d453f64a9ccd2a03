"""The two protocols of codecs, and the checks of what they return.

::

    GraphCodec   encode ──► a tensor ──► decode      autograd derives through both, so that the
                                                     gradient crosses in the coded form too; also
                                                     in evaluation and inference
    ByteCodec    pack ──► some tensors ──► unpack    autograd does not see it; for values and for
                                                     gradients, in training alone

A codec is one object for all of its edges and has no state: each end of an edge has a pickled copy.
The residue of error feedback is kept by the stage that sends.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from pipedream_rt.errors import ConfigError, PipelineError
from pipedream_rt.torch_private import RecomputationEnds

Direction: TypeAlias = Literal["both", "forward", "backward"]
"""Which way a codec is for: values, gradients, or both."""

_DIRECTIONS = ("both", "forward", "backward")


class Codec:
    """The part that both kinds have in common.

    Attributes:
        direction: What it codes: values (``"forward"``), gradients (``"backward"``) or ``"both"``.
    """

    direction: Direction = "both"

    def takes(self, tensor: Tensor) -> bool:
        """Whether a tensor is coded; others cross as they are.

        It must not depend on the elements of the tensor.
        """
        return tensor.is_floating_point() and tensor.dim() >= 2


class GraphCodec(Codec):
    """A codec that autograd derives through.

    It is a part of what the model computes: evaluation and inference have it too. Only tensors that
    it `takes` are coded. With the direction ``"forward"`` or ``"backward"`` it stays outside of the
    graph: the other way crosses as it is, and the derivative is that of the identity.
    """

    def encode(self, tensor: Tensor) -> Tensor:
        """Return what crosses, a floating-point tensor."""
        raise NotImplementedError

    def decode(self, coded: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Return a tensor in the place of the one that was encoded, of its shape and dtype.

        Args:
            coded: What `encode` has returned.
            shape: The shape of the tensor.
            dtype: The dtype of it.
        """
        raise NotImplementedError


class ByteCodec(Codec):
    """A codec outside of autograd, of values that require a gradient and of gradients.

    Attributes:
        feedback: Whether what packing has lost is added to the next tensor of the same edge,
            direction and shape, before that is packed (error feedback: Seide et al. 2014,
            https://www.microsoft.com/en-us/research/publication/1-bit-stochastic-gradient-descent-and-application-to-data-parallel-distributed-training-of-speech-dnns/).
            The sender then unpacks too, and keeps the residue, a tensor of that shape.
    """

    feedback: bool = False

    def pack(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """Return what crosses. A tensor that is not finite must not become one that is."""
        raise NotImplementedError

    def unpack(self, parts: Sequence[Tensor], shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Return a tensor in the place of the one that was packed, contiguous, in its own memory.

        Args:
            parts: What `pack` has returned.
            shape: The shape of the tensor.
            dtype: The dtype of it.
        """
        raise NotImplementedError


class OutsideGraph(ByteCodec):
    """A `GraphCodec` for one direction alone, and so outside of the graph.

    Args:
        codec: The codec, whose direction is not ``"both"``.
    """

    def __init__(self, codec: GraphCodec) -> None:
        self.codec, self.direction = codec, codec.direction

    def __repr__(self) -> str:
        return repr(self.codec)

    def takes(self, tensor: Tensor) -> bool:
        """Whether the codec takes it."""
        return self.codec.takes(tensor)

    def pack(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """Return the encoded tensor as the only part."""
        return (self.codec.encode(tensor),)

    def unpack(self, parts: Sequence[Tensor], shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Return the tensor that the codec decodes from the only part."""
        return self.codec.decode(parts[0], shape, dtype)


def require_direction(direction: object) -> None:
    if direction not in _DIRECTIONS:
        names = ", ".join(map(repr, _DIRECTIONS))
        raise ConfigError(f"the direction of a codec is one of {names}, not {direction!r}")


class Sizes:
    """What a codec saves on one edge, in one direction.

    Attributes:
        counts: The number of micro-batches, their bytes before coding, and their bytes after.
    """

    __slots__ = ("counts",)

    def __init__(self) -> None:
        self.counts = [0, 0, 0]

    def add(self, before: Sequence[Tensor], after: Sequence[Tensor]) -> None:
        """Count the tensors of a micro-batch."""
        self.counts[0] += 1
        self.counts[1] += sum(tensor.nbytes for tensor in before)
        self.counts[2] += sum(tensor.nbytes for tensor in after)


def require_flag(name: str, value: object) -> None:
    """Refuse what is neither True nor False."""
    if not isinstance(value, bool):
        raise ConfigError(f"{name}, of a codec, is True or False, not {value!r}")


def require_same(
    found: object, shape: torch.Size, dtype: torch.dtype, codec: Codec, where: str
) -> Tensor:
    """Return what a codec has decoded, if it has the shape and dtype of the original."""
    if isinstance(found, Tensor) and found.shape == shape and found.dtype == dtype:
        return found
    was = f"{str(dtype).removeprefix('torch.')} of shape {tuple(shape)}"
    made = (
        f"{str(found.dtype).removeprefix('torch.')} of shape {tuple(found.shape)}"
        if isinstance(found, Tensor)
        else f"a {type(found).__name__}"
    )
    raise ConfigError(
        f"{where}: the codec {codec!r} was given a tensor of {was} and made {made} of it; a codec "
        "must give back the shape and the dtype. Let its takes() leave such tensors out, or mend it"
    )


def require_parts(found: object, codec: Codec, where: str) -> tuple[Tensor, ...]:
    """Return what a codec has packed, if it is a tuple of tensors that can be sent."""
    if isinstance(found, tuple) and all(map(_can_cross, found)):
        return found
    kinds = ", ".join(map(_kind_of, found)) if isinstance(found, tuple) else _kind_of(found)
    raise ConfigError(
        f"{where}: the codec {codec!r} must pack a tensor as a tuple of dense tensors, it returned "
        f"{kinds}"
    )


def _can_cross(part: object) -> bool:
    """Whether a part can be sent: it is a dense tensor with values."""
    dense = isinstance(part, Tensor) and part.layout is torch.strided
    return dense and not part.is_quantized and not part.is_meta  # type: ignore[attr-defined]


def _kind_of(part: object) -> str:
    """Describe a part in an error message."""
    if not isinstance(part, Tensor):
        return type(part).__name__
    return f"a tensor of {part.dtype}, {part.layout}, on {part.device}"


def require_floating(found: object, codec: Codec, where: str) -> Tensor:
    """Return what a codec has encoded, if it is a tensor that can require a gradient."""
    if isinstance(found, Tensor) and found.is_floating_point() and _can_cross(found):
        return found
    raise ConfigError(
        f"{where}: the codec {codec!r} must encode as a floating-point tensor, through which "
        f"autograd derives, and made {_kind_of(found)}; a codec that packs bytes is a ByteCodec"
    )


@contextmanager
def naming(codec: Codec, where: str) -> Iterator[None]:
    """Add the codec and the edge to an error that the codec raises in the body."""
    try:
        yield
    # Recomputation of a checkpoint ends early by raising RecomputationEnds, through the codec too.
    except (PipelineError, RecomputationEnds):
        raise
    except Exception as error:  # a foreign codec may raise anything
        text = f"{where}: the codec {codec!r} raised {type(error).__name__}: {error}"
        raise RuntimeError(text) from error


PROBES = ((4, 32), (2, 3, 64))
"""The shapes on which a codec is tried before anything starts, if it takes them."""


def try_out(codec: Codec, where: str) -> None:
    """Refuse a codec before a run if it cannot code and decode small tensors of float32."""
    for shape in PROBES:
        probe = torch.linspace(-1, 1, math.prod(shape), device="cpu").reshape(shape)
        try:
            if not codec.takes(probe):
                continue
            found = _there_and_back(codec, probe, where)
        except PipelineError:
            raise
        except Exception as error:  # a foreign codec may raise anything
            raise ConfigError(
                f"{where}: the codec {codec!r} cannot do a float32 tensor of shape {shape}: "
                f"{type(error).__name__}: {error}"
            ) from error
        require_same(found, probe.shape, probe.dtype, codec, where)


def _there_and_back(codec: Codec, probe: Tensor, where: str) -> object:
    """Code a tensor and decode it again, as the two ends of an edge do."""
    if isinstance(codec, ByteCodec):
        with torch.no_grad():
            parts = require_parts(codec.pack(probe), codec, where)
            return codec.unpack(parts, probe.shape, probe.dtype)
    assert isinstance(codec, GraphCodec)
    probe.requires_grad_()
    with torch.enable_grad():
        found = require_floating(codec.encode(probe), codec, where)
        arrives = codec.decode(found, probe.shape, probe.dtype)
    if isinstance(arrives, Tensor) and not arrives.requires_grad:
        raise ConfigError(
            f"{where}: no gradient comes back through the codec {codec!r}, so the stages before it "
            "would learn nothing; a codec outside of autograd is a ByteCodec"
        )
    return arrives
