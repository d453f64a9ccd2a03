"""Jobs of a real Slurm, whose nodes are processes of this machine; `make engines` installs it."""

import threading

import pytest
from support.nodes import expected
from support.slurm import Slurm, why_not
from support.slurm_job import STEPS, Job

pytestmark = [pytest.mark.processes, pytest.mark.rights]


@pytest.fixture
def slurm(tmp_path):
    if reason := why_not():
        pytest.skip(reason)
    with Slurm(tmp_path / "slurm", nodes=4) as made:
        yield made


def is_right(job):
    job.slurm.wait_for(job.number, "COMPLETED")
    assert expected(STEPS) in job.text.splitlines(), job.text
    assert list(job.shared.iterdir()) == []  # the secret has gone with the job


def test_a_job_whose_tasks_are_killed(slurm, tmp_path):
    """The script's own too: its loop starts it again, and it goes on from its checkpoint."""
    job = Job(slurm, tmp_path / "job")
    place = job.wait_for("step 100")
    job.kill_run("n2")
    place = job.wait_for("recovered in", place)
    job.kill_run("n1")
    place = job.wait_for("is started again", place)
    place = job.wait_for("began at", place)
    assert int(job.text[place:].split()[0]) >= 100
    is_right(job)


def test_a_node_that_is_drained_while_the_job_is_requeued(slurm, tmp_path):
    """As an administrator does it: SIGTERM, a checkpoint, and the same job on other nodes."""
    job = Job(slurm, tmp_path / "job")
    place = job.wait_for("step 100")
    slurm.drain("n2")
    slurm.requeue(job.number)
    place = job.wait_for("SIGTERM: a checkpoint is made", place)
    place = job.wait_for("began at", place)
    assert int(job.text[place:].split()[0]) > 100
    is_right(job)
    assert slurm.job(job.number)["NodeList"] == "n[1,3-4]"


def test_a_node_that_dies(slurm, tmp_path):
    """Slurm requeues the job, and it goes on with the node that was idle."""
    job = Job(slurm, tmp_path / "job")
    place = job.wait_for("step 100")
    slurm.kill_node("n3")
    job.wait_for("began at", place)
    is_right(job)


def test_a_job_that_is_cancelled_stays_cancelled(slurm, tmp_path):
    job = Job(slurm, tmp_path / "job")
    job.wait_for("step 100")
    slurm.cancel(job.number)
    slurm.wait_for(job.number, "CANCELLED")
    slurm.wait_for_nodes("idle")
    threading.Event().wait(1)
    assert slurm.state(job.number) == "CANCELLED"
