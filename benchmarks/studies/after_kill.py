"""What libraries, ours too, do when one of three workers of a training is killed with SIGKILL.

Each trains a small model on the CPU, over gloo where it has a process group, with a checkpoint
every 20 steps. Its worker with rank 1 is killed. Told are the seconds from then until anyone
notices, by whatever comes first, and until the first step that is beyond where the training had
been; the steps that were done again; and whether the weights at the end are bit for bit those of a
run that nobody disturbed. The libraries are in an environment of their own, as ``peers/README.md``
says.

    python benchmarks/studies/after_kill.py --peer ray-train --repeat 3 --python peers/bin/python

Prints one JSON object per run. For Linux.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import re
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

SCRIPTS = Path(__file__).resolve().parents[1] / "peers"
WORKERS, VICTIM, EVERY, KILL_AT = 3, 1, 20, 70
# After a kill, then it hangs.
HANGS_S = 120.0
# For a start, and for a run without any.
DEADLINE_S = 240.0
# A kill is so long after a step, at most.
WITHIN_S = 0.03
# Of the errors and exits after a kill.
TOLD = 8
PR_SET_CHILD_SUBREAPER = 36
# Lines of a log that say that something is wrong.
WRONG = re.compile(
    r"error|fail|died|dead|kill|signal|exit|closed|lost|unexpected|SIG[A-Z]+", re.IGNORECASE
)

Message = dict[str, Any]


@dataclass(frozen=True)
class Peer:
    """How one library is run.

    Args:
        commands: Makes the commands of a run from the interpreter; the last is there until the end.
        packages: Whose versions are told.
        steps: How many a run has.
        alive: Whether processes that were there before the kill go on.
        done: How many tell their weights at the end.
        again: Whether its command is given again here when it has ended, as it is not made to
            start anything again.
    """

    commands: Callable[[Path], list[list[str]]]
    packages: tuple[str, ...]
    steps: int = 140
    alive: bool = False
    done: int = WORKERS
    again: bool = False


def script(name: str) -> str:
    """Return the path of a worker's script."""
    return str(SCRIPTS / f"kill_{name}.py")


def torchrun(python: Path, workers: int, name: str, *arguments: str) -> list[str]:
    """Return the command that starts workers and, three times, starts them again."""
    options = ["--standalone", f"--nproc-per-node={workers}", "--max-restarts=3"]
    return [str(python), "-m", "torch.distributed.run", *options, script(name), *arguments]


def own_store(python: Path) -> list[list[str]]:
    """Return torchrun's command with a store for each start; it shares one by default."""
    setting = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"
    return [["env", setting, *torchrun(python, WORKERS, "pipelining")]]


def torchft(python: Path, wrapper: str) -> list[list[str]]:
    """Return the commands of a lighthouse, with the times of its guide, and three replicas."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    options = ["--min_replicas", "2", "--quorum_tick_ms", "100", "--join_timeout_ms", "10000"]
    lighthouse = [str(python.parent / "torchft_lighthouse"), "--bind", f"127.0.0.1:{port}"]
    place = [f"TORCHFT_LIGHTHOUSE=http://127.0.0.1:{port}"]
    replicas = [
        ["env", *place, f"REPLICA_GROUP_ID={i}", *torchrun(python, 1, "torchft", wrapper)]
        for i in range(WORKERS)
    ]
    return [[*lighthouse, *options], *replicas]


def deepspeed(python: Path) -> list[list[str]]:
    """Return the command of DeepSpeed's launcher."""
    command = [str(python), str(python.parent / "deepspeed"), f"--num_accelerators={WORKERS}"]
    return [[*command, "--no_local_rank", script("deepspeed")]]


