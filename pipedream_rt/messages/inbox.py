"""Where messages wait until the one thread that owns the inbox asks for them by key."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable

from pipedream_rt.deadline import Deadline
from pipedream_rt.errors import MessageTimeout
from pipedream_rt.messages.message import Channel, Key, Message

_log = logging.getLogger(__name__)


class Inbox:
    """Messages by key: put by any thread, taken by one.

    `take` waits for exactly the message that is asked for, so the order in which messages arrive
    cannot be observed. A message that came before is dropped, whether it still waits or was taken:
    messages of one channel and stage are taken with rising numbers.

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
        self._taken: dict[tuple[Channel, int], int] = {}
        self._reason: BaseException | None = None
        self._taker: int | None = None
        self.awaited: Key | None = None
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
            if key in self._waiting or key.number <= self._taken.get((key.channel, key.stage), -2):
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
        also: Iterable[Key] = (),
        wanted: Callable[[Message], bool] = lambda message: True,
    ) -> Message:
        """Wait for a message and remove it.

        Args:
            key: Which one.
            deadline: For the wait.
            also: Others that are taken if they are there while that one is not.
            wanted: Which of the others.

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
            self.awaited = key
            try:
                while (found := self._find(key, others, wanted)) is None:
                    if self._reason is not None:
                        raise self._reason
                    if deadline.expired():
                        raise self._late(key, deadline)
                    self._changed.wait(deadline.remaining_s())
                mark = (found.channel, found.stage)
                self._taken[mark] = max(found.number, self._taken.get(mark, found.number))
                message, self.arrived_ns = self._waiting.pop(found)
                return message
            finally:
                self.awaited = self._taker = None

    def _find(
        self, key: Key, others: tuple[Key, ...], wanted: Callable[[Message], bool]
    ) -> Key | None:
        """Which of the messages to take now."""
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

    def _late(self, key: Key, deadline: Deadline) -> MessageTimeout:
        """Say what is missing and what is there."""
        there = ", ".join(map(str, self._waiting)) or "nothing"
        seconds = deadline.timeout.total_seconds() if deadline.timeout else 0.0
        return MessageTimeout(
            f"{self._owner} waited {seconds:g} s for {key}, which did not come; "
            f"the inbox holds {there}; {self.story()}"
        )

    def holds(self, key: Key) -> bool:
        """Whether a message waits. For `done()` of a future, never for deciding what to do next."""
        with self._changed:
            return key in self._waiting

    def close(self, reason: BaseException) -> None:
        """Wake the taker with a reason. Safe from any thread; the first reason stays.

        Args:
            reason: What `take` raises from now on, once what has arrived is taken.
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
    def reason(self) -> BaseException | None:
        """Why it was closed, or None while open."""
        return self._reason

    def story(self) -> str:
        """What is awaited and the last ten actions, for a stall report. From any thread."""
        key = self.awaited
        awaited = f"waiting for {key}" if key else "computing"
        return f"{awaited}; last actions: {' '.join(self.recent) or 'none'}"
