"""The findings of a machine about itself."""

from __future__ import annotations

import hashlib
import os
import resource
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any

from pipedream_rt.cluster.environment import memory_is_shared, rpc_of_environment
from pipedream_rt.schema import read_file
from pipedream_rt.software import processor, software
from pipedream_rt.transport.fence import obstacle

Facts = dict[str, Any]
"""The findings of a machine, by name; the values are those of JSON."""

_LARGEST = 1 << 20
"""Bytes of a source file; a larger one is left out."""

_MOST_FILES = 2000

_TOKEN = 1 << 10
"""Bytes that a token may have."""


def facts(folder: str, token: str, source: str) -> Facts:
    """Return the findings of this machine about itself.

    ``folder`` is the one that all machines are to share, ``source`` has the user's source files;
    empty for none. ``token`` is what the first machine has written into `token_file`.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return {
        "host": socket.gethostname(),
        "software": software(),
        "processor": processor(),
        "memory": _memory(),
        "shm": _free("/dev/shm"),
        "shares": _shares(),
        "rpc": obstacle(),
        "rpc_wish": rpc_of_environment(),
        "files": soft,
        "files_at_most": hard,
        "accelerator": _accelerator(),
        "source": digest_of(Path(source)) if source else "",
        "folder": _shared(folder, token) if folder else "",
    }


def token_file(folder: str, token: str) -> Path:
    """Return the file that shows machines whether they share a folder."""
    return Path(folder) / f".pipedream-rt-doctor-{token[:8]}"


def digest_of(folder: Path) -> str:
    """Return a digest of the Python files in and below a folder; empty if there are none."""
    digest, count = hashlib.blake2b(digest_size=8), 0
    for root, folders, files in os.walk(folder):
        # In place, so that `walk` enters these alone: no caches, virtual environments, dot folders.
        # Sorted, as machines list folders in different orders.
        folders[:] = sorted(
            name
            for name in folders
            if not name.startswith((".", "__")) and not (Path(root) / name / "pyvenv.cfg").exists()
        )
        for name in sorted(files):
            path = Path(root) / name
            if name.endswith(".py") and count < _MOST_FILES:
                # A pipe, a device, a link to nothing, or a file that is too large.
                with suppress(OSError, ValueError):
                    data = read_file(path, _LARGEST)
                    count += 1
                    digest.update(str(path.relative_to(folder)).encode() + b"\0")
                    digest.update(data + b"\0")
    return digest.hexdigest() if count else ""


def _shared(folder: str, token: str) -> str:
    """Say what is wrong with the shared folder as this machine sees it; "ok" if nothing is."""
    shown = token_file(folder, token)
    try:
        os.listdir(folder)  # makes NFS look again, where it remembers what was there
        if read_file(shown, _TOKEN) != token.encode():
            return "has another file of the same name"
        mine = shown.with_suffix(f".{socket.gethostname()}.{os.getpid()}")
        mine.write_text(token)
        mine.unlink()
    except OSError as error:
        return f"{error.strerror}: {error.filename or shown}"
    except ValueError as error:
        return f"{error}: {shown}"
    return "ok"


def _memory() -> int:
    """Bytes of memory that programs can still get; 0 if the system does not say."""
    with suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return 0


def _free(path: str) -> int:
    """Bytes that are free in a file system; 0 if there is none."""
    with suppress(OSError):
        about = os.statvfs(path)
        return about.f_bavail * about.f_frsize
    return 0


def _shares() -> bool:
    """Whether large values between workers of this machine can go through shared memory."""
    if not memory_is_shared():
        return False
    try:
        fd = os.memfd_create("pipedream-rt", os.MFD_CLOEXEC)
    except OSError:
        return False
    with os.fdopen(fd, "wb"), suppress(OSError):
        os.posix_fallocate(fd, 0, _LARGEST)  # a file may be had, and no memory for it
        return True
    return False


def _accelerator() -> str:
    """Return how many accelerators torch sees, and of which kind; empty for none."""
    # The rest of the doctor answers without torch, also where it is broken.
    import torch

    found = torch.accelerator.current_accelerator()
    # torch may be built for an accelerator that this machine lacks.
    count = 0 if found is None else torch.accelerator.device_count()
    return f"{count} of {found.type}" if found is not None and count else ""