PEERS = {
    "ours": Peer(lambda python: [[str(python), script("ours")]], ("torch",), alive=True, done=1),
    "torch-pipelining": Peer(lambda python: [torchrun(python, WORKERS, "pipelining")], ("torch",)),
    "torch-pipelining-own-store": Peer(own_store, ("torch",)),
    "ray-train": Peer(lambda python: [[str(python), script("ray_train")]], ("ray", "torch")),
    "torchft": Peer(
        lambda python: torchft(python, "DistributedDataParallel"),
        ("torchft", "torch"),
        steps=500,
        alive=True,
    ),
    "torchft-pure": Peer(
        lambda python: torchft(python, "PureDistributedDataParallel"),
        ("torchft", "torch"),
        steps=500,
        alive=True,
    ),
    "monarch": Peer(
        lambda python: [[str(python), script("monarch"), "respawn"]],
        ("torchmonarch", "torch"),
        alive=True,
        done=1,
    ),
    "monarch-as-it-is": Peer(
        lambda python: [[str(python), script("monarch")]],
        ("torchmonarch", "torch"),
        alive=True,
        done=1,
    ),
    "deepspeed": Peer(deepspeed, ("deepspeed", "torch"), again=True),
}


class Ended(Exception):
    """All commands of a run have ended, or the last one has failed."""


@dataclass
class Running:
    """One run: its commands, and what they and their workers tell.

    Args:
        peer: What to run.
        python: The interpreter.
        folder: One for the run alone.
    """

    peer: Peer
    python: Path
    folder: Path
    heard: list[Message] = field(default_factory=list)
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._ear = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._ear.bind(f"{self.folder}/ear")
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._ear, selectors.EVENT_READ)
        self._log = (self.folder / "log").open("wb")

    def start(self) -> None:
        """Give the commands."""
        beside = str(self.python.parent)
        job = {"folder": str(self.folder), "steps": self.peer.steps, "every": EVERY}
        environment = {
            **os.environ,
            "PATH": f"{beside}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(SCRIPTS),
            "PYTHONUNBUFFERED": "1",
            "KILL_JOB": json.dumps(job),
            "OMP_NUM_THREADS": "1",
            "MKL_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "DS_ACCELERATOR": "cpu",
            "MAX_JOBS": "1",
            "RAY_USAGE_STATS_ENABLED": "0",
        }
        for command in self.peer.commands(self.python):
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=environment,
                cwd=self.folder,
                start_new_session=True,
            )
            self.processes.append(process)
            self._selector.register(process.stdout, selectors.EVENT_READ, (process, bytearray()))
            self._selector.register(os.pidfd_open(process.pid), selectors.EVENT_READ, process)

    def messages(self, until: float) -> Iterator[Message]:
        """Yield what is told, in the order of its coming, until a time of the monotonic clock."""
        while (left := until - time.monotonic()) > 0:
            for key, _ in self._selector.select(left):
                for message in self._read(key):
                    self.heard.append(message)
                    yield message

    def _read(self, key: selectors.SelectorKey) -> list[Message]:
        """Read from one source that has something."""
        now = time.monotonic()
        if key.fileobj is self._ear:
            return [json.loads(self._ear.recv(1 << 16))]
        if isinstance(key.data, subprocess.Popen):
            self._selector.unregister(key.fd)
            os.close(key.fd)
            code = key.data.wait()
            # Of several replicas one may come to the end before the others do.
            what = "exit" if code or len(self.processes) == 1 else "end"
            return [{"what": what, "at": now, "pid": key.data.pid, "text": f"exit code {code}"}]
        process, rest = key.data
        data = os.read(key.fd, 1 << 16)
        if not data:
            self._selector.unregister(key.fileobj)
            process.stdout.close()
        self._log.write(data)
        rest += data
        *lines, last = bytes(rest).split(b"\n")
        rest[:] = last
        texts = [line.decode(errors="replace").strip() for line in lines]
        return [{"what": "line", "at": now, "text": text} for text in texts]

    def close(self) -> None:
        """End all processes, those included that have left their parents, and wait for them."""
        for key in list(self._selector.get_map().values()):
            self._selector.unregister(key.fileobj)
            if isinstance(key.data, subprocess.Popen):
                os.close(key.fd)
        for process in self.processes:
            process.terminate()
        # Ray and torchrun end what is theirs.
        until = time.monotonic() + 10
        for process in self.processes:
            if process.stdout is not None:
                process.stdout.close()
            try:
                process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
        reap(until + 30)
        self._ear.close()
        self._log.close()
        self._selector.close()


