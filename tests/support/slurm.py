"""A real Slurm on this one machine: munged, one slurmctld and a slurmd for each of a few nodes.

All of it lives in a mount namespace of its own, in which a folder of the test lies over Slurm's
and munge's places (``/etc/slurm``, ``/run`` and so on), so that the machine itself never sees it.
Each node has a host name of its own too. The processes of a namespace are how everything is found
again and ended, the tasks of jobs included; a guard does the same if the test itself is killed.
Making the namespaces needs root; `why_not` says what is missing.
"""

import os
import re
import shutil
import signal
import socket
import subprocess
import threading
import time
from contextlib import suppress
from pathlib import Path

from .deadlines import LATEST_S
from .ports import free_ports

PACKAGES = {
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "srun": "slurm-client",
    "munged": "munge",
    "unshare": "util-linux",
    "nsenter": "util-linux",
    "mount": "mount",
}
"""The Debian package of each command that is needed."""

PLACES = ("/etc/slurm", "/etc/munge", "/var/log/munge", "/var/lib/munge")
"""The folders of the machine that a folder of the test lies over; the packages have made them."""

CONFIGURATION = """\
ClusterName=play
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmUser=root
AuthType=auth/munge
AuthInfo=cred_expire={requeue_after}
CredType=cred/munge
MailProg=/bin/true
MpiDefault=none
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
StateSaveLocation=/run/slurm/controller
SlurmctldPidFile=/run/slurm/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdSpoolDir=/run/slurm/%n
SlurmdPidFile=/run/slurm/%n.pid
SlurmdLogFile={folder}/slurmd-%n.log
SlurmctldDebug=verbose
SlurmdDebug=verbose
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
JobRequeue=1
ReturnToService=2
SlurmdTimeout={lost_after}
MessageTimeout={answer_within}
KillWait={kill_wait}
MinJobAge=86400
NodeName=n[1-{nodes}] NodeAddr=127.0.0.[11-{address}] Port=[{first}-{last}] CPUs={cpus}
PartitionName=plain Nodes=ALL Default=YES PriorityTier=1 GraceTime={notice}
PartitionName=urgent Nodes=ALL PriorityTier=2
"""

FINAL = ("BOOT_FAIL", "COMPLETED", "DEADLINE", "FAILED", "OUT_OF_MEMORY", "TIMEOUT")
"""States of a job that nothing follows; CANCELLED, NODE_FAIL and PREEMPTED may be requeued."""

CGROUPS = "CgroupPlugin=cgroup/v1\n"
"""No plugin that is set uses control groups, so an empty folder is enough for this one; the plugins
for the machine's own groups would make some of theirs there, or refuse a hybrid tree."""

GUARD = """
set -e
folder=$1; shift
mount -n -t tmpfs tmpfs /run
mount -n -t tmpfs tmpfs /sys/fs/cgroup
mkdir -m 755 /run/munge /run/slurm
for place in "$@"; do mount -n --bind "$folder/over$place" "$place"; done
mount -n --bind "$folder/over/etc/hosts" /etc/hosts
echo ready
set +e
trap '' HUP INT TERM
read nothing
here=$(readlink /proc/$$/ns/mnt) || exit 1
left=some
while [ -n "$left" ]; do
    left=
    for process in /proc/[0-9]*; do
        if [ "$(readlink "$process/ns/mnt")" = "$here" ]; then
            number=${process#/proc/}
            [ "$number" = $$ ] || { kill -9 "$number" && left=some; }
        fi
    done 2>/dev/null
done
"""
"""What holds the mount namespace: at a line, or at the end, of its input it ends all that lives in
there. Without -n, mount would make a folder /run/mount on the machine."""


def why_not():
    """Why Slurm cannot run on this machine; empty if it can."""
    missing = [command for command in PACKAGES if shutil.which(command) is None]
    if missing:
        packages = " ".join(sorted({PACKAGES[command] for command in missing}))
        return f"no {', '.join(missing)} here (Debian packages {packages})"
    places = [place for place in PLACES if not os.path.isdir(place)]
    if places:
        return f"no {', '.join(places)} to mount over; the Debian packages make them"
    made = subprocess.run(
        ["unshare", "--mount", "--propagation", "slave", "--uts",
         "mount", "-n", "-t", "tmpfs", "tmpfs", "/sys/fs/cgroup"],
        capture_output=True, text=True, timeout=LATEST_S,
    )  # fmt: skip
    return f"no mount namespaces here: {made.stderr.strip()}" if made.returncode else ""


def until(holds, what, timeout=LATEST_S):
    """Ask again and again until something holds, and return it; say what did not come."""
    end = time.monotonic() + timeout
    while not (found := holds()):
        assert time.monotonic() < end, what() if callable(what) else f"{what} did not come"
        threading.Event().wait(0.05)
    return found


def processes_of(kind, namespace):
    """The processes of a namespace, by its kind (``mnt``, ``uts``) and its name; no zombies."""
    found = []
    for number in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):
            if os.readlink(f"/proc/{number}/ns/{kind}") == namespace:
                found.append(int(number))
    return found


