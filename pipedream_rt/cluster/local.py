"""One of the two supervisors: the script starts workers on its machine, and starts them again.

The other is `elsewhere.py`.
"""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Sequence

from pipedream_rt.cluster.forked_workers import ForkedWorker, ForkServer
from pipedream_rt.cluster.worker_life import in_words
from pipedream_rt.lifecycle import close_in_forked_children


class Local:
    """Worker processes that this process has started, each with a connection that it inherits.

    Attributes:
        connections: The coordinator's ends, by name of the worker.
    """

    def __init__(self, threads: int, forks: ForkServer) -> None:
        self._threads = threads
        self._forks = forks
        self.processes: dict[str, ForkedWorker] = {}
        self.connections: dict[str, socket.socket] = {}

    def start(self, names: Sequence[str]) -> None:
        """Start a process for each name; after an error, ``processes`` has those that started."""
        for number, name in enumerate(names):
            ours, theirs = socket.socketpair()
            with theirs:
                self.connections[name] = ours
                close_in_forked_children(ours)
                self.processes[name] = self._forks.fork(name, self._threads, theirs, number)

    def open_end_of_forks(self) -> int | None:
        """The pidfd of `ForkServer.open_end`; None too if no worker was started here."""
        return self._forks.open_end() if self.processes else None

    def replace_forks(self) -> None:
        self._forks.replace()

    def ending(self, name: str) -> str:
        """How the process of a lost worker ended, for messages; may block for a second."""
        process = self.processes.get(name)
        if process is None:
            return ""
        try:
            code = process.wait(timeout=1)  # its connections close a moment before it ends
        except subprocess.TimeoutExpired:
            return "still running"
        return in_words(code)
