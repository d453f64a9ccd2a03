"""Transports within one process; their contract is tested in ``tests/transport``."""

import random
import threading

import pytest
import torch
from support.messages import message

from pipedream_rt.errors import PeerLost
from pipedream_rt.messages.message import Reply
from pipedream_rt.serial.transport import DirectTransport, MemoryTransport, ShuffledTransport

KINDS = pytest.mark.parametrize("kind", [MemoryTransport, DirectTransport])


def opened(transport, *addresses):
    """What comes to each address, and which of them have heard of a loss."""
    came, lost = {}, {}
    for address in addresses:
        came[address], lost[address] = [], []
        transport.open(address, came[address].append, lost[address].append)
    return came, lost


def sent(number=0, to=1, *tensors):
    return message(Reply(structure=[]), to=to, sender=0, number=number, tensors=tensors)


@KINDS
def test_what_is_received_has_memory_of_its_own(kind):
    transport, value = kind(), torch.ones(2)
    came, _ = opened(transport, 0, 1)
    transport.send(sent(3, 1, value, value[1:]))
    value.zero_()
    (received,) = came[1]
    assert [tensor.tolist() for tensor in received.tensors] == [[1.0, 1.0], [1.0]]
    assert (received.key, received.payload) == (sent(3).key, sent(3).payload)


@KINDS
def test_the_sender_is_told_that_there_is_no_receiver(kind):
    transport = kind()
    came, lost = opened(transport, 0, 1)
    transport.send(sent(3, 2))
    (error,) = lost[0]
    assert isinstance(error, PeerLost)
    assert str(error).endswith("no receiver is registered at address 2")
    assert (came, lost[1], transport.receiver(2)) == ({0: [], 1: []}, [], None)


@KINDS
def test_after_the_end_nothing_is_delivered_and_nobody_is_told(kind):
    transport = kind()
    came, lost = opened(transport, 0, 1)
    transport.close()
    transport.send(sent(0, 1))
    transport.send(sent(0, 2))
    assert (came, lost) == ({0: [], 1: []}, {0: [], 1: []})


def shuffled(seed, count=40):
    transport = ShuffledTransport(random.Random(seed))
    came, _ = opened(transport, 0, 1)
    for number in range(count):
        transport.send(sent(number))
    assert came[1] == []
    while transport.pending:
        transport.deliver_one()
    return [each.number for each in came[1]]


def test_a_seed_decides_the_order_and_everything_arrives_some_of_it_twice():
    order = shuffled(3)
    assert set(order) == set(range(40))
    assert len(order) > 40
    assert order != sorted(order)
    assert order == shuffled(3)
    assert order != shuffled(4)


@pytest.mark.threads
def test_what_another_thread_sends_arrives_at_once():
    """As that of a written checkpoint, which may come when nobody delivers any more."""
    transport = ShuffledTransport(random.Random(0))
    came, _ = opened(transport, 0, 1)
    thread = threading.Thread(target=transport.send, args=(sent(5),))
    thread.start()
    thread.join()
    assert [each.number for each in came[1]] == [5]
    assert transport.pending == []
