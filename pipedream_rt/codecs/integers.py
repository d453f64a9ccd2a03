"""Integers of eight bits, with a scale for each row or channel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from pipedream_rt.errors import ConfigError
from pipedream_rt.stage.codec import ByteCodec, Direction, require_direction, require_flag

_MOST = 127


@dataclass(frozen=True)
class Int8(ByteCodec):
    """Eight bits an element: the nearest of 255 values, evenly spaced from -max to max.

    ``q = round(x / s)``, with ``s = max |x| / 127`` in float32 over each row, or each channel.

    Attributes:
        by: ``"row"``: a scale for each vector along the last dimension, as of each token.
            ``"channel"``: one for each place in the last dimension.
        direction: Which way it is for, see `Codec`.
        feedback: See `ByteCodec`.
    """

    by: Literal["row", "channel"] = "row"
    direction: Direction = "both"
    feedback: bool = False

    def __post_init__(self) -> None:
        require_direction(self.direction)
        require_flag("feedback", self.feedback)
        if self.by not in ("row", "channel"):
            raise ConfigError(f'Int8 scales by "row" or "channel", not by {self.by!r}')

    def takes(self, tensor: Tensor) -> bool:
        """Take floating-point tensors with elements."""
        return super().takes(tensor) and tensor.numel() > 0

    def pack(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """Return the integers and the scales; a scale that is not finite marks its row so."""
        rows = tensor.reshape(-1, tensor.shape[-1]).float()
        # Two passes take a tenth of the time of a norm. abs and amax hand NaN on.
        largest = rows.abs().amax(dim=1 if self.by == "row" else 0, keepdim=True)
        scale = largest / _MOST
        # A row of zeros has the scale 0: divide by 1, or it becomes NaN. Where a row is not finite,
        # its scale is not finite either, and `unpack` ignores the integers.
        whole = rows / torch.where(scale > 0, scale, 1.0)
        # Clamp: near the smallest denormals the scale is so inexact that x / s exceeds 127.
        return whole.round_().clamp_(-_MOST, _MOST).to(torch.int8), scale

    def unpack(self, parts: Sequence[Tensor], shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Return the integers times their scales; NaN where a scale is not finite."""
        whole, scale = parts
        finite = torch.where(torch.isfinite(scale), scale, torch.nan)
        return torch.mul(whole, finite).to(dtype).reshape(shape)
