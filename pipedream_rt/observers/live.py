"""The page of a run while it goes on, served from the folder that the run is recorded in.

The server is a process of its own (`pipedream-rt watch --web`): all that the run does for it is to
write its record, and the page cannot change the run.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

from pipedream_rt.errors import ConfigError
from pipedream_rt.observers.folder import Following, newest_trace_in, trace_in
from pipedream_rt.observers.page.blocks import Panel
from pipedream_rt.observers.page.panels import panels, title_of, workers_panel
from pipedream_rt.observers.page.render import inside_of, page_of
from pipedream_rt.observers.page_server import PATIENCE_S, Server
from pipedream_rt.observers.run_record import RunRecord
from pipedream_rt.tracing.events import Begun, packed
from pipedream_rt.tracing.trace import Trace

EVERY_S = 1.0
"""Seconds between two looks at the folder."""

_MOST_CLIENTS = 32

Workers = Callable[[Begun], list[dict[str, Any]] | None]
"""Returns what the workers of a run do now; None if its script does not run on this machine."""


class LivePage:
    """The server of the page of a run. Its address has the token that each request must show."""

    def __init__(
        self,
        following: Following,
        host: str = "127.0.0.1",
        port: int = 0,
        workers: Workers = lambda begun: None,
        token: str | None = None,
    ) -> None:
        self._following = following
        self._workers = workers
        self._record = RunRecord()
        self._changed = threading.Condition()
        self._panels: list[Panel] = []
        self._version = 0
        self._over = False
        self._clients = 0
        token = token or secrets.token_urlsafe(16)
        try:
            self._server = Server((host, port), token, self)
        except OSError as error:
            raise ConfigError(
                f"the page cannot be served at {host}:{port}: {error.strerror or error}"
            ) from error
        port = self._server.server_port
        name = f"[{host}]" if ":" in host else host
        self.address = f"http://{name}:{port}/?token={token}"
        self._thread = threading.Thread(
            # The argument: seconds between two looks for connections whose time is over.
            target=self._server.serve_forever,
            args=(0.2,),
            name="live-page",
        )
        self._thread.start()

    def run(self, stop: threading.Event) -> None:
        """Follow the run until ``stop`` is set, also past its end: a script may go on with it."""
        while not stop.wait(EVERY_S):
            with self._changed:
                if self._clients:  # nothing is read or drawn while nobody looks
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
        """Read what is new, and make the panels anew. The caller holds the lock."""
        record = self._record
        for event in self._following.new():
            record(event)
        if record.ended is None or record.trace is None:
            record.trace = self._trace()
        found = panels(record, live=record.ended is None)
        if record.begun is not None and record.may_run and (now := self._workers(record.begun)):
            found.insert(1, workers_panel(now))  # below the head
        if found != self._panels:
            self._panels = found
            self._version += 1
            self._changed.notify_all()

    def _trace(self) -> Trace | None:
        """Return the trace of a run that has ended, else its last moments."""
        folder, record = self._following.folder, self._record
        if record.begun is None:
            return None
        return trace_in(folder) or newest_trace_in(folder, record.begun)

    # -- what clients get -----------------------------------------------------------------------

    def page(self) -> bytes:
        with self._changed:
            self._look()
            return page_of(title_of(self._record), self._panels, live=True).encode(
                errors="backslashreplace"
            )

    def news(self) -> Iterator[dict[str, Any] | None]:
        """Yield the panels that have changed, and the names of all; None as a heartbeat."""
        seen, sent = -1, dict[str, dict[str, Any]]()
        while (found := self._wait_for_news(seen)) is not None:
            seen, title, made = found
            html = {panel.name: _as_json(panel) for panel in made}
            changed = {name: panel for name, panel in html.items() if sent.get(name) != panel}
            if changed or html.keys() != sent.keys():
                yield {"title": title, "names": list(html), "changed": changed}
            else:
                yield None
            sent = html

    def record(self) -> Iterator[dict[str, Any] | None]:
        """Yield the events of the run from the first on; None when there are no more for now."""
        seen = -1
        with closing(Following(self._following.folder)) as following:
            while True:
                yield from map(packed, following.new())
                yield None
                if (found := self._wait_for_news(seen)) is None:
                    return
                seen = found[0]

    def _wait_for_news(self, seen: int) -> tuple[int, str, list[Panel]] | None:
        """Wait for panels of another version than ``seen``; None when the page is closed.

        After `PATIENCE_S` without news, the same panels are returned again.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._over or self._version != seen, PATIENCE_S)
            if self._over:
                return None
            return self._version, title_of(self._record), self._panels

    def enter(self) -> bool:
        """Count a client in that stays; return False, and count nothing, if there are too many."""
        with self._changed:
            if self._clients == _MOST_CLIENTS:
                return False
            self._clients += 1
            return True

    def leave(self) -> None:
        """Count a client out."""
        with self._changed:
            self._clients -= 1


def _as_json(panel: Panel) -> dict[str, Any]:
    """Return a panel in the form that the script of the page takes."""
    return {"wide": panel.wide, "html": str(inside_of(panel))}
