"""What is measured of links; over a shaped one it is known."""

import pytest

from pipedream_rt import ConfigError, measure_codec, measure_links
from pipedream_rt.codecs import BFloat16, Int8, Projection, TopK


@pytest.mark.processes
def test_links_between_processes_of_this_machine():
    found = measure_links("local", count=3, size=1 << 20, repeats=3)
    assert 0 <= found.latency < 0.5  # 0 where what else the machine does takes longer
    assert found.bandwidth > 1e6


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"count": 1}, "count must be at least 2, not 1"),
        ({"size": 10}, "size must be at least 65536, not 10"),
        ({"repeats": 0}, "repeats must be at least 1, not 0"),
        ({"workers": "serial"}, "no links between workers that are 'serial'"),
    ],
)
def test_what_cannot_be_measured_is_refused(options, words):
    with pytest.raises(ConfigError, match=words):
        measure_links(**options)


@pytest.mark.parametrize(
    ("codec", "ratio"),
    [(Int8(), (1 << 20) / (1 << 22)), (BFloat16(), 0.5), (TopK(0.25), 0.375)],
    ids=repr,
)
def test_what_a_codec_costs(codec, ratio):
    found = measure_codec(codec, shape=(256, 1024), repeats=2)
    assert found.ratio == pytest.approx(ratio, rel=0.01)
    assert 0 < found.seconds_per_byte < 1e-6


def test_a_codec_that_takes_nothing_has_no_costs():
    with pytest.raises(ConfigError, match=r"float32 value of shape \(4, 16\) as it is"):
        measure_codec(Projection(8, 2), shape=(4, 16))
    with pytest.raises(ConfigError, match="repeats must be at least 1, not 0"):
        measure_codec(Int8(), repeats=0)
