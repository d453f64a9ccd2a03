"""SIGTERM while a run makes checkpoints: it writes one more, and ends.

A cluster that takes a machine back sends SIGTERM and some seconds later SIGKILL. The handler only
notes the signal. At the next mini-batch, where the state of the script and of the stages belong
together, the checkpoint is made, and the script ends with `SystemExit`. A script that does not come
to a mini-batch within the grace time is ended without one.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from datetime import timedelta
from types import FrameType

_log = logging.getLogger(__name__)

EXIT_CODE = 128 + signal.SIGTERM
"""The exit code of a script that SIGTERM has ended, after its checkpoint too."""


class Preemption:
    """Notes SIGTERM, from `watch` to `close`.

    The signal is left alone where the script has a handler of its own, and where the pipeline is
    used by another thread than the main one, which alone may set handlers.

    Args:
        grace: The time after which the script is ended without a checkpoint.

    Attributes:
        noted: Whether the signal has come.
    """

    def __init__(self, grace: timedelta) -> None:
        """Watch for nothing yet."""
        self.noted = False
        self._grace = grace
        self._watching = False
        self._timer: threading.Timer | None = None

    def watch(self) -> None:
        """Note SIGTERM from now on, if nobody else handles it."""
        main = threading.current_thread() is threading.main_thread()
        if main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._note)
            self._watching = True

    def _note(self, number: int, frame: FrameType | None) -> None:
        """Note the signal; the second one ends the script at once."""
        if self.noted:
            self._end()
            return
        self.noted = True
        _log.warning(
            "SIGTERM: a checkpoint is made after the next mini-batch, then the script ends"
        )
        self._timer = threading.Timer(self._grace.total_seconds(), self._end)
        self._timer.daemon = True
        self._timer.start()

    def _end(self) -> None:
        """End this process; its workers notice that and end too."""
        _log.error("SIGTERM: no mini-batch came within %s; no checkpoint is made", self._grace)
        os._exit(EXIT_CODE)

    def close(self) -> None:
        """Leave the signal to its default handler again. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
        if self._watching and threading.current_thread() is threading.main_thread():
            if signal.getsignal(signal.SIGTERM) == self._note:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
            self._watching = False
