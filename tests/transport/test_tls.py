"""Encrypted links: nothing that was changed on the way is delivered, and nothing stays behind."""

import random
import select
import socket
import ssl
import threading

import pytest
import torch
from support.deadlines import LATEST_S
from support.encrypted import OTHER, SECRET, encrypted_pair, shake_hands, shaken, tcp_pair
from support.linked import Member

from pipedream_rt.transport import link as module
from pipedream_rt.transport.link import Connection, Link
from pipedream_rt.transport.tls import TlsEngine, problem_of_tls


def opened(engine):
    """All that an engine can decrypt now."""
    room, found = memoryview(bytearray(1 << 14)), b""
    while count := engine.read_into(room):
        found += room[:count]
    return found


# -- the engine ------------------------------------------------------------------------------------


def test_what_goes_in_comes_out_both_ways():
    caller, called = shaken()
    for one, other in ((caller, called), (called, caller)):
        data = random.Random(1).randbytes(300_000)
        one.write(data)
        other.take(one.sealed())
        assert opened(other) == data
        assert one.sealed() == b""
        assert opened(other) == b""


def test_it_comes_out_however_it_was_cut():
    caller, called = shaken()
    caller.write(b"some words")
    found = b""
    for byte in caller.sealed():
        assert found == b""
        called.take(bytes([byte]))
        found += opened(called)
    assert found == b"some words"


def test_nothing_of_it_can_be_read_on_the_way():
    caller, called = shaken()
    caller.write(b"a secret word" * 100)
    sealed = caller.sealed()
    assert b"secret" not in sealed
    called.take(sealed)
    assert opened(called) == b"a secret word" * 100


def test_each_connection_has_keys_of_its_own():
    caller, called = shaken()
    caller.write(b"some words")
    sealed = caller.sealed()
    _, another = shaken()
    another.take(sealed)
    with pytest.raises(ssl.SSLError):
        opened(another)
    called.take(sealed)
    assert opened(called) == b"some words"


def test_what_comes_back_to_its_sender_is_refused():
    caller, _ = shaken()
    caller.write(b"some words")
    caller.take(caller.sealed())
    with pytest.raises(ssl.SSLError):
        opened(caller)


def test_the_conversation_of_a_caller_is_worth_nothing_to_who_repeats_it():
    caller, called = TlsEngine(SECRET.tls(False), False), TlsEngine(SECRET.tls(True), True)
    said, done = [], False
    while not done:
        caller.shake_hands()
        said.append(caller.sealed())
        called.take(said[-1])
        done = called.shake_hands()
        caller.take(called.sealed())
    caller.write(b"some words")
    said.append(caller.sealed())
    again = TlsEngine(SECRET.tls(True), True)
    with pytest.raises(ssl.SSLError):  # noqa: PT012
        for part in said:
            again.take(part)
            again.shake_hands()


@pytest.mark.parametrize("stranger", ["caller", "called"])
def test_the_certificate_of_another_job(stranger):
    secrets = (OTHER, SECRET) if stranger == "caller" else (SECRET, OTHER)
    with pytest.raises(ssl.SSLError) as caught:
        shaken(*secrets)
    assert "is PIPEDREAM_RT_SECRET the same for all processes" in problem_of_tls(caught.value)


def test_the_other_end_is_told_that_its_certificate_is_of_another_job():
    """By the alert that the end makes which has found it out."""
    caller, called = TlsEngine(SECRET.tls(False), False), TlsEngine(OTHER.tls(True), True)
    caller.shake_hands()
    called.take(caller.sealed())
    called.shake_hands()
    caller.take(called.sealed())
    with pytest.raises(ssl.SSLError):
        caller.shake_hands()
    called.take(caller.sealed())
    with pytest.raises(ssl.SSLError) as told:
        called.shake_hands()
    assert "one end does not know the secret" in problem_of_tls(told.value)


def without_certificate(protocol=ssl.PROTOCOL_TLS_CLIENT):
    """A context that shows nothing, and trusts anybody."""
    context = ssl.SSLContext(protocol)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def test_a_caller_without_a_certificate():
    stranger = TlsEngine(without_certificate(), False)
    called = TlsEngine(SECRET.tls(True), True)
    with pytest.raises(ssl.SSLError) as caught:
        shake_hands(stranger, called)
    assert "one end does not know the secret" in problem_of_tls(caught.value)
    stranger.take(called.sealed())
    with pytest.raises(ssl.SSLError):
        opened(stranger)


def test_a_server_without_a_certificate():
    called = TlsEngine(without_certificate(ssl.PROTOCOL_TLS_SERVER), True)
    with pytest.raises(ssl.SSLError):
        shake_hands(TlsEngine(SECRET.tls(False), False), called)


