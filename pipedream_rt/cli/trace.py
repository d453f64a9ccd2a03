"""The commands around traces: ``simulate`` and ``timeline``. They start nothing."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import click

from pipedream_rt.errors import ConfigError
from pipedream_rt.observe import timeline as drawings
from pipedream_rt.observe.replay import Replay
from pipedream_rt.observe.summary import bytes_text, describe, seconds_text, summarize, table
from pipedream_rt.observe.trace import Trace
from pipedream_rt.schedules import RECIPES, Schedule, Shape, describe_schedules, schedule_for
from pipedream_rt.simulation.costs import Costs, parsed
from pipedream_rt.simulation.predict import changes_of, fit, predict, regrouped
from pipedream_rt.simulation.predict import what_if as what_if_run
from pipedream_rt.simulation.simulator import simulate as simulate_run


def _several(context: click.Context, option: click.Parameter, text: str | None) -> Any:
    """An option that takes one value, or one for each stage with commas between."""
    return None if text is None else text.split(",")


_COST_OPTIONS = (
    ("forward", "10ms", "Seconds of a forward, as 3ms; with commas, one for each stage."),
    ("backward", None, "Of a backward; twice the forward if not given."),
    ("input-gradient", None, "Of its input half; half of it if not given."),
    ("weight-gradient", None, "Of its weight half."),
    ("step", "0", "Of an update."),
    ("activation-bytes", "0", "Sent to the next stage for each micro-batch, as 2MB."),
    ("stash-bytes", "0", "Held for each micro-batch in flight."),
    ("weight-bytes", "0", "Of one weight version."),
    ("latency", "0", "Of a hop."),
    ("bandwidth", None, "Of each link, as 10Gbit; infinite if not given."),
    ("overhead", "0", "Of sending a message."),
    ("speed", "1", "Of a worker; 2 is twice as fast."),
)


def _cost_options(command: Any) -> Any:
    """All options for costs."""
    for name, default, text in reversed(_COST_OPTIONS):
        shown: dict[str, Any] = {} if default is None else {"show_default": default}
        command = click.option(f"--{name}", callback=_several, help=text, **shown)(command)
    return command


@click.command()
@click.option("--schedule", default="async-1f1b", show_default=True,
              help="Name of a schedule; help lists them.")  # fmt: skip
@click.option("--stages", type=click.IntRange(min=1), help="Stages of the model.  [default: 4]")
@click.option("--micro-batches", type=click.IntRange(min=1),
              help="Per update.  [default: 1]")  # fmt: skip
@click.option("--stages-per-worker", type=click.IntRange(min=1), help="With interleaved-1f1b.")
@click.option("--updates", default=20, show_default=True, type=click.IntRange(min=1))
@click.option("--credits", type=click.IntRange(min=1), help="Mini-batches injected ahead.")
@click.option("--profile", type=click.Path(dir_okay=False),
              help="File of costs, as timeline --save-costs makes it.")  # fmt: skip
@click.option("--from-trace", type=click.Path(dir_okay=False),
              help="Fit the costs, stages and micro-batches to a recorded trace.")  # fmt: skip
@click.option("--replay", is_flag=True, help="With --from-trace: do again what was done there.")
@_cost_options
@click.option("--compare", help="Names of schedules with commas between: one table for all.")
@click.option("--output", type=click.Path(dir_okay=False), help="Write the trace; see timeline.")
def simulate(
    schedule: str,
    stages: int | None,
    micro_batches: int | None,
    stages_per_worker: int | None,
    updates: int,
    credits: int | None,
    profile: str | None,
    from_trace: str | None,
    replay: bool,
    compare: str | None,
    output: str | None,
    **given: Any,
) -> None:
    """Simulate a run: what it costs, and where the time goes. Nothing is started.

    Costs are options here, a file, or what a trace says; options change what a file or trace says.
    """
    if schedule == "help":
        click.echo(describe_schedules())
        return
    trace = None if from_trace is None else Trace.load(from_trace)
    if replay and trace is None:
        raise ConfigError("--replay needs --from-trace")
    costs = _costs(profile, trace, given)
    numbers: dict[str, Any] = {
        "num_stages": stages or (trace.shape.num_stages if trace else 4),
        "per_update": micro_batches or (trace.shape.per_update if trace else 1),
        "stages_per_worker": stages_per_worker,
    }
    if compare is not None:
        if replay or output is not None:
            raise ConfigError("--compare goes with neither --replay nor --output")
        before = trace.shape if trace else Shape(workers=numbers["num_stages"])
        click.echo(_comparison(compare.split(","), numbers, costs, before, updates, credits))
        return
    if replay:
        assert trace is not None
        again = Replay(trace)
        numbers["stages_per_worker"] = trace.shape.stages_per_worker
        chosen = schedule_for(again, **numbers)
        count = again.micro_batches
        credits = credits or trace.credits
    else:
        chosen = schedule_for(schedule, **numbers)
        count = updates * chosen.per_update
    made = simulate_run(chosen, costs, count, credits=credits)
    click.echo(describe(made))
    click.echo(_drawn(made, None, None, None))
    if output is not None:
        made.save(output)


def _costs(profile: str | None, trace: Trace | None, given: dict[str, Any]) -> Costs:
    """Costs from a file or a trace or neither, changed by options."""
    if profile is not None and trace is not None:
        raise ConfigError("costs come from --profile or from --from-trace, not from both")
    options = {
        name: parsed(name, value if len(value) > 1 else value[0])
        for name, value in given.items()
        if value is not None
    }
    if profile is None and trace is None:
        forward = given["forward"] or ["10ms"]
        options.setdefault("forward", parsed("forward", forward))
        twice = tuple(tuple(2 * v for v in samples) for samples in options["forward"])
        if "input_gradient" not in options or "weight_gradient" not in options:
            options.setdefault("backward", twice)
        return Costs(**options)
    base = Costs.load(profile) if profile is not None else fit(trace)  # type: ignore[arg-type]
    return base.changed(**options)


def _comparison(
    names: list[str],
    numbers: dict[str, Any],
    costs: Costs,
    before: Shape,
    updates: int,
    credits: int | None,
) -> str:
    """A row for each schedule, all on the same workers with the same model.

    Args:
        names: Of the schedules.
        numbers: As the options say.
        costs: Of the stages that the model has.
        before: Those stages.
        updates: How many to simulate.
        credits: See `simulate`.
    """
    rows: list[tuple[str, ...]] = [
        ("schedule", "makespan", "micro-batches/s", "bubble", "versions", "in flight",
         "memory", "staleness")
    ]  # fmt: skip
    notes = []
    for name in map(str.strip, names):
        each = RECIPES[name].stages_per_worker if name in RECIPES else 1
        each = numbers["stages_per_worker"] or each if each > 1 else 1
        try:
            stages = before.workers * each
            chosen = schedule_for(
                name, **{**numbers, "num_stages": stages, "stages_per_worker": each}
            )
            rows.append(_row(chosen, regrouped(costs, before, chosen.shape), updates, credits))
        except ConfigError as error:
            if name not in RECIPES:
                raise
            rows.append((name, *["-"] * 7))
            notes.append(f"{name}: {error}")
        else:
            if each > 1:
                notes.append(f"{name}: each stage is cut into {each} of equal cost")
    return "\n".join([table(rows), *notes])


def _row(schedule: Schedule, costs: Costs, updates: int, credits: int | None) -> tuple[str, ...]:
    """The numbers of one simulated schedule, the worst stage's where stages differ."""
    made = simulate_run(schedule, costs, updates * schedule.per_update, credits=credits)
    summary = summarize(made)
    memory = max(
        sum(
            made.stage_bytes[s] * summary.stages[s].versions
            + made.activation_bytes[s] * summary.stages[s].in_flight
            for s in schedule.shape.stages_of(w)
        )
        for w in range(schedule.shape.workers)
    )
    low, high = min(summary.bubble), max(summary.bubble)
    return (
        schedule.name,
        seconds_text(summary.makespan),
        f"{summary.throughput:.4g}",
        f"{low:.1%}" if f"{low:.1%}" == f"{high:.1%}" else f"{low:.1%} - {high:.1%}",
        str(max(stage.versions for stage in summary.stages)),
        str(max(stage.in_flight for stage in summary.stages)),
        bytes_text(memory) if memory else "?",
        str(max(summary.staleness)),
    )


