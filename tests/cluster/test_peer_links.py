"""The meeting of members, with strangers at every callee, and members who come to a wrong one."""

import asyncio
import itertools
import os
import random
import resource
import select
import socket
import tempfile
from contextlib import ExitStack, suppress
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from support.deadlines import LATEST_S
from support.encrypted import OTHER, SECRET
from support.loops import Noted, run

from pipedream_rt.cluster import peer_links as module
from pipedream_rt.cluster.environment import private_folder
from pipedream_rt.cluster.peer_links import PeerLinks
from pipedream_rt.cluster.peer_listeners import PeerAddress, listening_at, listening_for_peers
from pipedream_rt.cluster.records import packed
from pipedream_rt.cluster.stream import Stream
from pipedream_rt.deadline import Deadline
from pipedream_rt.errors import RendezvousTimeout, TransportError
from pipedream_rt.transport.group import Group
from pipedream_rt.transport.link import Link
from pipedream_rt.transport.tls import TlsEngine


@pytest.fixture(autouse=True)
def nothing_left(monkeypatch):
    """No descriptor stays open, and no path stays in the folder of the Unix sockets."""
    before = set(os.listdir("/proc/self/fd"))
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield
        assert list(private_folder().iterdir()) == []
    assert set(os.listdir("/proc/self/fd")) == before


@pytest.fixture(autouse=True)
def no_pause(monkeypatch):
    monkeypatch.setattr(module, "_PAUSE_S", 0.01)


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

    def links(self, rank, *, secret=SECRET, generation=1, addresses=None, seconds=LATEST_S, **more):
        names = tuple(f"m{number}" for number in range(self.count))
        group = group_of(rank, names, generation, **more)
        deadline = Deadline(timedelta(seconds=seconds))
        made = PeerLinks(
            group, secret, self.listeners[rank], {**self.addresses, **(addresses or {})}, deadline
        )
        made.problems, made._met = Noted(), Noted()
        self._met.append(made._met)
        return made

    def at(self, rank):
        """Where a member is called: family and address."""
        if self.way == NEAR:
            return self.path_of(rank)
        return socket.AF_INET, self.addresses[rank][:2]

    async def meet(self):
        """Let all meet, and check that they have."""
        self.check(await asyncio.gather(*(self.links(rank).meet() for rank in range(self.count))))

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


def group_of(rank, names=(), generation=1, key=b"of this life"):
    return Group(generation=generation, rank=rank, names=names, hosts=(), key=key)


def link_record(sender, recipient, *, secret=SECRET, generation=1, key=b"of this life"):
    return {
        "type": "link", "job": secret.job, "group": group_of(sender, key=key).tag,
        "generation": generation, "sender": sender, "recipient": recipient,
    }  # fmt: skip


async def called(address, secret=SECRET):
    """A connection to a callee, of somebody who knows a secret of a job."""
    connection = socket.socket(address[0])
    connection.connect(address[1])
    stream = Stream(connection, "the callee")
    if address[0] != socket.AF_UNIX:
        await stream.encrypt(secret.tls(called=False), called=False)
    return stream


# -- members that meet -----------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_every_two_members_meet(stack, host):
    run(Members(stack, 5, host=host).meet())


@pytest.mark.parametrize("nearby", [range(5), (1, 3, 4), (2,), ()], ids=str)
def test_members_that_have_a_unix_socket_meet_there(stack, nearby):
    members = Members(stack, 5, BOTH)
    for rank in set(range(5)) - set(nearby):
        members.hide_path(rank)

    async def main():
        met = await asyncio.gather(*(members.links(rank).meet() for rank in range(5)))
        for rank, own in enumerate(met):
            for other, each in own.items():
                # Who dials knows of its own path, and sees whether the other one has one.
                assert each.carries_descriptors is (min(rank, other) in nearby)
        members.check(met)

    run(main())


def test_members_of_one_machine_need_no_port(stack):
    run(Members(stack, 4, NEAR).meet())


