"""What a running pipeline says of itself, for `pipedream-rt status`.

A local socket in a folder that belongs to the user alone, named by the process of the script.
Whoever connects is told and let go; nothing is taken from him.
"""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgpack

_TIMEOUT_S = 2.0
_LARGEST = 1 << 20

Status = dict[str, Any]


def folder() -> Path:
    """Where the sockets are; made if it is not there, and refused if it is somebody else's.

    Raises:
        PermissionError: It belongs to another user.
    """
    path = Path(tempfile.gettempdir()) / f"pipedream-rt-{os.geteuid()}"
    path.mkdir(mode=0o700, exist_ok=True)
    about = path.lstat()
    if about.st_uid != os.geteuid() or about.st_mode & 0o077:
        raise PermissionError(f"{path} belongs to somebody else, or is open to others")
    return path


class StatusServer:
    """Tells whoever asks, on a thread of its own.

    Args:
        status: Says what there is to say; called from that thread.
    """

    def __init__(self, status: Callable[[], Status]) -> None:
        """Listen from now on; where that is not possible, do nothing."""
        self._status = status
        self._path: Path | None = None
        self._listener = socket.socket(socket.AF_UNIX)
        try:
            where = folder()
            number = 1 + sum(1 for _ in where.glob(f"{os.getpid()}-*"))
            self._path = where / f"{os.getpid()}-{number}"
            self._path.unlink(missing_ok=True)
            self._listener.bind(str(self._path))
            self._listener.listen()
        except OSError:  # a run must not fail because nobody can look at it
            self._path = None
            self._listener.close()
            return
        # A daemon, though `close` joins it: the interpreter joins others before it runs what would
        # close a pipeline that its user forgot.
        self._thread = threading.Thread(target=self._serve, name="status", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        """Answer until closed."""
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with connection, contextlib.suppress(OSError):
                connection.settimeout(_TIMEOUT_S)
                connection.sendall(msgpack.packb(self._status()))

    def close(self) -> None:
        """Stop. Idempotent."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)
            self._path = None
            self._listener.shutdown(socket.SHUT_RDWR)  # ends `accept`
            self._thread.join()
            self._listener.close()


def running() -> Iterator[tuple[Path, Status]]:
    """Ask every pipeline of this user on this machine; remove what a dead one has left."""
    for path in sorted(folder().iterdir()):
        try:
            yield path, ask(path)
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
        except (OSError, ValueError):
            continue  # it has just ended, or hangs


def ask(path: Path) -> Status:
    """Ask one pipeline.

    Raises:
        OSError: It is not there, or does not answer.
        ValueError: It answers something else.
    """
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(_TIMEOUT_S)
        connection.connect(str(path))
        data = bytearray()
        while len(data) < _LARGEST and (block := connection.recv(1 << 16)):
            data += block
    found = msgpack.unpackb(data)
    if not isinstance(found, dict):
        raise ValueError("it is no status")
    return found
