"""What slack buys on a slow link, measured and as the simulator predicts it.

Four emulated stages of 10 ms forward and 20 ms backward, as threads; the messages between two of
them are under way for 25 ms. Two neighbours go round F F B B and two hops with 2 + e micro-batches
between them, so without slack a hop's latency is lost in every micro-batch. Slack is given to that
hop alone. Repeats alternate.

    python benchmarks/studies/slack.py
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

import click
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table

from pipedream_rt import Costs, Layout, Observe, Pipeline, plan_for, simulate
from pipedream_rt.tracing import summarize

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from emulated import SlowLinks, emulated_data, emulated_model, slow_links

STAGES, HOP = 4, 1
FORWARD_S, BACKWARD_S, LATENCY_S = 0.010, 0.020, 0.025


def slack_on_the_hop(slack: int) -> tuple[int, ...]:
    """So much on the slow hop, none on the others."""
    return tuple(slack if hop == HOP else 0 for hop in range(STAGES - 1))


def measured(schedule: str, slack: int, updates: int) -> float:
    """Micro-batches per second in steady state."""
    with Pipeline(
        emulated_model(STAGES, 64, FORWARD_S, BACKWARD_S),
        stages=STAGES,
        loss_fn=F.mse_loss,
        optimizer=(torch.optim.SGD, {"lr": 1e-3}),
        schedule=schedule,
        micro_batches=per_update(schedule),
        layout=Layout(slack=slack_on_the_hop(slack)),
        observe=Observe(trace=True),
        workers=slow_links(lambda: SlowLinks({(HOP, HOP + 1): LATENCY_S})),
    ) as pipe:
        for _ in pipe.train_epoch(emulated_data(updates, 8 * per_update(schedule), 64)):
            pass
        return summarize(pipe.trace()).throughput


def per_update(schedule: str) -> int:
    """Micro-batches per update."""
    return 1 if schedule == "async-1f1b" else 8


def predicted(schedule: str, slack: int, updates: int) -> float:
    """The same, simulated from the same costs."""
    k = per_update(schedule)
    plan = plan_for(schedule, num_stages=STAGES, per_update=k, slack=slack_on_the_hop(slack))
    hops = tuple(LATENCY_S if hop == HOP else 0.0 for hop in range(STAGES - 1))
    costs = Costs(forward=((FORWARD_S,),), backward=((BACKWARD_S,),), hop_latency=hops)
    return summarize(simulate(plan, costs, updates * k)).throughput


@click.command()
@click.option("--json", "as_json", is_flag=True, help="One JSON object per line.")
@click.option("--updates", default=150, show_default=True, help="Micro-batches of async-1f1b.")
@click.option("--repeats", default=3, show_default=True)
@click.option("--most", default=2, show_default=True, help="Most slack that is tried.")
def main(as_json: bool, updates: int, repeats: int, most: int) -> None:
    """Compare throughput with and without slack, measured and predicted."""
    cases = [(s, slack) for s in ("async-1f1b", "2bw", "1f1b") for slack in range(most + 1)]
    found: dict[tuple[str, int], list[float]] = {case: [] for case in cases}
    for _ in range(repeats):
        for schedule, slack in cases:
            count = updates // per_update(schedule)
            found[schedule, slack].append(measured(schedule, slack, count))
    lines: list[dict[str, Any]] = []
    for schedule, slack in cases:
        count = updates // per_update(schedule)
        rate = statistics.median(found[schedule, slack])
        without = statistics.median(found[schedule, 0])
        simulated = predicted(schedule, slack, count)
        lines.append(
            {
                "schedule": schedule,
                "slack": slack,
                "measured": rate,
                "spread": max(found[schedule, slack]) - min(found[schedule, slack]),
                "predicted": simulated,
                "error": simulated / rate - 1,
                "ratio": rate / without,
                "predicted_ratio": simulated / predicted(schedule, 0, count),
            }
        )
    if as_json:
        for line in lines:
            click.echo(json.dumps(line))
        return
    table = Table(title=f"micro-batches/s, {LATENCY_S * 1e3:g} ms on one hop of {STAGES - 1}")
    for head in ("schedule", "slack", "measured", "max - min", "predicted", "error", "ratio",
                 "predicted ratio"):  # fmt: skip
        table.add_column(head, justify="left" if head == "schedule" else "right")
    for line in lines:
        table.add_row(
            line["schedule"], str(line["slack"]), f"{line['measured']:.2f}",
            f"{line['spread']:.2f}", f"{line['predicted']:.2f}", f"{line['error']:+.1%}",
            f"{line['ratio']:.2f}", f"{line['predicted_ratio']:.2f}",
        )  # fmt: skip
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
