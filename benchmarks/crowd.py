"""How a rendezvous grows with the number of workers: seconds, memory and descriptors.

The coordinator of a group gathers workers that are processes of their own on this machine and only
speak the rendezvous: they connect, prove what they know, say that they are ready, and wait. All of
them start at once, and with two cores that is most of the time; so the processor time of the
coordinator is told beside the seconds.

    python benchmarks/crowd.py --workers 10,100,1000
"""

from __future__ import annotations

import json
import logging
import os
import resource
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import click

from pipedream_rt.cluster.addresses import listening
from pipedream_rt.cluster.control import Control
from pipedream_rt.cluster.dial import DialOptions, NoPlace, ask_to_join, connect
from pipedream_rt.cluster.forked_workers import ForkServer
from pipedream_rt.cluster.keys import Secret
from pipedream_rt.cluster.listener import Listener
from pipedream_rt.cluster.local_workers import LocalWorkers
from pipedream_rt.cluster.rendezvous import Rendezvous
from pipedream_rt.deadline import Deadline
from pipedream_rt.schedules import Plan, Shape


def be_worker(name: str, address: str, secret: Secret) -> None:
    """Join, and wait until the coordinator closes the connection."""
    logging.disable()
    while True:
        connection = connect(DialOptions(address, 60))
        control = Control(connection, "the coordinator", str(connection.getsockname()[0]))
        try:
            ask_to_join(control, name, secret, timedelta(seconds=60))
            break
        except NoPlace:  # dropped as a stranger among too many: a worker comes again too
            control.close()
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


def resident() -> int:
    """Bytes of memory that this process has."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def once(count: int) -> dict[str, float]:
    """Gather so many workers, and return what it took."""
    secret = Secret.generated()
    with listening("127.0.0.1", 0) as listener:
        host, port = listener.getsockname()
        door = Listener(key=secret.job_key(), listener=listener)
        local = LocalWorkers(1, ForkServer())
        plan = Plan(name="", shape=Shape(workers=count))
        rendezvous = Rendezvous(plan, local, door, timedelta(seconds=60))
        memory, began, used = resident(), time.monotonic(), time.process_time()
        pid = crowd(count, f"{host}:{port}", secret)
        try:
            rendezvous.gather(Deadline(timedelta(minutes=5)))
            took_s, cpu_s = time.monotonic() - began, time.process_time() - used
            grown, fds = resident() - memory, len(os.listdir("/proc/self/fd"))
        finally:
            for member in rendezvous.members:
                member.control.close()
            os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    return {
        "workers": count, "seconds": took_s, "processor_s": cpu_s, "mib": grown / 2**20,
        "descriptors": fds,
    }  # fmt: skip


@click.command()
@click.option("--workers", default="10,100,300,1000", show_default=True)
def main(workers: str) -> None:
    """Print a JSON line for each number of workers."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    for count in map(int, workers.split(",")):
        click.echo(json.dumps(once(count)))


if __name__ == "__main__":
    assert "torch" not in sys.modules, "the workers would be copies of a large process"
    main()
