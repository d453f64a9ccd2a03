"""The inbox: messages wait in it until its owner's thread asks for them by key."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from typing import NamedTuple, Protocol, TypeAlias, TypeVar

from pipedream_rt.deadline import Deadline
from pipedream_rt.errors import MessageTimeout
from pipedream_rt.messages.message import Key, Message
from pipedream_rt.schedules.edges import Edge, Titles, name_of
from pipedream_rt.telling import log_of

_log = log_of(__name__)


Reason: TypeAlias = BaseException | Callable[[], BaseException]
"""Why an inbox was closed: an error, or a function that makes one, called by the taker."""


class Wanted(NamedTuple):
    """A message that somebody waits for.

    Attributes:
        instead: Alternative keys. Of ``key`` and these, exactly one will arrive.
        also: Further keys. Their messages are taken only while none of the others is there.
        wanted: Whether to take such a message.
    """

    key: Key
    deadline: Deadline
    instead: tuple[Key, ...] = ()
    also: Sequence[Key] = ()
    wanted: Callable[[Message], bool] = lambda message: True


T = TypeVar("T")


class Waiter(Protocol):
    """How the taker of an inbox waits."""

    def wait(self, seconds: float | None) -> None:
        """Wait for `wake`, at most so many seconds; may return early.

        A `wake` since the last `wait` began ends this one at once.
        """

    def wake(self) -> None:
        """End the wait. Any thread, even the waiting one."""


class Bell:
    """A waiter that only sleeps."""

    def __init__(self) -> None:
        # SimpleQueue is C; a threading.Condition makes a lock for each wait.
        self._calls: queue.SimpleQueue[None] = queue.SimpleQueue()

    def wait(self, seconds: float | None) -> None:
        with suppress(queue.Empty):
            self._calls.get(timeout=seconds)

    def wake(self) -> None:
        self._calls.put(None)


Steps: TypeAlias = Generator[Wanted, Message, T]
"""A generator that yields each message it waits for, is sent that message, and returns a result.

