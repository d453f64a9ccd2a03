"""The life of a worker in a group, on a thread of the test, which is the coordinator.

The worker that is a process of its own is in tests/cluster/test_processes.py.
"""

import asyncio
import os
import secrets
import socket
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest
import torch
from support.callers import SECRET, soon
from support.deadlines import LATEST_S

from pipedream_rt.cluster.control import Control
from pipedream_rt.cluster.identity import NONCE
from pipedream_rt.cluster.peer_links import PeerLinks
from pipedream_rt.cluster.peer_listeners import PeerAddress, listening_for_peers
from pipedream_rt.cluster.records import welcome
from pipedream_rt.cluster.worker import process
from pipedream_rt.cluster.worker.process import host_stage
from pipedream_rt.cluster.worker_life import WorkerEnd
from pipedream_rt.errors import PeerLost
from pipedream_rt.transport.group import Group
from pipedream_rt.transport.sockets import SocketTransport

NAMES = ("coordinator", "w")


@pytest.fixture(autouse=True)
def nothing_is_left(monkeypatch):
    """What a process would let go of by its end, where it does not leave its group."""
    made, there, before = [], process.SocketTransport, {*os.listdir("/proc/self/fd")}

    def noted(*arguments, **options):
        made.append(there(*arguments, **options))
        return made[-1]

    monkeypatch.setattr(process, "SocketTransport", noted)
    yield
    for thread in threading.enumerate():
        if thread.name.startswith(("stage", "worker")):  # it has lost its link to the coordinator
            thread.join(LATEST_S)
    for transport in made:
        transport.close()  # not while a stage waits for it
    assert {*os.listdir("/proc/self/fd")} <= before


class Coordinator:
    """The other end of a worker's control connection.

    Attributes:
        worker: What `host_stage` returns at last.
        threads_before: The threads of this process without the worker's and its own.
    """

    def __init__(
        self, beat_s=LATEST_S, *, inherited=True, local_host="", stages=(0,), host=None, **more
    ):
        self.threads_before = {*threading.enumerate()}
        self._pool = ThreadPoolExecutor(1)
        near, far = socket.socketpair()
        self.control = Control(near, "w")
        self._of_worker = Control(
            far, "the coordinator", inherited=inherited, local_host=local_host
        )
        self._nonce = secrets.token_bytes(NONCE)
        seat = (0, "stage 0" if len(stages) == 1 else "worker 0", list(stages))
        said = welcome(
            1, NAMES, host, nonce=self._nonce, beat_s=beat_s, seats=[seat],
            hosts=[0] * len(stages), timeout_s=float(LATEST_S), start_timeout_s=float(LATEST_S),
            **more,
        )  # fmt: skip
        self._hosts = tuple(said["hosts"])
        self.worker = self._pool.submit(
            host_stage, self._of_worker, said, torch.get_num_threads(), SECRET, None
        )
        self.transport = None

    def hear(self, kind):
        """Wait for a record of a type; let go of beats that come before."""
        while (record := self.control.receive(soon()))["type"] != kind:
            assert record["type"] == "beat", record
        return record

    def say(self, kind, **fields):
        self.control.send({"type": kind, **fields})

    def join(self):
        """Meet the worker as rank 0."""
        group = Group(
            generation=0, rank=0, names=NAMES, hosts=self._hosts,
            key=SECRET.group_key(self._nonce),
        )  # fmt: skip
        self.transport = SocketTransport(group)
        addresses = {1: PeerAddress(*self.hear("door")["at"])}
        with listening_for_peers(None) as listeners:
            self.say("doors", by_name={NAMES[0]: listeners.address, NAMES[1]: addresses[1]})

            async def meet():
                return await PeerLinks(group, SECRET, listeners, addresses, soon()).meet()

            self.transport.connect(asyncio.run(meet()))
        return self.hear("joined")

    def close(self):
        self.control.close()
        self.worker.exception(LATEST_S)
        self._of_worker.close()
        if self.transport is not None:
            self.transport.close()
        self._pool.shutdown()


@pytest.fixture
def joined():
    with closing(Coordinator()) as made:
        made.join()
        yield made


def names():
    """The names of all threads; a thread takes its own, without spaces, once it runs."""
    return [thread.name.replace(" ", "-") for thread in threading.enumerate()]


@pytest.mark.parametrize(("stages", "thread"), [((0,), "stage-0"), ((0, 1), "worker-0")])
def test_it_joins_and_answers_while_its_stages_wait(stages, thread):
    """It says whose memory it shares; several stages share a thread and a story."""
    with closing(Coordinator(stages=stages)) as made:
        assert made.join()["nearby"] == [0]
        assert [name for name in names() if name.startswith(("stage-", "worker-"))] == [thread]
        made.say("story", text=None)
        assert made.hear("story")["text"].endswith("; last actions: none")
        made.say("clock", ns=None)
        assert made.hear("clock")["ns"] > 0


