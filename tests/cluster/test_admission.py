import secrets
import socket

import pytest

from pipedream_rt.cluster.addresses import boot_id
from pipedream_rt.cluster.admission import admit, process_of, refusal_of
from pipedream_rt.cluster.control import VERSION, Control
from pipedream_rt.cluster.keys import COORDINATOR_END, NONCE, WORKER_END, Handshake
from pipedream_rt.cluster.members import Member
from pipedream_rt.deadline import Deadline
from pipedream_rt.software import software

SECRET, ASKED = b"the secret of the job".ljust(NONCE), secrets.token_bytes(NONCE)


def hello(secret=SECRET, asked=ASKED, channel=b"", **changes):
    """What a worker says that was called with the nonce ``asked``."""
    nonce = secrets.token_bytes(NONCE)
    said = {
        "name": "w", "pid": 7, "host": "here", "boot": "b", "version": VERSION,
        "software": software(), "returns": True, **changes,
    }  # fmt: skip
    return {
        "type": "hello",
        **said,
        "nonce": nonce,
        "proof": Handshake(secret, asked, nonce, channel).prove(said),
    }


def refused(said, members=(), channel=b""):
    nonce = said["nonce"] if isinstance(said["nonce"], bytes) else b""
    return refusal_of(said, Handshake(SECRET, ASKED, nonce, channel), members)


@pytest.fixture
def pair():
    left, right = socket.socketpair()
    with left, right:
        yield Control(left, "somebody"), Control(right, "the coordinator")


def test_a_worker_that_knows_the_secret_is_not_refused():
    assert refused(hello()) is None
    assert refused(hello(channel=b"c"), channel=b"c") is None


def test_another_version_of_the_protocol():
    reason, passing, _ = refused(hello(version=1))
    assert not passing
    assert reason.startswith(f"it speaks protocol 1, the coordinator {VERSION}; install the same")


@pytest.mark.parametrize("field", ["name", "pid", "host", "boot", "software", "nonce", "proof"])
@pytest.mark.parametrize(
    "value", [None, "", "x\x1b[2J", "x" * 300, b"", b"x" * 33, -1, 2**40, True, 1.5, [], {}]
)
def test_a_field_of_another_type_or_length(field, value):
    """The boot of a machine that does not say it is empty."""
    if value == "" and field in ("host", "boot", "software"):
        return
    refusal = refused({**hello(), field: value})
    assert refusal.reason.startswith(f"its hello makes no sense: its {field!r} is ")
    assert refusal.reason.isprintable()
    assert len(refusal.reason) < 200


@pytest.mark.parametrize(
    "said",
    [
        hello(secret=b"another"),
        hello(asked=b"the nonce of another call"),
        {**hello(), "name": "another"},
        {**hello(), "nonce": b"another".ljust(NONCE)},
        hello(channel=b"encrypted with the certificate of somebody in between"),
    ],
    ids=["secret", "call", "name", "nonce", "channel"],
)
def test_a_proof_of_something_else(said):
    assert "does not know the job's secret" in refused(said).reason


def test_a_name_that_is_taken(pair):
    members = [Member("w", "pid 1 on there", pair[0])]
    reason, passing, _ = refused(hello(), members)
    assert passing
    assert reason == "the name 'w' is taken by pid 1 on there; give each worker its own"
    assert refused(hello(name="v"), members) is None


def test_other_software_would_compute_other_bits():
    reason, passing, proven = refused(hello(software="torch 1.13.0"))
    assert reason.startswith(f"it has torch 1.13.0, and the script {software()}; its stages might")
    assert (passing, proven) == (False, True)
    changed = {**hello(), "software": "torch 1.13.0"}
    assert "does not know the job's secret" in refused(changed).reason


def test_the_connection_of_a_member_is_signed_from_then_on(pair):
    left, right = pair
    said = hello(boot=boot_id())
    talk = Handshake(SECRET, ASKED, said["nonce"])
    member = admit(left, said, talk)
    assert (member.name, member.description) == ("w", "pid 7 on here")
    assert member.same_clock == (boot_id() != "")
    assert left.peer == "worker 'w'"
    assert right.receive(Deadline(None)) == {"type": "admitted", "proof": talk.prove_admission()}
    right.secure(talk.session_key(), WORKER_END, COORDINATOR_END)
    ready = {"type": "ready", "processor": "a kind", "obstacle": ""}
    right.send(ready)
    assert left.receive(Deadline(None)) == ready


@pytest.mark.parametrize("version", [None, 1, "6", b"x", 1 << 60, "\n" * 100])
def test_another_version_of_whatever_type(version):
    reason, passing, _ = refused(hello(version=version))
    assert not passing
    assert reason.startswith("it speaks protocol ")
    assert reason.isprintable()


def test_text_from_outside_is_escaped_and_cut():
    assert process_of({"pid": 1, "host": "h\n\x1b[31mERROR"}) == r"pid 1 on h\n\x1b[31mERROR"
    assert len(process_of({"pid": 1, "host": "h" * 1000})) < 120
    assert process_of({}) == "pid None on None"