@pytest.mark.parametrize(
    "why", ["closed", "gone", "no folder", "silent", "of another user", "deaf"]
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

    async def main():
        met = await asyncio.gather(*(members.links(rank).meet() for rank in range(3)))
        assert [met[0][1].carries_descriptors, met[0][2].carries_descriptors] == [False, False]
        assert met[0][1].engine is not None
        assert met[1][2].carries_descriptors
        members.check(met)

    run(main())


def test_a_member_of_another_network_namespace_is_called_at_its_port(stack):
    members = Members(stack, 2, BOTH)
    members.addresses[0] = members.addresses[0]._replace(machine="elsewhere")

    async def main():
        met = await asyncio.gather(*(members.links(rank).meet() for rank in range(2)))
        assert not met[1][0].carries_descriptors
        members.check(met)

    run(main())


def test_members_reach_each_other_as_far_as_they_can(stack):
    """As `pipedream-rt doctor` has it."""
    members = Members(stack, 3)
    with socket.create_server(("127.0.0.1", 0)) as closed:
        nowhere = PeerAddress("127.0.0.1", closed.getsockname()[1])

    async def main():
        here, there = members.links(1, addresses={0: nowhere}), members.links(2)
        reached = asyncio.ensure_future(here.reach())
        meeting = asyncio.ensure_future(there.meet())
        await there._met(1)
        assert set(await here._met(2) and here._met) == {2}
        assert await here.problems(0)
        await abandoned(meeting)
        assert set(await asyncio.wait_for(reached, LATEST_S)) == {2}

    run(main())


# -- members that call a wrong one -----------------------------------------------------------------


@ways
def test_a_caller_that_is_led_to_another_member_is_dropped(stack, way):
    """Whoever answers has the certificate of the job, and is the wrong one; no link comes of it."""
    members = Members(stack, 3, way)

    async def main():
        here = members.links(1)
        caller = members.links(2, addresses={0: members.addresses[1]})
        meetings = [asyncio.ensure_future(each.meet()) for each in (here, caller)]
        assert "closed the connection" in await caller.problems(0)
        await caller._met(1)
        await here._met(2)
        assert set(caller._met) == {1}
        assert set(here._met) == {2}
        if way == FAR:
            await abandoned(*meetings)
        else:  # there is no other way to call it
            with pytest.raises(RendezvousTimeout, match=r"'m2' has not met 'm0' at .*: .*closed"):
                await meetings[1]
            await abandoned(meetings[0])

    run(main())


@ways
@pytest.mark.parametrize(
    "answer",
    [
        link_record(1, 2),
        link_record(2, 0),
        link_record(0, 2, generation=2),
        link_record(0, 2, secret=OTHER),
        link_record(0, 2, key=b"of an earlier life"),
        {**link_record(0, 2), "more": 1},
        {"type": "hello", "version": 14},
        {"type": "refused", "reason": "no", "passing": False},
    ],
    ids=["member", "direction", "generation", "job", "life", "more", "hello", "refused"],
)
def test_a_caller_takes_nothing_else_for_an_answer(stack, way, answer):
    members = Members(stack, 3, way)

    async def main():
        caller = members.links(2)
        meeting = asyncio.ensure_future(caller.meet())
        loop = asyncio.get_running_loop()
        listener = members.listeners[0].sockets[-1]
        listener.setblocking(False)
        stream = Stream((await loop.sock_accept(listener))[0], "the caller")
        if way == FAR:
            await stream.encrypt(SECRET.tls(called=True), called=True)
        assert await stream.read() == link_record(2, 0)
        stream.send(answer)
        problem = await caller.problems(0)
        assert problem == "who answers there is not 'm0' of this generation"
        with pytest.raises(TransportError, match="closed the connection"):
            await stream.read()
        stream.close()
        assert caller._met == {}
        if way == FAR:
            await abandoned(meeting)
        else:
            await asyncio.wait([meeting])
            assert isinstance(meeting.exception(), RendezvousTimeout)

    run(main())


@ways
@pytest.mark.parametrize(
    "record",
    [
        link_record(1, 2),
        link_record(2, 1),
        link_record(0, 1),
        link_record(1, 0, generation=0),
        link_record(1, 0, generation=2),
        link_record(1, 0, secret=OTHER),
        link_record(0, 0),
        link_record(9, 0),
        {**link_record(1, 0), "job": ""},
        {**link_record(1, 0), "more": 1},
        {"type": "hello", "version": 14},
        {"type": "hello", "version": 14, "sender": "1", "recipient": []},
        {"type": "stop", "sender": None},
        {**link_record(1, 0), "type": "shut"},
    ],
    ids=str,
)
def test_another_record_than_the_link_that_is_meant_opens_no_door(stack, way, record):
    """Of a member that was led here, of an older generation, or of another job of this user."""
    members = Members(stack, 2, way)

    async def main():
        callee = members.links(0)
        meeting = asyncio.ensure_future(callee.meet())
        stream = await called(members.at(0))
        stream.send(record)
        with pytest.raises(TransportError, match="closed the connection"):
            await asyncio.wait_for(stream.read(), 20)
        stream.close()
        assert callee._met == {}
        met = await asyncio.gather(meeting, members.links(1).meet())
        members.check(met)

    run(main())


@ways
@pytest.mark.parametrize("old", [0, 1])
def test_a_member_of_an_older_generation_meets_nobody(stack, way, old):
    """One that was stopped, goes on now, and comes to where the others meet anew, or is called."""
    members = Members(stack, 2, way)

    async def main():
        late = members.links(old, generation=6)
        new = members.links(1 - old, generation=7)
        caller, callee = (new, late) if old == 0 else (late, new)
        meetings = [asyncio.ensure_future(each.meet()) for each in (caller, callee)]
        assert "closed the connection" in await caller.problems(0)
        assert caller._met == callee._met == {}
        await abandoned(meetings[1])
        if way == FAR:  # else it has said already that there is no other way
            await abandoned(meetings[0])
        else:
            await asyncio.wait(meetings)
            assert isinstance(meetings[0].exception(), RendezvousTimeout)

    run(main())


@ways
@pytest.mark.parametrize("old", [0, 1])
def test_a_member_of_an_earlier_life_of_the_script_meets_nobody(stack, way, old, caplog):
    """It has the same secret, and its generation the same number; its name stays free."""
    members = Members(stack, 2, way)

    async def main():
        late = members.links(old, key=b"of an earlier life")
        new = members.links(1 - old)
        caller, callee = (new, late) if old == 0 else (late, new)
        meetings = [asyncio.ensure_future(each.meet()) for each in (caller, callee)]
        assert "closed the connection" in await caller.problems(0)
        assert caller._met == callee._met == {}
        if old:
            members.check(await asyncio.gather(meetings[1], members.links(1).meet()))
        for meeting in meetings:
            meeting.cancel()
        await asyncio.wait(meetings)

    run(main())
    said = "a process that takes itself for 'm1' is of an earlier life of the script"
    assert caplog.text.count(said) == 1


@ways
def test_two_jobs_of_one_user_do_not_meet(stack, way):
    """A Unix socket asks for no secret; the name of the job tells them apart."""
    members = Members(stack, 2, way)

    async def main():
        callee, caller = members.links(0), members.links(1, secret=OTHER)
        meetings = [asyncio.ensure_future(each.meet()) for each in (callee, caller)]
        problem = await caller.problems(0)
        wanted = "one end does not know the secret" if way == FAR else "closed the connection"
        assert wanted in problem
        assert caller._met == callee._met == {}
        if way == FAR:
            await abandoned(meetings[1])
        else:
            await asyncio.wait(meetings[1:])
            assert isinstance(meetings[1].exception(), RendezvousTimeout)
        members.check(await asyncio.gather(meetings[0], members.links(1).meet()))

    run(main())


def test_a_caller_does_not_take_a_port_of_another_job_for_a_member(stack):
    """As where another job has got the port of a member that is gone."""
    members = Members(stack, 2)

    async def main():
        callee, caller = members.links(0, secret=OTHER), members.links(1)
        meetings = [asyncio.ensure_future(each.meet()) for each in (callee, caller)]
        assert "one end does not know the secret" in await caller.problems(0)
        assert caller._met == callee._met == {}
        await abandoned(*meetings)

    run(main())


@pytest.mark.parametrize(
    "answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\0" * 100, b"SSH-2.0-x\r\n"]
)
def test_a_port_of_another_program_is_told_of(stack, answer):
    members = Members(stack, 2)

    async def main():
        async def serve(reader, writer):
            writer.write(answer)
            await reader.read()
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        at = PeerAddress(*server.sockets[0].getsockname())
        caller = members.links(1, addresses={0: at})
        meeting = asyncio.ensure_future(caller.meet())
        assert "does not speak TLS 1.3" in await caller.problems(0)
        await abandoned(meeting)
        server.close()
        await server.wait_closed()

    run(main())


