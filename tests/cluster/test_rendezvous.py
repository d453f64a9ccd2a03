"""The rendezvous with workers that are threads of the test: no process is started."""

import contextlib
import secrets
import socket
import subprocess
import sys
import threading
import time
from datetime import timedelta

import msgpack
import pytest
from support.deadlines import LATEST_S

from pipedream_rt.cluster.addresses import listening
from pipedream_rt.cluster.control import VERSION, Control
from pipedream_rt.cluster.forked_workers import ForkServer
from pipedream_rt.cluster.keys import COORDINATOR_END, NONCE, WORKER_END, Handshake, JobKey
from pipedream_rt.cluster.listener import Listener
from pipedream_rt.cluster.local_workers import LocalWorkers
from pipedream_rt.cluster.members import Member
from pipedream_rt.cluster.rendezvous import Rendezvous
from pipedream_rt.deadline import Deadline
from pipedream_rt.errors import PeerLost, RendezvousTimeout, WorkerLost
from pipedream_rt.job.process_assignment import ProcessAssignment
from pipedream_rt.schedules import Plan, Shape
from pipedream_rt.software import software

SECRET = b"the secret of the job".ljust(NONCE)
KEY = JobKey(SECRET, bytes(NONCE))


BEAT = timedelta(seconds=20)


def soon(seconds=20):
    return Deadline(timedelta(seconds=seconds))


def answer(control, name, secret=SECRET, ready=True, processor="a kind", versions=None):
    """Answer the coordinator's call as a worker does."""
    call = control.receive(soon())
    nonce = secrets.token_bytes(NONCE)
    said = {
        "name": name, "pid": 7, "host": "here", "boot": "b", "version": VERSION,
        "software": versions or software(), "returns": True,
    }  # fmt: skip
    talk = Handshake(secret, call["nonce"], nonce)
    control.send({"type": "hello", **said, "nonce": nonce, "proof": talk.prove(said)})
    reply = control.receive(soon())
    if reply["type"] == "admitted":
        control.secure(talk.session_key(), WORKER_END, COORDINATOR_END)
        if ready:
            control.send({"type": "ready", "processor": processor, "obstacle": ""})
    return reply


@contextlib.contextmanager
def connections(address):
    """Makes connections to a rendezvous, each with its socket."""
    with contextlib.ExitStack() as sockets:

        def connect():
            connection = sockets.enter_context(socket.create_connection(address, timeout=10))
            return connection, Control(connection, "the coordinator")

        yield connect


@contextlib.contextmanager
def local_workers(*names):
    """Inherited connections of workers whose processes nobody has started."""
    local, others = LocalWorkers(1, ForkServer()), []
    with contextlib.ExitStack() as sockets:
        for name in names:
            ours, theirs = socket.socketpair()
            sockets.enter_context(ours)
            sockets.enter_context(theirs)
            local.controls[name] = Control(ours, name)
            others.append(Control(theirs, "the coordinator"))
        yield local, others


@contextlib.contextmanager
def meanwhile(task):
    """Run a task on a thread while the block runs."""
    thread = threading.Thread(target=task)
    thread.start()
    try:
        yield
    finally:
        thread.join()


@pytest.mark.threads
def test_members_are_ranked_by_the_natural_order_of_their_names():
    with local_workers("w10", "w9") as (local, others):

        def workers():
            answer(others[0], "w10")
            answer(others[1], "w9")

        rendezvous = Rendezvous(
            Plan(name="", shape=Shape(workers=2, stages_per_worker=2)),
            local,
            Listener(key=KEY),
            BEAT,
        )
        with meanwhile(workers):
            rendezvous.gather(soon())
        assert [member.name for member in rendezvous.members] == ["w9", "w10"]
        assert [member.stages for member in rendezvous.members] == [(0, 2), (1, 3)]
        assert all(member.ready for member in rendezvous.members)


