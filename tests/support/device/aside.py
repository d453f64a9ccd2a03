"""Tests that are marked ``standin`` run in a process whose accelerator is the stand-in.

The first of them starts it, and it runs all those that the session has chosen of the same file: one
import of torch for all. What it says of each is then what the session reports.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from support.deadlines import LATEST_S
from support.device import standin
from support.two_hosts import Child

LOG = "STANDIN_TEST_LOG"
"""The variable with the file to which the process aside writes what has happened."""

_MARK = "aside: "
"""With what its lines begin, which come between those of pytest."""


class Aside:
    """The process aside of a file, which runs the tests of the session in their order."""

    def __init__(self, first: pytest.Item) -> None:
        build()
        items = [each for each in first.session.items if is_for_aside(each)]
        chosen = first.config._tmp_path_factory.mktemp("aside") / "ids"
        chosen.write_text("\n".join(each.nodeid for each in items if each.path == first.path))
        is_long = any(each.get_closest_marker("stress") for each in items)
        self._limit_s = 2000 if is_long else 2 * LATEST_S  # of one test; this process waits longer
        # pytest catches what is written to the descriptors 1 and 2. The session has chosen the
        # tests, by `-m` perhaps.
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", "-m", ""]
        at_root = ["sh", "-c", 'cd "$0" && exec "$@" 9>&1', str(first.config.rootpath)]
        self._child = Child(
            [*at_root, *command, f"--timeout={self._limit_s}", f"@{chosen}"],
            {**standin.environment(), LOG: "/dev/fd/9"},
        )
        first.config.add_cleanup(self._child.close)
        self._said: list[dict[str, Any]] = []  # of its tests, until now

    def outcome_of(self, test: str) -> tuple[str, str]:
        """Wait until a test has ended there; return its outcome, and what is to be said of it."""
        while {"test": test, "over": True} not in self._said:
            try:
                line = self._child.wait_for(_MARK, 1.5 * self._limit_s)
                self._said.append(json.loads(line.removeprefix(_MARK)))
            except (AssertionError, ValueError):  # it has ended, perhaps in a word; or hangs
                self._child.close()
                last = self._said[-1]["test"] if self._said else "its start"
                said = "\n".join(line for line in self._child.lines if not line.startswith(_MARK))
                return "gone", f"the process ended in {last}\n{said[-5000:]}"
        for each in self._said:
            if each["test"] == test and each.get("outcome", "passed") != "passed":
                return each["outcome"], each["text"]
        return "passed", ""


KEY = pytest.StashKey[dict[Path, Aside]]()


def is_aside() -> bool:
    """Say whether this process has the stand-in."""
    return hasattr(torch, standin.NAME)


def is_for_aside(item: pytest.Item) -> bool:
    """Say whether another process than this one runs a test."""
    return not is_aside() and item.get_closest_marker("standin") is not None


def build() -> None:
    """Build the stand-in in another process: it must not be loaded in this one."""
    if not standin.library().exists():
        command = [sys.executable, standin.__file__]
        done = subprocess.run(command, capture_output=True, text=True, timeout=2 * LATEST_S)
        assert done.returncode == 0, done.stdout + done.stderr


def start(item: pytest.Item) -> None:
    """Have the process aside for the file of a test, or skip the test."""
    if reason := standin.why_not():
        pytest.skip(reason)
    running = item.session.stash.setdefault(KEY, {})
    if item.path not in running:
        running[item.path] = Aside(item)


def report(item: pytest.Item) -> None:
    """Pass, fail or skip as the test does in the process aside."""
    outcome, text = item.session.stash[KEY][item.path].outcome_of(item.nodeid)
    if outcome == "skipped":
        pytest.skip(text)
    if outcome != "passed":
        pytest.fail(text, pytrace=False)


def note(**record: str | bool) -> None:
    """Write what happens in the process aside, so that it is known if the next test ends it."""
    if path := os.environ.get(LOG):
        with Path(path).open("a") as log:  # behind a dot of pytest's
            log.write(f"\n{_MARK}{json.dumps(record)}\n")
