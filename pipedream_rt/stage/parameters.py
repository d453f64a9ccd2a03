"""The weight versions of one stage as tensors.

The problem: the forward of a micro-batch reads version v, updates then make v+1, v+2, ..., and
its backward must compute with v. Autograd saves some weights and looks others up again, so two
ways that look right are silently wrong: pointing ``param.data`` at another version (LayerNorm,
Conv and ``x * w`` then use the new weights in backward), and ``functional_call`` in forward alone
(a checkpoint inside the module recomputes with the module's own weights).

The way here: a version is a set of buffers, each with a *leaf* tensor over it. Forward and
backward of a micro-batch both run while ``module._parameters`` points at the leaves of its
version. The module's own Parameters stay what optimizer, schedulers and ``state_dict`` know; their
``data`` is the newest version. An update copies the newest version to a recycled set of buffers
and steps there, or steps in place where nobody reads it::

    version   1        2        3 (newest)        free
    buffers   [A]      [B]      [C]               [D]
    leaves    a        b        c                 d
              F4..B4   F5..B5   Parameter.data
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pipedream_rt.errors import ConfigError, VersionError
from pipedream_rt.schedules import VersionLedger


@dataclass(frozen=True, slots=True)
class _Version:
    """Storage of one version: raw buffers, and the autograd leaves that share it."""

    buffers: list[Tensor]
    leaves: list[Tensor]


def _version_over(buffers: list[Tensor]) -> _Version:
    """Make leaves over buffers.

    From the raw buffers, not from the Parameters: a detached Parameter shares its version counter
    and raises false alarms after the next update. Leaves share the counter of their buffer, so
    that recycling a buffer under a graph that still needs it is an autograd error, not a wrong
    gradient.
    """
    return _Version(buffers, [b.detach().requires_grad_() for b in buffers])


class VersionedParameters:
    """The parameters of a stage in all the versions that micro-batches in flight read.

    Owned by the compute thread of the stage.

    Args:
        module: The stage. Its Parameters stay its own; frozen ones are not versioned.
        stage: Index for messages.

    Attributes:
        ledger: Who reads which version.
        allocated: Sets of buffers ever made, the module's own included.
    """

    def __init__(self, module: nn.Module, stage: int) -> None:
        """Take the module's weights as version 0."""
        self._stage = stage
        named = {n: p for n, p in module.named_parameters() if p.requires_grad}
        self._names = list(named)
        self._parameters = list(named.values())
        number = {id(p): i for i, p in enumerate(self._parameters)}
        self._slots = [
            (owner._parameters, name, number[id(p)])
            for owner in module.modules()
            for name, p in owner._parameters.items()
            if p is not None and id(p) in number
        ]
        self.ledger = VersionLedger(stage)
        self._versions = {0: _version_over([p.data for p in self._parameters])}
        self._free: list[_Version] = []
        self._gradients: list[Tensor | None] = [None] * len(self._parameters)
        self.allocated = 1

    @property
    def nbytes(self) -> int:
        """Bytes of one version."""
        return sum(p.nbytes for p in self._parameters)

    @property
    def named(self) -> dict[str, nn.Parameter]:
        """The module's own trainable Parameters by name."""
        return dict(zip(self._names, self._parameters, strict=True))

    def leaves(self, micro_batch: int) -> list[Tensor]:
        """The trainable weights in the version that a micro-batch reads, as autograd leaves.

        Raises:
            VersionError: The micro-batch is not pinned.
        """
        return self._versions[self.ledger.pinned(micro_batch)].leaves

    @contextmanager
    def reading(self, micro_batch: int) -> Iterator[None]:
        """Run the body with the module's weights being the version that a micro-batch reads.

        Raises:
            VersionError: The micro-batch is not pinned.
        """
        leaves = self.leaves(micro_batch)
        for slots, name, i in self._slots:
            slots[name] = leaves[i]  # type: ignore[assignment]  # a leaf in a Parameter's place
        try:
            yield
        finally:
            for slots, name, i in self._slots:
                slots[name] = self._parameters[i]

    @contextmanager
    def accumulating(self, micro_batch: int) -> Iterator[None]:
        """As `reading`, and what backward finds is added to the gradients of the pending update.

        The sum so far is put into ``leaf.grad`` first, so that autograd itself adds, in the order
        and with the roundings of plain gradient accumulation.

        Raises:
            ConfigError: A gradient went to a Parameter past its module.
        """
        leaves = self.leaves(micro_batch)
        for leaf, gradient in zip(leaves, self._gradients, strict=True):
            leaf.grad = gradient
        with self.reading(micro_batch):
            yield
        for i, leaf in enumerate(leaves):
            self._gradients[i] = leaf.grad
            leaf.grad = None
        for name, parameter in zip(self._names, self._parameters, strict=True):
            if parameter.grad is not None:
                raise ConfigError(
                    f"stage {self._stage}: the forward used the parameter {name!r} through a "
                    "reference kept elsewhere, not as an attribute of its module, so its weight "
                    "versions cannot be kept apart; read it as self.<name> in forward"
                )

    def step(self, next_read: int, update: Callable[[], None]) -> None:
        """Apply the gradients: make the next version.

        Args:
            next_read: Version that the next forward will read.
            update: Changes the module's Parameters in place, by their ``grad``.

        Raises:
            VersionError: The bookkeeping is broken.
        """
        ledger = self.ledger
        newest = self._versions[ledger.newest]
        dropped, in_place = ledger.update(next_read)
        self._recycle(dropped)
        if in_place:
            del self._versions[ledger.newest - 1]
            target = newest
        else:
            target = self._take_free(newest)
            for parameter, new, old in zip(
                self._parameters, target.buffers, newest.buffers, strict=True
            ):
                new.copy_(old)
                parameter.data = new
        self._versions[ledger.newest] = target
        if self._versions.keys() != ledger.kept:
            raise VersionError(
                f"stage {self._stage}: holds versions {sorted(self._versions)}, "
                f"the ledger says {sorted(ledger.kept)}"
            )
        for i, parameter in enumerate(self._parameters):
            parameter.grad, self._gradients[i] = self._gradients[i], None
        update()
        for parameter in self._parameters:
            parameter.grad = None

    def begin(self, micro_batch: int, version: int) -> None:
        """Let a micro-batch read a version until the ledger unpins it; recycle older versions.

        Args:
            micro_batch: Its number.
            version: What the plan says that it reads.

        Raises:
            VersionError: The version is not kept, or the micro-batch is in flight already.
        """
        self._recycle(self.ledger.read(micro_batch, version))

    def reset(self, load: Callable[[], None]) -> None:
        """Replace the weights: one version is left, which every later forward reads at least.

        Args:
            load: Writes the module's Parameters in place.

        Raises:
            VersionError: A micro-batch is in flight.
        """
        self._recycle(self.ledger.reset())
        load()

    def older(self) -> dict[int, dict[str, Tensor]]:
        """The versions kept before the newest, by name; to be copied, not kept."""
        return {
            version: dict(zip(self._names, kept.buffers, strict=True))
            for version, kept in self._versions.items()
            if version != self.ledger.newest
        }

    def restore(
        self, newest: int, older: dict[int, dict[str, Tensor]], load: Callable[[], None]
    ) -> None:
        """Go on from a checkpoint.

        Args:
            newest: Number of the version that ``load`` writes.
            older: Versions before it, of every trainable parameter.
            load: Writes the module's Parameters in place.

        Raises:
            VersionError: A micro-batch is in flight.
        """
        current = self.ledger.newest
        self._recycle(self.ledger.reset())
        load()
        whole = self._versions.pop(current)
        self.ledger.restore(newest, older)
        self._versions[newest] = whole
        for version, named in older.items():
            self._versions[version] = kept = self._take_free(whole)
            for name, buffer in zip(self._names, kept.buffers, strict=True):
                buffer.copy_(named[name])

    def _recycle(self, versions: list[int]) -> None:
        """Keep the buffers of dropped versions for later ones."""
        self._free.extend(self._versions.pop(version) for version in versions)

    def _take_free(self, like: _Version) -> _Version:
        """A recycled set of buffers, or a new one while the pipe fills for the first time."""
        if self._free:
            return self._free.pop()
        self.allocated += 1
        return _version_over([torch.empty_like(b) for b in like.buffers])
