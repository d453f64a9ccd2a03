"""The records of the control connection: the fields of each, with type and length.

A record is checked as soon as it has come, so that no user of a field need check it again. Whoever
sends anything else has broken the protocol, and loses the connection.
"""

from __future__ import annotations

import re
from typing import Any

from pipedream_rt.cluster.keys import NONCE
from pipedream_rt.cluster.unix_links import is_token
from pipedream_rt.schedules.shape import MOST_STAGES
from pipedream_rt.schema import (
    Check,
    anything,
    exactly,
    line,
    list_of,
    mapping,
    maybe,
    one_of,
    row,
    seconds,
    text,
    truth,
    whole,
)
from pipedream_rt.transport.rpc.fence import OBSTACLES

Record = dict[str, Any]
"""One message: a dict with the key ``"type"``."""

_NAME = re.compile(r"[A-Za-z0-9_-]{1,100}")


def is_name(value: Any) -> bool:
    """Whether a value can be the name of a worker: letters, digits, - and _, 100 at most."""
    return isinstance(value, str) and _NAME.fullmatch(value) is not None


_DOOR = row(line(255), whole(1, 65535), is_token, is_token)
"""Where the door of a member is: the fields of `UnixAddress`, or of an address with a port."""


_LONG = 1 << 20
_NUMBER = whole(0, 2**31)

FIELDS: dict[str, dict[str, Check]] = {
    # Unsigned: anybody may have sent these. The fields of a hello depend on its version: `HELLO`.
    "call": {"nonce": exactly(NONCE), "salt": exactly(NONCE), "key": maybe(exactly(NONCE))},
    "hello": {"version": anything},
    "refused": {"reason": text(4096), "passing": truth, "proof": maybe(exactly(32))},
    "admitted": {"proof": exactly(32)},
    "over": {"code": whole(0, 255), "proof": exactly(32)},
    # Signed by a member.
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
    "link": {"rank": whole(0, MOST_STAGES)},
    "door": {"at": _DOOR},
    "doors": {"by_name": mapping(is_name, _DOOR)},
    "joined": {"nearby": list_of(_NUMBER)},
    "failed": {"text": text(_LONG)},
    "shut": {},
    "story": {"text": maybe(text(_LONG))},
    "beat": {"doing": text(_LONG), "rss": whole(0, 2**63)},
    "doing": {"action": text(_LONG)},
    "clock": {"ns": maybe(whole(0, 2**63))},
    # Of `pipedream-rt doctor`.
    "examine": {"folder": text(4096), "token": line(64)},
    "answer calls": {},
    "call on": {"host": line(255), "port": whole(1, 65535), "nonce": exactly(NONCE)},
    "findings": {"text": text(_LONG)},
    "stop": {},
    "stopped": {},
    "exit": {"failed": truth},
}
"""The fields of each type of record."""

HELLO: dict[str, Check] = {
    "name": is_name,
    "pid": whole(1, 2**31),
    "host": line(255),
    "boot": line(64),
    "software": line(255),
    "returns": truth,
    "nonce": exactly(NONCE),
    "proof": exactly(32),
}
"""The fields of a hello of this version of the protocol."""
