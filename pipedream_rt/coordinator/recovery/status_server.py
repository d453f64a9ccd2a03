"""The status of a running pipeline, which `pipedream-rt status` asks for over a local socket.

The socket is a file named after the process of the script, in a folder that only its user can open.
The server sends one status record to each client and closes the connection; it reads nothing.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgpack

from pipedream_rt.cluster.environment import private_folder as folder
from pipedream_rt.deadline import Deadline
from pipedream_rt.packing import packb, unpackb
from pipedream_rt.schema import fields, line, list_of, number, problem_of, text, whole

_TIMEOUT_S = 2.0
_LARGEST = 1 << 20  # bytes of a record

Status = dict[str, Any]

_WORKER = fields(
    {
        "name": line(100), "stages": line(1 << 16), "process": line(300), "silent_s": number,
        "rss": whole(0), "doing": text(1 << 16),
    }
)  # fmt: skip
_STATUS = {
    "pid": whole(1), "ns": whole(0), "schedule": line(256), "generation": whole(0),
    "restarts": whole(0), "losses": whole(0), "fed": whole(0), "workers": list_of(_WORKER),
}  # fmt: skip
"""The fields of a status record."""


class StatusServer:
    """Serves status records on a thread of its own, which calls ``status``."""

    def __init__(self, status: Callable[[], Status]) -> None:
        self._status = status
        self._path: Path | None = None
        self._listener = socket.socket(socket.AF_UNIX)
        try:
            where = folder()
            # The highest and one, not their count: an earlier pipeline may have closed.
            names = [path.name.split("-")[1] for path in where.glob(f"{os.getpid()}-*")]
            numbers = [int(name) for name in names if name.isdecimal()]
            self._path = where / f"{os.getpid()}-{1 + max(numbers, default=0)}"
            self._listener.bind(str(self._path))
            self._listener.listen()
        except OSError:  # a run must not fail because nobody can look at it
            self._path = None
            self._listener.close()
            return
        # A daemon, though `close` joins it: the interpreter waits for all other threads before it
        # runs the finalizer of a pipeline that the user has not closed.
        self._thread = threading.Thread(target=self._serve, name="status", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        """Send a record to each client, until `close`."""
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with connection, contextlib.suppress(OSError):
                connection.settimeout(_TIMEOUT_S)
                connection.sendall(packb(self._status()))

    def close(self) -> None:
        """Stop listening, and remove the socket. Idempotent."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)
            self._path = None
            self._listener.shutdown(socket.SHUT_RDWR)  # ends `accept`
            self._thread.join()
            self._listener.close()


def running() -> Iterator[tuple[Path, Status]]:
    """Ask every pipeline of this user on this host; remove the sockets that dead ones left."""
    for path in sorted(folder().glob("[0-9]*")):
        try:
            yield path, ask(path)
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
        except (OSError, ValueError):
            continue  # the pipeline has just ended, or does not answer


def ask(path: Path) -> Status:
    """Return the status record of one pipeline."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(_TIMEOUT_S)
        connection.connect(str(path))
        data, deadline = bytearray(), Deadline(timedelta(seconds=_TIMEOUT_S))
        while len(data) < _LARGEST and (block := connection.recv(1 << 16)):
            data += block
            connection.settimeout(deadline.remaining_s() or 1e-3)  # 0 would be non-blocking
    try:
        found = unpackb(data)
    except (RecursionError, msgpack.UnpackException) as error:
        raise ValueError(f"the answer from {path} is no status record: {error}") from error
    if not isinstance(found, dict) or (problem := problem_of(found, _STATUS)):
        what = problem if isinstance(found, dict) else "it is no record"
        raise ValueError(f"the answer from {path} is no status record: {what}")
    return found
