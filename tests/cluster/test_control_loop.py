import asyncio
import concurrent.futures
import contextlib
import signal
import subprocess
import sys
import threading
import time
from datetime import timedelta

import pytest
from support.callers import in_loop, until_main_thread_waits
from support.deadlines import LATEST_S

from pipedream_rt.cluster import control_loop
from pipedream_rt.deadline import Deadline
from pipedream_rt.errors import PipelineClosed
from pipedream_rt.lifecycle import Life

pytestmark = pytest.mark.threads


@pytest.fixture
def thread(loop):
    """Calls functions in threads, which end with the program where a function never returns."""
    threads = []

    def call(function, *arguments):
        result = concurrent.futures.Future()

        def run():
            try:
                result.set_result(function(*arguments))
            except BaseException as error:
                result.set_exception(error)

        threads.append(threading.Thread(target=run, daemon=True))
        threads[-1].start()
        return result

    yield call
    loop.close()  # else a test that fails before leaves them waiting for it
    for each in threads:
        each.join(LATEST_S)


class Waits:
    """A coroutine that waits for ever, and notes how it began and ended."""

    def __init__(self):
        self.began, self.ended = threading.Event(), threading.Event()

    async def run(self):
        self.began.set()
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            self.ended.set()


async def answer():
    return 7


async def fail():
    raise ZeroDivisionError("its own words")


def test_what_is_given_to_the_loop_runs_in_its_one_thread_in_order(loop):
    names = []

    async def so_far():
        return [*names, threading.current_thread().name]

    loop.call_soon(lambda: names.append(threading.current_thread().name))
    assert loop.run(so_far()) == ["control", "control"]
    assert threading.current_thread().name != "control"


def test_who_waits_until_something_holds_looks_again_at_each_change_and_at_nothing_else(loop):
    looks = []

    async def waits():
        changed, deadline = asyncio.Event(), Deadline(timedelta(seconds=LATEST_S))
        changed.set()  # before it waits
        waiting = asyncio.ensure_future(
            control_loop.until(changed, lambda: looks.append(None) or len(looks) > 2, deadline)
        )
        for expected in (1, 2):
            for _ in range(20):  # turns of the loop
                await asyncio.sleep(0)
            assert len(looks) == expected
            changed.set()
        await waiting

    loop.run(waits())
    assert len(looks) == 3


def test_an_error_comes_back_and_the_loop_runs_on(loop):
    """So does that of who waits for the loop in the loop."""
    with pytest.raises(ZeroDivisionError, match="its own words"):
        loop.run(fail())
    with pytest.raises(PipelineClosed, match="waits for itself"):
        in_loop(loop, lambda: loop.run(answer()))
    assert loop.run(answer()) == 7


def test_nothing_runs_after_the_end_which_several_threads_may_ask_for(loop, thread):
    for each in [thread(loop.close) for _ in range(4)]:
        each.result(LATEST_S)
    loop.close()
    loop.call_soon(pytest.fail)
    with pytest.raises(PipelineClosed, match="the control plane was closed"):
        loop.run(answer())
    assert not loop._thread.is_alive()
    assert loop._loop.is_closed()
    assert loop._life.state is Life.CLOSED


def test_the_loop_can_be_closed_from_within(loop):
    async def close():
        loop.close()
        await asyncio.get_running_loop().create_future()

    with pytest.raises(PipelineClosed):
        loop.run(close())
    loop._thread.join(LATEST_S)
    assert not loop._thread.is_alive()


def test_who_waits_while_the_loop_is_closed_hears_it(loop, thread):
    waits = Waits()
    waiting = thread(loop.run, waits.run())
    assert waits.began.wait(LATEST_S)
    loop.close()
    assert waits.ended.is_set()
    with pytest.raises(PipelineClosed):
        waiting.result(LATEST_S)


def test_who_waits_for_a_coroutine_that_does_not_end_at_once_hears_that_too(loop, thread):
    """It may have lost the word that it is to end, or does something in the end."""
    began = threading.Event()

    async def wait_twice():
        with contextlib.suppress(asyncio.CancelledError):
            began.set()
            await asyncio.get_running_loop().create_future()
        await asyncio.get_running_loop().create_future()

    waiting = thread(loop.run, wait_twice())
    assert began.wait(LATEST_S)
    loop.close()
    with pytest.raises(PipelineClosed):
        waiting.result(20)


