"""Processes that end with the one that has started them."""

import os
import select
import signal

import pytest

from pipedream_rt.cluster.subprocesses import dies_with_parent


@pytest.mark.processes
@pytest.mark.parametrize("late", [False, True])
def test_a_child_dies_with_its_parent_also_where_that_was_first(late):
    """The kernel sends no signal for a parent that was dead when the child asked for one."""
    reading, writing = os.pipe()
    first = os.fork()
    if first == 0:  # the parent
        ask = dies_with_parent(signal.SIGKILL)
        if os.fork() == 0:  # the child
            if not late:
                ask()
            parent = os.pidfd_open(os.getppid())
            os.write(writing, b"ready")
            select.select([parent], [], [])  # it is dead, and has left its child to another one
            if late:
                ask()
            os.write(writing, b"alive")
            os._exit(0)
        os.read(reading, 5)
        os._exit(0)
    os.close(writing)
    os.waitpid(first, 0)
    assert os.read(reading, 5) == b""
    os.close(reading)
