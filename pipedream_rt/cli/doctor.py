"""The command ``doctor``: checks the machines of a job before it starts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from datetime import timedelta
from typing import TYPE_CHECKING

import click

from pipedream_rt.cli.shared_options import GivenPath, options_of_nodes
from pipedream_rt.cluster.engines import EngineRequest, NodeJob, node_job
from pipedream_rt.cluster.nodes import run_first, run_other
from pipedream_rt.cluster.worker_life import shell_code
from pipedream_rt.doctor.judgement import Finding, judge, options_of_planner
from pipedream_rt.telling import say
from pipedream_rt.tracing.summary import table

if TYPE_CHECKING:
    from pipedream_rt.doctor.rounds import Found

_MARKS = {"ok": "ok", "note": "--", "warn": "!!", "fail": "XX"}


@click.command(short_help="Say whether machines fit a job, and what to mend.")
@options_of_nodes
@click.option("--folder", type=GivenPath(), metavar="PATH",
              help="A folder that all machines share, as that of the checkpoints.")  # fmt: skip
@click.option("--source", type=GivenPath(), metavar="PATH",
              help="A folder with your Python files, the same everywhere.")  # fmt: skip
@click.option("--patience", default=60.0, show_default=True, type=click.FloatRange(min=1),
              help="Seconds to wait for all machines.")  # fmt: skip
@click.option("--train", is_flag=True,
              help="Train a small model too, kill a worker on the way, and compare the bits with "
              "those of one process.")  # fmt: skip
@click.option("--rpc", is_flag=True,
              help="Look also whether rref.to_here() can fetch modules.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")
def doctor(
    asked: EngineRequest,
    folder: str | None,
    source: str | None,
    patience: float,
    train: bool,
    rpc: bool,
    as_json: bool,
) -> None:
    """Look at this machine, or at all machines of a job, and say what to mend.

    Start it on all machines as you start `run`: under srun, with --nnodes and --rdzv-endpoint, or
    where Kubeflow sets PET_ variables. The first one prints what was found. The exit code is 1 if a
    job would not run.
    """
    # They import torch, for which the other verbs have no use.
    from pipedream_rt.doctor.rounds import answer_examiner, examine_self, look_at_all

    folder, source = folder or "", source or ""
    job, wait = node_job(os.environ, asked), timedelta(seconds=patience)
    if job is not None and not job.node.is_first:
        if why := answer_examiner(job, source, wait):
            click.echo(why, err=True)
        if train and not why:
            sys.exit(run_other(job, 1, 1, [], wait, timedelta(0)))
        sys.exit(1 if why else 0)
    found = examine_self(folder, source) if job is None else look_at_all(job, folder, source, wait)
    expected = 1 if job is None else job.node.size
    findings = judge(found.machines, found.links, found.clocks, expected, found.addresses, rpc)
    bad = bool(found.refused) or any(each.grade == "fail" for each in findings)
    if train:
        findings += _trained(job, wait, bad)
        bad = bad or any(each.grade == "fail" for each in findings)
    elif job is not None:
        job.finish()
    if as_json:
        click.echo(_json(found, [asdict(each) for each in findings]))
    else:
        rows = [(_MARKS[each.grade], each.check, each.where, each.text) for each in findings]
        click.echo(table(rows))
        for name, why in found.refused.items():
            click.echo(f"XX  {name} was sent away: {why}")
        for each in findings:
            if each.remedy:
                click.echo(f"{each.check} {each.where}".strip() + f": {each.remedy}")
        if options := options_of_planner(found.links):
            click.echo(f"for the planner: pipedream-rt plan {options}")
    sys.exit(1 if bad else 0)


def _trained(job: NodeJob | None, patience: timedelta, bad: bool) -> list[Finding]:
    """Train on the workers of a job, or of this machine; not where a job would not run."""
    # As above.
    from pipedream_rt.doctor.training import train_on

    size = 1 if job is None else job.node.size
    count = 2 if size == 1 else 1  # workers of each machine
    if bad:
        if job is not None:  # tells the others, which wait
            run_first(job, [sys.executable, "-c", "raise SystemExit(1)"], count, {}, say, patience)
        return [Finding("training", "", "note", "left out, as a job would not run")]

    def run(command: list[str]) -> int:
        if job is None:
            return shell_code(subprocess.run(command, check=False).returncode)
        return run_first(job, command, count, {}, say, patience)

    return train_on(size * count, patience, run)


def _json(found: Found, findings: list[dict[str, object]]) -> str:
    """Return everything that was found, as JSON."""
    links = [
        {"from": caller, "to": called, **asdict(link)}
        for (caller, called), link in found.links.items()
    ]
    return json.dumps(
        {
            "findings": findings,
            "machines": found.machines,
            "links": links,
            "clocks": found.clocks,
            "refused": found.refused,
        },
        indent=1,
    )
