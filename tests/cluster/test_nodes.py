"""Jobs of several nodes, whose processes are started, killed and started again as engines do."""

import os
import signal
import socket
import subprocess
import sys

import pytest
from support import elastic
from support.deadlines import LATEST_S
from support.nodes import RUN, SCRIPT, below, calls_to, expected, nodes, own_environment
from support.slurm import until
from support.two_hosts import OTHER_SECRET, SECRET, Child

pytestmark = pytest.mark.processes


@pytest.fixture
def job(tmp_path):
    with nodes(tmp_path / "run", steps=400) as made:
        yield made


def test_any_node_may_be_killed_and_the_bits_are_the_same(job):
    """A worker alone, which its node starts again; a node; and that of the script.

    The others wait for that, and it goes on from its newest checkpoint.
    """
    first, *others = (job.start(rank) for rank in range(3))
    first.wait_for("step 100")
    os.kill(below(others[1].pid)[-1], signal.SIGKILL)
    others[1].wait_for("is started again")
    others[0].signal(signal.SIGKILL)
    others[0] = job.start(1)
    first.wait_for("step 220")
    pid = int(first.text.split("pid ")[1].split()[0])
    first.signal(signal.SIGKILL)
    assert first.ended() == -signal.SIGKILL
    first = job.start(0)
    began = int(first.wait_for("began at").split()[2])
    assert 200 <= began < job.steps
    assert first.text.count(f"pid {pid}") == 0
    assert first.wait_for("digest") == expected(job.steps)
    assert [each.ended() for each in (first, *others)] == [0, 0, 0]


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


def test_a_spare_node_takes_the_place_of_one_that_is_lost(tmp_path):
    with nodes(tmp_path / "run", size=4) as job:
        words = [elastic.__file__, str(tmp_path / "run"), "-", "3", "3", "15", "55"]
        started = [job.start(rank, script=words) for rank in range(4)]
        before = started[0].wait_for("at 15").split()[2:]
        lost = next(rank for rank in (1, 2, 3) if f"node-{rank}-0" in before)
        (spare,) = {f"node-{rank}-0" for rank in range(4)} - {*before}
        job.kill(started[lost])
        started[0].go_on()
        after = started[0].wait_for("at 55").split()[2:]
        assert {*after} == {spare, *before} - {f"node-{lost}-0"}
        started[0].go_on()
        assert started[0].wait_for("digest") == f"digest {elastic.expected()}"
        assert [each.ended() for rank, each in enumerate(started) if rank != lost] == [0, 0, 0]


def test_sigterm_to_all_nodes_makes_a_checkpoint(tmp_path):
    """As an engine sends it that takes the machines back; the next start goes on from there."""
    with nodes(tmp_path / "run", size=2, steps=400) as job:

        def all_nodes():
            return [job.start(rank, "--nproc-per-node", str(2 - rank)) for rank in range(2)]

        first, other = all_nodes()
        first.wait_for("step 100")
        other.signal(signal.SIGTERM)
        first.signal(signal.SIGTERM)
        assert [first.ended(), other.ended()] == [143, 143], first.text
        first, other = all_nodes()
        began = int(first.wait_for("began at").split()[2])
        assert began > 100
        assert first.wait_for("digest") == expected(job.steps)
        assert [first.ended(), other.ended()] == [0, 0]


