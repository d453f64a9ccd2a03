"""What is checked of values from outside, and how files are written for a user."""

import errno
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from support.deadlines import LATEST_S

from pipedream_rt.schema import (
    has_levels,
    is_count,
    is_utf8,
    number,
    open_file,
    open_to_append,
    problem_of,
    seconds,
    shown,
    whole,
    write_file,
)


@pytest.mark.parametrize("value", [10**400, -(10**400), float("inf"), float("nan"), True, "1"])
def test_what_is_no_number_of_a_usual_size(value):
    assert not number(value)
    assert not seconds(value)


def nested(levels):
    """A list or a dict in another one, so many times."""
    value = 7
    for level in range(levels):
        value = [value] if level % 2 else {"k": value}
    return value


def test_levels_of_a_value_are_counted_without_recursion():
    assert has_levels(7, 0)
    assert has_levels(nested(4), 4)
    assert not has_levels(nested(5), 4)
    assert not has_levels(nested(100_000), 4)


def test_a_value_from_outside_is_shown_whatever_its_depth_and_length():
    assert shown("it's \x1b") == repr("it's \x1b")
    assert shown([1, {"a": b"x"}]) == "[1, {'a': b'x'}]"
    assert shown("x" * 5000, 10) == "'xxxxxxxxx..."
    deep = nested(100_000)
    assert shown(deep) == "[{'k': [{'k': [{'k': [...]}]}]}]"
    assert problem_of({"n": deep}, {"n": whole(0)}).startswith("its 'n' is [{")


def test_a_text_with_lone_surrogates_is_no_utf_8():
    assert is_utf8("")
    assert is_utf8("plain? caf\u00e9 \ufffd \U0001f600")
    assert not is_utf8("caf\udce9")
    assert not is_utf8("\ud83d\ude00")


@pytest.mark.parametrize("text", ["", "-1", "1.5", "x", "\u0663", "1" * 5000, "1" * 19])
def test_what_is_no_count(text):
    assert not is_count(text)
    assert is_count("0123")


@pytest.mark.parametrize(
    ("make", "words"), [(os.mkdir, "Is a directory"), (os.mkfifo, "it is no ordinary file")]
)
def test_what_is_no_file_is_refused_at_once_and_closed(tmp_path, make, words):
    make(tmp_path / "file")
    before = os.listdir("/proc/self/fd")
    with pytest.raises(OSError, match=words):
        open_file(tmp_path / "file")
    assert os.listdir("/proc/self/fd") == before


def test_a_file_is_replaced_as_a_whole_and_keeps_its_permissions(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")
    path.chmod(0o600)
    before = path.stat().st_ino
    write_file(path, b"new", memoryview(b" text"))
    assert path.read_bytes() == b"new text"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert path.stat().st_ino != before  # whoever reads the old one reads it to its end
    assert os.listdir(tmp_path) == ["file"]


def test_a_link_stays_one(tmp_path):
    (tmp_path / "there").mkdir()
    place, link = tmp_path / "there" / "file", tmp_path / "link"
    link.symlink_to(place)
    for text in (b"first", b"second"):  # there is nothing at first
        write_file(link, text)
        assert link.is_symlink()
        assert place.read_bytes() == text


def test_a_device_is_written_to(tmp_path):
    controller, terminal = os.openpty()
    try:
        path = os.ttyname(terminal)
        write_file(path, b"to a terminal")
        assert stat.S_ISCHR(os.stat(path).st_mode)
        assert os.read(controller, 100) == b"to a terminal"
    finally:
        os.close(controller)
        os.close(terminal)
    write_file(os.devnull, b"to nobody")
    assert stat.S_ISCHR(os.stat(os.devnull).st_mode)


@pytest.mark.rights
def test_a_device_in_a_folder_of_ours_stays_one(tmp_path):
    """Root could put a file in its place, and would where files are renamed over what is there."""
    path = tmp_path / "null"
    os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(1, 3))
    write_file(path, b"to nobody")
    assert stat.S_ISCHR(path.lstat().st_mode)
    disk = tmp_path / "disk"
    os.mknod(disk, 0o600 | stat.S_IFBLK, os.makedev(7, 200))
    with pytest.raises(OSError, match="neither a file nor a pipe"):
        write_file(disk, b"")


