"""The transport over links: a member speaks for its own addresses alone."""

import socket
from contextlib import suppress

import pytest
from support.deadlines import LATEST_S
from support.messages import End, gradient

from pipedream_rt.errors import PeerLost
from pipedream_rt.messages.wire import encode
from pipedream_rt.schedules import COORDINATOR
from pipedream_rt.transport.group import Group
from pipedream_rt.transport.link import Connection, Link
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


@pytest.mark.parametrize(
    ("sender", "to"), [(COORDINATOR, 0), (0, 0), (1, 1), (2, 2), (1, COORDINATOR)]
)
def test_a_member_speaks_for_no_address_of_another_and_to_none(member, sender, to):
    end, link = member
    link.send(0, encode(gradient(7, sender=sender, to=to)), [])
    with suppress(ConnectionError):  # the link may have ended already
        link.send(0, encode(gradient(8, sender=1, to=0)), [])
    error = end.lost.get(timeout=LATEST_S)
    assert isinstance(error, PeerLost)
    assert "came over the link from 'w1' to 'w0', and address" in str(error)
    assert end.arrived.empty()


@pytest.mark.parametrize("kind", [0, 1, 3, 253])
@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x93\x01\x02\x03", b"junk"], ids=bytes.hex)
def test_a_frame_that_is_no_message_ends_the_link_with_a_text(member, kind, data, caplog):
    end, link = member
    link.send(kind, data, [])
    error = end.lost.get(timeout=LATEST_S)
    assert isinstance(error, PeerLost)
    assert "bytes" in str(error)
    assert "by an error of its own" not in caplog.text


def test_a_stream_of_torch_rpc_is_refused_where_the_group_has_none(member):
    """Kept for somebody who never comes, its parts would fill the memory."""
    end, link = member
    link.send(2, b"part", [])
    error = end.lost.get(timeout=LATEST_S)
    assert isinstance(error, PeerLost)
    assert "'w1' sends a stream of torch RPC, which this group does without" in str(error)
