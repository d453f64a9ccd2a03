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


def torchrun(ranks, local):
    """What the environment of rank 0 says."""
    counts = {"RANK": "0", "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(local)}
    return {"MASTER_ADDR": "localhost", **counts}


NODES, RUN = {"PIPEDREAM_RT_LISTEN_FD": "9"}, {"PIPEDREAM_RT_NPROC": "7"}


@pytest.mark.parametrize(("environment", "workers", "here", "cores", "of_run", "numbers"), [
    ({}, "local", True, 3, 0, [1, 2, 3]),
    ({}, None, True, 3, 0, [1, 2, 3]),
    ({}, "serial", False, 0, 0, [1, 2, 3]),
    ({}, "host:1", False, 0, 0, []),
    ({}, print, False, 0, 0, []),
    (torchrun(2, 2), "local", True, 3, 0, [1, 2, 3]),
    (torchrun(2, 2), "serial", False, 0, 0, [1, 2, 3]),
    (torchrun(2, 2), None, False, 3, 0, [1, 2]),  # rank 0 starts one besides, or none
    (torchrun(5, 5), None, False, 3, 0, [4, 5]),
    (torchrun(4, 2), None, False, 0, 0, []),  # of several machines the links are not known
    (NODES, None, False, 0, 0, []),
    (RUN, None, True, 3, 7, [1, 2, 3, 4, 5, 6, 7]),
    (RUN, "serial", False, 0, 0, [1, 2, 3]),
    (RUN | NODES, None, False, 0, 7, [1, 2, 3, 4, 5, 6, 7]),
    (RUN | NODES, "local", True, 3, 0, [1, 2, 3]),
])  # fmt: skip
def test_what_has_started_the_script_decides_unless_workers_are_named(
    monkeypatch, environment, workers, here, cores, of_run, numbers
):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert (starts_here(workers), cores_for(workers)) == (here, cores)
    assert workers_of_run(workers) == of_run
    assert list(numbers_of_workers(workers)) == numbers
