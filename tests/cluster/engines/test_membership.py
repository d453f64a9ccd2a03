"""What engines say in the environment, read without any of them."""

import os
import stat
from datetime import timedelta

import pytest

from pipedream_rt.cluster.engines import EngineRequest, Node, elastic, node_job, slurm, why_nodes
from pipedream_rt.cluster.engines.slurm import expanded
from pipedream_rt.deadline import Deadline
from pipedream_rt.errors import ConfigError

STEP = {
    "SLURM_JOB_ID": "12", "SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_NODELIST": "n[1-3]", "SLURM_CLUSTER_NAME": "big one",
}  # fmt: skip
KUBEFLOW = {"PET_NNODES": "4", "PET_NODE_RANK": "2", "PET_MASTER_ADDR": "job-node-0-0.job"}


def node_of(environment, **asked):
    return node_job(environment, EngineRequest(**asked)).node


def now():
    return Deadline(timedelta(0))


ALONE = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "0"}


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"PET_NNODES": "1"},
        {"SLURM_JOB_ID": "12", "SLURM_PROCID": "0"},  # a batch script
        {**STEP, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},
        # A shell, which has variables of a session that was left, and not all of a step.
        {**ALONE, "SLURM_NTASKS": "1"},
        {**ALONE, "SLURM_STEP_NUM_TASKS": "1"},
    ],
)
def test_a_process_that_has_nobody_to_wait_for(environment):
    assert node_job(environment, EngineRequest()) is None


def test_what_has_made_a_process_a_node_is_told_to_who_waits(monkeypatch):
    for name in (*elastic.VARIABLES, *slurm.VARIABLES):
        monkeypatch.delenv(name, raising=False)
    assert why_nodes(os.environ) == ""
    monkeypatch.setenv("SLURM_STEP_ID", "0")
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")
    assert "SLURM_STEP_ID=0, SLURM_STEP_NUM_TASKS=4. If another job has left" in why_nodes(
        os.environ
    )
    for name, value in KUBEFLOW.items():
        monkeypatch.setenv(name, value)
    assert why_nodes(os.environ).endswith("type: unset PET_NNODES PET_NODE_RANK PET_MASTER_ADDR")


def test_a_task_of_slurm():
    assert node_of(STEP) == Node(rank=1, size=3, host="n1", port=15_084)
    assert node_of({**STEP, "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "2900"}) == Node(
        rank=1, size=3, host="10.0.0.1", port=2900
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"SLURM_PROCID": "x"}, "SLURM_PROCID must be a number"),
        ({"SLURM_STEP_NODELIST": ""}, "SLURM_STEP_NODELIST is empty"),
        ({"MASTER_PORT": "70000"}, "MASTER_PORT must be the number of a port"),
        ({"SLURM_STEP_NODELIST": "n[1-"}, "is no list of hosts"),
        ({"SLURM_JOB_ID": ""}, r"SLURM_JOB_ID must be .*type: unset .*SLURM_STEP_ID"),
    ],
)
def test_variables_of_slurm_that_make_no_sense(change, words):
    with pytest.raises(ConfigError, match=words):
        node_job({**STEP, **change}, EngineRequest())


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("n1", ["n1"]),
        ("n[1-3]", ["n1", "n2", "n3"]),
        ("a[08-10,12],b", ["a08", "a09", "a10", "a12", "b"]),
        ("r[1-2]n[1-2].x", ["r1n1.x", "r1n2.x", "r2n1.x", "r2n2.x"]),
        ("", []),
    ],
)
def test_lists_of_hosts(text, hosts):
    assert list(expanded(text)) == hosts


@pytest.fixture
def tasks(tmp_path, monkeypatch):
    """Two tasks of a step, with a folder that both see."""
    for name in ("PIPEDREAM_RT_SECRET", "PIPEDREAM_RT_SECRET_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pipedream_rt.cluster.environment._taken", [])
    shared = {**STEP, "PIPEDREAM_RT_JOB_FOLDER": str(tmp_path / "shared")}
    return [node_job({**shared, "SLURM_PROCID": rank}, EngineRequest()) for rank in "01"]


def test_the_secret_of_a_step_is_a_file_of_the_user_alone(tasks, tmp_path):
    first, other = tasks
    with pytest.raises(ConfigError, match=r"task 0 has put no secret at .* in time"):
        other.secret(now())
    made = first.secret(now())
    assert other.secret(now()) == made
    assert first.secret(now()) == made  # in another life of task 0
    (place,) = (tmp_path / "shared").rglob("secret")
    assert place.parent.name == "slurm-big-one-12.0"
    assert stat.S_IMODE(os.stat(place).st_mode) == 0o600
    assert stat.S_IMODE(os.stat(place.parent).st_mode) == 0o700
    first.finish()
    assert list((tmp_path / "shared").iterdir()) == []


def made_by_another(place):
    os.chown(place, 1, 1)


def open_to_a_group(place):
    place.chmod(place.stat().st_mode | 0o040)


def reached_by_a_link(place):
    place.rename(place.with_name("elsewhere"))
    place.symlink_to("elsewhere")


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("what", ["secret", "slurm-big-one-12.0"])
@pytest.mark.parametrize(
    "change",
    [pytest.param(made_by_another, marks=pytest.mark.rights), open_to_a_group, reached_by_a_link],
)
def test_a_secret_that_another_may_have_made_or_read_is_refused(
    tasks, tmp_path, change, what, rank
):
    tasks[0].secret(now())
    (place,) = (tmp_path / "shared").rglob(what)
    change(place)
    try:
        with pytest.raises(ConfigError, match=f"the secret of the job .*{place}"):
            tasks[rank].secret(now())
    finally:  # a later run of the tests, without root's rights, removes the folder
        os.chown(place, os.getuid(), os.getgid())


def test_nothing_is_removed_through_a_link(tasks, tmp_path):
    (tmp_path / "home").mkdir(mode=0o700)
    (tmp_path / "home" / "secrets").touch()
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared" / "slurm-big-one-12.0").symlink_to(tmp_path / "home")
    tasks[0].finish()
    assert (tmp_path / "home" / "secrets").exists()


def test_a_folder_that_cannot_be_made(tasks, tmp_path):
    (tmp_path / "shared").write_text("a file")
    with pytest.raises(ConfigError, match="set PIPEDREAM_RT_JOB_FOLDER to a folder"):
        tasks[0].secret(now())
