"""What processes need for a stand-in accelerator: that it is built, and loaded with torch."""

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from support.deadlines import LATEST_S
from support.device import aside, standin


def script(body, **variables):
    """Run Python in a process that has the stand-in."""
    if reason := standin.why_not():
        pytest.skip(reason)
    aside.build()
    return subprocess.run(
        [sys.executable, "-c", body],
        env={**standin.environment(), **variables},
        capture_output=True,
        text=True,
        timeout=LATEST_S,
    )


def test_out_of_memory_is_the_error_of_torch_and_what_is_cached_is_given_back():
    done = script(
        """
import torch
assert torch.accelerator.device_count() == 3
with torch.Stream("standin"):
    x = torch.ones(8, device="standin")
assert (x + 1).tolist() == [2.0] * 8  # which is not checked
del x
torch.accelerator.synchronize()
take = lambda size, device: torch.empty(size, dtype=torch.uint8, device=device)
MB = 1 << 20
for device in ("standin:0", "standin:2"):
    for count in (6, 3):  # blocks of another size: what was freed is joined again
        kept = [take(6 * MB // count, device) for _ in range(count)]
        try:
            take(4 * MB, device)
        except torch.OutOfMemoryError as error:
            assert "Tried to allocate 4194304 bytes" in str(error)
        else:
            raise AssertionError
        del kept
    take(8 * MB, device)
try:
    torch.empty(1 << 60, dtype=torch.uint8, device="standin")
except torch.OutOfMemoryError:
    print("told")
""",
        STANDIN_DEVICES="3",
        STANDIN_MEMORY_MB="8",
        STANDIN_CHECK="0",
    )
    assert done.stdout == "told\n", done.stderr


def test_a_seed_replays():
    """That of the environment, and that which is given later."""
    done = script(
        """
import torch
event = torch.Event("standin")
for configured in ((), (5,), (6,)):
    for seed in configured:
        torch.ops.standin.configure(True, True, seed)
    said = ""
    for _ in range(20):
        torch.ones(1, device="standin")
        event.record()
        said += str([event.query() for _ in range(4)].index(True))
    print(said)
""",
        STANDIN_SEED="5",
    )
    first, again, other = done.stdout.split()
    assert len(first) == 20
    assert first == again != other


def test_processes_that_build_at_once_wait_for_one(tmp_path, monkeypatch):
    """Whoever comes second finds the library that the first has built."""
    from torch.utils import cpp_extension

    started, builds = threading.Event(), []

    def build(name, sources, build_directory, **options):
        builds.append(name)
        started.set()
        (standin.Path(build_directory) / f"{name}.so").write_text("built")

    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr(cpp_extension, "load", build)
    monkeypatch.setattr(standin, "why_not", lambda: None)
    built = standin.library()
    with ThreadPoolExecutor(3) as threads:
        for each in [threads.submit(standin._build, built) for _ in range(3)]:
            each.result(LATEST_S)
    assert builds == ["standin"]
    assert built.read_text() == "built"


def test_it_says_why_it_cannot_be_built(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr(torch, "__version__", f"{standin.TORCH}.0")
    assert standin.why_not() == "there is no compiler called no-such-compiler"
    with pytest.raises(RuntimeError, match="cannot be built: there is no compiler"):
        standin._build(standin.library())
    monkeypatch.setattr(torch, "__version__", "2.14.1")
    assert "written for torch 2.13, and this is 2.14.1" in standin.why_not()
    assert "2.14.1" in str(standin.library())