# -- strangers -------------------------------------------------------------------------------------


def dialled(stack, address):
    connection = stack.enter_context(socket.socket(address[0]))
    connection.connect(address[1])
    return connection


@ways
def test_strangers_of_all_kinds_disturb_nobody(stack, way):
    """Silent ones, more than fit in; junk; half words; words of another job."""
    members = Members(stack, 4, way)
    draw = random.Random(1)
    hello = TlsEngine(SECRET.tls(called=False), False)
    hello.shake_hands()
    hello = hello.sealed()
    strange = TlsEngine(OTHER.tls(called=False), False)
    strange.shake_hands()
    strange = strange.sealed()
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


@pytest.fixture
def few_descriptors():
    """Leaves this process so many descriptors."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)

    def leave(count):
        with socket.socket() as next_free:
            limit = next_free.fileno() + count
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, before[1]))

    yield leave
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@ways
@pytest.mark.parametrize("listeners", [1, 3])
def test_many_idle_connections_where_descriptors_are_few(stack, few_descriptors, way, listeners):
    """More than this process has room for: members are called again, and get in."""
    members = Members(stack, 3, way)
    for number in range(200):
        dialled(stack, members.at(number % listeners))
    for called_end in (True, False):
        SECRET.tls(called=called_end)
    few_descriptors(64)
    run(members.meet())


def test_slow_callers_hold_nobody_up(stack):
    """Their ClientHello comes byte by byte, and is not whole when the members have met."""
    members = Members(stack, 3)
    hello = TlsEngine(SECRET.tls(called=False), False)
    hello.shake_hands()
    words = hello.sealed()
    strangers = [dialled(stack, members.at(rank)) for rank in (0, 1) for _ in range(20)]

    async def drip():
        for byte in words[:-1]:
            for stranger in strangers:
                with suppress(ConnectionError):
                    stranger.send(bytes([byte]))
            await asyncio.sleep(0)

    async def main():
        dripping = asyncio.ensure_future(drip())
        await members.meet()
        dripping.cancel()

    run(main())


# -- somebody in between ---------------------------------------------------------------------------


class Relay:
    """Passes on what a caller and a callee say, between their sockets.

    Attributes:
        said: By connection, the bytes of the caller and those of the callee.
    """

    def __init__(self, stack, callee, listener=None):
        self.callee, self.said = callee, []
        self.listener = listener or stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        self.listener.setblocking(False)
        self.address = None if listener else PeerAddress(*self.listener.getsockname())
        self._tasks = []

    async def run(self):
        loop = asyncio.get_running_loop()
        with ExitStack() as opened:
            try:
                while True:
                    caller, _ = await loop.sock_accept(self.listener)
                    callee = socket.socket(self.callee[0])
                    for each in (caller, callee):
                        opened.enter_context(each)
                        each.setblocking(False)
                    await loop.sock_connect(callee, self.callee[1])
                    self._tasks.append(
                        loop.create_task(self._relay(len(self.said), caller, callee))
                    )
            finally:
                for way in self._tasks:
                    way.cancel()
                await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _relay(self, number, caller, callee):
        said = (bytearray(), bytearray())
        self.said.append(said)
        ways = [
            asyncio.ensure_future(self._pass_on(number, *way))
            for way in ((caller, callee, said, 0), (callee, caller, said, 1))
        ]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
            for end in (caller, callee):
                end.close()

    async def _pass_on(self, number, source, target, said, which):
        loop = asyncio.get_running_loop()
        with suppress(ConnectionError):
            while data := await loop.sock_recv(source, self.most(number, which, said[which])):
                said[which].extend(data)
                await loop.sock_sendall(target, self.passed(number, which, said[which], data))

    def most(self, number, which, said):
        """Bytes to read at a time; at 0 the connection is broken."""
        return 4096

    def passed(self, number, which, said, data):
        """What is passed on of what was read."""
        return data


async def through(relay, while_it_runs):
    """Do something while a relay runs."""
    running = asyncio.ensure_future(relay.run())
    try:
        return await while_it_runs
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


def test_nothing_of_a_meeting_can_be_read_or_used_again(stack):
    """Whoever listens on the way does not learn who meets whom, nor can say the same again."""
    members = Members(stack, 2)
    relay = Relay(stack, members.at(0))

    async def main():
        callee, caller = members.links(0), members.links(1, addresses={0: relay.address})
        await through(relay, asyncio.gather(callee.meet(), caller.meet()))
        ((of_caller, of_door),) = relay.said
        for word in (SECRET.job.encode(), SECRET.text.encode(), b"sender", b"link"):
            assert word not in of_caller + of_door
        callee = members.links(0)
        meeting = asyncio.ensure_future(callee.meet())
        again = dialled(stack, members.at(0))
        again.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(again, of_caller)
        with suppress(ConnectionError):
            while await asyncio.wait_for(loop.sock_recv(again, 4096), LATEST_S):
                pass
        assert callee._met == {}
        await abandoned(meeting)

    run(main())


class Changing(Relay):
    """Changes one byte of the first connections, each at another offset, and passes others on."""

    offsets = ()

    def passed(self, number, which, said, data):
        begin = len(said) - len(data)
        if number < len(self.offsets) and self.offsets[number][0] == which:
            offset = self.offsets[number][1] - begin
            if 0 <= offset < len(data):
                data = bytearray(data)
                data[offset] ^= 1 << offset % 8
        return data


class Slow(Relay):
    """Passes bytes on one by one."""

    def most(self, number, which, said):
        return 1


class Breaking(Relay):
    """Breaks the first connection after so many bytes of one end."""

    which, offset = 0, 0

    def most(self, number, which, said):
        if number or which != self.which:
            return 4096
        return min(4096, self.offset - len(said))


def lengths(stack):
    """Bytes that a caller and a callee say until they have met."""
    members = Members(stack, 2)
    relay = Relay(stack, members.at(0))

    async def main():
        callee, caller = members.links(0), members.links(1, addresses={0: relay.address})
        await through(relay, asyncio.gather(callee.meet(), caller.meet()))
        return [len(said) for said in relay.said[0]]

    return run(main())


def test_members_meet_though_their_words_come_byte_by_byte(stack):
    members = Members(stack, 2)
    relay = Slow(stack, members.at(0))

    async def main():
        callee, caller = members.links(0), members.links(1, addresses={0: relay.address})
        met = await through(relay, asyncio.gather(callee.meet(), caller.meet()))
        assert set(met[0]) == {1}
        assert set(met[1]) == {0}

    run(main())


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


@pytest.mark.parametrize("which", [0, 1], ids=["caller", "callee"])
def test_no_byte_of_a_meeting_can_be_changed(stack, monkeypatch, which):
    """At whatever offset: no link comes of that connection, and the caller calls again.

    What is behind a length that was changed is waited for, until the time of the attempt is over.
    """
    monkeypatch.setattr(module, "_ATTEMPT_S", 1.0)
    members = Members(stack, 3)
    relay = Changing(stack, members.at(0))
    relay.offsets = [(which, offset) for offset in range(11, lengths(stack)[which], 29)]
    run(meeting_through(members, relay))
    assert len(relay.said) > len(relay.offsets) > 20


@pytest.mark.parametrize("which", [0, 1], ids=["caller", "callee"])
def test_a_connection_that_breaks_anywhere_is_made_again(stack, which):
    """Also where the callee has met the caller, which does not know it: the later one counts."""
    most = lengths(stack)[which]
    for offset in [*range(0, most, 97), most - 2, most - 1]:
        with ExitStack() as opened:
            members = Members(opened, 3)
            relay = Breaking(opened, members.at(0))
            relay.which, relay.offset = which, offset
            run(meeting_through(members, relay))
            assert len(relay.said) == 2


@pytest.mark.parametrize("which", [0, 1], ids=["caller", "callee"])
def test_a_unix_socket_that_breaks_anywhere_is_followed_by_the_port(stack, which):
    most = len(packed(link_record(1, 0)))
    for offset in range(0, most, 17):
        with ExitStack() as opened, tempfile.TemporaryDirectory() as folder:
            members = Members(opened, 3, BOTH)
            listener = opened.enter_context(listening_at(Path(folder) / "relay"))
            relay = Breaking(opened, members.path_of(0), listener)
            relay.address = members.addresses[0]._replace(path=listener.getsockname())
            relay.which, relay.offset = which, offset
            run(meeting_through(members, relay))
            assert len(relay.said) == 1


def test_a_door_that_has_met_a_caller_which_does_not_know_it(stack):
    """Its answer was the last word, and is lost: the caller says so in time."""
    members = Members(stack, 2)
    relay = Breaking(stack, members.at(0))
    relay.which, relay.offset = 1, lengths(stack)[1] - 1

    async def main():
        callee, caller = members.links(0), members.links(1, addresses={0: relay.address}, seconds=1)

        async def meet():
            with pytest.raises(RendezvousTimeout, match=r"'m1' has not met 'm0' at 127\.0\.0\.1:"):
                await caller.meet()

        met, _ = await through(relay, asyncio.gather(callee.meet(), meet()))
        assert set(met) == {1}

    run(main())


def test_a_port_does_not_lead_to_a_unix_socket(stack):
    """Else one end would share memory, and the other one would not know how."""
    members = Members(stack, 2, BOTH)
    relay = Relay(stack, members.path_of(0))

    async def main():
        callee, caller = members.links(0), members.links(1, addresses={0: relay.address})
        meetings = [asyncio.ensure_future(each.meet()) for each in (callee, caller)]
        relaying = asyncio.ensure_future(relay.run())
        assert "closed the connection" in await caller.problems(0)
        assert callee._met == caller._met == {}
        await abandoned(*meetings, relaying)
        assert relay.said

    run(main())


# -- calls again, and the end ----------------------------------------------------------------------


@ways
def test_of_two_calls_of_a_member_the_later_one_counts(stack, way):
    members = Members(stack, 3, way)

    async def main():
        callee = members.links(0)
        meeting = asyncio.ensure_future(callee.meet())
        calls = []
        for _ in range(3):
            calls.append(await called(members.at(0)))
            calls[-1].send(link_record(1, 0))
            assert await calls[-1].read() == link_record(0, 1)
        for call in calls[:-1]:
            with pytest.raises(TransportError, match="closed the connection"):
                await asyncio.wait_for(call.read(), LATEST_S)
        link = Link(module.Connection(calls[-1].socket, calls[-1].engine))
        assert link.send(1, b"words", [])
        other = Link(callee._met[1])
        came = []
        while not came:
            other.receive(came.append)
        assert came[0].data == b"words"
        other.close()
        for call in calls:
            call.close()
        await abandoned(meeting)

    run(main())


@ways
def test_a_call_that_was_given_up_is_no_member(stack, way):
    """Its words are there, and nobody is behind them; the member calls again, and is met."""
    members = Members(stack, 2, way)

    async def main():
        if way == NEAR:  # the callee is not attended to yet
            stranger = dialled(stack, members.at(0))
            stranger.sendall(packed(link_record(1, 0)))
            stranger.close()
            await members.meet()
            return
        callee = members.links(0)
        meeting = asyncio.ensure_future(callee.meet())
        stranger = await called(members.at(0))
        stranger.send(link_record(1, 0))
        stranger.close()
        met = await asyncio.gather(meeting, members.links(1, seconds=5).meet())
        members.check(met)

    run(main())


@ways
def test_a_member_that_comes_late_is_met(stack, way):
    members = Members(stack, 3, way)

    async def main():
        early = [members.links(rank) for rank in (0, 2)]
        meetings = [asyncio.ensure_future(each.meet()) for each in early]
        await early[0]._met(2)
        met = await asyncio.gather(meetings[0], members.links(1).meet(), meetings[1])
        members.check(met)

    run(main())


@ways
def test_a_door_that_nobody_opens_is_final(stack, way):
    members = Members(stack, 2, way)
    members.listeners[0].sockets[0].close()
    members.listeners[0].sockets[-1].close()

    async def main():
        with pytest.raises(RendezvousTimeout, match=r"'m1' has not met 'm0' at .*: connection ref"):
            await members.links(1).meet()

    run(main())


@ways
def test_who_is_missing_is_told_by_name_and_nobody_is_kept(stack, way):
    members = Members(stack, 3, way)

    async def main():
        callee, caller = members.links(0, seconds=2), members.links(1)
        meeting = asyncio.ensure_future(caller.meet())
        with pytest.raises(RendezvousTimeout, match=r"'m0' has not met .*it has not called") as e:
            await callee.meet()
        assert "'m2'" in str(e.value)
        assert all(each.socket.fileno() < 0 for each in callee._met.values())
        await abandoned(meeting)
        assert all(each.socket.fileno() < 0 for each in caller._met.values())

    run(main())


def test_a_member_calls_nobody_of_a_higher_rank(stack):
    """So whoever calls as one of a lower rank is none."""
    members = Members(stack, 3)

    async def main():
        callee = members.links(1)
        meeting = asyncio.ensure_future(callee.meet())
        for sender in (0, 1):
            stream = await called(members.at(1))
            stream.send(link_record(sender, 1))
            with pytest.raises(TransportError, match="closed the connection"):
                await asyncio.wait_for(stream.read(), LATEST_S)
            stream.close()
        assert callee._met == {}
        await abandoned(meeting)

    run(main())


def test_a_meeting_that_is_ended_as_a_member_is_met_ends(stack):
    """`asyncio.wait_for` may lose the end of what waits, up to Python 3.11."""
    members = Members(stack, 3)

    async def main():
        caller, callee = members.links(1), members.links(0)
        meetings = [asyncio.ensure_future(each.meet()) for each in (caller, callee)]
        await caller._met(0)
        for meeting in meetings:
            meeting.cancel()
        _, left = await asyncio.wait(meetings, timeout=LATEST_S)
        if left:
            await abandoned(*left)
        assert not left

    run(main())


def test_a_call_that_is_ended_as_it_fails_ends(stack):
    members = Members(stack, 2)

    async def main():
        caller = members.links(1)

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

    run(main())


def test_one_member_alone_meets_nobody(stack):
    run(Members(stack, 1).meet())
