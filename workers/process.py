"""A worker's life in a group: it joins, hosts its stages, and leaves."""

from __future__ import annotations

import functools
import ipaddress
import logging
import os
import sys
import threading
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

from pipedream_rt.cluster.addresses import interface_of
from pipedream_rt.cluster.control import (
    EXIT_AGAIN,
    EXIT_COORDINATOR_LOST,
    EXIT_FAILED,
    Control,
    Record,
)
from pipedream_rt.cluster.keys import group_key
from pipedream_rt.deadline import Deadline
from pipedream_rt.errors import (
    ConfigError,
    MessageTimeout,
    PeerLost,
    PipelineClosed,
    PipelineError,
)
from pipedream_rt.messages.inbox import Inbox
from pipedream_rt.stage.host import StageHost
from pipedream_rt.transport.base import sender
from pipedream_rt.transport.rpc import Directory, RpcGroup, RpcTransport

_log = logging.getLogger("pipedream_rt.worker")


def resident_bytes() -> int:
    """Memory that this process has resident now, in bytes; 0 where the system does not say."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


_LAST_ACTION_S = 10.0
"""Seconds for the stages to end the action at hand; after that the process ends without them."""


def host_stage(
    control: Control, welcome: Record, threads: int, secret: bytes, bind: str | None
) -> int:
    """Join the group that a welcome describes and run the worker's stages in it.

    Threads of this process: the calling one reads the control connection; one computes for all
    stages; the threads of torch's RPC pool fill the inbox.

    Args:
        control: The control connection.
        welcome: The coordinator's welcome.
        threads: Number of threads for torch's own parallel loops.
        secret: The secret of the job.
        bind: Network interface to listen on; None for loopback.

    Returns:
        Exit code of the process.

    Raises:
        PeerLost: The coordinator has sent a record that no worker knows.
    """
    sys.path.extend(p for p in welcome["path"] if p not in sys.path)
    worker, stages = welcome["rank"] - 1, welcome["stages"]
    timeout = timedelta(seconds=welcome["timeout_s"])
    try:
        transport = _join(control, welcome, timeout, secret, bind)
    except (PipelineError, RuntimeError) as error:
        _log.error("could not join the group: %s", error)
        with suppress(PeerLost):
            control.send({"type": "failed", "text": str(error)})
        return EXIT_FAILED if isinstance(error, ConfigError) else EXIT_AGAIN
    generation = welcome["generation"]
    host = StageHost(
        worker,
        stages,
        generation,
        lambda stage: sender(transport, stage, generation),
        timeout,
        threads,
        announce=lambda action: control.send({"type": "doing", "action": action}),
    )
    for stage in stages:
        transport.open(stage, host.inbox.put, host.inbox.close)
        transport.expose(stage, functools.partial(host.part, stage))
    thread = threading.Thread(target=host.serve, name=host.name)
    thread.start()
    control.send({"type": "joined"})
    return _until_exit(control, host.inbox, thread, transport, timedelta(seconds=welcome["beat_s"]))


def _join(
    control: Control, welcome: Record, timeout: timedelta, secret: bytes, bind: str | None
) -> RpcTransport:
    """Connect to the group, whose addresses come over the control connection.

    Raises:
        PipelineError: The group did not form.
        RuntimeError: torch could not join.
    """
    deadline = Deadline(timedelta(seconds=welcome["start_timeout_s"] or 300))
    names = tuple(welcome["names"])

    def gather() -> dict[str, str]:
        record = control.receive(deadline)
        if record["type"] != "addresses":
            raise PeerLost("the coordinator gave up joining", peer="the coordinator")
        return dict(record["by_name"])

    transport = RpcTransport(
        RpcGroup(
            generation=welcome["generation"],
            rank=welcome["rank"],
            names=names,
            hosts=tuple(welcome["hosts"]),
            interface=bind or _default_interface(control, welcome["host"]),
            timeout=timeout,
            key=group_key(secret, welcome["nonce"]),
        )
    )
    transport.join(
        Directory(
            names, lambda address: control.send({"type": "address", "address": address}), gather
        ),
        deadline,
    )
    return transport


def _default_interface(control: Control, host: str) -> str:
    """Network interface to listen on where the user names none.

    A worker that the coordinator started listens where the coordinator does, and any other listens
    on loopback.

    Args:
        control: The control connection.
        host: Numeric address at which the coordinator meets the workers.

    Raises:
        ConfigError: The coordinator is on another machine, so loopback will not do.
    """
    if control.is_local:
        return interface_of(host)
    if not ipaddress.ip_address(control.local_host).is_loopback:
        raise ConfigError(
            "the coordinator is not on loopback, so this worker must listen for the others on a "
            f"network: name its interface, as --bind {interface_of(control.local_host)}"
        )
    return interface_of(control.local_host)


def _until_exit(
    control: Control,
    inbox: Inbox,
    thread: threading.Thread,
    transport: RpcTransport,
    beat: timedelta,
) -> int:
    """Obey the coordinator until it says to exit, or until the control connection breaks.

    When the connection breaks, the coordinator is dead, and a stage may be deep in a computation
    whose result nobody wants: the caller ends the process at once.

    Args:
        control: The control connection.
        inbox: The inbox of the stages.
        thread: The thread that computes.
        transport: The transport, closed on exit.
        beat: Time between two signs of life.

    Returns:
        Exit code of the process.

    Raises:
        PeerLost: The coordinator has sent a record that no worker knows.
    """
    while True:
        try:
            record = control.receive(Deadline(beat))  # breaks when the coordinator dies
        except MessageTimeout:
            control.send({"type": "beat", "doing": inbox.story(), "rss": resident_bytes()})
            continue
        except PeerLost:
            _log.error("the coordinator is gone; this worker ends")
            return EXIT_COORDINATOR_LOST
        match record["type"]:
            case "stop":
                inbox.close(PipelineClosed("the coordinator said stop"))
                thread.join(_LAST_ACTION_S)
                if thread.is_alive():
                    _log.error("a stage computes without end; the process ends without it")
                    return EXIT_COORDINATOR_LOST  # with --persist a new process joins again
                control.send({"type": "stopped"})
            case "story":
                control.send({"type": "story", "text": inbox.story()})
            case "shield":
                transport.shield()
            case "clock":
                control.send({"type": "clock", "ns": time.monotonic_ns()})
            case "exit":
                transport.close()
                if record["failed"]:
                    _log.warning("the job goes on with other workers; this one ends")
                return EXIT_COORDINATOR_LOST if record["failed"] else 0
            case other:
                raise PeerLost(f"the coordinator sent {other!r}", peer="the coordinator")
