import socket

import pytest

from pipedream_rt.cluster.control import Control
from pipedream_rt.cluster.members import Member, WorkerSlot, natural, tell
from pipedream_rt.deadline import Deadline
from pipedream_rt.errors import PeerLost, TransportError


@pytest.fixture
def pair():
    left, right = socket.socketpair()
    with left, right:
        yield Control(left, "right"), Control(right, "left")


def test_numbers_in_names_sort_as_numbers():
    names = ["w10", "w2", "a-2-b", "a-10-a", "w", "10", "9"]
    expected = ["a-2-b", "a-10-a", "w", "w2", "w10", "9", "10"]
    assert sorted(names, key=natural) == expected


def test_names_that_differ_have_different_keys():
    assert natural("a1") != natural("a2")
    assert natural("w") < natural("w0")


def test_a_lost_member_is_named_with_its_stages_its_process_and_its_end(pair):
    member = Member(
        "w1",
        "pid 7 on here",
        pair[0],
        seats=[WorkerSlot(1, "worker 1", (1, 3))],
        stage=1,
        doing="F4",
    )
    problem = PeerLost("it closed the connection", peer="w1")
    error = member.lost("killed by SIGKILL", problem, " (note)")
    assert str(error) == (
        "worker 'w1' (stages 1, 3, pid 7 on here) is gone: killed by SIGKILL (note)"
    )
    assert (error.worker, error.stage, error.doing, error.crashed) == ("w1", 1, "F4", False)
    assert member.lost("killed by SIGSEGV").crashed
    assert error.__cause__ is problem
    assert str(member.lost("", TransportError("odd"))).endswith("is gone (odd)")


def test_a_member_whose_process_still_runs_does_not_answer(pair):
    member = Member("w1", "pid 7 on here", pair[0], seats=[WorkerSlot(2, "stage 2", (2,))], stage=2)
    text = "worker 'w1' (stage 2, pid 7 on here) does not answer: still running"
    assert str(member.lost("still running")) == text
    assert str(member.lost("")) == "worker 'w1' (stage 2, pid 7 on here) is gone"


def test_a_member_that_is_gone_does_not_keep_a_record_from_the_others(pair):
    left, right = pair
    ours, theirs = socket.socketpair()
    theirs.close()
    with ours:
        gone = Member("gone", "", Control(ours, "gone"))
        tell([gone, Member("there", "", left)], {"type": "stop"})
    assert right.receive(Deadline(None)) == {"type": "stop"}
