import contextlib
import os
import socket
import subprocess

import pytest

from pipedream_rt.cluster.forked_workers import ForkServer
from pipedream_rt.cluster.local import Local
from pipedream_rt.cluster.worker_life import WorkerEnd


def workers(forks=None):
    return Local(1, forks or ForkServer())


class Ended:
    """A process that has ended, or that runs on where its exit code is None."""

    def __init__(self, code):
        self.code = code

    def wait(self, timeout):
        if self.code is None:
            raise subprocess.TimeoutExpired("worker", timeout)
        return self.code


class Forks:
    """Keeps what each worker would inherit; the third one cannot be forked."""

    def __init__(self):
        self.inherited = {}

    def fork(self, name, threads, control, number):
        if number == 2:
            raise OSError("no more processes")
        self.inherited[name] = socket.socket(fileno=os.dup(control.fileno()))
        return Ended(threads)


@pytest.mark.parametrize(
    ("code", "ending"),
    [
        (0, "exit code 0"),
        (3, "exit code 3"),
        (-9, "killed by SIGKILL"),
        (-11, "killed by SIGSEGV"),
        (None, "still running"),
        (WorkerEnd.UNKNOWN, "the process that forked it and could tell how it ended is gone too"),
    ],
)
def test_how_a_worker_ended(code, ending):
    local = workers()
    local.processes["w"] = Ended(code)
    assert local.ending("w") == ending


def test_nothing_is_known_of_a_worker_that_was_started_elsewhere():
    assert workers().ending("w") == ""


def test_a_connection_has_the_name_of_the_worker_that_inherits_its_other_end():
    local = workers(forks := Forks())
    with contextlib.ExitStack() as opened:
        local.start(["a", "b"])
        for end in (*local.connections.values(), *forks.inherited.values()):
            opened.enter_context(end)
        for name, end in forks.inherited.items():
            end.sendall(name.encode())
        assert {n: end.recv(9) for n, end in local.connections.items()} == {"a": b"a", "b": b"b"}
        assert local.processes.keys() == {"a", "b"}


def test_after_an_error_those_that_were_started_are_known():
    local = workers(forks := Forks())
    with pytest.raises(OSError, match="no more processes"):
        local.start(["a", "b", "c"])
    assert local.processes.keys() == {"a", "b"}
    for end in (*local.connections.values(), *forks.inherited.values()):
        end.close()


def test_where_no_worker_was_started_no_server_is_watched():
    assert workers().open_end_of_forks() is None
