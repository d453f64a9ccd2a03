"""The loop of a worker: for each action, wait for what it needs, do it, send what it gives.

One thread, named ``worker-<index>`` or ``stage-<index>``, runs the loop and owns all mutable state:
the stages of the worker with their weights, versions, optimizers, and micro-batches in flight.
Other threads only put messages into the inbox.

The order alone says which action is next, and the plan says what it needs and gives. Items of the
feed that do not train (evaluation, inference, commands) are served at their turn, and so between
the same two micro-batches on every stage.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pipedream_rt.deadline import Deadline
from pipedream_rt.devices import DeferredScalar
from pipedream_rt.errors import ConfigError, ScheduleError
from pipedream_rt.lifecycle import is_of_a_handler
from pipedream_rt.messages.head import Head, Mode
from pipedream_rt.messages.inbox import Inbox, Steps, Wanted
from pipedream_rt.messages.message import (
    Activation,
    Command,
    CommandName,
    Failed,
    Key,
    Message,
    Send,
)
from pipedream_rt.messages.tree import Value, unflatten
from pipedream_rt.schedules import COORDINATOR, Action, EdgeKind, Kind, Plan
from pipedream_rt.schedules.actions import COUNTED, ENDS
from pipedream_rt.stage import stage_state
from pipedream_rt.stage.commands import carry_out, define
from pipedream_rt.stage.exchange import Exchange
from pipedream_rt.stage.process_memory import peak_memory_bytes
from pipedream_rt.stage.stage import Stage
from pipedream_rt.stage.values import (
    Gradients,
    Outgoing,
    activation_of,
    failed_of,
    said_of_update,
    target_of,
)
from pipedream_rt.tracing.spans import NOBODY, Recorder
from pipedream_rt.tracing.trace import CODES, COMMAND, PASS

_BACK = (Kind.BACKWARD, Kind.INPUT, Kind.WEIGHT)
_OF_FEED = (EdgeKind.ACTIVATION, EdgeKind.TARGET)
_WITHOUT_END = Deadline(None)


@dataclass(slots=True)
class Doing:
    """The present action of a worker, for an error report."""

    stage: int  # the address of the stage that acts
    action: Action | str = "start"  # or the name of a command or pass


def _raised(error: BaseException) -> Failed:
    raise error


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopOptions:
    """The options of a loop.

    Attributes:
        timeout: How long to wait for a message that is sure to come.
        recorder: Where the loop writes its spans; None for no trace.
        announce: Called with the text form of an action before the action is done, and with an
            empty text afterwards.
        announced: One past the number of the last micro-batch whose actions are announced.
        failed: Returns an error as data; called where it ends a pass, and not the run.
    """

    timeout: timedelta
    recorder: Recorder | None = None
    announce: Callable[[str], None] = field(default=lambda action: None)
    announced: int = 0
    failed: Callable[[BaseException], Failed] = _raised


class Loop:
    """Drives the stages of one worker by their order and the messages of their inbox alone."""

    # Methods that wait are generators: they yield a `Wanted` and are sent its message. So the same
    # loop runs on a thread of its own, which sleeps (`Inbox.follow`), and on one that it shares
    # with other hosts, which works for these meanwhile (`cooperative.py`). Methods that compute are
    # plain functions: an action never waits half-way, and a command comes between two actions.

    def __init__(
        self,
        stages: Sequence[Stage],
        worker: int,
        inbox: Inbox,
        send: Send,
        options: LoopOptions,
    ) -> None:
        # By address.
        self._hosted = {stage.address: Exchange(stage, send) for stage in stages}
        self._first = self._hosted[stages[0].address]
        self._plan: Plan = stages[0].plan
        self._worker = worker
        self._inbox = inbox
        self._options = options
        # A wait for a backward may be one for the script, which takes as long as it likes. The
        # coordinator finds out that a worker hangs.
        self._patience = None if self._plan.loss_in_script else options.timeout
        self._free_ns = time.monotonic_ns()  # when the last span ended
        # When the last message of the present action arrived (`time.monotonic_ns`), and from where.
        self._arrived = (0, NOBODY)
        recorder, device = options.recorder, stages[0].runner.device
        self._marks = None if recorder is None else device.marks(recorder.capacity)
        # The micro-batch at which the order began, and how much of `Plan.work` is done since then.
        self._start = self._ended = 0
        self._commands: dict[int, Message] = {}  # the commands to flush that have come, by address
        self.doing = Doing(stages[0].address)

    def run(self) -> Steps[None]:
        """Do the actions of the order, without end; yield each `Wanted`, and get its message."""
        while True:
            yield from self._run_until_flush()

    def close(self) -> None:
        """Wait until no checkpoint is being written."""
        for hosted in self._hosted.values():
            hosted.saver.close()

    def parts(self) -> list[Path]:
        """Return the folders of the checkpoints that the stages began last. Any thread."""
        return [part for h in self._hosted.values() if (part := h.saver.part) is not None]

    def _run_until_flush(self) -> Steps[None]:
        """Follow the order from a point where nothing is in flight to the end of the next flush."""
        self._begin()
        order = self._plan.order(self._worker, self._start)
        for action in order:
            hosted = self._host_of(action)
            # A replica may have no micro-batch of an update, so that a flush comes before its step.
            if self._plan.replicated and action.kind is Kind.STEP:
                command = yield from self._peek(hosted, action)
                if command is not None:
                    yield from self._flush(chain((action,), order), hosted, command)
                    return
            messages = yield from self._fence(hosted, action)
            if messages and isinstance(messages[0].payload, Command):
                yield from self._flush(order, hosted, messages[0])
                return
            self._do(hosted, action, messages)
        command = yield from self._flush_after_the_end(self._first)
        yield from self._flush(order, self._first, command)

    def _begin(self) -> None:
        """Begin the order after the updates that are done, with nothing in flight."""
        self._start, self._ended = self._first.stage.steps * self._plan.per_update, 0
        for hosted in self._hosted.values():
            hosted.begin()

    def _peek(self, hosted: Exchange, action: Action) -> Steps[Message | None]:
        """Wait for a micro-batch, and leave it to its forward; return a flush in its place."""
        for row in self._plan.rows(action, hosted.address)[0]:
            if row.peek and not hosted.has_peeked(row, action.index):
                item = yield from self._next_item(hosted)
                if isinstance(item.payload, Command):
                    return item
                hosted.ahead = item  # its turn has passed: the inbox gives it only once
        return None

    def _flush(self, order: Iterator[Action], hosted: Exchange, command: Message) -> Steps[None]:
        """Do the remaining actions on the micro-batches that were fed, and the drains."""
        head = command.payload
        assert isinstance(head, Command)
        stop = unflatten(head.structure, command.tensors)
        if stop is None:  # this stage has taken all that was fed before the command
            stop = hosted.stage.next_forward
        # This one has left the inbox; other stages of the worker take theirs in their drains.
        self._commands = {hosted.address: command}
        # An order has no end of its own, so the actions that are left are counted.
        left = self._plan.work(self._worker, self._start, stop) - self._ended
        for action in self._plan.rest(order, self._worker, stop, left):
            doer = self._host_of(action)
            messages = yield from self._fence(doer, action)
            self._do(doer, action, messages)

    def _flush_after_the_end(self, hosted: Exchange) -> Steps[Message]:
        """Wait for the flush that must come where an order ends, as in a replay."""
        item = yield from self._next_item(hosted)
        if not isinstance(item.payload, Command):
            raise ScheduleError(
                f"the schedule {self._plan.name} ends with micro-batch "
                f"{hosted.stage.next_forward - 1}, but the coordinator has fed another one"
            )
        return item

    def _host_of(self, action: Action) -> Exchange:
        """Return the stage that does an action: the one that it names, or the worker's only one."""
        return self._first if action.stage is None else self._hosted[action.stage]

    # -- fence ----------------------------------------------------------------------------------

    def _fence(self, hosted: Exchange, action: Action) -> Steps[list[Message]]:
        """Wait for the messages of an action; return those that do not belong to a rule.

        In the place of an activation, a flush may come.
        """
        kind = action.kind
        messages: list[Message] = []
        self._arrived = (0, NOBODY)
        if kind is Kind.FORWARD:
            item, hosted.ahead = hosted.ahead, None
            if item is None:
                item = yield from self._next_item(hosted)
            if isinstance(item.payload, Command):
                return [item]
            self._note(hosted, action)
            messages = yield from self._with_the_rest(hosted, item)
        elif kind is Kind.DRAIN:
            command = self._commands.get(hosted.address)
            messages.append(command or (yield from self._next_item(hosted)))
            self._arrived = (self._inbox.arrived_ns, COORDINATOR)
        else:
            self._note(hosted, action)
        for row in self._plan.rows(action, hosted.address)[0]:
            # Taken above, by turn: the feed counts passes and commands too, the plan does not.
            if row.edge.kind in _OF_FEED:
                continue
            # One key after another, as the plan lists them, whichever message is there first: so
            # a rule sees them in an order that no timing can change.
            for key in hosted.keys(row, action.index):
                message = yield Wanted(key, Deadline(self._patience))
                self._note_arrival(message)
                if row.edge.kind is EdgeKind.GRADIENT:
                    messages.append(message)
                else:
                    hosted.receive(message)
        return messages

    def _note_arrival(self, message: Message) -> None:
        """Note when a message has arrived, of those that an action waits for."""
        if self._inbox.arrived_ns >= self._arrived[0]:
            self._arrived = (self._inbox.arrived_ns, message.key.edge.source)

    def _next_item(self, hosted: Exchange) -> Steps[Message]:
        """Serve the items of a stage's feed until one trains, or is a flush, and return that."""
        while True:
            # The key is the turn, which counts all that this stage is fed. So an evaluation or a
            # command takes no micro-batch's key, wherever it comes.
            #
            # There is no deadline, because a script may pause between two mini-batches for as long
            # as it likes. The control connection notices a dead coordinator and closes the inbox.
            first, *instead = hosted.next_keys()
            # The other stages of this worker are served too: an item that does not train may have
            # to pass through all of them before the coordinator feeds more. In which order the
            # stages are served changes no result.
            others = [other for other in self._hosted.values() if other is not hosted]
            item = yield Wanted(
                first,
                _WITHOUT_END,
                instead=tuple(instead),
                also=[key for other in others for key in other.next_keys()],
                wanted=lambda message: not _is_for_the_order(message),
            )
            taker = self._hosted[item.key.edge.target]
            taker.turn += 1
            if _is_for_the_order(item):
                return item
            yield from self._serve(taker, item)
            self.doing.stage = hosted.address

    def _with_the_rest(self, hosted: Exchange, item: Message) -> Steps[list[Message]]:
        """Wait for a micro-batch's other messages; return its activations, and the target last."""
        head, turn = activation_of(item).head, item.key.number
        route = hosted.route_of(head)
        by_edge, targets = {route.first: item}, []
        self._arrived = (self._inbox.arrived_ns, item.key.edge.source)
        for edge in route.rest:
            if edge.kind is EdgeKind.ACTIVATION:
                by_edge[edge] = yield self._wanted(Key(edge, turn))
                self._note_arrival(by_edge[edge])
            elif head.has_target:
                targets.append((yield self._wanted(Key(edge, turn))))
        return [by_edge[edge] for edge in route.activations] + targets

    def _wanted(self, key: Key) -> Wanted:
        """Return the wait for a message, with a deadline, since it is sure to come."""
        return Wanted(key, Deadline(self._options.timeout))

    # -- compute and send -------------------------------------------------------------------------

    def _do(self, hosted: Exchange, action: Action, messages: Sequence[Message]) -> None:
        """Do an action whose messages are there, and send what it gives."""
        stage, (kind, m, _) = hosted.stage, action
        if kind is Kind.STEP or kind in ENDS:
            self._refuse_out_of_turn(stage, action)
        announced = m < self._options.announced and kind is not Kind.DRAIN
        if announced:
            self._options.announce(f"{hosted.address}:{kind.value}{m}")
        start, begin = time.monotonic_ns(), self._marked()
        if kind is Kind.FORWARD:
            version = self._forward(hosted, m, messages)
        elif kind in _BACK:
            version = stage.version_of(m)  # before its end, which forgets it
            self._backward(hosted, action, messages)
        else:
            self._update(hosted, action, messages)
            version = stage.parameters.ledger.newest
        if announced:
            self._options.announce("")  # the action went well
        self._ended += kind in COUNTED
        if self._options.recorder is not None:
            self._record(CODES[kind], hosted, m, version, start, begin)

    def _update(self, hosted: Exchange, action: Action, messages: Sequence[Message]) -> None:
        """Do an action of an update; for a drain, reply that nothing is in flight."""
        stage, (kind, update, _) = hosted.stage, action
        if kind is Kind.DRAIN:
            command = messages[0].payload
            assert isinstance(command, Command)
            hosted.reply(command.position, None)
            return
        outgoing: Outgoing = {}
        with hosted.computing:
            match kind:
                case Kind.REDUCE:
                    outgoing = stage.reduce(update)
                case Kind.STEP:
                    outgoing = stage.step(update)
                case Kind.APPLY:
                    outgoing = stage.apply(update)
                case Kind.TAKE:
                    stage.take(update)
            # Now: the next action may change what the checkpoint is to have.
            if hosted.saver.saving is not None:
                hosted.saver.save_if_due()
        hosted.give(action, outgoing)

    def _refuse_out_of_turn(self, stage: Stage, action: Action) -> None:
        """Refuse an order that would not sum gradients in the order of the micro-batches."""
        # The checker has seen only the first actions of a schedule that a user wrote.
        kind, m, _ = action
        due = stage.steps if kind is Kind.STEP else stage.ended
        if m != due:
            where = self._plan.title_of(stage.address)
            raise ScheduleError(f"{where}: the order has {action} before {kind.value}{due}")

    def _forward(self, hosted: Exchange, micro_batch: int, messages: Sequence[Message]) -> int:
        """Do a forward and send its output or loss; return the weight version that it read."""
        item, stage = messages[0], hosted.stage
        if not isinstance(item.payload, Activation):
            raise ScheduleError(
                f"{stage.plan.title_of(stage.address)}: the order says F{micro_batch}, but the "
                f"feed brings {item.key.words(self._plan.title_of)}, which is not a micro-batch "
                "(an error of the library)"
            )
        head = item.payload.head
        if head.micro_batch != micro_batch:
            raise ScheduleError(
                f"{stage.plan.title_of(stage.address)}: the order says F{micro_batch}, but the "
                f"feed brings micro-batch {head.micro_batch} "
                f"({item.key.words(self._plan.title_of)}); a schedule must do the forwards of a "
                "stage in the order of the micro-batches, also after those that its proof covers"
            )
        hosted.positions[micro_batch] = head.position
        inputs = None if head.empty else hosted.values_of(messages)
        target, task = target_of(messages)
        with hosted.computing:
            made = stage.forward(head, inputs, target, task)
        version = stage.version_of(micro_batch)
        fingerprint = stage_state.fingerprint_of(stage, micro_batch) if head.fingerprint else ""
        passed = hosted.passed(version, fingerprint)
        hosted.send_on(messages, made, passed, stage.said_of(micro_batch))
        return version

    def _backward(self, hosted: Exchange, action: Action, messages: Sequence[Message]) -> None:
        """Do a backward or one of its halves, and send the gradients that it gives."""
        stage, (kind, m, _) = hosted.stage, action
        gradients = hosted.gradients_of(messages)
        hyper = None
        if self._plan.loss_in_script:
            skips, hyper = said_of_update(messages)
            stage.told(m, skips, hyper)
        found: list[Gradients] = []
        outgoing: Outgoing = {}
        # A checkpoint that waits for its update has copied the buffers already.
        waits = hosted.saver.saving is not None
        with hosted.computing, hosted.saver.watching_buffers() if waits else nullcontext():
            if kind is Kind.BACKWARD:
                found = stage.backward(m, gradients)
            elif kind is Kind.INPUT:
                found = stage.backward_input(m, gradients)
            else:
                stage.backward_weight(m)
            if kind in ENDS:
                outgoing = stage.end(m)
        if kind is not Kind.WEIGHT:  # first: the stage before waits for these
            hosted.send_back(m, found, hyper)
        if outgoing:
            hosted.give(action, outgoing)
        if kind in ENDS:  # last: gradients are keyed by it
            del hosted.positions[m]

    # -- items that do not train ----------------------------------------------------------------

    def _serve(self, hosted: Exchange, item: Message) -> Steps[None]:
        """Serve an item that does not train: a pass of evaluation or inference, or a command."""
        start, begin = time.monotonic_ns(), self._marked()
        self._arrived = (self._inbox.arrived_ns, item.key.edge.source)
        match item.payload:
            case Activation(head=head):
                kind, position = PASS, head.position
                self._note(hosted, f"{head.mode.value} {position}")
                messages = yield from self._with_the_rest(hosted, item)
                self._pass(hosted, head, messages)
            case Command() as command:
                kind, position = COMMAND, command.position
                self._note(hosted, command.name.value)
                self._obey(hosted, item, command)
            case other:
                raise ScheduleError(
                    f"{self._plan.title_of(hosted.address)}: the feed holds a "
                    f"{type(other).__name__}, which is neither a micro-batch nor a command (an "
                    "error of the library)"
                )
        version = hosted.stage.parameters.ledger.newest
        if self._options.recorder is not None:
            self._record(kind, hosted, position, version, start, begin)

    def _pass(self, hosted: Exchange, head: Head, messages: Sequence[Message]) -> None:
        """Pass a micro-batch that does not train, or the error that ended it, through a stage."""
        stage, failed = hosted.stage, failed_of(messages)
        made: list[Value] | float | DeferredScalar | None = None
        metrics: dict[str, float | str] = {}
        if failed is None:
            inputs = hosted.values_of(messages)
            try:
                with hosted.computing, stage.kept.read(head.version):
                    stage.given.apply(head.mini_batch.given)
                    made, metrics = self._passed(stage, head, inputs, messages)
            except Exception as error:  # the user's; the run goes on, since this trains nothing
                if is_of_a_handler(error):
                    raise  # it is meant for the script
                failed, stage.runner.at = self._options.failed(error), None
        changed = head.mode.evaluates and head.cache in stage.passes.evaluations
        passed = hosted.passed(stage.parameters.ledger.newest, changed_buffers=changed)
        # Sent in any case, since the next stages and the coordinator wait for it.
        hosted.send_on(messages, made, passed, metrics, failed)

    @staticmethod
    def _passed(
        stage: Stage, head: Head, inputs: Sequence[Value], messages: Sequence[Message]
    ) -> tuple[list[Value] | float | DeferredScalar, dict[str, float | str]]:
        """Return a stage's result for a micro-batch that does not train, and the metrics."""
        if head.mode.evaluates:
            target, task = target_of(messages)
            return stage.passes.evaluate(
                head.micro_batch, inputs, target, head.program, metrics=task.metrics,
                buffers=head.cache, keep_buffers=head.mode is Mode.EVALUATE_AND_KEEP,
                numbers=head.numbers,
            )  # fmt: skip
        training = head.mode is Mode.INFER_IN_TRAINING_MODE
        made = stage.passes.infer(
            head.micro_batch, inputs, training=training, program=head.program, cache=head.cache,
            numbers=head.numbers,
        )  # fmt: skip
        return made, {}

    def _obey(self, hosted: Exchange, item: Message, command: Command) -> None:
        """Carry out a command and reply; the saver replies to the command to save."""
        argument: Any = unflatten(command.structure, item.tensors) if command.structure else None
        result: object = None
        match command.name:
            case CommandName.DEFINE:
                define(hosted.stage, *argument)
            case CommandName.TRACE:
                result = self._spans_of(hosted)
            case CommandName.STATISTICS:
                result = {
                    **hosted.stage.statistics(),
                    "busy_ns": hosted.computing.busy_ns,
                    "output_bytes": hosted.output_bytes,
                    "peak_memory_bytes": peak_memory_bytes(),
                    **hosted.stage.runner.device.facts(),
                }
            case CommandName.SAVE:
                with hosted.computing:
                    hosted.saver.begin(command.position, **argument)
                return  # the saver replies when its files are written
            case name if name.leaves_no_trace:
                self._look(hosted, command.position, name, argument)
                return
            case name:
                with hosted.computing:
                    result = carry_out(hosted.stage, name, argument)
                if name is CommandName.LOAD:  # a flush follows, after which the order begins anew
                    hosted.restores += 1
                    self._begin()
        if command.name.has_reply:
            hosted.reply(command.position, result)

    def _look(self, hosted: Exchange, position: int, name: CommandName, argument: Any) -> None:
        """Carry out a command that only looks; its refusal is a reply and does not end the run."""
        try:
            with hosted.computing:
                result = carry_out(hosted.stage, name, argument)
            hosted.reply(position, result)
        except ConfigError as error:
            hosted.reply(position, None, refused=str(error))

    # -- reports --------------------------------------------------------------------------------

    def _marked(self) -> Any:
        """Return a mark on the device's timeline; None on the host, or if nothing is recorded."""
        return None if self._marks is None else self._marks.mark()

    def _record(
        self,
        kind: int,
        hosted: Exchange,
        index: int,
        version: int,
        start: int,
        begin: Any,
    ) -> None:
        """Write a span from `start` (``time.monotonic_ns``), and the mark `begin`, until now."""
        recorder, ledger = self._options.recorder, hosted.stage.parameters.ledger
        assert recorder is not None
        end, (arrived_ns, waited_for) = time.monotonic_ns(), self._arrived
        recorder.record(
            kind, hosted.address, index, version, len(ledger.kept), len(ledger.in_flight),
            waited_for, self._free_ns, arrived_ns, start, end, hosted.sent_bytes,
        )  # fmt: skip
        hosted.sent_bytes = 0
        self._free_ns = end
        if self._marks is not None:
            self._marks.note(begin, kind, hosted.address, index, version)

    def _spans_of(self, hosted: Exchange) -> dict[str, object]:
        """Return the spans of a stage that the ring still holds, and other facts for the trace."""
        recorder = self._options.recorder
        if recorder is None:
            return {}
        spans = recorder.spans()
        mine = np.ascontiguousarray(spans[spans["stage"] == hosted.address])
        return {
            "spans": torch.from_numpy(mine.view(np.uint8).copy()),
            "device_spans": self._device_spans(hosted.address),
            "dropped": recorder.dropped,
            "peak_memory_bytes": peak_memory_bytes(),
            "parameter_bytes": hosted.stage.parameters.nbytes,
        }

    def _device_spans(self, address: int) -> torch.Tensor:
        """Return the spans of a stage on its device as bytes; none on the host."""
        recorder = Recorder(0 if self._marks is None else self._marks.count)
        for done, start, end in [] if self._marks is None else self._marks.times():
            if done.stage == address:
                recorder.record(
                    done.kind, address, done.index, done.version, 0, 0,
                    NOBODY, start, 0, start, end, 0,
                )  # fmt: skip
        return torch.from_numpy(recorder.spans().view(np.uint8).copy())

    def _note(self, hosted: Exchange, action: Action | str) -> None:
        """Note the present action of a stage, for reports of errors and stalls."""
        self.doing.stage, self.doing.action = hosted.address, action
        self._inbox.recent.append(action)


def _is_for_the_order(item: Message) -> bool:
    """Whether an item of the feed is a micro-batch to train on, or the command to flush."""
    match item.payload:
        case Activation(head=Head(mode=Mode.TRAIN)) | Command(name=CommandName.FLUSH):
            return True
    return False
