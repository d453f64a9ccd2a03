"""Network namespaces in a row, each joined to the next one by a wire of a given rate.

To every socket they are machines. Each has one address, on an interface ``me``. What goes to a
neighbour goes over the wire between the two, of which each direction has the rate for itself; what
goes anywhere else goes over a switch without a limit, as to the coordinator, whose machine hangs on
the switch alone. It needs root, and a kernel that shapes (tc tbf).
"""

from __future__ import annotations

import ctypes
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import click

_CLONE_NEWNET = 0x40000000
AT_ONCE_S = 0.001
"""Seconds of the rate that an idle wire takes at once. More would hide a part of each message."""

PAYLOAD = 1448 / 1514
"""The share of a full Ethernet frame that TCP leaves for its user; tc counts whole frames."""

ENDING_S, COMMAND_S = 10.0, 20.0
"""Deadlines: of a process that was told to end, and of one command."""


class Unavailable(Exception):
    """This machine cannot pretend to be two."""


def command(*words: str) -> None:
    """Run a command that makes a part of the two machines.

    Raises:
        Unavailable: It fails; this machine does not allow it.
    """
    done = subprocess.run(words, capture_output=True, text=True, timeout=COMMAND_S)
    if done.returncode:
        raise Unavailable(f"`{' '.join(words)}`: {done.stderr.strip()}")


def remove(machine: str) -> None:
    """End what still runs in a namespace, then remove it, if there is one."""
    options: dict[str, Any] = {"capture_output": True, "text": True, "timeout": COMMAND_S}
    found = subprocess.run(["ip", "netns", "pids", machine], **options)
    for pid in found.stdout.split():
        with suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
    subprocess.run(["ip", "netns", "del", machine], **options)


def require_namespaces() -> None:
    """Refuse a machine on which no network namespaces can be made.

    Raises:
        Unavailable: This machine does not allow it.
    """
    if os.geteuid() != 0:
        raise Unavailable("network namespaces need root")
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            raise Unavailable(f"network namespaces need the command {tool} (package iproute2)")


def add(machine: str, removal: ExitStack) -> None:
    """Make a machine, which is removed with all that runs on it."""
    removal.callback(remove, machine)
    command("ip", "netns", "add", machine)
    command("ip", "-n", machine, "link", "set", "lo", "up")


def join(one: str, device: str, other: str, peer: str) -> None:
    """Put a cable between two machines."""
    words = ("type", "veth", "peer", "name", peer, "netns", other)
    command("ip", "link", "add", device, "netns", one, *words)
    for machine, name in ((one, device), (other, peer)):
        command("ip", "-n", machine, "link", "set", name, "up")


def shape(machine: str, device: str, rate: float, room: int) -> None:
    """Have a device send no more than a rate.

    Args:
        machine: The namespace.
        device: The device.
        rate: Bits per second.
        room: Bytes that wait before packets are lost.

    Raises:
        Unavailable: The kernel cannot shape.
    """
    burst = max(4096, round(rate / 8 * AT_ONCE_S))
    words = ("rate", f"{round(rate)}bit", "burst", f"{burst}b", "limit", f"{room}b")
    command("tc", "-n", machine, "qdisc", "add", "dev", device, "root", "tbf", *words)


@contextmanager
def child(machine: str, *words: str, **options: Any) -> Iterator[subprocess.Popen[str]]:
    """Run Python on a machine until the end of the block."""
    process = subprocess.Popen(
        ["ip", "netns", "exec", machine, sys.executable, *words],
        text=True,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        **options,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(ENDING_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(ENDING_S)


def coordinated(
    workers: Sequence[tuple[str, str]],
    coordinator: str,
    at: str,
    script: str,
    words: Sequence[str],
    start_s: float,
    limit_s: float,
) -> dict[str, Any]:
    """Start workers and a script that coordinates them; return the last object that it prints.

    Args:
        workers: The machine of each, and the device to which it binds.
        coordinator: The machine of the script.
        at: The address at which the workers join.
        script: The script, whose option ``--join`` takes the address.
        words: What else it is given.
        start_s: Seconds within which all have joined.
        limit_s: Seconds within which the script has to end.

    Raises:
        ClickException: The script failed, or something did not end in time; with all that they
            have said.
    """
    kept = {k: v for k, v in os.environ.items() if not k.startswith("PIPEDREAM_RT_")}
    environment = {**kept, "PIPEDREAM_RT_SECRET": secrets.token_hex(32)}
    with tempfile.TemporaryFile("w+") as log, ExitStack() as children:
        told: dict[str, Any] = {"stderr": log, "env": environment}
        try:
            started = []
            for number, (machine, device) in enumerate(workers):
                named = ("--name", f"worker-{number}", "--bind", device)
                run = ("-m", "pipedream_rt.workers", at, "--timeout", f"{start_s:g}", *named)
                started.append(children.enter_context(child(machine, *run, stdout=log, **told)))
            with child(
                coordinator, script, *words, "--join", at, stdout=subprocess.PIPE, **told
            ) as process:
                said, _ = process.communicate(timeout=limit_s)
            if process.returncode:
                raise ChildProcessError(f"the coordinator ended with {process.returncode}")
            for each in started:
                each.wait(ENDING_S)
        except (ChildProcessError, subprocess.TimeoutExpired) as error:
            log.seek(0)
            raise click.ClickException(f"{error}; they said:\n{log.read()}") from error
    outcome: dict[str, Any] = json.loads(said.splitlines()[-1])
    return outcome


def address(number: int) -> str:
    """Return the address of a machine."""
    return f"10.78.0.{number + 1}"


@contextmanager
def chain(count: int, rate: float, room: int) -> Iterator[list[str]]:
    """Make machines in a row and one more for the coordinator, and remove them with all processes.

    Args:
        count: The number of machines in the row.
        rate: Bits per second of what TCP carries, in each direction of a wire.
        room: Bytes that wait for a wire before packets are lost.

    Raises:
        Unavailable: This machine does not allow it.
    """
    require_namespaces()
    names = [f"chain-{os.getpid()}-{number}" for number in range(count + 1)]
    switch = f"chain-{os.getpid()}-switch"
    with ExitStack() as removal:
        for machine in (*names, switch):
            add(machine, removal)
        command("ip", "-n", switch, "link", "add", "bridge", "type", "bridge")
        command("ip", "-n", switch, "link", "set", "bridge", "up")
        for number, machine in enumerate(names):
            command("ip", "-n", machine, "link", "add", "me", "type", "bridge")
            command("ip", "-n", machine, "addr", "add", f"{address(number)}/32", "dev", "me")
            join(machine, "away", switch, f"port{number}")
            command("ip", "-n", switch, "link", "set", f"port{number}", "master", "bridge")
            command("ip", "-n", machine, "link", "set", "me", "up")
            _route(machine, "10.78.0.0/24", "away", number)
        for left in range(count - 1):
            join(names[left], "right", names[left + 1], "left")
            _route(names[left], f"{address(left + 1)}/32", "right", left)
            _route(names[left + 1], f"{address(left)}/32", "left", left + 1)
            for machine, device in ((names[left], "right"), (names[left + 1], "left")):
                shape(machine, device, rate / PAYLOAD, room)
        yield names


def _route(machine: str, to: str, device: str, number: int) -> None:
    """Say over which device a machine reaches others."""
    command("ip", "-n", machine, "route", "add", to, "dev", device, "src", address(number))


def move_to(machine: str) -> None:
    """Let this thread, and those that it starts, be on a machine."""
    with open(f"/run/netns/{machine}") as there:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(there.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"{machine} cannot be entered")
