"""Processes of `pipedream-rt run` that stand for the nodes of a job, on one machine."""

import functools
import os
import signal
import sys
import tempfile
from contextlib import ExitStack, contextmanager
from pathlib import Path

from . import everywhere
from .ports import free_port
from .slurm import until
from .two_hosts import SECRET, Child

SCRIPT = str(Path(__file__).parent / "everywhere.py")
COMMAND = [sys.executable, "-c", "from pipedream_rt.cli import main; main()"]
RUN = [*COMMAND, "run"]


@functools.cache
def expected(steps):
    """The digest of the same training in this process."""
    with tempfile.TemporaryDirectory() as folder:
        return everywhere.trained(folder, steps, "serial")


def own_environment(**more):
    """The environment of this process without what would make it part of a job."""
    mine = ("PIPEDREAM_RT_", "PET_", "SLURM_", "MASTER_")
    kept = {key: value for key, value in os.environ.items() if not key.startswith(mine)}
    return {**kept, "PYTHONUNBUFFERED": "1", **more}


def command_in(folder):
    """Make a program `pipedream-rt` in a folder, for whoever finds it by PATH."""
    folder.mkdir()
    place = folder / "pipedream-rt"
    lines = (f"#!{sys.executable}", "from pipedream_rt.cli import main", "main()", "")
    place.write_text("\n".join(lines))
    place.chmod(0o755)


def calls_to(port):
    """How many connections to a port stand, as those see them that have called there."""
    lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
    fields = [line.split() for line in lines]
    return sum(
        there.endswith(f":{port:04X}") and state == "01" for _, _, there, state, *_ in fields
    )


def below(pid):
    """The processes that a process has started, and those that they have."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [each for child in map(int, children) for each in (child, *below(child))]


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_for_end(processes):
    until(lambda: not any(map(is_alive, processes)), "the end of a node")


class Nodes:
    """The nodes of one job, which find each other on loopback.

    Args:
        children: Ends them.
        folder: Where the script has its checkpoints.
        size: How many nodes there are.
        steps: How long the script trains.
    """

    def __init__(self, children, folder, size=3, steps=600):
        self.port = free_port()
        self._children = children
        self._folder = folder
        self.size = size
        self.steps = steps

    def kill(self, node):
        """Kill the command of a node, and wait until its workers are gone too."""
        processes = below(node.pid)
        node.signal(signal.SIGKILL)
        node.ended()
        wait_for_end(processes)

    def words(self, rank):
        """What tells the command which node of which job it is."""
        at = f"127.0.0.1:{self.port}"
        return ["--nnodes", str(self.size), "--node-rank", str(rank), "--rdzv-endpoint", at]

    def start(self, rank, *options, secret=SECRET, script=None, **more):
        """Start a node."""
        script = script or [SCRIPT, str(self._folder), "--steps", str(self.steps)]
        command = [*RUN, *self.words(rank), *options, *script]
        child = Child(command, own_environment(PIPEDREAM_RT_SECRET=secret, **more))
        self._children.callback(child.close)
        return child


@contextmanager
def nodes(folder, **more):
    with ExitStack() as children:
        yield Nodes(children, folder, **more)
