"""The memory of this process."""

from __future__ import annotations

import ctypes
import resource
from contextlib import suppress
from pathlib import Path


def peak_memory_bytes() -> int:
    """Return the largest resident memory that this process has had."""
    # `getrusage` lets a process begin with the peak of the process that started it; /proc does not.
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def give_free_memory_back() -> None:
    """Give the memory that is free now back to the kernel."""
    with suppress(OSError, AttributeError):  # not glibc
        ctypes.CDLL(None).malloc_trim(0)


def give_memory_back_at_once() -> None:
    """Give large blocks back to the kernel when they are freed, for the rest of this process."""
    # glibc keeps them for later, since the kernel clears each new block, which takes time. As the
    # activations of a stage come and go, holes as large as a set of them would stay.
    with suppress(OSError, AttributeError):  # not glibc
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 1 << 20)


_M_MMAP_THRESHOLD = -3
"""The option of ``mallopt`` by that name in ``malloc.h``."""