def kill_all(processes, timeout=LATEST_S):
    """Kill what a function lists until it lists nothing more."""
    assert os.getpid() not in processes()

    def none_left():
        left = processes()
        for process in left:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        return not left

    until(none_left, lambda: f"{processes()} do not end", timeout)


class Node:
    """A slurmd in a namespace of its own for the host name, by which its tasks are found."""

    def __init__(self, slurm, name):
        self.name = name
        script = 'echo "$0" > /proc/sys/kernel/hostname && exec slurmd -D -N "$0"'
        self.daemon = slurm.daemon("unshare", "--uts", "sh", "-c", script, name, log=f"{name}.out")
        ours = os.readlink("/proc/self/ns/uts")
        place = f"/proc/{self.daemon.pid}/ns/uts"

        def moved():
            assert self.daemon.poll() is None, slurm.tell(f"slurmd of {name} has ended")
            with suppress(FileNotFoundError):  # it has ended just now
                return os.readlink(place) != ours

        until(moved, f"the node {name}")
        self._held = open(place)  # noqa: SIM115 - held, so that no other takes over its name
        self.namespace = os.readlink(place)

    def processes(self):
        """The slurmd, its slurmstepds and their tasks."""
        return processes_of("uts", self.namespace)

    def kill(self):
        """End the node as a power cut would."""
        kill_all(self.processes)
        self.daemon.wait()
        self._held.close()


