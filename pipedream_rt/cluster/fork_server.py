"""Local worker processes, forked by a process that has imported torch already.

Importing torch takes more than a second of a processor for each worker, again in every recovery.
The fork server imports it once and computes nothing, so that what it forks is as good as fresh. It
lives as long as the pipeline; workers are its children, so it says how they ended.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import weakref
from datetime import timedelta

import msgpack

from pipedream_rt.cluster.control import close_in_forked_children
from pipedream_rt.cluster.subprocesses import end_processes
from pipedream_rt.deadline import Deadline
from pipedream_rt.errors import PeerLost, PipelineClosed

_START_TIMEOUT = timedelta(minutes=2)
"""For the server to import torch and answer for the first time."""

_EXIT_TIMEOUT = timedelta(seconds=5)
"""For the server to say how a worker ended that has, and to end itself."""

_LARGEST = 1 << 12


class ForkedWorker:
    """A worker process; has what `subprocess.Popen` has, as far as it is used here.

    From any thread.

    Attributes:
        pid: Its number.
        returncode: As of `subprocess.Popen`; None while it runs.
    """

    def __init__(self, server: ForkServer, parent: socket.socket, pid: int, pidfd: int) -> None:
        """Own the descriptor."""
        self._server = server
        self._parent = parent
        self.pid = pid
        self._pidfd = pidfd
        self._close = weakref.finalize(self, os.close, pidfd)
        self.returncode: int | None = None

    def kill(self) -> None:
        """Send SIGKILL, to this process and no other that has got its number."""
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def poll(self) -> int | None:
        """Return its exit code, None while it runs."""
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end.

        Raises:
            subprocess.TimeoutExpired: It runs on.
        """
        if self.returncode is None:
            poll = select.poll()
            poll.register(self._pidfd, select.POLLIN)
            if not poll.poll(None if timeout is None else 1000 * timeout):
                raise subprocess.TimeoutExpired(f"worker {self.pid}", timeout or 0.0)
            self.returncode = self._server.code_of(self.pid, self._parent)
            self._close()
        return self.returncode


class ForkServer:
    """Forks workers. Started when the first is asked for, and again if it has died."""

    def __init__(self) -> None:
        """Start nothing yet."""
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None
        self._codes: dict[int, int] = {}
        self._lock = threading.Lock()
        self._closed = False

    def fork(self, name: str, threads: int, control: socket.socket) -> ForkedWorker:
        """Fork a worker.

        Args:
            name: Of the worker.
            threads: For torch's own parallel loops.
            control: Its end of the control connection; the caller closes it here.

        Raises:
            PeerLost: The server is gone.
            PipelineClosed: It was closed.
        """
        request = msgpack.packb({"name": name, "threads": threads})
        for last in (False, True):
            with self._lock:
                connection = self._connection or self._start()
                try:
                    socket.send_fds(connection, [request], [control.fileno()])
                    return ForkedWorker(self, connection, *self._answer(connection))
                except (OSError, PeerLost):
                    if last or self._closed:
                        raise
                self._end()
        raise AssertionError("the second attempt returns or raises")

    def _start(self) -> socket.socket:
        """Start the server, in a session of its own: Ctrl-C reaches the coordinator alone."""
        if self._closed:
            raise PipelineClosed("the pipeline was closed")
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            fd = theirs.fileno()
            self._process = subprocess.Popen(
                [sys.executable, "-m", "pipedream_rt.workers", "--fork-server-fd", str(fd)],
                stdin=subprocess.DEVNULL,
                pass_fds=(fd,),
                start_new_session=True,
            )
        close_in_forked_children(ours)
        self._connection, self._codes = ours, {}
        return ours

    def _answer(self, connection: socket.socket) -> tuple[int, int]:
        """Wait for word of the worker that was asked for, noting the ends of others."""
        deadline = Deadline(_START_TIMEOUT)
        while True:
            record, fds = self._receive(connection, deadline)
            if "pid" in record:
                self._codes.pop(record["pid"], None)  # of one that had the same number
                return record["pid"], fds[0]

    def _receive(
        self, connection: socket.socket, deadline: Deadline
    ) -> tuple[dict[str, int], list[int]]:
        """Take one record.

        Raises:
            PeerLost: None came in time, or the server is gone.
        """
        poll = select.poll()
        poll.register(connection, select.POLLIN)
        if not poll.poll(1000 * (deadline.remaining_s() or 0.0)):
            raise PeerLost("the process that forks workers does not answer", peer="fork server")
        data, fds, _, _ = socket.recv_fds(connection, _LARGEST, 1)
        if not data:
            raise PeerLost("the process that forks workers is gone", peer="fork server")
        record = msgpack.unpackb(data)
        if "ended" in record:
            self._codes[record["ended"]] = record["code"]
        return record, fds

    def code_of(self, pid: int, parent: socket.socket) -> int:
        """Exit code of a worker that has ended, as `subprocess` has it; 1 if nobody can say.

        Args:
            pid: Of the worker.
            parent: Connection to the server that forked it, which may be gone.
        """
        deadline = Deadline(_EXIT_TIMEOUT)
        with self._lock:
            while pid not in self._codes and self._connection is parent:
                try:
                    self._receive(parent, deadline)
                except (OSError, PeerLost):
                    break
            # Left there: several threads may ask.
            return self._codes.get(pid, 1) if self._connection is parent else 1

    def close(self) -> None:
        """End the server; its workers hear of it from the coordinator. Idempotent."""
        self._closed = True
        self._end()

    def _end(self) -> None:
        """End the server that runs now."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if self._process is not None:
            end_processes([self._process], Deadline(_EXIT_TIMEOUT))
            self._process = None
