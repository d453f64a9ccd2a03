"""Versions of weights and buffers that are kept for as long as the script wants to read them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from pipedream_rt.errors import ConfigError
from pipedream_rt.models.tensors import in_place_of, named_tensors


class KeptVersions:
    """The kept versions of one stage by number: copies, which nothing changes."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._versions: dict[int, dict[str, Tensor]] = {}

    @torch.no_grad()
    def keep(self, number: int, values: Mapping[int, Tensor]) -> None:
        """Copy all weights and buffers, or what `values` has for them by ``id``."""
        made: dict[int, Tensor] = {}
        copies = self._versions[number] = {}
        # By name, since a forward may put another buffer into the place of one.
        for name, tensor in named_tensors(self._module):
            if id(tensor) not in made:
                copy = torch.empty_like(tensor).copy_(values.get(id(tensor), tensor))
                made[id(tensor)] = in_place_of(tensor, copy, False)
            copies[name] = made[id(tensor)]

    def drop(self, number: int) -> None:
        self._versions.pop(number, None)

    def copies(self, number: int) -> Mapping[str, Tensor]:
        """Return the copies of a version, by name; none for number 0."""
        if number and number not in self._versions:
            there = ", ".join(map(str, self._versions))
            raise ConfigError(f"version {number} is not kept; those kept are {there or 'none'}")
        return self._versions.get(number, {})

    @contextmanager
    def read(self, number: int) -> Iterator[None]:
        """Put a kept version into the module while the body runs; number 0 changes nothing."""
        before = []
        for name, copy in self.copies(number).items():
            path, _, short = name.rpartition(".")
            owner = self._module.get_submodule(path)
            slots = owner._parameters if short in owner._parameters else owner._buffers
            before.append((slots, short, slots.get(short)))
            slots[short] = copy  # type: ignore[assignment]  # in the place of a Parameter
        try:
            yield
        finally:
            for slots, short, tensor in before:
                slots[short] = tensor  # type: ignore[assignment]
