"""Large pages for the memory of tensors that are received.

The kernel clears each page of new memory when it is first written. With pages of 4 KiB that takes
longer than copying a tensor into them. With pages of 2 MiB a tensor of 64 MiB comes in 14 ms
instead of 44 (``python benchmarks/hop.py link 67108864``). Smaller tensors gain less, because the C
library keeps freed blocks of up to 32 MiB for reuse: 4 MiB come in 1.0 ms instead of 1.5.
"""

from __future__ import annotations

import ctypes
import mmap
from functools import cache
from typing import Any

LARGE = 1 << 22
"""Bytes from which a block has a whole page of 2 MiB in it, wherever it begins."""


def want_large_pages(address: int, size: int) -> None:
    """Ask the kernel for large pages in a block of ``size`` bytes, where it has any."""
    madvise = _madvise()
    if madvise is None:
        return
    # Only whole pages: madvise refuses an address that begins none.
    first = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    whole = (address + size - first) // mmap.PAGESIZE * mmap.PAGESIZE
    madvise(ctypes.c_void_p(first), ctypes.c_size_t(whole), mmap.MADV_HUGEPAGE)


@cache
def _madvise() -> Any:
    """Return madvise of the C library; None where it, or large pages, are missing."""
    return getattr(ctypes.CDLL(None), "madvise", None) if hasattr(mmap, "MADV_HUGEPAGE") else None
