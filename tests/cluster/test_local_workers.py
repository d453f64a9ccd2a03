import contextlib
import os
import socket
import subprocess

import pytest

from pipedream_rt.cluster.forked_workers import ForkServer
from pipedream_rt.cluster.local import Local


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


def test_how_a_worker_ended():
    """Nothing is known of one that was started elsewhere."""
    local = workers()
    local.processes |= {"gone": Ended(-9), "there": Ended(None)}
    names = ("gone", "there", "elsewhere")
    assert [local.ending(name) for name in names] == ["killed by SIGKILL", "still running", ""]


def test_a_connection_has_the_name_of_the_worker_that_inherits_its_other_end():
    """After an error, those that were started are known."""
    local = workers(forks := Forks())
    with contextlib.ExitStack() as opened:
        with pytest.raises(OSError, match="no more processes"):
            local.start(["a", "b", "c"])
        assert local.processes.keys() == {"a", "b"}
        for end in (*local.connections.values(), *forks.inherited.values()):
            opened.enter_context(end)
        for name, end in forks.inherited.items():
            end.sendall(name.encode())
        assert {n: local.connections[n].recv(9) for n in "ab"} == {"a": b"a", "b": b"b"}


def test_where_no_worker_was_started_no_server_is_watched():
    assert workers().open_end_of_forks() is None
