"""The meeting of members, with strangers at every callee, and members who come to a wrong one."""

import asyncio
import itertools
import os
import random
import select
import socket
import tempfile
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
import torch
from support.callers import soon
from support.deadlines import LATEST_S
from support.encrypted import OTHER, SECRET
from support.loops import Noted, in_event_loop, run
from support.ports import free_port

from pipedream_rt.cluster import peer_links as module
from pipedream_rt.cluster import reception
from pipedream_rt.cluster.environment import private_folder
from pipedream_rt.cluster.peer_links import PeerLinks
from pipedream_rt.cluster.peer_listeners import PeerAddress, listening_at, listening_for_peers
from pipedream_rt.cluster.records import packed
from pipedream_rt.cluster.stream import Stream
from pipedream_rt.errors import RendezvousTimeout, TransportError
from pipedream_rt.transport.group import Group
from pipedream_rt.transport.link import Link
from pipedream_rt.transport.tls import TlsEngine


@pytest.fixture(autouse=True)
def nothing_left(monkeypatch):
    """No descriptor stays open, and no path stays in the folder of the Unix sockets."""
    monkeypatch.setattr(module, "_PAUSE_S", 0.01)
    before = set(os.listdir("/proc/self/fd"))
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield
        assert list(private_folder().iterdir()) == []
    assert set(os.listdir("/proc/self/fd")) == before


@pytest.fixture
def stack():
    with ExitStack() as opened:
        yield opened


FAR, NEAR, BOTH = "far", "near", "both"
ways = pytest.mark.parametrize("way", [FAR, NEAR])


class Members:
    """Some members with their listeners, whose meetings run in one event loop."""

    def __init__(self, stack, count, way=FAR, host="127.0.0.1"):
        self.count, self.way = count, way
        self.listeners = [
            stack.enter_context(listening_for_peers(None if way == NEAR else host))
            for _ in range(count)
        ]
        self.addresses = {rank: listeners.address for rank, listeners in enumerate(self.listeners)}
        if way == FAR:
            for rank in self.addresses:
                self.hide_path(rank)
        self._met = []
        stack.callback(self.close)

    def hide_path(self, rank):
        """Have a member called by TCP alone."""
        self.addresses[rank] = self.addresses[rank]._replace(machine="", path="")

    def path_of(self, rank):
        """Where a member is called within the machine."""
        return socket.AF_UNIX, self.listeners[rank].address.path

    def links(self, rank, *, secret=SECRET, addresses=None, **of_group):
        names = tuple(f"m{number}" for number in range(self.count))
        group, addresses = (
            group_of(rank, names, **of_group),
            {**self.addresses, **(addresses or {})},
        )
        made = PeerLinks(group, secret, self.listeners[rank], addresses, soon())
        made.problems, made._met = Noted(), Noted()
        self._met.append(made._met)
        return made

    def at(self, rank):
        """Where a member is called: family and address."""
        if self.way == NEAR:
            return self.path_of(rank)
        return socket.AF_INET, self.addresses[rank][:2]

    async def meet(self):
        """Let all meet, check that they have, and return their connections."""
        return await self.all_have_met(*map(self.links, range(self.count)))

    async def all_have_met(self, *meetings):
        """Let these meet or go on with it, and check that all have met; return the connections."""
        met = await asyncio.gather(*(m.meet() if isinstance(m, PeerLinks) else m for m in meetings))
        self.check(met)
        return met

    def check(self, met):
        """Fail unless every two have one connection, over which frames go both ways."""
        for rank, own in enumerate(met):
            assert set(own) == set(range(self.count)) - {rank}
        for low, high in itertools.combinations(range(self.count), 2):
            ends = met[low][high], met[high][low]
            assert ends[0].carries_descriptors is ends[1].carries_descriptors
            for end in ends:
                nearby = end.socket.family == socket.AF_UNIX
                assert end.carries_descriptors is nearby is (end.engine is None)
            talk(*ends)

    def close(self):
        for met in self._met:
            for each in met.values():
                each.socket.close()


