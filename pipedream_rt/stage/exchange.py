"""A stage on its worker: its place in the feed, and the messages that it gets and sends."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from pipedream_rt.devices import DeferredScalar
from pipedream_rt.messages.head import Head, Mode
from pipedream_rt.messages.message import (
    Activation,
    Failed,
    Gradient,
    Key,
    Loss,
    Message,
    OfRule,
    Passed,
    Payload,
    Reply,
    Saved,
    Send,
)
from pipedream_rt.messages.tree import NOTHING, Value, flatten, own
from pipedream_rt.schedules import COORDINATOR, Action, Edge, EdgeKind, Kind, Plan
from pipedream_rt.schedules.channels import OF_ACTIONS
from pipedream_rt.schedules.edges import Address, By, EdgeRule
from pipedream_rt.stage.hyper import Hyper
from pipedream_rt.stage.rules.coding import Coding
from pipedream_rt.stage.rules.rule import Packed
from pipedream_rt.stage.saving import StageSaver
from pipedream_rt.stage.stage import Stage
from pipedream_rt.stage.values import (
    Gradients,
    Outgoing,
    dense,
    gradients_of,
    trail_of,
    value_of,
)
from pipedream_rt.stage.whole_loss import LossOfUpdate

_BY = {channel.kind: channel.by for channel in OF_ACTIONS}


class Computing:
    """A context around every computation of a stage: it sums up the time of all.

    ``busy_ns`` is that of the clock, ``processor_ns`` that for which a core was there.
    """

    # A class, since contexts that are generators are slow, and one is entered for each action.
    __slots__ = ("_processor", "_start", "busy_ns", "processor_ns")

    def __init__(self) -> None:
        self.busy_ns = self.processor_ns = self._start = self._processor = 0

    def __enter__(self) -> None:
        self._start, self._processor = time.perf_counter_ns(), time.thread_time_ns()

    def __exit__(self, *error: object) -> None:
        self.busy_ns += time.perf_counter_ns() - self._start
        self.processor_ns += time.thread_time_ns() - self._processor


class Exchange:
    """Makes messages of a stage's results, on the edges that the plan names.

    Attributes:
        turn: The turn of the next item of its feed.
        restores: How often this stage has loaded a checkpoint; updates then count from an earlier
            one.
        ahead: A micro-batch that was taken from the feed before its forward is due; None for none.
        positions: By micro-batch in flight, its position in the feed.
        sent_bytes: The bytes of tensors that it has sent since its last span.
        output_bytes: The bytes that its last training forward has sent.
    """

    def __init__(self, stage: Stage, send: Send) -> None:
        self.stage = stage
        self.address = stage.address
        self._plan = plan = stage.plan
        self._coding = stage.rule(Coding)
        self._transport_send = send
        self._cycle = plan.cycle(self.address)
        self._routes: dict[int, _Route] = {}
        # Each replica of the nearest producer may be the one that sends the next item of the feed.
        own = range(plan.next_own(self.address, 0), self._cycle, plan.replicas[stage.index])
        self._next_from = tuple(dict.fromkeys(self.route(number).first for number in own))
        self._commands = Edge(EdgeKind.COMMAND, COORDINATOR, self.address)
        self.saver = StageSaver(stage, plan.num_stages, self._tell_saved)
        self.turn = self.restores = 0
        self.ahead: Message | None = None
        self.positions: dict[int, int] = {}
        # By edge, the last update or version that was taken, or given, since `begin`.
        self._taken: dict[Edge, int] = {}
        self._given: dict[Edge, int] = {}
        self._begun = stage.steps
        self.computing = Computing()
        self.sent_bytes = self.output_bytes = 0

    def begin(self) -> None:
        """Begin the order anew: nothing is in flight, and no message is on its way."""
        self._begun = self.stage.steps
        self._taken.clear()
        self._given.clear()

    # -- the feed -------------------------------------------------------------------------------

    def route(self, number: int) -> _Route:
        """Return the route of a micro-batch; that of 0 serves all passes that do not train."""
        place = number % self._cycle if self._cycle > 1 else 0
        route = self._routes.get(place)
        if route is None:
            route = self._routes[place] = _Route(self._plan, self.address, place)
        return route

    def route_of(self, head: Head) -> _Route:
        """Return the route of a micro-batch whose first message has come."""
        return self.route(head.micro_batch if self._cycle > 1 and head.mode is Mode.TRAIN else 0)

    def next_keys(self) -> tuple[Key, ...]:
        """Return the keys of the feed's next item, of which one comes: activation or command."""
        turn = self.turn
        return (*(Key(edge, turn) for edge in self._next_from), Key(self._commands, turn))

    def has_peeked(self, row: EdgeRule, index: int) -> bool:
        """Whether the micro-batch has come that an action looks at without taking it."""
        # The last forward, if none was taken ahead; those of one replica are `replicas` apart.
        newest = self.stage.next_forward
        if self.ahead is None:
            newest -= self._plan.replicas[self.stage.index]
        return newest >= row.of(index).number

    def position_of(self, micro_batch: int) -> int:
        """Return the position in the feed of a micro-batch that is in flight."""
        self.stage.require_in_flight(micro_batch)
        return self.positions[micro_batch]

    # -- what actions need ------------------------------------------------------------------------

    def keys(self, row: EdgeRule, index: int) -> Iterator[Key]:
        """Yield the keys of the messages that the action with an index needs of an edge."""
        edge = row.edge
        if _BY[edge.kind] is By.MICRO_BATCH:
            yield Key(edge, self.position_of(index))
        else:
            for number in self._up_to(row, index, self._taken):
                yield Key(edge, number, self.restores)

    def _up_to(self, row: EdgeRule, index: int, done: dict[Edge, int]) -> Sequence[int]:
        """Return the numbers up to a row's last, of updates or versions, that are not `done`."""
        if row.number is None:
            return (index,)
        edge, last = row.edge, row.number(index)
        # After n updates, update n and version n + 1 come first.
        first = self._begun - (_BY[edge.kind] is not By.VERSION)
        numbers = range(done.get(edge, first) + 1, last + 1)
        if numbers:
            done[edge] = last
        return numbers

    # -- what comes with a micro-batch ------------------------------------------------------------

    def values_of(self, messages: Sequence[Message]) -> list[Value]:
        inputs = (each for each in messages if each.key.edge.kind is EdgeKind.ACTIVATION)
        return [value_of(message, self._unpacked(message)) for message in inputs]

    def gradients_of(self, messages: Sequence[Message]) -> list[Gradients]:
        return [gradients_of(message, self._unpacked(message)) for message in messages]

    def _unpacked(self, message: Message) -> tuple[Tensor, ...]:
        """Return the tensors of a message, unpacked if a codec has packed them."""
        payload = message.payload
        assert isinstance(payload, Activation | Gradient)
        if self._coding is None or not payload.coded:
            return message.tensors
        with self.computing:
            return self._coding.unpacked(message.key.edge, message.tensors, payload.coded)

    def receive(self, message: Message) -> None:
        """Let the stage have a message of a rule."""
        payload = message.payload
        assert isinstance(payload, OfRule)
        packed = Packed(payload.values, message.tensors)
        self.stage.receive(message.key.edge, message.key.number, packed)

    # -- what actions give ------------------------------------------------------------------------

    def give(self, action: Action, outgoing: Outgoing) -> None:
        """Send the outputs of an action for updates and versions, by kind of edge."""
        index = action.index
        for row in self._plan.rows(action, self.address)[1] if outgoing else ():
            if row.edge.kind in outgoing:
                for number in self._up_to(row, index, self._given):
                    values, tensors = self.stage.pack(row.edge, outgoing[row.edge.kind])
                    key = Key(row.edge, number, self.restores)
                    self._send(key, OfRule(values=values), tensors)

    def passed(self, version: int, fingerprint: str = "", changed_buffers: bool = False) -> Passed:
        """Return what this stage adds to the trail of a micro-batch now."""
        return Passed(
            stage=self.stage.index,
            version=version,
            busy_ns=self.computing.busy_ns,
            processor_ns=self.computing.processor_ns,
            process_ns=time.process_time_ns(),
            fingerprint=fingerprint,
            changed_buffers=changed_buffers,
        )

    def send_on(
        self,
        inputs: Sequence[Message],
        made: Sequence[Value] | float | DeferredScalar | LossOfUpdate | None,
        passed: Passed,
        metrics: dict[str, float | str] | None = None,
        failed: Failed | None = None,
    ) -> None:
        """Send a forward's outputs, or loss, on all its edges."""
        first = inputs[0].payload
        assert isinstance(first, Activation)
        head, turns = first.head, first.turns
        trail = [*trail_of(inputs), passed]
        outputs, before = self.route_of(head).outputs, self.sent_bytes
        of_update = made if isinstance(made, LossOfUpdate) else LossOfUpdate()
        made = of_update.loss if isinstance(made, LossOfUpdate) else made
        number = made if isinstance(made, float | DeferredScalar) else None
        values = None if isinstance(made, float | DeferredScalar) else made
        for edge, output in zip(outputs, values or [NOTHING] * len(outputs), strict=True):
            payload: Payload
            if edge.kind is EdgeKind.LOSS:
                structure = [] if values is None else output.structure
                said = metrics or {}
                payload = Loss(
                    loss=number,
                    trail=trail,
                    metrics=said,
                    structure=structure,
                    requires_grad=list(output.requires_grad),
                    failed=failed,
                    parts=[*of_update.parts],
                    whole=of_update.whole,
                )
                self._send(Key(edge, head.position), payload, output.tensors)
                continue
            tensors, coded = output.tensors, list[Any]()
            if self._coding is not None and head.mode is Mode.TRAIN:
                places = [i if asks else None for i, asks in enumerate(output.requires_grad)]
                with self.computing:
                    tensors, coded = self._coding.packed(edge, head.micro_batch, tensors, places)
            payload = Activation(
                head=head,
                turns=turns,
                structure=output.structure,
                requires_grad=list(output.requires_grad),
                coded=coded,
                trail=trail,
                failed=failed,
            )
            self._send(Key(edge, turns[self._plan.stage_of(edge.target)]), payload, tensors)
        if head.mode is Mode.TRAIN and not head.empty:
            self.output_bytes = self.sent_bytes - before

    def send_back(
        self, micro_batch: int, found: Sequence[Gradients], hyper: list[Hyper] | None = None
    ) -> None:
        """Send the gradients of a backward to the stages that its inputs came from."""
        position, route = self.positions[micro_batch], self.route(micro_batch)
        skips = self.stage.skips
        for edge, number in route.back:
            if edge.target == COORDINATOR and not (found and found[number]):
                continue  # the script asks for no gradient of this input
            # Of a micro-batch without samples nothing was found; its producers wait all the same.
            present, tensors = dense(found[number] if found else [])
            coded: list[Any] = []
            if self._coding is not None:
                places = [i for i, there in enumerate(present) if there]
                with self.computing:
                    tensors, coded = self._coding.packed(edge, micro_batch, tensors, places)
            self._send(
                Key(edge, position),
                Gradient(present=present, coded=coded, skips=skips, hyper=hyper),
                tensors,
            )

    def reply(self, position: int, result: object, refused: str = "") -> None:
        """Send the result of a command to the coordinator, or the text of a refusal."""
        # Copies, since the next update may change the stage's own tensors before they are sent.
        structure, tensors = flatten(result)
        copied = self.stage.runner.device.copied
        copies = tuple(own(tensor, copy=True, clone=copied) for tensor in tensors)
        key = Key(Edge(EdgeKind.REPLY, self.address, COORDINATOR), position)
        self._send(key, Reply(structure=structure, refused=refused), copies)

    def _tell_saved(self, position: int, result: object) -> None:
        """Send the result of a save command to the coordinator. Any thread."""
        key = Key(Edge(EdgeKind.SAVED, self.address, COORDINATOR), position)
        self._transport_send(key, Saved(structure=flatten(result)[0]), ())

    def _send(self, key: Key, payload: Payload, tensors: tuple[Tensor, ...]) -> None:
        """Hand a message to the transport, and count the bytes of its tensors."""
        for tensor in tensors:
            self.sent_bytes += tensor.nbytes
        self._transport_send(key, payload, tensors)


