"""What `pipedream-rt run` does where an engine starts it on several nodes.

The first node runs the script, whose pipelines start the workers of that node; each of the others
runs workers, starts them again, and ends when the script has ended for good. On one node there is
nothing to do: the command becomes the script.
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from types import FrameType

from pipedream_rt import extras
from pipedream_rt.cluster.addresses import (
    PortTaken,
    host_to_listen_at,
    interface_towards,
    joined,
    listening_in_time,
)
from pipedream_rt.cluster.environment import (
    ENGINE,
    LISTEN_FD,
    NPROC,
    NPROC_HERE,
    SECRET_FD,
    secret_pipe,
)
from pipedream_rt.cluster.forked_workers import ForkedWorker, ForkServer
from pipedream_rt.cluster.identity import Secret
from pipedream_rt.cluster.listener import announce_end
from pipedream_rt.cluster.node_job import NodeJob
from pipedream_rt.cluster.subprocesses import Backoff, dies_with_parent, end_processes
from pipedream_rt.cluster.worker_life import (
    Starter,
    WorkerEnd,
    is_final,
    is_started_again,
    shell_code,
)
from pipedream_rt.deadline import Deadline
from pipedream_rt.errors import ConfigError, RendezvousTimeout
from pipedream_rt.telling import log_of

_log = log_of(__name__)

_END_TIMEOUT = timedelta(seconds=5)
"""For killed workers to be gone."""

_FAREWELL_TIMEOUT = timedelta(seconds=15)
"""For the workers of other nodes to hear that the job is over: those that lost their group in the
same moment try again every half second."""

_TURN_S = 1.0

_LAST_TURNS = 2
"""How many turns a node that is to stop still waits for its workers to end by themselves."""

_PORT_TIMEOUT = timedelta(seconds=10)
"""For the port of the first node's earlier life to get free: a process that the script has started
may hold it for a moment longer than the script lives."""


class NodeWorkers:
    """The workers of a node that is not the first: they dial it, and are started again here."""

    def __init__(
        self,
        names: Sequence[str],
        threads: int,
        address: str,
        secret: Secret,
        imports: Sequence[str],
        bind: str,
        patience: timedelta,
    ) -> None:
        self._names = names
        self._threads = threads
        self._address = address
        self._secret = secret
        self._bind = bind
        self._patience = patience
        self._children: dict[str, ForkedWorker] = {}
        self._forks = ForkServer()
        self._forks.prepare(imports)

    @contextmanager
    def ended(self) -> Iterator[None]:
        """Kill all workers at the end of the block: they have nothing to save."""
        try:
            yield
        finally:
            self._kill()
            self._forks.close()

    def serve(self, is_ending: Callable[[], bool]) -> int:
        """Start all workers, and again any that dies, until the job is over; return the code."""
        pauses, turns = Backoff(), 0
        due = dict.fromkeys(self._names, time.monotonic())  # when to start those that do not run
        began: dict[str, float] = {}
        while True:
            now = time.monotonic()
            for name in [name for name, at in due.items() if at <= now]:
                del due[name]
                began[name] = now
                self._start_one(name)
            for name in self._ended_now(due, min([now + _TURN_S, *due.values()]) - now):
                code = shell_code(self._children[name].wait())
                # All workers of a node hear the same, so one is enough.
                if not is_started_again(Starter.NODE, code):
                    return code
                _log.warning("worker %r has ended with %d; it is started again", name, code)
                now = time.monotonic()
                due[name] = now + pauses.after(name, now - began[name])
            # A worker that has just heard that the job is over ends in these turns, with its code.
            turns = turns + 1 if is_ending() else 0
            if turns > _LAST_TURNS:
                return 128 + signal.SIGTERM

    def _ended_now(self, resting: Collection[str], seconds: float) -> list[str]:
        """Wait at most so long for a worker to end; return the names of those that have."""
        with selectors.DefaultSelector() as selector:
            for name in self._names:
                if name not in resting:
                    selector.register(self._children[name], selectors.EVENT_READ, name)
            return [key.data for key, _ in selector.select(seconds)]

    def _start_one(self, name: str) -> None:
        """Start a worker, which gets the secret by a pipe."""
        fd = secret_pipe(self._secret)
        try:
            self._children[name] = self._forks.fork_joining(
                self._address, name, self._threads, fd,
                bind=self._bind, timeout=self._patience, number=self._names.index(name),
            )  # fmt: skip
        finally:
            os.close(fd)

    def _kill(self) -> None:
        """Kill all workers, and wait until they are gone."""
        for child in self._children.values():
            child.kill()
        end_processes(self._children.values(), Deadline(_END_TIMEOUT))


def run_first(
    job: NodeJob,
    command: list[str],
    count: int,
    settings: Mapping[str, str],
    say: Callable[[str], object],
    patience: timedelta,
) -> int:
    """Run a script on the first node of a job; its pipelines start the workers of this node."""
    node, secret = job.node, job.secret(Deadline(patience))
    host = host_to_listen_at(node.host, alone=False)
    with ExitStack() as opened:
        try:
            listening = listening_in_time(host, node.port, Deadline(_PORT_TIMEOUT))
            listener = opened.enter_context(listening)
        except PortTaken as error:
            say(f"{error}. Is it another job's? If so, give this one another port")
            return WorkerEnd.COORDINATOR_LOST
        total = str(node.size * count)
        more = {**settings, NPROC: total, NPROC_HERE: str(count), ENGINE: job.title}
        code = _run_script(command, listener, secret, more, say)
        # After any other end the other nodes wait for this one to come again.
        if is_final(code):
            deadline = Deadline(_FAREWELL_TIMEOUT)
            informed = announce_end(listener, secret, code, node.size - 1, deadline)
            uninformed = node.size - 1 - informed
            if uninformed > 0:
                say(f"{uninformed} of {node.size - 1} other nodes did not hear the end")
            job.finish()
    return code


def run_other(
    job: NodeJob, count: int, threads: int, imports: Sequence[str], patience: timedelta,
    grace: timedelta,
) -> int:  # fmt: skip
    """Run the workers of a node that is not the first, until the job is over."""
    node, secret = job.node, job.secret(Deadline(patience))
    address = joined(node.host, node.port)
    try:
        bind = _interface_in_time(address, Deadline(patience))
    except RendezvousTimeout as error:
        why = extras.why_nodes(os.environ)
        _log.error(
            "the first node was not found within %g s: %s%s",
            patience.total_seconds(), error, why and f"; {why}",
        )  # fmt: skip
        return WorkerEnd.COORDINATOR_LOST
    names = [node.name_of_worker(i) for i in range(count)]
    workers = NodeWorkers(names, threads, address, secret, imports, bind, patience)

    # SIGTERM does not end them at once: an engine that ends a job sends it to all processes, and
    # the script needs its workers for the checkpoint that it makes then.
    ending: list[Deadline] = []
    signal.signal(signal.SIGTERM, lambda *_: ending.append(Deadline(grace)))
    with workers.ended():
        return workers.serve(
            lambda: bool(ending) and (ending[0].expired() or not _listens(node.host, node.port))
        )


def _listens(host: str, port: int) -> bool:
    """Whether the script's node still accepts connections."""
    try:
        socket.create_connection((host, port), timeout=_TURN_S).close()
    except OSError:
        return False
    return True


