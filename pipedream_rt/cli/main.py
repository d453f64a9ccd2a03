"""The command ``pipedream-rt``. Imports no torch: it starts processes that do."""

from __future__ import annotations

import os
import secrets
import selectors
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import FrameType

import click

from pipedream_rt import __version__
from pipedream_rt.cli.checkpoint import checkpoint
from pipedream_rt.cli.status import status
from pipedream_rt.cli.trace import simulate, timeline
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
from pipedream_rt.cluster.keys import NONCE
from pipedream_rt.cluster.subprocesses import end_processes, start_worker
from pipedream_rt.deadline import Deadline
from pipedream_rt.errors import PipelineError
from pipedream_rt.schedules import check, describe_schedules, schedule_named

_END_TIMEOUT = timedelta(seconds=5)


class _Commands(click.Group):
    """The commands; errors of the library are errors of the command."""

    def invoke(self, ctx: click.Context) -> object:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except PipelineError as error:
            raise click.ClickException(str(error)) from error


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__)
def main() -> None:
    """Asynchronous pipeline-parallel training for PyTorch."""


@main.command(
    context_settings={"ignore_unknown_options": True, "help_option_names": []},
    add_help_option=False,
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def worker(arguments: tuple[str, ...]) -> None:
    """Start a worker process: HOST:PORT --name NAME (see worker --help)."""
    # The same process: signals and exit codes are then the worker's own.
    os.execv(sys.executable, [sys.executable, "-m", "pipedream_rt.workers", *arguments])


@main.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option("--nproc-per-node", required=True, type=click.IntRange(min=1),
              help="Workers to start.")  # fmt: skip
@click.option("--threads", default=1, show_default=True, type=click.IntRange(min=1),
              help="Threads of each worker for torch's own parallel loops.")  # fmt: skip
@click.option("--trace", type=click.Path(dir_okay=False, writable=True),
              help="File to write what every stage did when; see timeline.")  # fmt: skip
@click.option("--max-restarts", type=click.IntRange(min=0),
              help="Failures of workers to recover from; 3 by default where the script makes "
              "checkpoints.")  # fmt: skip
@click.option("--resume", is_flag=True,
              help="Go on from the last checkpoint in the script's folder.")  # fmt: skip
@click.argument("script", type=click.Path(exists=True, dir_okay=False))
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def run(
    nproc_per_node: int,
    threads: int,
    trace: str | None,
    max_restarts: int | None,
    resume: bool,
    script: str,
    arguments: tuple[str, ...],
) -> None:
    """Start local workers, then SCRIPT with its ARGUMENTS; end when it ends, with its exit code.

    The script's Pipeline uses these workers unless it asks for others. Each worker hosts a stage
    for one pipeline after another. Workers that fail are replaced when the script asks for it.
    """
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    settings = {
        NPROC: str(nproc_per_node),
        **({} if trace is None else {TRACE: os.path.abspath(trace)}),
        **({} if max_restarts is None else {MAX_RESTARTS: str(max_restarts)}),
        **({RESUME: "1"} if resume else {}),
    }
    with socket.create_server(("127.0.0.1", 0), backlog=128) as listener:
        workers = _Workers(nproc_per_node, threads, listener)
        with workers.running():
            code = _run_script([sys.executable, script, *arguments], workers, settings)
    sys.exit(code)


class _Workers:
    """The workers of `run`.

    Args:
        count: How many.
        threads: For torch's own parallel loops in each.
        listener: Where they join the script's pipelines.
    """

    def __init__(self, count: int, threads: int, listener: socket.socket) -> None:
        """Start none yet."""
        self.listener = listener
        self.secret = secrets.token_bytes(NONCE)
        self._count = count
        self._threads = threads
        self._children: list[subprocess.Popen[bytes]] = []

    @contextmanager
    def running(self) -> Iterator[None]:
        """Start them; they end with the block: told first, killed if late."""
        try:
            self._start()
            yield
        finally:
            for child in self._children:
                child.terminate()
                child.send_signal(signal.SIGCONT)  # one that is stopped hears nothing else
            end_processes(self._children, Deadline(_END_TIMEOUT))

    def replace(self) -> None:
        """Kill them all and start others."""
        for child in self._children:
            child.kill()
        end_processes(self._children, Deadline(_END_TIMEOUT))
        self._start()

    def _start(self) -> None:
        host, port = self.listener.getsockname()
        # The socket listens as long as this job lives, hence the short timeout.
        options = (f"{host}:{port}", "--persist", "--timeout", "1")
        environment = {"PIPEDREAM_RT_LOG": "WARNING", **os.environ}
        self._children = []
        for i in range(self._count):
            fd = secret_pipe(self.secret)
            try:
                self._children.append(
                    start_worker(
                        *options,
                        "--secret-fd",
                        str(fd),
                        name=f"worker-{i}",
                        threads=self._threads,
                        pass_fds=(fd,),
                        environment=environment,
                    )
                )
            finally:
                os.close(fd)


def _run_script(command: list[str], workers: _Workers, settings: dict[str, str]) -> int:
    """Run the user's script to its end, passing SIGTERM on; Ctrl-C reaches it by the terminal.

    Returns:
        Its exit code, 128 and the signal's number if one ended it.
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
        # The script has the other end, and so perhaps its children: its end is the end of it all.
        watch = os.pidfd_open(process.pid)
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(watch, selectors.EVENT_READ)
                selector.register(ours, selectors.EVENT_READ)
                while process.poll() is None:
                    for key, _ in selector.select():
                        if key.fileobj is ours:
                            if ours.recv(1):
                                workers.replace()
                                ours.sendall(b"r")
                            else:
                                selector.unregister(ours)
        finally:
            os.close(watch)
        code = process.wait()
    return 128 - code if code < 0 else code


def _in_foreground() -> bool:
    """Whether a terminal sends Ctrl-C to this process and so to the script, its child, too."""
    try:
        return os.tcgetpgrp(0) == os.getpgrp()
    except OSError:
        return False


main.add_command(checkpoint)
main.add_command(simulate)
main.add_command(status)
main.add_command(timeline)


@main.command()
@click.argument("name")
@click.option("--stages", default=4, show_default=True, type=click.IntRange(min=1))
@click.option("--micro-batches", default=1, show_default=True, type=click.IntRange(min=1),
              help="Per update.")  # fmt: skip
@click.option("--updates", default=8, show_default=True, type=click.IntRange(min=1))
@click.option("--vertical-sync", is_flag=True, help="With async-1f1b.")
@click.option("--stages-per-worker", type=click.IntRange(min=1), help="With interleaved-1f1b.")
def schedule(
    name: str,
    stages: int,
    micro_batches: int,
    updates: int,
    vertical_sync: bool,
    stages_per_worker: int | None,
) -> None:
    """Check a schedule and draw it, one column for each action; NAME help lists them all."""
    if name == "help":
        click.echo(describe_schedules())
        return
    chosen = schedule_named(
        name,
        num_stages=stages,
        per_update=micro_batches,
        vertical_sync=vertical_sync,
        stages_per_worker=stages_per_worker,
    )
    grid = check(chosen, updates * micro_batches)
    click.echo(f"{name}: {chosen.recipe.line()}")
    click.echo(grid.render())
