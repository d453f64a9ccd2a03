"""The meeting: the handshake by which members of a group connect to each other.

Each member listens at its *door* for members of higher rank, and calls those of lower rank, on its
own machine at their Unix doors (`unix_links.py`) if they have some. The four words of the handshake
have fixed lengths, so a stranger's bytes are compared and never parsed::

    caller                                        door
    mark, ranks of both, nonce, proof    ──►
                  (from here on encrypted, where members encrypt)
                                         ◄──      nonce, proof
    proof                                ──►
                                         ◄──      proof

Every proof is an HMAC-SHA256 with the key of the group, over the generation, both ranks, the kind
of the door, the nonces and, except in the first word, the certificate with which the door encrypts.
So a word that is repeated later or elsewhere proves nothing, and nobody can be in between.
"""

from __future__ import annotations

import errno
import hmac
import logging
import os
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from pipedream_rt.cluster.addresses import resolved
from pipedream_rt.cluster.pending_connections import accept, most_strangers
from pipedream_rt.cluster.unix_links import UnixAddress, UnixListener
from pipedream_rt.deadline import Deadline
from pipedream_rt.errors import RendezvousTimeout
from pipedream_rt.transport.group import Group
from pipedream_rt.transport.link import Connection, link_key
from pipedream_rt.transport.links import Connections, text_of
from pipedream_rt.transport.signing import DIGEST, proof
from pipedream_rt.transport.tcp import prepare
from pipedream_rt.transport.tls import Tls, wrapped

_log = logging.getLogger(__name__)

_NONCE = 32
_HELLO = struct.Struct(f"!8sII{_NONCE}s{DIGEST}s")
_ANSWER = struct.Struct(f"!{_NONCE}s{DIGEST}s")
_MARK = b"pdrt-lk1"

_PAUSE_S = 0.1
"""Seconds before a member is called again that was out of reach or dropped the connection."""

_FINAL = (errno.ENETUNREACH, errno.ECONNREFUSED)
"""Errors after which no other call would help: every door listens before it is called."""

_TURN_S = 0.1
"""Seconds after which the deadline is looked at again, whatever comes."""


@dataclass(slots=True, eq=False)
class _Handshake:
    """One connection on which words are exchanged.

    Attributes:
        calls: Whether this member is the caller, not the door.
        rank: Rank of the other member; -1 until it has said a hello.
        wanted: Length of the next word, in bytes; 0 while the kernel connects.
        came: What has come of that word.
        channel: SHA-256 of the door's certificate; empty where nothing is encrypted.
        nearby: Whether the door is a Unix door.
    """

    socket: socket.socket
    calls: bool
    rank: int = -1
    callers_nonce: bytes = b""
    doors_nonce: bytes = b""
    wanted: int = 0
    came: bytes = b""
    channel: Future[bytes] | None = None
    nearby: bool = False