def test_an_older_version_of_tls_is_not_spoken():
    context = without_certificate()
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with pytest.raises(ssl.SSLError) as caught:
        shake_hands(TlsEngine(context, False), TlsEngine(SECRET.tls(True), True))
    assert problem_of_tls(caught.value).startswith("the other end does not speak TLS 1.3")


@pytest.mark.parametrize("junk", [b"GET / HTTP/1.1\r\n\r\n", b"\0" * 1000, b"SSH-2.0-x\r\n" * 9])
@pytest.mark.parametrize("is_called", [False, True])
def test_an_end_that_does_not_encrypt(junk, is_called):
    engine = TlsEngine(SECRET.tls(is_called), is_called)
    if not is_called:
        engine.shake_hands()
    engine.take(junk)
    with pytest.raises(ssl.SSLError) as caught:
        engine.shake_hands()
    assert problem_of_tls(caught.value).startswith("the other end does not speak TLS 1.3")


# -- links -----------------------------------------------------------------------------------------


def recorded(count):
    """The encrypted bytes of each of some frames, and the engine that can decrypt them."""
    caller, called = shaken()
    ends = socket.socketpair()
    link = Link(Connection(ends[0], caller))
    with ends[1]:
        sent = []
        for number in range(count):
            assert link.send(number, b"hello", [torch.full((2,), float(number))])
            sent.append(ends[1].recv(1 << 16))
        link.close()
    return sent, called


def fed(data, engine):
    """What an encrypted link that receives these bytes makes of them."""
    ends = socket.socketpair()
    link = Link(Connection(ends[1], engine))
    try:
        with ends[0]:
            ends[0].sendall(data)
        frames = []
        while True:
            link.receive(frames.append)
    except OSError as error:
        return [frame.kind for frame in frames], error
    finally:
        link.close()


def test_nothing_that_was_changed_is_delivered():
    length = len(recorded(1)[0][0])
    for place in range(length):
        (sent,), engine = recorded(1)
        assert len(sent) == length
        changed = bytearray(sent)
        changed[place] ^= 1 << place % 8
        kinds, error = fed(changed, engine)
        assert kinds == [], place
        assert isinstance(error, ssl.SSLError | ConnectionError)


def test_nothing_that_was_cut_is_delivered():
    length = len(recorded(1)[0][0])
    for cut in range(length):
        (sent,), engine = recorded(1)
        kinds, error = fed(sent[:cut], engine)
        assert kinds == [], cut
        assert isinstance(error, ConnectionError)


@pytest.mark.parametrize(
    ("order", "delivered"),
    [
        ([0, 1, 2], [0, 1, 2]),
        ([0, 0, 1], [0]),
        ([0, 2, 1], [0]),
        ([1, 0], []),
        ([0, 1, 0], [0, 1]),
        ([2], []),
    ],
    ids=str,
)
def test_what_is_repeated_left_out_or_out_of_turn_ends_the_link(order, delivered):
    sent, engine = recorded(3)
    kinds, error = fed(b"".join(sent[number] for number in order), engine)
    assert kinds == delivered
    assert isinstance(error, ConnectionError if order == delivered else ssl.SSLError)


@pytest.mark.parametrize(
    "junk",
    [
        b"\x15\x03\x03\x00\x02\x02\x28",  # an alert, as of before the encryption
        b"\x14\x03\x03\x00\x01\x01",
        b"\x17\x03\x03\xff\xff" + bytes(70_000),
        b"GET / HTTP/1.1\r\n\r\n",
        b"\0" * 100,
    ],
    ids=["alert", "change of ciphers", "long", "HTTP", "zeros"],
)
def test_what_a_stranger_puts_between_ends_the_link(junk):
    sent, engine = recorded(2)
    kinds, error = fed(sent[0] + junk + sent[1], engine)
    assert kinds == [0]
    assert isinstance(error, ssl.SSLError)


@pytest.mark.parametrize("size", [0, 1, 16_383, 16_384, 16_385, 65_536, 200_000])
def test_nothing_that_is_decrypted_stays_behind(size):
    """One read of the socket brings several frames; nothing comes later that would wake a thread.

    The size is that of the tensor in each, around those of a record of TLS and of the buffer.
    """
    caller, called = shaken()
    here, there = socket.socketpair()
    sealed = Link(Connection(there, caller))
    sent = [torch.arange(size, dtype=torch.uint8) for _ in range(3)]
    came = []
    end = Link(Connection(here, called))
    for number, tensor in enumerate(sent):
        is_out = sealed.send(number, b"", [tensor])
        while not is_out:
            end.receive(came.append)
            is_out = sealed.flush()
    end.receive(came.append)
    poll = select.poll()
    poll.register(here, select.POLLIN)
    while len(came) < len(sent):
        assert poll.poll(0), "nothing is in the socket, and something is not delivered"
        end.receive(came.append)
    assert [frame.kind for frame in came] == [0, 1, 2]
    assert all(torch.equal(frame.tensors[0], sent[0]) for frame in came)
    sealed.close()
    end.close()


