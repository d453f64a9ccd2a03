"""Every test must leave the process as it found it."""

import os
import threading
import traceback
from pathlib import Path

import pytest
import torch
from support.ticking import Clock

from pipedream_rt.cluster.fork_server import fork_server


def children() -> set[int]:
    """Process ids of all children of this process, zombies included."""
    found: set[int] = set()
    for task in Path("/proc/self/task").iterdir():
        try:
            found.update(map(int, (task / "children").read_text().split()))
        except OSError:
            continue  # the thread has ended meanwhile
    return found


def own_children() -> set[int]:
    """Those of them that a test may have left behind: the fork server ends with this process."""
    return children() - {fork_server().pid}


def stack_of(thread: threading.Thread) -> str:
    import sys

    frame = sys._current_frames().get(thread.ident or 0)
    return "".join(traceback.format_stack(frame)) if frame else "(ended)"


@pytest.fixture(autouse=True)
def nothing_left_behind():
    """Fail a test that leaks a thread or a child process, and say where the thread is."""
    torch.set_num_threads(1)
    threads_before, children_before = set(threading.enumerate()), own_children()
    yield
    leaked = [t for t in threading.enumerate() if t not in threads_before and t.is_alive()]
    # A pipeline's threads are joined by close; only the thread that pytest-timeout owns may come.
    leaked = [
        t for t in leaked if "timeout" not in t.name.lower() and not t.name.startswith("pytest")
    ]
    assert not leaked, "leaked threads:\n" + "\n".join(f"{t.name}\n{stack_of(t)}" for t in leaked)
    assert not own_children() - children_before, f"leaked processes of {os.getpid()}"


@pytest.fixture
def environment(monkeypatch):
    """No variable of an outer launcher decides where the stages run; workers know a secret."""
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "PIPEDREAM_RT_LISTEN_FD"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIPEDREAM_RT_SECRET", "a secret of these tests alone")


@pytest.fixture
def clock(monkeypatch):
    """Let the profiler take its time from layers that move a clock; see `support.ticking`."""
    import pipedream_rt.profiling

    monkeypatch.setattr(pipedream_rt.profiling, "time", Clock)
    monkeypatch.setattr(pipedream_rt.profiling, "_process_bytes", lambda: 1e6)