@contextlib.contextmanager
def forming(count, workers, assignment=None):
    """A rendezvous and where it listens, while ``workers(connect)`` runs beside it.

    Workers stay connected until the body ends; then what has been gathered is closed.
    """
    done = threading.Event()

    def beside():
        with connections(address) as connect:
            workers(connect)
            done.wait(20)

    with listening("127.0.0.1", 0) as listener, local_workers() as (local, _):
        address = listener.getsockname()
        door = Listener(key=KEY, listener=listener)
        plan = Plan(name="", shape=Shape(workers=count))
        rendezvous = Rendezvous(plan, local, door, BEAT, assignment=assignment)
        with meanwhile(beside):
            try:
                yield rendezvous
            finally:
                done.set()
        for member in rendezvous.members:
            member.control.close()


@pytest.mark.threads
def test_a_worker_without_the_secret_is_told_why_and_the_next_one_is_taken():
    refused = []

    def workers(connect):
        refused.append(answer(connect()[1], "rogue", b"another".ljust(NONCE)))
        answer(connect()[1], "right")

    with forming(1, workers) as rendezvous:
        rendezvous.gather(soon())
    assert [member.name for member in rendezvous.members] == ["right"]
    assert refused[0]["type"] == "refused"
    assert not refused[0]["passing"]
    assert "does not know the job's secret" in refused[0]["reason"]


@pytest.mark.threads
def test_a_worker_that_leaves_before_all_have_come_makes_room_for_another_of_its_name():
    """As after a restart. A second one of a name, and one too many, may try again later."""
    replies = []

    def workers(connect):
        first, control = connect()
        answer(control, "w0")
        replies.append(answer(connect()[1], "w0"))
        first.close()
        answer(connect()[1], "w0", ready=False)  # so that the rendezvous does not end yet
        answer(connect()[1], "w1")
        replies.append(answer(connect()[1], "w2"))

    timeout = pytest.raises(RendezvousTimeout, match=r"1 of 2 .* w0; joined: w1")
    with forming(2, workers) as rendezvous, timeout:
        rendezvous.gather(soon(1))
    assert [reply["passing"] for reply in replies] == [True, True]
    assert "'w0' is taken by pid 7 on here" in replies[0]["reason"]
    assert "the job has its 2 workers" in replies[1]["reason"]


@pytest.mark.threads
def test_a_worker_with_another_torch_is_refused_and_named_in_the_end():
    replies = []

    def workers(connect):
        replies.append(answer(connect()[1], "w0", versions="torch 1.13.0"))
        answer(connect()[1], "w1")

    words = r"joined: w1; 'w0' was refused: it has torch 1\.13\.0, and the"
    timeout = pytest.raises(RendezvousTimeout, match=words)
    with forming(2, workers) as rendezvous, timeout:
        rendezvous.gather(soon(1))
    assert not replies[0]["passing"]
    assert "install the same on all machines" in replies[0]["reason"]


@pytest.mark.threads
@pytest.mark.parametrize("other", ["a kind", "another"])
def test_several_kinds_of_processor_are_told_of(other, caplog):
    def workers(connect):
        for name, kind in (("w0", "a kind"), ("w1", other)):
            answer(connect()[1], name, processor=kind)

    with forming(2, workers) as rendezvous:
        rendezvous.gather(soon())
    told = [r.message for r in caplog.records if "several kinds of processor" in r.message]
    assert bool(told) == (other != "a kind")
    assert all("a kind (w0); another (w1)" in text for text in told)


def test_workers_that_do_not_answer_are_named():
    with local_workers("w0", "w1") as (local, _):
        rendezvous = Rendezvous(
            Plan(name="", shape=Shape(workers=2)), local, Listener(key=KEY), BEAT
        )
        with pytest.raises(
            RendezvousTimeout, match=r"2 of 2 workers did not join within 0 s: w0, w1; joined: none"
        ) as e:
            rendezvous.gather(soon(0))
    assert e.value.missing == 2


@pytest.mark.threads
def test_a_worker_that_does_not_become_ready_is_named():
    with local_workers("w0", "w1") as (local, others):

        def workers():
            answer(others[0], "w0")
            answer(others[1], "w1", ready=False)

        rendezvous = Rendezvous(
            Plan(name="", shape=Shape(workers=2)), local, Listener(key=KEY), BEAT
        )
        with (
            meanwhile(workers),
            pytest.raises(RendezvousTimeout, match=r"1 of 2 workers .*: w1; joined: w0"),
        ):
            rendezvous.gather(soon(0.3))


