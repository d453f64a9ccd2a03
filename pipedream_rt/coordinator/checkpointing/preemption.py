"""SIGTERM while a run makes checkpoints: it writes one more, and ends.

A cluster that takes a machine back sends SIGTERM and some seconds later SIGKILL. The handler only
notes the signal. At the next mini-batch, where the state of the script and of the stages belong
together, the checkpoint is made, and the script ends with `SystemExit`. A script that does not come
to a mini-batch within the grace time is ended without one. That is done by a thread, which the
signal wakes by a socket: Python runs handlers on the main thread alone, which may be stuck.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import time
import weakref
from datetime import timedelta
from types import FrameType

_log = logging.getLogger(__name__)

_SAME_SIGNAL_S = 2.0
"""Signals that come within that time are one."""

EXIT_CODE = 128 + signal.SIGTERM
"""The exit code of a script that SIGTERM has ended, after its checkpoint too."""


class Preemption:
    """Notes SIGTERM in ``noted``, from `watch` to `close`, if the script does not handle it."""

    def __init__(self, grace: timedelta) -> None:
        self.noted = False
        self._grace = grace
        self._ends: tuple[socket.socket, socket.socket] | None = None
        self._thread: threading.Thread | None = None

    def watch(self) -> None:
        """Note SIGTERM from now on, if nobody else handles it."""
        # Only the main thread may set handlers.
        main = threading.current_thread() is threading.main_thread()
        if not main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
            return
        woken, wake = socket.socketpair()
        wake.setblocking(False)  # Python demands it of what signals write to
        before = signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
        if before != -1:  # the script wakes by signals itself, as asyncio does
            signal.set_wakeup_fd(before)
            woken.close()
            wake.close()
            return
        self._ends = woken, wake
        signal.signal(signal.SIGTERM, self._note)
        _watching.add(self)
        self._thread = threading.Thread(
            target=self._count_down, args=(woken,), name="preemption", daemon=True
        )
        self._thread.start()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.noted = True
        _log.warning(
            "SIGTERM: a checkpoint is made after the next mini-batch, then the script ends"
        )

    def _count_down(self, woken: socket.socket) -> None:
        """Wait for the signal, then for the end of the grace time or the run, or for another."""
        while True:
            numbers = woken.recv(64)
            if not numbers:  # `close` has shut the socket
                return
            if signal.SIGTERM in numbers:
                break
        woken.settimeout(self._grace.total_seconds())
        came = time.monotonic()
        try:
            while numbers := woken.recv(64):
                # Slurm sends it to all processes of a job, and `pipedream-rt run` passes it on.
                if signal.SIGTERM in numbers and time.monotonic() - came > _SAME_SIGNAL_S:
                    break
        except TimeoutError:
            pass
        if numbers:
            _log.error("SIGTERM: no mini-batch came within %s; no checkpoint is made", self._grace)
            os._exit(EXIT_CODE)  # the workers notice that and end too

    def close(self) -> None:
        """Give the signal its default handler again. Idempotent."""
        ends, self._ends = self._ends, None
        if ends is None or threading.current_thread() is not threading.main_thread():
            return  # only the main thread may touch handlers, and these need the sockets
        woken, wake = ends
        _watching.discard(self)
        signal.set_wakeup_fd(-1)
        if signal.getsignal(signal.SIGTERM) == self._note:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        wake.shutdown(socket.SHUT_RDWR)
        if self._thread is not None:
            self._thread.join()
        woken.close()
        wake.close()


_watching: weakref.WeakSet[Preemption] = weakref.WeakSet()
"""Those that watch, at most one at a time; for `_forget`."""


def _forget() -> None:
    """Let SIGTERM end a forked child, as a data loader's: it has nothing to save."""
    if _watching:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        _watching.clear()


os.register_at_fork(after_in_child=_forget)
