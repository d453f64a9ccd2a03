"""Who listens where a coordinator should: it admits, refuses, is another program or nobody."""

import os
import socket
import struct
import threading
from contextlib import closing, contextmanager, suppress
from datetime import timedelta

import pytest
from support.callers import OTHER, SECRET, soon
from support.deadlines import LATEST_S

from pipedream_rt.cluster import dial
from pipedream_rt.cluster.dial import DialOptions, JobOver, NotAdmitted, NotOfThisJob
from pipedream_rt.cluster.peer_listeners import listening_at
from pipedream_rt.cluster.records import HEAD, HELLO, packed, unpacked
from pipedream_rt.errors import ConfigError, PeerLost, PipelineError
from pipedream_rt.schema import problem_of


@pytest.fixture
def pauses(monkeypatch):
    """The pauses that a worker would make, which take no time here."""
    found = []
    monkeypatch.setattr(dial, "pause", found.append)
    return found


@contextmanager
def listening(answer):
    """Have a function answer the connections to a port, until the block ends; its address."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve():
            with suppress(OSError):  # it is shut down
                while True:
                    connection, _ = listener.accept()
                    with connection, suppress(OSError):  # the caller may be gone
                        connection.settimeout(LATEST_S)
                        answer(connection)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"127.0.0.1:{listener.getsockname()[1]}"
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


def coordinator(answer, secret, heard):
    """Answer a worker as a coordinator with a secret does; ``heard`` gets the worker's hello."""

    def serve(connection):
        with secret.tls(called=True).wrap_socket(connection, server_side=True) as encrypted:
            stream = encrypted.makefile("rb")
            (length,) = HEAD.unpack(stream.read(HEAD.size))
            heard.append(unpacked(stream.read(length), "the worker"))
            encrypted.sendall(packed(answer))

    return serve


def join(address, secret=SECRET, call_timeout=dial.CALL_TIMEOUT):
    """Ask whoever listens at an address for a place, once."""
    control = dial.reached(DialOptions(address, 5, False, call_timeout), "the coordinator", secret)
    with closing(control):
        dial.ask_to_join(control, "w", secret)


def refused(passing):
    return {"type": "refused", "reason": "the job is full", "passing": passing}


@pytest.mark.parametrize(
    ("answer", "error", "words"),
    [
        (refused(True), NotAdmitted, "refused this worker: the job is full"),
        (refused(False), PipelineError, "refused this worker: the job is full"),
        ({"type": "over", "code": 7}, JobOver, "exit code 7"),
    ],
    ids=["for now", "for good", "over"],
)
@pytest.mark.parametrize("secret", [SECRET, OTHER], ids=["of the job", "of another job"])
def test_an_answer_is_final_from_somebody_who_knows_the_secret(answer, error, words, secret):
    """Anybody may listen where a persistent worker tries again, and send it away."""
    heard = []
    if secret is OTHER:
        error, words = NotOfThisJob, "does not know the secret that the other has"
    with (
        listening(coordinator(answer, secret, heard)) as address,
        pytest.raises(PipelineError, match=words) as raised,
    ):
        join(address)
    assert type(raised.value) is error
    assert getattr(raised.value, "code", 7) == 7
    assert bool(heard) == (secret is SECRET)
    for hello in heard:
        assert not problem_of(hello, HELLO)
        assert (hello["name"], hello["pid"], hello["job"]) == ("w", os.getpid(), SECRET.job)
        assert SECRET.text not in str(hello)


def silent(connection):
    """Say nothing until the caller is gone."""
    while connection.recv(1 << 12):
        pass


def speaks_http(connection):
    connection.recv(1 << 12)
    connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
    silent(connection)


def resets(connection):
    """End the connection as the kernel does for those who wait when a coordinator is killed."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def hangs_up(connection):
    connection.recv(1 << 12)


@pytest.mark.parametrize(
    ("answer", "error", "words"),
    [
        (silent, NotAdmitted, "has taken the connection, and has said nothing for 0.2 s; it may"),
        (speaks_http, NotOfThisJob, "the other end does not speak TLS 1.3; is it another program"),
        (resets, NotAdmitted, "the coordinator at .* ended before it shook hands"),
        (hangs_up, NotAdmitted, "the coordinator at .* ended before it shook hands"),
    ],
)
def test_whoever_listens_and_is_no_coordinator_is_told_of(answer, error, words):
    """Each wait has an end, and a persistent worker tries again later.

    One that ends may have accepted nobody for hours, as in the middle of a generation.
    """
    timeout = timedelta(seconds=0.2 if answer is silent else LATEST_S)
    with listening(answer) as address, pytest.raises(error, match=words) as raised:
        join(address, call_timeout=timeout)
    assert type(raised.value) is error


@pytest.mark.parametrize(
    "said",
    [
        {"type": "admitted", "secret": None},
        {"type": "welcome"},
        {"type": "shut"},
        {"type": "refused", "reason": 7, "passing": True},
    ],
    ids=lambda said: said["type"],
)
def test_answers_that_make_no_sense_at_a_socket_of_the_machine(ends, said):
    """An admission there brings the secret."""
    coordinator, control = ends
    coordinator.send(said)
    with pytest.raises(NotAdmitted, match="the handshake with the coordinator failed"):
        dial.ask_to_join(control, "w", None)


def test_the_admission_within_a_machine_brings_the_secret(ends):
    coordinator, control = ends
    coordinator.send({"type": "admitted", "secret": SECRET.text})
    assert dial.ask_to_join(control, "w", None, job="") == SECRET
    assert coordinator.receive(soon())["job"] == ""


def test_the_socket_of_this_user_needs_no_secret_and_that_of_another_is_told_nothing(
    tmp_path, monkeypatch
):
    options = DialOptions(f"unix:{tmp_path / 'ranks'}", 1)
    with listening_at(tmp_path / "ranks"):
        with closing(dial.reached(options, "the coordinator", None)) as control:
            assert control.local_host == ""
        monkeypatch.setattr(dial, "is_same_user", lambda connection: False)
        with pytest.raises(ConfigError, match="ranks is the socket of another user"):
            dial.reached(options, "the coordinator", None)


def test_a_coordinator_that_never_listens(pauses):
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    with pytest.raises(
        PeerLost, match=r"no coordinator listened at .* within 0.05 s: connection r"
    ):
        dial.connect(DialOptions(address, 0.05))
    assert max(pauses) <= 0.05  # no longer than is left


def test_a_host_that_is_unknown_unless_it_is_known_to_exist(pauses):
    with pytest.raises(ConfigError, match="is no host"):
        dial.connect(DialOptions("no such host.invalid:1", 1))
    assert pauses == []
    with pytest.raises(PeerLost, match=r"within 0 s: 'no such host.invalid' is no host now"):
        dial.connect(DialOptions("no such host.invalid:1", 0, known=True))
