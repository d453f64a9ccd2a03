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
from pipedream_rt.cluster.records import HELLO
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


def join(options):
    """Ask whoever listens at an address for a place, once."""
    with closing(dial.reached(options, "the coordinator", SECRET)) as control:
        dial.ask_to_join(control, "w", SECRET)


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


def shakes_hands(connection, secret=SECRET):
    """Hear no more than the hello of who knows the secret."""
    with secret.tls(called=True).wrap_socket(connection, server_side=True) as encrypted:
        encrypted.recv(1 << 12)


def is_of_another_job(connection):
    shakes_hands(connection, OTHER)


@pytest.mark.parametrize(
    ("answer", "error", "words"),
    [
        (silent, NotAdmitted, "has taken the connection, and has said nothing for 0.2 s; it may"),
        (speaks_http, NotOfThisJob, "the other end does not speak TLS 1.3; is it another program"),
        (is_of_another_job, NotOfThisJob, "does not know the secret that the other has"),
        (resets, NotAdmitted, "the coordinator at .* ended before it shook hands"),
        (hangs_up, NotAdmitted, "the coordinator at .* ended before it shook hands"),
        (shakes_hands, NotAdmitted, "the coordinator ended before it admitted this worker"),
    ],
)
def test_whoever_listens_and_admits_nobody_is_told_of(answer, error, words):
    """Each wait has an end, and a persistent worker tries again later.

    One that ends may have accepted nobody for hours, as in the middle of a generation. Anybody may
    listen where a worker tries again: nobody is believed who does not know the secret.
    """
    timeout = timedelta(seconds=0.2 if answer is silent else LATEST_S)
    with listening(answer) as address, pytest.raises(error, match=words) as raised:
        join(DialOptions(address, 5, False, timeout))
    assert type(raised.value) is error


REFUSED = {"type": "refused", "reason": "the job is full"}
WORDS = "the coordinator refused this worker: the job is full"
SENSELESS = "the handshake with the coordinator failed"


@pytest.mark.parametrize(
    ("said", "error", "words"),
    [
        (REFUSED | {"passing": True}, NotAdmitted, WORDS),
        (REFUSED | {"passing": False}, PipelineError, WORDS),
        ({"type": "over", "code": 7}, JobOver, "exit code 7"),
        ({"type": "admitted", "secret": None}, NotAdmitted, SENSELESS),
        ({"type": "welcome"}, NotAdmitted, SENSELESS),
        ({"type": "shut"}, NotAdmitted, SENSELESS),
        (REFUSED | {"passing": 7}, NotAdmitted, SENSELESS),
    ],
    ids=lambda value: value.get("type") if isinstance(value, dict) else "",
)
def test_what_is_no_admission_within_a_machine_which_brings_the_secret(ends, said, error, words):
    coordinator, control = ends
    coordinator.send(said)
    with pytest.raises(error, match=words) as raised:
        dial.ask_to_join(control, "w", None)
    assert type(raised.value) is error
    assert getattr(raised.value, "code", 7) == 7


def test_what_is_no_admission_is_none_either_where_the_secret_is_known(ends):
    coordinator, control = ends
    coordinator.send({"type": "shut"})
    words = "failed: expected 'admitted' from the coordinator, got 'shut'; is it pipedream-rt of"
    with pytest.raises(NotAdmitted, match=words):
        dial.ask_to_join(control, "w", SECRET)


@pytest.mark.parametrize("known", [None, SECRET], ids=["unknown", "known"])
def test_a_hello_has_the_public_name_of_the_job_and_not_the_secret(ends, known):
    """The admission within a machine brings it to whoever has none."""
    coordinator, control = ends
    coordinator.send({"type": "admitted", "secret": None if known else SECRET.text})
    assert dial.ask_to_join(control, "w", known, job="") == SECRET
    hello = coordinator.receive(soon())
    assert not problem_of(hello, HELLO)
    assert (hello["name"], hello["pid"]) == ("w", os.getpid())
    assert hello["job"] == (SECRET.job if known else "")
    assert SECRET.text not in str(hello)


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


def test_an_attempt_in_vain_leaves_no_socket(tmp_path):
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="No such file") as kept:  # the error holds the frame
        dial._connected_at(str(tmp_path / "nobody"))
    assert len(os.listdir("/proc/self/fd")) == before, kept


def test_a_host_that_is_unknown_unless_it_is_known_to_exist(pauses):
    with pytest.raises(ConfigError, match="is no host"):
        dial.connect(DialOptions("no such host.invalid:1", 1))
    assert pauses == []
    with pytest.raises(PeerLost, match=r"within 0 s: 'no such host.invalid' is no host now"):
        dial.connect(DialOptions("no such host.invalid:1", 0, known=True))