It does not know whether the thread sleeps until the message comes (`Inbox.follow`) or does other
work meanwhile.
"""


class Inbox:
    """A store of messages by key, which any thread fills and one thread, the taker, empties.

    `take` waits for exactly one message. So the taker cannot observe the order in which messages
    arrive. A duplicate is dropped, whether the first still waits or was taken: the messages of one
    edge are taken with rising numbers. Two edges number their messages separately.

    Attributes:
        awaited: The keys that the taker waits for now.
        arrived_ns: When the message that was taken last arrived, on ``time.monotonic_ns``.
        recent: The last ten actions of the taker, for a stall report.
        titles: Names addresses in texts; a plan also names replicas.
    """

    def __init__(self, owner: str, generation: int = 0, waiter: Waiter | None = None) -> None:
        self._owner = owner
        self._generation = generation
        self._lock = threading.RLock()  # a signal handler may close while its thread holds it
        self._waiter = waiter or Bell()
        self._waiting: dict[Key, tuple[Message, int]] = {}  # and when each arrived, in ns
        self._taken: dict[Edge, tuple[int, int]] = {}  # by edge, the last restores and number
        self._reason: Reason | None = None
        self._taker: object | None = None  # of the call of `take` that waits
        self._watched = False
        self.awaited: tuple[Key, ...] = ()
        self._also: Sequence[Key] = ()
        self.arrived_ns = 0
        self.recent: deque[object] = deque(maxlen=10)
        self.titles: Titles = name_of

    def put(self, message: Message) -> bool:
        """Keep a message until it is taken; return whether it was kept. Never blocks."""
        key = message.key
        with self._lock:
            if message.generation != self._generation:
                _log.warning(
                    "%s, generation %d: dropped %s of generation %d",
                    self._owner,
                    self._generation,
                    message,
                    message.generation,
                )
                return False
            if key in self._waiting or self.has_taken(key):
                _log.debug("%s: dropped a second %s", self._owner, message)
                return False
            if self._reason is not None:
                return False
            self._waiting[key] = (message, time.monotonic_ns())
            # Each needless wake would cost the taker a switch of threads.
            waits = self._watched or self._taker is not None
            called = waits and (key in self.awaited or key in self._also)
        if called:
            self._waiter.wake()
        return True

    def take(self, wanted: Wanted) -> Message:
        """Wait for a message and remove it; after `close`, only one that is there already."""
        taker = object()
        try:
            with self._lock:
                self._claim(taker)
                self.awaited, self._also = (wanted.key, *wanted.instead), wanted.also
            while True:
                with self._lock:
                    if (found := self._find(wanted)) is not None:
                        return self._remove(found)
                    if self._reason is not None:
                        break
                    if wanted.deadline.expired():
                        raise self.late(wanted.deadline)
                # Without the lock: others must be able to `put`, and `Links.wait` does so itself.
                self._waiter.wait(wanted.deadline.remaining_s())
        finally:
            if self._taker is taker:
                self.awaited, self._also, self._taker = (), (), None
        raise self._closed()

    def take_if_there(self, wanted: Wanted) -> Message | None:
        """Remove a message as `take` does; if it is not there, note it as awaited, return None."""
        with self._lock:
            self.awaited, self._also = (wanted.key, *wanted.instead), wanted.also
            if (found := self._find(wanted)) is not None:
                self.awaited, self._also = (), ()
                return self._remove(found)
            if self._reason is None:
                return None
        raise self._closed()

    def watch(self) -> None:
        """Also wake the waiter for a message that `take_if_there` has noted as awaited."""
        self._watched = True

    def follow(self, steps: Steps[T]) -> T:
        """Run steps to their end, waiting for each message; return their result."""
        try:
            wanted = next(steps)
            while True:
                try:
                    message = self.take(wanted)
                except BaseException as error:  # the steps may handle it
                    wanted = steps.throw(error)
                else:
                    wanted = steps.send(message)
        except StopIteration as end:
            result: T = end.value
            return result

    def _remove(self, found: Key) -> Message:
        """Remove and return the message under a key, and remember that it was taken."""
        edge, number, restores = found
        taken = (restores, number)
        self._taken[edge] = max(taken, self._taken.get(edge, taken))
        message, self.arrived_ns = self._waiting.pop(found)
        return message

    def _closed(self) -> BaseException:
        """Return the reason of `close`. Without the lock, since making it may take a while."""
        reason = self._reason
        assert reason is not None
        return reason() if callable(reason) else reason

    def _find(self, wanted: Wanted) -> Key | None:
        """Return the key of the message to take now; None if there is none."""
        for key in self.awaited:
            if key in self._waiting:
                return key
        for other in wanted.also:
            if other in self._waiting and wanted.wanted(self._waiting[other][0]):
                return other
        return None

    def _claim(self, taker: object) -> None:
        """Refuse a second taker, since two would take each other's messages."""
        if self._taker is not None:
            raise RuntimeError(
                f"the inbox of {self._owner} is waited on by two threads; a pipeline is used by "
                "one thread at a time"
            )
        self._taker = taker

    def late(self, deadline: Deadline) -> MessageTimeout:
        """Return the error about a missing message; it names those that are there."""
        there = ", ".join(key.words(self.titles) for key in self._waiting) or "nothing"
        seconds = deadline.timeout.total_seconds() if deadline.timeout else 0.0
        return MessageTimeout(
            f"{self._owner} waited {seconds:g} s for {self._words(self.awaited)}, which did not "
            f"come; the inbox holds {there}; {self.story()}"
        )

    def has_taken(self, key: Key) -> bool:
        """Whether a message was taken, or a later one of its edge; else it can be waited for."""
        last = self._taken.get(key.edge)
        return last is not None and (key.restores, key.number) <= last

    def holds(self, key: Key) -> bool:
        """Whether a message waits. For `PendingStep.done` only: it depends on the timing."""
        with self._lock:
            return key in self._waiting

    def close(self, reason: Reason) -> None:
        """Have `take` raise ``reason`` from now on. Any thread; the first reason stays."""
        with self._lock:
            if self._reason is None:
                self._reason = reason
                self._waiter.wake()

    def reopen(self, generation: int) -> None:
        """Open the inbox for a new generation after a failure. On the taker's thread."""
        # All that waits is sent again. A message that was taken is known, and dropped when it
        # comes.
        with self._lock:
            self._generation = generation
            self._waiting.clear()
            self._reason = None

    @property
    def busy(self) -> bool:
        """Whether a thread waits for a message."""
        return self._taker is not None

    @property
    def reason(self) -> Reason | None:
        """The reason why the inbox was closed; None while it is open."""
        return self._reason

    def story(self) -> str:
        """Return the awaited messages and the last ten actions, for a stall report. Any thread."""
        # An atomic copy: the taker appends while the texts are made.
        keys, last = self.awaited, " ".join(map(str, self.recent.copy()))
        awaited = f"waiting for {self._words(keys)}" if keys else "computing"
        return f"{awaited}; last actions: {last or 'none'}"

    def _words(self, keys: Sequence[Key]) -> str:
        """Return keys for people, joined by "or"."""
        return " or ".join(key.words(self.titles) for key in keys)
