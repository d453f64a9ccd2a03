"""The memory of this process."""

from __future__ import annotations

import resource
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
