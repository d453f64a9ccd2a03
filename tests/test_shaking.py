"""`--shake` slows threads down, alike for one seed, and changes nothing else of them."""

import queue
import sys
import threading
from contextlib import contextmanager

import pytest
from support.deadlines import LATEST_S
from support.shaking import START_S, Shaking

pytestmark = pytest.mark.threads


@contextmanager
def shaken(seed, test="a test"):
    """The pauses of each thread by its name, once they have been drawn for a test."""
    pauses = {}

    def note(seconds):
        pauses.setdefault(threading.current_thread().name, []).append(seconds)

    shaking = Shaking(seed, note)
    shaking.install()
    try:
        shaking.begin(test)
        yield pauses
    finally:
        shaking.remove()


def hand_over():
    """Let two threads hand something to one another, one of them started by the other."""
    there, back = queue.Queue(), queue.SimpleQueue()

    def outer():
        inner = threading.Thread(target=lambda: back.put(there.get()), name="inner")
        inner.start()
        for _ in range(100):
            there.put("it")
        inner.join()

    thread = threading.Thread(target=outer, name="outer")
    thread.start()
    thread.join(LATEST_S)
    return back.get()


def test_one_seed_draws_the_same_pauses_for_each_thread():
    runs = []
    for seed, test in ((1, "a"), (1, "a"), (2, "a"), (1, "b")):
        with shaken(seed, test) as pauses:
            assert hand_over() == "it"
            runs.append((pauses["outer"], pauses["inner"]))
    assert runs[0] == runs[1]
    assert runs[0][0] not in runs[0][1:]
    assert runs[0] not in runs[2:]


def test_a_thread_pauses_before_its_target_and_whoever_starts_it_afterwards():
    with shaken(1) as pauses:
        seen = []
        me = threading.current_thread().name
        thread = threading.Thread(target=lambda: seen.append(len(pauses["new"])), name="new")
        before = len(pauses.get(me, ()))
        thread.start()
        assert len(pauses[me]) > before
        thread.join(LATEST_S)
        assert seen[0] >= 1
        assert 0 <= pauses["new"][-1] <= START_S
        assert "run" not in vars(thread)


def test_a_thread_that_cannot_start_is_as_it_was():
    thread = threading.Thread(target=int)
    thread.start()
    thread.join(LATEST_S)
    with shaken(1):
        with pytest.raises(RuntimeError, match="only be started once"):
            thread.start()
        assert "run" not in vars(thread)


def test_afterwards_nothing_is_slowed_down():
    before = sys.getswitchinterval(), queue.SimpleQueue, threading.Thread.start
    with shaken(1) as pauses:
        assert sys.getswitchinterval() != before[0]
    assert (sys.getswitchinterval(), queue.SimpleQueue, threading.Thread.start) == before
    pauses.clear()
    assert hand_over() == "it"
    assert pauses == {}


def test_other_tests_draw_other_pauses():
    intervals = set()
    for test in "abc":
        with shaken(1, test):
            intervals.add(sys.getswitchinterval())
    assert len(intervals) == 3
