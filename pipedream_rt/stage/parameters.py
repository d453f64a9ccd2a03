"""The weight versions of one stage as tensors.

The problem: the forward of a micro-batch reads version v, updates then make v+1, v+2, ..., and
the backward must compute with v. Autograd saves some weights and looks others up again, so two
ways that look right are silently wrong: pointing ``param.data`` at another version (LayerNorm,
Conv and ``x * w`` then use the new weights in backward), and ``functional_call`` in forward alone
(a checkpoint inside the module recomputes with the module's own weights).

The solution: a version is a set of buffers, each with a *leaf* tensor over it. Forward and
backward of a micro-batch both run while ``module._parameters`` points at the leaves of its
version. The optimizer, schedulers and ``state_dict`` know the module's own Parameters, whose
``data`` is the newest version. An update copies the newest version to a recycled set of buffers
and steps there; if no micro-batch in flight reads the newest version, it steps in place::

    version   1        2        3 (newest)        free
    buffers   [A]      [B]      [C]               [D]
    leaves    a        b        c                 d
              F4..B4   F5..B5   Parameter.data

A correction for staleness may let micro-batches read a *view* of a version in its place: weights
that it has made of the version, in another set of buffers with their own leaves.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from pipedream_rt.errors import ConfigError, VersionError
from pipedream_rt.models.recurrent import allow_flattening, forbid_flattening, recurrent_layers
from pipedream_rt.models.tensors import in_place_of
from pipedream_rt.schedules import VersionLedger
from pipedream_rt.torch_private import copy_all

Adjust: TypeAlias = Callable[[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]], None]
"""Changes gradients in place, given the weights they were computed on and the newest; by name."""


class GradientHook(NamedTuple):
    """A hook that the user has registered on a parameter."""

    parameter: str  # its name
    after_sum: bool  # by register_post_accumulate_grad_hook, else by register_hook
    call: Callable[[Tensor], Any]


@dataclass(frozen=True, slots=True)
class _Version:
    """The storage of one version, or of a view of one.

    Attributes:
        buffers: The raw tensors, one for each trainable parameter.
        leaves: The autograd leaves over them.
        views: By staleness in updates, what micro-batches read in the place of the version.
    """

    buffers: list[Tensor]
    leaves: list[Tensor]
    views: dict[int, _Version] = field(default_factory=dict)


class VersionedParameters:
    """The parameters of a stage in all the versions that micro-batches in flight read.

    The thread that runs the stage owns them.

    Attributes:
        allocated: Number of sets of buffers that were allocated, including the module's own.
        has_views: Whether corrections make views of every version that a step makes.
        loaded: The newest version that was loaded without views, not made by a step.
    """

    def __init__(
        self,
        module: nn.Module,
        stage: int,
        hooks: Sequence[GradientHook] = (),
        names: Mapping[str, str] | None = None,
    ) -> None:
        self._stage = stage
        self._hooks = hooks
        # Frozen parameters have no versions. `names` maps those in the module to the unsplit model.
        trainable = {n: p for n, p in module.named_parameters() if p.requires_grad}
        if names is None:
            names = {name: name for name in trainable}
        named = {names[n]: p for n, p in trainable.items() if n in names}
        self._names = list(named)
        self._parameters = list(named.values())
        number = {id(p): i for i, p in enumerate(self._parameters)}
        self._slots = [
            (owner._parameters, name, number[id(p)])
            for owner in module.modules()
            for name, p in owner._parameters.items()
            if p is not None and id(p) in number
        ]
        self._recurrent = recurrent_layers(module)
        self.ledger = VersionLedger(stage)
        self._versions = {0: self._version_over([p.data for p in self._parameters])}
        self._free: list[_Version] = []
        self._gradients: list[Tensor | None] = [None] * len(self._parameters)
        # By micro-batch in flight, what it reads: a version, or a view of it.
        self._reading: dict[int, _Version] = {}
        self.allocated = 1
        self.has_views, self.loaded = False, 0

    def _version_over(self, buffers: list[Tensor]) -> _Version:
        """Return a version with new leaves over the given buffers."""
        # Over the raw buffers, since a detached Parameter shares the autograd version counter of
        # the Parameter: after the next update autograd would raise an error though nothing is
        # wrong. A leaf shares the counter of its buffer, so that a buffer which is recycled under a
        # graph that still needs it is an error of autograd, and not a wrong gradient.
        leaves = [in_place_of(p, b, True) for p, b in zip(self._parameters, buffers, strict=True)]
        by_name = dict(zip(self._names, leaves, strict=True))
        for hook in self._hooks:
            leaf = by_name[hook.parameter]
            if hook.after_sum:
                leaf.register_post_accumulate_grad_hook(hook.call)
            else:
                leaf.register_hook(hook.call)
        return _Version(buffers, leaves)

    @property
    def nbytes(self) -> int:
        """The size of one version in bytes."""
        return sum(p.nbytes for p in self._parameters)

    @property
    def named(self) -> dict[str, nn.Parameter]:
        """The module's own trainable Parameters, by name in the unsplit model."""
        return dict(zip(self._names, self._parameters, strict=True))

    def leaves(self, micro_batch: int) -> list[Tensor]:
        """Return the trainable weights that a micro-batch reads, as autograd leaves."""
        return self._read_by(micro_batch).leaves

    def _read_by(self, micro_batch: int) -> _Version:
        """Return the version, or view of it, that a micro-batch in flight reads."""
        read = self._reading.get(micro_batch)
        return self._versions[self.ledger.pinned(micro_batch)] if read is None else read

    def reading(self, micro_batch: int) -> AbstractContextManager[None]:
        """Put the weights that a micro-batch reads into the module while the body runs."""
        return _Reading(self, self.leaves(micro_batch))

    def copies(self, micro_batch: int, names: Collection[str] | None) -> list[Tensor | None]:
        """Copy the weights that a micro-batch reads; None for those that `names` leaves out."""
        buffers = self._read_by(micro_batch).buffers
        named = zip(self._names, buffers, strict=True)
        return [b.clone() if names is None or name in names else None for name, b in named]

    def require_unchanged(self, micro_batch: int, before: Sequence[Tensor | None]) -> None:
        """Refuse a forward that has changed weights, but for those whose copy is None."""
        version = self._read_by(micro_batch)
        for i, (leaf, buffer) in enumerate(zip(version.leaves, version.buffers, strict=True)):
            moved = leaf.data_ptr() != buffer.data_ptr()
            then = before[i]
            if moved or (then is not None and not same(buffer, then)):
                raise ConfigError(
                    f"stage {self._stage}: the forward changed the parameter {self._names[i]!r} "
                    + ("by assigning its .data" if moved else "in place")
                    + ". Micro-batches in flight read several versions of it, or replicas or other "
                    "stages have copies, so this would hold for some of them alone; use a schedule "
                    "that flushes, without replicas, on a weight that one stage alone uses, and "
                    "change it in place, keep such values in a buffer, or change parameters by the "
                    "optimizer alone"
                )

    @contextmanager
    def accumulating(self, micro_batch: int, adjust: Adjust | None = None) -> Iterator[None]:
        """Run the body as `reading` does, and add its gradients to those of the pending update."""
        leaves = self.leaves(micro_batch)
        # Autograd itself adds to the sum so far, in the order and with the rounding of plain
        # gradient accumulation. A rule adjusts the gradients of this micro-batch alone, so then the
        # sum is added afterwards.
        for leaf, gradient in zip(leaves, self._gradients, strict=True):
            leaf.grad = None if adjust else gradient
        with self.reading(micro_batch):
            yield
        if adjust is not None:
            self._add_adjusted(micro_batch, adjust)
        for i, leaf in enumerate(leaves):
            self._gradients[i] = leaf.grad
            leaf.grad = None
        for name, parameter in zip(self._names, self._parameters, strict=True):
            # The forward has not read the leaf, which would have the gradient.
            if parameter.grad is not None:
                raise ConfigError(
                    f"stage {self._stage}: the forward used the parameter {name!r} through a "
                    "reference kept elsewhere, not as an attribute of its module, so its weight "
                    "versions cannot be kept apart; read it as self.<name> in forward"
                )

    @torch.no_grad()
    def _add_adjusted(self, micro_batch: int, adjust: Adjust) -> None:
        """Adjust the gradients of the leaves, then add each to the sum so far, as autograd does."""
        read, newest = self._read_by(micro_batch), self._versions[self.ledger.newest]
        named = dict(zip(self._names, read.leaves, strict=True))
        gradients = {name: leaf.grad for name, leaf in named.items() if leaf.grad is not None}
        then = dict(zip(self._names, read.buffers, strict=True))
        adjust(gradients, then, dict(zip(self._names, newest.buffers, strict=True)))
        for leaf, before in zip(read.leaves, self._gradients, strict=True):
            if before is not None:
                leaf.grad = before if leaf.grad is None else before + leaf.grad

    def leaf(self, name: str, micro_batch: int) -> Tensor:
        """Return one weight in the version that a micro-batch reads, as an autograd leaf."""
        return self.leaves(micro_batch)[self._names.index(name)]

    def add_gradient(self, name: str, gradient: Tensor) -> None:
        """Add a gradient to that of a weight in the pending update: ``gradient + sum so far``."""
        i = self._names.index(name)
        own = self._gradients[i]
        self._gradients[i] = gradient if own is None else gradient + own

    def take_gradient(self, name: str) -> Tensor | None:
        """Take the gradient of a weight out of the pending update; None if it has none."""
        i = self._names.index(name)
        gradient, self._gradients[i] = self._gradients[i], None
        return gradient

    @torch.no_grad()
    def receive(self, next_read: int, named: dict[str, Tensor]) -> None:
        """Make the next version of the weights that their owner, another stage, has sent."""
        # Without gradients: those pending belong to an update that the owner has not made yet.
        with self.making([None] * len(self._parameters), next_read):
            for name, parameter in self.named.items():
                parameter.data.copy_(named[name])

    def take_gradients(self) -> list[Tensor | None]:
        """Take all gradients out of the pending update, for `making`."""
        taken, self._gradients = self._gradients, [None] * len(self._parameters)
        return taken

    @contextmanager
    def making(self, gradients: Sequence[Tensor | None], next_read: int) -> Iterator[None]:
        """Make the next version: the body steps the Parameters in place, by `gradients`."""
        ledger = self.ledger
        newest = self._versions[ledger.newest]
        dropped, in_place = ledger.update(next_read)
        self._recycle(dropped)
        if in_place:  # nobody reads the newest version, now or later
            del self._versions[ledger.newest - 1]
            target = newest
            self._recycle_views(newest)
        else:
            target = self._take_free(newest)
            if target.buffers:
                copy_all(target.buffers, newest.buffers)
            for parameter, new in zip(self._parameters, target.buffers, strict=True):
                parameter.data = new
        self._versions[ledger.newest] = target
        if self._versions.keys() != ledger.kept:
            raise VersionError(
                f"stage {self._stage} holds the weight versions {sorted(self._versions)}, but its "
                f"ledger keeps {sorted(ledger.kept)}"
            )
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            parameter.grad = gradient
        yield
        for parameter, buffer in zip(self._parameters, target.buffers, strict=True):
            parameter.grad = None
            if parameter.data_ptr() != buffer.data_ptr():  # the optimizer has assigned .data
                with torch.no_grad():
                    buffer.copy_(parameter)
                parameter.data = buffer

    def begin(self, micro_batch: int, version: int, update: int) -> None:
        """Let a micro-batch of an update read a version until `end`; recycle older versions."""
        self._recycle(self.ledger.read(micro_batch, version))
        pinned = self.ledger.pinned(micro_batch)
        read = self._versions[pinned]
        if self.has_views and update > pinned > self.loaded:
            # Reading the version itself instead would silently use other weights.
            if update - pinned not in read.views:
                raise VersionError(
                    f"stage {self._stage}: micro-batch {micro_batch} reads weight version {pinned} "
                    f"as corrections have made it for a staleness of {update - pinned}, which is "
                    f"not kept; kept are those for {sorted(read.views) or 'none'}"
                )
            read = read.views[update - pinned]
        self._reading[micro_batch] = read

    def end(self, micro_batch: int) -> int:
        """End the flight of a micro-batch; return the version that it has read."""
        del self._reading[micro_batch]
        return self.ledger.unpin(micro_batch)

    @torch.no_grad()
    def add_view(self, staleness: int) -> dict[str, Tensor]:
        """Add a view of the newest version; return its weights, for the caller to change."""
        newest = self._versions[self.ledger.newest]
        view = self._take_free(newest)
        for buffer, parameter in zip(view.buffers, self._parameters, strict=True):
            buffer.copy_(parameter.data)
        newest.views[staleness] = view
        return dict(zip(self._names, view.buffers, strict=True))

    def views(self) -> dict[tuple[int, int], dict[str, Tensor]]:
        """Return the weights of all views by name, by version and staleness."""
        return {
            (version, staleness): dict(zip(self._names, view.buffers, strict=True))
            for version, kept in self._versions.items()
            for staleness, view in kept.views.items()
        }

    @torch.no_grad()
    def restore_views(self, views: dict[tuple[int, int], dict[str, Tensor]]) -> None:
        """Add the views of a checkpoint, of versions that are kept."""
        for (version, staleness), named in views.items():
            kept = self._versions[version]
            kept.views[staleness] = view = self._take_free(kept)
            for name, buffer in zip(self._names, view.buffers, strict=True):
                buffer.copy_(named[name])

    def reset(self, load: Callable[[], None]) -> None:
        """Let `load` replace the weights; no later forward reads a version from before."""
        self._recycle(self.ledger.reset())
        self._recycle_views(self._versions[self.ledger.newest])
        self.loaded = self.ledger.newest
        load()

    def older(self) -> dict[int, dict[str, Tensor]]:
        """Return the weights of all older versions by name; a later update recycles them."""
        return {
            version: dict(zip(self._names, kept.buffers, strict=True))
            for version, kept in self._versions.items()
            if version != self.ledger.newest
        }

    def restore(
        self, newest: int, older: dict[int, dict[str, Tensor]], load: Callable[[], None]
    ) -> None:
        """Go on from a checkpoint: `load` writes version `newest`, `older` are those before it."""
        current = self.ledger.newest
        self._recycle(self.ledger.reset())
        load()
        whole = self._versions.pop(current)
        self._recycle_views(whole)
        self.ledger.restore(newest, older)
        self._versions[newest] = whole
        for version, named in older.items():
            self._versions[version] = kept = self._take_free(whole)
            for name, buffer in zip(self._names, kept.buffers, strict=True):
                buffer.copy_(named[name])

    @torch.no_grad()
    def put_back(self, kept: Sequence[Tensor]) -> None:
        """Give the newest version the values of copies, in the order of `named`."""
        newest = self._versions[self.ledger.newest].buffers
        for parameter, buffer, copy in zip(self._parameters, newest, kept, strict=True):
            parameter.data = buffer
            buffer.copy_(copy)

    def _recycle(self, versions: list[int]) -> None:
        """Keep the buffers of dropped versions for later versions."""
        for version in versions:
            dropped = self._versions.pop(version)
            self._recycle_views(dropped)
            self._free.append(dropped)

    def _recycle_views(self, version: _Version) -> None:
        """Keep the buffers of a version's views for later versions."""
        self._free.extend(version.views.values())
        version.views.clear()

    def _take_free(self, like: _Version) -> _Version:
        """Return a recycled set of buffers; a new one if none is free, as in the first warm-up."""
        if self._free:
            return self._free.pop()
        self.allocated += 1
        return self._version_over([torch.empty_like(b) for b in like.buffers])


