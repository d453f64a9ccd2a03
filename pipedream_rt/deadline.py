"""Deadlines: an operation has one, and passes it to every wait in it."""

from __future__ import annotations

import time
from datetime import timedelta


class Deadline:
    """A moment on the monotonic clock, after which waiting is an error.

    Attributes:
        timeout: The time from the making of the deadline; None for no limit. Who gives None says in
            a comment what ends the wait.
    """

    __slots__ = ("_at", "timeout")

    def __init__(self, timeout: timedelta | None) -> None:
        self.timeout = timeout
        self._at = None if timeout is None else time.monotonic() + timeout.total_seconds()

    def remaining_s(self) -> float | None:
        """Return the seconds that are left, at least 0; None if there is no limit."""
        return None if self._at is None else max(0.0, self._at - time.monotonic())

    def remaining_ms(self) -> float | None:
        """Return the milliseconds that are left, for ``poll``; None if there is no limit."""
        # poll takes a C integer: over 24 days are no limit.
        seconds = self.remaining_s()
        return None if seconds is None or seconds >= 2**31 / 1000 else 1000 * seconds

    def expired(self) -> bool:
        """Whether the moment has passed."""
        return self._at is not None and time.monotonic() >= self._at
