"""The loop of one worker on the calling thread, by its inbox and a list of what it sends."""

import dataclasses
import random
from datetime import timedelta

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pipedream_rt.errors import PipelineClosed
from pipedream_rt.messages.head import LossTask, Mode
from pipedream_rt.messages.inbox import Inbox
from pipedream_rt.messages.message import (
    Activation,
    Command,
    CommandName,
    Gradient,
    Message,
    Target,
)
from pipedream_rt.messages.tree import flat_copy, flatten, own, unflatten
from pipedream_rt.schedules import COORDINATOR, plan_for
from pipedream_rt.stage.loop import Loop, LoopOptions

from . import messages
from .stages import a_stage

ONE = plan_for("async-1f1b", num_stages=1)
TWO = plan_for("async-1f1b", num_stages=2)
THREE = plan_for("async-1f1b", num_stages=3)

ANY_ORDER = pytest.mark.parametrize("seed", [None, 1, 2, 3])
"""Of arrival: as it was sent, or at random."""


class Worker:
    """A worker whose stages have one linear layer each, or what it is given.

    Attributes:
        sent: The messages that its stages have sent. Those for stages of its own arrive at once.
    """

    def __init__(
        self, plan, worker=0, layers=None, loss_fn=F.mse_loss, rate=0.1, generation=0, **options
    ):
        self.plan, self.sent, self.generation = plan, [], generation
        self.inbox = Inbox("the worker", generation)
        self.stages = {}
        for index in plan.stages_of(worker):
            torch.manual_seed(index)
            self.stages[index] = a_stage(
                layers[index] if layers else {str(index): nn.Linear(2, 2)}, plan, index,
                loss_fn=loss_fn if index in plan.exits else None,
                optimizer=(torch.optim.SGD, {"lr": rate}),
            )  # fmt: skip
        options = LoopOptions(**{"timeout": timedelta(0), **options})
        self.loop = Loop(list(self.stages.values()), worker, self.inbox, self._send, options)

    def _send(self, key, payload, tensors):
        message = Message(key=key, generation=self.generation, payload=payload, tensors=tensors)
        self.sent.append(message)
        if message.to in self.stages:
            copies = tuple(own(t, copy=True) for t in tensors)
            # It arrives, though the inbox was told already what comes after the last message.
            reason, self.inbox._reason = self.inbox._reason, None
            assert self.inbox.put(dataclasses.replace(message, tensors=copies))
            self.inbox._reason = reason

    def put(self, *messages, seed=None):
        """Let messages arrive, with a seed in random order."""
        arriving = list(messages)
        if seed is not None:
            random.Random(seed).shuffle(arriving)
        for message in arriving:
            assert self.inbox.put(message)
        return self

    def feed(self, drawn, seed=None):
        """Let messages arrive that are drawn, as ``activation 0-3, infer 0@4, 2:flush 5``.

        Of each: the stage, if it is not the worker's first; what it is; the number, or the numbers
        from one to another; and the position, if it is not the number.
        """
        first = min(self.stages)
        made = [message for each in drawn.split(", ") for message in drawn_of(each, first)]
        return self.put(*made, seed=seed)

    def run(self):
        """Do all that can be done with what has arrived; return what was sent, as one text."""
        end = PipelineClosed("the end")
        self.inbox.close(end)
        with pytest.raises(PipelineClosed) as e:
            self.inbox.follow(self.loop.run())
        assert e.value is end
        self.loop.close()
        assert not self.inbox._waiting, "came, and was never needed"
        return ", ".join(self.lines())

    def stops_with(self, error, match=None):
        """Require that it stops with an error, and return that."""
        self.inbox.close(PipelineClosed("the end"))
        with pytest.raises(error, match=match) as e:
            self.inbox.follow(self.loop.run())
        return e.value

    def lines(self):
        return [line(message) for message in self.sent]

    def state(self):
        return {k: t for s in self.stages.values() for k, t in s.module.state_dict().items()}


def line(message):
    """As ``gradient 7 2>1``: kind, number of its key, ends; the coordinator is a star."""
    edge, number, _ = message.key
    return f"{edge.kind.value} {number} {edge.source}>{edge.target}".replace("-1", "*")


# -- what arrives -----------------------------------------------------------------------------


def of(payload, to, number, tensors=(), sender=COORDINATOR):
    return messages.message(payload, to=to, sender=sender, number=number, tensors=tensors)


def rows(number=0):
    return torch.randn(3, 2, generator=torch.Generator().manual_seed(number))


def activation(
    to, m, *, position=None, turn=None, sender=None, mode=Mode.TRAIN, empty=False, trail=()
):
    """From the producer of a chain, at the position and the turn of its number."""
    position = m if position is None else position
    sender = to - 1 if sender is None else sender
    structure, tensors = flatten(None if empty else rows(position))
    turn = position if turn is None else turn
    payload = Activation(
        head=messages.head(m, position=position, mode=mode, empty=empty),
        turns=[turn] * 4,
        structure=structure,
        requires_grad=[sender != COORDINATOR] * len(tensors),
        trail=list(trail),
    )
    return of(payload, to, turn, tuple(tensors), sender)


def target(to, turn, share=1.0, position=None):
    structure, tensors = flatten(rows((turn if position is None else position) + 100))
    return of(Target(structure=structure, task=LossTask(share=share)), to, turn, tuple(tensors))


def gradient(to, position, sender=None, present=True):
    tensors = (rows(position + 200),) if present else ()
    return of(
        Gradient(present=[present]), to, position, tensors, to + 1 if sender is None else sender
    )


def command(to, position, name, argument=None, turn=None):
    structure, tensors, _ = flat_copy(argument)
    payload = Command(position=position, name=name, structure=structure)
    return of(payload, to, position if turn is None else turn, tensors)


def flush(to, position, turn=None):
    return command(to, position, CommandName.FLUSH, turn=turn)


DRAWN = {
    "activation": lambda to, m, position: activation(to, m, position=position),
    "empty": lambda to, m, position: activation(to, m, position=position, empty=True),
    "evaluate": lambda to, m, p: activation(to, m, position=p, mode=Mode.EVALUATE),
    "infer": lambda to, m, p: activation(to, m, position=p, mode=Mode.INFER),
    "target": lambda to, m, position: target(to, position),
    "gradient": lambda to, m, position: gradient(to, position),
    "state": lambda to, m, position: command(to, position, CommandName.STATE),
    "trace": lambda to, m, position: command(to, position, CommandName.TRACE),
    "flush": lambda to, m, position: flush(to, position),
}


def drawn_of(text, stage):
    """The messages of a text as ``2:infer 0-1@4``, to a stage if it names none."""
    to, _, rest = text.rpartition(":")
    kind, numbers = rest.split(" ")
    numbers, _, position = numbers.partition("@")
    first, _, last = numbers.partition("-")
    for m in range(int(first), int(last or first) + 1):
        yield DRAWN[kind](int(to or stage), m, int(position or first) + m - int(first))


def replied(worker, position):
    """What was replied to the command at a position."""
    (message,) = [m for m in worker.sent if line(m).startswith(f"reply {position} ")]
    return unflatten(message.payload.structure, message.tensors)
