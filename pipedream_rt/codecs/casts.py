"""Casts: values and gradients cross in a shorter dtype."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from pipedream_rt.stage.codec import Direction, GraphCodec, require_direction


@dataclass(frozen=True)
class _Cast(GraphCodec):
    """A cast on the sender, and one back on the receiver."""

    direction: Direction = "both"
    to: ClassVar[torch.dtype]

    def __post_init__(self) -> None:
        require_direction(self.direction)

    def takes(self, tensor: Tensor) -> bool:
        # A tensor that is already as short would lose range or precision and save no bytes.
        longer = tensor.is_floating_point() and tensor.dtype.itemsize > self.to.itemsize
        return longer and tensor.dim() >= 2

    def encode(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.to)

    def decode(self, coded: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        return coded.to(dtype)


@dataclass(frozen=True)
class BFloat16(_Cast):
    """Values and gradients cross in bfloat16: half of the bytes of float32, with its range.

    ``direction`` is which way it is for, see `Codec`.
    """

    to = torch.bfloat16


@dataclass(frozen=True)
class Float16(_Cast):
    """Values and gradients cross in float16: half of the bytes of float32.

    A number above 65,504 becomes infinite, so use it with a scaled loss (`LossScale`), or where the
    size of the gradients is known. ``direction`` is which way it is for, see `Codec`.
    """

    to = torch.float16