def test_a_local_worker_that_ends_before_its_hello_ends_the_rendezvous():
    with local_workers("w0", "w1") as (local, others):
        rendezvous = Rendezvous(
            Plan(name="", shape=Shape(workers=2)), local, Listener(key=KEY), BEAT
        )
        others[1].close()
        with pytest.raises((WorkerLost, PeerLost), match="w1"):
            rendezvous.gather(soon())


@pytest.mark.threads
def test_an_elastic_group_begins_without_those_that_are_late():
    """It waits for the next one each time that one has come, and not for ever."""

    def workers(connect):
        for name in ("a", "b", "c"):
            answer(connect()[1], name)

    assignment = ProcessAssignment(fewest=2, most=5, wait=timedelta(seconds=0.3))
    with forming(5, workers, assignment) as rendezvous:
        rendezvous.gather(soon())
    assert [(m.name, m.hosts) for m in rendezvous.members] == [
        ("a", "stage 0 and stage 1"), ("b", "stage 2 and stage 3"), ("c", "stage 4"),
    ]  # fmt: skip


@pytest.mark.threads
def test_too_few_for_an_elastic_group():
    assignment = ProcessAssignment(fewest=2, most=3, wait=timedelta(seconds=0.1))
    timeout = pytest.raises(RendezvousTimeout, match=r"1 of 2 workers .* joined: a;")
    with forming(3, lambda connect: answer(connect()[1], "a"), assignment) as rendezvous, timeout:
        rendezvous.gather(soon(1))


@pytest.mark.threads
def test_who_comes_while_a_generation_runs_is_in_the_next_one():
    """At the door they prove that they know the secret; others do not count."""
    replies = []

    def workers(connect):
        for name, secret in (("wrong", b"x" * 32), ("runs", SECRET), ("early", SECRET)):
            replies.append(answer(connect()[1], name, secret))

    with contextlib.ExitStack() as opened:
        connect = opened.enter_context
        listener = connect(listening("127.0.0.1", 0))
        local, _ = connect(local_workers())
        door = Listener(key=KEY, listener=listener)
        running = [Member("runs", "pid 1", Control(connect(socket.socket()), "runs"))]
        assert door.attend(0, 2, running) == []  # nobody has called, and nobody is waited for
        made = connect(connections(listener.getsockname()))
        with meanwhile(lambda: workers(made)):
            while not any(member.ready for member in door.members):
                door.attend(1, 2, running)
        assert [reply["type"] for reply in replies] == ["refused", "refused", "admitted"]
        assert "the name 'runs' is taken" in replies[1]["reason"]
        plan = Plan(name="", shape=Shape(workers=2))
        rendezvous = Rendezvous(plan, local, door, BEAT)
        with meanwhile(lambda: answer(made()[1], "late")):
            rendezvous.gather(soon())
        assert [member.name for member in rendezvous.members] == ["early", "late"]
        for member in rendezvous.members:
            member.control.close()
        door.close()
        assert door.attend(1, 2) == []


def stop_soon(rendezvous, seconds=20):
    """Gather for as long as no worker comes."""
    start = time.monotonic()
    with pytest.raises(RendezvousTimeout):
        rendezvous.gather(soon(seconds))
    return time.monotonic() - start


NESTED = b"\x81\xa4type" + b"\x91" * 1200 + b"\xc0"
FAKE = msgpack.packb({"type": "hello", "version": "6\n[worker] ERROR \x1b[2J", "name": "\x1b[1m"})


@pytest.mark.threads
def test_what_a_stranger_sends_ends_the_stranger_alone(caplog):
    """Nested values, a relayed hello with junk behind it, text that would forge the log."""

    def framed(data):
        return len(data).to_bytes(4, "big") + data

    def strangers():
        for junk in (NESTED, FAKE, b"\x80", b"\xc1", NESTED[:900] * 4):
            with socket.create_connection(address, timeout=10) as connection:
                Control(connection, "it").receive(soon())
                connection.sendall(framed(junk))
                with contextlib.suppress(OSError):
                    while connection.recv(1000):
                        pass
        with socket.create_connection(address, timeout=10) as connection:
            # Somebody between a worker and the coordinator, who passes the hello on.
            answer(Control(connection, "the coordinator"), "relayed", ready=False)
            connection.sendall(b"\0\0\0\x40" + b"junk" * 16)
            connection.recv(1000)
        connection = sockets.enter_context(socket.create_connection(address, timeout=10))
        answer(Control(connection, "the coordinator"), "right")

    with (
        contextlib.ExitStack() as sockets,
        listening("127.0.0.1", 0) as listener,
        local_workers() as (local, _),
    ):
        address = listener.getsockname()
        rendezvous = Rendezvous(
            Plan(name="", shape=Shape(workers=1)), local, Listener(key=KEY, listener=listener), BEAT
        )
        with meanwhile(strangers):
            rendezvous.gather(soon())
        assert [member.name for member in rendezvous.members] == ["right"]
        for member in rendezvous.members:
            member.control.close()
    assert "refused worker" in caplog.text
    for record in caplog.records:
        assert record.getMessage().isprintable()