def test_what_the_socket_does_not_take_is_left_over_and_flushed():
    left, right = map(Link, encrypted_pair(tcp_pair(buffer=32_768)))
    large, came = torch.arange(2_000_000.0), []
    assert not left.send(1, b"", [large])
    assert not left.send(2, b"behind", [])
    assert not left.flush()
    poll = select.poll()
    poll.register(right, select.POLLIN)
    poll.register(left, select.POLLOUT)
    while len(came) < 2:
        assert poll.poll(1000 * LATEST_S)
        left.flush()
        right.receive(came.append)
    assert left.flush()
    assert [frame.kind for frame in came] == [1, 2]
    assert torch.equal(came[0].tensors[0], large)
    assert left.send(3, b"", [])
    left.close()
    right.close()


def test_small_parts_share_a_record_of_tls():
    """As the heads of many small frames do; a large part is encrypted where it lies."""
    ends = socket.socketpair()
    link = Link(Connection(ends[0], shaken()[0]))
    large = memoryview(bytes(100_000))
    parts = [memoryview(bytes([n]) * 10) for n in range(5)]
    link._queue.extend([*parts, large, *parts])
    pieces = list(link._pieces(module._ENCRYPTED_AT_ONCE))
    assert [len(piece) for piece in pieces] == [50, 100_000, 50]
    assert pieces[1].obj is large.obj
    assert not link._queue
    link._queue.append(large)
    assert [len(piece) for piece in link._pieces(60_000)] == [60_000]
    assert [len(piece) for piece in link._pieces(60_000)] == [40_000]
    link.close()
    ends[1].close()


@pytest.fixture
def members():
    """Makes members, of rank 0 and of rank 1, from their connections to each other."""
    made = []

    def make(*connections):
        made.extend(Member({1 - rank: each}) for rank, each in enumerate(connections))
        return made

    yield make
    for member in made:
        member.links.close()


@pytest.mark.threads
def test_both_directions_at_once_through_small_buffers(members):
    """From several threads of each end, that never wait; each one's frames come in its order."""
    both = members(*encrypted_pair(tcp_pair(buffer=32_768)))
    large = torch.randint(256, (1_500_000,), dtype=torch.uint8)

    def send(rank, kind):
        for number in range(6):
            part = large[number : len(large) - kind]
            data = bytes([number]) * 70_000
            assert both[rank].links.send(1 - rank, kind, data, [part]) is None

    threads = [threading.Thread(target=send, args=(r, kind)) for r in (0, 1) for kind in (1, 2)]
    for thread in threads:
        thread.start()
    for rank, member in enumerate(both):
        numbers = {1: [], 2: []}
        for _ in range(12):
            sender, frame = member.came.get(timeout=LATEST_S)
            assert sender == 1 - rank
            number = frame.data[0]
            assert frame.data == bytes([number]) * 70_000
            assert torch.equal(frame.tensors[0], large[number : len(large) - frame.kind])
            numbers[frame.kind].append(number)
        assert numbers == {1: list(range(6)), 2: list(range(6))}
    for thread in threads:
        thread.join()
    assert all(member.lost.empty() for member in both)


@pytest.mark.threads
def test_a_waiter_takes_turns_with_the_thread(members):
    sender, receiver = members(*encrypted_pair())
    receiver.links._receive = lambda rank, frame: (
        receiver.came.put((rank, frame)),
        receiver.links.wake(),
    )
    for number in range(40):
        sender.links.send(1, number, b"x", [torch.zeros(100_000, dtype=torch.uint8)])
    receiver.links.wait(LATEST_S)
    kinds = [receiver.came.get(timeout=LATEST_S)[1].kind for _ in range(40)]
    assert kinds == list(range(40))


@pytest.mark.threads
def test_last_words_arrive(members):
    sender, receiver = members(*encrypted_pair())
    sender.links.send(1, 7, b"the last words")
    sender.links.close()
    assert receiver.came.get(timeout=LATEST_S)[1].data == b"the last words"
    assert receiver.lost.get(timeout=LATEST_S) == (0, "it closed the connection")


@pytest.mark.threads
def test_the_reason_why_a_link_ends_that_was_tampered_with_is_told_in_words(members):
    ends = socket.socketpair()
    sent, engine = recorded(1)
    (receiver,) = members(Connection(ends[0], engine))
    ends[1].sendall(sent[0] + sent[0])
    assert receiver.came.get(timeout=LATEST_S)[1].kind == 0
    lost = receiver.lost.get(timeout=LATEST_S)
    ends[1].close()
    assert lost == (1, "decryption failed or bad record mac")