def talk(*ends):
    """Fail unless frames go both ways over the two ends of a connection."""
    links = [Link(end) for end in ends]
    for sender, receiver in (links, links[::-1]):
        came = []
        assert sender.send(5, b"words", [torch.arange(100.0)])
        poll = select.poll()
        poll.register(receiver, select.POLLIN)
        while not came:
            assert poll.poll(1000 * LATEST_S)
            receiver.receive(came.append)
        assert (came[0].kind, came[0].data) == (5, b"words")
        assert torch.equal(came[0].tensors[0], torch.arange(100.0))
    for link in links:
        link.close()


async def abandoned(*meetings):
    """End meetings that have not ended."""
    assert not any(meeting.done() for meeting in meetings)
    while meetings:
        for meeting in meetings:
            meeting.cancel()
        _, meetings = await asyncio.wait(meetings, timeout=0.1)


def begun(*links):
    return [asyncio.ensure_future(each.meet()) for each in links]


async def unmet(way, meeting):
    """End the meeting of a caller that was sent away: a port is called again, and a path is not."""
    if way == FAR:
        await abandoned(meeting)
    else:
        with pytest.raises(RendezvousTimeout, match="closed the connection"):
            await meeting


def let_time_be_over(links):
    links._deadline._at = time.monotonic()
    links._changed.set()


def group_of(rank, names=(), generation=1, key=b"of this life"):
    return Group(generation=generation, rank=rank, names=names, hosts=(), key=key)


def link_record(sender, recipient, *, secret=SECRET, generation=1, key=b"of this life", **more):
    return {
        "type": "link", "job": secret.job, "group": group_of(sender, key=key).tag,
        "generation": generation, "sender": sender, "recipient": recipient, **more,
    }  # fmt: skip


async def called(address, secret=SECRET):
    """A connection to a callee, of somebody who knows a secret of a job."""
    connection = socket.socket(address[0])
    connection.connect(address[1])
    stream = Stream(connection, "the callee")
    if address[0] != socket.AF_UNIX:
        await stream.encrypt(secret.tls(called=False), called=False)
    return stream


async def closes(stream):
    """Fail unless the other end closes a connection, and close it here."""
    with pytest.raises(TransportError, match="closed the connection"):
        await asyncio.wait_for(stream.read(), LATEST_S)
    stream.close()


# -- members that meet -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "way", "host"),
    [(5, FAR, "127.0.0.1"), (3, FAR, "::1"), (4, NEAR, None), (1, FAR, "127.0.0.1")],
)
def test_every_two_members_meet(stack, count, way, host):
    """Those of one machine need no port, and one alone meets nobody."""
    run(Members(stack, count, way, host).meet())


@in_event_loop
async def test_members_that_have_a_unix_socket_meet_there(stack):
    members, nearby = Members(stack, 5, BOTH), (1, 3, 4)
    for rank in set(range(5)) - set(nearby):
        members.hide_path(rank)
    for rank, own in enumerate(await members.meet()):
        for other, each in own.items():
            # Who dials knows of its own path, and sees whether the other one has one.
            assert each.carries_descriptors is (min(rank, other) in nearby)


@pytest.mark.parametrize(
    "why", ["closed", "gone", "no folder", "silent", "of another user", "deaf", "elsewhere"]
)
def test_where_a_unix_socket_cannot_be_used_there_is_the_port(stack, monkeypatch, why):
    members = Members(stack, 3, BOTH)
    listener, tcp = members.listeners[0].sockets
    path = members.addresses[0].path
    members.listeners[0] = members.listeners[0]._replace(sockets=(tcp,))
    match why:
        case "closed":
            listener.close()
        case "gone":
            os.unlink(path)
        case "no folder":
            members.addresses[0] = members.addresses[0]._replace(path=path + "/none/at/all")
        case "silent":  # it is in the kernel's queue, and nobody answers
            monkeypatch.setattr(module, "_ATTEMPT_S", 0.5)
        case "of another user":
            is_same_user = module.is_same_user
            monkeypatch.setattr(
                module, "is_same_user", lambda c: c.getpeername() != path and is_same_user(c)
            )
        case "deaf":
            monkeypatch.setattr(module, "_ATTEMPT_S", 0.5)
            listener.listen(0)
            for _ in range(5):
                filler = stack.enter_context(socket.socket(socket.AF_UNIX))
                filler.setblocking(False)
                with suppress(BlockingIOError):
                    filler.connect(path)
        case "elsewhere":  # in another network namespace, whose processes would get in here
            members.listeners[0] = members.listeners[0]._replace(sockets=(listener, tcp))
            members.addresses[0] = members.addresses[0]._replace(machine="elsewhere")

    async def main():
        met = await members.meet()
        assert [met[0][1].carries_descriptors, met[0][2].carries_descriptors] == [False, False]
        assert met[0][1].engine is not None
        assert met[1][2].carries_descriptors

    run(main())


