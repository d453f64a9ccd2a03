"""What wakes a thread that waits in ``poll`` or ``select``."""

from __future__ import annotations

import os
from contextlib import suppress


class Alarm:
    """A descriptor that is readable from `ring` until `quiet`. Any thread may ring.

    It may be rung after it was closed, too: its number is forgotten, so nothing is written to a
    file that was opened later and got the same number.
    """

    __slots__ = ("_descriptor",)

    def __init__(self) -> None:
        self._descriptor = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def fileno(self) -> int:
        """Return the descriptor to poll, -1 once it is closed."""
        return self._descriptor

    def ring(self) -> None:
        """Wake the thread that polls, now or at its next poll."""
        with suppress(OSError, ValueError):  # it is closed: -1 is no descriptor
            os.eventfd_write(self._descriptor, 1)

    def quiet(self) -> None:
        """Be silent again; what rang is forgotten."""
        with suppress(BlockingIOError):  # nobody rang
            os.eventfd_read(self._descriptor)

    def close(self) -> None:
        """Close the descriptor. Idempotent; the thread that polls has ended."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)
