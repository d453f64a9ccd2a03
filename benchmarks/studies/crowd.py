"""How a rendezvous grows with the number of workers: seconds, memory and descriptors.

The coordinator of a group gathers workers that are processes of their own on this machine and only
speak the control protocol: they connect, say hello and that they are ready, and wait. They come by
TCP with TLS, as from other machines, or at a Unix socket. All of them start at once, and with two
cores that is most of the time; so the processor time of the coordinator is told beside the seconds.

    python benchmarks/studies/crowd.py --workers 10,100,1000 --by tls,unix

``--strangers`` measures what callers cost that belong to no job: they connect one after another,
send bytes of no meaning, and wait until they are dropped.

    python benchmarks/studies/crowd.py --workers 1 --strangers 2000
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import resource
import signal
import socket
import sys
import tempfile
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import click

from pipedream_rt.cluster.addresses import UNIX, listening
from pipedream_rt.cluster.dial import DialOptions, NotAdmitted, ask_to_join, reached
from pipedream_rt.cluster.identity import Secret
from pipedream_rt.cluster.listener import Listener
from pipedream_rt.cluster.peer_listeners import listening_at
from pipedream_rt.deadline import Deadline
from pipedream_rt.errors import PeerLost


def be_worker(name: str, address: str, secret: Secret) -> None:
    """Join, and wait until the coordinator closes the connection."""
    logging.disable()
    while True:
        try:
            control = reached(DialOptions(address, 60), "the coordinator", secret)
            ask_to_join(control, name, secret)
            break
        except (NotAdmitted, PeerLost):  # dropped as a stranger among too many: it comes again
            pass
    control.send({"type": "ready", "processor": "a kind", "obstacle": ""})
    control.receive(Deadline(timedelta(minutes=5)))


def crowd(count: int, address: str, secret: Secret) -> int:
    """Fork a process that forks so many workers, and return its number."""
    pid = os.fork()
    if pid:
        return pid
    os.setsid()
    for i in range(count):
        if os.fork() == 0:
            try:
                be_worker(f"w{i}", address, secret)
            finally:
                os._exit(0)
    for _ in range(count):
        os.wait()
    os._exit(0)


def strangers(count: int, address: tuple[str, int] | str) -> int:
    """Fork a process that calls so often with bytes of no meaning, and return its number."""
    pid = os.fork()
    if pid:
        return pid
    for _ in range(count):
        family = socket.AF_UNIX if isinstance(address, str) else socket.AF_INET
        with suppress(OSError), socket.socket(family) as caller:
            caller.connect(address)
            caller.sendall(os.urandom(64))
            while caller.recv(4096):
                pass
    os._exit(0)


def resident() -> int:
    """Bytes of memory that this process has."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def once(count: int, by: str, called: int) -> dict[str, object]:
    """Gather so many workers, and return what it took; with ``called`` strangers before them."""
    secret = Secret.generated()
    secret.tls(called=True)  # made once, and the workers are forked with it
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"crowd-{secret.job}"
        with listening("127.0.0.1", 0) if by == "tls" else listening_at(path) as listener:
            made = gathered(count, secret, listener, called)
            return {"workers": count, "by": by, **asyncio.run(made)}


async def gathered(
    count: int, secret: Secret, bound: socket.socket, called: int
) -> dict[str, float]:
    """Let so many workers join at a socket, and return what it took."""
    listener = Listener(secret, bound)
    listener.roster.most = count
    address = listener.address
    found: dict[str, float] = {}
    if called:
        listener.open()
        used = time.process_time()
        await asyncio.to_thread(os.waitpid, strangers(called, bound.getsockname()), 0)
        found = {"strangers": called, "ms_each": 1e3 * (time.process_time() - used) / called}
    memory, began, used = resident(), time.monotonic(), time.process_time()
    pid = crowd(count, UNIX + address if address.startswith("/") else address, secret)
    listener.open()
    try:
        coming = listener.roster.coming
        while len(coming) < count or not all(member.ready for member in coming):
            listener.changed.clear()
            await asyncio.wait_for(listener.changed.wait(), 60)
        took_s, cpu_s = time.monotonic() - began, time.process_time() - used
        grown, fds = resident() - memory, len(os.listdir("/proc/self/fd"))
    finally:
        await listener.close()
        os.killpg(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return {
        **found,
        "seconds": took_s,
        "processor_s": cpu_s,
        "mib": grown / 2**20,
        "descriptors": fds,
    }


@click.command()
@click.option("--workers", default="10,100,300,1000", show_default=True)
@click.option("--by", default="tls,unix", show_default=True)
@click.option("--strangers", "called", default=0, help="Callers of no job, before the workers.")
def main(workers: str, by: str, called: int) -> None:
    """Print a JSON line for each number of workers."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    for each in by.split(","):
        for count in map(int, workers.split(",")):
            click.echo(json.dumps(once(count, each, called)))


if __name__ == "__main__":
    assert "torch" not in sys.modules, "the workers would be copies of a large process"
    main()
