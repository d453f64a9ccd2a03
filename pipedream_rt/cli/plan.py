"""The command ``plan``: assigns layers to workers by a profile of the model."""

from __future__ import annotations

import functools
import itertools
import json
import math
from dataclasses import replace
from typing import Any

import click

from pipedream_rt.cli.shared_options import GivenPath, Grouped
from pipedream_rt.cli.timeline import write_drawing
from pipedream_rt.errors import ConfigError
from pipedream_rt.planning import files
from pipedream_rt.planning.alternatives import (
    choices_text,
    explained,
    partition_text,
)
from pipedream_rt.planning.cuts import cuts_of
from pipedream_rt.planning.machines import LinkCodec, Machines, Worker
from pipedream_rt.planning.partition import SLOWDOWNS, Slowdown
from pipedream_rt.planning.planner import CHOICES, partitions
from pipedream_rt.simulation.costs import rate, seconds, size
from pipedream_rt.tracing import timeline


def _several(read: Any) -> Any:
    """Return a reader of an option with one value, or several separated by commas."""

    def callback(context: click.Context, option: click.Parameter, text: str | None) -> Any:
        try:
            return None if text is None else tuple(read(part) for part in text.split(","))
        except ConfigError:
            raise
        except ValueError:
            raise click.BadParameter(f"{text!r} is no number, and no list of numbers") from None

    return callback


def _workers(context: click.Context, option: click.Parameter, text: str) -> tuple[int, ...]:
    """Read a number of workers, or one for each level, as ``4x2`` for 2 servers of 4."""
    parts = text.split("x")
    if not all(p.isascii() and p.isdecimal() and len(p) < 5 and int(p) for p in parts):
        raise click.BadParameter(f"give a number, or 4x2 for 2 servers of 4, not {text!r}")
    return tuple(map(int, parts))


def _codec(context: click.Context, option: click.Parameter, text: str | None) -> LinkCodec | None:
    """Read the ratio of a codec, and the time that it takes for 10^6 bytes."""
    if text is None:
        return None
    ratio, _, time = text.partition(",")
    try:
        return LinkCodec(ratio=float(ratio), seconds_per_byte=seconds(time or "0") / 1e6)
    except ValueError:
        text = f"give 0.27, or 0.27,1ms with the time for a MB, not {text!r}"
        raise click.BadParameter(text) from None


def _slowdown(context: click.Context, option: click.Parameter, text: str) -> Slowdown:
    """Read the name of a curve, or its points as ``0:1,1:1.05``."""
    if text in SLOWDOWNS:
        return SLOWDOWNS[text]
    try:
        points = [tuple(map(float, part.split(":"))) for part in text.split(",")]
        curve = [(staleness, factor) for staleness, factor in points]
    except ValueError:
        curve = []
    rising = all(a[0] < b[0] for a, b in itertools.pairwise(curve))
    sound = all(0 <= staleness < math.inf and 0 < factor < math.inf for staleness, factor in curve)
    if len(curve) < 2 or not rising or not sound:
        raise click.BadParameter(
            f"give {', '.join(SLOWDOWNS)}, or two or more points as 0:1,1:1.05, not {text!r}"
        )
    return curve


@click.command(
    short_help="Choose stages and schedule from a profile.",
    cls=Grouped,
    groups={
        "Machines": "workers bandwidth latency memory speed",
        "What may be chosen": "choices micro_batches max_replicas order codec",
        "What it costs": "slowdown copies",
        "What is written": "explain svg as_json",
    },
)
@click.argument("profile", type=GivenPath(dir_okay=False))
@click.option("--workers", default="4", show_default=True, callback=_workers,
              help="Workers; 4x2 are 2 servers of 4.")  # fmt: skip
@click.option("--bandwidth", default="10Gbit", show_default=True, callback=_several(rate),
              help="Of a link; with servers 40Gbit,10Gbit: within, between.")  # fmt: skip
@click.option("--latency", default="0", show_default=True, callback=_several(seconds),
              help="Of a message besides; with servers two, as for --bandwidth.")  # fmt: skip
@click.option("--memory", callback=_several(size),
              help="Of a worker, as 16GiB; with commas, of each.")  # fmt: skip
@click.option("--speed", callback=_several(float),
              help="Of a worker beside that of the profile; with commas, of each.")  # fmt: skip
