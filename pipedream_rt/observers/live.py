"""The page of a run while it goes on, served from the folder that the run is recorded in.

The server is a process of its own (`pipedream-rt watch --web`): the run does nothing for it but
write its record. Nothing that the page does changes the run.
"""

from __future__ import annotations

import json
import secrets
import threading
from collections.abc import Callable
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from pipedream_rt.errors import ConfigError
from pipedream_rt.observers.events import Begun, Ended, packed
from pipedream_rt.observers.folder import Following, trace_in
from pipedream_rt.observers.page.panels import Panel, panels, title_of, workers_panel
from pipedream_rt.observers.page.render import inside_of, page_of
from pipedream_rt.observers.record import RunRecord

EVERY_S = 1.0
"""Seconds between two looks at the folder."""

_MOST_CLIENTS = 32
_PATIENCE_S = 15.0

Workers = Callable[[Begun], list[dict[str, Any]] | None]
"""Returns what the workers of a run do at the moment, if its script runs on this machine."""


class LivePage:
    """The server of the page of a run.

    Args:
        following: The reader of the run's folder.
        host: The address to listen at.
        port: The port; 0 for a free one.
        workers: Tells what the workers do.
        token: What an address must have to be answered; None to make one.

    Attributes:
        address: The address of the page, with its token.

    Raises:
        ConfigError: The port cannot be listened at.
    """

    def __init__(
        self,
        following: Following,
        host: str = "127.0.0.1",
        port: int = 0,
        workers: Workers = lambda begun: None,
        token: str | None = None,
    ) -> None:
        """Listen; `run` answers."""
        self._following = following
        self._workers = workers
        self._record = RunRecord()
        self._token = token or secrets.token_urlsafe(16)
        self._changed = threading.Condition()
        self._panels: list[Panel] = []
        self._version = 0
        self._over = False
        self._clients = 0
        try:
            self._server = _Server((host, port), self._handler())
        except OSError as error:
            raise ConfigError(
                f"the page cannot be served at {host}:{port}: {error.strerror or error}"
            ) from error
        port = self._server.server_port
        name = f"[{host}]" if ":" in host else host
        self.address = f"http://{name}:{port}/?token={self._token}"
        self._look()
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.2,), name="live-page"
        )
        self._thread.start()

    def run(self, stop: threading.Event) -> None:
        """Follow the run until an event is set; what comes after its end is followed too."""
        while not stop.wait(EVERY_S):
            self._look()

    def close(self) -> None:
        """Stop answering. Idempotent."""
        with self._changed:
            self._over = True
            self._changed.notify_all()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
        self._following.close()

    def _look(self) -> None:
        """Read what is new, and make the panels again."""
        record = self._record
        for event in self._following.new():
            record(event)
            if isinstance(event, Ended):
                record.trace = trace_in(self._following.folder)
        found = panels(record, live=record.ended is None)
        if record.begun is not None and record.may_run and (now := self._workers(record.begun)):
            found.insert(1, workers_panel(now))
        with self._changed:
            if found != self._panels:
                self._panels = found
                self._version += 1
                self._changed.notify_all()

    # -- what clients get -----------------------------------------------------------------------

    def page(self) -> bytes:
        """Return the whole page."""
        with self._changed:
            found = self._panels
        return page_of(title_of(self._record), found, live=True).encode()

    def wait_for_news(self, seen: int) -> tuple[int, list[Panel]] | None:
        """Wait until there are other panels than those of a version; None at the end.

        After some seconds without news, the same panels are returned again.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._over or self._version != seen, _PATIENCE_S)
            return None if self._over else (self._version, self._panels)

    def _enter(self) -> bool:
        """Count a client that stays; return whether there may be another one."""
        with self._changed:
            if self._clients == _MOST_CLIENTS:
                return False
            self._clients += 1
            return True

    def _leave(self) -> None:
        """Count a client that has gone."""
        with self._changed:
            self._clients -= 1

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        """Return the class that answers requests to this page."""
        live = self

        class Handler(BaseHTTPRequestHandler):
            """Answers one request."""

            timeout = 2 * _PATIENCE_S

            def do_GET(self) -> None:
                """Answer; what has no token is told nothing."""
                parts = urlsplit(self.path)
                given = parse_qs(parts.query).get("token", [""])[0]
                if not secrets.compare_digest(given.encode(), live._token.encode()):
                    self._answer(HTTPStatus.FORBIDDEN, b"the token is missing or wrong\n")
                elif parts.path == "/":
                    self._answer(HTTPStatus.OK, live.page(), "text/html; charset=utf-8")
                elif parts.path == "/events":
                    self._stream(self._send_panels)
                elif parts.path == "/record":
                    self._stream(self._send_record)
                else:
                    self._answer(HTTPStatus.NOT_FOUND, b"there is no such page\n")

            def _answer(
                self, status: HTTPStatus, body: bytes, kind: str = "text/plain; charset=utf-8"
            ) -> None:
                """Send an answer as a whole."""
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                self.send_header("Cache-Control", "no-store")
                self.send_header("Referrer-Policy", "no-referrer")
                self.send_header("X-Content-Type-Options", "nosniff")
                self.end_headers()
                self.wfile.write(body)

            def _stream(self, send: Callable[[], None]) -> None:
                """Send what comes, until the client or the page goes."""
                if not live._enter():
                    self._answer(HTTPStatus.SERVICE_UNAVAILABLE, b"too many are looking\n")
                    return
                try:
                    self.send_response(HTTPStatus.OK)
                    self.send_header("Content-Type", "text/event-stream")
                    self.send_header("Cache-Control", "no-store")
                    self.end_headers()
                    with suppress(OSError):
                        send()
                finally:
                    live._leave()

            def _send_panels(self) -> None:
                """Send the panels that have changed, as server-sent events."""
                seen, sent = -1, dict[str, dict[str, Any]]()
                while (news := live.wait_for_news(seen)) is not None:
                    seen, found = news
                    html = {panel.name: _as_json(panel) for panel in found}
                    changed = {name: p for name, p in html.items() if sent.get(name) != p}
                    if not changed and html.keys() == sent.keys():
                        self.wfile.write(b": nothing new\n\n")
                        continue
                    sent = html
                    data = {
                        "title": title_of(live._record),
                        "names": list(html),
                        "changed": changed,
                    }
                    self.wfile.write(b"event: panels\ndata: %s\n\n" % json.dumps(data).encode())

            def _send_record(self) -> None:
                """Send the events of the run, a line of JSON each, from the first on.

                An empty line follows those that are there.
                """
                following, seen = Following(live._following.folder), -1
                try:
                    while True:
                        for event in following.new():
                            self.wfile.write(json.dumps(packed(event)).encode() + b"\n")
                        self.wfile.write(b"\n")  # that is all for now
                        if (news := live.wait_for_news(seen)) is None:
                            return
                        seen = news[0]
                finally:
                    following.close()

            def log_message(self, format: str, *args: Any) -> None:
                """Say nothing of requests, whose addresses have the token."""

        return Handler


class _Server(ThreadingHTTPServer):
    """Answers each request in a thread, which `server_close` joins."""

    daemon_threads = False
    block_on_close = True


def _as_json(panel: Panel) -> dict[str, Any]:
    """Return a panel as the script of the page takes it."""
    return {"wide": panel.wide, "html": str(inside_of(panel))}