class Slurm:
    """A Slurm of nodes n1, n2, ... whose files are all in a folder, which it makes.

    Each node has so many ``cpus``, whatever the machine has. The partition ``urgent`` preempts jobs
    of the default one, ``plain``. The other arguments are seconds: what a requeued job waits before
    it starts again (at least 5, since credentials hold as long), the silence after which a node is
    lost, what a ping may take (a node is down after some five seconds more than the two), what
    comes between a SIGTERM and the SIGKILL, and between preemption and that SIGTERM.
    """

    def __init__(
        self,
        folder,
        nodes=3,
        cpus=4,
        requeue_after=5,
        lost_after=5,
        answer_within=5,
        kill_wait=5,
        notice=0,
    ):
        assert requeue_after >= 5, "Slurm takes less than 5 s for the default, 120 s"
        self.folder = Path(folder).absolute()
        self.names = [f"n{number}" for number in range(1, nodes + 1)]
        self._options = {
            "cpus": cpus,
            "requeue_after": requeue_after,
            "lost_after": lost_after,
            "answer_within": answer_within,
            "kill_wait": kill_wait,
            "notice": notice,
        }
        self._nodes = {}
        self._daemons = []
        self._clients = []
        self._guard = None
        self._namespace = None

    def __enter__(self):
        try:
            self.open()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *error):
        self.close()

    def open(self):
        """Start everything, and wait until each node is idle."""
        self._write()
        self._guard = subprocess.Popen(
            ["unshare", "--mount", "--propagation", "slave",
             "sh", "-c", GUARD, "guard", self.folder, *PLACES],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, start_new_session=True,
        )  # fmt: skip
        answer = self._guard.stdout.readline()
        assert answer == "ready\n", answer + self._guard.stdout.read()
        self._namespace = os.readlink(f"/proc/{self._guard.pid}/ns/mnt")
        self.daemon("munged", "--foreground", log="munged.log")
        munge = Path(f"/proc/{self._guard.pid}/root/run/munge/munge.socket.2")
        until(munge.exists, lambda: self.tell("munged makes no socket"))
        self.daemon("slurmctld", "-D", log="slurmctld.out")
        for name in self.names:
            self.start_node(name)
        self.wait_for_nodes("idle")

    def _write(self):
        over = self.folder / "over"
        for place in PLACES:
            (over / place[1:]).mkdir(parents=True, mode=0o700)
        key = over / "etc/munge/munge.key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(128))
        host = socket.gethostname().split(".")[0]
        count = len(self.names)
        first = free_ports(count + 1)
        text = CONFIGURATION.format(
            host=host, folder=self.folder, controller=first, first=first + 1, last=first + count,
            nodes=count, address=10 + count, **self._options,
        )  # fmt: skip
        (over / "etc/slurm").chmod(0o755)
        (over / "etc/slurm/slurm.conf").write_text(text)
        (over / "etc/slurm/cgroup.conf").write_text(CGROUPS)
        hosts = "".join(f"127.0.0.{11 + each} {name}\n" for each, name in enumerate(self.names))
        known = Path("/etc/hosts").read_text()
        (over / "etc/hosts").write_text(f"{known}\n{hosts}127.0.0.1 {host}\n")

    def tell(self, what):
        """What did not come, with the last lines of every log."""
        logs = sorted([*self.folder.glob("*.log"), *self.folder.glob("*.out")])
        tails = (f"{log.name}:\n{log.read_text(errors='replace')[-3000:]}" for log in logs)
        return "\n".join([f"{what}:", *tails])

    def environment(self, **more):
        """The environment of a client; it knows of no job in which this test itself may be."""
        ours = re.compile(r"(SLURM|SBATCH|SRUN|SCANCEL|SQUEUE|SINFO|SALLOC)")
        kept = {key: value for key, value in os.environ.items() if not ours.match(key)}
        return kept | more

    def command(self, *argv, cwd=None):
        """The words that run a command inside of the namespace, under the same process id."""
        within = f"--mount=/proc/{self._guard.pid}/ns/mnt"
        there = f"--chdir={cwd or self.folder}"
        return ["nsenter", within, "env", there, *map(str, argv)]

    def daemon(self, *argv, log):
        """Start a process that lasts until the close, with a log in the folder."""
        with open(self.folder / log, "ab") as output:
            process = subprocess.Popen(
                self.command(*argv), env=self.environment(), stdin=subprocess.DEVNULL,
                stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        self._daemons.append(process)
        return process

    def start(self, *argv, cwd=None, **more):
        """Start a client (srun, say) and return its process, whose output is to be read."""
        process = subprocess.Popen(
            self.command(*argv, cwd=cwd), env=self.environment(**more), text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        self._clients.append(process)
        return process

    def run(self, *argv, cwd=None, text=None, timeout=LATEST_S, code=0, **more):
        """Run a client to its end and return what it writes; ``code`` is its exit code, or None
        for any."""
        done = subprocess.run(
            self.command(*argv, cwd=cwd), env=self.environment(**more), text=True, input=text or "",
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=timeout,
        )  # fmt: skip
        assert code is None or done.returncode == code, (
            f"{argv} -> {done.returncode}: {done.stdout}"
        )
        return done.stdout

    def sbatch(self, script, cwd, *options):
        """Hand in a batch script and return the number of its job."""
        answer = self.run("sbatch", "--parsable", f"--chdir={cwd}", *options, cwd=cwd, text=script)
        return int(answer.split()[-1])

    def job(self, job):
        """All that scontrol says of a job."""
        answer = self.run("scontrol", "--oneliner", "show", "job", job)
        return dict(re.findall(r"(\w[\w:/]*)=(\S*)", answer))

    def state(self, job):
        """The state of a job in a word, such as RUNNING."""
        return self.job(job)["JobState"]

    def wait_for(self, job, states, timeout=LATEST_S):
        """Wait until a job is in one of the states, given in a word or a list, and return it.

        It is an error if the job has ended in another one.
        """
        wanted = [states] if isinstance(states, str) else list(states)

        def found():
            state = self.state(job)
            assert state in wanted or state not in FINAL, self.tell(f"job {job} is {state}")
            return state if state in wanted else None

        return until(found, lambda: self.tell(f"job {job} is {self.job(job)}"), timeout)

    def node_state(self, name):
        """The state of a node in sinfo's word, such as idle."""
        return self._states()[name]

    def _states(self):
        # A node that does not answer has a star at its state.
        said = self.run("sinfo", "--noheader", "--Node", "--format=%N %T", code=None)
        return dict(re.findall(r"^(\w+) (\w+)\W*$", said, re.MULTILINE))

    def wait_for_nodes(self, state, names=None, timeout=LATEST_S):
        """Wait until nodes, all or those named, are in a state."""

        def found():
            states = self._states()
            return all(states.get(name) == state for name in names or self.names)

        until(found, lambda: self.tell(self.run("sinfo", code=None)), timeout)

    def node_processes(self, name):
        """The process ids of a node: slurmd, slurmstepds, tasks."""
        return self._nodes[name].processes()

    def drain(self, name):
        self.run("scontrol", "update", f"nodename={name}", "state=drain", "reason=test")

    def resume(self, name):
        self.run("scontrol", "update", f"nodename={name}", "state=resume")

    def kill_node(self, name):
        """End a node at once: its slurmd and all of its tasks."""
        self._nodes.pop(name).kill()

    def start_node(self, name):
        """Start a node that is not running; `wait_for_nodes` says when it is there."""
        assert name not in self._nodes, name
        self._nodes[name] = Node(self, name)

    def requeue(self, job):
        self.run("scontrol", "requeue", job)

    def cancel(self, job, *options):
        self.run("scancel", *options, job)

    def processes(self):
        """All processes of the namespace but the guard."""
        found = processes_of("mnt", self._namespace)
        return [process for process in found if process != self._guard.pid]

    def close(self):
        """End everything, the tasks of jobs too, and make sure that nothing is left."""
        if self._guard is None:
            return
        guard, self._guard = self._guard, None

        def others():
            return set(processes_of("mnt", self._namespace)) - {guard.pid}

        if self._namespace is not None:
            kill_all(others)
        with suppress(BrokenPipeError):
            guard.communicate("end\n", LATEST_S)
        for node in self._nodes.values():
            node.kill()
        self._nodes.clear()
        for process in (*self._daemons, *self._clients):
            process.wait(LATEST_S)
            if process.stdout is not None:
                process.stdout.close()
        assert self._namespace is None or not processes_of("mnt", self._namespace)
