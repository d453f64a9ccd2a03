"""The command ``simulate``: what a run would cost, and where its time would go."""

from __future__ import annotations

from typing import Any

import click

from pipedream_rt.cli.shared_options import (
    GivenPath,
    refuse_too_many,
    replicas_option,
    slack_option,
)
from pipedream_rt.cli.timeline import drawn
from pipedream_rt.errors import ConfigError
from pipedream_rt.schedules import (
    RECIPES,
    Plan,
    Shape,
    describe_schedules,
    plan_for,
    schedule_named,
)
from pipedream_rt.simulation.costs import Costs, parsed
from pipedream_rt.simulation.predict import fit, regrouped
from pipedream_rt.simulation.simulator import simulate as simulate_run
from pipedream_rt.tracing.replay import Replay
from pipedream_rt.tracing.summary import bytes_text, describe, seconds_text, summarize, table
from pipedream_rt.tracing.trace import Trace

_MOST_SIMULATED = 100_000_000
"""Actions that may be simulated. So many take about six minutes and 6 GiB."""


def _several(context: click.Context, option: click.Parameter, text: str | None) -> Any:
    """Read an option with one value, or with comma-separated values, one for each stage."""
    return None if text is None else text.split(",")


_COST_OPTIONS = (
    ("forward", "10ms", "Time of a forward, as 3ms; with commas, one for each stage."),
    ("backward", None, "Time of a backward; twice the forward if not given."),
    ("input-gradient", None, "Time of a backward's input half; half of it if not given."),
    ("weight-gradient", None, "Time of a backward's weight half."),
    ("step", "0", "Time of an update."),
    ("activation-bytes", "0", "Bytes sent to the next stage for each micro-batch, as 2MB."),
    ("stash-bytes", "0", "Bytes held for each micro-batch in flight."),
    ("weight-bytes", "0", "Bytes of one weight version."),
    ("latency", "0", "Time of a hop."),
    ("hop-latency", "0", "Time of each hop besides, as 0,25ms,0 for the hops of four stages."),
    ("bandwidth", None, "Bandwidth of each link, as 10Gbit; infinite if not given."),
    ("overhead", "0", "Time that sending a message takes its sender."),
    ("speed", "1", "Speed of a worker; 2 is twice as fast."),
)


def _cost_options(command: Any) -> Any:
    """Give a command all options for costs."""
    for name, default, text in reversed(_COST_OPTIONS):
        shown: dict[str, Any] = {} if default is None else {"show_default": default}
        command = click.option(f"--{name}", callback=_several, help=text, **shown)(command)
    return command


@click.command(short_help="Say what a schedule costs, before anything runs.")
@click.option("--schedule", default="async-1f1b", show_default=True,
              help="Name of a schedule; help lists them.")  # fmt: skip
@click.option("--stages", type=click.IntRange(min=1), help="Stages of the model.  [default: 4]")
@click.option("--micro-batches", type=click.IntRange(min=1),
              help="Micro-batches per update.  [default: 1]")  # fmt: skip
@click.option("--stages-per-worker", type=click.IntRange(min=1),
              help="With interleaved-1f1b: stages that each worker hosts.")  # fmt: skip
@click.option("--synchronous-updates", default=0, type=click.IntRange(min=0),
              help="Updates at the start that flush the pipe.")  # fmt: skip
@slack_option
@replicas_option
@click.option("--updates", default=20, show_default=True, type=click.IntRange(min=1),
              help="Updates to simulate.")  # fmt: skip
@click.option("--credits", type=click.IntRange(min=1),
              help="Mini-batches that the coordinator injects ahead.")  # fmt: skip
@click.option("--costs", "costs_file", type=GivenPath(dir_okay=False),
              help="File of costs, as timeline --save-costs makes it.")  # fmt: skip
@click.option("--from-trace", type=GivenPath(dir_okay=False),
              help="Fit the costs, stages and micro-batches to a recorded trace.")  # fmt: skip
@click.option("--replay", is_flag=True,
              help="With --from-trace: do again what was done there.")  # fmt: skip
@_cost_options
@click.option("--compare", help="Names of schedules with commas between: one table for all.")
@click.option("--output", type=GivenPath(dir_okay=False),
              help="Write the trace into this file; see timeline.")  # fmt: skip
