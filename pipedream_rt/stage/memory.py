"""The memory of this process."""

from __future__ import annotations

import ctypes
import resource
from contextlib import suppress
from pathlib import Path


def peak_memory_bytes() -> int:
    """Return the largest resident memory that this process has had.

    It is read from ``/proc`` where there is one, because ``getrusage`` lets a process begin with
    the peak of the process that started it.
    """
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def give_free_memory_back() -> None:
    """Let what is free now go back to the kernel."""
    with suppress(OSError, AttributeError):  # not glibc
        ctypes.CDLL(None).malloc_trim(0)


def give_memory_back_at_once() -> None:
    """Let large blocks go back to the kernel when they are freed, for the rest of this process.

    glibc keeps them for later, between blocks that are in use: a stage of which activations come
    and go keeps holes as large as a set of activations. It does so because blocks that come from
    the kernel must be cleared, which takes time.
    """
    with suppress(OSError, AttributeError):  # not glibc
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 1 << 20)


_M_MMAP_THRESHOLD = -3
"""The number of the option of ``mallopt``, of ``malloc.h``."""
