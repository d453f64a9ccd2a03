"""A worker's life in a group: it joins, hosts its stages, and leaves."""

from __future__ import annotations

import asyncio
import functools
import os
import sys
import threading
import time
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

from pipedream_rt import extras
from pipedream_rt.cluster.addresses import address_on, interface_of, is_loopback
from pipedream_rt.cluster.control import Control
from pipedream_rt.cluster.environment import memory_is_shared, own_device
from pipedream_rt.cluster.identity import Secret
from pipedream_rt.cluster.interface import Endpoint
from pipedream_rt.cluster.peer_links import PeerLinks
from pipedream_rt.cluster.peer_listeners import PeerAddress, listening_for_peers
from pipedream_rt.cluster.records import Record
from pipedream_rt.cluster.worker_life import WorkerEnd
from pipedream_rt.deadline import Deadline
from pipedream_rt.devices import OwnDevice
from pipedream_rt.devices.choice import device_there
from pipedream_rt.dynamo import spare_dynamo
from pipedream_rt.errors import (
    ConfigError,
    MessageTimeout,
    PeerLost,
    PipelineClosed,
    PipelineError,
)
from pipedream_rt.stage.cooperative import serve_together
from pipedream_rt.stage.host import StageHost
from pipedream_rt.telling import log_of
from pipedream_rt.transport.fence import AgentMode, NoEndpoint
from pipedream_rt.transport.group import Group
from pipedream_rt.transport.interface import GenerationSender
from pipedream_rt.transport.limits import ensure_descriptors, make_room_for_agent
from pipedream_rt.transport.links import Connections
from pipedream_rt.transport.sockets import SocketTransport

T = TypeVar("T")

_log = log_of("pipedream_rt.worker")


