"""What the tests of this room share."""

import socket
from contextlib import closing

import pytest
from support.callers import control_plane

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
