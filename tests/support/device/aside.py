"""Tests that are marked ``standin`` run in a process whose accelerator is the stand-in.

The first of them starts it, and it runs all those that the session has chosen of the same file: one
import of torch for all. What it says of each is then what the session reports.
"""

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from support.deadlines import LATEST_S
from support.device import standin

LOG = "STANDIN_TEST_LOG"
"""The variable with the file in which the process aside writes what has happened."""


@dataclass
class Told:
    """What the process aside has said of the tests of a file."""

    outcomes: dict[str, tuple[str, str]] = field(default_factory=dict)
    running: str = ""
    output: str = ""


KEY = pytest.StashKey[dict[Path, Told]]()


def is_aside() -> bool:
    """Say whether this process has the stand-in."""
    return hasattr(torch, standin.NAME)


def build() -> None:
    """Build the stand-in in another process: it must not be loaded in this one."""
    if not standin.library().exists():
        command = [sys.executable, standin.__file__]
        done = subprocess.run(command, capture_output=True, text=True, timeout=2 * LATEST_S)
        assert done.returncode == 0, done.stdout + done.stderr


def report(item: pytest.Function) -> None:
    """Pass, fail or skip as the test did in the process aside."""
    if reason := standin.why_not():
        pytest.skip(reason)
    told = item.session.stash.setdefault(KEY, {})
    if item.path not in told:
        told[item.path] = _run(item)
    outcome, text = told[item.path].outcomes.get(item.nodeid, ("gone", ""))
    if outcome == "skipped":
        pytest.skip(text)
    if outcome == "gone":
        last = told[item.path].running
        pytest.fail(f"the process ended in {last}\n{told[item.path].output}", pytrace=False)
    if outcome != "passed":
        pytest.fail(text, pytrace=False)


def note(record: dict[str, str]) -> None:
    """Write what happens in the process aside, so that it is known if the next test ends it."""
    if path := os.environ.get(LOG):
        with Path(path).open("a") as log:
            log.write(json.dumps(record) + "\n")


def _run(item: pytest.Function) -> Told:
    build()
    marked = [
        each.nodeid
        for each in item.session.items
        if each.path == item.path and each.get_closest_marker("standin")
    ]
    folder = item.config._tmp_path_factory.mktemp("aside")
    log = folder / "log"
    log.touch()
    (folder / "ids").write_text("\n".join(marked))
    is_long = any(each.get_closest_marker("stress") for each in item.session.items)
    limit_s = 3600 if is_long else LATEST_S
    # The session has chosen them, by `-m` perhaps.
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", "-m", ""]
    told = Told()
    try:
        done = subprocess.run(
            [*command, "--timeout", str(limit_s), f"@{folder / 'ids'}"],
            cwd=item.config.rootpath,
            env={**standin.environment(), LOG: str(log)},
            capture_output=True,
            text=True,
            timeout=2 * limit_s,
        )
        told.output = (done.stdout + done.stderr)[-5000:]
    except subprocess.TimeoutExpired:
        told.output = f"it was ended after {2 * limit_s} s"
    for line in log.read_text().splitlines():
        record = json.loads(line)
        told.running = record["test"]
        if "outcome" in record:
            before = told.outcomes.get(record["test"], ("passed", ""))
            if before[0] == "passed":
                told.outcomes[record["test"]] = (record["outcome"], record["text"])
    return told
