import json
import math

import pytest
from hypothesis import given
from support.costs import random_costs

from pipedream_rt.errors import ConfigError
from pipedream_rt.simulation.costs import Costs, costs_of, rate, seconds, size


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3ms", 0.003),
        ("1.5 s", 1.5),
        ("20us", 20e-6),
        ("7ns", 7e-9),
        ("2", 2.0),
        (0.25, 0.25),
        ("1e-3", 0.001),
    ],
)
def test_times(text, value):
    assert seconds(text) == pytest.approx(value)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2MB", 2e6), ("1KiB", 1024), ("5", 5), (7, 7), ("16 gB", 16e9), ("1TiB", 2**40),
        ("3 bytes", 3), ("2 megaB", None), ("16gb", None), ("2MB/s", None), ("2MBps", None),
    ],
)  # fmt: skip
def test_sizes(text, value):
    if value is not None:
        assert size(text) == value
        return
    with pytest.raises(ConfigError, match="is no size; expected a number and one of B, kB, MB"):
        size(text)


@pytest.mark.parametrize(
    ("value", "texts"),
    [
        (12.5e6, "100Mbit 100mbit/s 100Mbps 100mbps 100Mb/s 100MBIT/S 100Mb 1e2Mbit/sec"),
        (1.25e9, "10Gbit 10Gbit/s 10gbps 10Gb/s 10Gbits/s"),
        (1e9, "1GB/s 1GBps 1gBps 1GBPS 1GB 1000MB/s 1GB/sec 1Gbyte/s 8Gbit"),
        (2**30, "1GiB/s 1GiBps 1GIB/s 8Gibit/s 8Gib/s"),
        (1000, "8kbit 1kB/s 1KB/s 8kbps 1000 1000B/s 1000Bps 8000bps"),
        (1e12, "1TB/s 8Tbit"),
    ],
)
def test_rates_have_the_units_that_people_write(value, texts):
    """A single b is the one letter whose case matters."""
    for text in texts.split():
        assert rate(text) == value, text
        assert rate(text.replace("G", " G", 1)) == value, text


@pytest.mark.parametrize("text", ["1Gps", "10G", "1GB/m", "1B/", "1/s", "1xB/s", "1GBit/s/s"])
def test_a_rate_without_a_known_unit_is_refused_with_those_there_are(text):
    with pytest.raises(ConfigError, match=r"is no bandwidth; expected .*Gbit, Tbit, alone or as"):
        rate(text)


@pytest.mark.parametrize(
    "text", ["", "ms", "3ms/s", "3 parsecs", "--3", "1,5", None, "nan", "inf", True, [3]]
)
def test_what_is_no_quantity(text):
    with pytest.raises(ConfigError, match=r"is no (time|size|bandwidth)"):
        seconds(text)
    with pytest.raises(ConfigError):
        rate(text)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"forward": -1, "backward": 1}, "forward must be a number of at least 0, not -1"),
        ({"forward": 1, "backward": [1, [2, -3]]}, "backward must be a number of at least 0"),
        ({"forward": 1, "backward": 1, "latency": "-1ms"}, "latency must be"),
        ({"forward": 1, "backward": 1, "bandwidth": 0}, "bandwidth must be above 0"),
        ({"forward": 1, "backward": 1, "speed": [1, 0]}, "speed must be above 0"),
        ({"forward": 1, "backward": 1, "activation_bytes": "-2MB"}, "activation_bytes must be"),
        ({"forward": 1, "backward": 1, "latency": [1, 2]}, "latency is one value"),
        ({"forward": 1, "backward": 1, "fwd": 1}, "'fwd' is none of forward, backward"),
        ({"forward": 1e300, "backward": 1}, "mind the units"),
        ({"forward": 10**400, "backward": 1}, "is no time"),
        ({"forward": 1, "backward": 1, "speed": 1e-300}, "speed must be above 0"),
        ({"forward": [], "backward": 1}, "forward is missing"),
        ({"forward": [[]], "backward": 1}, "an entry without a value"),
        ({"forward": 1}, "backward is missing"),
        ({"forward": 1, "weight_gradient": 1}, "backward is missing"),
    ],
)
def test_what_makes_no_sense_is_refused(given, words):
    with pytest.raises(ConfigError, match=words):
        costs_of(given)


