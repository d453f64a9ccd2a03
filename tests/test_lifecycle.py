"""The life of what is opened once and closed once."""

import functools
import signal
import threading

import pytest
from support.deadlines import LATEST_S

from pipedream_rt.errors import PipelineClosed, PipelineError
from pipedream_rt.lifecycle import MOVES, Life, Lifecycle, is_of_a_handler

OPEN, CLOSING, CLOSED, FAILED = Life

PATHS = {OPEN: (), CLOSING: (CLOSING,), CLOSED: (CLOSING, CLOSED), FAILED: (FAILED,)}
"""How to get where."""

LEGAL = {(OPEN, CLOSING), (OPEN, FAILED), (CLOSING, CLOSED), (CLOSING, FAILED)}
"""The arrows of the picture in the module."""


class Ends:
    """Counts how often it was ended; has something done first."""

    def __init__(self, first=lambda: None):
        self.count = 0
        self.first = first

    def __call__(self):
        self.count += 1
        self.first()


@pytest.fixture
def ends():
    return Ends()


def at(state, end=lambda: None):
    life = Lifecycle("the pump", end)
    for step in PATHS[state]:
        life.move(step)
    assert life.state is state
    return life


@pytest.mark.parametrize("to", Life)
@pytest.mark.parametrize("state", Life)
def test_the_table_of_moves_is_all_there_is(state, to):
    """An illegal move raises and changes nothing."""
    life, reason = at(state), ValueError("burst")
    assert (to in MOVES[state]) is ((state, to) in LEGAL)
    if (state, to) in LEGAL:
        life.move(to, reason)
        assert (life.state, life.reason) == (to, reason)
        return
    with pytest.raises(PipelineError, match=rf"the pump .*\b{state.value}\b.*\b{to.value}\b"):
        life.move(to, reason)
    assert (life.state, life.reason) == (state, None)


@pytest.mark.parametrize(
    ("state", "is_open", "is_over"),
    [(OPEN, True, False), (CLOSING, False, False), (CLOSED, False, True), (FAILED, False, True)],
)
def test_what_is_open_and_what_is_over(state, is_open, is_over):
    life = at(state)
    assert (life.is_open, life.is_over) == (is_open, is_over)


@pytest.mark.parametrize("state", [OPEN, CLOSING])
def test_check_lets_be_used_what_has_not_ended(state):
    at(state).check()


def test_check_says_that_it_is_closed():
    with pytest.raises(PipelineClosed, match=r"the pump .*closed") as e:
        at(CLOSED).check()
    assert e.value.__cause__ is None


def test_check_says_why_it_has_failed():
    life, reason = at(OPEN), ValueError("burst")
    life.fail(reason)
    with pytest.raises(PipelineClosed, match=r"the pump .*failed.*burst") as e:
        life.check()
    assert e.value.__cause__ is reason


def test_only_the_first_begins_to_close(ends):
    """Closing takes nothing new and has ended nothing yet."""
    life = at(OPEN, ends)
    assert life.begin_closing()
    assert not life.begin_closing()
    assert (life.state, ends.count) == (CLOSING, 0)
    life.close()
    assert not life.begin_closing()
    assert (life.state, ends.count) == (CLOSED, 1)


def test_it_ends_once_however_often_it_is_closed(ends):
    life = at(OPEN, ends)
    for _ in range(3):
        life.close()
    life.fail(ValueError("too late"))
    assert (life.state, life.reason, ends.count) == (CLOSED, None, 1)


def test_the_first_reason_stays(ends):
    life, first = at(OPEN, ends), ValueError("first")
    life.fail(first)
    life.fail(ValueError("second"))
    life.close()
    assert (life.state, life.reason, ends.count) == (FAILED, first, 1)


def test_what_is_closing_can_fail(ends):
    life, reason = at(CLOSING, ends), ValueError("burst")
    life.fail(reason)
    life.close()
    assert (life.state, life.reason, ends.count) == (FAILED, reason, 1)


@pytest.mark.parametrize("again", [Lifecycle.close, lambda life: life.fail(ValueError("second"))])
def test_what_it_ends_may_close_it_again(again):
    """As a thread that is joined by the end, and reports its own end."""
    ends = Ends(lambda: again(life))
    life = at(OPEN, ends)
    life.close()
    assert (life.state, life.reason, ends.count) == (CLOSED, None, 1)


def test_a_signal_handler_may_close_what_is_just_being_closed(ends):
    """It runs on the thread that holds the lock."""
    life = at(OPEN, ends)
    with life._lock:
        life.close()
    assert (life.state, ends.count) == (CLOSED, 1)