def resident_bytes() -> int:
    """Resident memory of this process in bytes; 0 where the system does not say."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


_LAST_ACTION_S = 10.0
"""Seconds for the stages to end their current action. After that the process ends without them."""

_AT_THE_END_S = 0.5
"""Seconds for the stages to stop when the coordinator is dead."""

_PATIENCE = 1.5
"""Factor by which a stage waits longer than the coordinator. In a stall the coordinator then gives
up first, and can ask all stages what they wait for."""


def host_stage(
    control: Control,
    welcome: Record,
    threads: int,
    secret: Secret,
    bind: str | None,
) -> int:
    """Join the group that a welcome describes, host the worker's stages, and return the exit code.

    Threads of this process: the calling one reads the control connection; one computes for all
    stages, and reads the links while it waits; one reads the links while that one computes; those
    of torch RPC and its tunnel mostly wait. ``bind`` is the interface to listen on, None for
    loopback.
    """
    sys.path.extend(p for p in welcome["path"] if p not in sys.path)
    control.notice_within(4 * welcome["beat_s"])
    spare_dynamo()
    timeout = timedelta(seconds=welcome["timeout_s"])
    group = Group(
        generation=welcome["generation"],
        rank=welcome["rank"],
        names=tuple(welcome["names"]),
        hosts=tuple(welcome["hosts"]),
        key=secret.group_key(welcome["nonce"]),
    )
    mode: AgentMode = welcome["rpc"]
    name, number = own_device()  # for a worker that joined; others compute where the script says
    try:
        if name is not None and not control.inherited:
            device_there(name, number)
        ensure_descriptors(len(group.others))
        if mode != "off":
            make_room_for_agent()
        transport = SocketTransport(group, shares_memory=memory_is_shared())
        endpoint: Endpoint = NoEndpoint() if mode == "off" else extras.RPCEndpoint(timeout)
        _join(control, welcome, group, transport, endpoint, secret, bind)
    except (PipelineError, RuntimeError, OSError) as error:
        _log.error("could not join the group: %s", error)
        # A refusal stays one, unless the system has only run out of something.
        kind = "unfit" if isinstance(error, ConfigError) and not error.__cause__ else "failed"
        with suppress(PeerLost):
            control.send({"type": kind, "text": str(error)})
        return WorkerEnd.FAILED if isinstance(error, ConfigError) else WorkerEnd.AGAIN
    hosts = [
        StageHost(
            worker,
            title,
            stages,
            group.generation,
            GenerationSender(transport, group.generation),
            _PATIENCE * timeout,
            threads,
            announce=lambda action: control.send({"type": "doing", "action": action}),
            own_process=True,
            waiter=transport.waiter,
            device=OwnDevice(None if control.inherited else name, number),
        )
        for worker, title, stages in welcome["seats"]
    ]
    for host, (_, _, stages) in zip(hosts, welcome["seats"], strict=True):
        for stage in stages:
            transport.open(stage, host.inbox.put, host.inbox.close)
            endpoint.expose(stage, functools.partial(host.part, stage))
    assert transport.waiter is not None  # the links are there
    arguments = (hosts, threads, transport.waiter)
    thread = threading.Thread(target=serve_together, args=arguments, name=hosts[0].name)
    thread.start()
    control.send({"type": "joined", "nearby": transport.nearby})
    beat = timedelta(seconds=welcome["beat_s"])
    return _until_exit(control, hosts, thread, transport, endpoint, beat)


def _join(
    control: Control,
    welcome: Record,
    group: Group,
    transport: SocketTransport,
    endpoint: Endpoint,
    secret: Secret,
    bind: str | None,
) -> None:
    """Connect to all other members, and join torch RPC."""
    deadline = Deadline(timedelta(seconds=welcome["start_timeout_s"] or 300))
    host = None if welcome["host"] is None else _host_for_peers(control, welcome["host"], bind)
    with listening_for_peers(host) as listeners:
        control.send({"type": "door", "at": listeners.address})
        answer = control.receive(deadline)
        if answer["type"] != "doors":
            raise PeerLost(
                f"expected 'doors' from the coordinator, got {answer['type']!r}: it gave up "
                "forming the group",
                peer="the coordinator",
            )
        by_name = answer["by_name"]
        addresses = {rank: PeerAddress(*by_name[name]) for rank, name in enumerate(group.names)}

        async def meet() -> Connections:
            links = PeerLinks(group, secret, listeners, addresses, deadline)
            return await _unless_given_up(control, links.meet())

        endpoint.carry(group, transport)
        transport.connect(asyncio.run(meet()))
    endpoint.join(welcome["rpc"], deadline)


async def _unless_given_up(control: Control, meeting: Coroutine[Any, Any, T]) -> T:
    """Wait for a coroutine; end it if the coordinator sends anything, as it does to give up."""
    loop, task = asyncio.get_running_loop(), asyncio.ensure_future(meeting)

    def give_up() -> None:
        loop.remove_reader(control.fileno())  # it stays readable: each call would cancel once more
        task.cancel()

    loop.add_reader(control.fileno(), give_up)
    if control.has_come():
        give_up()
    try:
        return await task
    except asyncio.CancelledError:
        raise PeerLost(
            "the coordinator gave up forming the group", peer="the coordinator"
        ) from None


def _host_for_peers(control: Control, host: str, bind: str | None) -> str:
    """Return the numeric address at which this worker listens for other members.

    A worker that the coordinator has started listens where the coordinator does. Any other listens
    on loopback, unless its user names an interface.
    """
    if not control.local_host:
        return host
    if bind is not None:
        return address_on(bind, control.local_host)
    if not is_loopback(control.local_host):
        raise ConfigError(
            "the coordinator is not on loopback, so this worker must listen for the others on a "
            f"network: name its interface, as --bind {interface_of(control.local_host)}"
        )
    return control.local_host


def _until_exit(
    control: Control,
    hosts: Sequence[StageHost],
    thread: threading.Thread,
    transport: SocketTransport,
    endpoint: Endpoint,
    beat: timedelta,
) -> int:
    """Obey the coordinator until its ``exit``, or until the control connection breaks.

    A broken connection means that the coordinator is gone. A stage may then be deep in a
    computation that nobody wants, so the caller ends the process at once.
    """

    def story() -> str:
        return "; ".join(
            f"{host.name}: {host.inbox.story()}" if len(hosts) > 1 else host.inbox.story()
            for host in hosts
        )

    def close(reason: str) -> None:
        for host in hosts:
            host.inbox.close(PipelineClosed(reason))

    while True:
        try:
            record = control.receive(Deadline(beat))  # breaks when the coordinator dies
        except MessageTimeout:
            with suppress(PeerLost):  # the next `receive` notices it too
                control.send({"type": "beat", "doing": story(), "rss": resident_bytes()})
            continue
        except PeerLost:
            _log.error("the coordinator is gone; this worker ends")
            if control.inherited:  # over a socket pair, so it is dead, and not only out of reach
                # A stage that has a command to save must not begin after its parts were removed.
                close("the coordinator is gone")
                thread.join(_AT_THE_END_S)
                for host in hosts:
                    host.remove_parts()
            return WorkerEnd.COORDINATOR_LOST
        match record["type"]:
            case "stop":
                close("the coordinator said stop")
                thread.join(_LAST_ACTION_S)
                if thread.is_alive():
                    _log.error("a stage computes without end; the process ends without it")
                    return WorkerEnd.COORDINATOR_LOST  # with --persist a new process joins
                control.send({"type": "stopped"})
            case "story":
                control.send({"type": "story", "text": story()})
            case "shut":
                endpoint.shut()
            case "clock":
                control.send({"type": "clock", "ns": time.monotonic_ns()})
            case "exit":
                endpoint.close()
                transport.close()
                if record["failed"]:
                    _log.warning("the job goes on with a new generation; this process ends")
                return WorkerEnd.COORDINATOR_LOST if record["failed"] else 0
            case other:
                raise PeerLost(f"the coordinator sent {other!r}", peer="the coordinator")
