"""Projections: values cross with fewer columns."""

from __future__ import annotations

from hashlib import blake2b

import torch
from torch import Tensor, nn

from pipedream_rt.errors import ConfigError
from pipedream_rt.stage.codec import Direction, GraphCodec, require_direction


class Projection(GraphCodec):
    """The last dimension crosses with fewer columns: ``x B`` is sent, ``(x B) Bᵀ`` arrives.

    The basis B is fixed and a part of the model: what lies outside of the space that B spans is
    lost, in evaluation too, so the stages learn within that space. For a basis that is learned, see
    `learned_projection`.

    Args:
        columns: The number of columns of the values; tensors with another number cross as they are.
        rank: The number of columns that cross.
        basis: The basis, of shape (columns, rank), as from a principal component analysis of the
            values. None for random orthonormal columns.
        seed: The seed of the random columns.
        dtype: The dtype in which the columns cross; None for that of the values.
        direction: Which way it is for, see `Codec`.

    Raises:
        ConfigError: A number makes no sense, or the basis has another shape.
    """

    def __init__(
        self,
        columns: int,
        rank: int,
        *,
        basis: Tensor | None = None,
        seed: int = 0,
        dtype: torch.dtype | None = None,
        direction: Direction = "both",
    ) -> None:
        require_direction(direction)
        whole = all(isinstance(n, int) and not isinstance(n, bool) for n in (columns, rank))
        if not whole or not 0 < rank <= columns:
            raise ConfigError(
                "a projection has a number of columns, and a rank from 1 to that number, not "
                f"{columns!r} and {rank!r}"
            )
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise ConfigError(f"a projection crosses in a floating-point dtype, not in {dtype!r}")
        if basis is None:
            basis = orthonormal(columns, rank, seed)
        elif not isinstance(basis, Tensor):
            raise ConfigError(f"the basis must be a tensor, not a {type(basis).__name__}")
        elif basis.shape != (columns, rank):
            raise ConfigError(
                f"the basis must have the shape {(columns, rank)}, not {tuple(basis.shape)}"
            )
        self.columns, self.rank, self.dtype, self.direction = columns, rank, dtype, direction
        self.basis = basis.detach().float().cpu().contiguous()

    def __repr__(self) -> str:
        """Return the expression that made it, with a digest in the place of the basis."""
        dtype = "" if self.dtype is None else f", dtype={self.dtype}"
        one_way = "" if self.direction == "both" else f", direction={self.direction!r}"
        digest = blake2b(self.basis.numpy().data, digest_size=4).hexdigest()
        return f"Projection({self.columns}, {self.rank}, basis={digest}{dtype}{one_way})"

    def takes(self, tensor: Tensor) -> bool:
        """Take tensors whose last dimension has ``columns`` elements."""
        return super().takes(tensor) and tensor.shape[-1] == self.columns

    def encode(self, tensor: Tensor) -> Tensor:
        """Return ``x B``."""
        coded: Tensor = tensor @ self.basis.to(tensor.device, tensor.dtype)
        return coded if self.dtype is None else coded.to(self.dtype)

    def decode(self, coded: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Return ``(x B) Bᵀ``."""
        found: Tensor = coded.to(dtype) @ self.basis.to(coded.device, dtype).T
        return found


def orthonormal(columns: int, rank: int, seed: int = 0) -> Tensor:
    """Return a random basis of shape (columns, rank) with orthonormal columns, in float32."""
    # A generator of its own: the random numbers of the script must not depend on codecs.
    generator = torch.Generator().manual_seed(seed)
    random = torch.randn(columns, rank, dtype=torch.float64, generator=generator, device="cpu")
    basis: Tensor = torch.linalg.qr(random).Q
    return basis.float().contiguous()


def learned_projection(columns: int, rank: int, *, seed: int = 0) -> tuple[nn.Linear, nn.Linear]:
    """Return two layers for the two sides of a split point, between which few columns cross.

    They are layers of the model like any others: put the first before the split point, and the
    second behind it. They begin as a random projection and its transpose, and are learned.

    Args:
        columns: The number of columns of the values.
        rank: The number of columns that cross.
        seed: The seed of the projection.

    Returns:
        The layer from ``columns`` to ``rank``, and the one back, without biases.
    """
    narrow, wide = nn.Linear(columns, rank, bias=False), nn.Linear(rank, columns, bias=False)
    with torch.no_grad():
        basis = orthonormal(columns, rank, seed)
        narrow.weight.copy_(basis.T)
        wide.weight.copy_(basis)
    return narrow, wide
