"""The process that forks workers may end at any time, as other processes may."""

import os
import select
import signal
import socket
import subprocess
import sys
import threading
from contextlib import closing

import pytest
import torch
import torch.nn.functional as F
from support.deadlines import LATEST_S
from support.models import mlp, regression
from support.pinned import Flat as Pipeline

from pipedream_rt import Recovery
from pipedream_rt.cluster.forked_workers import ForkServer, fork_server
from pipedream_rt.cluster.worker_life import WorkerEnd
from pipedream_rt.errors import PeerLost, PipelineClosed


def has_ended(pid):
    """Wait until a process has ended."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    assert poll.poll(1000 * LATEST_S)
    os.close(fd)


@pytest.fixture
def forks():
    with closing(ForkServer()) as server:
        yield server


def forked(forks):
    """Have a worker forked, whose coordinator is gone at once."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        return forks.fork("w", 1, theirs)


def test_one_that_ended_is_replaced(forks, monkeypatch):
    """It is ended under the lock alone: else a thread could end what another has just started."""
    end, locked = forks._end, []

    def ended():
        locked.append(forks._lock.locked())
        end()

    monkeypatch.setattr(forks, "_end", ended)
    forks.prepare(("json",))
    os.kill(forks.pid, signal.SIGKILL)
    has_ended(forks.pid)
    forks.prepare(("csv",))
    assert forked(forks).wait(LATEST_S) not in (None, WorkerEnd.UNKNOWN)
    assert locked == [True]
    ours, theirs = socket.socketpair()
    with ours, theirs:
        worker = forks.fork("w", 1, theirs)
        os.kill(forks.pid, signal.SIGKILL)
        has_ended(forks.pid)
        worker.kill()
        assert worker.wait(LATEST_S) == WorkerEnd.UNKNOWN  # nobody else could tell
    assert locked == [True, True]
    forks.close()
    assert locked == [True, True, True]


def test_one_that_always_ends_is_told_of_in_words(forks, monkeypatch):
    def ended():
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        theirs.close()
        forks._connection = ours
        return ours

    monkeypatch.setattr(forks, "_start", ended)
    with pytest.raises(PeerLost, match="the process that forks workers is gone"):
        forked(forks)
    monkeypatch.undo()

    def refused(*arguments, **options):
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr("subprocess.Popen", refused)
    with pytest.raises(PeerLost, match=r"cannot be started: .*Cannot allocate memory"):
        forked(forks)


def test_a_request_that_is_too_long_is_not_sent(forks, monkeypatch):
    kept = []

    def started():
        forks._connection, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        kept.append(other)
        return forks._connection

    monkeypatch.setattr(forks, "_start", started)
    monkeypatch.setattr(socket, "send_fds", lambda *_: pytest.fail("it was sent"))
    monkeypatch.setenv("LARGE", "x" * (1 << 16))
    with pytest.raises(PeerLost, match="changed environment variables, and 65536 fit; unset large"):
        forked(forks)
    for each in kept:
        each.close()


def test_a_close_while_it_starts_leaves_no_process(forks, monkeypatch):
    made, closing_begins, begin = [], threading.Event(), forks._life.begin_closing

    def begun():
        begin()
        closing_begins.set()

    def started(*arguments, **options):
        closer.start()
        assert closing_begins.wait(LATEST_S)
        made.append(popen(*arguments, **options))
        return made[0]

    popen, closer = subprocess.Popen, threading.Thread(target=forks.close)
    monkeypatch.setattr(forks._life, "begin_closing", begun)
    monkeypatch.setattr(subprocess, "Popen", started)
    with pytest.raises(PipelineClosed, match="the fork server was closed"):
        forked(forks)
    closer.join(LATEST_S)
    assert forks.pid is None
    assert made[0].poll() == -signal.SIGKILL


def test_a_close_waits_for_nobody_who_waits_for_an_answer(forks, monkeypatch):
    waits, answer, words = threading.Event(), forks._answer, []

    def answered(connection):
        os.kill(forks.pid, signal.SIGSTOP)  # so that none comes
        waits.set()
        return answer(connection)

    def fork():
        with pytest.raises(PeerLost) as caught:
            forked(forks)
        words.append(str(caught.value))

    monkeypatch.setattr(forks, "_answer", answered)
    thread = threading.Thread(target=fork)
    thread.start()
    assert waits.wait(LATEST_S)
    forks.close()
    thread.join(LATEST_S)
    assert "the process that forks workers is gone" in words[0]


def test_it_is_replaced_while_the_workers_go_on(monkeypatch):
    """So it is ready when one of them dies; and the bits are those of an undisturbed run."""
    replace, replaced, digests = ForkServer.replace, threading.Event(), []

    def replacing(self):
        replace(self)
        replaced.set()

    monkeypatch.setattr(ForkServer, "replace", replacing)
    for disturbed in (False, True):
        with Pipeline(
            mlp(), stages=2, loss_fn=F.mse_loss, optimizer=(torch.optim.SGD, {"lr": 0.1}),
            recovery=Recovery(max_restarts=1),
        ) as pipe:  # fmt: skip
            data = regression(12)
            for result in pipe.train_epoch(data):
                if disturbed and result.step == 3:
                    before = fork_server().pid
                    os.kill(before, signal.SIGKILL)
                    assert replaced.wait(LATEST_S)
                    assert fork_server().pid != before
                    os.kill(pipe.on_stages(lambda module: os.getpid())[1], signal.SIGKILL)
            digests.append(pipe.fingerprint().digest)
            assert len(pipe.restarts) == disturbed
            if disturbed:
                assert "could tell how it ended is gone too" in str(pipe.restarts[0].reason)
    assert digests[0] == digests[1]


ENDS = """
import torch, torch.nn.functional as F
from torch import nn
from pipedream_rt import Pipeline
pipe = Pipeline([nn.Linear(2, 2)], stages=1, workers="local", loss_fn=F.mse_loss)
pipe.evaluate([(torch.ones(4, 2), torch.ones(4, 2))])
"""


@pytest.mark.processes
@pytest.mark.parametrize("end", ["", "import os; os._exit(0)"])
def test_a_script_that_does_not_close_its_pipeline_ends_without_a_word_of_an_error(end):
    """At its exit the server ends before the pipelines, and no other may be started then."""
    done = subprocess.run(
        [sys.executable, "-c", ENDS + end], capture_output=True, text=True, timeout=LATEST_S
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert "Exception" not in done.stderr
