"""The meeting of members, with strangers at every door who know everything but the key."""

import random
import selectors
import socket
import threading
from contextlib import ExitStack, suppress
from datetime import timedelta

import pytest

from pipedream_rt.cluster import peer_links as module
from pipedream_rt.cluster.peer_links import PeerLinks
from pipedream_rt.cluster.unix_links import UnixAddress, listening_nearby
from pipedream_rt.deadline import Deadline
from pipedream_rt.errors import RendezvousTimeout
from pipedream_rt.transport.group import Group
from pipedream_rt.transport.tls import Tls, _of_process

KEY = b"k" * 32


def group(rank, count=3, key=KEY, generation=1):
    names = tuple(f"m{i}" for i in range(count))
    return Group(generation=generation, rank=rank, names=names, hosts=(), key=key)


class Members:
    """Some members, each of which meets the others on a thread of its own."""

    def __init__(self, stack, count, host="127.0.0.1", seconds=20, nearby=()):
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.doors = [
            stack.enter_context(socket.create_server((host, 0), family=family))
            for _ in range(count)
        ]
        for door in self.doors:
            door.setblocking(False)
        self.nearby = [
            stack.enter_context(listening_nearby(None)) if rank in nearby else None
            for rank in range(count)
        ]
        self.addresses = dict(enumerate(map(UnixAddress.of, self.doors, self.nearby)))
        self.count, self.seconds = count, seconds
        self.met, self.errors = [None] * count, [None] * count
        self._threads = []
        stack.callback(self.close)

    tls = None

    def meet(self, *ranks, **kwargs):
        for rank in ranks or range(self.count):
            thread = threading.Thread(target=self._meet, args=(rank,), kwargs=kwargs)
            self._threads.append(thread)
            thread.start()

    def _meet(self, rank, **kwargs):
        deadline = Deadline(timedelta(seconds=self.seconds))
        meeting = PeerLinks(
            group(rank, self.count, **kwargs), self.doors[rank], self.addresses, deadline, self.tls,
            self.nearby[rank],
        )  # fmt: skip
        try:
            self.met[rank] = meeting.meet()
        except RendezvousTimeout as error:
            self.errors[rank] = str(error)

    def join(self):
        for thread in self._threads:
            thread.join()

    def check(self):
        """Every two have one connection, and the same key for it, which no two others have."""
        self.join()
        assert self.errors == [None] * self.count
        keys = set()
        for rank, met in enumerate(self.met):
            assert set(met) == set(range(self.count)) - {rank}
            for other, mine in met.items():
                theirs = self.met[other][rank]
                assert mine[1:] == theirs[1:]
                if self.tls is None:
                    assert mine.socket.getpeername() == theirs.socket.getsockname()
                keys.add(mine.key)
        assert len(keys) == self.count * (self.count - 1) // 2

    def close(self):
        self.join()
        for met in self.met:
            for each in (met or {}).values():
                each.socket.close()


@pytest.fixture
def stack():
    with ExitStack() as opened:
        yield opened


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_every_two_members_meet(stack, host):
    members = Members(stack, 5, host)
    members.meet()
    members.check()


@pytest.mark.parametrize("nearby", [range(5), (1, 3, 4), (2,)], ids=str)
def test_members_that_have_a_unix_door_meet_there(stack, nearby):
    members = Members(stack, 5, nearby=nearby)
    members.meet()
    members.check()
    for rank, met in enumerate(members.met):
        for other, each in met.items():
            both = {rank, other} <= set(nearby)
            assert each.carries_descriptors is both
            assert (each.socket.family == socket.AF_UNIX) is both


def test_a_unix_door_that_nobody_opens_is_not_waited_for(stack):
    """As where the other member may not reach it: there is the TCP door."""
    members = Members(stack, 3, nearby=range(3))
    members.nearby[0].listener.close()
    members.meet(1, 2)
    members.nearby[0] = None
    members.meet(0)
    members.check()
    assert members.met[1][2].carries_descriptors
    assert not members.met[0][2].carries_descriptors


def test_a_member_of_another_network_namespace_is_called_at_its_tcp_door(stack):
    members = Members(stack, 2, nearby=range(2))
    members.addresses[0] = members.addresses[0]._replace(place="elsewhere")
    members.meet()
    members.check()
    assert not members.met[1][0].carries_descriptors


def test_a_stranger_at_a_unix_door_disturbs_nobody(stack):
    members = Members(stack, 3, nearby=range(3))
    for number in range(200):
        stranger = stack.enter_context(socket.socket(socket.AF_UNIX))
        stranger.connect(members.addresses[number % 2].unix_address)
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n"[: number % 30])
    members.meet()
    members.check()