def _drawn(trace: Trace, begin: float | None, end: float | None, width: int | None) -> str:
    """A text drawing with its window."""
    view = drawings.window(trace, begin, end)
    return drawings.text(trace, view, width or shutil.get_terminal_size((100, 24)).columns)


def _seconds(context: click.Context, option: click.Parameter, text: str | None) -> float | None:
    """An option that is a time."""
    return None if text is None else float(parsed("latency", text))


@click.command()
@click.argument("file", type=click.Path(dir_okay=False))
@click.option("--svg", type=click.Path(dir_okay=False), help="Draw into this file.")
@click.option("--perfetto", type=click.Path(dir_okay=False),
              help="Write Trace Event JSON, for ui.perfetto.dev.")  # fmt: skip
@click.option("--begin", callback=_seconds, help="Draw from here on, as 1.5s.")
@click.option("--end", callback=_seconds, help="Draw up to here.")
@click.option("--width", type=click.IntRange(min=40), help="Columns, or pixels of the SVG.")
@click.option("--predict", "predicted", is_flag=True,
              help="Fit costs, simulate the same schedule, say how far off it is.")  # fmt: skip
@click.option("--what-if", multiple=True,
              help="NAME=VALUE,...: simulate so, as stages=8 or schedule=1f1b.")  # fmt: skip