@in_event_loop
async def test_members_reach_each_other_as_far_as_they_can(stack):
    """As `pipedream-rt doctor` has it."""
    members = Members(stack, 3)
    nowhere = PeerAddress("127.0.0.1", free_port())
    here, there = members.links(1, addresses={0: nowhere}), members.links(2)
    reached = asyncio.ensure_future(here.reach())
    meeting = asyncio.ensure_future(there.meet())
    await there._met(1)
    assert set(await here._met(2) and here._met) == {2}
    assert await here.problems(0)
    await abandoned(meeting)
    assert set(await asyncio.wait_for(reached, LATEST_S)) == {2}


# -- members that call a wrong one -----------------------------------------------------------------


@ways
@in_event_loop
async def test_a_caller_that_is_led_to_another_member_is_dropped(stack, way):
    """Whoever answers has the certificate of the job, and is the wrong one; no link comes of it."""
    members = Members(stack, 3, way)
    here = members.links(1)
    caller = members.links(2, addresses={0: members.addresses[1]})
    meetings = begun(here, caller)
    assert "closed the connection" in await caller.problems(0)
    await caller._met(1)
    await here._met(2)
    assert set(caller._met) == {1}
    assert set(here._met) == {2}
    await unmet(way, meetings[1])
    await abandoned(meetings[0])


@pytest.mark.parametrize(
    "answer",
    [
        link_record(1, 2),
        link_record(2, 0),
        link_record(0, 2, generation=2),
        link_record(0, 2, secret=OTHER),
        link_record(0, 2, key=b"of an earlier life"),
        link_record(0, 2, more=1),
        {"type": "hello", "version": 14},
    ],
    ids=["member", "direction", "generation", "job", "life", "more", "hello"],
)
@in_event_loop
async def test_a_caller_takes_nothing_else_for_an_answer(stack, answer):
    members = Members(stack, 3, NEAR)
    caller = members.links(2)
    (meeting,) = begun(caller)
    listener = members.listeners[0].sockets[-1]
    listener.setblocking(False)
    connection, _ = await asyncio.get_running_loop().sock_accept(listener)
    stream = Stream(connection, "the caller")
    assert await stream.read() == link_record(2, 0)
    stream.send(answer)
    with pytest.raises(RendezvousTimeout, match="who answers there is not 'm0' of this generation"):
        await meeting
    await closes(stream)
    assert caller._met == {}


@pytest.mark.parametrize(
    "record",
    [
        link_record(2, 0),
        link_record(0, 1),
        link_record(1, 1),
        link_record(9, 1),
        link_record(2, 1, generation=0),
        link_record(2, 1, generation=2),
        link_record(2, 1, secret=OTHER),
        link_record(2, 1, job=""),
        link_record(2, 1, more=1),
        link_record(2, 1, type="shut"),
        {"type": "hello", "version": 14},
        {"type": "hello", "version": 14, "sender": "2", "recipient": []},
        {"type": "stop", "sender": None},
    ],
    ids=str,
)
@in_event_loop
async def test_another_record_than_the_link_that_is_meant_opens_no_door(stack, record):
    """Of a member that was led here, or that is not to call; of another generation, or job."""
    members = Members(stack, 3, NEAR)
    callee = members.links(1)
    (meeting,) = begun(callee)
    stream = await called(members.at(1))
    stream.send(record)
    await closes(stream)
    assert callee._met == {}
    await members.all_have_met(members.links(0), meeting, members.links(2))


