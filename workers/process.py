"""A worker's life in a group: join, host a stage, leave."""

from __future__ import annotations

import functools
import ipaddress
import logging
import os
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

from pipedream_rt.cluster.addresses import interface_of
from pipedream_rt.cluster.control import EXIT_COORDINATOR_LOST, EXIT_FAILED, Control, Record
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
    """Memory of this process now; 0 where the system does not say."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


_LAST_ACTION_S = 10.0
"""For the stage to end the action at hand; a thread cannot be killed, but the process can end."""


def host_stage(
    control: Control, welcome: Record, threads: int, secret: bytes, bind: str | None
) -> int:
    """Join the group that a welcome describes and run the worker's stages in it.

    Threads of this process: this one reads the control connection; one computes; torch's RPC pool
    fills the inbox.

    Args:
        control: Connection to the coordinator.
        welcome: Its record.
        threads: For torch's own parallel loops.
        secret: Of the job.
        bind: Network interface to listen on; None for loopback.

    Returns:
        Exit code of the process.
    """
    sys.path.extend(p for p in welcome["path"] if p not in sys.path)
    worker, stages = welcome["rank"] - 1, welcome["stages"]
    timeout = timedelta(seconds=welcome["timeout_s"])
    try:
        transport = _join(control, welcome, timeout, secret, bind)
    except (PipelineError, RuntimeError) as error:
        control.send({"type": "failed", "text": str(error)})
        _log.error("could not join the group: %s", error)
        return EXIT_FAILED
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
    """Connect to the group, whose addresses come over the control connection."""
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
    """Where a worker listens for others unless it is told: where its launcher does, or loopback.

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
    """Obey the control connection until it says exit, or breaks.

    When it breaks the coordinator is dead and the stage may be deep in a computation whose result
    nobody wants: the caller ends the process at once.
    """
    while True:
        try:
            record = control.receive(Deadline(beat))  # breaks when the coordinator dies
        except MessageTimeout:
            control.send({"type": "beat", "doing": inbox.story(), "rss": resident_bytes()})
            continue
        except PeerLost:
            _log.error("the coordinator is gone; ending")
            return EXIT_COORDINATOR_LOST
        match record["type"]:
            case "stop":
                inbox.close(PipelineClosed("the coordinator said stop"))
                thread.join(_LAST_ACTION_S)
                if thread.is_alive():
                    _log.error("the stage computes without end; ending without it")
                    return EXIT_COORDINATOR_LOST  # another life may join again
                control.send({"type": "stopped"})
            case "story":
                control.send({"type": "story", "text": inbox.story()})
            case "shield":
                transport.shield()
            case "clock":
                control.send({"type": "clock", "ns": time.monotonic_ns()})
            case "exit":
                transport.close()
                return 0
            case other:
                raise PeerLost(f"the coordinator sent {other!r}", peer="the coordinator")
