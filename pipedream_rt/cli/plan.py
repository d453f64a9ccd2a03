"""The command ``plan``: assigns layers to workers by a profile of the model."""

from __future__ import annotations

import functools
import itertools
import json
import math
from dataclasses import replace
from typing import Any

import click

from pipedream_rt.cli.shared_options import Grouped
from pipedream_rt.cli.timeline import write_drawing
from pipedream_rt.errors import ConfigError
from pipedream_rt.planning import files
from pipedream_rt.planning.alternatives import (
    choices_text,
    explained,
    partition_text,
    published_stages,
    published_text,
)
from pipedream_rt.planning.cuts import Cuts, cuts_of
from pipedream_rt.planning.machines import LinkCodec, Machines, Worker
from pipedream_rt.planning.partition import SLOWDOWNS, Slowdown
from pipedream_rt.planning.planner import CHOICES, partitions
from pipedream_rt.planning.published_planners import MODELS, Published, solve
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
    cls=Grouped,
    groups={
        "Machines": "workers bandwidth latency memory speed",
        "What may be chosen": "choices micro_batches max_replicas order codec",
        "What it costs": "slowdown copies cost_model straight fewer compression",
        "What is written": "explain svg as_json",
    },
)
@click.argument("profile", type=click.Path(dir_okay=False))
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
@click.option("--schedule", "choices", multiple=True, type=click.Choice(CHOICES),
              help="Compare these alone; may be given several times.")  # fmt: skip
@click.option("--max-replicas", type=click.IntRange(min=1), help="Replicas of a stage at most.")
@click.option("--slowdown", default="corrected", show_default=True, callback=_slowdown,
              help="Of learning by staleness: corrected, plain, none, or 0:1,1:1.05.")  # fmt: skip
@click.option("--copies", default=0.0, type=click.FloatRange(min=0),
              help="Copies of the weights that corrections keep.")  # fmt: skip
@click.option("--order", type=click.Choice(["branches", "layers"]),
              help="Cut branches apart, or keep the order of layers.")  # fmt: skip
@click.option("--cost-model", default="runtime", show_default=True,
              type=click.Choice(["runtime", *MODELS]),
              help="Ours, the released code of PipeDream, or the paper's.")  # fmt: skip
@click.option("--straight", is_flag=True, help="With a published cost model: no replicas.")
@click.option("--fewer", is_flag=True, help="With the same: machines may be left over.")
@click.option("--codec", callback=_codec, metavar="RATIO[,TIME]",
              help="Edges may have a codec: share of the bytes, and time for a MB.")  # fmt: skip
@click.option("--compression", type=float,
              help="With pipedream: count transfers, compressed by this factor.")  # fmt: skip
@click.option("--explain", is_flag=True, help="What limits it, and what would change it.")
@click.option("--svg", type=click.Path(dir_okay=False),
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
    cost_model: str,
    straight: bool,
    fewer: bool,
    compression: float | None,
    explain: bool,
    svg: str | None,
    as_json: bool,
    **given: Any,
) -> None:
    """Plan which layers of PROFILE go on which workers, and compare schedules.

    PROFILE is a file of `pipedream-rt profile`, or a graph.txt of the original PipeDream.
    """
    # The runtime cuts in the order of layers; the released planner cuts branches apart.
    branches = False if cost_model == "runtime" else None
    if order is not None:
        branches = order == "branches"
    cuts = cuts_of(files.load(profile), branches)
    if cost_model != "runtime":
        _refuse_given(cost_model, "latency", "choices", "max_replicas", "slowdown", "copies")
        if speed is not None or len(memory or ()) > 1 or explain or svg is not None or codec:
            raise ConfigError(
                f"--speed, --explain, --svg, --codec and memory of each go not with {cost_model}"
            )
        asked = Published(
            model=cost_model,
            machines=workers,
            bandwidths=_each("--bandwidth", bandwidth, len(workers), "level"),
            memory=memory[0] if memory else math.inf,
            straight=straight,
            fewer=fewer,
            compression=compression,
        )
        click.echo(_published(cuts, asked, as_json))
        return
    if straight or fewer or compression is not None:
        raise ConfigError(
            "--straight, --fewer and --compression go with --cost-model pipedream or paper; "
            "--max-replicas 1 gives straight pipelines"
        )
    machines = replace(_machines(workers, bandwidth, latency, memory, speed), codec=codec)
    choose = functools.partial(
        partitions,
        cuts,
        choices=given["choices"] or CHOICES,
        replicas=given["max_replicas"],
        slowdown=given["slowdown"],
        copies=given["copies"],
    )
    found = choose(machines, per_update=given["micro_batches"])
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


def _refuse_given(cost_model: str, *names: str) -> None:
    """Refuse options that only the runtime's own cost model takes into account."""
    context = click.get_current_context()
    for option in context.command.params:
        source = context.get_parameter_source(option.name or "")
        if option.name in names and source is not click.core.ParameterSource.DEFAULT:
            raise ConfigError(f"{option.opts[-1]} goes not with --cost-model {cost_model}")


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


def _published(cuts: Cuts, asked: Published, as_json: bool) -> str:
    """Return the answer of a published planner, as text or JSON."""
    answer = solve(cuts, asked)
    if not as_json:
        return published_text(cuts, asked, answer)
    names = [layer.name for layer in cuts.profile.layers]
    stages = [
        {"layers": [names[i] for i in layers], "replicas": replicas}
        for layers, replicas in published_stages(cuts, answer)
    ]
    return json.dumps({"cost_model": asked.model, "time": answer.time, "stages": stages}, indent=1)
