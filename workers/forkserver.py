"""The fork server: imports torch once, then forks a worker for each request.

Its client is `pipedream_rt.cluster.fork_server`.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import select
import signal
import socket
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from importlib import import_module

import msgpack
import numpy as np

_SET_NAME = 15
"""PR_SET_NAME of prctl."""

RunWorker = Callable[[socket.socket, str, int], int]
"""``run(control, name, threads)`` is the life of a worker and returns its exit code."""


def serve_forks(connection: socket.socket, run: RunWorker, imports: Sequence[str] = ()) -> None:
    """Fork a worker for each request, and report each that ends, until the other end closes.

    Args:
        connection: Connection to the coordinator's process.
        run: The life of a worker, which each child runs.
        imports: Names of installed modules that the workers will need.
    """
    # Imported once for all workers. Nothing is computed here, so torch makes no thread pool.
    import_module("pipedream_rt.workers.process")
    import_module("torch._dynamo")  # which torch does for the first optimizer that is built
    threads = _threads()
    for name in imports:
        with contextlib.suppress(Exception):  # a foreign module may raise anything
            import_module(name)
    if _threads() > threads:
        # A child of a process with threads may wait for a lock for ever: begin again without them.
        command = [sys.executable, "-m", "pipedream_rt.workers", "--fork-server-fd"]
        os.execv(sys.executable, [*command, str(connection.fileno())])

    # The threads of NumPy's library of linear algebra only wait, and it handles forks itself.
    warnings.filterwarnings("ignore", message=".*multi-threaded.*fork", category=DeprecationWarning)
    woken, wake = socket.socketpair()
    wake.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(wake.fileno())
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    poll.register(woken, select.POLLIN)
    while True:
        for fd, _ in poll.poll():
            if fd == woken.fileno():
                woken.recv(4096)
                _report_ends(connection)
                continue
            data, fds, _, _ = socket.recv_fds(connection, 1 << 12, 1)
            if not data:
                return
            request = msgpack.unpackb(data)
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for mine in (connection, woken, wake):
                    mine.close()
                _be_worker(socket.socket(fileno=fds[0]), request["name"], request["threads"], run)
            os.close(fds[0])
            pidfd = os.pidfd_open(pid)
            socket.send_fds(connection, [msgpack.packb({"pid": pid})], [pidfd])
            os.close(pidfd)


def _threads() -> int:
    """Return the number of threads of this process."""
    return len(os.listdir("/proc/self/task")) if os.path.isdir("/proc/self/task") else 1


def _report_ends(connection: socket.socket) -> None:
    """Report how each child ended that has ended."""
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            code = os.waitstatus_to_exitcode(status)
            connection.send(msgpack.packb({"ended": pid, "code": code}))


def _be_worker(control: socket.socket, name: str, threads: int, run: RunWorker) -> None:
    """Run the life of a worker in a child; ends the process."""
    code = 1
    try:
        os.setsid()
        ctypes.CDLL(None).prctl(_SET_NAME, name.encode()[:15], 0, 0, 0)
        random.seed()  # else all children would draw the same numbers
        np.random.seed()
        code = run(control, name, threads)
    except BaseException:  # the top of a process
        traceback.print_exc()
    finally:
        os._exit(code)
