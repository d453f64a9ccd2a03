import math

import pytest

from pipedream_rt.errors import ConfigError
from pipedream_rt.planning.machines import LinkCodec, Machines, Worker


def test_the_slowest_link_among_workers_counts():
    workers = tuple(Worker(server=server) for server in (0, 0, 1))
    machines = Machines(
        workers=workers, bandwidth=10.0, bandwidth_within=100.0, latency=2.0, latency_within=1.0
    )
    assert (machines.bandwidth_of([0, 1]), machines.latency_of([0, 1])) == (100.0, 1.0)
    assert (machines.bandwidth_of([1, 2]), machines.latency_of([1, 2])) == (10.0, 2.0)
    assert (len(machines), machines.are_alike) == (3, False)
    assert Machines(workers=(Worker(),) * 2).are_alike


@pytest.mark.parametrize("speed", [0, -1.0, math.inf, math.nan])
def test_a_speed_is_above_zero(speed):
    with pytest.raises(ConfigError, match="the speed of a worker must be above 0"):
        Worker(speed=speed)


def test_other_numbers_out_of_range_are_refused():
    with pytest.raises(ConfigError, match="memory of a worker must be above 0, not 0"):
        Worker(memory=0)
    with pytest.raises(ConfigError, match="from 1 to 64 workers, not 0"):
        Machines(workers=())
    with pytest.raises(ConfigError, match="bandwidth must be above 0, not 0"):
        Machines(workers=(Worker(),), bandwidth=0)
    with pytest.raises(ConfigError, match="latency must be at least 0, not -1"):
        Machines(workers=(Worker(),), latency=-1)


@pytest.mark.parametrize(
    "options", [{"ratio": 0}, {"ratio": 1.1}, {"ratio": 1, "seconds_per_byte": -1}]
)
def test_a_codec_that_makes_no_sense_is_refused(options):
    with pytest.raises(ConfigError, match="codec"):
        LinkCodec(**options)
