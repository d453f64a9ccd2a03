"""Marks of values in a mini-batch, which say how each is cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pipedream_rt.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Whole:
    """Marks a value of a mini-batch that goes to every micro-batch as it is.

    The model, the loss and ``weigh`` get the value itself.

    Attributes:
        value: The value: a tensor, a plain value, or a container of these.
    """

    value: Any


@dataclass(frozen=True, slots=True)
class Along:
    """Marks a value of a mini-batch that is cut along another dimension than its first, or a list.

    The model, the loss and ``weigh`` get parts of the value itself. The first value of the inputs
    that is not `Whole` says how many samples there are.

    Attributes:
        value: A tensor; or a list or a tuple, which is cut between its entries.
        dim: The dimension of the tensor that counts samples.

    Raises:
        ConfigError: The value has no such dimension.
    """

    value: Any
    dim: int = 0

    def __post_init__(self) -> None:
        value, dims = self.value, self.value.dim() if isinstance(self.value, Tensor) else 1
        if not isinstance(value, Tensor | list | tuple) or not -dims <= self.dim < dims:
            raise ConfigError(
                f"Along marks a tensor with the dimension {self.dim}, or a list or a tuple with "
                f"dim=0; it was given a {type(value).__name__}"
                + (f" of shape {tuple(value.shape)}" if isinstance(value, Tensor) else "")
            )

    @property
    def samples(self) -> int:
        """The number of samples."""
        value = self.value
        return value.size(self.dim) if isinstance(value, Tensor) else len(value)

    def parts(self, sizes: Sequence[int]) -> Sequence[Any]:
        """Return one part for each number of samples."""
        if isinstance(self.value, Tensor):
            return torch.split(self.value, list(sizes), self.dim)
        ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
        return [self.value[end - size : end] for size, end in zip(sizes, ends, strict=True)]
