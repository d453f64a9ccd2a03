"""Tries whether the machine has what a group and torch's RPC agent need, before torch is touched.

The agent (TensorPipe) ends its process by SIGABRT where it gets no descriptor, no thread or no
connection over loopback. So these are tried first, and a shortage becomes an error with words.
"""

from __future__ import annotations

import errno
import os
import resource
import threading

from pipedream_rt.errors import ConfigError
from pipedream_rt.transport.fence import OBSTACLES, can_reach_itself

_OWN, _FOR_EACH = 48, 14
"""Descriptors that a process opens at most, for itself and for each other member of the group.
Measured with 2 to 8 workers after the group had formed: a coordinator 28 and 9 for each, a worker
27 and one for each. While it forms there are more, and an encrypted connection takes two more."""

_THREADS = 16
"""Threads that a process starts at most for a group: the agent's and ours."""


def ensure_descriptors(others: int) -> None:
    """Raise the limit of open files as far as joining a group of ``others`` needs, or refuse."""
    _allow_descriptors(_OWN + _FOR_EACH * others)


def make_room_for_agent() -> None:
    """Refuse where this process could not have torch's agent besides."""
    if not can_reach_itself():
        what, remedy = OBSTACLES["loopback"]
        raise ConfigError(
            f"{what}, which torch RPC needs: {remedy}; PIPEDREAM_RT_RPC=off does without"
        )
    _try_threads()


def _allow_descriptors(needed: int) -> None:
    """Raise the soft limit of open files so that ``needed`` more can be opened, and no further."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        there = len(os.listdir("/proc/self/fd"))
    except OSError:  # not even this one can be opened
        there = soft
    wanted = there + needed
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    if hard != resource.RLIM_INFINITY and hard < wanted:
        raise ConfigError(
            f"a process of this job may need {needed} descriptors beside the {there} that it has "
            f"open, and it may have {hard}. Allow more, as by `ulimit -n {wanted}` where it is "
            'started, use fewer workers, or give Pipeline workers="serial"'
        ) from OSError(errno.EMFILE, os.strerror(errno.EMFILE))  # a recovery tries it again
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _try_threads() -> None:
    """Start as many threads at once as a group needs, and end them."""
    end, threads = threading.Event(), []
    try:
        for _ in range(_THREADS):
            thread = threading.Thread(target=end.wait, daemon=True)
            thread.start()
            threads.append(thread)
    except RuntimeError as error:
        raise ConfigError(
            f"this process can start {len(threads)} more threads, and {_THREADS} are needed: "
            f"{error}. Allow more processes, as by `ulimit -u` or the limit of the container"
        ) from error
    finally:
        end.set()
        for thread in threads:
            thread.join()
