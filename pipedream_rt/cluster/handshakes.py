"""Connections at the coordinator's door, from accept to hello.

Anybody may connect there, so their number is bounded.
"""

from __future__ import annotations

import errno
import logging
import secrets
import selectors
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TypeAlias

from pipedream_rt.cluster.addresses import joined
from pipedream_rt.cluster.admission import Refusal, process_of, talk_of
from pipedream_rt.cluster.control import Control
from pipedream_rt.cluster.control_records import Record
from pipedream_rt.cluster.keys import NONCE, Handshake, JobKey
from pipedream_rt.cluster.pending_connections import accept, most_strangers
from pipedream_rt.deadline import Deadline
from pipedream_rt.errors import PeerLost, TransportError
from pipedream_rt.schema import printable
from pipedream_rt.transport.tcp import prepare
from pipedream_rt.transport.tls import Tls, wrapped

_log = logging.getLogger(__name__)

_TURN_S = 0.5
"""Seconds after which the deadline is looked at again, whatever comes."""


class Handshakes:
    """Calls every connection with a nonce, and reads the hello that each answers with."""

    def __init__(
        self, key: JobKey, selector: selectors.BaseSelector, tls: Tls | None = None
    ) -> None:
        self._key = key
        self._selector = selector
        self._tls = tls
        self._most = most_strangers()
        # By text: when it was logged last (monotonic, seconds), and how often it was not since.
        self._said: dict[str, tuple[float, int]] = {}
        # Oldest first, each with the nonce of its call.
        self._asked: dict[Control, bytes] = {}

    def __contains__(self, connection: object) -> bool:
        """Whether a connection was called and has not answered yet."""
        return connection in self._asked

    def local(self) -> list[Control]:
        """The connections that a worker here has inherited, and that have not answered yet."""
        return [control for control in self._asked if control.is_local]

    def call_local(self, control: Control) -> None:
        """Call a worker that was started here; its call carries the key of the job."""
        self._call(control, key=self._key.key)
        self._selector.register(control, selectors.EVENT_READ)

    def accept(self, listener: socket.socket) -> None:
        """Accept a connection, call it, and drop the oldest stranger where there are too many."""
        connection = accept(listener, self._drop_oldest)
        if connection is None:
            return
        try:
            host, port = connection.getpeername()[:2]
            here = str(connection.getsockname()[0])
            prepare(connection)
            connection.setblocking(True)
            connection, channel = wrapped(self._tls, connection, calls=False)
            peer = f"the worker at {joined(host, port)}"
            control = Control(connection, peer, here, channel, remote_host=host)
            self._call(control)
        except (OSError, PeerLost) as error:  # whoever connected is gone again
            connection.close()
            # There are too few descriptors, or threads (EAGAIN), to encrypt it.
            if getattr(error, "errno", None) in (errno.EMFILE, errno.ENFILE, errno.EAGAIN):
                self._drop_oldest()
            # `_call` may have noted it before the send failed.
            self._asked = {c: nonce for c, nonce in self._asked.items() if c.fileno() >= 0}
            return
        self._selector.register(control, selectors.EVENT_READ)
        if sum(not control.is_local for control in self._asked) > self._most:
            self._drop_oldest()

    def hear(self, control: Control) -> tuple[Record, Handshake] | None:
        """Return the hello once all of it has come, and leave the connection to the caller."""
        try:
            hello = control.poll()
        except Exception:
            self._forget(control)
            control.close()
            raise
        if hello is None:
            return None
        return hello, talk_of(control, hello, self._forget(control), self._key.key)

    def refuse(
        self, control: Control, talk: Handshake, hello: Record, refusal: Refusal, level: int
    ) -> None:
        """Tell a worker why it cannot become a member, and close its connection."""
        name, process = printable(str(hello.get("name")), 100), process_of(hello)
        self.note(level, "refused worker %r (%s): %s", name, process, refusal.reason)
        with suppress(PeerLost):
            reason = {"reason": refusal.reason, "passing": refusal.passing}
            # A stranger who got a proof could test guesses of the secret against it.
            shown = {"proof": talk.prove_refusal(reason)} if refusal.proven else {}
            control.send({"type": "refused", **reason, **shown})
        control.close()

    def note(self, level: int, text: str, *arguments: object) -> None:
        """Log what a stranger did; each text once a second at most, as strangers may be many."""
        now = time.monotonic()
        said, unsaid = self._said.get(text, (-1.0, 0))
        if now - said < 1:
            self._said[text] = (said, unsaid + 1)
            return
        more = f" (and {unsaid} others)" if unsaid else ""
        _log.log(level, text + more, *arguments)
        self._said[text] = (now, 0)

    def close(self) -> None:
        """Close the connections that have not answered. Idempotent."""
        for control in self._asked:
            control.close()
        self._asked.clear()

    def _call(self, control: Control, **more: bytes) -> None:
        """Send the call with a new nonce, which the proof in the answer must cover."""
        self._asked[control] = nonce = secrets.token_bytes(NONCE)
        control.send({"type": "call", "nonce": nonce, "salt": self._key.salt, **more})

    def _forget(self, control: Control) -> bytes:
        """Stop watching a connection, and return the nonce of its call."""
        self._selector.unregister(control)
        return self._asked.pop(control)

    def _drop_oldest(self) -> bool:
        """Close the oldest connection that has not answered; return whether there was one."""
        oldest = next((control for control in self._asked if not control.is_local), None)
        if oldest is not None:
            self._forget(oldest)
            oldest.close()
        return oldest is not None


Answer: TypeAlias = Callable[[Handshakes, Control, Record, Handshake], object]
"""``answer(callers, control, hello, talk)`` takes over a connection that has said hello."""


def answer_all(
    listener: socket.socket,
    key: JobKey,
    answer: Answer,
    until: Callable[[], bool],
    deadline: Deadline,
    tls: Tls | None = None,
) -> None:
    """Answer every hello until ``until`` says enough or the deadline has passed."""
    with selectors.DefaultSelector() as selector:
        callers = Handshakes(key, selector, tls)
        listener.setblocking(False)
        selector.register(listener, selectors.EVENT_READ)
        try:
            while not until() and not deadline.expired():
                for each, _ in selector.select(min(_TURN_S, deadline.remaining_s() or _TURN_S)):
                    if each.fileobj is listener:
                        callers.accept(listener)
                        continue
                    assert isinstance(each.fileobj, Control)
                    with suppress(TransportError):
                        if (heard := callers.hear(each.fileobj)) is not None:
                            answer(callers, each.fileobj, *heard)
        finally:
            callers.close()
