"""What every transport must do, asked of each."""

import queue
from datetime import timedelta

import pytest
import torch

from pipedream_rt.deadline import Deadline
from pipedream_rt.errors import ConfigError, PeerLost
from pipedream_rt.messages.message import Gradient, Message
from pipedream_rt.schedules import COORDINATOR
from pipedream_rt.transport.memory import MemoryTransport
from pipedream_rt.transport.rpc import Directory, RpcGroup, RpcTransport

generations = iter(range(10_000, 20_000))


def rpc_transport():
    """A group of one: torch RPC calls itself through the same code as a peer."""
    group = RpcGroup(
        generation=next(generations),
        rank=0,
        names=("coordinator",),
        hosts=(0, 1, 2),
        interface="lo",
        timeout=timedelta(seconds=20),
        key=b"k" * 32,
    )
    found = {}
    directory = Directory(
        group.names, lambda address: found.update(coordinator=address), lambda: found
    )
    return group, RpcTransport(group), directory


def joined_rpc_transport():
    group, transport, directory = rpc_transport()
    transport.join(directory, Deadline(timedelta(seconds=20)))
    # The stages of this group of one live in the same process.
    object.__setattr__(group, "names", ("coordinator",) * 4)
    return transport


@pytest.fixture(params=["memory", "shuffled", "rpc"])
def transport(request):
    if request.param == "rpc":
        made = joined_rpc_transport()
    else:
        made = MemoryTransport(shuffle_seed=3 if request.param == "shuffled" else None)
    yield made
    made.close()
    made.close()


class End:
    """An address, with what arrived and what was lost."""

    def __init__(self, transport, address):
        self.arrived, self.lost = queue.SimpleQueue(), queue.SimpleQueue()
        transport.open(address, self.arrived.put, self.lost.put)


def message(index, *tensors, to=1, sender=0):
    payload = Gradient(present=[True] * len(tensors))
    return Message(
        to=to, sender=sender, index=index, generation=1, payload=payload, tensors=tensors
    )


def test_every_message_arrives_unchanged(transport):
    ends = [End(transport, a) for a in (COORDINATOR, 0, 1)]
    for index in range(20):
        transport.send(message(index, torch.full((3,), float(index))))
    found = {}
    while len(found) < 20:
        arrived = ends[2].arrived.get(timeout=20)
        found[arrived.index] = arrived
    for index, arrived in found.items():
        assert arrived.tensors[0].tolist() == [index] * 3
        assert (arrived.sender, arrived.to, arrived.generation) == (0, 1, 1)
        assert arrived.payload == Gradient(present=[True])
    assert ends[0].arrived.empty()
    assert ends[1].lost.empty()


def test_the_receiver_owns_its_tensors(transport):
    end, _ = End(transport, 1), End(transport, 0)
    sent = torch.zeros(4)
    transport.send(message(0, sent))
    arrived = end.arrived.get(timeout=20).tensors[0]
    arrived += 1
    assert sent.tolist() == [0] * 4
    assert not arrived.requires_grad


def test_strides_and_dtypes_survive(transport):
    end, _ = End(transport, 1), End(transport, 0)
    sent = [torch.arange(6.0).view(2, 3).t(), torch.ones(2, dtype=torch.bfloat16), torch.zeros(0),
            torch.ones(2).expand(3, 2)]  # fmt: skip
    transport.send(message(0, *sent))
    arrived = end.arrived.get(timeout=20).tensors
    for a, b in zip(arrived, sent, strict=True):
        assert a.stride() == b.stride()
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


def test_sending_to_an_address_that_is_not_open_tells_the_sender(transport):
    if getattr(transport, "_thread", None):
        pytest.skip("delivery is another thread's, the error is the same code as without")
    sender = End(transport, 0)
    transport.send(message(0, to=2))
    error = sender.lost.get(timeout=20)
    assert isinstance(error, PeerLost)
    assert "gradient 0 from stage 0 to stage 2" in str(error)


def test_after_close_sending_does_nothing(transport):
    end, sender = End(transport, 1), End(transport, 0)
    transport.close()
    transport.send(message(0))
    assert end.arrived.empty()
    assert sender.lost.empty()


def test_one_rpc_transport_in_a_process():
    _, first, _ = rpc_transport()
    try:
        with pytest.raises(ConfigError, match="has an open pipeline on worker processes already"):
            rpc_transport()
    finally:
        first.close()


def test_shuffled_delivery_shuffles():
    """Else the determinism tests would prove nothing."""
    orders = set()
    for seed in range(5):
        transport = MemoryTransport(shuffle_seed=seed)
        end, _ = End(transport, 1), End(transport, 0)
        for index in range(10):
            transport.send(message(index))
        order = []
        while set(order) != set(range(10)):
            order.append(end.arrived.get(timeout=20).index)
        transport.close()
        orders.add(tuple(dict.fromkeys(order)))
    assert len(orders) > 1
