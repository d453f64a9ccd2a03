"""What is measured of links; over a shaped one it is known."""

import pytest

from pipedream_rt import ConfigError, measure_links


@pytest.mark.processes
def test_links_between_processes_of_this_machine():
    found = measure_links("local", count=3, size=1 << 20, repeats=3)
    assert 0 <= found.latency < 0.5  # 0 where what else the machine does takes longer
    assert found.bandwidth > 1e6


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"count": 1}, "2 workers"),
        ({"size": 10}, "64 KiB"),
        ({"repeats": 0}, "1 repeat"),
        ({"workers": "serial"}, "no links between workers that are 'serial'"),
        ({"workers": "serial"}, "no links"),
    ],
)
def test_what_cannot_be_measured_is_refused(options, words):
    with pytest.raises(ConfigError, match=words):
        measure_links(**options)