class _Reading(AbstractContextManager[None]):
    """The context of `VersionedParameters.reading`: leaves in the places of Parameters."""

    # A class, since contexts that are generators are slow, and two of these are entered for each
    # micro-batch.

    __slots__ = ("_leaves", "_parameters")

    def __init__(self, parameters: VersionedParameters, leaves: list[Tensor]) -> None:
        self._parameters = parameters
        self._leaves = leaves

    def __enter__(self) -> None:
        leaves = self._leaves
        for slots, name, i in self._parameters._slots:
            slots[name] = leaves[i]  # type: ignore[assignment]  # a leaf in a Parameter's place
        if self._parameters._recurrent:  # no later version reaches leaves that were moved
            forbid_flattening(self._parameters._recurrent)

    def __exit__(self, kind: object, *rest: object) -> None:
        parameters, leaves, replaced = self._parameters, self._leaves, None
        if parameters._recurrent:
            allow_flattening(parameters._recurrent)
        for slots, name, i in parameters._slots:
            if slots.get(name) is not leaves[i]:
                replaced = parameters._names[i]
            slots[name] = parameters._parameters[i]
        if replaced is not None and kind is None:  # an error of the body goes before this one
            raise ConfigError(
                f"stage {parameters._stage}: a layer put another tensor in the place of its "
                f"parameter {replaced!r} in forward or backward, which would be lost; change "
                "parameters by the optimizer alone"
            )


def same(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same values, where NaN is the same as NaN."""
    if one.shape != other.shape:
        return False
    # Not by `nan_to_num`: a layer that puts 0 into the place of NaN has changed its weights.
    return torch.equal(one, other) or bool(((one == other) | (one.isnan() & other.isnan())).all())
