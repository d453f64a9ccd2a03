"""The fork server: imports torch once, then forks a worker for each request.

Its client is `pipedream_rt.cluster.forked_workers`.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import select
import signal
import socket
import struct
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from pipedream_rt.cluster.subprocesses import dies_with_parent
from pipedream_rt.packing import packb, unpackb

_SET_NAME = 15
"""PR_SET_NAME of prctl."""

_ORPHANS_END_S = 0.8
"""Seconds for workers to end by themselves after the process that asked for them has died."""

RunWorker = Callable[[int, str, int, "dict[str, Any] | None"], int]
"""``run(fd, name, threads, join)`` lives the life of a worker and returns its exit code.

``fd`` is the control connection. If ``join`` says where to join coordinators, ``fd`` is instead a
pipe with the secret of the job.
"""


def serve_forks(connection: socket.socket, run: RunWorker, imports: bool = True) -> bool:
    """Fork a worker for each request, and report each that ends, until the other end closes.

    Also until the parent has died: a process that it has forked may hold the other end open, where
    neither this process nor the workers would notice the death.

    Return whether its workers join by themselves, and so have to die with this process.
    """
    # Imported once for all workers. Nothing is computed here, so torch makes no thread pool.
    import_module("pipedream_rt.cluster.worker.process")
    # Python warns of NumPy's BLAS threads, which only wait, and whose library handles forks.
    warnings.filterwarnings("ignore", message=".*multi-threaded.*fork", category=DeprecationWarning)
    woken, wake = socket.socketpair()
    wake.setblocking(False)
    # An engine that ends a job sends SIGTERM to all processes. This one ends with its parent.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # Some handler is needed for the wakeup descriptor to be written at all.
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(wake.fileno())
    _report_ends(connection)  # of children from before an `execv` of `_import`
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    poll.register(woken, select.POLLIN)
    parent = _open_parent(connection)
    if parent is None:
        return False
    poll.register(parent, select.POLLIN)
    joining, die_with_this = False, dies_with_parent(signal.SIGKILL)
    # The other end may close with something unread, or while this end writes.
    with contextlib.suppress(ConnectionError):
        while True:
            for fd, _ in poll.poll():
                if fd == woken.fileno():
                    woken.recv(4096)
                    _report_ends(connection)
                    continue
                if fd == parent:
                    return joining
                data, fds, _, _ = socket.recv_fds(connection, 1 << 16, 3)
                if not data:
                    return joining
                request = unpackb(data)
                if "imports" in request:
                    if imports:
                        _import(request["imports"], connection)
                    continue
                joining = joining or "join" in request
                pid = os.fork()
                if pid == 0:
                    signal.set_wakeup_fd(-1)
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    for mine in (connection, woken, wake):
                        mine.close()
                    os.close(parent)
                    if "join" in request:
                        die_with_this()
                    _be_worker(request, fds, run)
                for each in fds:
                    os.close(each)
                # A descriptor of the process: its number may belong to another one later.
                pidfd = os.pidfd_open(pid)
                socket.send_fds(connection, [packb({"pid": pid})], [pidfd])
                os.close(pidfd)
    return joining


def _open_parent(connection: socket.socket) -> int | None:
    """Return a pidfd of the process at the other end, which has started this one; None if dead."""
    credentials = connection.getsockopt(
        socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")
    )
    pid, *_ = struct.unpack("3i", credentials)
    with contextlib.suppress(ProcessLookupError):
        opened = os.pidfd_open(pid)
        if os.getppid() == pid:  # else the number may be another process's by now
            return opened
        os.close(opened)
    return None


def end_orphans() -> None:
    """Wait for the workers of a dead process to end, and kill those that are late."""
    # A worker that is stopped, or in a C call that holds the GIL, does not notice.

    def kill(*_: object) -> None:
        for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
            os.kill(int(pid), signal.SIGKILL)  # only this process reaps it: the pid is still its
        os._exit(0)

    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGALRM, kill)
    signal.setitimer(signal.ITIMER_REAL, _ORPHANS_END_S)
    with contextlib.suppress(ChildProcessError):  # none is left
        while True:
            os.waitpid(-1, 0)


def _import(names: Sequence[str], connection: socket.socket) -> None:
    """Import modules; if they would spoil forked children, restart this program without them."""
    # A child of a process with threads may find a lock held for ever, and a child of a process that
    # has used an accelerator cannot use it.
    threads = _threads()
    for each in names:
        module, _, name = each.partition(":")
        with contextlib.suppress(Exception):  # a foreign module may raise anything
            found = import_module(module)
            if name:
                getattr(found, name)  # some packages import it only now
    if _threads() > threads or _spoils_children():
        os.set_inheritable(connection.fileno(), True)
        command = [sys.executable, "-m", "pipedream_rt.workers", "--no-imports"]
        os.execv(sys.executable, [*command, "--fork-server-fd", str(connection.fileno())])


def _spoils_children() -> bool:
    """Whether children of this process cannot use the accelerator, because this one has.

    Only a child can tell: with CUDA, having asked whether there is a device spoils it already.
    """
    # The command of a worker imports this file, and starts without torch.
    import torch

    # As above.
    from pipedream_rt.models.tensors import accelerator_here

    kind = accelerator_here()
    if kind is None:
        return False
    module = torch.get_device_module(kind)
    pid = os.fork()
    if pid == 0:
        os._exit(1 if getattr(module, "_is_in_bad_fork", lambda: False)() else 0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) != 0


def _threads() -> int:
    """Return the number of threads of this process, C threads included; 1 if it is unknown."""
    return len(os.listdir("/proc/self/task")) if os.path.isdir("/proc/self/task") else 1


def _report_ends(connection: socket.socket) -> None:
    """Report the exit codes of children that have ended."""
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            code = os.waitstatus_to_exitcode(status)
            connection.send(packb({"ended": pid, "code": code}))


def _be_worker(request: dict[str, Any], fds: Sequence[int], run: RunWorker) -> None:
    """Run the life of a worker in a forked child, and end the process."""
    code = 1
    try:
        os.setsid()  # Ctrl-C at the terminal then reaches the coordinator only
        for fd, number in zip(fds[1:], (1, 2)):
            if fd != number:
                os.dup2(fd, number)
                os.close(fd)
        os.environ.update(request["set"])
        for variable in request["unset"]:
            os.environ.pop(variable, None)
        os.environ["LOCAL_RANK"] = str(request["number"])
        if request["cwd"] is not None:
            os.chdir(request["cwd"])
        name = request["name"]
        ctypes.CDLL(None).prctl(_SET_NAME, name.encode()[:15], 0, 0, 0)
        random.seed()  # else all children draw the same numbers
        np.random.seed()
        code = run(fds[0], name, request["threads"], request.get("join"))
    except BaseException:  # the top of a process
        traceback.print_exc()
    finally:
        os._exit(code)
