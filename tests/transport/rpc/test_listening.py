"""A library that begins to listen is held up until somebody has seen to it who may connect."""

import errno
import socket
import threading

import pytest

from pipedream_rt.transport.fence import accept_only
from pipedream_rt.transport.rpc import listening


@pytest.fixture
def held():
    """Skip where the kernel does not offer it."""
    reasons = []

    def on_thread():
        try:
            listening.os.close(listening._ask_at_listen())
        except OSError as error:
            reasons.append(str(error))

    thread = threading.Thread(target=on_thread)
    thread.start()
    thread.join()
    if reasons:
        pytest.skip(f"no seccomp with user notification here: {reasons[0]}")


@pytest.fixture
def library():
    """What stands for torch: it listens on a thread that its own thread has started."""
    sockets = []

    def begin():
        sockets.append(socket.socket())
        sockets[0].bind(("127.0.0.1", 0))
        thread = threading.Thread(target=sockets[0].listen)
        thread.start()
        thread.join()

    begin.sockets = sockets
    yield begin
    for each in sockets:
        each.close()


def listens(fd):
    with socket.socket(fileno=listening.os.dup(fd)) as copy:
        return bool(copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


@pytest.mark.rights
@pytest.mark.threads
def test_the_filter_stands_before_anybody_can_connect(held, library):
    before = []

    def may_listen(fd):
        before.append(listens(fd))
        accept_only(fd, [])

    listening.run(library, may_listen)
    assert before == [False]
    assert listens(library.sockets[0].fileno())
    with pytest.raises(TimeoutError):
        socket.create_connection(library.sockets[0].getsockname(), timeout=0.2)


@pytest.mark.threads
def test_other_threads_are_not_held_up(held, library):
    def may_listen(fd):
        with socket.create_server(("127.0.0.1", 0)):  # on this thread, while the other one waits
            pass

    listening.run(library, may_listen)


@pytest.mark.threads
def test_errors_come_out(held, library):
    def refuses(fd):
        raise OSError(errno.EPERM, "no filter")

    with pytest.raises(OSError, match="no filter"):
        listening.run(library, refuses)
    with pytest.raises(ZeroDivisionError):
        listening.run(lambda: 1 / 0, refuses)


class Kernel:
    """Says to each system call what it is told to, and notes them."""

    def __init__(self, **answers):
        self.asked, self._answers = [], answers

    def prctl(self, option, *rest):
        self.asked.append("prctl")
        assert (option, rest) == (38, (1, 0, 0, 0))
        return self._answers["prctl"]

    def syscall(self, number, *rest):
        self.asked.append("seccomp")
        assert (number, rest[:2]) == (317, (1, 8))
        return self._answers["seccomp"]


@pytest.mark.parametrize(
    ("answers", "asked", "found"),
    [
        ({"prctl": 0, "seccomp": 7}, ["prctl", "seccomp"], 7),
        ({"prctl": -1, "seccomp": 7}, ["prctl"], None),
        ({"prctl": 0, "seccomp": -1}, ["prctl", "seccomp"], None),
    ],
    ids=["both", "may gain rights", "no filter"],
)
def test_only_a_thread_that_can_gain_no_rights_is_filtered(answers, asked, found, monkeypatch):
    kernel = Kernel(**answers)
    monkeypatch.setattr(listening, "_libc", kernel)
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    if found is None:
        with pytest.raises(OSError, match="Errno"):
            listening._ask_at_listen()
    else:
        assert listening._ask_at_listen() == found
    assert kernel.asked == asked


@pytest.mark.threads
def test_where_the_kernel_does_not_ask_the_library_listens_all_the_same(library, monkeypatch):
    monkeypatch.setattr("platform.machine", lambda: "another")
    asked = []
    listening.run(library, asked.append)
    assert asked == []
    assert listens(library.sockets[0].fileno())
