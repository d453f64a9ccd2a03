"""Stops a library at its call of ``listen`` until a packet filter stands on the socket.

TensorPipe listens and accepts in one go, on a thread of its own, so a filter that is put on its
port afterwards comes a millisecond too late. The kernel can stop a thread at a system call and ask
another thread first (``seccomp`` with user notification, Linux 5.5): `run` starts the library on a
thread for which the kernel asks at every ``listen``. Where the kernel does not offer that, the
library listens unfiltered for that millisecond.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import platform
import select
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

from pipedream_rt.telling import log_of
from pipedream_rt.transport.fence import IF_EQUAL, LOAD_WORD, RETURN, for_kernel

_log = log_of(__name__)


class _Machine(NamedTuple):
    """``AUDIT_ARCH`` and the numbers of system calls on one kind of processor."""

    architecture: int
    listen: int
    seccomp: int


_MACHINES = {
    "x86_64": _Machine(0xC000003E, listen=50, seccomp=317),
    "aarch64": _Machine(0xC00000B7, listen=201, seccomp=277),
}

_PR_SET_NO_NEW_PRIVS = 38
_SET_MODE_FILTER, _NEW_LISTENER = 1, 1 << 3
_NUMBER, _ARCHITECTURE = 0, 4  # offsets in `struct seccomp_data`, on which the filter runs
_ALLOW, _ASK = 0x7FFF0000, 0x7FC00000
_RECEIVE, _ANSWER = 0xC0502100, 0xC0182101  # SECCOMP_IOCTL_NOTIF_RECV and _SEND
_QUESTION = struct.Struct("@QIIiIQ6Q")  # id, thread, flags; then the call: number, ..., arguments
_REPLY = struct.Struct("@QqiI")  # id, value, error, flags
_GO_ON = 1  # the flag that lets the call go on as it was made

_libc = ctypes.CDLL(None, use_errno=True)


def _ask_at_listen() -> int:
    """Have the kernel ask whenever this thread, or one that it starts, calls ``listen``."""
    machine = _MACHINES.get(platform.machine())
    if machine is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    program = [
        # Numbers of system calls mean another call in another architecture.
        (LOAD_WORD, 0, 0, _ARCHITECTURE),
        (IF_EQUAL, 0, 3, machine.architecture),
        (LOAD_WORD, 0, 0, _NUMBER),
        (IF_EQUAL, 0, 1, machine.listen),
        (RETURN, 0, 0, _ASK),
        (RETURN, 0, 0, _ALLOW),
    ]
    # Without root, only a thread that can gain no rights by what it executes may have a filter.
    if _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "no_new_privs")
    with for_kernel(program) as about:
        fd = _libc.syscall(machine.seccomp, _SET_MODE_FILTER, _NEW_LISTENER, about)
    if fd < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return int(fd)


def run(body: Callable[[], None], may_listen: Callable[[int], None]) -> None:
    """Run ``body`` on a new thread; call ``may_listen(fd)`` here before each socket listens.

    An error of either is raised here.
    """
    # The filter stays on a thread until it ends, and on those that it starts: so on a new thread.
    errors: list[BaseException] = []
    asks: list[int] = []
    ready, (ours, theirs) = threading.Event(), os.pipe()

    def on_thread() -> None:
        try:
            try:
                asks.append(_ask_at_listen())
            except OSError as error:
                _log.info("a library that listens cannot be held up here: %s", error)
            finally:
                ready.set()
            body()
        except BaseException as error:  # raised where `run` was called
            errors.append(error)
        finally:
            os.close(theirs)

    thread = threading.Thread(target=on_thread, name="listening", daemon=True)
    thread.start()
    ready.wait()  # no deadline: two system calls
    try:
        poll = select.poll()
        poll.register(ours, select.POLLIN)
        for fd in asks:
            poll.register(fd, select.POLLIN)
        while True:
            found = [fd for fd, _ in poll.poll()]  # no deadline: `body` has one
            for fd in set(found) & set(asks):
                _answer(fd, may_listen, errors)
            if ours in found:
                break
        thread.join()
    finally:
        os.close(ours)
        for fd in asks:
            os.close(fd)
    if errors:
        raise errors[0]


def _answer(fd: int, may_listen: Callable[[int], None], errors: list[BaseException]) -> None:
    """Show the socket of a stopped thread to ``may_listen``, then let the thread go on."""
    question = bytearray(_QUESTION.size)
    try:
        fcntl.ioctl(fd, _RECEIVE, question)
    except OSError:
        return  # a signal interrupted the thread, which calls `listen` again
    identity, thread, *_, wanted = _QUESTION.unpack(question)[:7]
    try:
        # A process that such a thread has started asks too; its descriptors are not ours.
        if os.path.exists(f"/proc/self/task/{thread}"):
            may_listen(wanted)
    except BaseException as error:  # raised where `run` was called
        errors.append(error)
    with suppress(OSError):
        fcntl.ioctl(fd, _ANSWER, bytearray(_REPLY.pack(identity, 0, 0, _GO_ON)))
