"""The tunnel carries what this process's agent sends, and nothing of anybody else."""

import errno
import queue
import random
import socket
import subprocess
import sys
import threading
from contextlib import closing
from datetime import timedelta

import pytest
from support.deadlines import LATEST_S

from pipedream_rt.errors import TransportError
from pipedream_rt.transport.group import Group
from pipedream_rt.transport.rpc import tunnel
from pipedream_rt.transport.rpc.tunnel import _PART, Tunnel, _Relay

pytestmark = pytest.mark.threads
NAMES = ("coordinator", "w0")


class Two:
    """The tunnels of two members, whose links are this object."""

    def __init__(self):
        self.sent = queue.SimpleQueue()
        groups = [Group(generation=1, rank=r, names=NAMES, hosts=(0,), key=b"k") for r in (0, 1)]
        self.ends = [Tunnel(groups[0], self._to(1)), Tunnel(groups[1], self._to(0))]
        self.ends[0].start((1,), "open")  # the fence is what `rights` are for
        self.ends[1].start((), "open")
        self.ends[0].guard(1)  # nobody calls the agent of the coordinator, so it is not there

    def _to(self, target):
        def send(rank, data):
            assert rank == target
            self.sent.put(_PART.unpack_from(data))
            self.ends[target].receive(1 - target, data)

        return send

    @property
    def gate(self):
        host, _, port = self.ends[0].address_of(1).rpartition("/")[2].rpartition(":")
        return host, int(port)

    def close(self):
        for end in self.ends:
            end.close()


@pytest.fixture
def two():
    made = Two()
    yield made
    made.close()


@pytest.fixture
def agent():
    """What stands for the agent of the worker: it listens on loopback."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(20)
        yield listener


def read(connection, size):
    data = b""
    while len(data) < size and (part := connection.recv(size - len(data))):
        data += part
    return data


def connected(two, agent):
    """Both ends of a connection through the gate, when the agent listens."""
    two.ends[1].guard(agent.getsockname()[1])
    caller = socket.create_connection(two.gate, timeout=LATEST_S)
    callee, _ = agent.accept()
    callee.settimeout(20)
    return caller, callee


def test_bytes_go_both_ways_and_an_end_ends_the_other(two, agent):
    caller, callee = connected(two, agent)
    data = random.Random(1).randbytes(500_000)
    with caller, callee:
        caller.sendall(data)
        assert read(callee, len(data)) == data
        callee.sendall(data[::-1])
        assert read(caller, len(data)) == data[::-1]
        caller.close()
        assert read(callee, 1) == b""


def test_what_a_connection_does_not_take_waits_in_its_order():
    listener = socket.create_server(("127.0.0.1", 0))
    with listener, socket.create_connection(listener.getsockname()) as near:
        far, _ = listener.accept()
        relay, parts = _Relay(near), [bytes([n]) * (1 << 20) for n in range(8)]
        relay.waiting.extend(parts)
        with far:
            far.settimeout(LATEST_S)
            assert not relay.flush()
            came = b""
            while not relay.flush():
                came += far.recv(1 << 20)
            came += read(far, sum(map(len, parts)) - len(came))
    assert came == b"".join(parts)


def test_what_comes_before_the_agent_listens_comes_in_its_order(two, agent):
    with socket.create_connection(two.gate, timeout=LATEST_S) as caller:
        caller.sendall(b"first")
        two.sent.get(timeout=LATEST_S)  # it was opened, and is on its way
        caller.sendall(b", second")
        two.ends[1].guard(agent.getsockname()[1])
        callee, _ = agent.accept()
        with callee:
            callee.settimeout(20)
            assert read(callee, 13) == b"first, second"


def test_the_address_of_the_agent_is_that_of_the_gate_in_its_first_answer(two, agent):
    caller, callee = connected(two, agent)
    with caller, callee:
        told = b"\\x15127.0.0.1:%d and more" % agent.getsockname()[1]
        callee.sendall(told)
        answer = read(caller, len(told))
        assert answer == told.replace(b"%d" % agent.getsockname()[1], b"%05d" % two.gate[1])
        callee.sendall(told)
        assert read(caller, len(told)) == told


STRANGER = """
import socket, sys
host, gate, port = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
with socket.socket() as stranger:
    stranger.bind((host, port))
    stranger.settimeout(1)
    try:
        stranger.connect(("127.0.0.1", gate))
        stranger.sendall(b"junk")
        print("open" if stranger.recv(1) else "closed")
    except TimeoutError:
        print("nothing")
    except OSError:
        print("closed")