@click.option("--save-costs", type=click.Path(dir_okay=False), help="Write the fitted costs.")
def timeline(
    file: str,
    svg: str | None,
    perfetto: str | None,
    begin: float | None,
    end: float | None,
    width: int | None,
    predicted: bool,
    what_if: tuple[str, ...],
    save_costs: str | None,
) -> None:
    """Sum up and draw the trace in FILE, measured or simulated."""
    changes = [changes_of(text) for text in what_if]
    trace = Trace.load(file)
    click.echo(describe(trace))
    if svg is not None:
        view = drawings.window(trace, begin, end)
        _write(svg, drawings.svg(trace, view, width or 1200))
        click.echo(f"{svg}: {view}")
    if perfetto is not None:
        _write(perfetto, drawings.perfetto(trace))
        click.echo(f"{perfetto}: open it in https://ui.perfetto.dev or chrome://tracing")
    if svg is None and perfetto is None:
        click.echo(_drawn(trace, begin, end, width))
    if save_costs is not None:
        fit(trace).save(save_costs)
    if predicted or changes:
        click.echo(_predictions(trace, changes, what_if))


def _predictions(trace: Trace, changes: list[dict[str, Any]], texts: tuple[str, ...]) -> str:
    """The prediction of the run itself, and the answers."""
    same = predict(trace)
    rows: list[tuple[str, ...]] = [
        ("", "micro-batches/s", "against measured", "bubble", "versions", "staleness", "workers")
    ]
    rows.append(("measured", f"{same.measured:.4g}", "", *_numbers(trace)))
    rows.append(("predicted", f"{same.predicted:.4g}", f"{same.error:+.1%}", *_numbers(same.trace)))
    for text, change in zip(texts, changes, strict=True):
        made = what_if_run(trace, change)
        rate = summarize(made).throughput
        rows.append((f"if {text}", f"{rate:.4g}", f"{rate / same.measured:.2f}x", *_numbers(made)))
    return table(rows)


def _numbers(trace: Trace) -> tuple[str, ...]:
    """Mean bubble, most versions, most staleness, workers."""
    summary = summarize(trace)
    return (
        f"{sum(summary.bubble) / len(summary.bubble):.1%}",
        str(max(stage.versions for stage in summary.stages)),
        str(max(summary.staleness)),
        str(trace.shape.workers),
    )


def _write(path: str, text: str) -> None:
    """Write a drawing."""
    try:
        Path(path).write_text(text)
    except OSError as error:
        raise ConfigError(f"cannot write to {path}: {error.strerror}") from error