class PeerLinks:
    """Connects one member of a group to all others; owns neither door, which must not block."""

    def __init__(
        self,
        group: Group,
        door: socket.socket,
        addresses: Mapping[int, UnixAddress],
        deadline: Deadline,
        tls: Tls | None = None,
        nearby: UnixListener | None = None,
    ) -> None:
        self._group = group
        self._doors = [door] if nearby is None else [door, nearby.listener]
        self._far = {  # who is called at a TCP door
            rank for rank, at in addresses.items() if nearby is None or at.place != nearby.place
        }
        self._addresses = addresses
        self._deadline = deadline
        self._tls = tls
        self._selector = selectors.DefaultSelector()
        self._talks: dict[_Handshake, None] = {}  # oldest first
        self._met: Connections = {}
        self._again: dict[int, float] = {}  # when to call a member again, by rank (monotonic)
        self._problems: dict[int, str] = {}
        self._most = most_strangers()

    def meet(self, ended: Callable[[], bool] = lambda: False) -> Connections:
        """Meet all other members."""
        for door in self._doors:
            self._selector.register(door, selectors.EVENT_READ)
        try:
            for rank in self._group.others:
                if rank < self._group.rank:
                    self._call(rank)
            while len(self._met) < len(self._group.others):
                self._attend(ended)
            return self._met
        except BaseException:
            for met in self._met.values():
                met.socket.close()
            raise
        finally:
            for talk in self._talks:
                talk.socket.close()
            self._selector.close()

    def _attend(self, ended: Callable[[], bool]) -> None:
        """Wait until something comes, and answer it."""
        if self._deadline.expired() or ended():
            raise self._not_met([r for r in self._group.others if r not in self._met])
        now = time.monotonic()
        for rank in [rank for rank, at in self._again.items() if at <= now]:
            del self._again[rank]
            self._call(rank)
        for key, _ in self._selector.select(_TURN_S):
            if key.data is None:
                assert isinstance(key.fileobj, socket.socket)
                self._accept(key.fileobj)
            elif key.data in self._talks:
                self._attend_to(key.data)

    def _call(self, rank: int) -> None:
        """Begin to connect to the door of a member; the selector tells when it is done."""
        at, nearby = self._addresses[rank], rank not in self._far
        family: int
        address: Any
        if nearby:
            family, address = socket.AF_UNIX, at.unix_address
        else:
            family, address = resolved(at.host, at.port)
        connection = socket.socket(family, socket.SOCK_STREAM)
        connection.setblocking(False)
        talk = _Handshake(connection, True, rank, secrets.token_bytes(_NONCE), nearby=nearby)
        self._talks[talk] = None
        code = connection.connect_ex(address)
        # Also if it has failed: `_end` takes it out of the selector.
        self._selector.register(connection, selectors.EVENT_WRITE, talk)
        if code not in (0, errno.EINPROGRESS):
            self._end(talk, os.strerror(code).lower(), final=code in _FINAL)

    def _accept(self, door: socket.socket) -> None:
        """Accept a connection at a door; drop the oldest if there are too many."""
        connection = accept(door, self._drop_oldest)
        if connection is None:
            return
        if sum(not talk.calls for talk in self._talks) >= self._most:
            self._drop_oldest()
        try:
            nearby = door is not self._doors[0]
            talk = _Handshake(connection, False, wanted=_HELLO.size, nearby=nearby)
            self._prepare(talk)
        except OSError:  # whoever connected is gone again
            connection.close()
            return
        self._listen_to(talk)

    def _prepare(self, talk: _Handshake) -> None:
        """Set the options of a TCP connection."""
        if not talk.nearby:
            prepare(talk.socket)

    def _encrypt(self, talk: _Handshake) -> None:
        """Encrypt a connection, where that is wanted, before more is said on it."""
        # Behind the hello only, so that a stranger costs the door no thread.
        if not talk.nearby:
            talk.socket, talk.channel = wrapped(self._tls, talk.socket, talk.calls)

    def _drop_oldest(self) -> bool:
        """Close the oldest accepted connection; return whether there was one."""
        # First one without a right hello: one with it is a member's, or a hello that is repeated.
        there = [talk for talk in self._talks if not talk.calls]
        oldest = next((talk for talk in there if talk.rank < 0), there[0] if there else None)
        if oldest is not None:
            self._end(oldest, "others have come")
        return oldest is not None

    def _listen_to(self, talk: _Handshake) -> None:
        """Wait for a word on a connection."""
        talk.socket.setblocking(False)
        self._talks[talk] = None
        self._selector.register(talk.socket, selectors.EVENT_READ, talk)

    def _attend_to(self, talk: _Handshake) -> None:
        """Take the next step on a connection; an error ends this connection only."""
        try:
            if not talk.wanted:
                self._say_hello(talk)
                return
            data = talk.socket.recv(talk.wanted - len(talk.came))
            if not data:
                raise ConnectionError("it closed the connection")
            talk.came += data
            if len(talk.came) == talk.wanted:
                word, talk.came = talk.came, b""
                if talk.calls and not talk.doors_nonce:
                    self._take_answer(talk, word)
                elif talk.calls:
                    self._take_last(talk, word)
                elif talk.rank < 0:
                    self._take_hello(talk, word)
                else:
                    self._take_proof(talk, word)
        except BlockingIOError:
            return
        except OSError as error:
            self._end(talk, text_of(error), final=error.errno in _FINAL)

    def _say_hello(self, talk: _Handshake) -> None:
        """Send the first word, once the kernel has connected."""
        code = talk.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            raise OSError(code, os.strerror(code))
        self._leave(talk)  # `_encrypt` puts another socket in place of the watched one
        self._prepare(talk)
        shown = self._proof(b"hello", talk)
        me = self._group.rank
        talk.socket.sendall(_HELLO.pack(_MARK, me, talk.rank, talk.callers_nonce, shown))
        self._encrypt(talk)
        talk.wanted = _ANSWER.size
        self._listen_to(talk)

    def _take_hello(self, talk: _Handshake, word: bytes) -> None:
        """Check the first word at the door, and answer it."""
        mark, caller, door, nonce, shown = _HELLO.unpack(word)
        talk.rank, talk.callers_nonce = caller, nonce
        right = hmac.compare_digest(shown, self._proof(b"hello", talk))
        if mark != _MARK:
            raise PermissionError("its hello has another mark: it is no member of this group")
        if not right:
            raise PermissionError(
                "the proof in its hello is wrong: it does not know the key of the group, or is of "
                "another generation"
            )
        if door != self._group.rank:
            raise PermissionError(f"its hello is for rank {door}, and this is {self._group.rank}")
        self._leave(talk)
        self._encrypt(talk)
        self._listen_to(talk)
        talk.doors_nonce = secrets.token_bytes(_NONCE)
        talk.wanted = DIGEST
        talk.socket.sendall(_ANSWER.pack(talk.doors_nonce, self._proof(b"answer", talk)))

    def _take_answer(self, talk: _Handshake, word: bytes) -> None:
        """Check the answer of a door, and prove who this member is."""
        talk.doors_nonce, shown = _ANSWER.unpack(word)
        if not hmac.compare_digest(shown, self._proof(b"answer", talk)):
            raise PermissionError(
                "the answer of its door is wrong: it does not know the key of the group, or "
                "somebody is in between"
            )
        talk.wanted = DIGEST
        talk.socket.sendall(self._proof(b"proof", talk))

    def _take_last(self, talk: _Handshake, word: bytes) -> None:
        """Check the door's last word: until then it may have dropped this connection."""
        if not hmac.compare_digest(word, self._proof(b"met", talk)):
            raise PermissionError(
                "the last word of its door is wrong: it does not know the key of the group, or "
                "somebody is in between"
            )
        self._refuse_met(talk)
        self._has_met(talk)

    def _take_proof(self, talk: _Handshake, word: bytes) -> None:
        """Check the caller's last word, after which it has been met."""
        if not hmac.compare_digest(word, self._proof(b"proof", talk)):
            raise PermissionError(
                "its proof is wrong: it does not know the key of the group, or somebody is in "
                "between"
            )
        self._refuse_met(talk)
        talk.socket.sendall(self._proof(b"met", talk))
        self._has_met(talk)

    def _proof(self, word: bytes, talk: _Handshake) -> bytes:
        """Return the proof that belongs to a word."""
        ranks = (self._group.rank, talk.rank)
        caller, door = ranks if talk.calls else ranks[::-1]
        about = struct.pack("!III", self._group.generation & 0xFFFFFFFF, caller, door)
        # The caller sends its hello before it has seen the certificate.
        channel = b"" if word == b"hello" or talk.channel is None else talk.channel.result(0)
        nonces = (talk.callers_nonce, talk.doors_nonce)
        kind = b"unix" if talk.nearby else b"tcp"
        return proof(self._group.key, b"meeting", kind, word, about, *nonces, channel)

    def _refuse_met(self, talk: _Handshake) -> None:
        """Refuse a member that was met already, or that should not have called."""
        if talk.rank in self._met:
            raise PermissionError(f"rank {talk.rank} was met already")
        if talk.calls is not (talk.rank < self._group.rank):
            raise PermissionError(f"rank {talk.rank} waits to be called, and does not call itself")

    def _has_met(self, talk: _Handshake) -> None:
        """Keep a connection whose other end is a member."""
        self._leave(talk)
        nonces = (talk.callers_nonce, talk.doors_nonce)
        key = link_key(self._group.key, self._group.rank, talk.rank, *nonces)
        self._met[talk.rank] = Connection(talk.socket, key, talk.nearby)

    def _leave(self, talk: _Handshake) -> None:
        """Stop watching a connection, if it is watched."""
        if talk in self._talks:
            del self._talks[talk]
            self._selector.unregister(talk.socket)

    def _end(self, talk: _Handshake, reason: str, *, final: bool = False) -> None:
        """Close a connection; a member that was called is called again, at its TCP door then."""
        self._leave(talk)
        talk.socket.close()
        if talk.calls and talk.nearby:
            name = self._group.names[talk.rank]
            _log.info("%r cannot be met at a Unix socket, and is called by TCP: %s", name, reason)
            self._far.add(talk.rank)
            self._again[talk.rank] = time.monotonic()
        elif talk.calls:
            self._problems[talk.rank] = reason
            if final:
                raise self._not_met([talk.rank])
            self._again[talk.rank] = time.monotonic() + _PAUSE_S
        else:
            _log.debug("a connection that is no member's was dropped: %s", reason)

    def _not_met(self, missing: Sequence[int]) -> RendezvousTimeout:
        """Return the error that says who was not met, and why."""
        group = self._group
        told = []
        for rank in missing:
            why = self._problems.get(
                rank, "it has not called" if rank > group.rank else "no answer"
            )
            told.append(f"{group.names[rank]!r} at {self._addresses[rank].tcp_address}: {why}")
        return RendezvousTimeout(
            f"{group.name!r} has not met {'; '.join(told)}; all workers must reach each other and "
            "the coordinator on any port, so --bind must name an interface of a network that all "
            "of them share",
            missing=len(missing),
        )
