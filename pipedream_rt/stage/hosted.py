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
    Partial,
    Passed,
    Payload,
    Reply,
    Saved,
    Send,
    Share,
    Stepped,
    Target,
    Total,
    Weight,
)
from pipedream_rt.messages.tree import Value, flat_copy, flatten
from pipedream_rt.schedules import COORDINATOR, Action, Edge, EdgeKind, Kind, Plan
from pipedream_rt.schedules.actions import ENDS
from pipedream_rt.schedules.plan import Address
from pipedream_rt.stage.saving import StageSaver
from pipedream_rt.stage.stage import Gradients, Part, Stage

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
        index: The address of the stage, or of the replica.
        is_replica: Whether the stage has several replicas.
        saver: The writer of its part of checkpoints.
        loads: The number of checkpoints that the run has gone back to, or on from, meanwhile.
        turn: The turn of the next item of its feed.
        ahead: A micro-batch that was taken from the feed before its forward is due; None for none.
        positions: The position of each micro-batch in flight.
        busy_ns: The time that the stage has computed, in ns.
        held_up_ns: The time that it has waited while another stage of its process computed, in ns.
        sent_bytes: The bytes of tensors that it has sent since its last span.
    """

    def __init__(self, stage: Stage, send: Send) -> None:
        """Begin at the first turn, with nothing in flight."""
        self.stage = stage
        self.index = stage.address
        self._transport_send = send
        self.is_replica = stage.plan.replicas[stage.index] > 1
        self._shards = stage.plan.shape.shards(stage.index)
        self._cycle = stage.plan.cycle(self.index)
        self._routes: dict[int, _Route] = {}
        # The ways on which the message of an item may come that is waited for: each replica of the
        # nearest producer may be the one.
        plan = stage.plan
        own = range(plan.next_own(self.index, 0), self._cycle, plan.replicas[stage.index])
        self._ways = tuple(dict.fromkeys(self.route(number).first for number in own))
        self._borrows = stage.plan.borrows(stage.index)
        self._lends = stage.plan.lends(stage.index)
        self._shares_for = stage.plan.shares_for(stage.index)
        self._shares_of = stage.plan.shares_of(stage.index)
        self._commands = Edge(EdgeKind.COMMAND, COORDINATOR, self.index)
        self.saver = StageSaver(stage, stage.plan.num_stages, self._tell_saved)
        self.turn = self.loads = 0
        self.ahead: Message | None = None
        self.positions: dict[int, int] = {}
        self.busy_ns = self.held_up_ns = self.sent_bytes = 0

    def route(self, number: int) -> _Route:
        """Return the ways of the messages about a micro-batch.

        Args:
            number: Number of the micro-batch; 0 for all that are not trained on.
        """
        place = number % self._cycle if self._cycle > 1 else 0
        route = self._routes.get(place)
        if route is None:
            route = self._routes[place] = _Route(self.stage.plan, self.index, place)
        return route

    def route_of(self, head: MicroBatch) -> _Route:
        """Return the ways of the messages about a micro-batch, of which one has come."""
        return self.route(head.micro_batch if self._cycle > 1 and head.mode is Mode.TRAIN else 0)

    def next_keys(self) -> tuple[Key, ...]:
        """Return the keys of which one is that of the next item: activations, and a command."""
        turn = self.turn
        return (*(Key(way, turn) for way in self._ways), Key(self._commands, turn))

    def numbered(self, update: int) -> int:
        """Return the number under which messages about an update, or a version, are sent.

        It rises also when updates begin again from an earlier one: an inbox takes a message whose
        number does not rise for one that came twice.
        """
        return (self.loads << 40) + update

    def knows(self, update: int) -> bool:
        """Whether a micro-batch has told the stage that the mini-batch of an update was fed."""
        plan, newest = self.stage.plan, self.stage.next_forward
        if self.ahead is None:
            newest -= plan.replicas[self.stage.index]
        return newest // plan.per_update >= update

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
        metrics: Sequence[float | str] = (),
    ) -> None:
        """Send the output or the loss of a forward on every edge that the forward gives.

        Args:
            inputs: The messages that the forward needed.
            made: The values for the consumers, or the loss, as `Stage.forward` returns them.
            version: The weight version that the forward read.
            mark: What the stage adds to the trail; see `MicroBatch`.
            metrics: What goes with the loss of an evaluation.
        """
        head = inputs[0].payload
        assert isinstance(head, MicroBatch)
        trail = [*trail_of(inputs), [self.stage.index, version, self.busy_ns, mark]]
        totals = self._totals_to_take_along(head.mode, inputs)
        outputs, plan = self.route_of(head).outputs, self.stage.plan
        values = made if isinstance(made, Sequence) else [_NOTHING] * len(outputs)
        for edge, output in zip(outputs, values, strict=True):
            payload: Payload
            if edge.kind is EdgeKind.LOSS:
                loss = made if isinstance(made, float) else None
                structure = output.structure if isinstance(made, Sequence) else []
                payload = Loss(loss=loss, trail=trail, metrics=list(metrics), structure=structure)
            else:
                turn = head.turns[plan.stage_of(edge.target)] if head.turns else head.turn
                payload = MicroBatch(
                    turn=turn,
                    turns=head.turns,
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
        position, route = self.positions[micro_batch], self.route(micro_batch)
        sources = [edge.source for edge in route.activations]
        for edge in route.back:
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
                yield Key(edge, self.numbered(ledger.newest + 1))

    def weights_left(self) -> Iterator[Key]:
        """Yield the keys of the weights that are behind the updates of the stage, as above."""
        for edge in self._borrows:
            ledger = self.stage.borrowed[edge.source].ledger
            while ledger.newest < self.stage.parameters.ledger.newest:
                yield Key(edge, self.numbered(ledger.newest + 1))

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
            self._send(edge, self.numbered(version), Weight(), tensors)

    def shares_due(self, action: Action) -> list[Key]:
        """Return the keys of the shares of gradients that the end of a backward needs."""
        update, last = self._update_ended_by(action)
        number = self.numbered(update)
        return [Key(edge, number) for edge in self._shares_for] if last else []

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
            tensors = tuple(share for share in shares if share is not None)
            self._send(edge, self.numbered(update), payload, tensors)

    def _update_ended_by(self, action: Action) -> tuple[int, bool]:
        """Return the update of an action's micro-batch, and whether the action is its last one."""
        update, number = divmod(action.index, self.stage.plan.per_update)
        return update, action.kind in ENDS and number == self.stage.plan.per_update - 1

    # -- gradients of replicas ------------------------------------------------------------------

    def send_part(self, update: int, part: Part) -> None:
        """Send what this replica has summed for an update to the others."""
        payload = Partial(
            present=[gradient is not None for gradient in part.gradients],
            hyper=part.hyper,
            read=part.read,
        )
        tensors = tuple(gradient for gradient in part.gradients if gradient is not None)
        for edge in self.stage.plan.gives(Action(Kind.REDUCE, update, self.index)):
            self._send(edge, self.numbered(update), payload, tensors)

    def send_stepped(self, update: int) -> None:
        """Send the weights that this replica has stepped to the others, if it steps a part."""
        if not self._shards:
            return
        tensors = self.stage.stepped()
        for edge in self.stage.plan.gives(Action(Kind.STEP, update, self.index)):
            self._send(edge, self.numbered(update), Stepped(), tensors)

    # -- norms of gradients ---------------------------------------------------------------------

    def norms_due(self, update: int) -> list[Key]:
        """Return the key of the norms of the stages behind this one; none for the last."""
        number = self.numbered(update)
        return [Key(edge, number) for edge in self.stage.plan.norms(self.index, update)]

    def norms_in(self, messages: Sequence[Message]) -> dict[int, Tensor]:
        """Return the norms that messages carry, by the places of their parameters in the model."""
        found: dict[int, Tensor] = {}
        for message in messages:
            assert isinstance(message.payload, Norm)
            found.update(zip(message.payload.numbers, message.tensors[0].unbind(), strict=True))
        return found

    def send_norms(self, update: int, norms: Mapping[int, Tensor]) -> None:
        """Send norms to the stage before, if there is one, and it waits for this replica."""
        plan = self.stage.plan
        before = [a for a in plan.addresses if plan.stage_of(a) == self.stage.index - 1]
        for edge in (edge for address in before for edge in plan.norms(address, update)):
            if edge.source == self.index:
                tensor = torch.stack(list(norms.values())) if norms else torch.empty(0)
                payload = Norm(numbers=list(norms))
                self._send(edge, self.numbered(update), payload, (tensor,))

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
        known = clipper.totals() if self.stage.plan.replicated else clipper.unsent
        totals = [[update, total] for update, total in known.items()]
        clipper.unsent.clear()
        for edge in self.stage.plan.edges(EdgeKind.TOTAL):
            self._send(edge, position, Total(totals=totals), ())

    def _totals_to_take_along(self, mode: Mode, inputs: Sequence[Message]) -> list[list[Any]]:
        """Return the totals that go up with a forward: those that came, or those of stage 0."""
        clipper = self.stage.clipper
        if clipper is None or mode is not Mode.TRAIN:
            return []
        if self.stage.plan.replicated:  # another forward may be the first that a replica sees
            clipper.unsent.clear()
            return [[update, total] for update, total in sorted(clipper.totals().items())]
        if self.index > 0:
            return [[update, total] for update, total in totals_of(inputs).items()]
        totals = [[update, total] for update, total in clipper.unsent.items()]
        clipper.unsent.clear()
        return totals

    def reply(self, position: int, result: object, refused: str = "") -> None:
        """Send the result of a command to the coordinator, or why there is none.

        Raises:
            ConfigError: The result cannot be sent.
        """
        # The tensors are copied, because the next update may change the stage's own.
        structure, copies = flat_copy(result)
        edge = Edge(EdgeKind.REPLY, self.index, COORDINATOR)
        self._send(edge, position, Reply(structure=structure, refused=refused), copies)

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