def simulate(
    schedule: str,
    stages: int | None,
    micro_batches: int | None,
    stages_per_worker: int | None,
    synchronous_updates: int,
    slack: int | tuple[int, ...] | None,
    replicas: int | tuple[int, ...],
    updates: int,
    credits: int | None,
    costs_file: str | None,
    from_trace: str | None,
    replay: bool,
    compare: str | None,
    output: str | None,
    **values: Any,
) -> None:
    """Simulate a run: what it costs, and where the time goes. It starts no process.

    Costs are options here, a file, or what a trace says; options change what a file or trace says.
    """
    if schedule == "help":
        click.echo(describe_schedules())
        return
    schedule = schedule_named(schedule)
    trace = None if from_trace is None else Trace.load(from_trace)
    if replay and trace is None:
        raise ConfigError("--replay needs --from-trace")
    costs = _costs(costs_file, trace, values)
    numbers: dict[str, Any] = {
        "num_stages": stages or (trace.plan.num_stages if trace else 4),
        "per_update": micro_batches or (trace.plan.per_update if trace else 1),
        "stages_per_worker": stages_per_worker,
        "slack": _slack_of(slack, trace, schedule, stages),
    }
    if compare is not None:
        replicas = replicas or (trace.plan.shape.replicas if trace else ())
        if replay or replicas or output is not None:
            raise ConfigError(
                "--compare goes with none of --replay, --output and replicas, those of a trace too"
            )
        numbers["slack"] = slack or 0  # the slack of a trace is for its own schedule only
        before = trace.plan.shape if trace else Shape(workers=numbers["num_stages"])
        click.echo(_comparison(compare.split(","), numbers, costs, before, updates, credits))
        return
    if replay:
        if slack is not None:
            raise ConfigError("--replay does what was done, with the slack that it had; no --slack")
        assert trace is not None
        again = Replay(trace)
        numbers["stages_per_worker"] = trace.plan.shape.stages_per_worker
        numbers["slack"] = trace.plan.shape.slack
        chosen = plan_for(again, **numbers)
        count = again.micro_batches
        credits = credits or trace.credits
    else:
        if not replicas and trace is not None and schedule == trace.plan.name and stages is None:
            replicas = trace.plan.shape.replicas
        chosen = plan_for(schedule, synchronous=synchronous_updates, replicas=replicas, **numbers)
        count = updates * chosen.per_update
        refuse_too_many(chosen, updates, _MOST_SIMULATED, "a simulation")
    made = simulate_run(chosen, costs, count, credits=credits)
    click.echo(describe(made))
    click.echo(drawn(made))
    if output is not None:
        made.save(output)


def _slack_of(
    slack: int | tuple[int, ...] | None, trace: Trace | None, schedule: str, stages: int | None
) -> int | tuple[int, ...]:
    """Return the slack to simulate: as given; else that of the trace, for the same schedule."""
    if slack is not None:
        return slack
    same = trace is not None and trace.plan.name == schedule and stages is None
    return trace.plan.shape.slack if trace is not None and same else 0


def _costs(path: str | None, trace: Trace | None, values: dict[str, Any]) -> Costs:
    """Take costs from a file, a trace or the defaults, and change them by options."""
    if path is not None and trace is not None:
        raise ConfigError("costs come from --costs or from --from-trace, not from both")
    options = {
        name: parsed(name, value if len(value) > 1 else value[0])
        for name, value in values.items()
        if value is not None
    }
    if path is not None:
        return Costs.load(path).changed(**options)
    if trace is not None:
        return fit(trace).changed(**options)
    options.setdefault("forward", parsed("forward", values["forward"] or ["10ms"]))
    if "input_gradient" not in options or "weight_gradient" not in options:
        twice = tuple(tuple(2 * v for v in samples) for samples in options["forward"])
        options.setdefault("backward", twice)
    return Costs(**options)


def _comparison(
    names: list[str],
    numbers: dict[str, Any],
    costs: Costs,
    before: Shape,
    updates: int,
    credits: int | None,
) -> str:
    """Tabulate several schedules, all on the same workers with the same model."""
    rows: list[tuple[str, ...]] = [
        ("schedule", "makespan", "micro-batches/s", "bubble", "versions", "in flight",
         "memory", "staleness")
    ]  # fmt: skip
    notes = []
    for name in map(schedule_named, map(str.strip, names)):
        each = RECIPES[name].stages_per_worker
        each = numbers["stages_per_worker"] or each if each > 1 else 1
        try:
            stages = before.workers * each
            chosen = plan_for(name, **{**numbers, "num_stages": stages, "stages_per_worker": each})
            rows.append(_row(chosen, regrouped(costs, before, chosen.shape), updates, credits))
        except ConfigError as error:
            rows.append((name, *["-"] * 7))
            notes.append(f"{name}: {error}")
        else:
            if each > 1:
                notes.append(f"{name}: each stage is cut into {each} of equal cost")
    return "\n".join([table(rows), *notes])


def _row(plan: Plan, costs: Costs, updates: int, credits: int | None) -> tuple[str, ...]:
    """Simulate one schedule, and return its row. Where stages differ, the worst one counts."""
    refuse_too_many(plan, updates, _MOST_SIMULATED, "a simulation")
    made = simulate_run(plan, costs, updates * plan.per_update, credits=credits)
    summary = summarize(made)
    memory = max(
        sum(
            made.stage_bytes[plan.stage_of(s)] * summary.stages[s].versions
            + made.activation_bytes[plan.stage_of(s)] * summary.stages[s].in_flight
            for s in plan.stages_of(w)
        )
        for w in range(plan.workers)
    )
    low, high = min(summary.bubble), max(summary.bubble)
    return (
        plan.name,
        seconds_text(summary.makespan),
        f"{summary.throughput:.4g}",
        f"{low:.1%}" if f"{low:.1%}" == f"{high:.1%}" else f"{low:.1%} - {high:.1%}",
        str(max(stage.versions for stage in summary.stages)),
        str(max(stage.in_flight for stage in summary.stages)),
        bytes_text(memory) if memory else "?",
        str(max(summary.staleness)),
    )
