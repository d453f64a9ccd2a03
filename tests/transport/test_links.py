"""The links of a member: who waits and the thread read in turns, and an end is told once."""

import os
import random
import signal
import socket
import threading

import pytest
import torch
from support.deadlines import LATEST_S
from support.encrypted import encrypted_pair, sealed_frames, tcp_pair
from support.linked import Member

from pipedream_rt.errors import TransportError
from pipedream_rt.transport.link import Connection
from pipedream_rt.transport.links import text_of


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ConnectionResetError(104, "Connection reset by peer"), "connection reset by peer"),
        (ConnectionError("it closed the connection"), "it closed the connection"),
        (TransportError("set PIPEDREAM_RT_SECRET"), "set PIPEDREAM_RT_SECRET"),
    ],
)
def test_only_the_words_of_the_system_begin_in_lower_case(error, text):
    assert text_of(error) == text


def test_the_end_of_a_link_is_told_once_and_the_others_go_on():
    ends, other = socket.socketpair(), socket.socketpair()
    middle = Member({1: Connection(ends[0]), 2: Connection(other[0])})
    end = Member({0: Connection(ends[1])})
    third = Member({0: Connection(other[1])})
    assert end.links.send(0, 7, b"x") is None
    assert middle.came.get(timeout=LATEST_S)[1].data == b"x"
    end.links.close()
    assert middle.lost.get(timeout=LATEST_S) == (1, "it closed the connection")
    assert middle.links.send(1, 7, b"x") == "it closed the connection"
    assert middle.links.send(5, 7, b"x") == "there is no link to it"
    assert third.links.send(0, 7, b"y") is None
    assert middle.came.get(timeout=LATEST_S)[1].data == b"y"
    third.links.close()
    middle.links.close()
    middle.links.close()
    assert middle.lost.qsize() <= 1


@pytest.fixture
def members():
    """Makes members, of rank 0 and of rank 1, of two connections, else of the ends of a socket."""
    made = []

    def make(*connections):
        ends = connections or map(Connection, socket.socketpair())
        both = [Member({1 - rank: each}) for rank, each in enumerate(ends)]
        made.extend(both)
        return both

    yield make
    for member in made:
        member.links.close()


@pytest.mark.parametrize("seed", range(4))
def test_what_a_waiter_and_the_thread_read_comes_once_and_in_order(members, seed):
    """Frames larger than a socket holds, small ones in heaps, and a waiter that comes and goes."""
    draw = random.Random(seed)
    sender, receiver = members()
    sizes = [draw.choice((0, 10, 1000, 70_000, 1_500_000)) for _ in range(150)]
    numbers, done = [], threading.Event()
    wanted = 0

    def receive(rank, frame):
        number, size = frame.tensors[0].item(), frame.tensors[1].numel()
        assert size == sizes[number]
        assert frame.tensors[1].eq(number % 100).all()
        numbers.append(number)
        if len(numbers) >= wanted:
            receiver.links.wake()
        if len(numbers) == len(sizes):
            done.set()

    receiver.links._receive = receive
    for number, size in enumerate(sizes):
        tensors = [torch.tensor(number), torch.full((size,), number % 100, dtype=torch.uint8)]
        assert sender.links.send(1, 7, b"", tensors) is None
    while len(numbers) < len(sizes):
        wanted = min(len(sizes), len(numbers) + draw.choice((1, 3, 40)))
        while len(numbers) < wanted:
            receiver.links.wait(LATEST_S)
        if draw.random() < 0.5:
            os.sched_yield()  # the thread has to go on with what the waiter has left
    assert done.wait(LATEST_S)
    assert numbers == list(range(len(sizes)))


def test_a_waiter_is_woken_by_another_thread_before_and_while_it_waits(members):
    sender, receiver = members()
    receiver.links.wake()
    receiver.links.wait(None)
    waker = threading.Timer(0.05, receiver.links.wake)
    waker.start()
    receiver.links.wait(None)
    waker.join()
    receiver.links.wait(0.01)  # nobody calls
    sender.links.close()
    receiver.links.close()
    receiver.links.wake()  # too late, and no error


