import mmap
import re
import sys
from pathlib import Path

import pytest
import torch

from pipedream_rt.messages import wire
from pipedream_rt.messages.wire import LARGE, described, place_for, want_large_pages


def large_pages_offered():
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    return setting.exists() and "[never]" not in setting.read_text()


def flags_at(address):
    """Return the flags of the mapping that an address is in."""
    for text in re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text()):
        first, last = (int(end, 16) for end in text.split()[0].split("-"))
        if first <= address < last:
            return text.partition("VmFlags:")[2].split()
    raise AssertionError("nothing is mapped there")


@pytest.mark.skipif(
    sys.platform != "linux", reason="mappings are read from /proc, which is Linux's"
)
@pytest.mark.skipif(not large_pages_offered(), reason="this kernel offers no large pages")
def test_a_large_tensor_that_comes_has_large_pages():
    tensor = place_for(described(torch.empty(16 * LARGE, dtype=torch.uint8))).tensor
    assert "hg" in flags_at(tensor.data_ptr() + 8 * LARGE)


def test_memory_stays_what_it_was():
    tensor = torch.arange(LARGE)
    want_large_pages(tensor.data_ptr() + 8, tensor.nbytes - 16)
    assert torch.equal(tensor, torch.arange(LARGE))


def test_where_there_are_none_nothing_happens(monkeypatch):
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    wire._madvise.cache_clear()
    try:
        want_large_pages(0, LARGE)
    finally:
        wire._madvise.cache_clear()
