"""How long a worker waits before it asks again for a place; who answers is in test_dial.py."""

import socket

import pytest
from support.callers import soon

from pipedream_rt.cluster.control import Control
from pipedream_rt.cluster.dial import DialOptions
from pipedream_rt.cluster.identity import Secret
from pipedream_rt.cluster.records import HEAD, welcome
from pipedream_rt.cluster.worker import joining
from pipedream_rt.cluster.worker.joining import JoinAttempts, WorkerSettings
from pipedream_rt.cluster.worker_life import WorkerEnd
from pipedream_rt.errors import PeerLost, PipelineError

SECRET = Secret.generated()


@pytest.fixture
def pauses(monkeypatch):
    """The pauses that a worker would make, which take no time here."""
    found = []
    monkeypatch.setattr(joining, "pause", found.append)
    return found


@pytest.fixture
def visits(monkeypatch):
    """What the coordinator answers, visit by visit: an error or an exit code."""
    answers = []

    def serve(control, worker, returns):
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def reached(place, who, secret):
        connection, other = socket.socketpair()
        other.close()
        return Control(connection, who)

    monkeypatch.setattr(joining, "serve", serve)
    monkeypatch.setattr(joining, "reached", reached)
    return answers


LAST_WORDS = [{"type": "stop"}, {"type": "exit", "failed": True}, None]


@pytest.mark.parametrize("last", LAST_WORDS, ids=["stop", "exit", "none"])
def test_a_worker_that_was_admitted_to_a_group_that_is_never_formed(ends, last):
    """It may live again: the coordinator may try with others."""
    coordinator, control = ends
    coordinator.send({"type": "admitted", "secret": None})
    if last is not None:
        coordinator.send(last)
    coordinator._socket.shutdown(socket.SHUT_WR)  # all that it is told is there before it asks
    assert joining.serve(control, WorkerSettings("w", 1, SECRET)) == WorkerEnd.AGAIN
    assert [coordinator.receive(soon())["type"] for _ in range(2)] == ["hello", "ready"]


def test_an_answer_to_ready_that_cannot_be_read_is_no_place(ends):
    coordinator, control = ends
    coordinator.send({"type": "admitted", "secret": None})
    coordinator._socket.send(HEAD.pack(3) + b"xyz")
    with pytest.raises(joining.NotAdmitted, match="the coordinator's answer to 'ready'"):
        joining.serve(control, WorkerSettings("w", 1, SECRET))


def test_a_worker_whose_coordinator_is_lost_says_so_and_may_come_again(ends, monkeypatch, caplog):
    def host_stage(*arguments):
        raise PeerLost("it is gone", peer="coordinator")

    coordinator, control = ends
    monkeypatch.setattr(joining, "_import_torch", lambda: host_stage)
    for record in ({"type": "admitted", "secret": None}, welcome(1, ["coordinator", "w"], "")):
        coordinator.send(record)
    assert joining.serve(control, WorkerSettings("w", 1, SECRET)) == WorkerEnd.COORDINATOR_LOST
    assert "it is gone" in caplog.text


TAKEN = joining.NotAdmitted("the name 'w' is taken")


def serve_at(failures=0, **options):
    place, settings = DialOptions("here:1", 1, **options), WorkerSettings("w", 1, SECRET)
    return joining.serve_at(place, settings, JoinAttempts(failures))


@pytest.mark.parametrize(
    ("options", "times", "expected"),
    [
        ({}, 7, [0, 1, 2, 4, 8, 16, 30, 30]),
        ({"failures": 3}, 0, [4]),  # it goes on counting in a new process image
        ({"longest_pause_s": 5}, 5, [0, 1, 2, 4, 5, 5]),  # one that may be told the end
    ],
)
def test_a_worker_without_a_place_waits_longer_each_time(pauses, visits, options, times, expected):
    visits += [TAKEN] * times + [0]
    assert serve_at(persist=True, **options) == 0
    assert pauses == expected


@pytest.mark.parametrize(
    ("persist", "refusal"), [(False, TAKEN), (True, PipelineError("it has another torch: taken"))]
)
def test_one_that_does_not_persist_ends_and_after_a_refusal_that_does_not_pass_every_one(
    pauses, visits, persist, refusal
):
    visits += [refusal]
    with pytest.raises(PipelineError, match="taken"):
        serve_at(persist=persist)
    assert pauses == [0]


def test_a_worker_that_has_lost_its_group_tries_often_for_a_while():
    tries = JoinAttempts(5).after(WorkerEnd.COORDINATOR_LOST, now=1000.0)
    assert tries == JoinAttempts(0, lost=1000.0)
    assert tries.pause_s(1000.0) == 0
    pauses = []
    for _ in range(8):
        tries = tries.after(WorkerEnd.AGAIN, now=1001.0)
        pauses.append(tries.pause_s(1001.0))
    assert pauses[0] == 0.1
    assert max(pauses) == pauses[-1] == 0.5
    assert tries.pause_s(1000.0 + joining._EAGER_S) == 30
    assert tries.after(0, now=1001.0) == JoinAttempts()
