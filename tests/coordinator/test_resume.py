"""A script that dies goes on where it was: the same losses, the same weights."""

import os
import random
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from support import forked
from support.deadlines import LATEST_S

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("environment")]

SCRIPT = Path(__file__).parent.parent / "support" / "resumable.py"


def lines_until(command, stop_after, environment):
    """Run a script; kill it when it has printed so many lines of losses. None: let it end."""
    process = forked.Popen(
        list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=environment,
    )  # fmt: skip
    timer = threading.Timer(LATEST_S, process.kill)
    timer.start()
    lines = []
    try:
        for line in process.stdout:
            lines.append(line.split())
            if len(lines) == stop_after:
                process.send_signal(signal.SIGKILL)
                break
        lines += [line.split() for line in process.stdout if line.endswith("\n")]
        err = process.stderr.read()
        process.wait()
    finally:
        timer.cancel()
        timer.join()
        process.stdout.close()
        process.stderr.close()
    if stop_after is None:
        assert process.returncode == 0, err
    return lines


def run_to_the_end(folder, kills, seed, options=()):
    """Kill the script at random places, start it again each time; what it printed in all."""
    draw = random.Random(seed)
    command = [sys.executable, SCRIPT, folder, *options]
    environment = {**os.environ, "PIPEDREAM_RT_RESUME": "1"}
    seen, restarts = {}, 0
    for _ in range(kills):
        lines = lines_until(command, draw.randrange(1, 12), environment)
        restarts += 1
        note(lines, seen)
        if lines and lines[-1][0] == "digest":
            break
    note(lines_until(command, None, environment), seen)
    return seen, restarts


def note(lines, seen):
    """A loss that is seen again is the same; none is left out on the way."""
    steps = [int(line[1]) for line in lines if line[0] == "loss"]
    assert steps == list(range(steps[0], steps[0] + len(steps))) if steps else True
    for kind, *rest in lines:
        key, value = ((kind, int(rest[0])), rest[1:]) if kind == "loss" else (kind, rest)
        assert seen.setdefault(key, value) == value, key


def whole(folder, options=()):
    """What an undisturbed run prints."""
    seen = {}
    environment = {k: v for k, v in os.environ.items() if k != "PIPEDREAM_RT_RESUME"}
    note(lines_until([sys.executable, SCRIPT, folder, *options], None, environment), seen)
    return seen


@pytest.mark.thinned(2)
@pytest.mark.parametrize("options", [(), ("--every", 5, "--micro-batches", 2)])
def test_a_killed_script_goes_on(tmp_path, options):
    """And is killed once more: losses, its own random numbers, learning rates and weights."""
    expected = whole(tmp_path / "whole", options)
    assert len(expected) == 41
    found, _ = run_to_the_end(tmp_path / "killed", 2, 1, options)
    assert found == expected


@pytest.mark.stress
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("workers", ["serial", "local"])
def test_twenty_kills_of_the_coordinator(tmp_path, workers):
    options = ("--workers", workers, "--epochs", 20)
    expected = whole(tmp_path / "whole", options)
    found, restarts = run_to_the_end(tmp_path / "killed", 20, 2, options)
    print(f"{workers}: {restarts} kills")
    assert restarts == 20
    assert found == expected
