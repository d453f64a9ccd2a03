"""The servers of the live page and of Prometheus: how strangers are bounded and turned away."""

from __future__ import annotations

import json
import math
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BufferedIOBase
from typing import Any, Protocol, cast
from urllib.parse import parse_qs

PATIENCE_S = 15.0
"""Seconds without news after which a client gets a heartbeat. Also the seconds in which it must
show the token or, where there is none, get an answer."""

_ROOM_S = 1.0
"""Seconds for the thread of a connection to end, once that was ended for another one."""

_LARGEST = 1 << 16
"""Bytes of a request that are read."""


class Answers(Protocol):
    """Where answers come from. Each request has a thread, which calls these methods."""

    def page(self) -> bytes:
        """Return the page as HTML."""

    def news(self) -> Iterator[dict[str, Any] | None]:
        """Yield what has changed, until the page is closed; None as a heartbeat."""

    def record(self) -> Iterator[dict[str, Any] | None]:
        """Yield the events of the run, until the page is closed; None where that is all for now."""

    def enter(self) -> bool:
        """Count a client in that stays; return False, and count nothing, if there are too many."""

    def leave(self) -> None:
        """Count a client out."""


class BoundedServer(ThreadingHTTPServer):
    """Answers each request in a thread; strangers are bounded in number, time and bytes.

    Where there are too many connections, the one whose time is over first is ended for a new one.

    Attributes:
        ends_at: By connection, the monotonic time at which it ends; infinite for one that may stay.
    """

    block_on_close = True
    request_queue_size = 128  # else who comes in a crowd has to try again, after a second
    most = 64
    """Connections that may be open at once."""

    def __init__(
        self, address: tuple[str, int], handler: Callable[..., BaseHTTPRequestHandler]
    ) -> None:
        self.ends_at: dict[socket.socket, float] = {}
        self._room = threading.Semaphore(self.most)
        host, port = address
        found = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        self.address_family = found[0][0]
        super().__init__(address, handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Give a connection its time, and answer in a thread."""
        if not self._room.acquire(blocking=False):
            self._end_first()
            if not self._room.acquire(timeout=_ROOM_S):
                self.shutdown_request(request)
                return
        self.ends_at[request] = time.monotonic() + PATIENCE_S
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection."""
        if self.ends_at.pop(request, None) is not None:
            self._room.release()
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print nothing about a broken connection: strangers would fill the terminal with it."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)

    def server_close(self) -> None:
        """Stop listening, and end all connections."""
        # Their threads are joined, and one that waits for a stranger's next byte might never end.
        self._end(at=math.inf)
        super().server_close()

    def service_actions(self) -> None:
        """End connections whose time is over; `serve_forever` calls this."""
        self._end(at=time.monotonic())

    def _end(self, at: float) -> None:
        """End the connections whose time is over."""
        for connection, over in self.ends_at.copy().items():
            if over <= at:
                _hang_up(connection)

    def _end_first(self) -> None:
        """End the connection whose time is over first, unless all may stay."""
        times = self.ends_at.copy()
        first = min(times, key=times.__getitem__, default=None)
        if first is not None and times[first] < math.inf:
            _hang_up(first)


def _hang_up(connection: socket.socket) -> None:
    """Have the thread of a connection find it closed."""
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


class _Bounded:
    """A file of which so many bytes are read at most; behind them it is at its end."""

    def __init__(self, file: BufferedIOBase, most: int) -> None:
        self._file, self._left = file, most
        self.close = file.close

    def readline(self, most: int = -1) -> bytes:
        line = self._file.readline(min(self._left, most) if most >= 0 else self._left)
        self._left -= len(line)
        return line


class BoundedHandler(BaseHTTPRequestHandler):
    """Answers one request, of which only the head is read."""

    timeout = 2 * PATIENCE_S  # also ends a write to a client that reads nothing

    def setup(self) -> None:
        super().setup()
        self.rfile = cast(Any, _Bounded(self.rfile, _LARGEST))

    def do_GET(self) -> None:
        self.get()

    def get(self) -> None:
        raise NotImplementedError

    def answer(
        self, status: HTTPStatus, body: bytes, kind: str = "text/plain; charset=utf-8"
    ) -> None:
        """Send an answer as a whole."""
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("Referrer-Policy", "no-referrer")  # an address may have a token in it
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Log no requests: their addresses may have a token."""


class Server(BoundedServer):
    """The server of the live page, whose threads `server_close` joins."""

    daemon_threads = False

    def __init__(self, address: tuple[str, int], token: str, answers: Answers) -> None:
        self.token = token.encode()
        self.answers = answers
        super().__init__(address, _Handler)


class _Handler(BoundedHandler):
    """Answers one request of the live page."""

    server: Server

    def get(self) -> None:
        """Answer; without the token, nothing is told."""
        path, _, query = self.path.partition("?")
        shown = parse_qs(query).get("token", [""])[0]
        # Bytes: of texts, `compare_digest` takes ASCII alone.
        if not secrets.compare_digest(shown.encode(), self.server.token):
            self.answer(HTTPStatus.FORBIDDEN, b"the token is missing or wrong\n")
            return
        self.server.ends_at[self.connection] = math.inf
        if path == "/":
            self.answer(HTTPStatus.OK, self.server.answers.page(), "text/html; charset=utf-8")
        elif path == "/events":
            self._stream(self._send_news)
        elif path == "/record":
            self._stream(self._send_record)
        else:
            self.answer(HTTPStatus.NOT_FOUND, b"there is no such page\n")

    def _stream(self, send: Callable[[], None]) -> None:
        """Send what comes, until the client leaves or the page is closed."""
        if not self.server.answers.enter():
            self.answer(HTTPStatus.SERVICE_UNAVAILABLE, b"too many are looking\n")
            return
        try:
            self.send_response(HTTPStatus.OK)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            with suppress(OSError):
                send()
        finally:
            self.server.answers.leave()

    def _send_news(self) -> None:
        """Send what has changed on the page, as server-sent events."""
        for news in self.server.answers.news():
            if news is None:
                self.wfile.write(b": nothing new\n\n")
            else:
                self.wfile.write(b"event: panels\ndata: %s\n\n" % json.dumps(news).encode())

    def _send_record(self) -> None:
        """Send the events of the run, a line of JSON each, and an empty line after the last."""
        for event in self.server.answers.record():
            line = b"" if event is None else json.dumps(event).encode()
            self.wfile.write(line + b"\n")