def test_a_waiter_that_reads_a_flood_is_woken_by_another_thread(members):
    sender, receiver = members()
    reads = iter(range(10**9))

    def flooded(rank):
        if next(reads) == 1000:
            waker = threading.Thread(target=receiver.links.wake)
            waker.start()
            waker.join()
        return False

    receiver.links._read = flooded
    # While the waiter waits; should it come later, the thread of the links reads the flood.
    sends = threading.Timer(0.05, sender.links.send, (1, 7, b"x"))
    sends.start()
    receiver.links.wait(LATEST_S)
    sends.join()
    assert next(reads) >= 1000  # it has come back, and left the rest to the thread
    del receiver.links._read


def test_who_wakes_itself_before_it_polls_does_not_sleep(members):
    """As a signal handler does that closes an inbox."""
    _, receiver = members()
    links, polled = receiver.links, []

    class Interrupted:
        def poll(self, seconds):
            links.wake()
            polled.append(events.poll(seconds))
            return polled[0]

    events, links._of_waiter = links._of_waiter, Interrupted()
    links.wait(0.01)
    links._of_waiter = events
    assert polled != [[]]


@pytest.mark.threads
@pytest.mark.parametrize("floods", [False, True])
def test_a_close_on_another_thread_ends_a_wait_and_the_next_says_why(members, floods):
    for _ in range(20):
        sender, receiver = members()
        began, words = threading.Event(), []

        def wait(links=receiver.links, began=began, words=words):
            try:
                while True:
                    began.set()
                    links.wait(None)
            except TransportError as error:
                words.append(str(error))

        waiter = threading.Thread(target=wait, daemon=True)
        waiter.start()
        assert began.wait(LATEST_S)
        for number in range(100 * floods):
            sender.links.send(1, number, b"x" * 1000)
        receiver.links.close()
        waiter.join(LATEST_S)
        assert words == ["the links were closed, so no message can come any more"]
        assert receiver.links._of_waiter.closed
        assert receiver.lost.empty()


@pytest.mark.parametrize("when", ["asleep", "reading"])
def test_a_signal_handler_closes_in_the_middle_of_a_wait(members, when):
    sender, receiver = members()
    links = receiver.links
    signal.signal(signal.SIGUSR1, lambda *_: links.close())
    if when == "reading":
        links._receive = lambda rank, frame: os.kill(os.getpid(), signal.SIGUSR1)
        sends = threading.Timer(0.05, sender.links.send, (1, 7, b"x"))
    else:
        sends = threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGUSR1))
    sends.start()
    links.wait(LATEST_S)
    sends.join()
    assert links._of_waiter.closed
    with pytest.raises(TransportError, match="the links were closed"):
        links.wait(0)


def test_a_wait_of_years_is_possible(members):
    _, receiver = members()
    receiver.links.wake()
    receiver.links.wait(1e10)


def test_a_waiter_finds_out_that_a_member_is_gone(members):
    sender, receiver = members()
    receiver.links._lost = lambda *lost: (receiver.lost.put(lost), receiver.links.wake())
    sender.links.send(1, 7, b"last")
    sender.links.close()
    while receiver.lost.empty():
        receiver.links.wait(LATEST_S)
    assert receiver.came.get(timeout=LATEST_S)[1].data == b"last"
    assert receiver.lost.get() == (0, "it closed the connection")
    receiver.links.wait(0.05)  # the end of the link is not told again, and wakes nobody
    assert receiver.lost.empty()


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
@pytest.mark.parametrize("is_encrypted", [False, True], ids=["plain", "encrypted"])
def test_what_a_waiter_leaves_in_the_socket_is_read_by_the_thread(members, is_encrypted):
    """More than a socket holds, of which nothing comes later that would wake the thread."""
    sender, receiver = members(*encrypted_pair()) if is_encrypted else members()
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
    sent, engine = sealed_frames(1)
    (receiver,) = members(Connection(ends[0], engine))
    ends[1].sendall(sent[0] + sent[0])
    assert receiver.came.get(timeout=LATEST_S)[1].kind == 0
    lost = receiver.lost.get(timeout=LATEST_S)
    ends[1].close()
    assert lost == (1, "decryption failed or bad record mac")
