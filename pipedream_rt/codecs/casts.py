"""Casts: values and gradients cross in a shorter dtype."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from pipedream_rt.codecs.base import Direction, GraphCodec, require_direction


@dataclass(frozen=True)
class _Cast(GraphCodec):
    """A cast, and back."""

    direction: Direction = "both"
    to: ClassVar[torch.dtype]

    def __post_init__(self) -> None:
        """Check the direction."""
        require_direction(self.direction)

    def takes(self, tensor: Tensor) -> bool:
        """Take what has a longer dtype."""
        longer = tensor.is_floating_point() and tensor.dtype.itemsize > self.to.itemsize
        return longer and tensor.dim() >= 2

    def encode(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.to)

    def decode(self, coded: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Cast back."""
        return coded.to(dtype)


@dataclass(frozen=True)
class BFloat16(_Cast):
    """Values and gradients cross in bfloat16: half of the bytes of float32, with its range."""

    to = torch.bfloat16


@dataclass(frozen=True)
class Float16(_Cast):
    """Values and gradients cross in float16: half of the bytes of float32.

    What is above 65,504 becomes infinite, so it goes with scaled losses (`LossScale`) or with
    gradients of a known size.
    """

    to = torch.float16