"""


def stranger(host, gate, port):
    done = subprocess.run(
        [sys.executable, "-c", STRANGER, host, str(gate), str(port)],
        capture_output=True, text=True, timeout=LATEST_S, check=True,
    )  # fmt: skip
    return done.stdout.strip()


@pytest.mark.processes
@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2"])
def test_a_gate_is_closed_to_another_process(two, agent, host):
    """Also to one that has the agent's own port, on another address of loopback."""
    caller, callee = connected(two, agent)
    with caller, callee:
        port = caller.getsockname()[1] if host == "127.0.0.2" else 0
        assert stranger(host, two.gate[1], port) == "closed"
        caller.sendall(b"still there")
        assert read(callee, 11) == b"still there"
    opened = 0
    while not two.sent.empty():
        opened += two.sent.get()[2] == 0
    assert opened == 1


@pytest.mark.rights
@pytest.mark.processes
def test_the_agent_is_closed_to_another_process(two, agent):
    """Also to one that takes the port of a connection that has ended, or has it elsewhere."""
    port = agent.getsockname()[1]
    two.ends[1].guard(port)
    assert stranger("127.0.0.1", port, 0) == "nothing"
    caller, callee = connected(two, agent)
    let_in = callee.getpeername()[1]
    with caller, callee:
        assert stranger("127.0.0.2", port, let_in) == "nothing"
        caller.close()
        assert read(callee, 1) == b""
    assert let_in not in two.ends[1]._let_in


def test_afterwards_nothing_listens(two, agent):
    caller, callee = connected(two, agent)
    places, shut = (two.gate, agent.getsockname()), threading.Event()
    with caller, callee:
        two.ends[0].shut()
        two.ends[1].shut()
        two.ends[0]._call_in_thread(shut.set)  # behind the end of the gate
        caller.sendall(b"goes on")
        assert read(callee, 7) == b"goes on"
        assert shut.wait(LATEST_S)
        for place in places:
            with pytest.raises(OSError, match=r"refused|timed out"):
                socket.create_connection(place, timeout=5)


def test_a_stranger_who_came_before_the_end_is_cut_off(agent, monkeypatch):
    """Where the kernel filters nothing, as it could have come before the filter."""
    monkeypatch.setattr(tunnel, "can_filter", lambda: False)
    two = Two()
    with closing(two):
        caller, callee = connected(two, agent)
        with caller, callee, socket.create_connection(agent.getsockname()):
            stranger, _ = agent.accept()
            with stranger:
                two.ends[1].shut()
                with pytest.raises(OSError, match="not connected"):
                    stranger.getpeername()
            caller.sendall(b"still there")
            assert read(callee, 11) == b"still there"


@pytest.mark.parametrize("waiting", [0, 1])
def test_the_agent_is_waited_for_while_somebody_waits_at_it_and_not_for_ever(
    two, agent, monkeypatch, waiting
):
    """Nobody waits; or somebody whom the agent has not accepted when the time was over."""
    monkeypatch.setattr(tunnel, "waiting_at", lambda fd: waiting)
    monkeypatch.setattr(tunnel, "_GUARD_TIMEOUT", timedelta(0 if waiting else 1))
    monkeypatch.setattr(tunnel.os, "sched_yield", lambda: pytest.fail("it waits"))
    two.ends[1].guard(agent.getsockname()[1])


def test_a_kernel_that_fences_nothing_off_where_it_must_is_told_of(two, agent, monkeypatch):
    def refuses(fd, ports):
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(tunnel, "accept_only", refuses)
    monkeypatch.setattr(two.ends[1], "_fenced", True)
    with pytest.raises(TransportError, match=r"not permitted\); PIPEDREAM_RT_RPC=off does without"):
        two.ends[1].guard(agent.getsockname()[1])


def test_parts_that_make_no_sense_are_passed_over(two, agent):
    """A member of another version; never an error in the thread that carries."""
    draw = random.Random(2)
    for _ in range(300):
        two.ends[1].receive(0, draw.randbytes(draw.randrange(20)))
        two.ends[1].receive(
            0, _PART.pack(draw.randrange(3), 100 + draw.randrange(3), draw.randrange(5))
        )
    caller, callee = connected(two, agent)
    while True:  # those that the parts have opened come first
        with callee:
            caller.sendall(b"x")
            callee.settimeout(0.5)
            try:
                if read(callee, 1) == b"x":
                    break
            except TimeoutError:
                pass
        callee, _ = agent.accept()
    caller.close()
