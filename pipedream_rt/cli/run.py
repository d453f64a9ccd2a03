"""The commands that start processes: ``run`` (local workers and a script) and ``worker``."""

from __future__ import annotations

import os
import selectors
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from types import FrameType

import click

from pipedream_rt.cluster.environment import (
    LISTEN_FD,
    MAX_RESTARTS,
    NPROC,
    RESUME,
    SECRET_FD,
    SUPERVISOR_FD,
    TRACE,
    secret_pipe,
)
from pipedream_rt.cluster.fork_server import ForkedWorker, ForkServer
from pipedream_rt.cluster.keys import Secret
from pipedream_rt.cluster.program import imports_of
from pipedream_rt.cluster.subprocesses import end_processes
from pipedream_rt.deadline import Deadline
from pipedream_rt.errors import PipelineError

_END_TIMEOUT = timedelta(seconds=5)
"""For the workers to end when they are told to; those that still run then are killed."""


@click.command(
    context_settings={"ignore_unknown_options": True, "help_option_names": []},
    add_help_option=False,
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def worker(arguments: tuple[str, ...]) -> None:
    """Start a worker process: HOST:PORT --name NAME (see worker --help)."""
    # In the same process, so that signals and exit codes are the worker's own.
    os.execv(sys.executable, [sys.executable, "-m", "pipedream_rt.workers", *arguments])


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option("--nproc-per-node", "--nproc_per_node", required=True, type=click.IntRange(min=1),
              help="Number of workers to start.")  # fmt: skip
@click.option("--threads", default=1, show_default=True, type=click.IntRange(min=1),
              help="Threads of each worker for torch's own parallel loops.")  # fmt: skip
@click.option("--trace", type=click.Path(dir_okay=False, writable=True),
              help="File to write what every stage did when; see timeline.")  # fmt: skip
@click.option("--max-restarts", "--max_restarts", type=click.IntRange(min=0),
              help="Number of failures of workers to recover from; 3 by default where the script "
              "makes checkpoints.")  # fmt: skip
@click.option("--resume", is_flag=True,
              help="Go on from the last checkpoint in the script's folder.")  # fmt: skip
@click.option("-m", "--module", is_flag=True, help="SCRIPT is a module, as with python -m.")
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def run(
    nproc_per_node: int,
    threads: int,
    trace: str | None,
    max_restarts: int | None,
    resume: bool,
    module: bool,
    script: str,
    arguments: tuple[str, ...],
) -> None:
    """Start local workers, then SCRIPT with its ARGUMENTS; end when it ends, with its exit code.

    The script's Pipeline uses these workers unless it asks for others. Each worker hosts a stage
    for one pipeline after another. Workers that fail are replaced when the script asks for it.
    """
    if not module and not os.path.isfile(script):
        raise click.BadParameter(f"there is no file {script!r}", param_hint="SCRIPT")
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    settings = {
        NPROC: str(nproc_per_node),
        **({} if trace is None else {TRACE: os.path.abspath(trace)}),
        **({} if max_restarts is None else {MAX_RESTARTS: str(max_restarts)}),
        **({RESUME: "1"} if resume else {}),
    }
    with socket.create_server(("127.0.0.1", 0), backlog=128) as listener:
        imports = [] if module else imports_of(script)
        workers = _Workers(nproc_per_node, threads, listener, imports)
        with workers.ended():
            named = ["-m", script] if module else [script]
            code = _run_script([sys.executable, *named, *arguments], workers, settings)
    sys.exit(code)


class _Workers:
    """The workers of `run`.

    Args:
        count: Number of workers.
        threads: Number of threads for torch's own parallel loops in each worker.
        listener: The socket at which they join the script's pipelines.
        imports: What the script imports that they need too.

    Attributes:
        listener: The same socket.
        secret: The secret of the job, made here.
    """

    def __init__(
        self, count: int, threads: int, listener: socket.socket, imports: Sequence[str]
    ) -> None:
        """Start no worker yet, but what forks them: it imports torch while the script does."""
        self.listener = listener
        self.secret = Secret.generated()
        self._count = count
        self._threads = threads
        self._children: list[ForkedWorker] = []
        self._forks = ForkServer()
        self._forks.prepare(imports)

    @contextmanager
    def ended(self) -> Iterator[None]:
        """At the end of the block the workers are told to end, and killed if late."""
        try:
            yield
        finally:
            for child in self._children:
                child.send_signal(signal.SIGTERM)
                child.send_signal(signal.SIGCONT)  # a stopped process acts on SIGTERM only then
            end_processes(self._children, Deadline(_END_TIMEOUT))
            self._forks.close()

    def replace(self) -> None:
        """Kill all workers and start others."""
        for child in self._children:
            child.kill()
        end_processes(self._children, Deadline(_END_TIMEOUT))
        self.start()

    def start(self) -> None:
        """Start all workers; after an error ``_children`` has those that were started."""
        self._children = []
        for i in range(self._count):
            self._start_one(f"worker-{i}")

    def _start_one(self, name: str) -> None:
        """Start a worker, which gets the secret by a pipe."""
        host, port = self.listener.getsockname()
        fd = secret_pipe(self.secret)
        try:
            child = self._forks.fork_joining(f"{host}:{port}", name, self._threads, fd)
        finally:
            os.close(fd)
        self._children.append(child)


def _run_script(command: list[str], workers: _Workers, settings: dict[str, str]) -> int:
    """Run the user's script to its end, passing SIGTERM on; Ctrl-C reaches it by the terminal.

    Args:
        command: The script with its arguments.
        workers: The workers that it uses, replaced when it asks for that.
        settings: Environment variables for the script.

    Returns:
        Its exit code; 128 and the number of the signal if a signal ended it.
    """
    ours, theirs = socket.socketpair()
    secret = secret_pipe(workers.secret)
    fds = (workers.listener.fileno(), theirs.fileno(), secret)
    names = (LISTEN_FD, SUPERVISOR_FD, SECRET_FD)
    environment = {**os.environ, **settings, **dict(zip(names, map(str, fds), strict=True))}
    with ours, theirs:
        process = subprocess.Popen(command, env=environment, pass_fds=fds)
        os.close(secret)

        def forward(number: int, frame: FrameType | None) -> None:
            click.echo(f"pipedream-rt: ending on {signal.Signals(number).name}", err=True)
            if number != signal.SIGINT or not _in_foreground():
                process.send_signal(number)

        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, forward)
        theirs.close()
        try:
            workers.start()
            _serve_script(process, ours, workers)
        except PipelineError as error:
            process.terminate()
            raise click.ClickException(f"no workers can be started: {error}") from error
        finally:
            code = process.wait()
    return 128 - code if code < 0 else code


def _serve_script(
    process: subprocess.Popen[bytes], requests: socket.socket, workers: _Workers
) -> None:
    """Replace the workers whenever the script asks for it, until the script ends.

    The end of the script is read from its process, not from the socket: children of the script may
    keep the other end of that open.

    Args:
        process: The script.
        requests: Where a byte comes for each request, and one is sent back when it is done.
        workers: The workers to replace.
    """
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
