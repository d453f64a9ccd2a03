"""`pytest --shake SEED` slows the threads of the tests down at random places.

What passes on a quiet machine by the luck of its threads fails there, and fails again with the same
seed, as far as threads allow: every test draws from the seed and its own name, and each thread from
what the thread that starts it has drawn. Other processes are not slowed down.
"""

import asyncio
import functools
import itertools
import math
import queue
import random
import socket
import sys
import threading
import time

import pytest

SWITCH_S = 1e-6, 5e-2
"""The shortest and the longest time after which Python lets another thread run."""

START_S = 0.05
"""The longest pause of a thread before its target runs, and of whoever has started it."""

HANDOVER_S = 0.03
"""The longest pause before something is handed to another thread, or taken from it."""

MOST_OFTEN = 0.3
"""The greatest part of the hand-overs that waits; each test draws its own."""

HANDOVERS = (
    (queue.Queue, "put"),
    (queue.Queue, "get"),
    (threading.Event, "set"),
    (threading.Event, "wait"),
    (socket.socket, "accept"),
    (asyncio.BaseEventLoop, "call_soon_threadsafe"),
)


class Draws(threading.local):
    """The random numbers of this thread; those that nobody has given it for one that C starts."""

    def __init__(self, seed, strangers):
        self.random = random.Random(f"{seed} {next(strangers)}")


class Shaking:
    """A plugin of pytest that draws pauses; between `install` and `remove` they take place.

    Args:
        seed: What all is drawn from.
        sleep: Lets a thread pause for some seconds.
    """

    def __init__(self, seed, sleep=time.sleep):  # noqa: TID251 - it disturbs, and synchronises nothing
        self.seed, self.sleep = seed, sleep
        self.often = 0.0
        self.draws = Draws(seed, itertools.count())
        self.patch = pytest.MonkeyPatch()

    def install(self):
        self.patch.setattr(threading.Thread, "start", self.slow_start(threading.Thread.start))
        for owner, name in HANDOVERS:
            self.patch.setattr(owner, name, self.slow_handover(getattr(owner, name)))
        self.patch.setattr(queue, "SimpleQueue", self.slow_queue(queue.SimpleQueue))
        self.switch_s = sys.getswitchinterval()

    def remove(self):
        self.patch.undo()
        sys.setswitchinterval(self.switch_s)

    def begin(self, name):
        """Draw from the seed and the name of a test from now on."""
        self.draws.random = drawn = random.Random(f"{self.seed} {name}")
        sys.setswitchinterval(math.exp(drawn.uniform(*map(math.log, SWITCH_S))))
        self.often = drawn.uniform(0, MOST_OFTEN)

    def slow_start(self, start):
        @functools.wraps(start)
        def slowed(thread):
            if thread.name.startswith("pytest_timeout"):
                return start(thread)
            seed, run = self.draws.random.getrandbits(64), thread.run

            def run_late():
                vars(thread).pop("run", None)  # else the thread would refer to itself
                self.draws.random = random.Random(seed)
                self.pause(START_S)
                run()

            thread.run = run_late
            try:
                start(thread)
            except BaseException:
                vars(thread).pop("run", None)
                raise
            self.pause(START_S)

        return slowed

    def slow_handover(self, function):
        @functools.wraps(function)
        def slowed(*args, **kwargs):
            self.pause_perhaps()
            return function(*args, **kwargs)

        return slowed

    def slow_queue(self, base):
        """Return a class in place of one that is C, whose methods cannot be set."""
        pause_perhaps = self.pause_perhaps

        class SimpleQueue(base):
            def put(self, *args, **kwargs):
                pause_perhaps()
                return super().put(*args, **kwargs)

            def get(self, *args, **kwargs):
                pause_perhaps()
                return super().get(*args, **kwargs)

        return SimpleQueue

    def pause_perhaps(self):
        if self.draws.random.random() < self.often:
            self.pause(HANDOVER_S)

    def pause(self, longest_s):
        self.sleep(self.draws.random.uniform(0, longest_s))

    def pytest_report_header(self):
        return f"threads are slowed down at random: --shake {self.seed}"

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item):
        self.begin(item.nodeid)
        return (yield)

    def pytest_unconfigure(self):
        self.remove()
