"""The options for the place of a node in a job, named as those of torchrun."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import click

from pipedream_rt.cluster.addresses import joined
from pipedream_rt.cluster.engines import Asked

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
    def called(**given: Any) -> None:
        for name in ("rdzv_backend", "rdzv_id", "rdzv_conf"):  # accepted, so torchrun lines work
            del given[name]
        host, port = given.pop("master_addr"), given.pop("master_port")
        endpoint = given.pop("rdzv_endpoint") or (joined(host, port) if host else "")
        asked = Asked(nodes=given.pop("nnodes"), rank=given.pop("node_rank"), endpoint=endpoint)
        command(asked=asked, **given)

    return functools.reduce(lambda made, option: option(made), reversed(_OPTIONS), called)
