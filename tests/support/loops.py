"""An event loop for one test, in which nothing may fail unnoticed."""

import asyncio
import functools
import gc

from support.deadlines import LATEST_S


def run(main):
    """Run a coroutine and what it has begun; fail if anything failed that nobody has seen."""

    async def whole():
        failed = []
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: failed.append(context))
        result = await asyncio.wait_for(main, LATEST_S)
        if left := asyncio.all_tasks() - {asyncio.current_task()}:
            _, left = await asyncio.wait(left, timeout=LATEST_S)
        gc.collect()  # a task whose error nobody has asked for tells it when it goes
        assert not left, f"still running: {left}"
        assert not failed, failed
        return result

    return asyncio.run(whole())


def in_event_loop(test):
    """Let `run` run a test that is a coroutine function."""

    @functools.wraps(test)
    def running(*arguments, **named):
        run(test(*arguments, **named))

    return running


class Noted(dict):
    """A dict for which somebody can wait until something is in it."""

    def __init__(self):
        super().__init__()
        self._came = asyncio.Event()

    def __setitem__(self, key, value):
        super().__setitem__(key, value)
        self._came.set()

    async def __call__(self, key):
        """Wait for a key, and return its value."""
        while key not in self:
            self._came.clear()
            await asyncio.wait_for(self._came.wait(), LATEST_S)
        return self[key]
