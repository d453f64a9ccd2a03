"""SIGTERM while a run makes checkpoints: it writes one more, and ends.

A cluster that takes a machine back sends SIGTERM and some seconds later SIGKILL. The handler only
notes the signal. At the next mini-batch, where the state of the script and of the stages belong
together, the checkpoint is made, and the script ends with `SystemExit`. A script that does not come
to a mini-batch within the grace time is ended without one. That is done by a thread, which the
signal wakes by a socket: Python runs handlers on the main thread alone, which may be stuck.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from _thread import interrupt_main
from contextlib import suppress
from datetime import timedelta
from types import FrameType

from pipedream_rt.telling import log_of

_log = log_of(__name__)

_SAME_SIGNAL_S = 2.0
"""Signals that come within that time are one."""

EXIT_CODE = 128 + signal.SIGTERM
"""The exit code of a script that SIGTERM has ended, after its checkpoint too."""


_CLOSED = b"\0"
"""The byte with which `close` wakes the thread: the number of no signal."""


class Preemption:
    """Notes SIGTERM in ``noted``, from `watch` to `close`, if the script does not handle it."""

    def __init__(self, grace: timedelta) -> None:
        self.noted = False
        self._is_closed = False
        self._grace = grace
        self._ends: tuple[socket.socket, socket.socket] | None = None
        self._thread: threading.Thread | None = None

    def watch(self) -> None:
        """Note SIGTERM from now on, if nobody else handles it."""
        # Only the main thread may set handlers.
        if threading.current_thread() is not threading.main_thread():
            return
        for other in list(_watching):
            if other._is_closed:
                other._restore()
        if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
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
        if self._is_closed:
            if self._restore() > 1:  # one of them is that of `close`
                signal.raise_signal(signal.SIGTERM)
            return
        self.noted = True
        _log.warning(
            "SIGTERM: a checkpoint is made after the next mini-batch, then the script ends"
        )

    def _count_down(self, woken: socket.socket) -> None:
        """Wait for the signal, then for the end of the grace time or the run, or for another."""
        while True:
            numbers = woken.recv(64)
            if _CLOSED in numbers:
                return
            if signal.SIGTERM in numbers:
                break
        woken.settimeout(self._grace.total_seconds())
        began = time.monotonic()
        with suppress(TimeoutError):
            while _CLOSED not in (numbers := woken.recv(64)):
                # Slurm sends it to all processes of a job, and `pipedream-rt run` passes it on.
                if signal.SIGTERM in numbers and time.monotonic() - began > _SAME_SIGNAL_S:
                    break
            else:
                return
        _log.error("SIGTERM: no mini-batch came within %s; no checkpoint is made", self._grace)
        os._exit(EXIT_CODE)  # the workers notice that and end too

    def close(self) -> None:
        """Give the signal its default handler again. Idempotent, and from any thread."""
        thread, self._thread = self._thread, None
        if thread is None or self._ends is None:
            return
        self._ends[1].send(_CLOSED)
        thread.join()
        self._is_closed = True
        if threading.current_thread() is threading.main_thread():
            self._restore()
        elif signal.getsignal(signal.SIGTERM) == self._note:
            # Only the main thread may touch handlers: `_note` restores there, as if by a signal.
            interrupt_main(signal.SIGTERM)

    def _restore(self) -> int:
        """Restore what `watch` has set, on the main thread; return how often the signal came."""
        if self._ends is None:
            return 0
        self._unset()
        (woken, wake), self._ends = self._ends, None
        woken.setblocking(False)
        numbers = b""
        with suppress(BlockingIOError):
            numbers = woken.recv(64)
        woken.close()
        wake.close()
        return numbers.count(signal.SIGTERM)

    def _unset(self) -> None:
        """Give up the handler and the wakeup socket, unless the script has set its own."""
        _watching.discard(self)
        if signal.getsignal(signal.SIGTERM) == self._note:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        wakes = signal.set_wakeup_fd(-1)
        if self._ends is not None and wakes != self._ends[1].fileno():
            signal.set_wakeup_fd(wakes)


_watching: set[Preemption] = set()
"""Those that watch, or were closed on another thread and are not restored; for `_forget`."""


def _forget() -> None:
    """Let SIGTERM end a forked child, as a data loader's: it has nothing to save."""
    for each in list(_watching):
        each._unset()  # the sockets are the parent's too, so nothing is read


os.register_at_fork(after_in_child=_forget)