@pytest.mark.parametrize(
    "as_it_was",
    [{"generation": 0}, {"key": b"of an earlier life"}, {"secret": OTHER}],
    ids=["generation", "life", "job"],
)
@pytest.mark.parametrize("old", [0, 1])
@ways
@in_event_loop
async def test_who_is_no_member_of_this_group_meets_nobody(stack, way, old, as_it_was, caplog):
    """It was stopped and goes on now, or is of a job that got the port; it calls, or is called.

    Its name stays free, and of one of an earlier life is told once. A Unix socket asks for no
    secret: the name of the job tells two jobs of one user apart.
    """
    members = Members(stack, 2, way)
    callee, caller = (members.links(rank, **as_it_was if rank == old else {}) for rank in (0, 1))
    meetings = begun(callee, caller)
    no_secret = "secret" in as_it_was and way == FAR
    wanted = "one end does not know the secret" if no_secret else "closed the connection"
    for _ in range(2 if way == FAR else 1):
        caller.problems.clear()
        assert wanted in await caller.problems(0)
    assert caller._met == callee._met == {}
    if old == 1:
        await members.all_have_met(meetings[0], members.links(1))
    else:
        await abandoned(meetings[0])
    said = "a process that takes itself for 'm1' is of an earlier life of the script"
    assert caplog.text.count(said) == ("key" in as_it_was)
    await unmet(way, meetings[1])


# -- strangers -------------------------------------------------------------------------------------


def dialled(stack, address):
    connection = stack.enter_context(socket.socket(address[0]))
    connection.connect(address[1])
    return connection


@ways
def test_strangers_of_all_kinds_disturb_nobody(stack, monkeypatch, way):
    """Silent ones, more than fit in; junk; half words; words of another job."""
    monkeypatch.setattr(reception, "_MOST", 8)
    members = Members(stack, 4, way)
    draw = random.Random(1)
    hello, strange = (TlsEngine(secret.tls(called=False), False) for secret in (SECRET, OTHER))
    for each in (hello, strange):
        each.shake_hands()
    hello, strange = hello.sealed(), strange.sealed()
    for rank in (0, 1, 2):
        for _ in range(40):
            dialled(stack, members.at(rank))
        for number in range(48):
            words = (
                draw.randbytes(draw.randrange(300)),
                b"GET / HTTP/1.1\r\n\r\n",
                strange,
                hello[: 5 * number],
                packed(link_record(3, rank, secret=OTHER)),
                packed(link_record(3, rank))[:number],
            )[number % 6]
            dialled(stack, members.at(rank)).sendall(words)
    run(members.meet())


# -- somebody in between ---------------------------------------------------------------------------


class Relay:
    """Passes on what a caller and a callee say, between their sockets.

    Attributes:
        changes: For each of the first connections, which end's byte is changed at which offset.
        breaks: Which end's words the first connection ends after, and after how many bytes.
        said: By connection, the bytes of the caller and those of the callee.
    """

    def __init__(self, stack, callee, listener=None, changes=(), breaks=(None, 0)):
        self.callee, self.said, self.changes, self.breaks = callee, [], changes, breaks
        self.listener = listener or stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        self.listener.setblocking(False)
        self.address = None if listener else PeerAddress(*self.listener.getsockname())

    async def run(self):
        loop, tasks = asyncio.get_running_loop(), []
        with ExitStack() as opened:
            try:
                while True:
                    caller, _ = await loop.sock_accept(self.listener)
                    callee = socket.socket(self.callee[0])
                    for each in (caller, callee):
                        opened.enter_context(each)
                        each.setblocking(False)
                    await loop.sock_connect(callee, self.callee[1])
                    tasks.append(loop.create_task(self._relay(caller, callee)))
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _relay(self, caller, callee):
        number = len(self.said)
        self.said.append((bytearray(), bytearray()))
        ways = [
            asyncio.ensure_future(self._pass_on(number, *way))
            for way in ((0, caller, callee), (1, callee, caller))
        ]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
            for end in (caller, callee):
                end.close()

    async def _pass_on(self, number, which, source, target):
        loop, said, most = asyncio.get_running_loop(), self.said[number][which], 4096
        with suppress(ConnectionError):
            while True:
                if number == 0 and which == self.breaks[0]:
                    most = min(4096, self.breaks[1] - len(said))
                if not (data := await loop.sock_recv(source, most)):
                    return
                passed = bytearray(data)
                if self.changes[number:] and self.changes[number][0] == which:
                    offset = self.changes[number][1] - len(said)
                    if 0 <= offset < len(data):
                        passed[offset] ^= 1 << offset % 8
                said.extend(data)
                await loop.sock_sendall(target, passed)


