"""The commands that start processes: ``run`` (workers and a script) and ``worker``."""

from __future__ import annotations

import logging
import os
import signal
import sys
from datetime import timedelta

import click

from pipedream_rt.cli.shared_options import GivenPath, Grouped, options_of_nodes
from pipedream_rt.cluster.engines import EngineRequest, node_job
from pipedream_rt.cluster.environment import (
    LOG_DIR,
    MAX_RESTARTS,
    NPROC,
    PREPARE,
    RECORD,
    RESUME,
    THREADS,
    TRACE,
    VERIFY,
)
from pipedream_rt.cluster.forked_workers import imports_of
from pipedream_rt.cluster.nodes import run_first, run_other
from pipedream_rt.deadline import Deadline
from pipedream_rt.schema import is_count, shown
from pipedream_rt.telling import say


@click.command(
    context_settings={"ignore_unknown_options": True, "help_option_names": []},
    add_help_option=False,
    short_help="Join a script on another machine.",
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def worker(arguments: tuple[str, ...]) -> None:
    """Start a worker process: HOST:PORT --name NAME (see worker --help)."""
    # In the same process, so that signals and exit codes are the worker's own.
    os.execv(sys.executable, [sys.executable, "-m", "pipedream_rt.workers", *arguments])


_MEANT = {
    "nproc-per-node": "nproc n np workers num-workers num-processes nprocs gpus num-gpus ngpus "
    "devices",
    "nnodes": "nodes num-nodes num-machines n-nodes",
    "node-rank": "rank machine-rank",
    "master-addr": "main-process-ip",
    "master-port": "main-process-port",
    "max-restarts": "restarts retries",
    "threads": "num-threads num-cpu-threads-per-process",
    "log-dir": "logs log-folder",
}
"""By name of an option, its names in torchrun, accelerate, deepspeed and others."""

_NEEDLESS = (
    "standalone role monitor-interval start-method tee redirects local-addr no-python run-path "
    "local-ranks-filter logs-specs event-log-handler numa-binding signals-to-handle"
)
"""Options of torchrun that have no place here."""


class _RunCommand(Grouped):
    """Answers the words of other launchers with those of this command."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            unknown = error.option_name
            name = unknown.lstrip("-").replace("_", "-")
            meant = [option for option, words in _MEANT.items() if name in words.split()]
            if meant:
                raise click.UsageError(
                    f"run has no option {unknown}: here it is --{meant[0]}", ctx
                ) from None
            if name in _NEEDLESS.split():
                raise click.UsageError(
                    f"run has no option {unknown}, and needs none in its place: leave it out", ctx
                ) from None
            raise


@click.command(
    cls=_RunCommand,
    groups={
        "Workers": "nproc_per_node threads max_restarts",
        "The run": "resume verify compare_schedules updates module",
        "What is kept of it": "trace record log_dir",
        "Several nodes": "nnodes node_rank rdzv_endpoint master_addr master_port ray_nodes "
        "patience grace",
    },
    context_settings={"allow_interspersed_args": False},
    short_help="Run a script, with workers beside it.",
)
@click.option("--nproc-per-node", "--nproc_per_node", envvar="PET_NPROC_PER_NODE", metavar="N",
              callback=lambda context, parameter, text: count_of(text),
              help="Number of workers to start on each node; auto for one on each core. By default "
              "the script starts one for each stage; in a job of several nodes, 1.")  # fmt: skip
@options_of_nodes
@click.option("--ray", "ray_nodes", type=click.IntRange(min=1), metavar="N",
              help="Have Ray place N nodes and restart them; one runs the script.")  # fmt: skip
@click.option("--patience", default=1800.0, show_default=True, type=click.FloatRange(min=1),
              help="Seconds for which other nodes wait for the first one.")  # fmt: skip
@click.option("--grace", default=60.0, show_default=True, type=click.FloatRange(min=0.1),
              help="Seconds for which other nodes serve the script after SIGTERM.")  # fmt: skip
@click.option("--threads", default=1, show_default=True, type=click.IntRange(min=1),
              help="Threads of each worker for torch's own parallel loops.")  # fmt: skip
@click.option("--trace", type=GivenPath(dir_okay=False, writable=True),
              help="File to write what every stage did when; see timeline.")  # fmt: skip
@click.option("--log-dir", "--log_dir", type=GivenPath(file_okay=False, writable=True),
              help="Folder for a file with what each worker writes.")  # fmt: skip
@click.option("--record", type=GivenPath(file_okay=False, writable=True), metavar="FOLDER",
              help="Folder to record the run in; see report and watch.")  # fmt: skip
@click.option("--max-restarts", "--max_restarts", type=click.IntRange(min=0),
              help="Number of failures of workers to recover from; 3 by default where the script "
              "makes checkpoints.")  # fmt: skip
@click.option("--resume", is_flag=True,
              help="Go on from the last checkpoint in the script's folder.")  # fmt: skip
@click.option("--verify", is_flag=True,
              help="Compare the first three mini-batches with plain PyTorch, value by value, and "
              "say where they part; end the script if they do.")  # fmt: skip
@click.option("--compare-schedules", is_flag=True,
              help="Run the script twice for its first updates, by 1f1b and by async-1f1b, and say "
              "which reaches a loss sooner. Its checkpoints are not touched.")  # fmt: skip
@click.option("--updates", default=300, show_default=True, type=click.IntRange(min=2),
              help="With --compare-schedules: how many by each.")  # fmt: skip
@click.option("-m", "--module", is_flag=True, help="SCRIPT is a module, as with python -m.")
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def run(
    asked: EngineRequest,
    nproc_per_node: int | None,
    ray_nodes: int | None,
    patience: float,
    grace: float,
    threads: int,
    trace: str | None,
    log_dir: str | None,
    record: str | None,
    max_restarts: int | None,
    resume: bool,
    verify: bool,
    compare_schedules: bool,
    updates: int,
    module: bool,
    script: str,
    arguments: tuple[str, ...],
) -> None:
    """Start workers and SCRIPT with its ARGUMENTS; end when it ends, with its exit code.

    The script's Pipeline uses these workers unless it asks for others. Each worker hosts a stage
    for one pipeline after another. Workers that fail are replaced.

    Where an engine has started this command on several nodes (srun, Kubeflow, or --nnodes), the
    first one runs the script, and the others serve it with workers until it ends.
    """
    count, wait = nproc_per_node or 1, timedelta(seconds=patience)
    job = None if ray_nodes is not None else node_job(os.environ, asked)
    elsewhere = job is not None or ray_nodes is not None
    if compare_schedules and (elsewhere or record or trace or resume):
        raise click.UsageError(
            "--compare-schedules is for one machine, and goes neither on nor keeps anything: leave "
            "out --nnodes, --ray, --record, --trace and --resume"
        )
    if ray_nodes is not None:
        # Ray is an extra, and takes a second to import.
        from pipedream_rt.cluster.engines.ray_nodes import run_on_ray

        if asked != EngineRequest():
            raise click.UsageError("with --ray it is Ray that says which node is which")
        options = [f"--nproc-per-node={count}", f"--threads={threads}", f"--grace={grace}"]
        options += [] if trace is None else [f"--trace={os.path.abspath(trace)}"]
        options += [] if log_dir is None else [f"--log-dir={os.path.abspath(log_dir)}"]
        options += [] if record is None else [f"--record={os.path.abspath(record)}"]
        options += [] if max_restarts is None else [f"--max-restarts={max_restarts}"]
        options += ["--resume"] * resume + ["--verify"] * verify + ["--module"] * module
        on_nodes = [script if module else os.path.abspath(script), *arguments]
        sys.exit(run_on_ray(ray_nodes, options, on_nodes, Deadline(wait), say))
    if job is None and nproc_per_node is None and threads > 1:
        raise click.UsageError(
            "--threads is for workers that are started here, so give --nproc-per-node too; or "
            "Layout(threads=...)"
        )
    if log_dir is not None:
        os.environ[LOG_DIR] = _folder(log_dir)  # for the workers that are started here
    if job is not None and not job.node.is_first:
        imports = [] if module else imports_of(script)
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
        logging.basicConfig(format="%(message)s", level=logging.INFO)
        sys.exit(run_other(job, count, threads, imports, wait, timedelta(seconds=grace)))
    if not module and not os.path.isfile(script):
        raise click.BadParameter(f"there is no file {script!r}", param_hint="SCRIPT")
    settings = {
        **({} if trace is None else {TRACE: os.path.abspath(trace)}),
        **({} if record is None else {RECORD: os.path.abspath(record)}),
        **({} if max_restarts is None else {MAX_RESTARTS: str(max_restarts)}),
        **({RESUME: "1"} if resume else {}),
        **({VERIFY: "3"} if verify else {}),
    }
    command = [sys.executable, *(["-m", script] if module else [script]), *arguments]
    if job is None:
        if nproc_per_node is not None:
            settings |= {NPROC: str(nproc_per_node), THREADS: str(threads)}
        if compare_schedules:
            from pipedream_rt.cli.compare_schedules import compare  # reads records: imports torch

            signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
            sys.exit(compare(command, {**os.environ, **settings, PREPARE: "1"}, updates))
        # In this process, so that signals and exit codes are the script's own.
        os.execve(sys.executable, command, {**os.environ, **settings, PREPARE: "1"})
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    code = run_first(job, command, count, settings, say, wait)
    sys.exit(code)


def _folder(path: str) -> str:
    """Make a folder, and return its absolute path."""
    try:
        os.makedirs(path, exist_ok=True)
    except OSError as error:
        raise click.BadParameter(f"{path}: {error.strerror}", param_hint="--log-dir") from error
    return os.path.abspath(path)


def count_of(text: str | None) -> int | None:
    """Return the number of workers that a text in torchrun's form means; None for no text."""
    if text is None or text == "":
        return None
    if text in ("auto", "cpu"):
        return len(os.sched_getaffinity(0))
    if not (is_count(text) and int(text) > 0):
        raise click.BadParameter(f"{shown(text, 60)} is no number of at least 1, nor auto")
    return int(text)
