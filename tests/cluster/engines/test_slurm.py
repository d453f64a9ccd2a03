"""Jobs of a real Slurm, whose nodes are processes of this machine; `make engines` installs it."""

import os
import signal
import sys
import threading
from contextlib import suppress
from pathlib import Path

import pytest
from support.deadlines import LATEST_S
from support.nodes import SCRIPT, expected
from support.slurm import Slurm, until, why_not

pytestmark = pytest.mark.processes

SBATCH = Path(__file__).parents[3] / "deploy" / "slurm.sbatch"
STEPS = 600


@pytest.fixture
def slurm(tmp_path):
    if reason := why_not():
        pytest.skip(reason)
    with Slurm(tmp_path / "slurm", nodes=4) as made:
        yield made


class Job:
    """A job that trains on three nodes, from the sbatch file that users get."""

    def __init__(self, slurm, folder, *options):
        folder.mkdir()
        self.slurm, self.output = slurm, folder / "out"
        commands = os.path.dirname(sys.executable)
        (folder / "bin").mkdir()
        command = folder / "bin" / "pipedream-rt"
        lines = (f"#!{sys.executable}", "from pipedream_rt.cli import main", "main()", "")
        command.write_text("\n".join(lines))
        command.chmod(0o755)
        answer = slurm.run(
            "sbatch", "--parsable", "--nodes=3", f"--output={self.output}", f"--chdir={folder}",
            *options, SBATCH, SCRIPT, folder / "run", "--steps", STEPS,
            PATH=f"{folder / 'bin'}:{commands}:{os.environ['PATH']}", PYTHONUNBUFFERED="1",
            PYTHONPATH=str(SBATCH.parents[1]), PIPEDREAM_RT_JOB_FOLDER=str(folder / "shared"),
        )  # fmt: skip
        self.number = int(answer.split()[-1])
        self.shared = folder / "shared"

    @property
    def text(self):
        return self.output.read_text(errors="replace") if self.output.exists() else ""

    def wait_for(self, words, after=0):
        """Wait for words beyond a place of the output, and return the place behind them."""

        def found():
            return words in self.text[after:]

        until(found, lambda: self.slurm.tell(f"no {words!r} in {self.text}"), LATEST_S)
        return self.text.index(words, after) + len(words)

    def kill_run(self, node):
        """Kill `pipedream-rt run` on a node, and not the loop around it."""
        killed = 0
        for pid in self.slurm.node_processes(node):
            with suppress(OSError):
                words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                if words[1].endswith(b"bin/pipedream-rt") and words[2] == b"run":
                    os.kill(pid, signal.SIGKILL)
                    killed += 1
        assert killed == 1

    def is_right(self):
        self.slurm.wait_for(self.number, "COMPLETED")
        assert expected(STEPS) in self.text.splitlines(), self.text
        assert list(self.shared.iterdir()) == []  # the secret has gone with the job


def test_a_job_whose_tasks_are_killed(slurm, tmp_path):
    """The script's own too: its loop starts it again, and it goes on from its checkpoint."""
    job = Job(slurm, tmp_path / "job")
    place = job.wait_for("step 100")
    job.kill_run("n2")
    place = job.wait_for("recovered in", place)
    job.kill_run("n1")
    place = job.wait_for("is started again", place)
    place = job.wait_for("began at", place)
    assert int(job.text[place:].split()[0]) >= 80
    job.is_right()


def test_a_node_that_is_drained_while_the_job_is_requeued(slurm, tmp_path):
    """As an administrator does it: SIGTERM, a checkpoint, and the same job on other nodes."""
    job = Job(slurm, tmp_path / "job")
    place = job.wait_for("step 100")
    slurm.drain("n2")
    slurm.requeue(job.number)
    place = job.wait_for("SIGTERM: a checkpoint is made", place)
    place = job.wait_for("began at", place)
    assert int(job.text[place:].split()[0]) > 100
    job.is_right()
    assert slurm.job(job.number)["NodeList"] == "n[1,3-4]"


def test_a_node_that_dies(slurm, tmp_path):
    """Slurm requeues the job, and it goes on with the node that was idle."""
    job = Job(slurm, tmp_path / "job")
    place = job.wait_for("step 100")
    slurm.kill_node("n3")
    job.wait_for("began at", place)
    job.is_right()


def test_a_job_that_is_cancelled_stays_cancelled(slurm, tmp_path):
    job = Job(slurm, tmp_path / "job")
    job.wait_for("step 100")
    slurm.cancel(job.number)
    slurm.wait_for(job.number, "CANCELLED")
    slurm.wait_for_nodes("idle")
    threading.Event().wait(1)
    assert slurm.state(job.number) == "CANCELLED"
