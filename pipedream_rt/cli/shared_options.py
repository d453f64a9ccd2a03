"""Options that several commands share."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from typing import Any

import click

from pipedream_rt.cluster.addresses import joined
from pipedream_rt.cluster.engines import EngineRequest
from pipedream_rt.errors import ConfigError
from pipedream_rt.paths import given_path
from pipedream_rt.schedules import Plan
from pipedream_rt.schedules.shape import parse_slack
from pipedream_rt.schema import is_count, shown


class Grouped(click.Command):
    """A command whose help shows its options in groups.

    ``groups`` has, by heading, the names of parameters. Options in none come last.
    """

    def __init__(self, *args: Any, groups: Mapping[str, str], **options: Any) -> None:
        super().__init__(*args, **options)
        self._groups = groups

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        left = {each.name: each for each in self.get_params(ctx) if isinstance(each, click.Option)}
        for heading, names in (*self._groups.items(), ("Other options", " ".join(map(str, left)))):
            found = [left.pop(name, None) for name in names.split()]
            rows = [row for each in found if each and (row := each.get_help_record(ctx))]
            if rows:
                with formatter.section(heading):
                    formatter.write_dl(rows)


class GivenPath(click.Path):
    """The path of a file or folder, with ``~`` and variables expanded; no address."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        what = "the path" if param is None else param.get_error_hint(ctx)
        return super().convert(os.fspath(given_path(value, what)), param, ctx)


def _slack(context: click.Context, option: click.Parameter, text: str | None) -> Any:
    """Read an option with one number for all hops, or one for each, separated by commas."""
    return None if text is None else parse_slack(text.split(","))


def _replicas(context: click.Context, option: click.Parameter, text: str | None) -> Any:
    """Read an option with one number for all stages, or one for each, separated by commas."""
    if text is None:
        return ()
    numbers = [part.strip() for part in text.split(",")]
    if not all(map(is_count, numbers)):
        raise ConfigError(f"replicas must be integers of at least 1, not {shown(text, 60)}")
    return int(numbers[0]) if len(numbers) == 1 else tuple(map(int, numbers))


def refuse_too_many(plan: Plan, updates: int, most: int, what: str) -> None:
    """Refuse more than ``most`` actions, which would take hours, or all memory."""
    # A forward and a backward for each stage and micro-batch; some schedules cut a backward in two.
    actions = 2 * plan.num_stages * plan.per_update * updates
    if actions > most:
        raise ConfigError(
            f"{what} of {plan.num_stages} stages, {plan.per_update} micro-batches per update and "
            f"{updates} updates has {actions:,} actions or more, and can have {most:,}; ask for "
            "fewer updates, micro-batches or stages"
        )


replicas_option = click.option(
    "--replicas",
    callback=_replicas,
    help="Replicas of every stage, or of each, as 2,1.",
)
"""The option ``--replicas``."""

slack_option = click.option(
    "--slack",
    callback=_slack,
    help="Extra warm-up forwards before every hop, or before each, as 0,1,0.",
)
"""The option ``--slack``."""


_OPTIONS = (
    click.option("--nnodes", type=click.IntRange(min=1), help="Number of nodes."),
    click.option("--node-rank", "--node_rank", type=click.IntRange(min=0),
                 help="Number of this node; 0 is the first. Without it the node that has the "
                 "address of --rdzv-endpoint is the first."),
    click.option("--rdzv-endpoint", "--rdzv_endpoint", default="", metavar="HOST:PORT",
                 help="Address of the first node."),
    click.option("--master-addr", "--master_addr", default="", metavar="HOST",
                 help="The same, as --master-addr HOST --master-port PORT."),
    click.option("--master-port", "--master_port", default=29500, show_default=True,
                 type=click.IntRange(1, 65535)),
    click.option("--rdzv-backend", "--rdzv_backend", hidden=True, help="Of torchrun; not needed."),
    click.option("--rdzv-id", "--rdzv_id", hidden=True, help="Of torchrun; not needed."),
    click.option("--rdzv-conf", "--rdzv_conf", hidden=True, help="Of torchrun; not needed."),
)  # fmt: skip


def options_of_nodes(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options, and pass it their values as the argument ``asked``."""

    @functools.wraps(command)
    def called(**options: Any) -> None:
        for name in ("rdzv_backend", "rdzv_id", "rdzv_conf"):  # accepted, so torchrun lines work
            del options[name]
        host, port = options.pop("master_addr"), options.pop("master_port")
        endpoint = options.pop("rdzv_endpoint") or (joined(host, port) if host else "")
        asked = EngineRequest(
            nodes=options.pop("nnodes"), rank=options.pop("node_rank"), endpoint=endpoint
        )
        command(asked=asked, **options)

    return functools.reduce(lambda made, option: option(made), reversed(_OPTIONS), called)
