"""Links: the connections between the members of a group, over which everything of a job travels.

A link is a stream socket whose two ends have found each other to be members. The thread that waits
for messages reads the links itself while it waits (`Links.wait`). While it computes, the links' own
thread reads them. That thread also writes what a socket did not take at once.
"""

from __future__ import annotations

import functools
import select
import ssl
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TypeAlias

from torch import Tensor

from pipedream_rt.errors import TransportError
from pipedream_rt.lifecycle import Lifecycle, name_this_thread
from pipedream_rt.telling import log_of
from pipedream_rt.transport.link import Connection, Frame, Link
from pipedream_rt.transport.sharing import SharedEnd
from pipedream_rt.transport.tls import problem_of_tls
from pipedream_rt.transport.wakeup import Alarm

_LONGEST_S = 86_400.0
"""Longest wait of one poll, in seconds. epoll takes milliseconds as a C integer (24 days)."""

_LAST_S = 5.0
"""Seconds for the links' own thread, and for the waiter, to end what they are doing."""


Connections: TypeAlias = dict[int, Connection]
"""By rank of the member at the other end."""

_log = log_of(__name__)


class Links:
    """The links of one member to all others, and a thread that reads and writes them.

    One other thread, the waiter, may wait for messages with `wait` and `wake` (see `Waiter`): it
    reads the links itself, which saves a switch of threads for each message. The kernel wakes one
    of the two (``EPOLLEXCLUSIVE``): the waiter if it waits, because its epoll is registered first,
    else the thread. Where it wakes both, one of them finds nothing to read.
    """

    def __init__(
        self,
        connections: Connections,
        receive: Callable[[int, Frame], None],
        lost: Callable[[int, str], None],
        shares_memory: bool = False,
    ) -> None:
        self._receive = receive
        self._lost = lost
        self._links = {
            rank: Link(each, SharedEnd(shares_memory) if each.carries_descriptors else None)
            for rank, each in connections.items()
        }
        self._rank_of = {link.fileno(): rank for rank, link in self._links.items()}
        self._ended: dict[int, str] = {}  # by rank, why the link has ended
        self._unsent: deque[int] = deque()  # ranks for the thread to write to
        # Ranks for the thread to read on from. At first all: with the words by which two members
        # meet, the first frames may have come already, and have been read from the socket.
        self._unread = deque(self._links)
        self._life = Lifecycle("the links")
        self._waits = threading.Lock()  # held in `wait`, so that `close` waits for its end
        self._waiter: int | None = None  # the thread that is in `wait`
        self._is_reading = False  # whether it reads there, and need not be woken by itself
        self._called = False  # whether `wake` was called since `wait` began
        self._is_left = False  # whether `wait` is to close what `close` could not
        self._waiter_alarm, self._thread_alarm = Alarm(), Alarm()
        self._of_waiter, self._of_thread = select.epoll(), select.epoll()
        self._writable = select.epoll()
        for events, alarm in (
            (self._of_waiter, self._waiter_alarm),
            (self._of_thread, self._thread_alarm),
        ):
            for link in self._links.values():
                events.register(link, select.EPOLLIN | select.EPOLLEXCLUSIVE)
            events.register(alarm, select.EPOLLIN)
        # An epoll of its own: what is registered with EPOLLEXCLUSIVE cannot be modified.
        self._of_thread.register(self._writable, select.EPOLLIN)
        # A daemon: the interpreter joins other threads before it closes a forgotten pipeline.
        self._thread = threading.Thread(target=self._attend, daemon=True)
        self._thread.start()

    def send(
        self,
        rank: int,
        kind: int,
        data: bytes,
        tensors: Sequence[Tensor] = (),
        passing: bool = False,
    ) -> str | None:
        """Send a frame to a member; return why it cannot be sent, or None. Never blocks."""
        link = self._links.get(rank)
        if link is None or rank in self._ended:
            return self._ended.get(rank, "there is no link to it")
        try:
            if not link.send(kind, data, tensors, passing):
                self._unsent.append(rank)
                self._thread_alarm.ring()
        except OSError as error:  # the thread that reads meets it too, and ends the link
            return text_of(error)
        return None

    # -- the waiter -----------------------------------------------------------------------------

    def wait(self, seconds: float | None) -> None:
        """Receive what comes, in this thread, until `wake`, `close` or the end of the time."""
        self._waiter = threading.get_ident()
        try:
            with self._waits:
                if not self._life.is_open:
                    raise TransportError("the links were closed, so no message can come any more")
                self._called = False
                self._receive_until_called(seconds)
        finally:
            self._waiter = None
            if self._is_left:
                self._release()

    def _receive_until_called(self, seconds: float | None) -> None:
        found = self._of_waiter.poll(None if seconds is None else min(seconds, _LONGEST_S))
        self._is_reading = True
        try:
            for ready, _ in found:
                if ready == self._waiter_alarm.fileno():
                    self._waiter_alarm.quiet()
                    continue
                rank = self._rank_of[ready]
                while not self._read(rank):
                    if self._called:  # what was waited for is here; the thread reads the rest
                        self._unread.append(rank)
                        self._thread_alarm.ring()
                        break
        finally:
            self._is_reading = False

    def wake(self) -> None:
        self._called = True  # for a waiter that is reading
        if not self._is_reading or threading.get_ident() != self._waiter:
            self._waiter_alarm.ring()

    # -- the thread -----------------------------------------------------------------------------

    def _attend(self) -> None:
        """Read and write until `close` is called. The links' own thread runs this."""
        name_this_thread("links")
        while self._life.is_open:
            # No deadline: `close` wakes it, and a peer that is gone makes its link readable.
            for ready, _ in self._of_thread.poll(0 if self._unread else None):
                if ready == self._thread_alarm.fileno():
                    self._thread_alarm.quiet()
                elif ready in self._rank_of:
                    self._read(self._rank_of[ready])
                else:
                    for writable, _ in self._writable.poll(0):
                        self._flush(self._rank_of[writable])
            while self._unsent:
                self._flush(self._unsent.popleft())
            # One read for each per round, so that a busy link holds up no other.
            for _ in range(len(self._unread)):
                rank = self._unread.popleft()
                if not self._read(rank):
                    self._unread.append(rank)

    def _read(self, rank: int) -> bool:
        """Read from a link once; return whether nothing is left. The waiter and the thread do."""
        link = self._links[rank]
        with link.reading:
            if rank in self._ended:
                return True
            try:
                return link.receive(functools.partial(self._receive, rank))
            except Exception as error:  # of any kind: it ends this link and no other
                reason = self._end_of(rank, error)
        if self._life.is_open:
            self._lost(rank, reason)
        return True

    def _flush(self, rank: int) -> None:
        """Write to a link what it takes now; poll it for the rest."""
        link = self._links[rank]
        with link.reading:  # else the thread that reads could close it in the middle
            if rank in self._ended:
                return
            try:
                is_done = link.flush()
            except OSError:
                is_done = True  # the thread that reads meets it too, and ends the link
            _forget(self._writable, link)
            if not is_done:
                self._writable.register(link, select.EPOLLOUT)

    def _end_of(self, rank: int, error: Exception) -> str:
        """End a link that this thread is reading; return the reason as text."""
        if not isinstance(error, OSError | TransportError):
            _log.exception("the link to member %d ends by an error of its own", rank)
        self._ended[rank] = reason = text_of(error)
        link = self._links[rank]
        for events in (self._of_waiter, self._of_thread, self._writable):
            # Closing unregisters nothing while a forked child has the socket too.
            _forget(events, link)
        link.close()
        return reason

    def close(self) -> None:
        """Close all links, and end a `wait`. Idempotent. Not on the links' own thread."""
        if not self._life.begin_closing():
            return
        self._thread_alarm.ring()
        self._thread.join(_LAST_S)
        # A signal handler may close while it interrupts a thread that sends, and so holds the lock
        # that the links' thread waits for.
        if self._thread.is_alive():
            _log.error("the thread of the links does not end, and is left behind")
            return
        self.wake()
        if self._waiter == threading.get_ident():
            # Called by what it receives, or by a signal handler, perhaps while it holds a lock.
            self._is_left = True
        elif self._waits.acquire(timeout=_LAST_S):
            self._waits.release()  # who comes later finds that they were closed
            self._release()
        else:
            _log.error("the thread that waits for messages does not end, and the links stay open")

    def _release(self) -> None:
        """Close what was opened, once no thread reads any more."""
        self._is_left = False
        for link in self._links.values():
            with link.reading:
                link.close()
        for opened in (
            self._of_waiter,
            self._of_thread,
            self._writable,
            self._waiter_alarm,
            self._thread_alarm,
        ):
            opened.close()
        self._life.close()


def _forget(events: select.epoll, link: Link) -> None:
    """Unregister a link, if it is registered."""
    with suppress(OSError, ValueError):
        events.unregister(link)


def text_of(error: Exception) -> str:
    """Return the text of an error; that of an OSError without its number, in lower case."""
    if isinstance(error, ssl.SSLError):
        return problem_of_tls(error)
    reason = getattr(error, "strerror", None)
    # The first letter only: the rest may have names of variables, files or classes in it.
    return f"{reason[0].lower()}{reason[1:]}" if reason else str(error)
