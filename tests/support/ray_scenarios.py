"""What happens on a Ray cluster of several nodes; each scenario runs in a process of its own.

    python ray_scenarios.py SCENARIO FOLDER

The nodes are processes of ``ray.cluster_utils.Cluster``, which a driver's process owns.
"""

import atexit
import functools
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from contextlib import contextmanager
from pathlib import Path

# Ray notes there which cluster of this machine is the newest; other drivers would take that one.
FOLDER = os.environ["RAY_TMPDIR"] = tempfile.mkdtemp(prefix="ray-")

import ray
from ray.cluster_utils import Cluster

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this file is started as a program

from support import elastic
from support.deadlines import LATEST_S
from support.nodes import RUN, SCRIPT, below, wait_for_end
from support.ports import free_ports
from support.slurm import until

STORE = 80_000_000


class Script:
    """The training as a driver of the cluster, whose lines are printed and looked at."""

    def __init__(self, cluster, command):
        self.lines = []
        self.process = subprocess.Popen(
            command,
            env={**os.environ, "RAY_ADDRESS": cluster.address, "PYTHONUNBUFFERED": "1"},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip

    def go_on(self):
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def wait_for(self, words):
        for line in self.process.stdout:
            print(line, end="", flush=True)
            self.lines.append(line)
            if words in line:
                return line
        raise AssertionError(f"no line with {words!r} came")

    def wait_for_number(self, words):
        """The number behind words in a line that has come."""
        return next(
            line.split(f"{words} ")[1].split()[0] for line in self.lines if f"{words} " in line
            and "began" in line
        )  # fmt: skip


@contextmanager
def cluster_of(nodes, head_cpus=1):
    """A cluster of a head and so many nodes of one core, until the block ends."""
    cluster = Cluster(
        initialize_head=True,
        head_node_args={
            "num_cpus": head_cpus, "object_store_memory": STORE, "include_dashboard": False
        },
    )  # fmt: skip
    try:
        yield cluster, [add_node(cluster) for _ in range(nodes)]
    finally:
        ray.shutdown()
        cluster.shutdown()


def add_node(cluster):
    return cluster.add_node(num_cpus=1, object_store_memory=STORE)


def a_node_dies(folder):
    with cluster_of(3, head_cpus=0) as (cluster, nodes):
        script = Script(cluster, [sys.executable, SCRIPT, folder, "--workers", "ray"])
        script.wait_for("step 200")
        cluster.remove_node(nodes[1], allow_graceful=False)
        add_node(cluster)
        script.wait_for("recovered in")
        script.wait_for("digest")
        assert script.process.wait(60) == 0


def a_node_is_away_for_a_while(folder):
    """The run goes on without it, and gives it its part again when there is one."""
    with cluster_of(3, head_cpus=0) as (cluster, nodes):
        words = [elastic.__file__, folder, "ray", "2", "3", "15", "25", "35+", "55"]
        script = Script(cluster, [sys.executable, *words])
        for stop, hosts in {"at 15:": 3, "at 25:": 2, "at 55:": 3}.items():
            assert len(set(script.wait_for(stop).split()[2:])) == hosts
            if hosts == 2:
                add_node(cluster)
            elif "15" in stop:
                processes = below(nodes[1].all_processes["raylet"][0].process.pid)
                cluster.remove_node(nodes[1], allow_graceful=False)
                wait_for_end(processes)
            script.go_on()
        script.wait_for("digest")
        assert script.process.wait(60) == 0


def the_node_of_the_script_dies(folder):
    """Ray starts the script again on another node; the script is told nothing of Ray."""
    with cluster_of(3, head_cpus=0) as (cluster, nodes):
        script = Script(cluster, [*RUN, "--ray", "3", "--resume", SCRIPT, folder])
        script.wait_for("step 200")
        # The node whose raylet is an ancestor of the script's process.
        pid = int(script.wait_for_number("pid"))
        ancestors = set()
        while pid > 1:
            ancestors.add(pid)
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        (node,) = [
            node for node in nodes if node.all_processes["raylet"][0].process.pid in ancestors
        ]
        cluster.remove_node(node, allow_graceful=False)
        add_node(cluster)
        script.wait_for("began at")
        script.wait_for("digest")
        assert script.process.wait(60) == 0


def what_cannot_be_placed(folder):
    """Refused within the deadline, with what is needed and what there is."""
    from datetime import timedelta

    from torch import nn

    from pipedream_rt import Pipeline, RayWorkers, Recovery, RendezvousTimeout

    with cluster_of(1) as (cluster, _):
        ray.init(cluster.address, log_to_driver=False)
        for workers in (RayWorkers(resources={"CPU": 2}), RayWorkers("STRICT_SPREAD")):
            try:
                Pipeline(
                    [nn.Linear(2, 2) for _ in range(3)], stages=3, loss_fn=nn.MSELoss(),
                    workers=workers, recovery=Recovery(start=timedelta(seconds=3)),
                )  # fmt: skip
            except RendezvousTimeout as error:
                print(error, flush=True)
            else:
                raise AssertionError("it was placed")
        groups = ray.util.placement_group_table().values()
        assert {group["state"] for group in groups} <= {"REMOVED"}
        left = [t for t in threading.enumerate() if t.name.startswith(("control", "join"))]
        assert left == []


def takes_jobs(address):
    """Whether the dashboard is up, and has an agent that starts jobs."""
    from ray.job_submission import JobSubmissionClient

    try:
        return JobSubmissionClient(address).list_jobs() is not None
    except (ConnectionError, RuntimeError):
        return False


def from_elsewhere(folder):
    """A script over Ray Client, and one in a submitted job: neither is in a node of the cluster."""
    client = free_ports(2)
    head = {
        "num_cpus": 3, "object_store_memory": STORE, "include_dashboard": True,
        "dashboard_port": client + 1, "ray_client_server_port": client,
    }  # fmt: skip
    cluster = Cluster(initialize_head=True, head_node_args=head)
    submit = [sys.executable, "-c", "from ray.scripts.scripts import main; main()", "job", "submit"]
    train = [sys.executable, SCRIPT, "--workers", "ray", "--steps", "100"]
    try:
        for name, command, more in (
            ("client", [], {"RAY_ADDRESS": f"ray://127.0.0.1:{client}"}),
            ("job", [*submit, "--"], {"RAY_API_SERVER_ADDRESS": f"http://127.0.0.1:{client + 1}"}),
        ):
            if name == "job":
                dashboard = more["RAY_API_SERVER_ADDRESS"]
                until(functools.partial(takes_jobs, dashboard), "a dashboard that takes jobs")
            done = subprocess.run(
                [*command, *train, f"{folder}-{name}"], env={**os.environ, **more},
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=LATEST_S,
            )  # fmt: skip
            print(done.stdout, flush=True)
            assert done.returncode == 0, name
    finally:
        cluster.shutdown()


def serve(folder):
    """Keep a cluster of three nodes for another process, until a line comes."""
    with cluster_of(3, head_cpus=0) as (cluster, _):
        print("up", cluster.address, flush=True)
        sys.stdin.readline()


if __name__ == "__main__":
    atexit.register(shutil.rmtree, FOLDER, ignore_errors=True)
    known = (
        serve,
        from_elsewhere,
        a_node_dies,
        a_node_is_away_for_a_while,
        the_node_of_the_script_dies,
        what_cannot_be_placed,
    )
    {each.__name__: each for each in known}[sys.argv[1]](sys.argv[2])