async def through(relay, while_it_runs):
    """Do something while a relay runs."""
    running = asyncio.ensure_future(relay.run())
    try:
        return await while_it_runs
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def said_in_a_meeting(members):
    """What a caller and a callee say until they have met."""
    with ExitStack() as opened:
        relay = Relay(opened, members.at(0))
        callee, caller = members.links(0), members.links(1, addresses={0: relay.address})
        await through(relay, asyncio.gather(callee.meet(), caller.meet()))
        ((of_caller, of_callee),) = relay.said
        return bytes(of_caller), bytes(of_callee)


def lengths():
    """Bytes that a caller and a callee say until they have met."""
    with ExitStack() as opened:
        return [len(said) for said in run(said_in_a_meeting(Members(opened, 2)))]


@in_event_loop
async def test_nothing_of_a_meeting_can_be_read_or_used_again(stack):
    """Whoever listens on the way does not learn who meets whom, nor can say the same again."""
    members = Members(stack, 2)
    of_caller, of_callee = await said_in_a_meeting(members)
    for word in (SECRET.job.encode(), SECRET.text.encode(), b"sender", b"link"):
        assert word not in of_caller + of_callee
    callee = members.links(0)
    (meeting,) = begun(callee)
    again = dialled(stack, members.at(0))
    again.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_sendall(again, of_caller)
    with suppress(ConnectionError):
        while await asyncio.wait_for(loop.sock_recv(again, 4096), LATEST_S):
            pass
    assert callee._met == {}
    await abandoned(meeting)


async def meeting_through(members, relay):
    """Let member 1 call member 0 through a relay; member 2 comes last, so the callee stays open."""
    callee, caller = members.links(0), members.links(1, addresses={0: relay.address})

    async def last():
        await caller._met(0)
        return await members.links(2).meet()

    async def whole():
        met = await asyncio.gather(callee.meet(), caller.meet(), last())
        for rank, own in enumerate(met):
            assert set(own) == {0, 1, 2} - {rank}
        await asyncio.to_thread(talk, met[0][1], met[1][0])

    await through(relay, whole())


of_either_end = pytest.mark.parametrize("which", [0, 1], ids=["caller", "callee"])


@of_either_end
def test_no_byte_of_a_meeting_can_be_changed(stack, monkeypatch, which):
    """At whatever offset: no link comes of that connection, and the caller calls again.

    What is behind a length that was changed is waited for, until the time of the attempt is over.
    """
    monkeypatch.setattr(module, "_ATTEMPT_S", 1.0)
    changes = [(which, offset) for offset in range(11, lengths()[which], 29)]
    members = Members(stack, 3)
    relay = Relay(stack, members.at(0), changes=changes)
    run(meeting_through(members, relay))
    assert len(relay.said) > len(changes) > 20


@of_either_end
def test_a_connection_that_breaks_anywhere_is_made_again(which):
    """Also where the callee has met the caller, which does not know it: the later one counts."""
    most = lengths()[which]
    for offset in [*range(0, most, 149), most - 2, most - 1]:
        with ExitStack() as opened:
            members = Members(opened, 3)
            relay = Relay(opened, members.at(0), breaks=(which, offset))
            run(meeting_through(members, relay))
            assert len(relay.said) == 2


@of_either_end
def test_a_unix_socket_that_breaks_anywhere_is_followed_by_the_port(which):
    most = len(packed(link_record(1, 0)))
    for offset in [*range(0, most, 41), most - 1]:
        with ExitStack() as opened, tempfile.TemporaryDirectory() as folder:
            members = Members(opened, 3, BOTH)
            listener = opened.enter_context(listening_at(Path(folder) / "relay"))
            relay = Relay(opened, members.path_of(0), listener, breaks=(which, offset))
            relay.address = members.addresses[0]._replace(path=listener.getsockname())
            run(meeting_through(members, relay))
            assert len(relay.said) == 1


def test_a_door_that_has_met_a_caller_which_does_not_know_it(stack):
    """Its answer was the last word, and is lost: the caller says so in time."""
    breaks = (1, lengths()[1] - 1)
    members = Members(stack, 2)
    relay = Relay(stack, members.at(0), breaks=breaks)

    async def main():
        callee, caller = members.links(0), members.links(1, addresses={0: relay.address})

        async def both():
            meetings = begun(callee, caller)
            await caller.problems(0)
            assert set(await meetings[0]) == {1}
            let_time_be_over(caller)
            with pytest.raises(RendezvousTimeout, match=r"'m1' has not met 'm0' at 127\.0\.0\.1:"):
                await meetings[1]

        await through(relay, both())

    run(main())


