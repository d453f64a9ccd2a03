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
import traceback
import warnings
from collections.abc import Callable
from importlib import import_module

import msgpack
import numpy as np

_SET_NAME = 15
"""PR_SET_NAME of prctl."""

RunWorker = Callable[[socket.socket, str, int], int]
"""``run(control, name, threads)``: be a worker; returns the exit code."""


def serve_forks(connection: socket.socket, run: RunWorker) -> None:
    """Fork a worker for each request, and tell of each that ends, until the other end closes.

    Args:
        connection: To the launcher.
        run: What a child does.
    """
    # Imported once for all of them; nothing is computed here, so no thread pool is ever made.
    import_module("pipedream_rt.workers.process")
    import_module("torch._dynamo")  # torch does it for the first optimizer that is built

    # NumPy's library of linear algebra has a thread that waits, and knows how to be forked.
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
                _tell_of_ends(connection)
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


def _tell_of_ends(connection: socket.socket) -> None:
    """Tell of the children that have ended."""
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            code = os.waitstatus_to_exitcode(status)
            connection.send(msgpack.packb({"ended": pid, "code": code}))


def _be_worker(control: socket.socket, name: str, threads: int, run: RunWorker) -> None:
    """The life of a child; does not return."""
    code = 1
    try:
        os.setsid()
        ctypes.CDLL(None).prctl(_SET_NAME, name.encode()[:15], 0, 0, 0)
        random.seed()  # else all would draw the same
        np.random.seed()
        code = run(control, name, threads)
    except BaseException:  # the top of a process
        traceback.print_exc()
    finally:
        os._exit(code)
