"""The lock of a folder: one run at a time; a dead owner keeps nobody out."""

import errno
import fcntl
import json
import os
import signal
import stat
import sys
from subprocess import PIPE

import pytest
from support import forked
from support.deadlines import LATEST_S

from pipedream_rt import CheckpointError
from pipedream_rt.checkpoint import RunLock, checkpoints
from pipedream_rt.schema import read_file

HOLDER = r"""
import os, sys
from pathlib import Path
from pipedream_rt.checkpoint import RunLock
lock = RunLock(Path(sys.argv[1]))
if os.fork() == 0:  # as a data loader's worker, which outlives a script that is killed
    os.write(1, b"forked\n")
    sys.stdin.read()
    os._exit(0)
os.write(1, b"locked\n")
sys.stdin.read()
"""


def holder(folder):
    process = forked.Popen(
        [sys.executable, "-c", HOLDER, folder], stdin=PIPE, stdout=PIPE, text=True
    )
    assert {process.stdout.readline() for _ in range(2)} == {"locked\n", "forked\n"}
    return process


def test_a_second_run_is_told_who_has_the_folder(tmp_path):
    first = RunLock(tmp_path)
    with pytest.raises(CheckpointError, match=rf"in use by process {os.getpid()}, .*two runs"):
        RunLock(tmp_path)
    first.release()
    first.release()
    RunLock(tmp_path).release()
    assert list(tmp_path.iterdir()) == []


def test_a_lock_whose_descriptor_is_zero_is_released_too(tmp_path):
    """As where a program is begun without an input."""
    standard_input = os.dup(0)
    os.close(0)
    try:
        lock = RunLock(tmp_path)
        assert os.path.samestat(os.fstat(0), os.stat(tmp_path))
        lock.release()
        RunLock(tmp_path).release()
    finally:
        os.dup2(standard_input, 0)
        os.close(standard_input)


def test_who_waits_for_another_lock_does_not_hide_the_owner(tmp_path, monkeypatch):
    def with_a_waiter(*arguments):
        return b"1: -> FLOCK  ADVISORY  WRITE 7 00:01:2 0 EOF\n" + read_file(*arguments)

    monkeypatch.setattr("pipedream_rt.checkpoint.lock.read_file", with_a_waiter)
    first = RunLock(tmp_path)
    with pytest.raises(CheckpointError, match=rf"in use by process {os.getpid()}, "):
        RunLock(tmp_path)
    first.release()


@pytest.mark.processes
def test_the_lock_of_a_process_that_was_killed_is_free(tmp_path):
    """Although a child that it had forked still lives."""
    with holder(tmp_path) as process:
        with pytest.raises(CheckpointError, match=f"in use by process {process.pid}, "):
            RunLock(tmp_path)
        os.kill(process.pid, signal.SIGKILL)
        process.wait(LATEST_S)
        RunLock(tmp_path).release()
        process.stdin.close()


def test_a_new_owner_clears_away_what_a_dead_one_left(tmp_path):
    (tmp_path / ".step-00000003.77.part").mkdir()
    (tmp_path / ".step-00000002.gone.part").mkdir()
    (tmp_path / ".step-00000001.old.part").mkdir()
    lock = RunLock(tmp_path)
    assert [f.name for f in checkpoints(tmp_path)] == ["step-00000001"]
    lock.release()
    assert os.listdir(tmp_path) == ["step-00000001"]


@pytest.fixture
def nfs(monkeypatch):
    """A file system that locks files and no folders."""
    real = fcntl.flock

    def flock(fd, operation):
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            raise OSError(errno.EBADF, "Bad file descriptor")
        real(fd, operation)

    monkeypatch.setattr("fcntl.flock", flock)


def test_on_nfs_a_file_stands_for_the_folder(nfs, tmp_path):
    first = RunLock(tmp_path)
    with pytest.raises(CheckpointError, match=f"in use by process {os.getpid()} on .*two runs"):
        RunLock(tmp_path)
    assert first.is_good
    first.release()
    RunLock(tmp_path).release()


@pytest.mark.parametrize(
    "said",
    [b"", b"\xff", b"{", b"[" * 5000, b"{}", b'{"pid": "1\\n"}', b"x" * 5000,
     json.dumps({"pid": 3, "host": "\x1b[2J"}).encode()],
    ids=range(8),
)  # fmt: skip
def test_the_text_of_a_lock_file_is_not_trusted(nfs, tmp_path, said):
    lock = RunLock(tmp_path)
    (tmp_path / ".pipedream-rt.lock").write_bytes(said)
    with pytest.raises(CheckpointError, match="in use by another process, which"):
        RunLock(tmp_path)
    lock.release()


@pytest.mark.parametrize("kind", ["link", "folder"])
def test_a_lock_file_that_is_none(nfs, tmp_path, kind):
    place = tmp_path / ".pipedream-rt.lock"
    if kind == "link":
        place.symlink_to(tmp_path / "elsewhere")
    else:
        place.mkdir()
    with pytest.raises(CheckpointError, match="cannot be written to"):
        RunLock(tmp_path)
    assert not (tmp_path / "elsewhere").exists()


def test_a_folder_that_was_removed_meanwhile_is_another_one(tmp_path):
    root = tmp_path / "run"
    first = RunLock(root)
    assert first.is_good
    root.rmdir()
    assert not first.is_good
    second = RunLock(root)
    assert not first.is_good
    assert second.is_good
    first.release()
    second.release()


def test_a_link_to_a_folder_is_that_folder(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "latest").symlink_to(tmp_path / "run")
    first = RunLock(tmp_path / "latest")
    assert first.is_good
    with pytest.raises(CheckpointError, match="in use by"):
        RunLock(tmp_path / "run")
    first.release()


def test_where_the_file_system_keeps_no_locks_that_is_said(tmp_path, monkeypatch, caplog):
    def flock(fd, operation):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("fcntl.flock", flock)
    first, second = RunLock(tmp_path), RunLock(tmp_path)
    assert "keeps no locks: see to it that no other run" in caplog.text
    first.release()
    second.release()
