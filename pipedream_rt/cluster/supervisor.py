"""What `pipedream-rt run` does: it starts workers and a script, and waits until both have ended.

On one machine that is the whole job. Where an engine starts the same command on several nodes, the
first runs the script, and all of them run workers; see `pipedream_rt.cluster.engines`.
"""

from __future__ import annotations

import logging
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

from pipedream_rt.cluster.addresses import (
    PortTaken,
    host_to_listen_at,
    interface_towards,
    joined,
    listening,
    listening_in_time,
)
from pipedream_rt.cluster.control import EXIT_COORDINATOR_LOST, is_final
from pipedream_rt.cluster.engines import Membership
from pipedream_rt.cluster.environment import (
    ENGINE,
    LISTEN_FD,
    NPROC,
    NPROC_HERE,
    RECORD,
    SECRET_FD,
    SUPERVISOR_FD,
    TRACE,
    secret_pipe,
    tls_of_environment,
)
from pipedream_rt.cluster.forked_workers import LISTENS_WITHIN, ForkedWorker, ForkServer
from pipedream_rt.cluster.keys import Secret
from pipedream_rt.cluster.subprocesses import Backoff, dies_with_parent, end_processes, shell_code
from pipedream_rt.cluster.supervision import announce_end
from pipedream_rt.deadline import Deadline
from pipedream_rt.errors import ConfigError, RendezvousTimeout

_log = logging.getLogger(__name__)

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


class Workers:
    """The workers of one node, forked and replaced here."""

    def __init__(
        self,
        names: Sequence[str],
        threads: int,
        address: str,
        secret: Secret,
        imports: Sequence[str] = (),
        bind: str | None = None,
        patience: timedelta = LISTENS_WITHIN,
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

    def replace(self) -> None:
        """Kill all workers and start others."""
        self._kill()
        self.start()

    def start(self) -> None:
        for name in self._names:
            self._start_one(name)

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
                # All workers of a node hear the same, so one is enough. EXIT_COORDINATOR_LOST means
                # that nobody has called it within its patience.
                if is_final(code) or code == EXIT_COORDINATOR_LOST:
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
                bind=self._bind, timeout=self._patience, stays=self._bind is not None,
                number=self._names.index(name),
            )  # fmt: skip
        finally:
            os.close(fd)

    def _kill(self) -> None:
        """Kill all workers, and wait until they are gone."""
        for child in self._children.values():
            child.kill()
        end_processes(self._children.values(), Deadline(_END_TIMEOUT))


def run_here(
    command: list[str],
    count: int,
    threads: int,
    imports: Sequence[str],
    settings: Mapping[str, str],
    say: Callable[[str], object],
) -> int:
    """Run a script with workers on this machine."""
    with listening("127.0.0.1", 0) as listener:
        secret, (host, port) = Secret.generated(), listener.getsockname()
        names = [f"worker-{i}" for i in range(count)]
        workers = Workers(names, threads, joined(host, port), secret, imports)
        with workers.ended():
            return _run_script(
                command, workers, listener, secret, {**settings, NPROC: str(count)}, say
            )


def run_first(
    job: Membership,
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
            door = listening_in_time(host, node.port, Deadline(_PORT_TIMEOUT))
            listener = opened.enter_context(door)
        except PortTaken as error:
            say(f"{error}. Is it another job's? If so, give this one another port")
            return EXIT_COORDINATOR_LOST
        total = str(node.size * count)
        more = {**settings, NPROC: total, NPROC_HERE: str(count), ENGINE: job.title}
        code = _run_script(command, None, listener, secret, more, say)
        # After any other end the other nodes wait for this one to come again.
        if is_final(code):
            deadline = Deadline(_FAREWELL_TIMEOUT)
            key, tls = secret.job_key(), tls_of_environment()
            told = announce_end(listener, key, code, node.size - 1, deadline, tls)
            if told < node.size - 1:
                say(f"{node.size - 1 - told} of {node.size - 1} other nodes did not hear the end")
            job.finish()
    return code


def run_other(
    job: Membership, count: int, threads: int, imports: Sequence[str], patience: timedelta,
    grace: timedelta,
) -> int:  # fmt: skip
    """Run the workers of a node that is not the first, until the job is over."""
    node, secret = job.node, job.secret(Deadline(patience))
    address = joined(node.host, node.port)
    try:
        bind = _interface_in_time(address, Deadline(patience))
    except RendezvousTimeout as error:
        _log.error("the first node was not found within %g s: %s", patience.total_seconds(), error)
        return EXIT_COORDINATOR_LOST
    names = [node.name_of_worker(i) for i in range(count)]
    workers = Workers(names, threads, address, secret, imports, bind, patience)

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
    workers: Workers | None,
    listener: socket.socket,
    secret: Secret,
    settings: Mapping[str, str],
    say: Callable[[str], object],
) -> int:
    """Run the user's script to its end, and return its exit code as a shell has it."""
    ours, theirs = socket.socketpair()
    pipe = secret_pipe(secret)
    fds = (listener.fileno(), theirs.fileno(), pipe)
    names = (LISTEN_FD, SUPERVISOR_FD, SECRET_FD)
    environment = {**os.environ, **settings, **dict(zip(names, map(str, fds), strict=True))}
    with ours, theirs:
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
        theirs.close()  # else `ours` would not read end of file once the script has closed its end
        try:
            if workers is not None:
                workers.start()
                _serve_script(process, ours, workers)
            process.wait()
        except BaseException:
            process.terminate()
            raise
        finally:
            code = process.wait()
            is_unused = _holds_something(pipe)
            os.close(pipe)
    if not code:
        _say_of_nothing(settings, is_unused, say)
    return shell_code(code)


def _holds_something(pipe: int) -> bool:
    """Whether a pipe holds something that nobody has read."""
    os.set_blocking(pipe, False)
    try:
        return bool(os.read(pipe, 1))
    except BlockingIOError:  # it is empty, and another process may still write
        return False


def _say_of_nothing(
    settings: Mapping[str, str], is_unused: bool, say: Callable[[str], object]
) -> None:
    """Say which options of the command the script has made no use of."""
    if is_unused:  # the first pipeline that wants the workers reads the secret with which they join
        say(
            f"pipedream-rt run: the script has used none of the {settings[NPROC]} workers: it has "
            "made no Pipeline, or one with workers= of its own"
        )
    for name in (TRACE, RECORD):
        if name in settings and not os.path.exists(settings[name]):
            say(f"pipedream-rt run: the script has written nothing to {settings[name]}")


def _serve_script(
    process: subprocess.Popen[bytes], requests: socket.socket, workers: Workers
) -> None:
    """Replace the workers whenever the script asks for it, until the script ends."""
    # Its pidfd tells when it ends, not its socket: children may keep the other end of that open.
    watch = os.pidfd_open(process.pid)
    try:
        with selectors.DefaultSelector() as selector:
            selector.register(watch, selectors.EVENT_READ)
            selector.register(requests, selectors.EVENT_READ)
            while process.poll() is None:
                for key, _ in selector.select():
                    if key.fileobj is not requests:
                        continue
                    if requests.recv(1):
                        workers.replace()
                        requests.sendall(b"r")
                    else:
                        selector.unregister(requests)
    finally:
        os.close(watch)


def _in_foreground() -> bool:
    """Whether a terminal sends Ctrl-C to this process, and so to the script, which is its child."""
    try:
        return os.tcgetpgrp(0) == os.getpgrp()
    except OSError:
        return False