@click.option("--micro-batches", type=click.IntRange(1, 1 << 20),
              help="Micro-batches per update.  [default: as many as workers]")  # fmt: skip
@click.option("--schedule", "choices", multiple=True,
              type=click.Choice(CHOICES, case_sensitive=False),
              help="Compare these alone; may be given several times.")  # fmt: skip
@click.option("--max-replicas", type=click.IntRange(min=1), help="Replicas of a stage at most.")
@click.option("--slowdown", default="corrected", show_default=True, callback=_slowdown,
              help="Of learning by staleness: corrected, plain, none, or 0:1,1:1.05.")  # fmt: skip
@click.option("--copies", default=0.0, type=click.FloatRange(min=0),
              help="Copies of the weights that corrections keep.")  # fmt: skip
@click.option("--order", type=click.Choice(["branches", "layers"]),
              help="Cut branches apart, or keep the order of layers.")  # fmt: skip
@click.option("--codec", callback=_codec, metavar="RATIO[,TIME]",
              help="Edges may have a codec: share of the bytes, and time for a MB.")  # fmt: skip
@click.option("--explain", is_flag=True, help="What limits it, and what would change it.")
@click.option("--svg", type=GivenPath(dir_okay=False),
              help="Draw a simulation of the best plan into this file.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Write JSON.")
def plan(
    profile: str,
    workers: tuple[int, ...],
    bandwidth: tuple[float, ...],
    latency: tuple[float, ...],
    memory: tuple[float, ...] | None,
    speed: tuple[float, ...] | None,
    order: str | None,
    codec: LinkCodec | None,
    explain: bool,
    svg: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Plan which layers of PROFILE go on which workers, and compare schedules.

    PROFILE is a file of `pipedream-rt profile`.
    """
    cuts = cuts_of(files.load(profile), branches=order == "branches")
    machines = replace(_machines(workers, bandwidth, latency, memory, speed), codec=codec)
    choose = functools.partial(
        partitions,
        cuts,
        choices=options["choices"] or CHOICES,
        replicas=options["max_replicas"],
        slowdown=options["slowdown"],
        copies=options["copies"],
    )
    found = choose(machines, per_update=options["micro_batches"])
    if svg is not None:
        trace = found[0].trace()
        write_drawing(svg, timeline.svg(trace, timeline.window(trace)))
    if as_json:
        click.echo(json.dumps([each.to_plain() for each in found], indent=1))
        return
    whole = cuts.profile
    click.echo(
        f"{len(whole.layers)} layers, {whole.compute:.4g} s for a micro-batch; cut at "
        f"{len(cuts)} places\n\n{choices_text(found)}\n\n{partition_text(found[0])}"
    )
    if explain:
        again = lambda other, count: choose(other, per_update=count)  # noqa: E731
        click.echo(f"\n{explained(found, machines, again)}")


def _each(option: str, values: tuple[Any, ...], count: int, what: str) -> tuple[Any, ...]:
    """Return ``count`` values, given as one for all or as one for each."""
    if len(values) == 1:
        return values * count
    if len(values) != count:
        raise ConfigError(f"{option} has {len(values)} values; give one, or one for each {what}")
    return values


def _machines(
    workers: tuple[int, ...],
    bandwidth: tuple[float, ...],
    latency: tuple[float, ...],
    memory: tuple[float, ...] | None,
    speed: tuple[float, ...] | None,
) -> Machines:
    """Return the workers and their links from the options."""
    if len(workers) > 2:
        raise ConfigError("workers have at most two levels: those of a server, and servers")
    servers = len(workers) > 1
    levels = 2 if servers else 1
    within, *between = _each("--bandwidth", bandwidth, levels, "level")
    near, *far = _each("--latency", latency, levels, "level")
    count = math.prod(workers)
    sizes = _each("--memory", memory or (math.inf,), count, "worker")
    speeds = _each("--speed", speed or (1.0,), count, "worker")
    return Machines(
        workers=tuple(
            Worker(speed=s, memory=m, server=w // workers[0])
            for w, (s, m) in enumerate(zip(speeds, sizes, strict=True))
        ),
        bandwidth=between[0] if between else within,
        bandwidth_within=within,
        latency=far[0] if far else near,
        latency_within=near,
    )
