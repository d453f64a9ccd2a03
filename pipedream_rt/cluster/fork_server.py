"""Local worker processes, forked by a process that has imported torch already.

Importing torch costs each worker more than a second of processor time, and again in every recovery.
The fork server imports it once, and so it does with the installed modules of which the model is
made: those of transformers take longer than torch. It computes nothing, so that the state of a
worker that it forks equals that of a fresh process. It lives as long as the pipeline. Workers are
its children, so it is the fork server that reports how they ended.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import sysconfig
import threading
import weakref
from collections.abc import Iterable, Sequence
from datetime import timedelta

import msgpack

from pipedream_rt.cluster.subprocesses import end_processes
from pipedream_rt.deadline import Deadline
from pipedream_rt.errors import PeerLost, PipelineClosed
from pipedream_rt.lifecycle import Lifecycle, close_in_forked_children

_START_TIMEOUT = timedelta(minutes=2)
"""For the server to import torch and answer for the first time."""

_ANSWER_TIMEOUT = timedelta(seconds=5)
"""For the server to fork a worker once it has torch, which takes milliseconds."""

_EXIT_TIMEOUT = timedelta(seconds=5)
"""For the server to report how a worker has ended, and to end itself."""

_LARGEST = 1 << 12
"""Bytes that a record of the server may have."""


_log = logging.getLogger(__name__)


class ForkedWorker:
    """A worker process; offers the part of `subprocess.Popen` that `Process` names.

    Safe from any thread.

    Args:
        server: The fork server that has forked it.
        parent: The connection to the server over which it was asked for.
        pid: Process number.
        pidfd: Descriptor of the process, owned by this object from now on.

    Attributes:
        pid: Process number.
        returncode: Exit code, negative for a signal as in `subprocess.Popen`; None while it runs.
    """

    def __init__(self, server: ForkServer, parent: socket.socket, pid: int, pidfd: int) -> None:
        """Take the descriptor over."""
        self._server = server
        self._parent = parent
        self.pid = pid
        self._pidfd = pidfd
        self._close = weakref.finalize(self, os.close, pidfd)
        self.returncode: int | None = None

    def kill(self) -> None:
        """Send SIGKILL to this process, and to no later one that has the same number."""
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def poll(self) -> int | None:
        """Return the exit code, None while the process runs."""
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end of the process.

        Args:
            timeout: Seconds; None for no limit.

        Returns:
            The exit code.

        Raises:
            subprocess.TimeoutExpired: The process still runs.
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
    """Forks workers. Its process starts with the first request, and again if it has died.

    Args:
        imports: Names of installed modules that the workers will need.
    """

    def __init__(self, imports: Sequence[str] = ()) -> None:
        """Start no process yet."""
        self._imports = imports
        self._answered = False
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None
        self._codes: dict[int, int] = {}
        self._lock = threading.Lock()
        self._life = Lifecycle("the fork server")

    def prepare(self) -> None:
        """Start the process before it is needed, so that it imports while the caller goes on."""
        with self._lock:
            if self._connection is None:
                self._start()

    def fork(self, name: str, threads: int, control: socket.socket) -> ForkedWorker:
        """Fork a worker.

        Args:
            name: Name of the worker.
            threads: Number of threads for torch's own parallel loops.
            control: The worker's end of its control connection; the caller closes its own copy.

        Returns:
            The worker's process.

        Raises:
            PeerLost: The server does not answer, or is gone for the second time.
            PipelineClosed: The server was closed.
        """
        request = msgpack.packb({"name": name, "threads": threads})
        for last in (False, True):
            with self._lock:
                connection = self._connection or self._start()
                try:
                    socket.send_fds(connection, [request], [control.fileno()])
                    return ForkedWorker(self, connection, *self._answer(connection))
                except (OSError, PeerLost) as error:
                    if last or not self._life.is_open:
                        raise
                    _log.warning("%s; another one is started", error)
                self._end(at_once=True)
        raise AssertionError("the second attempt returns or raises")

    def _start(self) -> socket.socket:
        """Start the server in a session of its own: Ctrl-C reaches the coordinator alone."""
        if not self._life.is_open:
            raise PipelineClosed("the pipeline was closed")
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            fd = theirs.fileno()
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "pipedream_rt.workers", "--fork-server-fd", str(fd)),
                    *(f"--import={name}" for name in self._imports),
                ],
                stdin=subprocess.DEVNULL,
                pass_fds=(fd,),
                start_new_session=True,
            )
        close_in_forked_children(ours)
        self._connection, self._codes, self._answered = ours, {}, False
        return ours

    def _answer(self, connection: socket.socket) -> tuple[int, int]:
        """Wait for number and descriptor of the new worker, noting how others have ended."""
        deadline = Deadline(_ANSWER_TIMEOUT if self._answered else _START_TIMEOUT)
        while True:
            record, fds = self._receive(connection, deadline)
            if "pid" in record:
                self._answered = True
                self._codes.pop(record["pid"], None)  # of an earlier worker with the same number
                return record["pid"], fds[0]

    def _receive(
        self, connection: socket.socket, deadline: Deadline
    ) -> tuple[dict[str, int], list[int]]:
        """Receive one record, with the descriptors that came with it.

        Raises:
            PeerLost: No record came in time, or the server is gone.
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
        """Exit code of a worker that has ended; negative for a signal, 1 if the server is gone.

        Args:
            pid: Process number of the worker.
            parent: Connection to the server that forked it, which may be gone.
        """
        deadline = Deadline(_EXIT_TIMEOUT)
        with self._lock:
            while pid not in self._codes and self._connection is parent:
                try:
                    self._receive(parent, deadline)
                except (OSError, PeerLost):  # it was stopped, or is gone: the next one is better
                    self._end(at_once=True)
            # The code stays in the dict: several threads may ask.
            return self._codes.get(pid, 1) if self._connection is parent else 1

    def close(self) -> None:
        """End the server; the coordinator tells its workers to end. Idempotent."""
        self._life.begin_closing()
        self._end(at_once=not self._answered)  # it may still be importing
        self._life.close()

    def _end(self, *, at_once: bool = False) -> None:
        """End the process of the server, if one runs.

        Args:
            at_once: Whether to kill it, since it does not answer.
        """
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if self._process is not None:
            if at_once:
                self._process.kill()
            end_processes([self._process], Deadline(_EXIT_TIMEOUT))
            self._process = None


def installed_modules(objects: Iterable[object]) -> list[str]:
    """Return the names of the installed modules in which the classes of objects are.

    Modules of the user's own are left out, which may do anything when they are imported; and torch,
    which is imported in any case.
    """
    roots = tuple({sysconfig.get_path(kind) + os.sep for kind in ("purelib", "platlib")})
    names = {type(each).__module__ for each in objects}
    files = {name: getattr(sys.modules.get(name), "__file__", None) or "" for name in names}
    ours = ("torch.", "pipedream_rt.")
    return sorted(n for n, f in files.items() if f.startswith(roots) and not n.startswith(ours))
