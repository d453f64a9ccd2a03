"""The records that members of a job exchange before training and beside it.

A record is a small msgpack map behind its length. It is checked as soon as it arrives, and no user
of a field checks it again: whoever sends anything else has broken the protocol, and loses the
connection. The records of a worker's *control connection*, from before its group to after it::

    coordinator                     worker
                    <- hello        the job and its name, pid, host, versions of its software
    refused reason  ->              the worker ends, or tries again later; or
    over code       ->              the script has ended for good, and so does the worker; or
    admitted        ->              the worker imports torch; if the connection does not leave the
                                    machine, with the secret of the job
                    <- ready        the worker has imported torch; its kind of processor,
                                    and what keeps torch RPC from being fenced off there
    welcome         ->              generation, rank, names, ...
                    <- door         where the worker listens for other members
    doors           ->              of all processes; each dials those of lower rank, and the first
                                    record on such a connection is a link, answered alike
                    <- joined       the worker has its links and is an endpoint of torch RPC
    shut            ->              all have joined: nothing of the worker listens from now on
    ...training, over the links...
    story           ->              the coordinator reports a stall
                    <- story        what the worker's stages wait for, and did last
                    <- beat         the worker is alive, what it does, its memory; at intervals
                    <- doing        the worker is about to do an action; where a job asks for it
    clock           ->              the coordinator collects a trace
                    <- clock        the worker's monotonic clock, in nanoseconds
    stop            ->              the worker's stages end the action at hand
                    <- stopped      the worker's stages compute no more
    exit failed     ->              the worker leaves the RPC group and ends; whether the job goes
                                    on with others

The connection is also the sign of life: however a process dies, the kernel closes its end, and the
other side reads end of file at once.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence
from typing import Any

import msgpack

from pipedream_rt.cluster.identity import NONCE
from pipedream_rt.errors import TransportError
from pipedream_rt.packing import packb, unpackb
from pipedream_rt.schedules.shape import MOST_STAGES
from pipedream_rt.schema import (
    Check,
    anything,
    exactly,
    has_levels,
    line,
    list_of,
    mapping,
    maybe,
    one_of,
    problem_of,
    row,
    seconds,
    shown,
    text,
    truth,
    whole,
)
from pipedream_rt.transport.fence import OBSTACLES

VERSION = 15
"""Version of this protocol; the two ends must have the same."""

Record = dict[str, Any]
"""One message: a dict with the key ``"type"``."""

HEAD = struct.Struct("!I")

LARGEST = 1 << 20
"""Limit of a record, in bytes."""

LARGEST_AT_FIRST = 1 << 12
"""Limit of the first record of a connection, in bytes."""

_NAME = re.compile(r"[A-Za-z0-9_-]{1,100}")


def is_name(value: Any) -> bool:
    """Whether a value can be the name of a worker: letters, digits, - and _, 100 at most."""
    return isinstance(value, str) and _NAME.fullmatch(value) is not None


_JOB = re.compile(r"[0-9a-f]{32}|")


def _is_job(value: Any) -> bool:
    """Whether a value can be the public name of a job, empty for one that is not known yet."""
    return isinstance(value, str) and _JOB.fullmatch(value) is not None


_PEER_ADDRESS = row(line(255), whole(0, 65535), line(255), text(255))
"""Where a member listens for the others: the fields of `PeerAddress`."""


_LONG = 1 << 20
_DEEPEST = 4
"""Levels of a record: a welcome has the most, as its ``seats`` are lists of rows with a list."""
_NUMBER = whole(0, 2**31)
_RANK = whole(0, MOST_STAGES)

FIELDS: dict[str, dict[str, Check]] = {
    # The fields of a hello depend on its version: `HELLO`.
    "hello": {"version": anything},
    "refused": {"reason": text(4096), "passing": truth},
    "admitted": {"secret": maybe(line(64))},
    "over": {"code": whole(0, 255)},
    "ready": {"processor": line(255), "obstacle": one_of("", *OBSTACLES)},
    "welcome": {
        "nonce": exactly(NONCE),
        "beat_s": seconds,
        "rank": whole(1, MOST_STAGES),
        "seats": list_of(row(_NUMBER, line(255), list_of(_NUMBER))),
        "names": list_of(is_name),
        "hosts": list_of(_NUMBER),
        "host": maybe(line(255)),
        "rpc": one_of("off", "fenced", "open"),
        "generation": _NUMBER,
        "timeout_s": seconds,
        "start_timeout_s": maybe(seconds),
        "path": list_of(text(1 << 16)),
    },
    "door": {"at": _PEER_ADDRESS},
    "doors": {"by_name": mapping(is_name, _PEER_ADDRESS)},
    "link": {
        "job": _is_job,
        "group": exactly(NONCE),  # what `Group.tag` says
        "generation": _NUMBER,
        "sender": _RANK,
        "recipient": _RANK,
    },
    "joined": {"nearby": list_of(_NUMBER)},
    "failed": {"text": text(_LONG)},
    "unfit": {"text": text(_LONG)},
    "shut": {},
    "story": {"text": maybe(text(_LONG))},
    "beat": {"doing": text(_LONG), "rss": whole(0, 2**63)},
    "doing": {"action": text(_LONG)},
    "clock": {"ns": maybe(whole(0, 2**63))},
    # Of `pipedream-rt doctor`.
    "examine": {"folder": text(4096), "token": line(64)},
    "measure": {"rank": _RANK},
    "findings": {"text": text(_LONG)},
    "stop": {},
    "stopped": {},
    "exit": {"failed": truth},
}
"""The fields of each type of record."""

HELLO: dict[str, Check] = {
    "job": _is_job,
    "name": is_name,
    "pid": whole(1, 2**31),
    "host": line(255),
    "boot": line(64),
    "software": line(255),
    "returns": truth,
}
"""The fields of a hello of this version of the protocol."""


def welcome(rank: int, names: Sequence[str], host: str | None, **more: Any) -> Record:
    """Return the welcome to a group; ``more`` has the other fields of a group with stages."""
    return {
        "type": "welcome",
        "rank": rank,
        "names": list(names),
        "host": host or None,
        "nonce": bytes(NONCE),
        "beat_s": 0.0,
        "seats": [],
        "hosts": [],
        "rpc": "off",
        "generation": 0,
        "timeout_s": 0.0,
        "start_timeout_s": None,
        "path": [],
        **more,
    }


def packed(record: Record) -> bytes:
    """Encode a record, behind its length."""
    data = bytes(packb(record))
    return HEAD.pack(len(data)) + data


def length_of(head: bytes, most: int, peer: str) -> int:
    """Decode the length of a record, ``most`` bytes at most."""
    (length,) = HEAD.unpack(head)
    if length > most:
        raise TransportError(
            f"{peer} sent a record of {length} bytes, where at most {most} are allowed; is it "
            "pipedream-rt of the same version?"
        )
    return int(length)


def unpacked(data: bytes, peer: str) -> Record:
    """Decode and check a record."""
    try:
        record = unpackb(data)
    except (ValueError, RecursionError, msgpack.UnpackException) as error:
        raise TransportError(
            f"{peer} sent a record that is no msgpack: {error}; is it pipedream-rt of the same "
            "version?"
        ) from error
    # Before anything walks or prints it, which takes a call for each level.
    if not has_levels(record, _DEEPEST):
        raise TransportError(
            f"{peer} sent a record of more than {_DEEPEST} levels, which none has; is it "
            "pipedream-rt of the same version?"
        )
    if not isinstance(record, dict):
        raise TransportError(
            f"{peer} sent a {type(record).__name__} as a record, which is a map; is it "
            "pipedream-rt of the same version?"
        )
    if not all(isinstance(key, str) for key in record):
        raise TransportError(
            f"{peer} sent a record with a field whose name is no text; is it pipedream-rt of the "
            "same version?"
        )
    kind = record.get("type")
    if not isinstance(kind, str) or kind not in FIELDS:
        what = shown(kind, 60)
        raise TransportError(
            f"{peer} sent a record of the unknown type {what}; is it pipedream-rt of the same "
            "version?"
        )
    if problem := problem_of(record, FIELDS[kind]):
        raise TransportError(
            f"{peer} sent a {kind!r} that makes no sense: {problem}; is it pipedream-rt of the "
            "same version?"
        )
    return dict(record)
