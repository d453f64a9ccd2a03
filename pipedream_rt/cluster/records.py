"""The records of the control connection: which fields each has, and of which type and length.

A record is checked as soon as it has come, so that whoever uses a field need not doubt it. Whoever
sends something else has broken the protocol, and loses the connection.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from pipedream_rt.cluster.keys import NONCE

Record = dict[str, Any]
"""What is sent: a dict with the key ``"type"``."""

Check = Callable[[Any], bool]

_MOST_MEMBERS = 1 << 16
_NAME = re.compile(r"[A-Za-z0-9_-]{1,100}")


def is_name(value: Any) -> bool:
    """Whether a value can be the name of a worker: letters, digits, - and _, 100 at most."""
    return isinstance(value, str) and _NAME.fullmatch(value) is not None


def _text(most: int) -> Check:
    return lambda value: isinstance(value, str) and len(value) <= most


def _line(most: int) -> Check:
    return lambda value: isinstance(value, str) and len(value) <= most and value.isprintable()


def _bytes(length: int) -> Check:
    return lambda value: isinstance(value, bytes) and len(value) == length


def _whole(low: int, high: int) -> Check:
    return lambda value: type(value) is int and low <= value <= high


def _truth(value: Any) -> bool:
    return isinstance(value, bool)


def _seconds(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value < float("inf")


def _maybe(check: Check) -> Check:
    return lambda value: value is None or check(value)


def _list_of(check: Check, most: int = _MOST_MEMBERS) -> Check:
    return lambda value: isinstance(value, list) and len(value) <= most and all(map(check, value))


def _place(value: Any) -> bool:
    return (
        isinstance(value, list)
        and len(value) == 2
        and _line(255)(value[0])
        and _whole(1, 65535)(value[1])
    )


def _places(value: Any) -> bool:
    return isinstance(value, dict) and all(is_name(k) and _place(v) for k, v in value.items())


_LONG = 1 << 20
_NUMBER = _whole(0, 2**31)

FIELDS: dict[str, dict[str, Check]] = {
    # What anybody may have sent. The fields of a hello depend on its version: see `HELLO`.
    "call": {"nonce": _bytes(NONCE), "secret": _maybe(_bytes(NONCE))},
    "hello": {"version": lambda value: True},
    "refused": {"reason": _text(4096), "passing": _truth},
    "admitted": {},
    # What a member has signed.
    "ready": {},
    "welcome": {
        "nonce": _bytes(NONCE),
        "beat_s": _seconds,
        "rank": _whole(1, _MOST_MEMBERS),
        "stages": _list_of(_NUMBER),
        "names": _list_of(is_name),
        "hosts": _list_of(_NUMBER),
        "host": _maybe(_line(255)),
        "generation": _NUMBER,
        "timeout_s": _seconds,
        "start_timeout_s": _maybe(_seconds),
        "path": _list_of(_text(1 << 16)),
    },
    "link": {"rank": _whole(0, _MOST_MEMBERS)},
    "door": {"host": _line(255), "port": _whole(1, 65535)},
    "doors": {"by_name": _places},
    "joined": {},
    "failed": {"text": _text(_LONG)},
    "shut": {},
    "story": {"text": _maybe(_text(_LONG))},
    "beat": {"doing": _text(_LONG), "rss": _whole(0, 2**63)},
    "doing": {"action": _text(_LONG)},
    "clock": {"ns": _maybe(_whole(0, 2**63))},
    "stop": {},
    "stopped": {},
    "exit": {"failed": _truth},
}
"""The fields of each type of record."""

HELLO: dict[str, Check] = {
    "name": is_name,
    "pid": _whole(1, 2**31),
    "host": _line(255),
    "boot": _line(64),
    "nonce": _bytes(NONCE),
    "proof": _bytes(32),
}
"""The fields of a hello of this version of the protocol."""


def problem_of(record: Mapping[str, Any], fields: Mapping[str, Check]) -> str:
    """Say which field of a record is wrong; empty if none is.

    Args:
        record: The record.
        fields: The fields that it has to have. One that may be None may be left out.
    """
    for name, check in fields.items():
        if not check(record.get(name)):
            return f"its {name!r} is {printable(repr(record.get(name)), 60)}"
    return ""


def printable(text: str, most: int = 300) -> str:
    """Return a text from outside as it may be printed: escaped, and no longer than so much.

    A stranger's text could move the cursor of a terminal, or look like a line of the log.
    """
    cut = text[:most] + ("..." if len(text) > most else "")
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in cut)