@in_event_loop
async def test_a_port_does_not_lead_to_a_unix_socket(stack):
    """Else one end would share memory, and the other one would not know how."""
    members = Members(stack, 2, BOTH)
    relay = Relay(stack, members.path_of(0))
    callee, caller = members.links(0), members.links(1, addresses={0: relay.address})
    meetings = begun(callee, caller)
    relaying = asyncio.ensure_future(relay.run())
    assert "closed the connection" in await caller.problems(0)
    assert callee._met == caller._met == {}
    await abandoned(*meetings, relaying)
    assert relay.said


# -- calls again, and the end ----------------------------------------------------------------------


@ways
@in_event_loop
async def test_of_two_calls_of_a_member_the_later_one_counts(stack, way):
    members = Members(stack, 3, way)
    callee = members.links(0)
    (meeting,) = begun(callee)
    calls = []
    for _ in range(3):
        calls.append(await called(members.at(0)))
        calls[-1].send(link_record(1, 0))
        assert await calls[-1].read() == link_record(0, 1)
    for call in calls[:-1]:
        await closes(call)
    talk(module.Connection(calls[-1].socket, calls[-1].engine), callee._met[1])
    calls[-1].close()
    await abandoned(meeting)


@ways
@in_event_loop
async def test_a_call_that_was_given_up_is_no_member(stack, way):
    """Its words are there, and nobody is behind them; the member calls again, and is met."""
    members = Members(stack, 2, way)
    if way == NEAR:  # the callee is not attended to yet
        stranger = dialled(stack, members.at(0))
        stranger.sendall(packed(link_record(1, 0)))
        stranger.close()
        await members.meet()
        return
    (meeting,) = begun(members.links(0))
    stranger = await called(members.at(0))
    stranger.send(link_record(1, 0))
    stranger.close()
    await members.all_have_met(meeting, members.links(1))


@ways
@in_event_loop
async def test_a_door_that_nobody_opens_is_final(stack, way):
    members = Members(stack, 2, way)
    for listener in members.listeners[0].sockets:
        listener.close()
    with pytest.raises(RendezvousTimeout, match=r"'m1' has not met 'm0' at .*: connection ref"):
        await members.links(1).meet()


@ways
@in_event_loop
async def test_who_is_missing_is_told_by_name_and_nobody_is_kept(stack, way):
    members = Members(stack, 3, way)
    callee, caller = members.links(0), members.links(1)
    meetings = begun(callee, caller)
    await callee._met(1)
    let_time_be_over(callee)
    with pytest.raises(RendezvousTimeout, match=r"'m0' has not met 'm2' .*it has not called;") as e:
        await meetings[0]
    assert "'m1'" not in str(e.value)
    assert callee._met[1].socket.fileno() < 0
    await caller._met(0)
    await abandoned(meetings[1])
    assert caller._met[0].socket.fileno() < 0


@in_event_loop
async def test_a_meeting_that_is_ended_as_a_member_is_met_ends(stack):
    """`asyncio.wait_for` may lose the end of what waits, up to Python 3.11."""
    members = Members(stack, 3)
    caller, callee = members.links(1), members.links(0)
    meetings = begun(caller, callee)
    await caller._met(0)
    for meeting in meetings:
        meeting.cancel()
    _, left = await asyncio.wait(meetings, timeout=LATEST_S)
    if left:
        await abandoned(*left)
    assert not left


@in_event_loop
async def test_a_call_that_is_ended_as_it_fails_ends(stack):
    caller = Members(stack, 2).links(1)

    async def fails(*arguments):
        asyncio.get_running_loop().call_soon(call.cancel)
        caller._shake_hands = shake_hands
        raise ConnectionResetError

    shake_hands, caller._shake_hands = caller._shake_hands, fails
    call = asyncio.ensure_future(caller._dial(0))
    _, left = await asyncio.wait([call], timeout=LATEST_S)
    if left:
        await abandoned(*left)
    assert not left
