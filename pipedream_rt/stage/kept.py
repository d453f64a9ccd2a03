"""Versions of weights and buffers that are kept for as long as the script wants to read them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from pipedream_rt.errors import ConfigError


class KeptVersions:
    """The kept versions of one stage: copies, which training does not change.

    Args:
        module: The module of the stage.
    """

    def __init__(self, module: nn.Module) -> None:
        """Keep nothing yet."""
        self._module = module
        self._versions: dict[int, dict[int, Tensor]] = {}

    @torch.no_grad()
    def keep(self, number: int, tensors: Iterable[Tensor], values: Mapping[int, Tensor]) -> None:
        """Copy weights and buffers.

        Args:
            number: Number of the version.
            tensors: The weights and buffers.
            values: What to copy in the place of some of them, by ``id``.
        """
        self._versions[number] = copies = {}
        for tensor in tensors:
            copy = torch.empty_like(tensor).copy_(values.get(id(tensor), tensor))
            made = Tensor._make_subclass(type(tensor), copy, False)
            vars(made).update(vars(tensor))
            copies[id(tensor)] = made

    def drop(self, number: int) -> None:
        """Forget a version."""
        self._versions.pop(number, None)

    def copies(self, number: int) -> Mapping[int, Tensor]:
        """Return the copies of a version, by ``id`` of the weight or the buffer.

        Raises:
            ConfigError: It is not kept.
        """
        if number and number not in self._versions:
            raise ConfigError(
                f"version {number} is not kept; the versions kept are {[*self._versions]}"
            )
        return self._versions.get(number, {})

    @contextmanager
    def read(self, number: int) -> Iterator[None]:
        """Let the module have the weights and buffers of a version while the body runs.

        Args:
            number: Number of the version; 0 for the newest weights.
        """
        copies = self.copies(number)
        before = [
            (slots, name, tensor)
            for owner in (self._module.modules() if copies else ())
            for slots in (owner._parameters, owner._buffers)
            for name, tensor in slots.items()
            if tensor is not None and id(tensor) in copies
        ]
        try:
            for slots, name, tensor in before:
                slots[name] = copies[id(tensor)]  # type: ignore[assignment]  # in a Parameter's place
            yield
        finally:
            for slots, name, tensor in before:
                slots[name] = tensor  # type: ignore[assignment]
