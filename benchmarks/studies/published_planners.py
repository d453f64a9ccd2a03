"""Answers as the planner of the original PipeDream, for a ``graph.txt`` or a profile of ours.

    python benchmarks/studies/published_planners.py graph.txt --workers 4x4
        --bandwidth 32Gbit,10Gbit

``--cost-model pipedream`` answers as the released code (``optimizer_graph_hierarchical.py``), and
``--cost-model paper`` by the recurrences of the paper. For every profile that comes with the
released code and that it can plan, the time is the same to 1e-9. With branches *and* several levels
of machines the released code can find times that no plan has; they are found here too, as it is
this code that is reproduced. The planner of the runtime has no such plans.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import click
from published.graph_text import parse
from published.planners import MODELS, Answer, Published, solve

from pipedream_rt.planning import files
from pipedream_rt.planning.cuts import Cuts, cuts_of
from pipedream_rt.simulation.costs import rate, size
from pipedream_rt.tracing.summary import seconds_text, table


def stages_of(cuts: Cuts, answer: Answer) -> list[tuple[tuple[int, ...], int]]:
    """Return the layers of each stage, as indices, and its number of replicas."""
    # The pieces of the released code may overlap; a layer is then on the first stage that has it.
    found, seen = [], set[int]()
    for start, end, replicas in answer.stages():
        layers = tuple(i for i in cuts.layers_between(start, end) if i not in seen)
        seen |= {*layers}
        found.append((layers, replicas))
    return found


def text_of(cuts: Cuts, asked: Published, answer: Answer) -> str:
    """Return an answer as a table with a row for each stage."""
    names = [layer.name for layer in cuts.profile.layers]
    rows: list[tuple[str, ...]] = [("stage", "layers", "replicas", "compute / replicas")]
    for number, (layers, replicas) in enumerate(stages_of(cuts, answer)):
        compute = math.fsum(cuts.profile.layers[i].compute for i in layers)
        shown = f"{len(layers)}: {names[layers[0]]} .. {names[layers[-1]]}" if layers else "none"
        rows.append((str(number), shown, str(replicas), seconds_text(compute / replicas)))
    head = (
        f"cost model {asked.model}: {seconds_text(answer.time)} for each mini-batch, "
        f"{cuts.profile.compute / answer.time if answer.time else 1:.3g} times one machine"
    )
    return "\n".join([head, table(rows)])


@click.command()
@click.argument("profile", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--workers", default="4", help="Machines; 4x2 are 2 servers of 4.")
@click.option("--bandwidth", default="10Gbit", help="Of a link; or of each level, with commas.")
@click.option("--memory", help="Of a machine, as 16GiB, for what is stashed.")
@click.option("--cost-model", default="pipedream", type=click.Choice(MODELS))
@click.option("--straight", is_flag=True, help="No replicas.")
@click.option("--fewer", is_flag=True, help="Machines may be left over.")
@click.option("--compression", type=float, help="Count transfers, compressed by this factor.")
@click.option("--order", type=click.Choice(["branches", "layers"]), help="As of pipedream-rt plan.")
@click.option("--json", "as_json", is_flag=True, help="Write JSON.")
def main(
    profile: Path,
    workers: str,
    bandwidth: str,
    memory: str | None,
    cost_model: str,
    straight: bool,
    fewer: bool,
    compression: float | None,
    order: str | None,
    as_json: bool,
) -> None:
    """Print the best plan of a published planner."""
    text = profile.read_text()
    costs = files.load(profile) if text.lstrip().startswith("{") else parse(text)
    cuts = cuts_of(costs, None if order is None else order == "branches")
    machines = tuple(map(int, workers.split("x")))
    rates = tuple(map(rate, bandwidth.split(",")))
    asked = Published(
        model=cost_model,
        machines=machines,
        bandwidths=rates * len(machines) if len(rates) == 1 else rates,
        memory=math.inf if memory is None else size(memory),
        straight=straight,
        fewer=fewer,
        compression=compression,
    )
    answer = solve(cuts, asked)
    if not as_json:
        print(text_of(cuts, asked, answer))
        return
    names = [layer.name for layer in costs.layers]
    stages = [
        {"layers": [names[i] for i in layers], "replicas": replicas}
        for layers, replicas in stages_of(cuts, answer)
    ]
    print(json.dumps({"cost_model": cost_model, "time": answer.time, "stages": stages}, indent=1))


if __name__ == "__main__":
    main()
