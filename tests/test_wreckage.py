"""A test that fails leaves nothing in memory that makes the next one fail."""

import os
import sys
from pathlib import Path

import pytest
from support import forked
from support.deadlines import LATEST_S

pytestmark = pytest.mark.processes

TESTS = """
import gc, socket
from concurrent.futures import ThreadPoolExecutor
import pytest

@pytest.fixture
def thread():
    with ThreadPoolExecutor() as threads:
        yield threads.submit

@pytest.fixture
def breaks_first():
    mine = socket.socket()
    raise LookupError("first")

@pytest.fixture
def breaks_last():
    yield
    ring = [socket.socket()]
    ring.append(ring)
    raise LookupError("last")

def test_raises():
    near, far = socket.socketpair()
    raise LookupError("here")

def test_after_raising():
    gc.collect()

def test_raises_what_refers_to_itself():
    ring = [socket.socket()]
    ring.append(ring)
    try:
        raise LookupError("here")
    except LookupError as e:
        error = e
        raise

def test_after_a_ring():
    gc.collect()

def fails():
    mine = socket.socket()
    raise LookupError("there")

def test_has_a_thread_that_raises(thread):
    future = thread(fails)
    future.exception()
    raise LookupError("here")

def test_after_a_thread():
    gc.collect()

def test_cannot_begin(breaks_first):
    pass

def test_after_one_that_cannot_begin():
    gc.collect()

def test_cannot_end(breaks_last):
    pass

def test_after_one_that_cannot_end():
    gc.collect()

def test_warns_itself():
    socket.socket()
    gc.collect()
"""

RUNS = """
import sys, pytest
from support.wreckage import Wreckage
plugins = [Wreckage()] if sys.argv[1] == "with" else []
words = ["-p", "no:cacheprovider", "-q", "-W", "error", "-c", "pytest.ini", "test_it.py", "-rA"]
sys.exit(pytest.main(words, plugins))
"""


@pytest.fixture
def outcomes(tmp_path):
    """Runs the tests with the plugin, or without; returns those that fail, by name."""

    def run(how):
        (tmp_path / "test_it.py").write_text(TESTS)
        (tmp_path / "runs.py").write_text(RUNS)
        (tmp_path / "pytest.ini").write_text("[pytest]\n")
        done = forked.run(
            [sys.executable, "runs.py", how],
            cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(Path(__file__).parent)},
            capture_output=True, text=True, timeout=LATEST_S,
        )  # fmt: skip
        said = [line.split(" ") for line in done.stdout.splitlines() if "test_it.py::" in line]
        passed = {name.partition("::")[2] for word, name, *_ in said if word == "PASSED"}
        failed = {name.partition("::")[2] for word, name, *_ in said if word in ("FAILED", "ERROR")}
        assert len(passed | failed) == TESTS.count("\ndef test_"), done.stdout + done.stderr
        return failed

    return run


FAILING = {
    "test_raises",
    "test_raises_what_refers_to_itself",
    "test_has_a_thread_that_raises",
    "test_cannot_begin",
    "test_cannot_end",
    "test_warns_itself",
}


def test_those_fail_that_fail_by_themselves(outcomes):
    assert outcomes("with") == FAILING


def test_without_it_the_next_ones_fail(outcomes):
    assert outcomes("without") > FAILING
