import socket
import subprocess

import pytest

from pipedream_rt.cluster.control import Control
from pipedream_rt.cluster.forked_workers import ForkServer
from pipedream_rt.cluster.local_workers import LocalWorkers


class Ended:
    """A process that has ended, or that runs on where its exit code is None."""

    def __init__(self, code):
        self.code = code

    def wait(self, timeout):
        if self.code is None:
            raise subprocess.TimeoutExpired("worker", timeout)
        return self.code


@pytest.mark.parametrize(
    ("code", "ending"),
    [
        (0, "exit code 0"),
        (3, "exit code 3"),
        (-9, "killed by SIGKILL"),
        (-11, "killed by SIGSEGV"),
        (None, "still running"),
    ],
)
def test_how_a_worker_ended(code, ending):
    local = LocalWorkers(1, ForkServer())
    local.processes["w"] = Ended(code)
    assert local.ending("w") == ending


def test_nothing_is_known_of_a_worker_that_was_started_elsewhere():
    assert LocalWorkers(1, ForkServer()).ending("w") == ""


def test_a_connection_has_the_name_of_the_worker_that_inherited_its_other_end():
    local = LocalWorkers(1, ForkServer())
    ours, theirs = socket.socketpair()
    with ours, theirs:
        local.controls["w"] = Control(ours, "w")
        assert local.name_of(local.controls["w"]) == "w"
        assert local.name_of(Control(theirs, "a stranger")) is None
