"""The command ``simulate``, as a user types it. It starts no process."""

import json

import pytest


def test_simulate_tells_and_draws(call, golden):
    words = ("--stages", 2, "--updates", 3, "--forward", "10ms,20ms")
    golden("simulated", call("simulate", *words))


def test_compare_puts_all_on_the_same_workers(call, golden):
    """And what does not fit is said beside the others."""
    names = "async-1f1b,1f1b,gpipe,zero-bubble,interleaved-1f1b,2bw,async-1f1b+vertical-sync"
    words = ("simulate", "--stages", 4, "--micro-batches")
    golden("compared", call(*words, 8, "--compare", names))
    golden("compared-with-one-that-does-not-fit", call(*words, 2, "--compare", "1f1b,2bw"))


def test_costs_from_a_file_and_from_a_trace(call, tmp_path, trace):
    costs = tmp_path / "costs.json"
    call("timeline", trace, "--save-costs", costs)
    assert json.loads(costs.read_text())["latency"] == pytest.approx(0.001)
    options = ("--schedule", "1f1b", "--stages", 4, "--micro-batches", 8)
    found = call("simulate", "--costs", costs, *options)
    assert found.splitlines()[0] == call("simulate", *options, "--latency", "1ms").splitlines()[0]
    assert call("simulate", "--from-trace", trace, "--schedule", "1f1b") == found
    slower = call("simulate", "--costs", costs, *options, "--latency", "9ms")
    assert slower != found
    replayed = call("simulate", "--from-trace", trace, "--replay")
    assert replayed.startswith("simulated: replay of 1f1b, 4 stages")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("simulate", "--forward", "-1ms"), "forward must be a number of at least 0"),
        (("simulate", "--forward", "fast"), "'fast' is no time"),
        (("simulate", "--bandwidth", "0"), "bandwidth must be above 0"),
        (("simulate", "--forward", "1ms,2ms,3ms"), "forward has 3 entries, there are 4 stages"),
        (("simulate", "--latency", "1ms,2ms"), "latency is one value"),
        (("simulate", "--schedule", "2bw", "--micro-batches", 2), "2bw needs"),
        (("simulate", "--schedule", "interleaved-1f1b", "--stages", 5), "cannot be dealt"),
        (("simulate", "--replay"), "--replay needs --from-trace"),
        (
            ("simulate", "--hop-latency", "0,1ms"),
            "costs: hop_latency has 2 entries, there are 3 hops",
        ),
        (("simulate", "--compare", "1f1b,zigzag"), "unknown schedule"),
        (("simulate", "--costs", "none.json"), "cannot be read"),
        (("simulate", "--from-trace", "none.trace"), "No such file"),
        (("simulate", "--output", "none/run.trace"), "cannot be written"),
    ],
)
def test_wrong_words(call, words, message):
    assert message in call(*words, code=1)


def test_costs_come_from_one_place(call, tmp_path, trace):
    output = call("simulate", "--costs", trace, "--from-trace", trace, code=1)
    assert "not from both" in output
    assert "costs cannot be read" in call("simulate", "--costs", trace, code=1)
    (tmp_path / "costs.json").write_text("{}")
    output = call("simulate", "--costs", tmp_path / "costs.json", code=1)
    assert "there is no 'forward'" in output


def rate_of(output):
    """Micro-batches per second in the first line of a summary."""
    return float(output.split("steady state ")[1].split()[0])


def test_slack_hides_the_latency_of_a_hop(call):
    """The period of two neighbours is at least (2 P + 2 hops) / (2 + e), P being 30 ms."""
    options = ("--stages", 4, "--updates", 100, "--hop-latency", "0,25ms,0")
    without = rate_of(call("simulate", *options))
    assert without == pytest.approx(2 / (2 * 0.030 + 2 * 0.025), rel=0.02)
    one = rate_of(call("simulate", *options, "--slack", "0,1,0"))
    assert one == pytest.approx(3 / (2 * 0.030 + 2 * 0.025), rel=0.02)
    assert rate_of(call("simulate", *options, "--slack", "0,2,0")) == pytest.approx(1 / 0.030, 0.01)


def test_a_trace_keeps_its_slack(call, tmp_path):
    path = tmp_path / "slack.trace"
    call("simulate", "--stages", 3, "--slack", "0,2", "--output", path)
    assert rate_of(call("simulate", "--from-trace", path)) > 0
    again = call("simulate", "--from-trace", path, "--replay")
    table = [line for line in again.splitlines() if line.startswith("0 ")]
    assert table[0].split()[-2] == "5"  # in flight on the first stage: w(0) + 1
    assert "if slack=0:0" in call("timeline", path, "--what-if", "slack=0:0")
