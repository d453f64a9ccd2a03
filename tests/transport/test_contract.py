"""What every transport must do, asked of each."""

import socket
import threading

import pytest
import torch
from support.deadlines import LATEST_S
from support.encrypted import encrypted_pair
from support.messages import End, gradient

from pipedream_rt.errors import PeerLost
from pipedream_rt.messages.message import Gradient
from pipedream_rt.schedules import COORDINATOR
from pipedream_rt.serial.transport import MemoryTransport
from pipedream_rt.transport.group import Group
from pipedream_rt.transport.link import Connection
from pipedream_rt.transport.sockets import SocketTransport


class Together:
    """Three processes' transports over sockets, asked as if they were one."""

    def __init__(self):
        names, hosts = ("coordinator", "w0", "w1"), (0, 1, 1)
        groups = [
            Group(generation=1, rank=rank, names=names, hosts=hosts, key=b"k" * 32)
            for rank in range(3)
        ]
        self._group = groups[0]
        self._parts = [SocketTransport(group) for group in groups]
        links = [{}, {}, {}]
        for low, high in ((0, 1), (0, 2), (1, 2)):
            links[low][high], links[high][low] = self._connections()
        for part, own in zip(self._parts, links, strict=True):
            part.connect(own)

    @staticmethod
    def _connections():
        return map(Connection, socket.socketpair())

    def open(self, address, receive, lost):
        self._parts[self._group.rank_of(address)].open(address, receive, lost)

    def send(self, message):
        self._parts[self._group.rank_of(message.sender)].send(message)

    def close(self):
        for part in self._parts:
            part.close()


class Encrypted(Together):
    """The same over links that are encrypted."""

    _connections = staticmethod(encrypted_pair)


class Alone(Together):
    """The same, of one process, which sends to itself."""

    def __init__(self):
        group = Group(generation=1, rank=1, names=("c", "w"), hosts=(0, 0, 0), key=b"k" * 32)
        self._group = group
        self._parts = [None, SocketTransport(group)]
        self._parts[1].connect({})

    def open(self, address, receive, lost):
        self._parts[1].open(address, receive, lost)

    def close(self):
        self._parts[1].close()


MADE = {
    "memory": MemoryTransport,
    "sockets": Together,
    "encrypted": Encrypted,
    "to itself": Alone,
}


@pytest.fixture(params=MADE)
def transport(request):
    made = MADE[request.param]()
    yield made
    made.close()
    made.close()


def arrived(end, count):
    """The messages that arrive, by number."""
    found = (end.arrived.get(timeout=LATEST_S) for _ in range(count))
    return {message.number: message for message in found}


def test_every_message_arrives_unchanged(transport):
    ends = [End(transport, a) for a in (COORDINATOR, 0, 1)]
    for index in range(20):
        transport.send(gradient(index, torch.full((3,), float(index))))
    found = arrived(ends[2], 20)
    assert sorted(found) == list(range(20))
    for index, message in found.items():
        assert message.tensors[0].tolist() == [index] * 3
        assert (message.sender, message.to, message.generation) == (0, 1, 1)
        assert message.payload == Gradient(present=[True])
    assert ends[0].arrived.empty()
    assert ends[1].lost.empty()


def test_the_receiver_owns_its_tensors(transport):
    end, _ = End(transport, 1), End(transport, 0)
    sent = torch.zeros(4)
    transport.send(gradient(0, sent))
    tensor = end.arrived.get(timeout=LATEST_S).tensors[0]
    tensor += 1
    assert sent.tolist() == [0] * 4
    assert not tensor.requires_grad


def test_strides_and_dtypes_survive(transport):
    end, _ = End(transport, 1), End(transport, 0)
    image = torch.randn(2, 3, 4, 5)
    sent = [torch.arange(6.0).view(2, 3).t(), torch.ones(2, dtype=torch.bfloat16), torch.zeros(0),
            torch.ones(2).expand(3, 2), image.contiguous(memory_format=torch.channels_last),
            torch.tensor(3.0), torch.zeros(0, 4), torch.arange(40)[7:19],
            torch.tensor([True, False]), torch.ones(2, dtype=torch.complex128),
            torch.ones(3).expand(0, 3), torch.ones(2, dtype=torch.float8_e4m3fn)]  # fmt: skip
    transport.send(gradient(0, *sent))
    for a, b in zip(end.arrived.get(timeout=LATEST_S).tensors, sent, strict=True):
        assert a.stride() == b.stride()
        assert a.dtype == b.dtype
        assert torch.equal(a.float() if a.itemsize == 1 else a, b.float() if b.itemsize == 1 else b)


def test_a_view_that_means_something_else_than_its_memory_arrives_as_what_it_means(transport):
    end, _ = End(transport, 1), End(transport, 0)
    sent = [torch.tensor([1 + 2j]).conj(), torch.tensor([1 + 2j]).conj().imag,
            torch.arange(1000.0)[::100]]  # fmt: skip
    transport.send(gradient(0, *sent))
    for a, b in zip(end.arrived.get(timeout=LATEST_S).tensors, sent, strict=True):
        assert torch.equal(a, b)
        assert a.untyped_storage().nbytes() == b.numel() * b.element_size()


def test_many_large_messages_in_both_directions_at_once(transport):
    """More than the kernel's buffers hold, sent by two threads that never wait."""
    ends = [End(transport, a) for a in (0, 1)]
    large = torch.arange(300_000.0)

    def send(sender, to):
        for index in range(20):
            transport.send(gradient(index, large + index, sender=sender, to=to))

    threads = [threading.Thread(target=send, args=pair) for pair in ((0, 1), (1, 0))]
    for thread in threads:
        thread.start()
    for end in ends:
        found = arrived(end, 20)
        assert sorted(found) == list(range(20))
        assert all(torch.equal(each.tensors[0], large + index) for index, each in found.items())
    for thread in threads:
        thread.join()


def test_sending_to_an_address_that_is_not_open_tells_the_sender(transport):
    if getattr(transport, "_thread", None):
        pytest.skip("delivery is another thread's, the error is the same code as without")
    sender = End(transport, 0)
    transport.send(gradient(0, to=2))
    error = sender.lost.get(timeout=LATEST_S)
    assert isinstance(error, PeerLost)
    assert "gradient 0 from address 0 to address 2" in str(error)


def test_after_close_sending_does_nothing(transport):
    end, sender = End(transport, 1), End(transport, 0)
    transport.close()
    before = sender.lost.qsize()  # one process of several closes first, which the others notice
    transport.send(gradient(0))
    assert end.arrived.empty()
    assert sender.lost.qsize() == before
