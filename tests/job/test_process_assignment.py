"""Which process does the work of which workers of a plan."""

from datetime import timedelta

import pytest

from pipedream_rt.errors import ConfigError
from pipedream_rt.job.process_assignment import assignment_for, workers_by_process


@pytest.mark.parametrize("workers", range(1, 9))
def test_every_worker_of_the_plan_has_one_process_and_neighbours_share_one(workers):
    for processes in range(1, workers + 1):
        seats = workers_by_process(workers, processes)
        assert [worker for each in seats for worker in each] == list(range(workers))
        assert len(seats) == processes
        counts = list(map(len, seats))
        assert counts == sorted(counts, reverse=True)
        assert counts[0] - counts[-1] <= 1


def test_a_crew_is_one_process_for_each_worker_unless_it_is_elastic():
    assignment = assignment_for(3, None, timedelta())
    assert (assignment.fewest, assignment.most, assignment.stays_open) == (3, 3, False)
    assignment = assignment_for(4, (2, 3), timedelta(seconds=1))
    assert (assignment.fewest, assignment.most, assignment.stays_open) == (2, 3, True)
    assert assignment.within(2).most == 2
    assert assignment.within(1).most == 2  # fewer are not enough
    assert assignment.within(9).most == 3
    with pytest.raises(ConfigError, match="work for 4 worker processes at most"):
        assignment_for(4, (2, 5), timedelta())