class Relay:
    """Somebody who takes the calls to the TCP door of a member; `relay` says what he does then."""

    def __init__(self, stack, members):
        self.at = members.addresses[0]
        self._listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        members.addresses = {**members.addresses, 0: UnixAddress(*self._listener.getsockname())}
        self.stack, self.seen = stack, []
        thread = threading.Thread(target=self._run)
        thread.start()
        stack.callback(thread.join)
        stack.callback(self._listener.shutdown, socket.SHUT_RDWR)

    def _run(self):
        with suppress(OSError):
            while True:
                self.relay(self._listener.accept()[0])


class Crossing(Relay):
    """Passes all on to the Unix door of the same member."""

    def relay(self, caller):
        with caller, socket.socket(socket.AF_UNIX) as door:
            door.connect(self.at.unix_address)
            while data := caller.recv(4096):
                self.seen.append(data)
                door.sendall(data)
                caller.sendall(door.recv(4096))


def test_both_ends_know_which_door_it_is(stack):
    """Else one end would share memory, and the other one would not know how."""
    members = Members(stack, 2, seconds=1, nearby=range(2))
    between = Crossing(stack, members)
    members.meet()
    members.join()
    assert members.met == [None, None]
    assert between.seen


def test_what_stays_in_the_machine_is_encrypted_where_that_is_wanted():
    with listening_nearby(Tls.of_process(always=True)) as nearby:
        assert nearby is None
    with listening_nearby(Tls.of_process()) as nearby:
        assert nearby is not None


def test_nobody_is_told_of_a_unix_door_where_memory_is_not_shared(monkeypatch):
    monkeypatch.setenv("PIPEDREAM_RT_SHARED_MEMORY", "off")
    with listening_nearby(None) as nearby:
        assert nearby is None


def connect(stack, members, rank):
    at = members.addresses[rank]
    return stack.enter_context(socket.create_connection(at[:2], timeout=20))


def test_strangers_of_all_kinds_disturb_nobody(stack):
    """Silent ones, more than fit in; junk; words that are too short; words of another key."""
    members = Members(stack, 4)
    draw = random.Random(1)
    for rank in (0, 1, 2):
        for _ in range(40):
            connect(stack, members, rank)
        for number in range(40):
            stranger = connect(stack, members, rank)
            junk = (
                draw.randbytes(draw.randrange(300)),
                b"GET / HTTP/1.1\r\n\r\n",
                module._HELLO.pack(module._MARK, 3, rank, b"n" * 32, b"p" * 32),
                module._HELLO.pack(module._MARK, 3, rank, b"n" * 32, b"p" * 32)[: number + 1],
                b"\0" * module._HELLO.size,
            )[number % 5]
            stranger.sendall(junk)
    members.meet()
    members.check()


def test_the_first_word_of_a_member_is_worth_nothing_to_who_repeats_it(stack):
    """The door draws a nonce of its own, so the answer to it must come from a member."""
    members = Members(stack, 2)
    with socket.create_server(("127.0.0.1", 0)) as relay:
        relay.settimeout(20)
        true, members.addresses[0] = members.addresses[0], UnixAddress(*relay.getsockname())
        members.meet(1)
        caught, _ = relay.accept()
        hello = b""
        with caught:
            while len(hello) < module._HELLO.size:
                hello += caught.recv(1000)
            members.addresses[0] = true  # the member is called again, and finds the right door
            members.meet(0)
            repeated = stack.enter_context(socket.create_connection(true[:2], timeout=20))
            repeated.sendall(hello)
            answer = b""
            while len(answer) < module._ANSWER.size:
                answer += repeated.recv(1000)
            repeated.sendall(b"x" * 32)
            assert repeated.recv(1) == b""
    members.check()


def test_a_word_for_another_member_or_generation_opens_no_door(stack):
    members = Members(stack, 2, seconds=1)
    members.meet(0)
    members.meet(1, generation=2)
    members.join()
    assert "'m0' has not met 'm1'" in members.errors[0]
    assert "it closed the connection" in members.errors[1]
    members = Members(stack, 3, seconds=1)
    members.addresses[0] = members.addresses[1]  # member 2 finds member 1 where 0 should be
    members.meet(1, 2)
    members.join()
    assert "it closed the connection" in members.errors[2]


def test_who_does_not_know_the_key_is_told_of_by_name(stack):
    members = Members(stack, 2, seconds=1)
    members.meet(0)
    members.meet(1, key=b"x" * 32)
    members.join()
    host, port = members.addresses[0][:2]
    assert f"'m1' has not met 'm0' at {host}:{port}: " in members.errors[1]
    assert "'m1'" in members.errors[0]
    assert "it has not called" in members.errors[0]


