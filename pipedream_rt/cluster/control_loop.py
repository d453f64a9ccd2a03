"""The event loop of the control plane, in a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import CancelledError, TimeoutError, wait
from contextlib import suppress
from typing import Any, TypeVar

from pipedream_rt.deadline import Deadline
from pipedream_rt.errors import PipelineClosed
from pipedream_rt.lifecycle import Lifecycle, name_this_thread

T = TypeVar("T")

_TURN_S = 1.0
"""Seconds after which a thread that waits for the loop notices a signal, whatever comes."""

_LAST_S = 5.0
"""Seconds for what runs in the loop to end."""


async def within(awaited: Awaitable[T], seconds: float | None) -> T:
    """Wait for something at most so long, else raise `asyncio.TimeoutError`."""
    # Not `asyncio.wait_for`, which up to Python 3.11 loses a `cancel` that comes in the same turn.
    task = asyncio.ensure_future(awaited)
    try:
        await asyncio.wait([task], timeout=seconds)
        if not task.done():
            raise asyncio.TimeoutError
        return task.result()
    finally:
        task.cancel()


async def until(changed: asyncio.Event, enough: Callable[[], bool], deadline: Deadline) -> None:
    """Wait until ``enough`` holds or the time is over; each change is a reason to look again."""
    while not enough() and not deadline.expired():
        changed.clear()
        with suppress(asyncio.TimeoutError):
            await within(changed.wait(), deadline.remaining_s())


class ControlLoop:
    """An event loop in a thread of its own. Other threads run coroutines in it, and wait."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._life = Lifecycle("the control plane")
        # A daemon: at exit Python joins other threads before it runs what closes a pipeline that
        # its user forgot to close.
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        name_this_thread("control")
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        self._loop.close()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the loop, and return its result; end it if Ctrl-C ends the wait."""
        closed = PipelineClosed("the control plane was closed, or waits for itself")
        if not self._life.is_open or threading.current_thread() is self._thread:
            coroutine.close()
            raise closed
        ended = threading.Event()

        async def whole() -> T:
            try:
                return await coroutine
            finally:
                ended.set()

        begins = whole()
        try:
            future = asyncio.run_coroutine_threadsafe(begins, self._loop)
        except RuntimeError as error:  # the loop was closed a moment ago
            begins.close()
            coroutine.close()
            raise closed from error
        try:
            # No deadline, as the coroutine has its own; but in turns, since Python may notice a
            # signal that comes while this thread goes to sleep only when it wakes.
            while self._thread.is_alive() and not wait([future], timeout=_TURN_S).done:
                pass
            return future.result(0)
        except (CancelledError, TimeoutError) as error:
            if future.done() and not future.cancelled():
                raise  # the coroutine's own
            raise closed from error
        except BaseException:
            if future.cancel():
                ended.wait(_LAST_S)
            raise

    def call_soon(self, function: Callable[[], object]) -> None:
        """Have the loop call a function, unless it was closed. From any thread; never blocks."""
        with suppress(RuntimeError):  # it was closed
            self._loop.call_soon_threadsafe(function)

    def close(self) -> None:
        """End the loop and its thread, and what still runs in it. Idempotent."""
        if not self._life.begin_closing():
            return
        asyncio.run_coroutine_threadsafe(self._end(), self._loop)
        if threading.current_thread() is not self._thread:
            self._thread.join(_LAST_S)
        self._life.close()

    async def _end(self) -> None:
        here, deadline = asyncio.current_task(), self._loop.time() + _LAST_S
        while (tasks := asyncio.all_tasks() - {here}) and self._loop.time() < deadline:
            for task in tasks:  # again and again: one may lose a `cancel`
                task.cancel()
            await asyncio.wait(tasks, timeout=_LAST_S / 5)
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._loop.shutdown_default_executor(), _LAST_S)
        self._loop.stop()
