"""Encrypted connections: who has no right certificate gets nothing through."""

import math
import os
import socket
import threading
import time
from contextlib import ExitStack, suppress
from datetime import timedelta

import pytest

from pipedream_rt.deadline import Deadline
from pipedream_rt.errors import ConfigError
from pipedream_rt.transport.tls import Tls, _of_process, make_certificate


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Two certificates that have nothing to do with each other."""
    made = [tmp_path_factory.mktemp("tls") / name for name in ("one", "other")]
    for folder in made:
        make_certificate(folder, 2)
    return made


@pytest.fixture
def stack():
    """Closes what a test opens, and waits for the threads that carry."""
    before = set(threading.enumerate())
    with ExitStack() as opened:
        yield opened
    for thread in set(threading.enumerate()) - before:
        if thread.name == "tls":
            thread.join(20)


def ends(stack):
    listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
    caller = stack.enter_context(socket.create_connection(listener.getsockname(), timeout=20))
    door, _ = listener.accept()
    return caller, stack.enter_context(door)


def pair(stack, caller, door):
    calls, is_called = ends(stack)
    found = Tls.of_folder(caller).wrap(calls, True), Tls.of_folder(door).wrap(is_called, False)
    for end in found:
        stack.enter_context(end.socket)
        end.socket.settimeout(20)
    return tuple(end.socket for end in found)


def read(end, size):
    data = b""
    with suppress(ConnectionResetError):  # an end that was never asked what it has
        while len(data) < size and (part := end.recv(size - len(data))):
            data += part
    return data


def test_what_goes_in_comes_out_both_ways_at_once(stack, folders):
    left, right = pair(stack, folders[0], folders[0])
    large = os.urandom(3_000_000)
    came = []
    threads = [threading.Thread(target=end.sendall, args=(large,)) for end in (left, right)]
    threads += [
        threading.Thread(target=lambda e=end: came.append(read(e, len(large))))
        for end in (left, right)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert came == [large, large]
    left.sendall(b"the last words")
    left.close()
    assert read(right, 100) == b"the last words"


def test_nothing_of_it_can_be_read_on_the_way(stack, folders):
    caller, relayed = ends(stack)
    onward, door = ends(stack)
    left = stack.enter_context(Tls.of_folder(folders[0]).wrap(caller, True).socket)
    right = stack.enter_context(Tls.of_folder(folders[0]).wrap(door, False).socket)
    seen = []

    def relay(source, target):
        while data := source.recv(1 << 16):
            seen.append(data)
            target.sendall(data)
        with suppress(OSError):  # its other end may be gone by now
            target.shutdown(socket.SHUT_WR)

    relays = [
        threading.Thread(target=relay, args=pair) for pair in ((relayed, onward), (onward, relayed))
    ]
    for thread in relays:
        thread.start()
    left.sendall(b"a secret word" * 100)
    assert read(right, 1300) == b"a secret word" * 100
    left.close()
    right.close()
    for thread in relays:
        thread.join()
    assert b"secret" not in b"".join(seen)


@pytest.mark.parametrize("stranger", ["caller", "door"])
def test_another_certificate(stack, folders, stranger, caplog, monkeypatch):
    monkeypatch.setattr("pipedream_rt.transport.tls_relay._told_s", [-math.inf])
    left, right = pair(stack, *(folders if stranger == "door" else folders[::-1]))
    with suppress(OSError):  # the connection may have ended already
        left.sendall(b"x")
    assert read(left, 1) == b""
    assert read(right, 1) == b""
    assert "an encrypted connection ended: " in caplog.text


@pytest.mark.parametrize("words", [b"", b"GET / HTTP/1.1\r\n\r\n", b"\0" * 1000, b"\x16\x03\x01"])
@pytest.mark.parametrize("calls", [True, False])
def test_an_end_that_does_not_encrypt(stack, folders, calls, words):
    caller, door = ends(stack)
    ours, theirs = (caller, door) if calls else (door, caller)
    wrapped = stack.enter_context(Tls.of_folder(folders[0]).wrap(ours, calls).socket)
    wrapped.settimeout(20)
    with suppress(OSError):  # the other end may have had enough already
        theirs.sendall(words)
        theirs.shutdown(socket.SHUT_WR)
    assert read(wrapped, 1) == b""


def test_a_connection_that_is_dropped_leaves_no_thread(stack, folders):
    """As when the oldest of too many strangers has to go, which says nothing at all."""
    tls = Tls.of_folder(folders[0])
    before = threading.active_count()
    for _ in range(20):
        _, door = ends(stack)
        tls.wrap(door, False).socket.close()
    for thread in list(threading.enumerate()):
        if thread.name == "tls":
            thread.join(5)
    assert threading.active_count() == before


def test_certificates_that_cannot_be_used(tmp_path, folders):
    with pytest.raises(ConfigError, match=r"cannot be used: .*No such file.*`pipedream-rt cert"):
        Tls.of_folder(tmp_path)
    (tmp_path / "cert.pem").write_bytes((folders[0] / "cert.pem").read_bytes())
    (tmp_path / "key.pem").write_bytes((folders[0] / "key.pem").read_bytes())
    (tmp_path / "key.pem").chmod(0o644)
    with pytest.raises(ConfigError, match="others can read the key"):
        Tls.of_folder(tmp_path)
    (tmp_path / "key.pem").write_bytes((folders[1] / "key.pem").read_bytes())
    (tmp_path / "key.pem").chmod(0o600)
    with pytest.raises(ConfigError, match="cannot be used"):
        Tls.of_folder(tmp_path)
    (tmp_path / "key.pem").write_text("no key")
    with pytest.raises(ConfigError, match="cannot be used"):
        Tls.of_folder(tmp_path)
    for name in ("key.pem", "cert.pem"):
        (tmp_path / name).unlink()
        os.mkfifo(tmp_path / name, 0o600)
        with pytest.raises(ConfigError, match="no ordinary file"):
            Tls.of_folder(tmp_path)
    with pytest.raises(ConfigError, match="has a certificate or a key already"):
        make_certificate(folders[0], 1)


def test_a_certificate_where_nothing_can_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="no certificate can be made in"):
        make_certificate(tmp_path / "file" / "tls", 1)


def test_the_key_of_a_certificate_is_for_its_owner_alone(folders):
    assert (folders[0] / "key.pem").stat().st_mode & 0o777 == 0o600


# -- without certificates of the user's ----------------------------------------------------------


def wrapped(stack, caller, door):
    """Two ends with what they have in common."""
    calls, is_called = ends(stack)
    made = caller.wrap(calls, True), door.wrap(is_called, False)
    for end in made:
        stack.enter_context(end.socket)
        end.socket.settimeout(20)
    return made


@pytest.mark.parametrize("of_user", [False, True])
def test_both_ends_know_with_whose_certificate_they_encrypt(stack, folders, of_user):
    """It is known as soon as something has come, and differs from process to process."""
    tls = Tls.of_folder(folders[0]) if of_user else Tls.of_process(always=True)
    left, right = wrapped(stack, tls, tls)
    right.socket.sendall(b"x")
    assert read(left.socket, 1) == b"x"
    assert left.channel.result(0) == right.channel.result(0) == tls.material().own
    assert len(tls.material().own) == 32


def test_somebody_in_between_has_another_channel(stack):
    """He shows a certificate of his own, which nobody has signed either, and reads what passes."""
    ours, his = Tls.of_process(always=True), Tls(lambda: _of_process(-1))
    assert ours.material().own != his.material().own
    left, in_between = wrapped(stack, ours, his)
    onwards, right = wrapped(stack, his, ours)
    right.socket.sendall(b"call")
    in_between.socket.sendall(read(onwards.socket, 4))
    assert read(left.socket, 4) == b"call"
    assert left.channel.result(0) != right.channel.result(0)


def test_what_stays_on_this_machine_is_left_unless_that_is_asked_for(stack):
    for always in (False, True):
        caller, door = ends(stack)
        tls = Tls.of_process(always=always)
        left, right = tls.wrap(caller, True), tls.wrap(door, False)
        for end in (left.socket, right.socket):
            stack.enter_context(end)
        assert (left.socket is caller) == (right.socket is door) == (not always)
        assert (right.channel.result(0) == b"") == (not always)


def test_the_certificate_of_a_process_is_made_once_and_leaves_no_file():
    before = set(os.listdir("/proc/self/fd"))
    assert Tls.of_process().material() is Tls.of_process().material()
    assert set(os.listdir("/proc/self/fd")) == before


# -- ends that go away -----------------------------------------------------------------------------


def processor_s(seconds):
    """The processor time of this process while so many seconds pass."""
    before = time.process_time()
    threading.Event().wait(seconds)
    return time.process_time() - before


@pytest.mark.parametrize("turn", range(10))
def test_last_words_arrive_though_the_other_end_is_sending(stack, turn):
    """As of a stage that says why it has failed, while its peer sends it activations."""
    tls = Tls.of_process(always=True)
    left, right = (end.socket for end in wrapped(stack, tls, tls))

    def send():
        with suppress(OSError):
            while True:
                right.sendall(bytes(10_000))

    thread = threading.Thread(target=send)
    thread.start()
    read(left, 20_000 * (1 + turn % 3))
    left.sendall(b"the last words")
    left.close()
    assert read(right, 14) == b"the last words"
    right.close()
    thread.join()
    tls.finish(Deadline(timedelta(seconds=20)))


@pytest.mark.parametrize("writes", ["caller", "door"])
def test_no_processor_time_is_burnt_where_an_end_reads_nothing(stack, writes):
    """The other end has written and closed, and what it has written waits for this one."""
    tls = Tls.of_process(always=True)
    ends_of = [end.socket for end in wrapped(stack, tls, tls)]
    writer, other = ends_of if writes == "caller" else ends_of[::-1]
    writer.setblocking(False)
    with suppress(BlockingIOError):
        while True:
            writer.send(bytes(1 << 16))
    writer.close()
    assert processor_s(0.5) < 0.25
    other.close()
    tls.finish(Deadline(timedelta(seconds=20)))


def test_a_thread_that_cannot_be_started_is_an_error_of_the_connection(stack, monkeypatch):
    def refused(self):
        raise RuntimeError("can't start new thread")

    caller, _ = ends(stack)
    before = set(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refused)
        with pytest.raises(OSError, match="can't start new thread"):
            Tls.of_process(always=True).wrap(caller, True)
    assert set(os.listdir("/proc/self/fd")) <= before