class _Route:
    """The edges of the messages that a replica of a stage gets and sends for a micro-batch.

    Attributes:
        activations: The edges on which its inputs come, in the order of the stages.
        back: The edges that its backward gives, each with the place of the input.
    """

    def __init__(self, plan: Plan, address: Address, number: int) -> None:
        needs, gives = plan.rows(Action(Kind.FORWARD, number), address)
        needed = [row.edge for row in needs if _BY[row.edge.kind] is By.MICRO_BATCH]
        self.activations = [edge for edge in needed if edge.kind is EdgeKind.ACTIVATION]
        # When the nearest producer has done a micro-batch, so have all others: wait for it first.
        self.first = max(self.activations, key=lambda edge: edge.source)
        self.rest = [edge for edge in needed if edge != self.first]
        if plan.loss_in_script and plan.stage_of(address) in plan.exits:
            # No action needs a target, and an evaluation with a loss of its own brings one.
            self.rest.append(Edge(EdgeKind.TARGET, COORDINATOR, address))
        self.outputs = [row.edge for row in gives if _BY[row.edge.kind] is By.MICRO_BATCH]
        sources = [edge.source for edge in self.activations]
        back = (row.edge for row in plan.rows(Action(Kind.INPUT, number), address)[1])
        self.back = [(edge, sources.index(edge.target)) for edge in back]
