"""Sparse codecs: only the largest elements of each row cross."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pipedream_rt.errors import ConfigError
from pipedream_rt.stage.codec import ByteCodec, Direction, require_direction, require_flag

_SHORT = 1 << 15
"""The most columns whose indices fit in int16."""


@dataclass(frozen=True)
class TopK(ByteCodec):
    """The elements of each row that are largest in size cross, with their indices; others are zero.

    Attributes:
        share: The share of the elements of a row that crosses, above 0 and at most 1; of each row
            at least one element does.
        direction: Which way it is for, see `Codec`. Gradients bear it better than values.
        feedback: See `ByteCodec`; without it, what is small is never learned from.
    """

    share: float = 0.1
    direction: Direction = "both"
    feedback: bool = True

    def __post_init__(self) -> None:
        require_direction(self.direction)
        require_flag("feedback", self.feedback)
        number = isinstance(self.share, int | float) and not isinstance(self.share, bool)
        if not number or not 0 < self.share <= 1:
            raise ConfigError(f"TopK has a share above 0 and at most 1, not {self.share!r}")

    def takes(self, tensor: Tensor) -> bool:
        """Take floating-point tensors with elements of two bytes or more."""
        return super().takes(tensor) and tensor.numel() > 0 and tensor.dtype.itemsize > 1

    def pack(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """Return the elements and their indices in the row."""
        columns = tensor.shape[-1]
        rows = tensor.reshape(-1, columns)
        count = max(1, math.ceil(self.share * columns))
        # NaN counts as the largest, so that it crosses: a tensor that is not finite must stay so.
        sizes = rows.abs().nan_to_num(nan=torch.inf)
        places = sizes.topk(count, dim=1).indices
        short = torch.int16 if columns <= _SHORT else torch.int32
        return rows.gather(1, places), places.to(short)

    def unpack(self, parts: Sequence[Tensor], shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Return the elements at their indices, and zeros elsewhere."""
        values, places = parts
        rows = torch.zeros(len(values), shape[-1], dtype=dtype, device=values.device)
        return rows.scatter_(1, places.long(), values).reshape(shape)
