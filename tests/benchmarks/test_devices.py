"""What the benchmark of an accelerator makes of what it has measured."""

import json

import pytest

from benchmarks import devices


@pytest.fixture(autouse=True)
def on_the_host(monkeypatch):
    monkeypatch.setenv("BENCHMARK_DEVICE", "cpu")


def test_a_mini_batch_grows_until_a_plain_loop_gains_little_by_it():
    size, asked = devices.Size("gpt2"), iter([100.0, 150.0, 155.0, 200.0])
    told = list(devices.filled(size, lambda: next(asked)))
    assert [list(each) for each in told] == [
        [f"plain, {n} samples of a micro-batch"] for n in (4, 8, 16)
    ]
    assert size.samples == 128


def test_a_mini_batch_does_not_grow_without_end():
    size, asked = devices.Size("tiny"), iter(range(1, 9))
    assert len(list(devices.filled(size, lambda: 2.0 ** next(asked)))) == 2
    assert size.samples == size.samples_at_most


def test_a_loop_is_measured_from_one_wait_to_another():
    told = []
    size = devices.Size("tiny")
    devices.measured(size, lambda n: told.append(n), lambda: told.append("end"))
    assert told == [0, 1, 2, "end", 0, 1, 2, 3, "end"]


def test_a_plain_loop_has_the_same_bits_on_either_thread():
    size = devices.Size("tiny")
    size.count = 1
    net = devices.model(size)
    digests = {devices.plainly(size, net, one_thread=alone)[1] for alone in (False, True)}
    assert len(digests) == 1


def test_tests_that_still_run_are_told_and_a_half_written_line_is_not(tmp_path):
    results = tmp_path / "lines"
    assert devices.of_tests(results)["not ended"] == 0
    lines = [
        {"test": "a"}, {"test": "a", "outcome": "passed"}, {"test": "b"},
        {"test": "c", "outcome": "skipped", "reason": "why"},
    ]  # fmt: skip
    results.write_text("\n".join(map(json.dumps, lines)) + '\n{"test": "d", "outc')
    told = devices.of_tests(results)
    assert (told["passed"], told["names of those not ended"]) == (1, ["b"])
    assert told["reasons of the skipped"] == {"why": 1}