def children() -> list[int]:
    """Return the processes whose parent is this one."""
    return [int(pid) for pid in Path("/proc/thread-self/children").read_text().split()]


def reap(until: float) -> None:
    """Kill and await the children that are left, and theirs, which come to this process."""
    while found := children():
        for pid in found:
            try:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            except (ChildProcessError, ProcessLookupError):
                continue
        if time.monotonic() > until:
            raise SystemExit(f"{len(found)} processes do not end")


def digest_of(running: Running) -> str | None:
    """Return the digest of all weights at the end, if all have told theirs."""
    found = {m["rank"]: m["digest"] for m in running.heard if m["what"] == "done"}
    return " ".join(found[rank] for rank in sorted(found)) if complete(running) else None


def complete(running: Running) -> bool:
    """Tell whether all have told their weights."""
    ranks = {m["rank"] for m in running.heard if m["what"] == "done"}
    return len(ranks) == running.peer.done


def failed(running: Running, why: str) -> SystemExit:
    """Make the error of a run that did not even begin, with the end of its log."""
    running._log.flush()
    log = (running.folder / "log").read_text(errors="replace").splitlines()[-40:]
    return SystemExit("\n".join([*log, why]))


def undisturbed(running: Running) -> str:
    """Run without a kill, and return the digest."""
    running.start()
    for message in running.messages(time.monotonic() + DEADLINE_S):
        if complete(running):
            return str(digest_of(running))
        if message["what"] == "exit":
            raise failed(running, f"ended before its end, with {message['text']}")
    raise failed(running, f"no end within {DEADLINE_S:g} s")


def killed(running: Running) -> dict[str, Any]:
    """Run, kill a worker, and measure what happens; the digest is there if it came to the end."""
    running.start()
    victim = kill(running)
    found = after(running, victim)
    if found["goes_on_s"] is not None:
        for _ in running.messages(time.monotonic() + DEADLINE_S):
            if complete(running):
                break
    found["healed_s"] = healed(running, victim["at"])
    found["digest"] = digest_of(running)
    return found


def kill(running: Running) -> Message:
    """Wait until the training is far enough, kill the worker, and say when."""
    pid, steps = None, 0
    for message in running.messages(time.monotonic() + DEADLINE_S):
        if message["what"] == "began" and message["rank"] == VICTIM:
            pid = message["pid"]
        # Where one process tells of all workers, it does not say a rank.
        steps += message["what"] == "step" and message.get("rank", VICTIM) == VICTIM
        if steps >= KILL_AT and pid is not None:
            # Anywhere in a step.
            delay_s = random.uniform(0.0, WITHIN_S)
            for _ in running.messages(time.monotonic() + delay_s):
                pass
            at = time.monotonic()
            os.kill(pid, signal.SIGKILL)
            return {"what": "kill", "at": at, "pid": pid}
        if message["what"] == "exit":
            raise failed(running, f"ended before the kill, with {message['text']}")
    raise failed(running, f"not at step {KILL_AT} within {DEADLINE_S:g} s")


def after(running: Running, victim: Message) -> dict[str, Any]:
    """Measure until steps go on, or it is clear that they will not."""
    at, old = victim["at"], {m["pid"] for m in running.heard if "pid" in m}
    stood = max(m["step"] for m in running.heard if m["what"] == "step")
    names = ("noticed_s", "noticed_by", "ended_s", "goes_on_s", "done_again")
    found: dict[str, Any] = dict.fromkeys(names)
    found |= {"refused": 0, "steps_before": stood, "given_again": False, "told": []}
    first = None
    for message in running.messages(at + HANGS_S):
        what, since = message["what"], message["at"] - at
        if found["noticed_s"] is None and since > 0 and is_notice(message):
            found |= {"noticed_s": since, "noticed_by": said(message)}
        if message["what"] != "line" and is_notice(message) and len(found["told"]) < TOLD:
            found["told"].append([round(since, 4), said(message)])
        if what == "refused" and message["pid"] in old:
            found["refused"] += 1
        if what == "exit":
            found["ended_s"] = since
            if not running.peer.again:
                return found | {"outcome": "ends"}
            running.start()
            found["given_again"] = True
        if what != "step":
            continue
        new = message["pid"] not in old
        if not new and (found["noticed_s"] is None or not running.peer.alive):
            # A step that was under way.
            stood = found["steps_before"] = max(stood, message["step"])
        elif new or since > found["noticed_s"]:
            first = message["step"] if first is None else first
            if message["step"] > stood:
                found |= {"goes_on_s": since, "done_again": max(0, stood - first + 1)}
                return found | {"outcome": "goes on"}
    return found | {"outcome": "hangs"}


