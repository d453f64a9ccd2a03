"""The places at which a model can be cut, and sums of costs up to each of them.

A cut parts the layers into those before it and those behind it, so that no layer before it needs
one behind it. The layers before a cut are an *ideal* of the graph. A chain of n layers has n cuts;
the first is behind the first layer, the last behind the last one. A graph with branches has more,
because layers of two branches can be on different sides in any combination; only some pairs of its
cuts include one another. A stage lies between two cuts of which one includes the other.

Source: the states of the antichain graph in Narayanan et al., PipeDream (SOSP 2019), released code.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from pipedream_rt.errors import ConfigError
from pipedream_rt.planning.profile import Profile

Floats: TypeAlias = NDArray[np.float64]
Mask: TypeAlias = NDArray[np.bool_]

MOST_CUTS = 2000
"""Cuts that a model may have: time and memory to plan grow with their square."""


@dataclass(frozen=True)
class Cuts:
    """The cuts of a profile, each after those that it includes.

    Attributes:
        ideals: For each cut the layers before it, as bits: layer i is bit i.
    """

    profile: Profile
    ideals: tuple[int, ...]
    _bits: Mask = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Unpack the bits, one row for each cut."""
        count = len(self.profile.layers)
        size = -(-count // 8)
        packed = np.frombuffer(
            b"".join(ideal.to_bytes(size, "little") for ideal in self.ideals), np.uint8
        )
        bits = np.unpackbits(packed.reshape(-1, size), axis=1, bitorder="little")[:, :count]
        object.__setattr__(self, "_bits", bits.astype(bool))

    def __len__(self) -> int:
        """Return the number of cuts, the last of which is behind all layers."""
        return len(self.ideals)

    def sums(self, name: str) -> Floats:
        """Return, for each cut, the sum of an attribute of `LayerCosts` over the layers before."""
        costs = np.array([getattr(layer, name) for layer in self.profile.layers], np.float64)
        found: Floats = np.where(self._bits, costs, 0.0).sum(axis=1)
        return found

    @cached_property
    def includes(self) -> Mask:
        """Element (i, j): whether cut j includes cut i, and is another one."""
        # float32: a BLAS product is fast, and sums of so few ones are exact.
        bits = self._bits.astype(np.float32)
        sizes = self._bits.sum(axis=1)
        inside = (bits @ bits.T) == sizes[:, None]
        found: Mask = inside & (sizes[:, None] < sizes[None, :])
        return found

    @cached_property
    def passing(self) -> Floats:
        """For each cut, the bytes of the outputs that layers behind it need."""
        edges = self.profile.edges or ()
        if self.profile.edge_bytes:
            sizes = np.array(self.profile.edge_bytes, np.float64)
            producers, consumers = np.array(edges, np.int64).T
            cut = self._bits[:, producers] & ~self._bits[:, consumers]
            summed: Floats = np.where(cut, sizes, 0.0).sum(axis=1)
            return summed
        outputs = np.array([layer.output_bytes for layer in self.profile.layers], np.float64)
        # Without sizes of edges, an output passes once, however many layers behind the cut use it.
        passed = np.zeros_like(self._bits)
        for producer, consumer in edges:
            passed[:, producer] |= self._bits[:, producer] & ~self._bits[:, consumer]
        found: Floats = np.where(passed, outputs, 0.0).sum(axis=1)
        return found

    def layers_between(self, start: int, end: int) -> tuple[int, ...]:
        """Return the indices of the layers of a stage; ``start`` is -1 for no cut before it."""
        return tuple(indices(self.ideals[end] & ~(self.ideals[start] if start >= 0 else 0)))


def spans(sums: Floats) -> Floats:
    """Return the sum over each span from the sums up to each cut.

    The row of a span is the cut before it plus one, 0 for the beginning of the model. Its column is
    the cut behind it.
    """
    found: Floats = sums[None, :] - np.append(0.0, sums)[:, None]
    return found


def indices(bits: int) -> Iterator[int]:
    """Yield the positions of the bits that are set, rising."""
    while bits:
        lowest = bits & -bits
        yield lowest.bit_length() - 1
        bits ^= lowest


def relations(profile: Profile) -> tuple[list[int], list[int]]:
    """Return, by layer, all layers that it depends on, and those that use its output directly."""
    count = len(profile.layers)
    before, after = [0] * count, [0] * count
    for producer, consumer in profile.edges or ():
        after[producer] |= 1 << consumer
    # Edges go forwards, so `before` of a producer is complete when its turn comes.
    for producer in range(count):
        for consumer in indices(after[producer]):
            before[consumer] |= before[producer] | 1 << producer
    return before, after


def cuts_of(profile: Profile, branches: bool | None = None) -> Cuts:
    """Return the cuts of a profile.

    Args:
        profile: The profile.
        branches: Whether branches may be cut at different places. If not, layers stay in the order
            of the profile. None for yes, if that makes no more than `MOST_CUTS` cuts.

    Raises:
        ConfigError: The branches make more cuts than that.
    """
    count = len(profile.layers)
    in_order = Cuts(profile, tuple((1 << i + 1) - 1 for i in range(count)))
    if profile.is_chain or branches is False:
        return in_order
    ideals = _ideals(profile)
    if ideals is None:
        if branches:
            raise ConfigError(
                f"the branches of this model can be cut in more than {MOST_CUTS} ways; plan with "
                "the layers in the order of the profile (--order layers)"
            )
        return in_order
    return Cuts(profile, tuple(ideals))


def _ideals(profile: Profile) -> Sequence[int] | None:
    """Return the ideals that are reached from the first layer; None if there are too many."""
    # A step from one ideal to the next adds a layer that uses an output of it, with all layers that
    # this one depends on.
    before, after = relations(profile)
    start = 1  # the bits of the first layer alone
    found = {start}
    queue = [start]
    for ideal in queue:
        users = 0
        for layer in indices(ideal):
            users |= after[layer]
        for layer in indices(users & ~ideal):
            grown = ideal | before[layer] | 1 << layer
            if grown not in found:
                if len(found) == MOST_CUTS:
                    return None
                found.add(grown)
                queue.append(grown)
    whole = (1 << len(before)) - 1
    if whole not in found:  # some layer is not reached from the first one
        return None
    return sorted(found, key=lambda ideal: (ideal.bit_count(), ideal))
