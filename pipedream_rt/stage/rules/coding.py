"""Coding: tensors leave a stage packed by the codec of their edge, with error feedback.

The residual of a tensor, which packing loses, is added to the next tensor of the same edge. Values
are packed in the order of the forwards and gradients in that of the backwards, both fixed by the
plan, so residuals do not depend on timing. A checkpoint of step t has the residuals as they were
between mini-batches t-1 and t. By the time that update t-1 is done, a stage may have packed later
micro-batches, so the residuals before each mini-batch are kept until its update.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pipedream_rt.messages.state_keys import CODECS, StateKey, StepState
from pipedream_rt.messages.wire import dtype_of, name_of_dtype
from pipedream_rt.schedules import EdgeKind
from pipedream_rt.schedules.edges import Edge
from pipedream_rt.stage.codec import ByteCodec, Sizes, naming, require_parts, require_same
from pipedream_rt.stage.rules.rule import Context, MicroBatchRule, RuleOption, Update
from pipedream_rt.stage.values import Outgoing

Residuals = dict[tuple[Edge, int], Tensor]
"""The residuals, by edge and the place of the tensor in its value."""

_ONE_WAY = {EdgeKind.ACTIVATION: "forward", EdgeKind.GRADIENT: "backward"}


@dataclass(frozen=True)
class EdgeCodecs(RuleOption):
    """The codecs of edges.

    Attributes:
        by_edge: By the stages at both ends of an edge, in the order of the model, its codec.
    """

    by_edge: Mapping[tuple[int, int], ByteCodec]
    called = "codec"

    def rule(self, context: Context) -> Coding:
        return Coding(self.by_edge, context)

    def things(self) -> Sequence[object]:
        return tuple({id(codec): codec for codec in self.by_edge.values()}.values())


class Coding(MicroBatchRule):
    """The coding of one stage, or of a replica of it."""

    keeps = "run"

    def __init__(self, by_edge: Mapping[tuple[int, int], ByteCodec], context: Context) -> None:
        self._plan, self._address, self._by_edge = context.plan, context.address, by_edge
        self._codecs: dict[Edge, ByteCodec | None] = {}
        self._directions = {kind: _Direction() for kind in _ONE_WAY}
        self._sizes: dict[Edge, Sizes] = {}
        self._version = 0
        # By names of layers, since a checkpoint of another split may have some of these edges too.
        self._named = {self._cut(*edge): edge for edge in by_edge if context.stage in edge}
        self.names = tuple(self._named)

    def _cut(self, begin: int, end: int) -> str:
        """Return the name of an edge: the layers at its two ends."""
        layers = self._plan.layers
        return f"{layers[begin][-1]} -> {layers[end][0]}"

    def _ends(self, edge: Edge) -> tuple[int, int]:
        """Return the stages at the two ends of an edge, in the order of the model."""
        source, target = self._plan.stage_of(edge.source), self._plan.stage_of(edge.target)
        return (source, target) if edge.kind is EdgeKind.ACTIVATION else (target, source)

    def _codec_of(self, edge: Edge) -> ByteCodec | None:
        """Return the codec of an edge; None if it has none for this direction."""
        if edge not in self._codecs:
            codec = self._by_edge.get(self._ends(edge))
            fits = codec is not None and codec.direction in ("both", _ONE_WAY[edge.kind])
            self._codecs[edge] = codec if fits else None
        return self._codecs[edge]

    # -- what leaves and what comes -------------------------------------------------------------

    @torch.no_grad()
    def packed(
        self,
        edge: Edge,
        micro_batch: int,
        tensors: tuple[Tensor, ...],
        places: Sequence[int | None],
    ) -> tuple[tuple[Tensor, ...], list[Any]]:
        """Pack the tensors of a training micro-batch; return what crosses, and how it was packed.

        ``places`` are their places in the value, by which residuals are kept; None is not packed.
        """
        codec = self._codec_of(edge)
        if codec is None or not tensors:
            return tensors, []
        self._directions[edge.kind].enter(micro_batch // self._plan.per_update)
        sent: list[Tensor] = []
        coded: list[Any] = []
        for tensor, place in zip(tensors, places, strict=True):
            if place is not None and codec.takes(tensor):
                parts = self._pack(codec, edge, place, tensor)
                coded.append([len(parts), name_of_dtype(tensor.dtype), list(tensor.shape)])
                sent.extend(parts)
            else:
                coded.append([])
                sent.append(tensor)
        self._sizes.setdefault(edge, Sizes()).add(tensors, sent)
        return tuple(sent), coded if any(coded) else []

    def _pack(self, codec: ByteCodec, edge: Edge, place: int, tensor: Tensor) -> tuple[Tensor, ...]:
        """Pack a tensor with the residual of the one before added; keep its own residual."""
        where = str(edge)
        residuals = self._directions[edge.kind].residuals
        before = residuals.get((edge, place)) if codec.feedback else None
        if before is not None and before.shape == tensor.shape and before.dtype == tensor.dtype:
            tensor = tensor + before.to(tensor.device)  # that of a checkpoint is on the host
        with naming(codec, where):
            parts = require_parts(codec.pack(tensor), codec, where)
        if codec.feedback:
            lost = tensor - self._unpack(codec, where, parts, tensor.shape, tensor.dtype)
            # A NaN has spoilt its own update already; fed back, it would spoil all later ones.
            residuals[edge, place] = lost.nan_to_num_(0.0, 0.0, 0.0)
        return parts

    def _unpack(
        self,
        codec: ByteCodec,
        where: str,
        parts: Sequence[Tensor],
        shape: torch.Size,
        dtype: torch.dtype,
    ) -> Tensor:
        """Return a packed tensor as the receiver unpacks it."""
        with naming(codec, where):
            found = codec.unpack(parts, shape, dtype)
        # Contiguous, since layers may change it in place, and kernels round by its strides.
        return require_same(found, shape, dtype, codec, where).contiguous()

    @torch.no_grad()
    def unpacked(
        self, edge: Edge, tensors: Sequence[Tensor], coded: Sequence[Any]
    ) -> tuple[Tensor, ...]:
        """Return the tensors that `packed` was given, as the receiver has them."""
        codec = self._codec_of(edge)
        assert codec is not None
        left = iter(tensors)
        found = []
        for each in coded:
            if each:
                count, dtype, shape = each[0], dtype_of(each[1]), torch.Size(each[2])
                parts = [next(left) for _ in range(count)]
                found.append(self._unpack(codec, str(edge), parts, shape, dtype))
            else:
                found.append(next(left))
        return tuple(found)

    # -- what is kept ---------------------------------------------------------------------------

    def after(self, update: Update, optimizer: torch.optim.Optimizer | None) -> Outgoing:
        """Forget the residuals that only older checkpoints needed."""
        self._version = update.number + 1
        for direction in self._directions.values():
            direction.forget_before(self._version)
        return {}

    def state(self) -> StepState:
        """Return the residuals after the mini-batch whose update has made the newest version."""
        return {
            self._key(edge, place): tensor
            for direction in self._directions.values()
            for (edge, place), tensor in direction.at(self._version).items()
        }

    def _key(self, edge: Edge, place: int) -> StateKey:
        """Return the key of a residual, which stays the same if the model is cut elsewhere too."""
        replicas = map(self._plan.replica_of, (edge.source, edge.target))
        return StateKey(CODECS, self._cut(*self._ends(edge)), (edge.kind.value, *replicas, place))

    def load_state(self, state: Mapping[StateKey, Any], step: int) -> None:
        """Go on with the residuals of those edges on which this stage sends."""
        self._version = step
        for direction in self._directions.values():
            direction.begin(step)
        for key, tensor in state.items():
            if key.part == CODECS and key.name in self._named:
                word, source, target, place = key.path
                edge = self._edge(EdgeKind(word), key.name, int(source), int(target))
                codec = None if edge is None else self._codec_of(edge)
                if edge is not None and codec is not None and codec.feedback:
                    self._directions[edge.kind].residuals[edge, int(place)] = tensor

    def _edge(self, kind: EdgeKind, name: str, source: int, target: int) -> Edge | None:
        """Return the edge between two replicas; None unless this one sends on it."""
        ends = self._named[name]
        begin, end = ends if kind is EdgeKind.ACTIVATION else ends[::-1]
        senders, takers = self._plan.addresses_of(begin), self._plan.addresses_of(end)
        if source >= len(senders) or target >= len(takers):
            return None
        edge = Edge(kind, senders[source], takers[target])
        return edge if edge.source == self._address else None

    def statistics(self) -> dict[str, Any]:
        """Return, by edge, how many micro-batches were packed, and the bytes before and after.

        An entry is the stages at the two ends, the direction, and these three numbers.
        """
        return {
            "packed": [
                [*self._ends(edge), _ONE_WAY[edge.kind], *sizes.counts]
                for edge, sizes in self._sizes.items()
            ]
        }


class _Direction:
    """The residuals of one direction, now and as they were before mini-batches that have begun."""

    def __init__(self) -> None:
        self.residuals: Residuals = {}
        self._before: dict[int, Residuals] = {}
        self._entered = -1

    def begin(self, mini_batch: int) -> None:
        """Drop all residuals; no micro-batch of this mini-batch is packed yet."""
        self.residuals, self._before, self._entered = {}, {}, mini_batch - 1

    def enter(self, mini_batch: int) -> None:
        """Note that a micro-batch of a mini-batch will be packed."""
        if mini_batch > self._entered:
            # Also before those between, of which this replica has no micro-batch. A shallow copy is
            # enough, since a residual is replaced, never changed in place.
            for each in range(self._entered + 1, mini_batch + 1):
                self._before[each] = dict(self.residuals)
            self._entered = mini_batch

    def at(self, mini_batch: int) -> Residuals:
        """Return the residuals as they were before a mini-batch: as now, if it has not begun."""
        return self._before.get(mini_batch, self.residuals)

    def forget_before(self, mini_batch: int) -> None:
        """Forget the residuals before earlier mini-batches."""
        for each in [old for old in self._before if old < mini_batch]:
            del self._before[each]
