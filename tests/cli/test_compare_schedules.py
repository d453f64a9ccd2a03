"""``run --compare-schedules``: what is said of two trials, and the trials themselves."""

import math
import os
import signal
import sys

import pytest

from pipedream_rt.cli import compare_schedules
from pipedream_rt.cli.compare_schedules import Trial, points_of, reached, told
from pipedream_rt.cluster.environment import PREPARE
from pipedream_rt.tracing.events import Stepped


def steps(losses, seconds=1.0, samples=8):
    return [
        Stepped(
            time=100.0 + seconds * number, step=number, loss=loss, rates=(0.1,), staleness=0,
            versions=(), busy_s=(), samples=samples, micro_batches=1,
        )
        for number, loss in enumerate(losses)
    ]  # fmt: skip


def falling(count, by=0.01):
    return [2.0 - by * number for number in range(count)]


def test_a_point_has_the_mean_of_the_last_tenth_of_losses():
    points = points_of(steps(falling(40)))
    assert [point.updates for point in points] == [*range(1, 41)]
    assert points[-1].samples == 320
    assert points[-1].seconds == 39.0
    assert points[-1].loss == pytest.approx(2.0 - 0.01 * 37.5)  # of the last four
    assert points[0].loss == 2.0
    assert reached(points, 1.9).loss <= 1.9
    assert reached(points, 0.0) is None


def trial(name, losses, **options):
    return Trial(name, 4, points_of(steps(losses, **options)))


def test_what_is_compared_is_the_lowest_loss_that_both_have_reached(golden):
    """The other falls half as far in all of its updates; its first losses have no mean of ten."""
    one, other = trial("1f1b", falling(100)), trial("async-1f1b", falling(100, 0.005), seconds=0.25)
    golden("schedules-compared", "\n".join(told(one, other)))


@pytest.mark.parametrize("losses", [[2.0] * 50, [2.0 + 0.01 * n for n in range(50)]])
def test_where_the_loss_does_not_fall_nothing_is_said_of_the_schedules(losses):
    last = told(trial("1f1b", losses), trial("async-1f1b", losses))[-1]
    assert last == "The loss falls too little in so few updates to compare the schedules."


def test_a_loss_that_is_not_finite_is_said_of_its_schedule():
    nan = [*falling(30), math.nan, *falling(19)]
    last = told(trial("1f1b", falling(50)), trial("async-1f1b", nan))[-1]
    assert last == "By async-1f1b a loss is not finite: it diverges at this rate."


@pytest.mark.parametrize("count", [1, 2, 4])
def test_of_very_few_updates_nothing_is_said(count):
    last = told(trial("1f1b", [2.0] * count), trial("async-1f1b", [2.0] * count))[-1]
    assert "falls too little" in last


SCRIPT = """
import sys
import torch
from torch import nn
from pipedream_rt import Pipeline, Observe
from pipedream_rt.dynamo import spare_dynamo

spare_dynamo()  # which takes longer to import than the training

def main(count, folder):
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)])
    data = [(x, 2 * x) for x in torch.randn(count, 16, 8)]
    with Pipeline(model, stages=2, workers="serial") as pipe:  # not the one that trains
        pipe.predict(data[0][0])
    with Pipeline(
        model, stages=2, loss_fn=nn.functional.mse_loss, workers="serial", checkpoint=folder,
        optimizer=(torch.optim.AdamW, {"lr": 0.01}), observe=Observe(report=folder + ".html"),
    ) as pipe:
        for number, item in enumerate(data):
            pipe.submit(*item)
            if number == 3:
                pipe.save()
            if number == 30:
                sys.exit(7)
        pipe.flush()

main(int(sys.argv[1]), sys.argv[2])
"""


@pytest.fixture
def run(tmp_path, forking, capfd):
    """Runs the command; returns its exit code and what it has printed."""
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)

    def run(count, updates=20):
        command = [sys.executable, str(path), str(count), str(tmp_path / "kept")]
        code = compare_schedules.compare(command, os.environ, updates)
        return code, *capfd.readouterr()

    return run


@pytest.mark.processes
@pytest.mark.parametrize("count", [1000, 12])
def test_a_script_is_run_by_both_schedules_until_it_has_made_enough_updates(run, count, tmp_path):
    """Or has ended, as it does by itself; nothing that it keeps is written."""
    code, output, errors = run(count)
    assert code == 0, errors
    assert "1f1b: loss  seconds" in output
    assert "async-1f1b: loss  seconds" in output
    assert output.splitlines()[8].split()[0] == str(min(count, 20))
    assert {path.name for path in tmp_path.iterdir()} == {"train.py"}


@pytest.mark.processes
def test_a_script_that_fails_ends_the_comparison_with_its_code(run):
    code, output, errors = run(1000, updates=500)
    assert (code, output) == (7, "")
    assert "500 updates by 1f1b:" in errors
    assert "async" not in errors


@pytest.mark.processes
def test_a_script_that_trains_nothing_is_told_what_it_must_do(run):
    code, _, errors = run(1)
    assert code == 1
    assert "the script has trained nothing by 1f1b: it must make a Pipeline" in errors


def test_the_command_compares_in_a_process_that_passes_sigterm_on(call, monkeypatch, tmp_path):
    (script := tmp_path / "train.py").touch()
    asked = []

    def compare(command, environment, updates):
        asked.append((command, environment[PREPARE], updates))
        with pytest.raises(SystemExit, match=str(128 + signal.SIGTERM)):
            signal.raise_signal(signal.SIGTERM)
        return 3

    monkeypatch.setattr(compare_schedules, "compare", compare)
    call("run", "--compare-schedules", "--updates", 7, script, "--lr", "1", code=3)
    assert asked == [([sys.executable, str(script), "--lr", "1"], "1", 7)]
