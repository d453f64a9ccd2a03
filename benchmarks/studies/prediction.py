"""How far the simulator's throughput is from the measured one.

Runs async-1f1b and 1f1b on 2 stages that compute (the example's transformer) and on 8 stages whose
compute is emulated (see emulated.py), with a trace; fits costs to the trace, simulates the same
schedule, and prints both throughputs and the error. It also predicts each schedule from the trace
of the other one, which is harder: nothing of what it predicts was seen.

Prints a table, or with --json one object per line: stages, compute, schedule, measured
(micro-batches/s), predicted, error (share), from_other (predicted from the other trace),
from_other_error.
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

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

from train_charlm import Corpus, build_model, loss_fn  # from examples/

from pipedream_rt import Observe, Pipeline, Trace
from pipedream_rt.simulation import predict, what_if
from pipedream_rt.tracing import summarize

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from emulated import emulated_data, emulated_model

SCHEDULES = ("async-1f1b", "1f1b")


def recorded(compute: str, schedule: str, updates: int) -> Trace:
    """Run with a trace; 4 micro-batches per update on 2 stages, 8 on 8."""
    common: dict[str, Any] = {"schedule": schedule, "workers": "local"}
    common["observe"] = Observe(trace=True)
    common["corrections"] = ()  # the schedule alone is measured
    if compute == "real":
        torch.manual_seed(0)
        model = build_model(8, 256, context=128)
        data = list(Corpus.load().batches(32, 128, updates, seed=0))
        common |= {"stages": 2, "micro_batches": 4, "loss_fn": loss_fn}
        common |= {"optimizer": (torch.optim.AdamW, {"lr": 1e-3, "fused": True})}
    else:
        model = emulated_model(8, 64, 0.010, 0.020)
        data = emulated_data(updates, 64, 64)
        common |= {"stages": 8, "micro_batches": 8, "loss_fn": F.mse_loss}
        common |= {"optimizer": (torch.optim.SGD, {"lr": 1e-3})}
    with Pipeline(model, **common) as pipe:
        for _ in pipe.train_epoch(data):
            pass
        return pipe.trace()


def outcomes(compute: str, updates: int) -> list[dict[str, Any]]:
    """Both schedules, each predicted from its own trace and from the other's."""
    traces = {schedule: recorded(compute, schedule, updates) for schedule in SCHEDULES}
    lines = []
    for schedule, other in (SCHEDULES, SCHEDULES[::-1]):
        own = predict(traces[schedule])
        changes = {"schedule": schedule, "credits": traces[schedule].credits}
        from_other = summarize(what_if(traces[other], changes)).throughput
        lines.append(
            {
                "stages": traces[schedule].plan.num_stages,
                "compute": compute,
                "schedule": schedule,
                "measured": own.measured,
                "predicted": own.predicted,
                "error": own.error,
                "from_other": from_other,
                "from_other_error": from_other / own.measured - 1,
            }
        )
    return lines


@click.command()
@click.option("--json", "as_json", is_flag=True, help="One JSON object per line.")
@click.option("--updates", default=16, show_default=True)
@click.option("--repeats", default=3, show_default=True)
@click.option("--compute", multiple=True, type=click.Choice(["real", "emulated"]))
def main(as_json: bool, updates: int, repeats: int, compute: tuple[str, ...]) -> None:
    """Compare predicted with measured throughput."""
    lines = []
    for _ in range(repeats):
        for kind in compute or ("real", "emulated"):
            lines += outcomes(kind, updates)
    if as_json:
        for line in lines:
            click.echo(json.dumps(line))
        return
    table = Table(title="micro-batches/s")
    for head in ("stages", "compute", "schedule", "measured", "predicted", "error",
                 "from the other's trace", "error "):  # fmt: skip
        table.add_column(head, justify="left" if head in ("compute", "schedule") else "right")
    for line in lines:
        table.add_row(
            str(line["stages"]), line["compute"], line["schedule"], f"{line['measured']:.3f}",
            f"{line['predicted']:.3f}", f"{line['error']:+.1%}", f"{line['from_other']:.3f}",
            f"{line['from_other_error']:+.1%}",
        )  # fmt: skip
    Console(width=110).print(table)
    worst = max(abs(line["error"]) for line in lines)
    middle = statistics.median(abs(line["error"]) for line in lines)
    click.echo(f"error of the prediction: median {middle:.1%}, worst {worst:.1%}")


if __name__ == "__main__":
    main()
