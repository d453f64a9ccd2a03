"""The worker processes that the coordinator starts itself, on its own machine."""

from __future__ import annotations

import signal
import socket
import subprocess
from collections.abc import Sequence

from pipedream_rt.cluster.control import Control
from pipedream_rt.cluster.forked_workers import UNKNOWN, ForkedWorker, ForkServer


class LocalWorkers:
    """Worker processes that this process has started, and the control connections they inherit.

    Attributes:
        controls: The coordinator's ends, by name of the worker.
    """

    def __init__(self, threads: int, forks: ForkServer) -> None:
        self._threads = threads
        self._forks = forks
        self.processes: dict[str, ForkedWorker] = {}
        self.controls: dict[str, Control] = {}

    def start(self, names: Sequence[str]) -> None:
        """Start a process for each name; after an error, ``processes`` has those that started."""
        for number, name in enumerate(names):
            ours, theirs = socket.socketpair()
            with theirs:
                self.controls[name] = Control(ours, f"worker {name!r}")
                self.processes[name] = self._forks.fork(name, self._threads, theirs, number)

    def open_end_of_forks(self) -> int | None:
        """The pidfd of `ForkServer.open_end`; None too if no worker was started here."""
        return self._forks.open_end() if self.processes else None

    def replace_forks(self) -> None:
        self._forks.replace()

    def name_of(self, control: Control) -> str | None:
        """Name of the worker at the other end of a connection; None if it was not started here."""
        return next((name for name, c in self.controls.items() if c is control), None)

    def ending(self, name: str) -> str:
        """How the process of a worker that is lost ended, in words; may block for a second."""
        process = self.processes.get(name)
        if process is None:
            return ""
        try:
            code = process.wait(timeout=1)  # its connections close a moment before it ends
        except subprocess.TimeoutExpired:
            return "still running"
        if code == UNKNOWN:
            return "the process that forked it and could tell how it ended is gone too"
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