def test_a_pipe_is_written_to_if_somebody_reads(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    with pytest.raises(OSError, match="No such device or address"):
        write_file(path, b"to nobody")
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_file(path, b"to a reader")
        assert os.read(reader, 100) == b"to a reader"
    finally:
        os.close(reader)
    assert stat.S_ISFIFO(path.lstat().st_mode)


@pytest.mark.parametrize("to", ["/dev/stdout", "/dev/fd/1", "/proc/self/fd/1"])
@pytest.mark.parametrize("shell", ["> {}", ">> {}", "| cat > {}"])
def test_what_a_process_has_open_is_written_on(to, shell, tmp_path):
    code = (
        "from pipedream_rt.schema import write_file\n"
        f"print('first', flush=True); write_file({to!r}, b'second\\n'); print('third')"
    )
    path = tmp_path / "out"
    command = f'"$0" -c "$1" {shell.format(path)}'
    subprocess.run(["sh", "-c", command, sys.executable, code], check=True, timeout=LATEST_S)
    assert path.read_text() == "first\nsecond\nthird\n"


@pytest.mark.parametrize("how", ["fd", "task/{pid}/fd", "fd of another process"])
def test_what_has_no_name_any_more_is_written_on_too(how):
    """The name that the kernel shows for it is that of no file."""
    fd, pid = os.memfd_create("nameless"), os.getpid()
    try:
        if how == "fd of another process":
            place = f"/proc/{pid}/fd/{fd}"
            code = f"from pipedream_rt.schema import write_file; write_file({place!r}, b'text')"
            subprocess.run([sys.executable, "-c", code], check=True, timeout=LATEST_S)
        else:
            write_file(f"/proc/{pid}/{how.format(pid=pid)}/{fd}", b"text")
        assert os.pread(fd, 100, 0) == b"text"
    finally:
        os.close(fd)
    assert not list(Path("/").glob("memfd:*"))


def test_a_path_that_only_looks_like_a_descriptor_is_refused():
    with pytest.raises(OSError, match="neither a file nor a pipe"):
        write_file("/dev/fd/abc", b"text")


def test_where_a_folder_lets_nothing_be_replaced_a_file_is_written_in_place(tmp_path, monkeypatch):
    """As one that is mounted into a container by itself."""
    path = tmp_path / "file"
    path.write_text("a longer text")

    def refuse(self, target):
        raise OSError(errno.EBUSY, "busy")

    monkeypatch.setattr(Path, "replace", refuse)
    write_file(path, b"text")
    assert path.read_bytes() == b"text"
    with pytest.raises(OSError, match="busy"):
        write_file(tmp_path / "new", b"text")
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.rights
def test_a_link_of_another_user_is_not_followed_where_everybody_may_lay_one(tmp_path):
    victim, open_to_all = tmp_path / "victim", tmp_path / "open"
    victim.write_text("mine")
    open_to_all.mkdir()
    open_to_all.chmod(0o1777)
    link = open_to_all / "report.html"
    link.symlink_to(victim)
    os.lchown(link, 1500, 1500)
    with pytest.raises(OSError, match="a link of another user"):
        write_file(link, b"text")
    assert victim.read_text() == "mine"


@pytest.mark.rights
def test_a_file_keeps_its_owner(tmp_path):
    path = tmp_path / "file"
    path.touch(mode=0o600)
    os.chown(path, 1500, 1500)
    write_file(path, b"text")
    about = path.stat()
    assert (about.st_uid, about.st_gid, stat.S_IMODE(about.st_mode)) == (1500, 1500, 0o600)


@pytest.mark.parametrize("name", [".", "no/such/folder", "n" * 300, "with\0nul", "loop"])
def test_what_cannot_be_written_leaves_nothing(name, tmp_path):
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(OSError, match=r".") as found:
        write_file(tmp_path / name, b"text")
    assert found.value.strerror
    assert os.listdir(tmp_path) == ["loop"]


def test_a_write_that_fails_leaves_the_file_as_it_was(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")
    with pytest.raises(TypeError):
        write_file(path, b"new", "no bytes")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["file"]


def test_lines_are_not_added_to_a_pipe_that_nobody_reads(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="No such device or address"):
        open_to_append(tmp_path / "pipe", os.O_WRONLY | os.O_APPEND)