def _interface_in_time(address: str, deadline: Deadline) -> str:
    """Return the interface towards an address whose name may not resolve yet."""
    while True:
        try:
            return interface_towards(address)
        except (ConfigError, OSError) as error:
            if deadline.expired():
                raise RendezvousTimeout(f"{address}: {error}", missing=1) from error
            threading.Event().wait(min(1.0, deadline.remaining_s() or 1.0))


def _run_script(
    command: list[str],
    listener: socket.socket,
    secret: Secret,
    settings: Mapping[str, str],
    say: Callable[[str], object],
) -> int:
    """Run the user's script to its end, and return its exit code as a shell has it."""
    pipe = secret_pipe(secret)
    fds = (listener.fileno(), pipe)
    names = (LISTEN_FD, SECRET_FD)
    environment = {**os.environ, **settings, **dict(zip(names, map(str, fds), strict=True))}
    # Else the script would live on after this process is killed, beside the one started next.
    process = subprocess.Popen(
        command, env=environment, pass_fds=fds,
        preexec_fn=dies_with_parent(signal.SIGKILL),
    )  # fmt: skip

    def forward(number: int, frame: FrameType | None) -> None:
        say(f"pipedream-rt: ending on {signal.Signals(number).name}")
        # In the foreground the terminal has sent Ctrl-C to the script as well.
        if number != signal.SIGINT or not _in_foreground():
            process.send_signal(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, forward)
    try:
        process.wait()
    except BaseException:
        process.terminate()
        raise
    finally:
        code = process.wait()
        os.close(pipe)
    return shell_code(code)


def _in_foreground() -> bool:
    """Whether a terminal sends Ctrl-C to this process, and so to the script, which is its child."""
    try:
        return os.tcgetpgrp(0) == os.getpgrp()
    except OSError:
        return False
