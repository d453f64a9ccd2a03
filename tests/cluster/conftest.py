"""What the tests of this room share."""

import resource
import socket
import threading
from contextlib import closing, contextmanager, suppress

import pytest
from support.callers import control_plane
from support.deadlines import LATEST_S

from pipedream_rt.cluster.control import Control


@pytest.fixture
def loop():
    """The event loop of the control plane, in its thread."""
    with control_plane() as control:
        yield control


@pytest.fixture
def ends():
    """The two ends of a control connection: the coordinator's and the worker's."""
    near, far = socket.socketpair()
    with closing(Control(near, "w")) as ours, closing(Control(far, "the coordinator")) as theirs:
        yield ours, theirs


@pytest.fixture
def crowd():
    """Strangers who connect to an address and go again, one after another."""

    @contextmanager
    def coming(address):
        over = threading.Event()

        def come():
            while not over.is_set():
                with suppress(OSError), socket.create_connection(address, LATEST_S):
                    pass

        thread = threading.Thread(target=come)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    return coming


@pytest.fixture
def few_descriptors():
    """Leaves this process so many descriptors; None for as many as before."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)

    def leave(count):
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        if count is not None:
            with socket.socket() as next_free:
                limit = next_free.fileno() + count
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, before[1]))

    yield leave
    leave(None)
