import secrets
import socket

import pytest

from pipedream_rt.cluster.addresses import boot_id
from pipedream_rt.cluster.admission import admit, process_of, refusal_of
from pipedream_rt.cluster.control import VERSION, Control
from pipedream_rt.cluster.keys import COORDINATOR_END, NONCE, WORKER_END, prove, session_key
from pipedream_rt.cluster.members import Member
from pipedream_rt.deadline import Deadline

SECRET, ASKED = b"the secret of the job", secrets.token_bytes(NONCE)


def hello(secret=SECRET, asked=ASKED, **changes):
    """What a worker says that was called with the nonce ``asked``."""
    nonce = secrets.token_bytes(NONCE)
    said = {"name": "w", "pid": 7, "host": "here", "boot": "b", "version": VERSION, **changes}
    return {**said, "nonce": nonce, "proof": prove(secret, asked, nonce, said)}


@pytest.fixture
def pair():
    left, right = socket.socketpair()
    with left, right:
        yield Control(left, "somebody"), Control(right, "the coordinator")


def test_a_worker_that_knows_the_secret_is_not_refused():
    assert refusal_of(hello(), ASKED, SECRET, []) is None


def test_another_version_of_the_protocol():
    reason, passing = refusal_of(hello(version=1), ASKED, SECRET, [])
    assert not passing
    assert reason == f"it speaks protocol 1, the coordinator {VERSION}"


@pytest.mark.parametrize("field", ["nonce", "proof"])
@pytest.mark.parametrize("value", [None, "text", 7])
def test_no_proof(field, value):
    refusal = refusal_of({**hello(), field: value}, ASKED, SECRET, [])
    assert refusal.reason == "it shows no proof of the job's secret"


@pytest.mark.parametrize(
    "said",
    [
        hello(secret=b"another"),
        hello(asked=b"the nonce of another call"),
        {**hello(), "name": "another"},
        {**hello(), "nonce": b"another"},
    ],
    ids=["secret", "call", "name", "nonce"],
)
def test_a_proof_of_something_else(said):
    assert "does not know the job's secret" in refusal_of(said, ASKED, SECRET, []).reason


def test_a_name_that_is_taken(pair):
    members = [Member("w", "pid 1 on there", pair[0])]
    reason, passing = refusal_of(hello(), ASKED, SECRET, members)
    assert passing
    assert reason == "the name 'w' is taken by pid 1 on there; give each worker its own"
    assert refusal_of(hello(name="v"), ASKED, SECRET, members) is None


def test_the_connection_of_a_member_is_signed_from_then_on(pair):
    left, right = pair
    said = hello(boot=boot_id())
    member = admit(left, said, ASKED, SECRET)
    assert (member.name, member.description) == ("w", "pid 7 on here")
    assert member.same_clock == (boot_id() != "")
    assert left.peer == "worker 'w'"
    assert right.receive(Deadline(None)) == {"type": "admitted"}
    right.secure(session_key(SECRET, ASKED, said["nonce"]), WORKER_END, COORDINATOR_END)
    right.send({"type": "ready"})
    assert left.receive(Deadline(None)) == {"type": "ready"}


def test_a_hello_without_a_process():
    assert process_of({}) == "pid None on None"
