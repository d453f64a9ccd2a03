"""The doors of a member: where they are, whom they let in, and that nothing is left of them."""

import errno
import os
import socket
import stat
import tempfile
from pathlib import Path

import pytest
from support.rights import exit_code, forked_as_another_user

from pipedream_rt.cluster import doors as module
from pipedream_rt.cluster.doors import (
    DoorAddress,
    listening_at,
    opened_doors,
    place_of_process,
    remove_left_behind,
)
from pipedream_rt.cluster.environment import private_folder
from pipedream_rt.cluster.identity import is_same_user


@pytest.fixture
def folder(monkeypatch):
    """A folder for temporary files of this test alone, with a short name."""
    with tempfile.TemporaryDirectory() as made:
        monkeypatch.setattr(tempfile, "tempdir", made)
        yield Path(made)


@pytest.fixture(autouse=True)
def nothing_left(folder):
    """No descriptor stays open, and no path stays in the folder."""
    before = set(os.listdir("/proc/self/fd"))
    yield
    assert set(os.listdir("/proc/self/fd")) == before
    assert list(folder.glob("*/link-*")) == []


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_there_is_a_door_for_each_way(host):
    with opened_doors(host) as doors:
        unix, tcp = doors.listeners
        assert unix.getsockname() == doors.address.path
        assert tcp.getsockname()[:2] == (doors.address.host, doors.address.port)
        assert doors.address.host == host
        assert doors.address.place == place_of_process()
        assert str(doors.address.port) in doors.address.in_words
        for listener in doors.listeners:
            with socket.socket(listener.family) as caller:
                caller.connect(listener.getsockname())
    assert not Path(doors.address.path).exists()


def test_within_the_machine_there_is_no_port():
    with opened_doors(None) as doors:
        assert [each.family for each in doors.listeners] == [socket.AF_UNIX]
        assert (doors.address.host, doors.address.port) == ("", 0)
        assert doors.address.in_words == doors.address.path


def test_the_path_is_in_a_folder_that_this_user_alone_can_enter(folder):
    with opened_doors(None) as doors:
        about = Path(doors.address.path).parent.stat()
        assert stat.S_IMODE(about.st_mode) == 0o700
        assert about.st_uid == os.geteuid()


@pytest.mark.parametrize("why", ["long name", "open folder", "a link", "a file", "no folder"])
def test_without_a_folder_there_is_a_port_of_loopback(folder, monkeypatch, why, caplog):
    """Nothing is put into a folder of which others may have the say."""
    caplog.set_level("INFO")
    private = folder / f"pipedream-rt-{os.geteuid()}"
    match why:
        case "long name":
            (folder / ("x" * 100)).mkdir()
            monkeypatch.setattr(tempfile, "tempdir", str(folder / ("x" * 100)))
        case "open folder":
            private.mkdir(mode=0o777)
            private.chmod(0o777)
        case "a link":
            (folder / "elsewhere").mkdir(mode=0o700)
            private.symlink_to(folder / "elsewhere")
        case "a file":
            private.write_text("")
        case "no folder":
            monkeypatch.setattr(tempfile, "tempdir", str(folder / "none"))
    with opened_doors(None) as doors:
        assert [each.family for each in doors.listeners] == [socket.AF_INET]
        assert doors.address._replace(port=0) == DoorAddress(host="127.0.0.1")
        assert doors.address.port
    assert "members of this machine are met by TCP: " in caplog.text


def test_two_members_have_doors_of_their_own():
    with opened_doors("127.0.0.1") as one, opened_doors("127.0.0.1") as other:
        assert one.address.path != other.address.path
        assert one.address.port != other.address.port
        assert one.address.place == other.address.place


def test_a_door_is_closed_when_something_fails():
    with pytest.raises(ZeroDivisionError), opened_doors("127.0.0.1"):
        raise ZeroDivisionError
    with pytest.raises(Exception, match="cannot listen at"), opened_doors("192.0.2.1"):
        pass


def test_a_forked_child_does_not_listen():
    """Else a child of the script that lives on would take callers, and answer none."""
    with opened_doors("127.0.0.1") as doors:
        inherited = [listener.fileno() for listener in doors.listeners]
        child = os.fork()
        if not child:
            code = 0
            for fd in inherited:
                try:
                    os.fstat(fd)
                    code = 1
                except OSError:
                    pass
            os._exit(code)
        assert exit_code(child) == 0


def number_of_error(path):
    """The number of the error of a connection to a Unix socket; 0 for none."""
    with socket.socket(socket.AF_UNIX) as caller:
        return caller.connect_ex(path)


@pytest.mark.rights
def test_another_user_cannot_reach_the_unix_socket(folder):
    folder.chmod(0o755)  # as /tmp is
    with opened_doors(None) as doors:
        stranger = forked_as_another_user(lambda: number_of_error(doors.address.path))
        assert exit_code(stranger) == errno.EACCES
        assert number_of_error(doors.address.path) == 0


@pytest.mark.rights
def test_the_kernel_tells_of_which_user_the_other_end_is(folder):
    """Where a folder should be open to others, against all care."""
    folder.chmod(0o755)
    with listening_at(folder / "open") as listener:
        (folder / "open").chmod(0o777)
        assert exit_code(forked_as_another_user(lambda: number_of_error(str(folder / "open")))) == 0
        with listener.accept()[0] as stranger:
            assert not is_same_user(stranger)
        with socket.socket(socket.AF_UNIX) as caller:
            caller.connect(str(folder / "open"))
            assert is_same_user(caller)
            with listener.accept()[0] as called:
                assert is_same_user(called)


def test_what_a_killed_member_has_left_is_removed_and_nothing_else(tmp_path):
    here = place_of_process()
    names = ["gone", "elsewhere", "unnamed"]
    paths = {name: private_folder() / f"test-{name}" for name in names}
    outside = tmp_path / "kept"
    for path in (*paths.values(), outside):
        path.touch()
    climbing = f"{private_folder()}/../{outside.relative_to('/')}"
    remove_left_behind(
        [
            DoorAddress(place=here, path=str(paths["gone"])),
            DoorAddress(place="another", path=str(paths["elsewhere"])),
            DoorAddress(place=here, path=str(outside)),
            DoorAddress(place=here, path=climbing),
            DoorAddress(place=here, path=str(private_folder())),
            DoorAddress(place=here, path=str(private_folder() / "never was")),
            DoorAddress("127.0.0.1", 1),
        ]
    )
    left = [name for name, path in paths.items() if path.exists()]
    for name in left:
        paths[name].unlink()
    assert left == ["elsewhere", "unnamed"]
    assert outside.exists()
    assert private_folder().is_dir()


def test_a_place_is_one_kernel_and_one_network(monkeypatch):
    here = place_of_process()
    assert here == place_of_process()
    monkeypatch.setattr(module, "boot_id", lambda: "another kernel")
    assert place_of_process() != here