class _Route:
    """The ways of the messages about a micro-batch that a replica of a stage gets and sends.

    Args:
        plan: The plan.
        address: The address of the replica.
        number: Number of the micro-batch.

    Attributes:
        activations: The edges on which its inputs come, in the order of the stages.
        first: The one whose message is waited for: when the nearest producer has done a
            micro-batch, so have all others.
        rest: The other edges that its forward needs.
        outputs: The edges that its forward gives.
        back: The edges that its backward gives.
    """

    def __init__(self, plan: Plan, address: Address, number: int) -> None:
        """Ask the plan."""
        forward = Action(Kind.FORWARD, number, address)
        needed = plan.needs(forward)
        self.activations = [edge for edge in needed if edge.kind is EdgeKind.ACTIVATION]
        self.first = max(self.activations, key=lambda edge: edge.source)
        self.rest = [edge for edge in needed if edge != self.first]
        self.outputs = plan.gives(forward)
        self.back = plan.gives(Action(Kind.BACKWARD, number, address))


def part_in(message: Message) -> Part:
    """Return what a replica has summed, which a message carries."""
    head, tensors = message.payload, iter(message.tensors)
    assert isinstance(head, Partial)
    gradients = [next(tensors) if there else None for there in head.present]
    return Part(gradients, head.hyper, head.read)


def value_of(message: Message) -> Value:
    """Return the value that the message of a micro-batch carries."""
    head = message.payload
    assert isinstance(head, MicroBatch)
    return Value(head.structure, message.tensors, tuple(head.requires_grad))


def target_of(message: Message | None) -> tuple[Value | None, Target]:
    """Return the target that a message carries, and what goes with it."""
    if message is None:
        return None, _NO_TARGET
    head = message.payload
    assert isinstance(head, Target)
    return Value(head.structure, message.tensors, ()), head


_NO_TARGET = Target(structure=[], share=1.0)


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
