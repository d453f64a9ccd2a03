"""Options that several commands have."""

from __future__ import annotations

from typing import Any

import click

from pipedream_rt.schedules.shape import parse_slack


def _slack(context: click.Context, option: click.Parameter, text: str | None) -> Any:
    """Read an option that is one number for all hops, or one for each with commas between them."""
    return None if text is None else parse_slack(text.split(","))


slack_option = click.option(
    "--slack",
    callback=_slack,
    help="Extra warm-up forwards before every hop, or before each, as 0,1,0.",
)
"""The option ``--slack``."""