@pytest.mark.stress
def test_what_the_script_has_forked_does_not_keep_the_port(job, tmp_path):
    """It outlives a script that is killed, as workers of data loaders do for a while."""
    script = tmp_path / "forks.py"
    script.write_text(
        "import os, runpy, signal, sys\n"
        "from torch import nn\n"
        "from pipedream_rt import Pipeline\n"
        "def fork(*_):\n"
        "    if (child := os.fork()) == 0:\n"
        "        null = os.open(os.devnull, os.O_RDWR)\n"
        "        os.dup2(null, 1); os.dup2(null, 2)\n"
        "        signal.pause()\n"
        "    print('forked', child)\n"
        "pipe = Pipeline([nn.Linear(2, 2)] * 3, stages=3)\n"
        "fork()\n"
        "print('script', os.getpid())\n"
        "sys.stdin.readline()\n"
    )
    first, *others = (job.start(rank, script=[str(script)]) for rank in range(3))
    forked = int(first.wait_for("forked").split()[1])
    try:
        os.kill(int(first.wait_for("script").split()[1]), signal.SIGKILL)
        assert first.ended() == 128 + signal.SIGKILL
        first = job.start(0)
        assert first.wait_for("digest") == expected(job.steps)
        assert [each.ended() for each in (first, *others)] == [0, 0, 0]
    finally:
        os.kill(forked, signal.SIGKILL)


@pytest.mark.stress
def test_nodes_may_have_different_numbers_of_workers(job):
    """As with --nproc-per-node auto on unlike machines; the job has as many as it needs."""
    first, *others = (
        job.start(rank, "--nproc-per-node", str(count)) for rank, count in enumerate((1, 3, 2))
    )
    assert first.wait_for("digest") == expected(job.steps)
    assert [each.ended() for each in (first, *others)] == [0, 0, 0]
    assert "did not hear" not in first.text


@pytest.mark.stress
def test_sigterm_at_a_good_end_is_a_good_end(job):
    """An engine may take the machines back in the same moment; it must not start the job again."""
    first, *others = (job.start(rank) for rank in range(3))
    first.wait_for("digest")
    for each in others:
        each.signal(signal.SIGTERM)
    assert [each.ended() for each in (first, *others)] == [0, 0, 0]


def test_workers_of_one_node_may_end_in_the_same_moment(tmp_path):
    """All hear at once that the job is over; the node ends well all the same."""
    script = tmp_path / "nothing.py"
    script.write_text("import sys; sys.stdin.readline()")
    with nodes(tmp_path / "run", size=2) as job:
        first, other = (
            job.start(rank, "--nproc-per-node", "6", script=[str(script)]) for rank in (0, 1)
        )
        until(lambda: calls_to(job.port) == 6, "six workers that wait")
        first.go_on()
        assert [first.ended(), other.ended()] == [0, 0], other.text


def test_a_script_that_fails_ends_all_nodes_for_good(job, tmp_path):
    script = tmp_path / "fails.py"
    script.write_text("raise SystemExit(5)")
    started = [job.start(rank, script=[str(script)]) for rank in range(3)]
    assert [each.ended() for each in started] == [5, 1, 1], started[1].text


def test_a_node_whose_terminal_is_gone_ends_as_its_script_does(tmp_path):
    """It says that it passes SIGTERM on, and nobody can read that."""
    script, ready = tmp_path / "ends.py", tmp_path / "ready"
    script.write_text(
        "import pathlib, signal, sys\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))\n"
        f"pathlib.Path({str(ready)!r}).touch()\n"
        "signal.pause()\n"
    )
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    words = ["--nnodes", "2", "--node-rank", "0", "--rdzv-endpoint", address, str(script)]
    reading, writing = os.pipe()
    os.close(reading)
    node = subprocess.Popen(
        [*RUN, *words], stderr=writing, env=own_environment(PIPEDREAM_RT_SECRET=SECRET)
    )
    os.close(writing)
    try:
        until(ready.exists, "the script")
        node.terminate()
        assert node.wait(LATEST_S) == 3
    finally:
        node.kill()
        node.wait()


def test_a_first_node_that_never_comes(job):
    assert job.start(1, "--patience", "1").ended() == 3


def test_a_first_node_whose_name_nobody_knows():
    words = ["--nnodes", "2", "--node-rank", "1", "--rdzv-endpoint", "nobody.invalid:29500"]
    child = Child(
        [*RUN, *words, "--patience", "1", SCRIPT], own_environment(PIPEDREAM_RT_SECRET=SECRET)
    )
    assert child.ended() == 3
    assert "the first node was not found within 1 s: nobody.invalid:29500" in child.text
    child.close()


