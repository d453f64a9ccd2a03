"""Workers whose words a test says itself: they join as workers do, and compute nothing."""

import asyncio
import os
import socket
import threading
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

from pipedream_rt.cluster.addresses import boot_id
from pipedream_rt.cluster.control import Control
from pipedream_rt.cluster.control_loop import ControlLoop
from pipedream_rt.cluster.identity import Secret
from pipedream_rt.cluster.records import HEAD, VERSION, packed
from pipedream_rt.deadline import Deadline
from pipedream_rt.software import software
from support.deadlines import LATEST_S

SECRET = Secret.generated()
"""The secret of the job."""

OTHER = Secret.generated()
"""The secret of another job."""


def soon(seconds=LATEST_S):
    return Deadline(timedelta(seconds=seconds))


def hello(name="w", **changes):
    """Return what a worker says first."""
    return {
        "type": "hello", "job": SECRET.job, "name": name, "pid": 7, "host": "here",
        "boot": boot_id(), "software": software(), "returns": True, "version": VERSION, **changes,
    }  # fmt: skip


def calling(address, secret=SECRET):
    """Connect to a coordinator's port, and encrypt the connection."""
    connection = socket.create_connection(address, timeout=LATEST_S)
    control = Control(connection, "the coordinator", local_host=connection.getsockname()[0])
    try:
        control.encrypt(secret.tls(called=False), soon())
    except BaseException:
        control.close()
        raise
    return control


def asked(control, said):
    """Say hello, and return the answer."""
    control.send(said)
    return control.receive(soon())


def ready(control, processor="a kind", obstacle=""):
    """Say that torch is imported."""
    control.send({"type": "ready", "processor": processor, "obstacle": obstacle})


def framed(data):
    """Return bytes, or what msgpack makes of a value, as a record is sent."""
    return HEAD.pack(len(data)) + data if isinstance(data, bytes) else packed(data)


@contextmanager
def control_plane():
    """The event loop of a control plane, which is closed in the end."""
    control = ControlLoop()
    try:
        yield control
    finally:
        control.close()


def in_loop(control, function, *arguments):
    """Call a function in the event loop, and return its result."""

    async def call():
        return function(*arguments)

    return control.run(call())


def until(control, condition):
    """Wait until a condition holds, which other coroutines of the event loop make true."""

    async def look():
        deadline = soon()
        while not condition():
            assert not deadline.expired(), "it does not come"
            await asyncio.sleep(0)

    control.run(look())


def open_files():
    """Return how many descriptors this process has open."""
    return len(os.listdir("/proc/self/fd"))


def until_main_thread_waits():
    """Wait until the main thread does nothing but wait, so that a signal wakes it.

    A signal that comes while it goes to sleep is not noticed before it wakes.
    """
    deadline, before = soon(), None
    while True:
        lines = Path(f"/proc/self/task/{os.getpid()}/status").read_text().splitlines()
        fields = dict(line.split(":", 1) for line in lines)
        now = fields["State"].split()[0], fields["voluntary_ctxt_switches"]
        if now == before and now[0] == "S":
            return
        assert not deadline.expired(), now
        before = now
        threading.Event().wait(0.02)  # longer than any thread waits for its turn in Python
