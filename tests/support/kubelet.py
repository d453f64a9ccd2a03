"""A kubelet that is played: pods of a manifest are network namespaces, their containers processes.

Every pod has an address in a network of its own, with a router between them, and a file of hosts
that has the names of all pods, as the headless service of a JobSet gives them. A container that
ends with an error is started again, as ``restartPolicy: OnFailure`` says; a pod that is lost is
made anew with another address.
"""

import os
import re
import signal
import subprocess
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import yaml

from . import rights
from .deadlines import LATEST_S
from .nodes import command_in, own_environment
from .two_hosts import SECRET, Child, ip


def pods_of(place):
    """The pods of a JobSet, or of a runtime of Kubeflow, by name: job, index, specification."""
    found = {}
    for document in yaml.safe_load_all(Path(place).read_text()):
        spec = document["spec"]
        if document["kind"] == "TrainingRuntime":
            count = spec["mlPolicy"]["numNodes"]
            (job,) = spec["template"]["spec"]["replicatedJobs"]
            for index in range(count):
                of_torch = {  # what the policy sets
                    "PET_NNODES": str(count), "PET_NODE_RANK": str(index),
                    "PET_NPROC_PER_NODE": "1", "PET_MASTER_ADDR": "train-node-0-0.train",
                    "PET_MASTER_PORT": "29400",
                }  # fmt: skip
                pod = job["template"]["spec"]["template"]["spec"]
                found[f"train-node-0-{index}"] = (index, pod, of_torch)
        elif document["kind"] == "JobSet":
            for job in spec["replicatedJobs"]:
                of_job = job["template"]["spec"]
                for index in range(of_job["completions"]):
                    pod = of_job["template"]["spec"]
                    found[f"train-{job['name']}-0-{index}"] = (index, pod, {})
    return found


class Kubelet:
    """Runs the pods of a manifest.

    Args:
        place: The manifest.
        folder: Stands for the volumes.
        script: Stands for the script of the manifest, with what comes behind its name.
    """

    def __init__(self, place, folder, script):
        self._folder, self._script = Path(folder), script
        self._prefix = f"k{os.getpid() % 100000}"
        self._pods = pods_of(place)
        self._children = ExitStack()
        self._addresses = {}
        self._next = 1
        self.containers = {}

    def up(self):
        ip("netns", "add", f"{self._prefix}s")
        ip("netns", "exec", f"{self._prefix}s", "sysctl", "-w", "net.ipv4.ip_forward=1")
        secret = self._folder / "secret" / "secret"
        secret.parent.mkdir()
        secret.write_text(SECRET)
        secret.chmod(0o400)
        command_in(self._folder / "bin")
        for name in self._pods:
            self._make(name)
        self._tell_names()

    def _namespace(self, name):
        return f"{self._prefix}-{name}"

    def _make(self, name):
        """Make a pod with a new address."""
        number, self._next = self._next, self._next + 1
        within, address = self._namespace(name), f"10.88.{number}.2"
        ip("netns", "add", within)
        switch, cable = f"{self._prefix}s", f"c{number}"
        ip("link", "add", cable, "netns", switch, "type", "veth",
           "peer", "name", "eth0", "netns", within)  # fmt: skip
        ip("-n", switch, "addr", "add", f"10.88.{number}.1/24", "dev", cable)
        ip("-n", switch, "link", "set", cable, "up")
        ip("-n", within, "addr", "add", f"{address}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            ip("-n", within, "link", "set", device, "up")
        ip("-n", within, "route", "add", "default", "via", f"10.88.{number}.1")
        self._addresses[name] = address

    def _tell_names(self):
        """Write the names of all pods where `ip netns exec` mounts them, in place."""
        lines = [f"{at} {name} {name}.train" for name, at in self._addresses.items()]
        for name in self._pods:
            place = Path("/etc/netns") / self._namespace(name) / "hosts"
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))

    def start(self, name):
        """Start the container of a pod, or start it again."""
        index, pod, more = self._pods[name]
        (container,) = pod["containers"]
        environment = {
            each["name"]: self._placed(each["value"]) for each in container.get("env", ())
        }
        command = [self._placed(str(word)) for word in container["command"]]
        secured = container["securityContext"]
        assert secured["capabilities"] == {"drop": ["ALL"]}
        assert not secured["allowPrivilegeEscalation"]
        script = next(i for i, word in enumerate(command) if word.endswith(".py"))
        command[script:] = self._script
        self.containers[name] = child = Child(
            ["ip", "netns", "exec", self._namespace(name), *rights.without(), *command],
            own_environment(
                **more, **environment, JOB_COMPLETION_INDEX=str(index),
                PATH=f"{self._folder / 'bin'}:{os.environ['PATH']}",
                PYTHONPATH=str(Path(__file__).parents[2]),
            ),
        )  # fmt: skip
        self._children.callback(child.close)
        return child

    def _placed(self, text):
        """The path on this machine of what the manifest mounts."""
        return re.sub("^/etc/pipedream-rt", str(self._folder / "secret"), text)

    def start_all(self):
        for name in self._pods:
            self.start(name)

    def lose(self, name):
        """Lose the node of a pod: its processes end, and it is made anew with another address."""
        within = self._namespace(name)
        listed = subprocess.run(
            ["ip", "netns", "pids", within], capture_output=True, text=True, timeout=LATEST_S
        ).stdout
        for pid in listed.split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        self.containers[name].ended()
        ip("netns", "del", within)
        self._make(name)
        self._tell_names()

    def down(self):
        self._children.close()
        for name in [*self._pods, None]:
            within = f"{self._prefix}s" if name is None else self._namespace(name)
            subprocess.run(["ip", "netns", "del", within], capture_output=True, timeout=LATEST_S)
            with suppress(FileNotFoundError):
                (Path("/etc/netns") / within / "hosts").unlink()
                (Path("/etc/netns") / within).rmdir()
        with suppress(OSError):
            Path("/etc/netns").rmdir()


@contextmanager
def kubelet(place, folder, script):
    made = Kubelet(place, folder, script)
    try:
        made.up()
        yield made
    finally:
        made.down()