@given(random_costs())
def test_a_file_gives_the_same_costs(costs):
    import tempfile
    from pathlib import Path

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "costs.json"
        costs.save(path)
        assert Costs.load(path) == costs


def test_a_file_written_by_hand(tmp_path):
    path = tmp_path / "costs.json"
    path.write_text(json.dumps({"forward": ["10ms", ["20ms", "25ms"]], "backward": "30ms"}))
    costs = Costs.load(path)
    assert costs.forward == ((0.01,), (0.02, 0.025))
    assert costs.backward == ((0.03,),)
    assert math.isinf(costs.bandwidth)


@pytest.mark.parametrize("text", ["", "[]", "{", "3", "\xff", "[" * 100_000])
def test_a_file_that_is_none(tmp_path, text):
    path = tmp_path / "costs.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=r"costs\.json"):
        Costs.load(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        Costs.load(tmp_path / "none")


def test_one_entry_stands_for_all_stages():
    full = costs_of({"forward": "2ms", "backward": "4ms", "activation_bytes": 8}).for_stages(3, 3)
    assert full.forward == ((0.002,),) * 3
    assert full.input_gradient == full.weight_gradient == ((0.002,),) * 3
    assert full.gradient_bytes == (0.0, 8.0, 8.0)
    assert full.speed == (1.0,) * 3


def test_halves_make_a_whole():
    full = costs_of({"forward": 1, "input_gradient": 1, "weight_gradient": [2, 3]}).for_stages(2, 2)
    assert full.backward == ((3.0,), (4.0,))


def test_a_stage_cut_in_two_costs_the_same():
    full = costs_of({"forward": [1, 2], "backward": 4, "weight_bytes": 6, "activation_bytes": 3})
    cut = full.for_stages(2, 2).cut(2)
    assert cut.forward == ((0.5,), (0.5,), (1.0,), (1.0,))
    assert cut.weight_bytes == (3.0,) * 4
    assert cut.activation_bytes == (3.0,) * 4


def test_the_latency_of_each_hop():
    costs = Costs(forward=((1.0,),), backward=((1.0,),), hop_latency=(0.0, 0.5, 0.0))
    assert costs.for_stages(4, 4).hop_latency == (0.0, 0.5, 0.0)
    with pytest.raises(ConfigError, match="hop_latency has 3 entries, there are 2 hops"):
        costs.for_stages(3, 3)
    with pytest.raises(ConfigError, match="there are other hops when stages are cut"):
        costs.cut(2)
    one = Costs(forward=((1.0,),), backward=((1.0,),), hop_latency=(0.5,))
    assert one.for_stages(2, 2).cut(2).for_stages(4, 2).hop_latency == (0.5,) * 3
    with pytest.raises(ConfigError, match="hop_latency must be a number of at least 0"):
        Costs(forward=((1.0,),), backward=((1.0,),), hop_latency=(-1.0,))
    assert costs_of({"forward": 1, "backward": 1, "hop_latency": ["25ms", 0]}).hop_latency == (
        0.025,
        0.0,
    )


class Passes:
    passes = 5.0


def test_corrections_take_time_in_steps():
    costs = Costs(
        forward=((1.0,),),
        backward=((2.0,),),
        step=((0.5,), (0.25, 0.75)),
        weight_bytes=(100.0, 200.0),
    )
    found = costs.corrected([Passes(), Passes()], memory_bandwidth=1000.0)
    assert found.step == ((1.5,), (2.25, 2.75))
    assert found.forward == costs.forward
    assert costs.corrected([], memory_bandwidth=1.0) == costs


@pytest.mark.parametrize(
    ("weight_bytes", "bandwidth", "words"),
    [(1.0, 0.0, "memory_bandwidth must be above 0"), (0.0, 1.0, "weight_bytes, which are missing")],
)
def test_corrections_need_sizes_and_a_bandwidth(weight_bytes, bandwidth, words):
    costs = Costs(forward=((1.0,),), backward=((1.0,),), weight_bytes=(weight_bytes,))
    with pytest.raises(ConfigError, match=words):
        costs.corrected([Passes()], memory_bandwidth=bandwidth)