@pytest.mark.parametrize("where", ["a signal handler", "another thread"])
def test_who_comes_while_the_loop_is_closed_hears_it(loop, thread, monkeypatch, where):
    """It is closed between the look at its state and the call; another thread may have to wait."""
    call, closing = asyncio.run_coroutine_threadsafe, []

    def call_late(coroutine, on):
        if not closing:
            closing.append(None)
            closing.append(loop.close() if where == "a signal handler" else thread(loop.close))
            if where == "another thread":
                concurrent.futures.wait(closing[1:], timeout=0.3)
        return call(coroutine, on)

    monkeypatch.setattr(control_loop.asyncio, "run_coroutine_threadsafe", call_late)
    with contextlib.suppress(PipelineClosed):
        assert thread(loop.run, answer()).result(20) == 7


@pytest.fixture
def interrupt():
    """Sends a signal to the main thread when an event is set and that thread waits.

    Not after the test, if that fails before: Ctrl-C would end all tests.
    """
    over, events, threads = threading.Event(), [], []

    def when(event, number=signal.SIGINT, then=lambda: None):
        def send():
            event.wait(LATEST_S)
            if not over.is_set():
                until_main_thread_waits()
            if not over.is_set():
                signal.pthread_kill(threading.main_thread().ident, number)
                then()

        events.append(event)
        threads.append(threading.Thread(target=send))
        threads[-1].start()

    yield when
    for each in (over, *events):
        each.set()
    for each in threads:
        each.join()


def test_ctrl_c_ends_the_coroutine_before_its_caller_goes_on(loop, interrupt):
    waits = Waits()
    interrupt(waits.began)
    with pytest.raises(KeyboardInterrupt):
        loop.run(waits.run())
    assert waits.ended.is_set()
    assert loop.run(answer()) == 7


def test_ctrl_c_before_the_coroutine_has_begun(loop, interrupt, monkeypatch):
    """The loop is busy. Nobody waits for the end of what will never begin."""
    monkeypatch.setattr(control_loop, "_LAST_S", 2 * LATEST_S)
    busy, free, waits = threading.Event(), threading.Event(), Waits()

    async def block():
        busy.set()
        free.wait(LATEST_S)

    def set_free():
        until_main_thread_waits()  # it has asked for the end
        free.set()

    blocking = asyncio.run_coroutine_threadsafe(block(), loop._loop)
    interrupt(busy, then=set_free)
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        loop.run(waits.run())
    assert time.monotonic() - start < LATEST_S
    blocking.result(LATEST_S)
    assert waits.began.is_set() == waits.ended.is_set()


@pytest.mark.parametrize("closes", [False, True], ids=["runs a coroutine", "closes"])
def test_a_signal_handler_may_use_the_loop_while_its_thread_waits(loop, interrupt, closes):
    waits, found = Waits(), []

    def handle(*_):
        if closes:
            loop.close()
        else:
            found.append(loop.run(answer()))
            raise KeyboardInterrupt

    signal.signal(signal.SIGUSR1, handle)
    interrupt(waits.began, signal.SIGUSR1)
    with pytest.raises(PipelineClosed if closes else KeyboardInterrupt):
        loop.run(waits.run())
    assert found == [7] * (not closes)
    assert waits.ended.is_set()


def test_threads_of_the_loop_end_with_it(loop):
    """The function of a thread has ended, and the thread waits for another one."""

    async def name_of_thread():
        running = asyncio.get_running_loop()
        return await running.run_in_executor(None, threading.current_thread)

    thread = loop.run(name_of_thread())
    loop.close()
    assert not thread.is_alive()


FORGETFUL = """
from pipedream_rt.cluster.control_loop import ControlLoop
kept = ControlLoop()
"""


@pytest.mark.processes
def test_a_program_that_forgets_to_close_it_ends():
    subprocess.run([sys.executable, "-c", FORGETFUL], check=True, timeout=LATEST_S)
