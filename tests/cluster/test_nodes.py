"""Jobs of several nodes, whose processes are started, killed and started again as engines do."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
from datetime import timedelta

import pytest
from support import elastic
from support.deadlines import LATEST_S
from support.nodes import RUN, below, calls_to, expected, nodes, own_environment
from support.ports import free_port
from support.slurm import until
from support.two_hosts import OTHER_SECRET, SECRET

from pipedream_rt.cluster import nodes as library
from pipedream_rt.cluster.engines import EngineRequest, node_job

pytestmark = pytest.mark.processes

EACH = "--nproc-per-node"


def test_any_node_may_be_killed_or_told_to_end_and_the_bits_are_the_same(tmp_path):
    """Workers alone, which their node starts again, and one of which has no place; their node.

    Then SIGTERM to all, as of an engine that takes the machines back, and a kill of the node of the
    script, for which the other waits. At last SIGTERM at a good end, which is a good end: else an
    engine would start the job again.
    """
    with nodes(tmp_path / "run", size=2, steps=400) as job:
        first, other = (job.start(rank, EACH, "2") for rank in range(2))
        first.wait_for("step 100")
        for pid in below(other.pid)[1:]:  # all but what forks them
            os.kill(pid, signal.SIGKILL)
        for _ in range(2):
            other.wait_for("is started again")
        job.kill(other)
        other = job.start(1, EACH, "2")
        first.wait_for("step 200")
        for each in (other, first):
            each.signal(signal.SIGTERM)
        first.wait_for("SIGTERM: a checkpoint is made")
        assert [first.ended(), other.ended()] == [143, 143], first.text
        first, other = (job.start(rank, EACH, "2") for rank in range(2))
        assert int(first.wait_for("began at").split()[2]) > 200
        first.wait_for("step 300")
        job.kill(first)
        first = job.start(0, EACH, "2")
        assert 300 <= int(first.wait_for("began at").split()[2]) < job.steps
        assert first.wait_for("digest") == expected(job.steps)
        other.signal(signal.SIGTERM)
        assert [first.ended(), other.ended()] == [0, 0]


@pytest.mark.stress
def test_an_elastic_job_goes_on_without_a_node(tmp_path):
    with nodes(tmp_path / "run") as job:
        words = [elastic.__file__, str(tmp_path / "run"), "-", "2", "3", "15", "25", "35+", "55"]
        first, second, third = (job.start(rank, script=words) for rank in range(3))
        assert first.wait_for("at 15") == "at 15: node-0-0 node-1-0 node-2-0"
        job.kill(second)
        first.go_on()
        assert first.wait_for("at 25") == "at 25: node-0-0 node-0-0 node-2-0"
        second = job.start(1, script=words)
        first.go_on()
        assert first.wait_for("at 55") == "at 55: node-0-0 node-1-0 node-2-0"
        first.go_on()
        assert first.wait_for("digest") == f"digest {elastic.expected()}"
        assert [each.ended() for each in (first, second, third)] == [0, 0, 0]


def script(folder, *lines):
    """The words that start a script of these lines."""
    place = folder / "script.py"
    place.write_text("\n".join(lines))
    return [str(place)]


WAITS = "print('waits', flush=True); sys.stdin.readline()"


@pytest.mark.stress
def test_what_the_script_has_forked_does_not_keep_the_port(tmp_path):
    """It outlives a script that is killed, as workers of data loaders do for a while."""
    forks = script(
        tmp_path,
        "import os, signal, sys",
        "from torch import nn",
        "from pipedream_rt import Pipeline",
        "pipe = Pipeline([nn.Linear(2, 2)], stages=1)",
        "if (child := os.fork()) == 0:",
        "    null = os.open(os.devnull, os.O_RDWR)",
        "    os.dup2(null, 1); os.dup2(null, 2)",
        "    signal.pause()",
        "print('forked', child, os.getpid())",
        "sys.stdin.readline()",
    )
    with nodes(tmp_path / "run", size=2) as job:
        first, other = (job.start(rank, EACH, "2", script=forks) for rank in range(2))
        forked, pid = map(int, first.wait_for("forked").split()[1:])
        try:
            os.kill(pid, signal.SIGKILL)
            assert first.ended() == 128 + signal.SIGKILL
            first = job.start(0, EACH, "2")
            assert first.wait_for("digest") == expected(job.steps)
            assert [first.ended(), other.ended()] == [0, 0]
        finally:
            os.kill(forked, signal.SIGKILL)


def test_workers_of_one_node_may_end_in_the_same_moment(tmp_path):
    """All hear at once that the job is over; the node ends well all the same."""
    words = script(tmp_path, "import sys", WAITS)
    with nodes(tmp_path / "run", size=2) as job:
        first, other = (job.start(rank, EACH, "6", script=words) for rank in range(2))
        until(lambda: calls_to(job.port) == 6, "six workers that wait")
        first.go_on()
        assert [first.ended(), other.ended()] == [0, 0], other.text


def test_a_script_that_fails_ends_all_nodes_for_good(tmp_path):
    """Its own says that it passes SIGTERM on, and nobody can read that: its terminal is gone."""
    ready = tmp_path / "ready"
    words = script(
        tmp_path,
        "import pathlib, signal, sys",
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))",
        f"pathlib.Path({str(ready)!r}).touch()",
        "signal.pause()",
    )
    reading, writing = os.pipe()
    os.close(reading)
    with nodes(tmp_path / "run", size=2) as job:
        other = job.start(1)
        first = subprocess.Popen(
            [*RUN, *job.words(0), *words], stderr=writing,
            env=own_environment(PIPEDREAM_RT_SECRET=SECRET),
        )  # fmt: skip
        os.close(writing)
        try:
            until(ready.exists, "the script")
            first.terminate()
            assert [first.wait(LATEST_S), other.ended()] == [5, 1], other.text
        finally:
            first.kill()
            first.wait()


@pytest.fixture
def node(monkeypatch):
    """A node of a job of two, which runs in this process."""
    monkeypatch.setenv("PIPEDREAM_RT_SECRET", SECRET)
    return lambda rank, at: node_job({}, EngineRequest(nodes=2, rank=rank, endpoint=at))


@pytest.mark.parametrize(
    ("host", "words"),
    [
        ("127.0.0.1", "no coordinator listened at "),
        ("nobody.invalid", "the first node was not found within 1 s: "),
    ],
)
def test_a_first_node_that_never_comes(node, host, words, caplog, capfd):
    address = f"{host}:{free_port()}"
    second = timedelta(seconds=1)
    assert library.run_other(node(1, address), 1, 1, [], second, second) == 3
    assert f"{words}{address}" in caplog.text + capfd.readouterr().err


def test_a_node_that_was_told_to_end_waits_while_the_first_one_listens(node, monkeypatch):
    ending = []

    class Workers:
        def __init__(self, *arguments):
            pass

        ended = contextlib.nullcontext

        def serve(self, is_ending):
            ending.append(is_ending())
            signal.raise_signal(signal.SIGTERM)
            ending.append(is_ending())
            first.close()
            ending.append(is_ending())
            return 7

    monkeypatch.setattr(library, "NodeWorkers", Workers)
    first = socket.create_server(("127.0.0.1", 0))
    with first:
        other = node(1, f"127.0.0.1:{first.getsockname()[1]}")
        long = timedelta(seconds=LATEST_S)
        assert library.run_other(other, 1, 1, [], long, long) == 7
    assert ending == [False, False, True]


def test_two_jobs_at_one_address(node, monkeypatch):
    """The port may be free when it is started again."""
    monkeypatch.setattr(library, "_PORT_TIMEOUT", timedelta(0))
    said = []
    with socket.create_server(("127.0.0.1", 0)) as others:
        at = f"127.0.0.1:{others.getsockname()[1]}"
        assert library.run_first(node(0, at), [], 1, {}, said.append, timedelta(0)) == 3
    (line,) = said
    assert f"cannot listen at {at}: [Errno 98] Address already in use" in line
    assert "Is it another job's?" in line


def test_how_many_nodes_did_not_hear_the_end_is_told(node, monkeypatch):
    monkeypatch.setattr(library, "announce_end", lambda *arguments: 0)
    at, said = f"127.0.0.1:{free_port()}", []
    command, patience = [sys.executable, "-c", "raise SystemExit(0)"], timedelta(seconds=LATEST_S)
    assert library.run_first(node(0, at), command, 1, {}, said.append, patience) == 0
    assert said == ["1 of 1 other nodes did not hear the end"]


@pytest.mark.stress
def test_nodes_that_are_kept_out_or_missing_are_told_of_where_to_look(tmp_path):
    """One has another version. One has another secret, and tries again until it may be right."""
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "sitecustomize.py").write_text(
        "import pipedream_rt; pipedream_rt.__version__ = '9.9'"
    )
    impatient = script(
        tmp_path,
        "from datetime import timedelta",
        "from torch import nn",
        "from pipedream_rt import Pipeline, Recovery",
        "Pipeline([nn.Linear(2, 2)] * 3, stages=3, loss_fn=nn.MSELoss(),",
        "         recovery=Recovery(start=timedelta(seconds=10)))",
    )
    with nodes(tmp_path / "run", size=4) as job:
        another = job.start(1, PYTHONPATH=str(tmp_path / "other"))
        stranger = job.start(2, secret=OTHER_SECRET)
        right = job.start(3)
        first = job.start(0, script=impatient)
        first.wait_for("one end does not know the secret that the other has")
        stranger.wait_for("one end does not know the secret that the other has")
        another.wait_for("the coordinator refused this worker: it has torch")
        assert another.ended() == 1  # to start the same again would not help
        line = first.wait_for("RendezvousTimeout: 1 of 3 workers did not join within 10 s")
        assert "joined: node-0-0, node-3-0" in line
        assert "'node-1-0' was refused: it has torch" in line
        assert "pipedream-rt 9.9" in line
        assert "look at what the other processes of the job of 4 nodes at 127.0.0.1:" in line
        assert stranger.process.poll() is None
        # The script has ended for good, so the node that is there hears it; the others are not
        # awaited for ever.
        assert [right.ended(), first.ended()] == [1, 1]
        assert "2 of 3 other nodes did not hear the end" in first.text
