"""The loop of a worker: takes the next action from the order, waits for its message, has it done.

One thread, named ``worker-<index>`` or ``stage-<index>``, runs this and owns all that changes: the
stages of the worker with their weights, versions, optimizers, and what is in flight. Other threads
only put messages into the inbox.

Which action is next is a matter of the order alone. What does not train (evaluation, inference,
commands) comes by its position in the feed, the same place on every stage.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta

import numpy as np
import torch

from pipedream_rt.deadline import Deadline
from pipedream_rt.errors import ScheduleError
from pipedream_rt.messages.inbox import Inbox
from pipedream_rt.messages.message import (
    Channel,
    Command,
    CommandName,
    Key,
    Message,
    MicroBatch,
    Mode,
)
from pipedream_rt.observe.spans import NOBODY, Recorder
from pipedream_rt.observe.trace import CODES, DRAIN
from pipedream_rt.schedules import Action, Kind, Schedule
from pipedream_rt.schedules.actions import ENDS, SENDS_BACK, until
from pipedream_rt.stage.stage import Stage, peak_memory_bytes

_PASS, _COMMAND = ord("E"), ord("C")


class Loop:
    """Drives the stages of one worker by their order and their inbox alone.

    Args:
        stages: Of this worker, in the order of the model.
        schedule: Whose order is followed.
        worker: Index.
        inbox: Where the messages for all these stages arrive.
        timeout: For messages that are sure to come.
        recorder: Where spans are written; None for no trace.
        announce: Told of an action before it is done,
        announced: if it is on a micro-batch with a lower number.

    Attributes:
        current: The stage that acts, for an error report.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        schedule: Schedule,
        worker: int,
        inbox: Inbox,
        timeout: timedelta,
        recorder: Recorder | None = None,
        announce: Callable[[str], None] = lambda action: None,
        announced: int = 0,
    ) -> None:
        """Nothing runs yet."""
        self._stages = {stage.index: stage for stage in stages}
        self.current = stages[0]
        self._schedule = schedule
        self._worker = worker
        self._inbox = inbox
        self._timeout = timeout
        self._recorder = recorder
        self._announce = announce
        self._announced = announced
        self._free_ns = time.monotonic_ns()

    def run(self) -> None:
        """Do what the order says until the inbox is closed; never returns otherwise.

        Raises:
            BaseException: The reason with which the inbox was closed, or an error of an action.
        """
        while True:
            self._run_until_flush()

    def _run_until_flush(self) -> None:
        """Follow the order from where nothing is in flight to where nothing is again."""
        start = self.current.next_forward
        order = self._schedule.order(self._worker, start)
        for action in order:
            stage = self.current = self._stage_of(action)
            if action.kind is not Kind.FORWARD:
                self._do(stage, action)
                continue
            item = self._next_micro_batch(stage)
            if isinstance(item.payload, Command):
                break
            self._do(stage, action, item)
        else:  # a replay ends
            stage = next(iter(self._stages.values()))
            item = self._next_micro_batch(stage)
            if not isinstance(item.payload, Command):
                raise ScheduleError(
                    f"the schedule {self._schedule.name} ends with micro-batch "
                    f"{stage.next_forward - 1}, there are more"
                )
        stop, per_update = stage.next_forward, self._schedule.per_update
        left = sum(
            stop - each.ended + stop // per_update - each.parameters.ledger.newest
            for each in self._stages.values()
        )
        for action in until(order, stop, per_update, left):
            self.current = self._stage_of(action)
            self._do(self.current, action)
        self._end_flush(stage, item)
        for other in self._stages.values():
            if other is not stage:
                self._end_flush(other, self._next_micro_batch(other))

    def _end_flush(self, stage: Stage, item: Message) -> None:
        """Say that nothing is in flight on a stage."""
        stage.reply(item.index, None)
        if self._recorder is not None:
            now = time.monotonic_ns()
            self._record(DRAIN, stage, item.index, 0, item.sender, self._inbox.arrived_ns, now)

    def _stage_of(self, action: Action) -> Stage:
        """The stage that an action is of."""
        return self._stages[self._worker if action.stage is None else action.stage]

    def _next_micro_batch(self, stage: Stage) -> Message:
        """Take position after position of a feed: serve what is no training, return what is.

        What does not train is served for the other stages of this worker too: it may have to pass
        through all of them before more is fed. Its order across stages changes nothing.

        Returns:
            The next micro-batch to train on, or the command to flush.
        """
        while True:
            # No deadline: a script may pause between two mini-batches for as long as it likes.
            # The control connection notices a dead coordinator and closes the inbox.
            item = self._inbox.take(
                _feed(stage),
                Deadline(None),
                also=(_feed(other) for other in self._stages.values() if other is not stage),
                wanted=lambda message: not _trains(message),
            )
            taker = self.current = self._stages[item.to]
            taker.position += 1
            if _trains(item):
                return item
            self._serve(taker, item)
            self.current = stage

    def _serve(self, stage: Stage, item: Message) -> None:
        """Do what is no training."""
        arrived, asked = self._inbox.arrived_ns, time.monotonic_ns()
        held_up = stage.held_up_ns
        match item.payload:
            case MicroBatch() as feed:
                self._note(stage, f"{feed.mode.value} {item.index}")
                target = None
                if feed.mode is Mode.EVALUATE and stage.is_last:
                    target = self._take(Channel.TARGET, item.index, stage)
                stage.pass_through(item, feed, target)
            case Command(name=CommandName.TRACE):
                stage.reply(item.index, self._spans_of(stage))
            case Command() as command:
                self._note(stage, command.name.value)
                stage.obey(item, command)
            case other:
                raise ScheduleError(f"stage {stage.index}: {other!r} in the feed")
        if self._recorder is not None:
            kind = _COMMAND if isinstance(item.payload, Command) else _PASS
            version = stage.parameters.ledger.newest
            start = asked + stage.held_up_ns - held_up
            self._record(kind, stage, item.index, version, item.sender, arrived, start)

    def _do(self, stage: Stage, action: Action, item: Message | None = None) -> None:
        """Do one action, once its message is there.

        Args:
            stage: Which does it.
            action: What.
            item: The input of a forward, if it is taken already.
        """
        self._note(stage, str(action))
        kind, m, _ = action
        arrived, waited_for, target = 0, NOBODY, None
        if kind is Kind.FORWARD:
            item = item or self._next_micro_batch(stage)
            arrived, waited_for = self._inbox.arrived_ns, item.sender
            if stage.is_last and isinstance(item.payload, MicroBatch) and not item.payload.empty:
                target = self._take(Channel.TARGET, item.index, stage)
        elif kind in SENDS_BACK and not stage.is_last:
            item = self._take(Channel.GRADIENT, stage.position_of(m), stage)
            arrived, waited_for = self._inbox.arrived_ns, item.sender
        # Gradients are summed in the order of the micro-batches: a written schedule was checked for
        # a while only.
        due = stage.parameters.ledger.newest if kind is Kind.STEP else stage.ended
        if (kind is Kind.STEP or kind in ENDS) and m != due:
            raise ScheduleError(f"stage {stage.index}: {action} comes before {kind.value}{due}")
        if m < self._announced:
            self._announce(f"{stage.index}:{kind.value}{m}")
        asked, held_up = time.monotonic_ns(), stage.held_up_ns
        version = 0
        match kind:
            case Kind.FORWARD:
                assert item is not None
                version = stage.forward(m, item, target)
            case Kind.BACKWARD:
                version = stage.backward(m, item)
            case Kind.INPUT:
                version = stage.backward_input(m, item)
            case Kind.WEIGHT:
                version = stage.backward_weight(m)
            case Kind.STEP:
                version = stage.step(m)
        if m < self._announced:
            self._announce("")  # it went well
        if self._recorder is not None:
            start = asked + stage.held_up_ns - held_up
            self._record(CODES[kind], stage, m, version, waited_for, arrived, start)

    def _record(
        self,
        kind: int,
        stage: Stage,
        index: int,
        version: int,
        waited_for: int,
        arrived: int,
        start: int,
    ) -> None:
        """Write the span that ends now."""
        assert self._recorder is not None
        end = time.monotonic_ns()
        ledger = stage.parameters.ledger
        self._recorder.record(
            kind, stage.index, index, version, len(ledger.kept), len(ledger.in_flight),
            waited_for, self._free_ns, arrived, start, end, stage.sent_bytes,
        )  # fmt: skip
        stage.sent_bytes = 0
        self._free_ns = end

    def _spans_of(self, stage: Stage) -> dict[str, object]:
        """What was recorded of a stage; the oldest spans of the worker may be overwritten."""
        recorder = self._recorder
        if recorder is None:
            return {}
        spans = recorder.spans()
        mine = np.ascontiguousarray(spans[spans["stage"] == stage.index])
        return {
            "spans": torch.from_numpy(mine.view(np.uint8).copy()),
            "dropped": recorder.dropped,
            "peak_memory_bytes": peak_memory_bytes(),
            "parameter_bytes": stage.parameters.nbytes,
        }

    def _take(self, channel: Channel, number: int, stage: Stage) -> Message:
        """Wait for a message that is sure to come."""
        return self._inbox.take(Key(channel, number, stage.index), Deadline(self._timeout))

    def _note(self, stage: Stage, action: str) -> None:
        """Remember what a stage does, for a report."""
        stage.action = action
        self._inbox.recent.append(action)


def _feed(stage: Stage) -> Key:
    """Where the next position of a stage's feed waits."""
    return Key(Channel.FEED, stage.position, stage.index)


def _trains(item: Message) -> bool:
    """Whether an item of the feed is a micro-batch to train on, or ends a run of them."""
    match item.payload:
        case MicroBatch(mode=Mode.TRAIN) | Command(name=CommandName.FLUSH):
            return True
    return False
