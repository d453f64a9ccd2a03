"""Where the stages run is decided from ``workers`` and the environment, for each generation."""

import pytest
from support.clusters import spec

from pipedream_rt.cluster.elsewhere import Elsewhere
from pipedream_rt.cluster.generations import (
    Generations,
    cores_for,
    numbers_of_workers,
    starts_here,
    workers_of_run,
)
from pipedream_rt.errors import ConfigError, PipelineClosed
from pipedream_rt.job.process_assignment import ProcessAssignment

pytestmark = pytest.mark.usefixtures("three_cores")


def torchrun(monkeypatch, ranks, local):
    """Be rank 0 of torchrun."""
    for name, value in (("RANK", 0), ("WORLD_SIZE", ranks), ("LOCAL_WORLD_SIZE", local)):
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "localhost")


def test_nothing_starts_after_a_close():
    made = Generations(pytest.fail)
    made.close()
    made.close()
    with pytest.raises(PipelineClosed, match="the pipeline was closed"):
        made.start(spec(2))


def test_a_plan_that_needs_more_workers_than_run_may_start_is_refused(monkeypatch):
    monkeypatch.setenv("PIPEDREAM_RT_NPROC", "2")
    made = Generations(None)
    with pytest.raises(ConfigError, match=r"3 stages.*`pipedream-rt run` may start 2; raise --npr"):
        made.start(spec(3))
    made.close()


class Absent(Elsewhere):
    """Workers for which there is no room; it notes what is asked of it."""

    def __init__(self):
        self.asked = []

    def within(self, assignment, work):
        self.asked.append(assignment)
        raise ConfigError(f"{work}: there is no room")

    def listening(self):
        pytest.fail("too few workers, so nobody is to listen")


def test_too_few_workers_elsewhere_are_refused_before_anything_is_opened():
    absent = Absent()
    made = Generations(absent)
    few = ProcessAssignment(fewest=2, most=3)
    with pytest.raises(ConfigError, match="there is no room"):
        made.start(spec(3, few))
    assert absent.asked == [few]
    made.close()


@pytest.mark.parametrize("workers", [3, b"local", ["local"]], ids=repr)
def test_workers_that_make_no_sense_are_refused(workers):
    with pytest.raises(ConfigError, match=r'workers must be "local", "serial", .* not '):
        Generations(workers)


@pytest.mark.parametrize(
    ("workers", "here"),
    [("local", True), (None, True), ("serial", False), ("host:1", False), (print, False)],
)
def test_who_starts_worker_processes_on_this_machine(workers, here):
    assert starts_here(workers) == here
    assert cores_for(workers) == (3 if here else 0)


def test_what_has_started_the_script_decides_unless_workers_are_named(monkeypatch):
    torchrun(monkeypatch, 2, 2)
    assert not starts_here(None)
    assert starts_here("local")
    assert cores_for(None) == 3  # the ranks are on this machine too
    torchrun(monkeypatch, 4, 2)
    assert cores_for(None) == 0
    monkeypatch.delenv("RANK")
    monkeypatch.setenv("PIPEDREAM_RT_LISTEN_FD", "9")
    assert not starts_here(None)
    assert cores_for(None) == 0


def test_run_speaks_for_scripts_that_name_no_workers(monkeypatch):
    assert workers_of_run(None) == 0
    monkeypatch.setenv("PIPEDREAM_RT_NPROC", "5")
    assert workers_of_run(None) == 5
    assert workers_of_run("serial") == workers_of_run("local") == 0


def test_of_workers_elsewhere_a_plan_does_not_know_the_number():
    assert list(numbers_of_workers("host:1")) == []
    assert list(numbers_of_workers(None)) == [1, 2, 3]


def test_run_says_how_many_workers_there_are(monkeypatch):
    monkeypatch.setenv("PIPEDREAM_RT_NPROC", "7")
    assert list(numbers_of_workers(None)) == [1, 2, 3, 4, 5, 6, 7]  # on one machine
    monkeypatch.setenv("PIPEDREAM_RT_LISTEN_FD", "9")
    assert list(numbers_of_workers(None)) == [1, 2, 3, 4, 5, 6, 7]
    assert list(numbers_of_workers("local")) == [1, 2, 3]


@pytest.mark.parametrize(
    ("ranks", "local", "numbers"), [(2, 2, [1, 2]), (5, 5, [4, 5]), (4, 2, [])]
)
def test_torchrun_says_how_many_workers_there_must_be(monkeypatch, ranks, local, numbers):
    """Rank 0 starts one besides or none; of several machines the links are not known."""
    torchrun(monkeypatch, ranks, local)
    assert list(numbers_of_workers(None)) == numbers
    assert list(numbers_of_workers("serial")) == [1, 2, 3]
