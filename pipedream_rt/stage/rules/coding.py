"""Coding: tensors leave a stage packed by the codec of their edge, and what that loses is fed back.

What packing has lost of a tensor, its residual, is added to the next one of the same edge. Values
are packed in the order of the forwards and gradients in that of the backwards, which the plan says,
so residuals do not depend on timing. A checkpoint of step t has them as they were between
mini-batch t-1 and mini-batch t; since a stage may have done micro-batches of later ones by the time
that the update is done, those of the mini-batches that have begun since are kept meanwhile.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pipedream_rt.codecs.base import ByteCodec, require_parts, require_same
from pipedream_rt.messages.keys import CODECS, Key, StepState
from pipedream_rt.messages.wire import dtype_of, name_of_dtype
from pipedream_rt.schedules import EdgeKind
from pipedream_rt.schedules.edges import Edge
from pipedream_rt.stage.rules.base import Context, MicroBatchRule, RuleOption, Update
from pipedream_rt.stage.values import Gifts

Residuals = dict[tuple[Edge, int], Tensor]
"""What packing has lost, by edge and the number of the tensor on it."""

_ONE_WAY = {EdgeKind.ACTIVATION: "forward", EdgeKind.GRADIENT: "backward"}


@dataclass(frozen=True)
class EdgeCodecs(RuleOption):
    """The codecs that pack what crosses edges.

    Attributes:
        by_edge: The codecs, by the stages at both ends of an edge, in the order of the model.
    """

    by_edge: Mapping[tuple[int, int], ByteCodec]

    def rule(self, context: Context) -> Coding:
        """Return the rule of a stage."""
        return Coding(self.by_edge, context)

    def things(self) -> Sequence[object]:
        """Return the codecs."""
        return tuple(dict.fromkeys(self.by_edge.values()))


class Coding(MicroBatchRule):
    """The coding of one stage, or of a replica of it.

    Args:
        by_edge: The codecs, by the stages at both ends of an edge.
        context: What it knows of the stage.
    """

    def __init__(self, by_edge: Mapping[tuple[int, int], ByteCodec], context: Context) -> None:
        """Begin without residuals."""
        self._plan, self._address, self._by_edge = context.plan, context.address, by_edge
        self._codecs: dict[Edge, ByteCodec | None] = {}
        self._ways = {kind: _Way() for kind in _ONE_WAY}
        self._counts = {kind: [0, 0, 0] for kind in _ONE_WAY}
        self._version = 0
        stage = context.stage
        ends = [edge for edge in by_edge if stage in edge]
        self.names = tuple(self._cut(*edge) for edge in ends)

    def _cut(self, begin: int, end: int) -> str:
        """Return the name of an edge, which another split does not have elsewhere."""
        layers = self._plan.layers
        return f"{layers[begin][-1]} -> {layers[end][0]}"

    def _ends(self, edge: Edge) -> tuple[int, int]:
        """Return the stages at both ends of an edge, in the order of the model."""
        source, target = self._plan.stage_of(edge.source), self._plan.stage_of(edge.target)
        return (source, target) if edge.kind is EdgeKind.ACTIVATION else (target, source)

    def _codec_of(self, edge: Edge) -> ByteCodec | None:
        """Return the codec of an edge; None for none in its direction."""
        if edge not in self._codecs:
            codec = self._by_edge.get(self._ends(edge))
            fits = codec is not None and codec.direction in ("both", _ONE_WAY[edge.kind])
            self._codecs[edge] = codec if fits else None
        return self._codecs[edge]

    # -- what leaves and what comes -------------------------------------------------------------

    @torch.no_grad()
    def packed(
        self, edge: Edge, micro_batch: int, tensors: tuple[Tensor, ...], wanted: Sequence[bool]
    ) -> tuple[tuple[Tensor, ...], list[Any]]:
        """Pack the tensors of a micro-batch that is trained on.

        Args:
            edge: The edge.
            micro_batch: Number of the micro-batch.
            tensors: Its values, or its gradients.
            wanted: Which of them ask for a gradient, or are one.

        Returns:
            What crosses, and for `unpacked` what was packed; empty if nothing was.

        Raises:
            ConfigError: The codec gives no tensors, or others than it must.
        """
        codec = self._codec_of(edge)
        if codec is None:
            return tensors, []
        self._ways[edge.kind].enter(micro_batch // self._plan.per_update)
        sent: list[Tensor] = []
        coded: list[Any] = []
        for number, (tensor, asks) in enumerate(zip(tensors, wanted, strict=True)):
            if asks and codec.takes(tensor):
                parts = self._pack(codec, edge, number, tensor)
                coded.append([len(parts), name_of_dtype(tensor.dtype), list(tensor.shape)])
                sent.extend(parts)
            else:
                coded.append([])
                sent.append(tensor)
        counts = self._counts[edge.kind]
        counts[0] += 1
        counts[1] += sum(tensor.nbytes for tensor in tensors)
        counts[2] += sum(tensor.nbytes for tensor in sent)
        return tuple(sent), coded if any(coded) else []

    def _pack(
        self, codec: ByteCodec, edge: Edge, number: int, tensor: Tensor
    ) -> tuple[Tensor, ...]:
        """Pack a tensor, with what is fed back to it."""
        where = str(edge)
        if not codec.feedback:
            return require_parts(codec.pack(tensor), codec, where)
        residuals = self._ways[edge.kind].residuals
        before = residuals.get((edge, number))
        if before is not None and before.shape == tensor.shape and before.dtype == tensor.dtype:
            tensor = tensor + before
        parts = require_parts(codec.pack(tensor), codec, where)
        arrives = codec.unpack(parts, tensor.shape, tensor.dtype)
        lost = tensor - require_same(arrives, tensor.shape, tensor.dtype, codec, where)
        # What is no number has spoilt its own update, and would spoil all that come.
        residuals[edge, number] = lost.nan_to_num_(0.0, 0.0, 0.0)
        return parts

    @torch.no_grad()
    def unpacked(
        self, edge: Edge, tensors: Sequence[Tensor], coded: Sequence[Any]
    ) -> tuple[Tensor, ...]:
        """Return the tensors in the place of those that `packed` was given.

        Args:
            edge: The edge.
            tensors: What has crossed.
            coded: What was packed.

        Raises:
            ConfigError: The codec gives back another shape or dtype.
        """
        codec = self._codec_of(edge)
        assert codec is not None
        left = iter(tensors)
        found = []
        for each in coded:
            if not each:
                found.append(next(left))
                continue
            count, dtype, shape = each[0], dtype_of(each[1]), torch.Size(each[2])
            parts = [next(left) for _ in range(count)]
            arrives = codec.unpack(parts, shape, dtype)
            found.append(require_same(arrives, shape, dtype, codec, str(edge)))
        return tuple(found)

    # -- what is kept ---------------------------------------------------------------------------

    def after(self, update: Update, optimizer: torch.optim.Optimizer | None) -> Gifts:
        """Forget the residuals of before the mini-batches whose updates are done."""
        self._version = update.number + 1
        for way in self._ways.values():
            way.forget_before(self._version)
        return {}

    def state(self) -> StepState:
        """Return the residuals behind the mini-batch whose update has made the newest version."""
        return {
            self._key(edge, number): tensor
            for way in self._ways.values()
            for (edge, number), tensor in way.at(self._version).items()
        }

    def _key(self, edge: Edge, number: int) -> Key:
        name = self._cut(*self._ends(edge))
        return Key(CODECS, name, (edge.kind.value, edge.source, edge.target, number))

    def load_state(self, state: Mapping[Key, Any], step: int) -> None:
        """Go on with the residuals of the edges that are there, and that this stage sends on."""
        self._version = step
        for kind, way in self._ways.items():
            way.begin(step)
            for key, tensor in state.items():
                match key:
                    case Key(part=part, name=name, path=(word, source, target, int(number))) if (
                        part == CODECS and word == kind.value and name in self.names
                    ):
                        edge = Edge(kind, int(source), int(target))
                        if self._is_own(edge, name):
                            way.residuals[edge, number] = tensor

    def _is_own(self, edge: Edge, name: str) -> bool:
        """Whether this stage sends on an edge of a checkpoint, which may be of another split."""
        plan = self._plan
        there = all(end in plan.addresses for end in (edge.source, edge.target))
        return there and edge.source == self._address and self._cut(*self._ends(edge)) == name

    def statistics(self) -> dict[str, int]:
        """Return how many micro-batches were packed, and their bytes before and behind."""
        return {
            f"{kind.value}s_{what}": count
            for kind, counts in self._counts.items()
            for what, count in zip(("packed", "bytes", "packed_bytes"), counts, strict=True)
        }


class _Way:
    """The residuals of one direction, now and as they were before mini-batches that have begun.

    A residual is never changed, only replaced, so an earlier state is a dictionary.

    Attributes:
        residuals: Those of now.
    """

    def __init__(self) -> None:
        """Begin without any."""
        self.residuals: Residuals = {}
        self._before: dict[int, Residuals] = {}
        self._entered = -1

    def begin(self, mini_batch: int) -> None:
        """Begin with a mini-batch, of which no micro-batch is packed yet, without residuals."""
        self.residuals, self._before, self._entered = {}, {}, mini_batch - 1

    def enter(self, mini_batch: int) -> None:
        """Note that a micro-batch of a mini-batch will be packed."""
        if mini_batch > self._entered:
            # A replica may have no micro-batch of those between.
            for each in range(self._entered + 1, mini_batch + 1):
                self._before[each] = dict(self.residuals)
            self._entered = mini_batch

    def at(self, mini_batch: int) -> Residuals:
        """Return the residuals as they were before a mini-batch, or as they are."""
        return self._before.get(mini_batch, self.residuals)

    def forget_before(self, mini_batch: int) -> None:
        """Forget what was before earlier mini-batches."""
        for each in [old for old in self._before if old < mini_batch]:
            del self._before[each]