def test_a_door_that_nobody_opens_is_final(stack):
    members = Members(stack, 2, seconds=60)
    members.doors[0].close()
    members.meet(1)
    members.join()
    assert "connection refused" in members.errors[1]


def test_a_member_cannot_be_met_twice_nor_the_wrong_way_round(stack):
    """A member who calls a door of higher rank, or a second time, is a fault that ends only it."""
    members = Members(stack, 2)
    meeting = PeerLinks(group(0, 2), members.doors[0], members.addresses, Deadline(None))
    talk = module._Handshake(connect(stack, members, 0), True, 1)
    with pytest.raises(PermissionError):
        meeting._refuse_met(talk)
    meeting._met[1] = None
    talk.calls = False
    with pytest.raises(PermissionError):
        meeting._refuse_met(talk)
    meeting._selector.close()


class Breaking(socket.socket):
    """A connection that breaks when it is used for the last time that it may be."""

    left: int

    def _use(self):
        self.left -= 1
        if self.left < 0:
            raise ConnectionResetError(104, "Connection reset by peer")

    def recv(self, *arguments):
        self._use()
        return super().recv(*arguments)

    def sendall(self, *arguments):
        self._use()
        return super().sendall(*arguments)


@pytest.mark.parametrize("nearby", [(), (0, 1)], ids=["far", "nearby"])
@pytest.mark.parametrize("calls", [True, False])
@pytest.mark.parametrize("uses", range(6))
def test_a_connection_that_breaks_at_any_word_is_made_again(
    stack, monkeypatch, calls, uses, nearby
):
    """Whoever is at the other end, and whatever was said before; or the meeting ends in time."""
    prepare, broken = PeerLinks._prepare, []

    def breaking(self, talk):
        prepare(self, talk)
        if talk.calls is calls and not broken:
            broken.append(Breaking(fileno=talk.socket.detach()))
            broken[0].left = uses
            talk.socket = broken[0]

    monkeypatch.setattr(PeerLinks, "_prepare", breaking)
    seconds = 2 if (calls, uses) == (True, 3) else 20
    members = Members(stack, 2, seconds=seconds, nearby=nearby)
    members.meet()
    if (calls, uses) == (True, 3):  # the door has met the caller, which does not know it
        members.join()
        assert members.met[0] is not None
        assert "m1' has not met 'm0' at" in members.errors[1]
    else:
        members.check()


def test_a_connection_that_is_reset_before_a_word_is_made_again(stack, monkeypatch):
    prepare, reset = PeerLinks._prepare, []

    def resetting(self, talk):
        if talk.calls and not reset:
            reset.append(talk)
            raise OSError(22, "Invalid argument")
        prepare(self, talk)

    monkeypatch.setattr(PeerLinks, "_prepare", resetting)
    members = Members(stack, 2)
    members.meet()
    members.check()


class Between(Relay):
    """Is between a caller and a door, has a certificate of his own, and passes all on."""

    def relay(self, caller):
        tls = Tls(lambda: _of_process(-1))
        door = socket.create_connection(self.at[:2], timeout=20)
        hello = caller.recv(module._HELLO.size, socket.MSG_WAITALL)
        door.sendall(hello)
        ends = tls.wrap(caller, False).socket, tls.wrap(door, True).socket
        for end in ends:
            self.stack.callback(end.close)
        self._pass_on(*ends)

    def _pass_on(self, one, other):
        with suppress(OSError), selectors.DefaultSelector() as selector:
            selector.register(one, selectors.EVENT_READ, other)
            selector.register(other, selectors.EVENT_READ, one)
            while True:
                for key, _ in selector.select():
                    data = key.fileobj.recv(4096)
                    if not data:
                        one.close()
                        other.close()
                        return
                    self.seen.append(data)
                    key.data.sendall(data)


def test_members_meet_encrypted(stack):
    members = Members(stack, 4)
    members.tls = Tls.of_process(always=True)
    members.meet()
    members.check()
    members.close()
    members.tls.finish(Deadline(timedelta(seconds=20)))


def test_somebody_in_between_is_found_out(stack):
    """His certificate is as good as theirs, and he may read all: they do not meet through him."""
    members = Members(stack, 2, seconds=3)
    members.tls = Tls.of_process(always=True)
    between = Between(stack, members)
    members.meet()
    members.join()
    assert members.met == [None, None]
    assert "has not met 'm0'" in members.errors[1]
    assert between.seen
    members.tls.finish(Deadline(timedelta(seconds=20)))