def is_notice(message: Message) -> bool:
    """Tell whether a message says that something is wrong."""
    if message["what"] == "line":
        text = message["text"]
        return "INFO" not in text and WRONG.search(text) is not None
    return message["what"] in ("error", "refused", "exit")


def said(message: Message) -> str:
    """Return in words what was the first to notice."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", message.get("text", "a step that was not taken"))
    # Where files are is of no use elsewhere.
    text = re.sub(r"(?<![\w:/])(/[\w.+-]+)+/", "", text)
    return f"{message['what']}: {text[:160]}"


def healed(running: Running, at: float) -> float | None:
    """Return when the worker that took the victim's place had done its first step."""
    steps = [m for m in running.heard if m["what"] == "step" and m.get("rank") == VICTIM]
    old = {m["pid"] for m in steps if m["at"] <= at}
    return next((m["at"] - at for m in steps if m["pid"] not in old), None)


def versions(python: Path, packages: tuple[str, ...]) -> dict[str, str]:
    """Return the versions of packages in the environment of the peers."""
    code = "import json, sys; from importlib.metadata import version as v; "
    code += "print(json.dumps({name: v(name) for name in sys.argv[1:]}))"
    command = [str(python), "-c", code, *packages]
    return json.loads(subprocess.run(command, check=True, capture_output=True, timeout=60).stdout)


def once(peer: Peer, python: Path, run: Callable[[Running], Any], log: Path | None) -> Any:
    """Do one run in a folder of its own, and end all that it started."""
    # Sockets have short paths.
    with tempfile.TemporaryDirectory(prefix="ak-", ignore_cleanup_errors=True) as folder:
        running = Running(peer, python, Path(folder))
        try:
            return run(running)
        finally:
            running.close()
            if log is not None:
                shutil.copy(running.folder / "log", log)


@click.command(help=__doc__)
@click.option("--peer", "name", type=click.Choice(list(PEERS)), required=True)
@click.option("--repeat", default=1, show_default=True, help="Runs with a kill.")
@click.option(
    "--python",
    default="peers/bin/python",
    show_default=True,
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="The interpreter of the environment of the peers.",
)
@click.option("--log", type=click.Path(path_type=Path), help="Keeps the last run's log here.")
def main(name: str, repeat: int, python: Path, log: Path | None) -> None:
    """Measure one peer."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    # What has lost its parent comes to this process, which ends it.
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    # A link to the interpreter is what makes it that of its environment.
    peer, python = PEERS[name], python.absolute()
    facts = {"peer": name, "versions": versions(python, peer.packages)}
    clean = [once(peer, python, undisturbed, log)]
    for _ in range(repeat):
        found = once(peer, python, killed, log)
        digest = found.pop("digest")
        same = None if digest is None else digest == clean[0]
        if same is False and len(clean) == 1:
            # Are there two runs with the same bits at all?
            clean.append(once(peer, python, undisturbed, log))
        found |= {"same_bits": same}
        found |= {"undisturbed_same_bits": clean[0] == clean[1]} if len(clean) > 1 else {}
        rounded = {k: round(v, 4) if isinstance(v, float) else v for k, v in found.items()}
        click.echo(json.dumps({**facts, **rounded}))


if __name__ == "__main__":
    main()
