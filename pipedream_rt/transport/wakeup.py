"""Wakes a thread that waits in ``poll`` or ``select``."""

from __future__ import annotations

import os
from contextlib import suppress


class Alarm:
    """Readable from `ring` until `quiet`. Any thread may ring, also after `close`."""

    __slots__ = ("_descriptor",)

    def __init__(self) -> None:
        self._descriptor = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def fileno(self) -> int:
        """Return the descriptor to poll, -1 once it is closed."""
        return self._descriptor

    def ring(self) -> None:
        """Wake the thread that polls, now or at its next poll."""
        with suppress(OSError, ValueError):  # closed: -1 is no descriptor
            os.eventfd_write(self._descriptor, 1)

    def quiet(self) -> None:
        """Forget that it was rung."""
        with suppress(BlockingIOError):  # nobody rang
            os.eventfd_read(self._descriptor)

    def close(self) -> None:
        """Close the descriptor. Idempotent; the thread that polls has ended."""
        # Forgotten first: a late `ring` must not write to a file that gets the same number.
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)