def test_an_error_of_the_end_arrives_and_the_end_is_not_tried_again():
    ends = Ends(lambda: 1 / 0)
    life = at(OPEN, ends)
    with pytest.raises(ZeroDivisionError):
        life.close()
    life.close()
    assert (life.state, ends.count) == (CLOSED, 1)


@pytest.mark.threads
def test_two_threads_end_it_once():
    """One closes while the other is in the middle of the end; it need not wait for that."""
    inside, go_on = threading.Event(), threading.Event()

    def first():
        inside.set()
        assert go_on.wait(LATEST_S)

    ends = Ends(first)
    life = at(OPEN, ends)
    thread = threading.Thread(target=life.close)
    thread.start()
    assert inside.wait(LATEST_S)
    life.close()
    life.fail(ValueError("too late"))
    assert thread.is_alive()
    go_on.set()
    thread.join(LATEST_S)
    assert (life.state, life.reason, ends.count) == (CLOSED, None, 1)


def test_a_guard_leaves_alone_what_goes_well(ends):
    life = at(OPEN, ends)
    with life.guard("it pumped"):
        pass
    assert (life.state, ends.count) == (OPEN, 0)


def test_an_error_under_guard_ends_everything_and_is_the_reason(ends):
    life, error = at(OPEN, ends), KeyError("burst")
    with pytest.raises(KeyError) as e, life.guard("it pumped"):
        raise error
    assert e.value is error
    assert (life.state, life.reason, ends.count) == (FAILED, error, 1)


def test_a_guard_spares_an_error_that_has_left_nothing_undone(ends):
    life, undone = at(OPEN, ends), []
    with pytest.raises(KeyError), life.guard("it pumped", lambda: not undone):
        raise KeyError
    assert (life.state, ends.count) == (OPEN, 0)
    undone.append(True)
    with pytest.raises(KeyError), life.guard("it pumped", lambda: not undone):
        raise KeyError
    assert (life.state, ends.count) == (FAILED, 1)


@pytest.mark.parametrize("stop", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_ctrl_c_under_guard_closes_and_is_no_failure(ends, stop):
    life = at(OPEN, ends)
    with pytest.raises(stop), life.guard("it pumped", lambda: True):
        raise stop
    assert (life.state, life.reason, ends.count) == (CLOSED, None, 1)
    with pytest.raises(PipelineClosed) as e:
        life.check()
    assert str(e.value) == f"the pump is closed: {stop.__name__}, which came while it pumped"


def test_an_error_under_guard_after_the_end_changes_nothing(ends):
    life = at(OPEN, ends)
    life.close()
    with pytest.raises(KeyError), life.guard("it pumped"):
        raise KeyError
    assert (life.state, life.reason, ends.count) == (CLOSED, None, 1)
    with pytest.raises(PipelineClosed, match=r"the pump is closed$"):
        life.check()


class Mute(Exception):
    def __str__(self):
        raise RuntimeError


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (TimeoutError(), "TimeoutError, which came while it pumped"),
        (TimeoutError("late"), "TimeoutError: late, which came while it pumped"),
        (Mute(), "Mute, which came while it pumped"),
        (PipelineError("stage 1 has burst"), "stage 1 has burst"),
        (PipelineError(), "PipelineError, which came while it pumped"),
    ],
)
def test_the_reason_is_never_empty(error, words):
    life = at(OPEN)
    with pytest.raises(type(error)), life.guard("it pumped"):
        raise error
    with pytest.raises(PipelineClosed) as e:
        life.check()
    assert str(e.value) == f"the pump has failed: {words}"


def raise_in_time(*_):
    raise TimeoutError


class Handler:
    def __call__(self, *_):
        raise TimeoutError

    def method(self, *_):
        raise TimeoutError


@pytest.mark.parametrize(
    "handler",
    [raise_in_time, Handler(), Handler().method, functools.partial(raise_in_time, 1)],
    ids=["function", "object", "method", "partial"],
)
def test_what_a_signal_handler_raises_is_told_from_other_errors(handler):
    signal.signal(signal.SIGUSR1, handler)
    with pytest.raises(TimeoutError) as of_handler:
        signal.raise_signal(signal.SIGUSR1)
    assert is_of_a_handler(of_handler.value)
    with pytest.raises(ValueError, match="valid Signals") as other:
        signal.Signals(-1)  # through the class of an enum, as `signal.SIG_DFL` is one
    assert not is_of_a_handler(other.value)
