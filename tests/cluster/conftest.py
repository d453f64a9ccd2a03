"""What the tests of this room share."""

import pytest
from support.callers import control_plane


@pytest.fixture
def loop():
    """The event loop of the control plane, in its thread."""
    with control_plane() as control:
        yield control