@pytest.mark.stress
def test_a_node_with_another_version_is_refused_by_name(job, tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "sitecustomize.py").write_text(
        "import pipedream_rt; pipedream_rt.__version__ = '9.9'"
    )
    first = job.start(0, script=[str(impatient(tmp_path))])
    other = job.start(1, PYTHONPATH=str(tmp_path / "other"))
    other.wait_for("the coordinator refused this worker: it has torch")
    assert other.ended() == 1  # to start the same again would not help
    line = first.wait_for("RendezvousTimeout")
    assert "'node-1-0' was refused: it has torch" in line
    assert "pipedream-rt 9.9" in line
    assert first.ended() == 1


def impatient(folder):
    """A script that waits for its workers for ten seconds."""
    script = folder / "impatient.py"
    script.write_text(
        "from datetime import timedelta\n"
        "from torch import nn\n"
        "from pipedream_rt import Pipeline, Recovery\n"
        "Pipeline([nn.Linear(2, 2)] * 3, stages=3, loss_fn=nn.MSELoss(),\n"
        "         recovery=Recovery(start=timedelta(seconds=10)))\n"
    )
    return script


@pytest.mark.stress
def test_a_node_with_another_secret_is_kept_out(job):
    """It cannot know whether who listens is the first node, so it tries again until it may."""
    other = job.start(1, secret=OTHER_SECRET)
    first = job.start(0)
    first.wait_for("one end does not know the secret that the other has")
    other.wait_for("one end does not know the secret that the other has")
    other.signal(signal.SIGKILL)
    started = [job.start(rank) for rank in (1, 2)]
    assert first.wait_for("digest") == expected(job.steps)
    assert [each.ended() for each in (first, *started)] == [0, 0, 0]


@pytest.mark.stress
def test_nodes_that_are_missing_are_told_of_where_to_look(job, tmp_path):
    first = job.start(0, script=[str(impatient(tmp_path))])
    other = job.start(1)
    line = first.wait_for("RendezvousTimeout: 1 of 3 workers did not join within 10 s")
    assert "joined: node-0-0, node-1-0" in line
    assert "look at what the other processes of the job of 3 nodes at 127.0.0.1:" in line
    # The script has ended for good, so the node that is there hears it; the other is not awaited
    # for ever.
    assert other.ended() == 1
    assert first.ended() == 1
    assert "1 of 2 other nodes did not hear the end" in first.text


def test_two_jobs_at_one_address(tmp_path):
    script = tmp_path / "waits.py"
    script.write_text("import sys; print('waits'); sys.stdin.readline()")
    with nodes(tmp_path / "run", size=2) as job:
        first, other = (job.start(rank, script=[str(script)]) for rank in (0, 1))
        first.wait_for("waits")
        second = job.start(0, script=[str(script)])
        assert second.ended() == 3, second.text  # the port may be free when it is started again
        line = f"cannot listen at 127.0.0.1:{job.port}: [Errno 98] Address already in use"
        assert line in second.text
        assert "Is it another job's?" in second.text
        first.go_on()
        assert [first.ended(), other.ended()] == [0, 0]


@pytest.mark.stress
def test_the_same_script_under_torchrun_on_two_nodes(job, tmp_path):
    started = [
        Child(
            [
                sys.executable, "-m", "torch.distributed.run", "--nnodes", "2",
                "--node-rank", str(rank), "--nproc_per_node", "2", "--master-addr", "127.0.0.1",
                "--master-port", str(job.port), SCRIPT, str(tmp_path / "run"),
                "--steps", str(job.steps),
            ],
            own_environment(PIPEDREAM_RT_SECRET=SECRET),
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        assert started[0].wait_for("digest") == expected(job.steps)
        assert [each.ended() for each in started] == [0, 0], started[0].text
    finally:
        for each in started:
            each.close()