@pytest.mark.parametrize(("failed", "code"), [(False, 0), (True, WorkerEnd.COORDINATOR_LOST)])
def test_it_ends_with_what_becomes_of_the_job(joined, failed, code):
    """With the code for a lost coordinator a worker that persists joins the next generation."""
    joined.say("stop")
    joined.hear("stopped")
    assert "stage-0" not in names()
    joined.say("exit", failed=failed)
    assert joined.worker.result(LATEST_S) == code
    # The coordinator's links, and the thread that has run `host_stage`.
    assert len({*threading.enumerate()} - joined.threads_before) == 2


def test_a_stage_that_computes_without_end_is_left(monkeypatch, caplog):
    """The process ends without it; here the thread goes on until the test lets it."""
    held = threading.Event()
    monkeypatch.setattr(process, "_LAST_ACTION_S", 0.01)
    monkeypatch.setattr(process, "serve_together", lambda *_: held.wait(LATEST_S))
    with closing(Coordinator()) as made:
        try:
            made.join()
            made.say("stop")
            assert made.worker.result(LATEST_S) == WorkerEnd.COORDINATOR_LOST
        finally:
            held.set()
    assert "a stage computes without end" in caplog.text


@pytest.mark.parametrize("inherited", [True, False])
def test_without_a_coordinator_it_ends_and_leaves_nothing_half_written(monkeypatch, inherited):
    """Over a network the coordinator may be alive, and finish the checkpoint."""
    removed = []
    monkeypatch.setattr(process.StageHost, "remove_parts", lambda host: removed.append(host.name))
    with closing(
        Coordinator(inherited=inherited, local_host="" if inherited else "127.0.0.1")
    ) as made:
        made.join()
        made.control.close()
        assert made.worker.result(LATEST_S) == WorkerEnd.COORDINATOR_LOST
    assert removed == (["stage 0"] if inherited else [])


def test_it_beats_while_it_hears_nothing():
    with closing(Coordinator(beat_s=0.01)) as made:
        made.join()
        beats = [made.control.receive(soon()) for _ in range(3)]
    assert {beat["type"] for beat in beats} == {"beat"}
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert all(1 << 20 < beat["rss"] < memory for beat in beats)


def test_what_only_a_worker_says_ends_it(joined):
    joined.say("joined", nearby=[])
    with pytest.raises(PeerLost, match="the coordinator sent 'joined'"):
        joined.worker.result(LATEST_S)


# -- while it joins ----------------------------------------------------------------------------


def test_a_group_that_is_given_up_before_its_addresses_are_known():
    with closing(Coordinator()) as made:
        made.hear("door")
        made.say("exit", failed=True)
        assert "expected 'doors' from the coordinator, got 'exit'" in made.hear("failed")["text"]
        assert made.worker.result(LATEST_S) == WorkerEnd.AGAIN


def test_a_group_that_is_given_up_while_its_members_meet():
    """It dials the coordinator, which answers nothing there and says something else here."""
    with closing(Coordinator()) as made, socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(LATEST_S)
        own = made.hear("door")["at"]
        silent_address = PeerAddress(host="127.0.0.1", port=silent.getsockname()[1])
        made.say("doors", by_name={NAMES[0]: silent_address, NAMES[1]: own})
        silent.accept()[0].close()  # it is there, and tries again
        made.say("stop")
        assert "gave up forming the group" in made.hear("failed")["text"]
        assert made.worker.result(LATEST_S) == WorkerEnd.AGAIN


def test_a_meeting_that_is_given_up_is_cancelled_once(ends):
    """What the coordinator has said is unread meanwhile, and the meeting has much to close."""
    coordinator, control = ends
    ended = []

    async def meeting():
        coordinator.send({"type": "stop"})
        try:
            await asyncio.sleep(LATEST_S)
        finally:
            for _ in range(5):
                await asyncio.sleep(0)
            ended.append(True)

    with pytest.raises(PeerLost, match="gave up forming the group"):
        asyncio.run(process._unless_given_up(control, meeting()))
    assert ended


def test_a_worker_elsewhere_must_be_told_its_interface(monkeypatch):
    """To try it again would change nothing: this is an error of the one who started it."""
    monkeypatch.setattr(process, "interface_of", {"192.0.2.1": "eth7"}.get)
    with closing(Coordinator(inherited=False, local_host="192.0.2.1", host="192.0.2.2")) as made:
        assert "as --bind eth7" in made.hear("unfit")["text"]
        assert made.worker.result(LATEST_S) == WorkerEnd.FAILED


def test_what_the_script_can_import_it_can(monkeypatch):
    before = [*sys.path]
    monkeypatch.setattr(sys, "path", [*before])
    folder = "/no/folder/of/this/machine"
    with closing(Coordinator(path=[before[0], folder])) as made:
        made.join()
        assert sys.path == [*before, folder]
