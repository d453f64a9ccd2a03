"""The process that forks workers: what a forked worker has, and how its end is told."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import msgpack
import pytest
from support.deadlines import LATEST_S
from support.nodes import until, wait_for_end

from pipedream_rt.cluster.worker import fork_server

SERVER = """
import os, random, signal, socket, sys
import msgpack, numpy
from pipedream_rt.cluster.worker.fork_server import serve_forks

def run(fd, name, threads, join):
    if name == "raises":
        raise KeyError(name)
    if name == "is killed":
        os.kill(os.getpid(), signal.SIGKILL)
    with open("/proc/self/comm") as comm:
        said = {
            "name": name, "threads": threads, "join": join, "cwd": os.getcwd(),
            "leads": os.getsid(0) == os.getpid(), "comm": comm.read().strip(),
            "variables": [os.environ.get(name) for name in ("ONE", "OTHER", "LOCAL_RANK")],
            "drawn": [random.random(), numpy.random.rand()],
        }
    os.write(fd, msgpack.packb(said))
    print("printed", flush=True)
    return 7

print(serve_forks(socket.socket(fileno=int(sys.argv[1])), run, False))
"""


class Forks:
    """A fork server whose workers run a function of the test."""

    def __init__(self):
        self.connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.connection.settimeout(LATEST_S)
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-c", SERVER, str(theirs.fileno())], pass_fds=(theirs.fileno(),),
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                env={**os.environ, "OTHER": "of the server"},
            )  # fmt: skip

    def ended(self, name="w", out=None, **more):
        """What a worker has written, and its exit code as the server tells it."""
        request = {
            "name": name, "threads": 1, "number": 0, "set": {}, "unset": [], "cwd": None, **more,
        }  # fmt: skip
        reading, writing = os.pipe()
        fds = [writing] if out is None else [writing, out]
        socket.send_fds(self.connection, [msgpack.packb(request)], fds)
        os.close(writing)
        answer, (pidfd,), _, _ = socket.recv_fds(self.connection, 1 << 12, 1)
        os.close(pidfd)
        told = msgpack.unpackb(self.connection.recv(1 << 12))
        assert told["ended"] == msgpack.unpackb(answer)["pid"]
        with open(reading, "rb") as stream:
            said = stream.read()
        return msgpack.unpackb(said) if said else None, told["code"]

    def close(self):
        """Close the connection; return what `serve_forks` has returned, and the errors of all."""
        self.connection.close()
        return self.process.communicate(timeout=LATEST_S)


@pytest.fixture
def forks():
    made = Forks()
    yield made
    made.close()


def test_workers_that_have_ended_are_told_of_and_those_that_run_are_not(monkeypatch):
    found = [(7, 3 << 8), (8, signal.SIGKILL), (0, 0)]
    monkeypatch.setattr(fork_server.os, "waitpid", lambda pid, options: found.pop(0))
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with here:
        with there:
            fork_server._report_ends(there)
        told = [msgpack.unpackb(here.recv(1 << 12)) for _ in range(2)]
        assert here.recv(1) == b""
    assert told == [{"ended": 7, "code": 3}, {"ended": 8, "code": -signal.SIGKILL}]


@pytest.mark.processes
def test_a_forked_worker_has_what_was_asked_for_and_its_end_is_told(forks, tmp_path):
    out = os.open(tmp_path / "out", os.O_WRONLY | os.O_CREAT)
    said, code = forks.ended(
        "worker-with-a-long-name", out, threads=3, number=4, cwd=str(tmp_path),
        set={"ONE": "1"}, unset=["OTHER"],
    )  # fmt: skip
    os.close(out)
    assert code == 7
    assert (said["name"], said["threads"], said["join"]) == ("worker-with-a-long-name", 3, None)
    assert said["variables"] == ["1", None, "4"]
    assert said["cwd"] == str(tmp_path)
    assert said["comm"] == "worker-with-a-l"
    assert said["leads"]  # Ctrl-C at the terminal does not reach it
    assert (tmp_path / "out").read_text() == "printed\n"
    # What one worker was given does not stay for the next, and each draws numbers of its own.
    other, _ = forks.ended(join={"address": "here:1"})
    assert other["variables"] == [None, "of the server", "0"]
    assert other["cwd"] == os.getcwd()
    assert not {*said["drawn"]} & {*other["drawn"]}
    assert forks.ended("raises") == (None, 1)
    assert forks.ended("is killed") == (None, -signal.SIGKILL)
    printed, errors = forks.close()
    assert printed.endswith("True\n")  # one joins by itself, and has to die with its server
    assert "KeyError: 'raises'" in errors


SCRIPT = """
import ctypes, os, socket, sys
from pipedream_rt.cluster.forked_workers import ForkServer
forks, pairs = ForkServer(), [socket.socketpair() for _ in range(2)]
workers = [forks.fork("w", 1, theirs) for _, theirs in pairs]
print(forks.pid, *(worker.pid for worker in workers), flush=True)
if ctypes.CDLL(None).fork() == 0:  # as a library does, of which Python knows nothing
    os.close(1)
    sys.stdin.read()
    os._exit(0)
sys.stdin.read()
"""


@pytest.mark.processes
def test_workers_that_cannot_notice_the_death_of_their_script_are_killed():
    """One is stopped, one has ended; and a child of the script holds all its connections."""
    reading, writing = os.pipe()
    with subprocess.Popen(
        [sys.executable, "-c", SCRIPT], stdin=reading, stdout=subprocess.PIPE, text=True
    ) as script:
        os.close(reading)
        server, stopped, killed = map(int, script.stdout.readline().split())
        children = Path(f"/proc/{script.pid}/task/{script.pid}/children")
        until(lambda: len(children.read_text().split()) == 2, "the child beside the server")
        os.kill(stopped, signal.SIGSTOP)
        os.kill(killed, signal.SIGKILL)
        script.kill()
        script.wait(LATEST_S)
        began = time.monotonic()
        wait_for_end((stopped, killed, server))
        assert time.monotonic() - began < 3  # a child that holds them would do so for longer
        os.close(writing)


def test_who_was_started_by_another_process_than_it_talks_to_has_no_parent():
    """It has died, and its number may be another's by now."""
    ours, theirs = socket.socketpair()  # at both ends is this process, whose parent is another
    with ours, theirs:
        before = len(os.listdir("/proc/self/fd"))
        assert fork_server._open_parent(ours) is None
        assert len(os.listdir("/proc/self/fd")) == before
