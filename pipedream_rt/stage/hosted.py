"""A stage on its worker: it reads messages for the stage, and sends what the stage returns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pipedream_rt.messages.message import (
    Gradient,
    Key,
    Loss,
    Message,
    MicroBatch,
    Mode,
    Norm,
    Passed,
    Payload,
    Reply,
    Saved,
    Send,
    Share,
    Target,
    Total,
    Weight,
)
from pipedream_rt.messages.tree import Value, flat_copy, flatten
from pipedream_rt.schedules import COORDINATOR, Action, Edge, EdgeKind, Kind
from pipedream_rt.schedules.actions import ENDS
from pipedream_rt.stage.saving import StageSaver
from pipedream_rt.stage.stage import Gradients, Stage

_NOTHING = Value(flatten(None)[0], (), ())
"""The value that a micro-batch without samples carries."""


class Hosted:
    """A stage on its worker, with its place in the feed and its counters.

    What the stage returns becomes messages here, on the edges that the plan names.

    Args:
        stage: The stage.
        send: Hands the stage's messages to the transport.

    Attributes:
        stage: The stage.
        index: Index of the stage.
        inputs: The edges that its forward needs, first the one whose message is waited for: when
            the nearest producer has done a micro-batch, so have all others.
        outputs: The edges that its forward gives.
        saver: The writer of its part of checkpoints.
        turn: The turn of the next item of its feed.
        positions: The position of each micro-batch in flight.
        busy_ns: The time that the stage has computed, in ns.
        held_up_ns: The time that it has waited while another stage of its process computed, in ns.
        sent_bytes: The bytes of tensors that it has sent since its last span.
    """

    def __init__(self, stage: Stage, send: Send) -> None:
        """Begin at the first turn, with nothing in flight."""
        self.stage = stage
        self.index = stage.index
        self._transport_send = send
        self.activations = [
            edge
            for edge in stage.plan.needs(Action(Kind.FORWARD, 0, stage.index))
            if edge.kind is EdgeKind.ACTIVATION
        ]
        first = max(self.activations)
        needed = stage.plan.needs(Action(Kind.FORWARD, 0, stage.index))
        self.inputs = (first, *(edge for edge in needed if edge != first))
        self.outputs = stage.plan.gives(Action(Kind.FORWARD, 0, stage.index))
        self._back = stage.plan.gives(Action(Kind.BACKWARD, 0, stage.index))
        self._borrows = stage.plan.borrows(stage.index)
        self._lends = stage.plan.lends(stage.index)
        self._shares_for = stage.plan.shares_for(stage.index)
        self._shares_of = stage.plan.shares_of(stage.index)
        self._commands = Edge(EdgeKind.COMMAND, COORDINATOR, stage.index)
        self.saver = StageSaver(stage, stage.plan.num_stages, self._tell_saved)
        self.turn = 0
        self.positions: dict[int, int] = {}
        self.busy_ns = self.held_up_ns = self.sent_bytes = 0

    def next_keys(self) -> tuple[Key, Key]:
        """Return the two keys of which one is that of the next item: activation and command."""
        return Key(self.inputs[0], self.turn), Key(self._commands, self.turn)

    def _tell_saved(self, position: int, result: object) -> None:
        """Send the result of a command to save to the coordinator."""
        self._transport_send(COORDINATOR, position, Saved(structure=flatten(result)[0]), ())

    def position_of(self, micro_batch: int) -> int:
        """Return the position of a micro-batch in flight.

        Raises:
            ScheduleError: The micro-batch is not in flight.
        """
        self.stage.require_in_flight(micro_batch)
        return self.positions[micro_batch]

    def send_on(
        self,
        inputs: Sequence[Message],
        made: Sequence[Value] | float | None,
        version: int,
        mark: str = "",
    ) -> None:
        """Send the output or the loss of a forward on every edge that the forward gives.

        Args:
            inputs: The messages that the forward needed.
            made: The values for the consumers, or the loss, as `Stage.forward` returns them.
            version: The weight version that the forward read.
            mark: The fingerprint of the stage; empty if none was asked for.
        """
        head = inputs[0].payload
        assert isinstance(head, MicroBatch)
        trail = [*trail_of(inputs), [self.index, version, self.busy_ns, mark]]
        totals = self._totals_to_take_along(head.mode, inputs)
        values = made if isinstance(made, Sequence) else [_NOTHING] * len(self.outputs)
        for edge, output in zip(self.outputs, values, strict=True):
            payload: Payload
            if edge.kind is EdgeKind.LOSS:
                loss = made if isinstance(made, float) else None
                structure = output.structure if isinstance(made, Sequence) else []
                payload = Loss(loss=loss, trail=trail, structure=structure)
            else:
                payload = MicroBatch(
                    turn=head.turn,
                    micro_batch=head.micro_batch,
                    mode=head.mode,
                    empty=head.empty,
                    program=head.program,
                    definition=head.definition,
                    version=head.version,
                    cache=head.cache,
                    fingerprint=head.fingerprint,
                    hyper=head.hyper,
                    totals=totals,
                    structure=output.structure,
                    requires_grad=list(output.requires_grad),
                    trail=trail,
                )
            self._send(edge, inputs[0].index, payload, output.tensors)

    def send_back(self, micro_batch: int, found: Sequence[Gradients]) -> None:
        """Send the gradients that a backward found to the stages that its inputs came from.

        Args:
            micro_batch: Number of the micro-batch.
            found: The gradients, as `Stage.backward` returns them; empty for a micro-batch without
                samples, for which the producers wait all the same.
        """
        position = self.positions[micro_batch]
        sources = [edge.source for edge in self.activations]
        for edge in self._back:
            of_input = found[sources.index(edge.target)] if found else []
            tensors = tuple(gradient for gradient in of_input if gradient is not None)
            payload = Gradient(present=[gradient is not None for gradient in of_input])
            self._send(edge, position, payload, tensors)

    # -- tied weights ---------------------------------------------------------------------------

    def weights_due(self, micro_batch: int) -> Iterator[Key]:
        """Yield the keys of the weights that the forward of a micro-batch waits for.

        They are received one by one between two of these.
        """
        for edge in self._borrows:
            ledger = self.stage.borrowed[edge.source].ledger
            while ledger.newest < self.stage.plan.reads(edge.source, micro_batch):
                yield Key(edge, ledger.newest + 1)

    def weights_left(self) -> Iterator[Key]:
        """Yield the keys of the weights that are behind the updates of the stage, as above."""
        for edge in self._borrows:
            ledger = self.stage.borrowed[edge.source].ledger
            while ledger.newest < self.stage.parameters.ledger.newest:
                yield Key(edge, ledger.newest + 1)

    def receive_weights(self, message: Message) -> None:
        """Give the stage a new version of weights that another one owns."""
        ties = self._borrows[message.key.edge]
        names = [tie.name for tie in ties]
        self.stage.receive(message.sender, dict(zip(names, message.tensors, strict=True)))

    def send_weights(self) -> None:
        """Send the newest version of weights that the stage owns to the stages that use them."""
        version = self.stage.parameters.ledger.newest
        for edge, ties in self._lends.items():
            tensors = tuple(self.stage.weight(tie.name) for tie in ties)
            self._send(edge, version, Weight(), tensors)

    def shares_due(self, action: Action) -> list[Key]:
        """Return the keys of the shares of gradients that the end of a backward needs."""
        update, last = self._update_ended_by(action)
        return [Key(edge, update) for edge in self._shares_for] if last else []

    def shares_in(self, messages: Sequence[Message]) -> dict[str, Tensor]:
        """Return the shares that messages carry, by name of the weight in the unsplit model."""
        found: dict[str, Tensor] = {}
        for message in messages:
            payload, tensors = message.payload, iter(message.tensors)
            assert isinstance(payload, Share)
            for tie, there in zip(self._shares_for[message.key.edge], payload.present, strict=True):
                if there:
                    found[tie.name] = next(tensors)
        return found

    def send_shares(self, action: Action) -> None:
        """Send the stage's shares of gradients at the end of an update."""
        update, last = self._update_ended_by(action)
        for edge, ties in self._shares_of.items() if last else ():
            shares = [self.stage.take_share(tie.name) for tie in ties]
            payload = Share(present=[share is not None for share in shares])
            self._send(edge, update, payload, tuple(s for s in shares if s is not None))

    def _update_ended_by(self, action: Action) -> tuple[int, bool]:
        """Return the update of an action's micro-batch, and whether the action is its last one."""
        update, number = divmod(action.index, self.stage.plan.per_update)
        return update, action.kind in ENDS and number == self.stage.plan.per_update - 1

    # -- norms of gradients ---------------------------------------------------------------------

    def norms_due(self, update: int) -> list[Key]:
        """Return the key of the norms of the stages behind this one; none for the last."""
        edges = self.stage.plan.edges(EdgeKind.NORM)
        return [Key(edge, update) for edge in edges if edge.target == self.index]

    def norms_in(self, messages: Sequence[Message]) -> dict[int, Tensor]:
        """Return the norms that messages carry, by the places of their parameters in the model."""
        found: dict[int, Tensor] = {}
        for message in messages:
            assert isinstance(message.payload, Norm)
            found.update(zip(message.payload.numbers, message.tensors[0].unbind(), strict=True))
        return found

    def send_norms(self, update: int, norms: Mapping[int, Tensor]) -> None:
        """Send norms to the stage before, if there is one."""
        for edge in self.stage.plan.edges(EdgeKind.NORM):
            if edge.source == self.index:
                tensor = torch.stack(list(norms.values())) if norms else torch.empty(0)
                self._send(edge, update, Norm(numbers=list(norms)), (tensor,))

    def totals_due(self, position: int) -> list[Key]:
        """Return the key of the totals that stage 0 sends at a flush, if updates wait for them."""
        clipper = self.stage.clipper
        edges = self.stage.plan.edges(EdgeKind.TOTAL) if clipper and clipper.exact else ()
        return [Key(edge, position) for edge in edges if edge.target == self.index]

    def send_totals(self, position: int) -> None:
        """Send the totals that no forward has taken along to all other stages, from stage 0."""
        clipper = self.stage.clipper
        if clipper is None or not clipper.exact or self.index > 0:
            return
        totals = [[update, total] for update, total in clipper.unsent.items()]
        clipper.unsent.clear()
        for edge in self.stage.plan.edges(EdgeKind.TOTAL):
            self._send(edge, position, Total(totals=totals), ())

    def _totals_to_take_along(self, mode: Mode, inputs: Sequence[Message]) -> list[list[Any]]:
        """Return the totals that go up with a forward: those that came, or those of stage 0."""
        clipper = self.stage.clipper
        if clipper is None or mode is not Mode.TRAIN:
            return []
        if self.index > 0:
            return [[update, total] for update, total in totals_of(inputs).items()]
        totals = [[update, total] for update, total in clipper.unsent.items()]
        clipper.unsent.clear()
        return totals

    def reply(self, position: int, result: object) -> None:
        """Send the result of a command to the coordinator."""
        # The tensors are copied, because the next update may change the stage's own.
        structure, copies = flat_copy(result)
        edge = Edge(EdgeKind.REPLY, self.index, COORDINATOR)
        self._send(edge, position, Reply(structure=structure), copies)

    def _send(
        self,
        edge: Edge,
        position: int,
        payload: Payload,
        tensors: tuple[Tensor, ...],
    ) -> None:
        """Hand a message to the transport, and count the bytes of its tensors."""
        self.sent_bytes += sum(t.nbytes for t in tensors)
        self._transport_send(edge.target, position, payload, tensors)


