"""The lock of a run's folder: one run at a time writes checkpoints there.

The kernel keeps the lock (``flock``) and releases it when its owner ends, however that happens; so
a dead owner keeps nobody out, and nothing has to be cleared away. The lock is on the folder itself.
NFS locks only files, but between machines too: there a file in the folder stands for it. Where a
file system has no locks at all, that is logged, and the folder is used all the same.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
from contextlib import suppress
from pathlib import Path

from pipedream_rt.checkpoint.layout import BEING_REPLACED, give_back, remove_parts
from pipedream_rt.errors import CheckpointError
from pipedream_rt.lifecycle import close_in_forked_children
from pipedream_rt.schema import line, printable, problem_of, read_file, whole
from pipedream_rt.telling import log_of

_log = log_of(__name__)

_FILE = ".pipedream-rt.lock"
_OWNER = {"pid": whole(1), "host": line(255)}
_LARGEST = 1 << 12

_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)


class _Held:
    """A locked file or folder; making it raises `BlockingIOError` if somebody else has the lock."""

    def __init__(self, path: Path, flags: int) -> None:
        # No link is followed, and a pipe that was put there does not block.
        self._fd = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BaseException:
            self.close()
            raise
        # A fork shares the open file, and would keep the lock of a run that has ended.
        close_in_forked_children(self)

    def fileno(self) -> int:
        return self._fd

    def close(self) -> None:
        """Release the lock. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class RunLock:
    """The lock of a folder, held from when this object is made until `release`."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._held: _Held | None = None
        try:
            root.mkdir(parents=True, exist_ok=True, mode=0o700)
            # The folder may be reached by a link, which `_Held` would refuse.
            real = root.resolve()
            try:
                self._held = _Held(real, os.O_RDONLY | os.O_DIRECTORY)
            except OSError as error:
                if error.errno != errno.EBADF:  # NFS's answer to a lock on a folder
                    raise
                self._held = _Held(real / _FILE, os.O_RDWR | os.O_CREAT)
                _write_owner(self._held)
        except BlockingIOError as error:
            raise CheckpointError(
                f"{root} is in use by {_owner_of(root)}, which writes its checkpoints there; two "
                "runs in one folder would destroy each other's. Give each its own folder, or end "
                "the other one first"
            ) from error
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise CheckpointError(
                    f"checkpoints cannot be written to {root}: {error}"
                ) from error
            _log.warning(
                "the file system of %s keeps no locks: see to it that no other run writes "
                "checkpoints there", root,
            )  # fmt: skip
        # Not before the lock: these may be the files of a run at work.
        give_back(root)
        remove_parts(root)

    @property
    def is_good(self) -> bool:
        """Whether the path still names the locked folder, which may have been moved or replaced."""
        if self._held is None:
            return True
        try:
            there, held = os.stat(self._root), os.fstat(self._held.fileno())
            if (there.st_dev, there.st_ino) == (held.st_dev, held.st_ino):
                return True
            file = os.stat(self._root / _FILE, follow_symlinks=False)
            return (file.st_dev, file.st_ino) == (held.st_dev, held.st_ino)
        except OSError:
            return False

    def release(self) -> None:
        """Release the folder, once nobody writes there any more. Idempotent."""
        if self._held is not None:
            if self.is_good:
                give_back(self._root)
                remove_parts(self._root)
            self._held.close()
            self._held = None


def restore_replaced_if_idle(root: Path) -> None:
    """As `give_back`; nothing if a run is at work there, or the folder can only be read."""
    if any(root.glob(f".step-*{BEING_REPLACED}")):
        with suppress(CheckpointError):
            RunLock(root).release()


def _write_owner(held: _Held) -> None:
    """Write the owner of a lock into its file, for people."""
    about = {"pid": os.getpid(), "host": printable(socket.gethostname(), 200)}
    with suppress(OSError):  # as on a full disk
        os.ftruncate(held.fileno(), 0)
        os.pwrite(held.fileno(), json.dumps(about).encode(), 0)


def _owner_of(root: Path) -> str:
    """Say who holds a lock: by the kernel's list, or by the file, which anybody may write."""
    with suppress(OSError, ValueError, IndexError):
        there = os.stat(root)
        for entry in read_file("/proc/locks", 1 << 24).decode().splitlines():
            if "->" in entry:  # somebody waits for a lock, and has none
                continue
            kind, _, _, pid, where = entry.split()[1:6]
            major, minor, inode = where.split(":")
            device = os.makedev(int(major, 16), int(minor, 16))
            if kind == "FLOCK" and (device, int(inode)) == (there.st_dev, there.st_ino):
                return f"process {int(pid)}"
    # The kernel lists only processes of this machine; on NFS the owner may be on another one.
    with suppress(OSError, ValueError, RecursionError):
        owner = json.loads(read_file(root / _FILE, _LARGEST, follow=False))
        if isinstance(owner, dict) and not problem_of(owner, _OWNER):
            return f"process {owner['pid']} on {owner['host']}"
    return "another process"
