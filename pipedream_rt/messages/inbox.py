"""Where messages wait until the one thread that owns the inbox asks for them by key."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

from pipedream_rt.deadline import Deadline
from pipedream_rt.errors import MessageTimeout
from pipedream_rt.messages.message import Key, Message
from pipedream_rt.schedules.plan import Edge

_log = logging.getLogger(__name__)


Reason: TypeAlias = BaseException | Callable[[], BaseException]
"""Why an inbox was closed: an error, or a function that makes it."""


class Inbox:
    """Messages by key: put by any thread, taken by one.

    `take` waits for exactly the message that is asked for, so the order in which messages arrive
    cannot be observed. A message that comes a second time is dropped, whether the first still waits
    or was taken: the messages of one edge are taken with rising numbers. Two messages with the same
    number on two edges are two messages.

    Args:
        owner: Name for messages, as ``"stage 2"``.
        generation: Messages of another generation are dropped.

    Attributes:
        awaited: What the taker waits for now.
        arrived_ns: When what was taken last had arrived, on the clock of ``time.monotonic_ns``.
        recent: The last ten actions of the taker, for a stall report.
    """

    def __init__(self, owner: str, generation: int = 0) -> None:
        """Start open and empty."""
        self._owner = owner
        self._generation = generation
        self._changed = threading.Condition()
        self._waiting: dict[Key, tuple[Message, int]] = {}
        self._taken: dict[Edge, int] = {}
        self._reason: Reason | None = None
        self._taker: int | None = None
        self.awaited: tuple[Key, ...] = ()
        self.arrived_ns = 0
        self.recent: deque[str] = deque(maxlen=10)

    def put(self, message: Message) -> bool:
        """Let a message wait. Never blocks.

        Returns:
            Whether it was kept; not if it is a duplicate, of another generation, or too late.
        """
        key = message.key
        with self._changed:
            if message.generation != self._generation:
                _log.warning(
                    "%s, generation %d: dropped %s of generation %d",
                    self._owner,
                    self._generation,
                    message,
                    message.generation,
                )
                return False
            if key in self._waiting or key.number <= self._taken.get(key.edge, -2):
                _log.debug("%s: dropped a second %s", self._owner, message)
                return False
            if self._reason is not None:
                return False
            self._waiting[key] = (message, time.monotonic_ns())
            self._changed.notify_all()
            return True

    def take(
        self,
        key: Key,
        deadline: Deadline,
        *,
        instead: Sequence[Key] = (),
        also: Iterable[Key] = (),
        wanted: Callable[[Message], bool] = lambda message: True,
    ) -> Message:
        """Wait for a message and remove it.

        Args:
            key: Which one.
            deadline: For the wait.
            instead: Others, of which one may come in its place; only one of them all ever comes.
            also: Others that are taken if they are there while those before are not.
            wanted: Which of ``also``.

        Returns:
            The message. Messages that came before a `close` can still be taken.

        Raises:
            MessageTimeout: It did not come in time.
            RuntimeError: Another thread is waiting already.
            BaseException: The reason given to `close`.
        """
        others = tuple(also)
        with self._changed:
            self._claim()
            self.awaited = (key, *instead)
            try:
                while (found := self._find(others, wanted)) is None:
                    if self._reason is not None:
                        break
                    if deadline.expired():
                        raise self._late(deadline)
                    self._changed.wait(deadline.remaining_s())
                else:
                    edge, number = found
                    self._taken[edge] = max(number, self._taken.get(edge, number))
                    message, self.arrived_ns = self._waiting.pop(found)
                    return message
            finally:
                self.awaited, self._taker = (), None
        # Not while the lock is held: to find the reason out may take a while.
        reason = self._reason
        assert reason is not None
        raise reason() if callable(reason) else reason

    def _find(self, others: tuple[Key, ...], wanted: Callable[[Message], bool]) -> Key | None:
        """Return which of the messages to take now: an awaited one, or another that is wanted."""
        for key in self.awaited:
            if key in self._waiting:
                return key
        for other in others:
            if other in self._waiting and wanted(self._waiting[other][0]):
                return other
        return None

    def _claim(self) -> None:
        """Refuse a second taker; two would steal each other's messages."""
        if self._taker is not None:
            raise RuntimeError(
                f"the inbox of {self._owner} is waited on by two threads; a pipeline is used by "
                "one thread at a time"
            )
        self._taker = threading.get_ident()

    def _late(self, deadline: Deadline) -> MessageTimeout:
        """Say what is missing and what is there."""
        there = ", ".join(map(str, self._waiting)) or "nothing"
        seconds = deadline.timeout.total_seconds() if deadline.timeout else 0.0
        return MessageTimeout(
            f"{self._owner} waited {seconds:g} s for {_text_of(self.awaited)}, which did not come; "
            f"the inbox holds {there}; {self.story()}"
        )

    def holds(self, key: Key) -> bool:
        """Whether a message waits. For `done()` of a future, never for deciding what to do next."""
        with self._changed:
            return key in self._waiting

    def close(self, reason: Reason) -> None:
        """Wake the taker with a reason. Safe from any thread; the first reason stays.

        Args:
            reason: What `take` raises from now on, once what has arrived is taken; or a function
                that makes it, which the taker calls.
        """
        with self._changed:
            if self._reason is None:
                self._reason = reason
                self._changed.notify_all()

    def reopen(self, generation: int) -> None:
        """Begin a new generation after a failure; by the taker.

        What was not taken is dropped, for it comes again. What was taken is still dropped when it
        comes a second time.

        Args:
            generation: Messages of another are refused from now on.
        """
        with self._changed:
            self._generation = generation
            self._waiting.clear()
            self._reason = None

    @property
    def busy(self) -> bool:
        """Whether somebody waits for a message."""
        return self._taker is not None

    @property
    def reason(self) -> Reason | None:
        """Why it was closed, or None while open."""
        return self._reason

    def story(self) -> str:
        """What is awaited and the last ten actions, for a stall report. From any thread."""
        keys = self.awaited
        awaited = f"waiting for {_text_of(keys)}" if keys else "computing"
        return f"{awaited}; last actions: {' '.join(self.recent) or 'none'}"


def _text_of(keys: Sequence[Key]) -> str:
    """Return what is awaited, for people."""
    return " or ".join(map(str, keys))
