"""The command ``schedule``: checks a schedule and draws it. It starts no process."""

from __future__ import annotations

import click

from pipedream_rt.cli.shared_options import refuse_too_many, replicas_option, slack_option
from pipedream_rt.errors import ConfigError
from pipedream_rt.schedules import (
    RECIPES,
    check,
    describe_schedules,
    plan_for,
    schedule_named,
)
from pipedream_rt.schedules.recipes import VERTICAL_SYNC

_MOST_DRAWN = 1_000_000
"""Actions that a drawing may have. Its lines are far wider than any terminal already."""


@click.command(short_help="Draw a schedule; help lists them.")
@click.argument("name")
@click.option("--stages", default=4, show_default=True, type=click.IntRange(min=1),
              help="Stages of the model.")  # fmt: skip
@click.option("--micro-batches", default=1, show_default=True, type=click.IntRange(min=1),
              help="Micro-batches per update.")  # fmt: skip
@click.option("--updates", default=8, show_default=True, type=click.IntRange(min=1),
              help="Updates to draw.")  # fmt: skip
@click.option("--vertical-sync", is_flag=True,
              help="With async-1f1b: a micro-batch reads one weight version "
              "at all stages.")  # fmt: skip
@click.option("--stages-per-worker", type=click.IntRange(min=1),
              help="With interleaved-1f1b: stages that each worker hosts.")  # fmt: skip
@click.option("--synchronous-updates", default=0, type=click.IntRange(min=0),
              help="Updates at the start that flush the pipe.")  # fmt: skip
@slack_option
@replicas_option
def schedule(
    name: str,
    stages: int,
    micro_batches: int,
    updates: int,
    vertical_sync: bool,
    stages_per_worker: int | None,
    synchronous_updates: int,
    slack: int | tuple[int, ...] | None,
    replicas: int | tuple[int, ...],
) -> None:
    """Check a schedule and draw it, one column for each action; NAME help lists them all."""
    if name == "help":
        click.echo(describe_schedules())
        return
    name = schedule_named(name)
    if vertical_sync and not name.endswith(VERTICAL_SYNC):
        if name + VERTICAL_SYNC not in RECIPES:
            raise ConfigError(f"--vertical-sync is an option of async-1f1b, not of {name}")
        name += VERTICAL_SYNC
    chosen = plan_for(
        name,
        num_stages=stages,
        per_update=micro_batches,
        stages_per_worker=stages_per_worker,
        synchronous=synchronous_updates,
        slack=slack or 0,
        replicas=replicas,
    )
    refuse_too_many(chosen, updates, _MOST_DRAWN, "a drawing")
    grid = check(chosen, updates * micro_batches)
    click.echo(f"{name}: {RECIPES[chosen.name].line()}")
    click.echo(grid.render())
