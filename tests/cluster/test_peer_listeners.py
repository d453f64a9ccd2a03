"""Where a member listens for others: the addresses, who is let in, and what is left behind."""

import errno
import os
import socket
import stat
import tempfile
from pathlib import Path

import pytest
from support.rights import exit_code, forked_as_another_user

from pipedream_rt.cluster import peer_listeners as module
from pipedream_rt.cluster.environment import private_folder
from pipedream_rt.cluster.identity import is_same_user
from pipedream_rt.cluster.peer_listeners import (
    PeerAddress,
    listening_at,
    listening_for_peers,
    machine_of_process,
    remove_left_behind,
)


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
def test_there_is_a_socket_for_each_way(host):
    with listening_for_peers(host) as listeners:
        unix, tcp = listeners.sockets
        assert unix.getsockname() == listeners.address.path
        assert tcp.getsockname()[:2] == (listeners.address.host, listeners.address.port)
        assert listeners.address.host == host
        assert listeners.address.machine == machine_of_process()
        assert str(listeners.address.port) in listeners.address.in_words
        for listener in listeners.sockets:
            with socket.socket(listener.family) as caller:
                caller.connect(listener.getsockname())
        with listening_for_peers(host) as another:
            assert another.address.path != listeners.address.path
            assert another.address.machine == listeners.address.machine
    assert not Path(listeners.address.path).exists()


def test_within_the_machine_there_is_no_port_and_this_user_alone_can_enter_the_folder():
    with listening_for_peers(None) as listeners:
        assert [each.family for each in listeners.sockets] == [socket.AF_UNIX]
        assert (listeners.address.host, listeners.address.port) == ("", 0)
        assert listeners.address.in_words == listeners.address.path
        about = Path(listeners.address.path).parent.stat()
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
    with listening_for_peers(None) as listeners:
        assert [each.family for each in listeners.sockets] == [socket.AF_INET]
        assert listeners.address._replace(port=0) == PeerAddress(host="127.0.0.1")
        assert listeners.address.port
    assert "members of this machine are met by TCP: " in caplog.text


def test_a_socket_is_closed_when_something_fails():
    with pytest.raises(ZeroDivisionError), listening_for_peers("127.0.0.1"):
        raise ZeroDivisionError
    with pytest.raises(Exception, match="cannot listen at"), listening_for_peers("192.0.2.1"):
        pass


def test_a_forked_child_does_not_listen():
    """Else a child of the script that lives on would take callers, and answer none."""
    with listening_for_peers("127.0.0.1") as listeners:
        inherited = [listener.fileno() for listener in listeners.sockets]
        child = os.fork()
        if not child:
            os._exit(sum(os.path.exists(f"/proc/self/fd/{fd}") for fd in inherited))
        assert exit_code(child) == 0


def number_of_error(path):
    """The number of the error of a connection to a Unix socket; 0 for none."""
    with socket.socket(socket.AF_UNIX) as caller:
        return caller.connect_ex(path)


@pytest.mark.rights
def test_another_user_cannot_reach_the_unix_socket(folder):
    folder.chmod(0o755)  # as /tmp is
    with listening_for_peers(None) as listeners:
        stranger = forked_as_another_user(lambda: number_of_error(listeners.address.path))
        assert exit_code(stranger) == errno.EACCES
        assert number_of_error(listeners.address.path) == 0


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
    here = machine_of_process()
    names = ["gone", "elsewhere", "unnamed"]
    paths = {name: private_folder() / f"test-{name}" for name in names}
    outside = tmp_path / "kept"
    for path in (*paths.values(), outside):
        path.touch()
    climbing = f"{private_folder()}/../{outside.relative_to('/')}"
    remove_left_behind(
        [
            PeerAddress(machine=here, path=str(paths["gone"])),
            PeerAddress(machine="another", path=str(paths["elsewhere"])),
            PeerAddress(machine=here, path=str(outside)),
            PeerAddress(machine=here, path=climbing),
            PeerAddress(machine=here, path=str(private_folder())),
            PeerAddress(machine=here, path=str(private_folder() / "never was")),
            PeerAddress("127.0.0.1", 1),
        ]
    )
    left = [name for name, path in paths.items() if path.exists()]
    for name in left:
        paths[name].unlink()
    assert left == ["elsewhere", "unnamed"]
    assert outside.exists()
    assert private_folder().is_dir()


def test_a_machine_is_one_kernel_and_one_network(monkeypatch):
    here = machine_of_process()
    assert here == machine_of_process()
    monkeypatch.setattr(module, "boot_id", lambda: "another kernel")
    assert machine_of_process() != here
