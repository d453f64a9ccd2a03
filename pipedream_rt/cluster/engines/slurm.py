"""Tasks of a Slurm step: ``srun pipedream-rt run SCRIPT``.

Task 0 runs the script, on the first node of the step unless ``MASTER_ADDR`` names another; its port
is derived from the numbers of job and step unless ``MASTER_PORT`` gives it. The secret is a file of
the user's alone in a folder that all nodes share; it is never on a command line, and Slurm does not
see it. See https://slurm.schedmd.com/srun.html#SECTION_OUTPUT-ENVIRONMENT-VARIABLES.
"""

from __future__ import annotations

import os
import re
import secrets
import threading
from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

from pipedream_rt.cluster.environment import check_private, read_secret, secret_of_file
from pipedream_rt.cluster.identity import Secret
from pipedream_rt.cluster.node_job import EngineRequest, Node
from pipedream_rt.deadline import Deadline
from pipedream_rt.errors import ConfigError
from pipedream_rt.paths import given_path
from pipedream_rt.schema import is_count

VARIABLES = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS")
"""What says where a task stands in its step; the last is the number of tasks."""

_FOLDER = "PIPEDREAM_RT_JOB_FOLDER"
"""The user sets it: a folder that all nodes share, in which the folder of the job is made."""

_LOWEST_PORT, _PORTS = 15_000, 15_000
"""The range of ports, below the ephemeral ones of Linux (32768 and more)."""

_MADE_WITHIN = timedelta(minutes=2)
"""For task 0 to make the file, which it does first, and for NFS to show it."""

_LOOK_S = 0.2
"""Seconds between two looks for the file: a shared file system does not notify other nodes."""


def found(environment: Mapping[str, str], asked: EngineRequest) -> Slurm | None:
    """Return the step of this task; None if the process is no task, as a batch script."""
    if asked.nodes is not None or "SLURM_STEP_ID" not in environment:
        return None
    if environment.get(VARIABLES[-1], environment.get("SLURM_NTASKS")) == "1":
        return None  # whatever else was left behind, there is nobody to wait for
    numbers = {}
    for name in VARIABLES:
        text = environment.get(name, "")
        if not is_count(text):
            raise ConfigError(
                f"{name} must be a number in a task of Slurm, not {text!r}; if this is none, and "
                "its shell has the variables of another one, type: unset SLURM_STEP_ID"
            )
        numbers[name] = int(text)
    job, step, rank, size = numbers.values()
    host = environment.get("MASTER_ADDR") or next(
        expanded(environment.get("SLURM_STEP_NODELIST", "")), ""
    )
    if not host:
        raise ConfigError("SLURM_STEP_NODELIST is empty in a task of Slurm")
    # Times 7, so that the first steps of a job do not share their ports with the next job.
    port = environment.get("MASTER_PORT") or str(_LOWEST_PORT + (job * 7 + step) % _PORTS)
    if not (is_count(port) and 0 < int(port) < 65536):
        raise ConfigError(f"MASTER_PORT must be the number of a port, not {port!r}")
    shared = given_path(environment.get(_FOLDER) or "~/.pipedream-rt", _FOLDER)
    cluster = re.sub(r"[^\w-]", "-", environment.get("SLURM_CLUSTER_NAME", "cluster"))
    node = Node(rank=rank, size=size, host=host, port=int(port))
    return Slurm(f"{job}.{step}", node, shared / f"slurm-{cluster}-{job}.{step}")


class Slurm:
    """A step of a Slurm job; its folder is on a file system that all nodes share."""

    def __init__(self, name: str, node: Node, folder: Path) -> None:
        self.title = f"Slurm job {name}"
        self.node = node
        self._folder = folder

    def secret(self, deadline: Deadline) -> Secret:
        """Return the secret of the environment, or else of the file that task 0 makes."""
        secret = read_secret(None)
        if secret is not None:
            return secret
        path = self._folder / "secret"
        if self.node.is_first:
            self._make(path)
        pause, made = threading.Event(), Deadline(_MADE_WITHIN)
        while not self._is_there(path):
            if deadline.expired() or made.expired():
                raise ConfigError(
                    f"{self.title}: task 0 has put no secret at {path} in time. Is it a folder "
                    f"that all nodes share? If not, set {_FOLDER} to one, or give all tasks the "
                    "same PIPEDREAM_RT_SECRET"
                )
            pause.wait(_LOOK_S)
            with suppress(OSError):
                os.listdir(self._folder)  # makes NFS look again
        return secret_of_file(path, private=True)

    def _make(self, path: Path) -> None:
        """Make the file with the secret, unless an earlier life of task 0 has."""
        part = path.with_name(f"secret-{secrets.token_hex(8)}.part")
        try:
            self._folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._folder.mkdir(mode=0o700, exist_ok=True)
            if self._is_there(path):
                return
            with open(os.open(part, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as stream:
                stream.write(Secret.generated().text)
            try:
                with suppress(FileExistsError):
                    os.link(part, path)  # atomic: the other tasks see the whole file or none
            finally:
                part.unlink()
        except OSError as error:
            raise ConfigError(
                f"{self.title}: the secret of the job cannot be written: {error}; set {_FOLDER} to "
                "a folder that all nodes share"
            ) from error

    def _is_there(self, path: Path) -> bool:
        """Whether the file is there, in a folder that is this user's alone."""
        try:
            check_private(self._folder, self._folder.lstat())
            return path.exists()
        except FileNotFoundError:
            return False
        except OSError as error:
            raise ConfigError(
                f"{self.title}: the secret of the job is not safe: {error}; remove it, or set "
                f"{_FOLDER} to a folder of yours that all nodes share"
            ) from error

    def finish(self) -> None:
        with suppress(OSError):
            check_private(self._folder, self._folder.lstat())
            for each in self._folder.glob("secret*"):  # parts too, of lives that were cut short
                each.unlink()
            self._folder.rmdir()


def expanded(text: str) -> Iterator[str]:
    """Yield the hosts of a list in Slurm's form, as ``n[1-3,07],login``."""
    parts = re.findall(r"(?:[^,\[\]]|\[[0-9,-]+\])+", text)
    if ",".join(parts) != text:
        raise ConfigError(f"{text!r} is no list of hosts of Slurm")
    for part in parts:
        yield from _expanded_part(part)


def _expanded_part(part: str) -> Iterator[str]:
    """Yield the hosts of one part of a list, which may have several brackets."""
    match = re.fullmatch(r"([^\[\]]*)\[([0-9,-]+)\](.*)", part)
    if match is None:
        yield part
        return
    before, inside, after = match.groups()
    for each in inside.split(","):
        low, _, high = each.partition("-")
        for number in range(int(low), int(high or low) + 1):
            for rest in _expanded_part(after) if after else ("",):
                yield f"{before}{number:0{len(low)}}{rest}"
