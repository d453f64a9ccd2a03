"""What leaves an accelerator, without one: events are played."""

import threading
from functools import partial

import pytest
import torch
from support.deadlines import LATEST_S

from pipedream_rt.devices import DeferredScalar
from pipedream_rt.devices.accelerator import AtOnce, ByThread, Leaving
from pipedream_rt.messages.message import Key, Loss, Ready
from pipedream_rt.schedules import COORDINATOR, Edge, EdgeKind

pytestmark = pytest.mark.threads


class Copied:
    """An event that comes when a test says so."""

    def __init__(self):
        self.came = threading.Event()

    def synchronize(self):
        assert self.came.wait(LATEST_S)


def leaving(sent, failed, index, payload=None, tensors=(), copied=None):
    def send(key, payload, tensors):
        sent.append((key, payload, tensors))

    key = Key(Edge(EdgeKind.LOSS, 3, COORDINATOR), index)
    return Leaving(send, failed.append, key, payload or Ready(), tensors, copied)


def late(check=lambda number: None):
    return Loss(loss=DeferredScalar(torch.zeros(()), check), trail=[])


def refuse(name, number):
    raise ValueError(f"{name}: {number}")


def test_messages_leave_in_order_once_their_copies_are_there():
    sent, failed, copied = [], [], Copied()
    out = ByThread("w-out")
    out.put(leaving(sent, failed, 0, copied=copied))
    out.put(leaving(sent, failed, 1))
    assert sent == []
    copied.came.set()
    out.close()
    assert [key.number for key, _, _ in sent] == [0, 1]
    assert failed == []


@pytest.mark.parametrize("make", [AtOnce, partial(ByThread, "w-out")])
def test_a_late_loss_leaves_as_a_number(make):
    sent, seen = [], []
    out = make()
    out.put(leaving(sent, [], 4, late(seen.append), (torch.ones(2), torch.tensor(0.5))))
    out.close()
    ((key, payload, tensors),) = sent
    assert (key.number, payload.loss, seen) == (4, 0.5, [0.5])
    assert len(tensors) == 1


def test_what_follows_a_loss_that_is_refused_does_not_leave():
    sent, failed = [], []
    out = ByThread("w-out")
    out.put(leaving(sent, failed, 0))
    out.put(leaving(sent, failed, 1, late(partial(refuse, "one")), (torch.tensor(0.5),)))
    out.put(leaving(sent, failed, 2, late(partial(refuse, "two")), (torch.tensor(0.5),)))
    out.put(leaving(sent, failed, 3))
    out.close()
    assert [key.number for key, _, _ in sent] == [0]
    assert [str(error) for error in failed] == ["one: 0.5"]


def test_at_once_a_refusal_is_raised():
    with pytest.raises(ValueError, match=r"one: 0\.5"):
        AtOnce().put(leaving([], [], 1, late(partial(refuse, "one")), (torch.tensor(0.5),)))