def value_of(message: Message) -> Value:
    """Return the value that the message of a micro-batch carries."""
    head = message.payload
    assert isinstance(head, MicroBatch)
    return Value(head.structure, message.tensors, tuple(head.requires_grad))


def target_of(message: Message | None) -> tuple[Value | None, float]:
    """Return the target that a message carries, and the micro-batch's share of its mini-batch."""
    if message is None:
        return None, 1.0
    head = message.payload
    assert isinstance(head, Target)
    return Value(head.structure, message.tensors, ()), head.share


def gradients_of(message: Message) -> Gradients:
    """Return the gradients that a message carries."""
    head, tensors = message.payload, iter(message.tensors)
    assert isinstance(head, Gradient)
    return [next(tensors) if there else None for there in head.present]


def totals_of(inputs: Sequence[Message]) -> dict[int, float]:
    """Return the totals that the messages of a micro-batch carry, by update."""
    heads = (m.payload for m in inputs if isinstance(m.payload, MicroBatch))
    return {update: total for head in heads for update, total in head.totals}


def trail_of(inputs: Sequence[Message]) -> list[Passed]:
    """Return the trails of all inputs merged into one, in the order of the stages."""
    trails = (m.payload.trail for m in inputs if isinstance(m.payload, MicroBatch))
    merged = {of_stage[0]: of_stage for trail in trails for of_stage in trail}
    return [merged[stage] for stage in sorted(merged)]
