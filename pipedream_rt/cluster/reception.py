"""Where others connect: who is at the other end, and how many may be there at once.

Anybody can connect to a port, so connections that have not shown that they are of this job are
bounded in number and in time. By TCP they have to do the TLS handshake with the certificate of the
job; at a Unix socket, whose folder this user alone can enter, the kernel says whose they are.
"""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import socket
import time
from collections.abc import Awaitable, Callable, Sequence

from pipedream_rt.cluster.addresses import joined
from pipedream_rt.cluster.identity import Secret, is_same_user
from pipedream_rt.cluster.records import Record
from pipedream_rt.cluster.stream import Stream
from pipedream_rt.errors import TransportError
from pipedream_rt.telling import log_of
from pipedream_rt.transport.tcp import prepare

_log = log_of(__name__)

_FIRST_RECORD_S = 20.0
"""Seconds for a connection to shake hands and to send its first record."""

_MOST = 128
"""Limit of the connections that wait, where descriptors abound."""

_FEWEST = 4
"""The limit where descriptors are scarce."""

_PAUSE_S = 0.2
"""Seconds to wait before others are accepted, if there is no descriptor for them."""


def most_strangers() -> int:
    """Return how many connections may wait: half of the descriptors that are free."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = max(0, limit - len(os.listdir("/proc/self/fd")))
    return max(_FEWEST, min(_MOST, free // 2))


class Reception:
    """Accepts connections in the running event loop, and hands over those of this job.

    ``receive`` is called with a connection and the first record on it, and owns it from then on.
    What is dropped is logged at ``level``.
    """

    def __init__(
        self,
        secret: Secret,
        listeners: Sequence[socket.socket],
        receive: Callable[[Stream, Record], Awaitable[None]],
        level: int,
    ) -> None:
        self._secret = secret
        self._listeners = listeners
        self._receive = receive
        self._level = level
        self._most = most_strangers()
        self._strangers: dict[asyncio.Task[None], Stream] = {}  # oldest first
        self._tasks: set[asyncio.Task[None]] = set()
        # By text: when it was logged last (monotonic, seconds), how often it was left out since.
        self._logged: dict[str, tuple[float, int]] = {}
        self._loop = asyncio.get_running_loop()
        for listener in listeners:
            listener.setblocking(False)
        self._listen()

    def _listen(self) -> None:
        for listener in self._listeners:
            self._loop.add_reader(listener.fileno(), self._accept, listener)

    def _pause(self) -> None:
        for listener in self._listeners:
            self._loop.remove_reader(listener.fileno())

    def _accept(self, listener: socket.socket) -> None:
        """Accept a connection, and drop the oldest stranger where there are too many."""
        try:
            connection, _ = listener.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE) and not self._drop_oldest():
                self.note("nobody can be accepted: %s; allow more open files, as by "
                          "`ulimit -n 4096`", (error.strerror or "").lower())  # fmt: skip
                self._pause()  # the listener stays readable: without it, a busy loop
                self._loop.call_later(_PAUSE_S, self._listen_again)
            return  # or whoever connected is gone again
        stream = Stream(connection, "a process of this machine")
        task = self._loop.create_task(self._arrive(stream))
        self._tasks.add(task)
        self._strangers[task] = stream
        task.add_done_callback(self._tasks.discard)
        if len(self._strangers) > self._most:
            self._drop_oldest()

    def _listen_again(self) -> None:
        if self._listeners:
            self._listen()

    def _drop_oldest(self) -> bool:
        """Drop the oldest connection that has not shown who it is; return whether there was one."""
        oldest = next(iter(self._strangers), None)
        if oldest is not None:
            self._drop(oldest)
        return oldest is not None

    def _drop(self, task: asyncio.Task[None]) -> None:
        """Drop a connection that has not shown who it is."""
        self._strangers.pop(task).close()  # here: its task may not have begun
        task.cancel()

    async def _arrive(self, stream: Stream) -> None:
        """Read the first record of a connection, and hand both over."""
        task = asyncio.current_task()
        try:
            first = await asyncio.wait_for(self._first(stream), _FIRST_RECORD_S)
            if task not in self._strangers:  # dropped as it came; up to Python 3.11, `wait_for`
                return  # loses a `cancel` then
        except Exception as error:  # of any kind: it ends this connection and no other
            why = "it said nothing in time" if isinstance(error, asyncio.TimeoutError) else error
            self.note("a connection that is no worker was dropped: %s", why)
            stream.close()
            return
        except asyncio.CancelledError:  # others have come, or nobody is received any more
            stream.close()
            return
        finally:
            self._strangers.pop(task, None)  # type: ignore[arg-type]
        await self._receive(stream, first)

    async def _first(self, stream: Stream) -> Record:
        """Check that a connection is of this job, and read its first record."""
        connection = stream.socket
        if connection.family == socket.AF_UNIX:
            if not is_same_user(connection):
                raise TransportError(f"{stream.peer} is of another user")
        else:
            stream.peer = f"the process at {joined(*connection.getpeername()[:2])}"
            prepare(connection)
            await stream.encrypt(self._secret.tls(called=True), called=True)
        return await stream.read()

    def note(self, text: str, *arguments: object) -> None:
        """Log what a stranger did; each text once a second at most, as strangers may be many."""
        now = time.monotonic()
        logged_at, left_out = self._logged.get(text, (-1.0, 0))
        if now - logged_at < 1:
            self._logged[text] = (logged_at, left_out + 1)
            return
        more = f" (and {left_out} others)" if left_out else ""
        _log.log(self._level, text + more, *arguments)
        self._logged[text] = (now, 0)

    async def close(self) -> None:
        """Accept nobody any more, and drop whoever has not shown who it is. Idempotent.

        The listeners stay open, and belong to the caller.
        """
        self._pause()
        self._listeners = ()
        strangers = list(self._strangers)
        for task in strangers:
            self._drop(task)
        await asyncio.gather(*strangers, return_exceptions=True)