@pytest.mark.threads
def test_strangers_who_keep_coming_do_not_put_off_the_deadline():
    over = threading.Event()

    def strangers():
        while not over.is_set():
            with contextlib.suppress(OSError), socket.create_connection(address, timeout=1):
                pass

    with listening("127.0.0.1", 0) as listener, local_workers() as (local, _):
        address = listener.getsockname()
        rendezvous = Rendezvous(
            Plan(name="", shape=Shape(workers=1)), local, Listener(key=KEY, listener=listener), BEAT
        )
        with meanwhile(strangers):
            try:
                assert stop_soon(rendezvous, 1) < 20
            finally:
                over.set()


FULL = """
import resource, socket, sys, threading, time
from datetime import timedelta
from pipedream_rt.cluster.addresses import listening
from pipedream_rt.cluster.listener import Listener
from pipedream_rt.cluster.forked_workers import ForkServer
from pipedream_rt.cluster.keys import JobKey
from pipedream_rt.cluster.local_workers import LocalWorkers
from pipedream_rt.cluster.rendezvous import Rendezvous
from pipedream_rt.deadline import Deadline
from pipedream_rt.errors import RendezvousTimeout
from pipedream_rt.schedules import Plan, Shape
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
with listening("127.0.0.1", 0) as listener:
    print(listener.getsockname()[1], flush=True)
    rendezvous = Rendezvous(
        Plan(name="", shape=Shape(workers=1)), LocalWorkers(1, ForkServer()),
        Listener(key=JobKey(b"s" * 32, b""), listener=listener), timedelta(seconds=20))
    start, used = time.monotonic(), time.process_time()
    try:
        rendezvous.gather(Deadline(timedelta(seconds=2)))
    except RendezvousTimeout:
        print(time.monotonic() - start, time.process_time() - used, flush=True)
"""


@pytest.mark.processes
def test_more_idle_strangers_than_there_are_descriptors():
    """The oldest go; the deadline is kept, and no processor time is burnt."""
    with (
        subprocess.Popen(
            [sys.executable, "-c", FULL], stdout=subprocess.PIPE, text=True
        ) as process,
        contextlib.ExitStack() as strangers,
    ):
        port = int(process.stdout.readline())
        for _ in range(200):
            strangers.enter_context(socket.create_connection(("127.0.0.1", port), timeout=10))
        passed, used = map(float, process.communicate(timeout=LATEST_S)[0].split())
    assert passed < 4
    assert used < 1


def test_a_worker_that_is_stopped_before_its_first_word_is_noticed_by_the_heartbeat():
    with local_workers("w0") as (local, _):
        rendezvous = Rendezvous(
            Plan(name="", shape=Shape(workers=1)), local, Listener(key=KEY), timedelta(seconds=0.2)
        )
        start = time.monotonic()
        with pytest.raises(WorkerLost, match=r"'w0' has been silent since it was started"):
            rendezvous.gather(soon(60))
        assert time.monotonic() - start < 10


def test_so_is_one_that_is_stopped_behind_its_hello():
    with local_workers("w0") as (local, others):
        rendezvous = Rendezvous(
            Plan(name="", shape=Shape(workers=1)), local, Listener(key=KEY), timedelta(seconds=0.2)
        )
        with (
            meanwhile(lambda: answer(others[0], "w0", ready=False)),
            pytest.raises(WorkerLost, match=r"'w0' has been silent"),
        ):
            rendezvous.gather(soon(60))
