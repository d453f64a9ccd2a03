"""The transport over links: a member speaks for its own addresses alone."""

import socket
from contextlib import closing, suppress

import pytest
from support.deadlines import LATEST_S
from support.messages import End, gradient, message

from pipedream_rt.errors import PeerLost
from pipedream_rt.messages.message import OfRule
from pipedream_rt.messages.wire import encode
from pipedream_rt.schedules import COORDINATOR, EdgeKind
from pipedream_rt.transport.group import Group
from pipedream_rt.transport.link import Connection, Link
from pipedream_rt.transport.links import Links
from pipedream_rt.transport.sockets import SocketTransport


@pytest.fixture
def member():
    """Member 1, which hosts stage 0, with a link of member 2, which hosts stages 1 and 2."""
    group = Group(generation=1, rank=1, names=("c", "w0", "w1"), hosts=(0, 1, 1), key=b"k" * 32)
    transport = SocketTransport(group)
    end = End(transport, 0)
    ends = socket.socketpair()
    link = Link(Connection(ends[1]))
    transport.connect({2: Connection(ends[0])})
    yield end, link
    transport.close()
    link.close()


def test_memory_is_shared_with_workers_that_drop_what_they_get_and_not_with_the_coordinator(
    monkeypatch,
):
    passed = []

    def send(links, rank, kind, data, tensors, passing):
        passed.append((rank, passing))

    monkeypatch.setattr(Links, "send", send)
    group = Group(generation=1, rank=2, names=("c", "w0", "w1"), hosts=(0, 1), key=b"k" * 32)
    with closing(SocketTransport(group)) as transport:
        transport.connect({})
        for to in (COORDINATOR, 0):
            transport.send(gradient(7, sender=1, to=to))
        weight = message(OfRule(values=[]), kind=EdgeKind.WEIGHT, sender=1, to=0, number=7)
        transport.send(weight)  # which stays with the receiver
    assert passed == [(0, False), (1, True), (1, False)]


OF_OTHERS = [(COORDINATOR, 0), (0, 0), (1, 1), (2, 2), (1, COORDINATOR)]
"""Senders and receivers for whom member 2 may not speak to member 1."""

JUNK = [b"", b"\xc1", b"\x93\x01\x02\x03", b"junk"]


@pytest.mark.parametrize(
    ("kind", "data", "words"),
    [
        *(
            (0, encode(gradient(7, sender=sender, to=to)), "from 'w1' to 'w0', and address")
            for sender, to in OF_OTHERS
        ),
        *((kind, data, "bytes") for kind in (0, 1, 3, 253) for data in JUNK),
        # Kept for somebody who never comes, its parts would fill the memory.
        (2, b"part", "'w1' sends a stream of torch RPC, which this group does without"),
    ],
)
def test_what_a_member_may_not_send_ends_its_link_with_a_text(member, kind, data, words, caplog):
    """It speaks for no address of another, and to none; nothing that comes later is taken."""
    end, link = member
    link.send(kind, data, [])
    with suppress(ConnectionError):  # the link may have ended already
        link.send(0, encode(gradient(8, sender=1, to=0)), [])
    error = end.lost.get(timeout=LATEST_S)
    assert isinstance(error, PeerLost)
    assert words in str(error)
    assert end.arrived.empty()
    assert "by an error of its own" not in caplog.text
