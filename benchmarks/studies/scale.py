"""How many workers a coordinator bears: measured up to 32, and simulated beyond.

The costs of a micro-batch are measured once, on two workers with emulated layers (see emulated.py):
what a forward, a backward and a step take there, how long a message is under way, and what the
coordinator spends. From these alone the simulator predicts pipelines of 8, 16 and 32 workers, which
are then measured. Where the prediction holds, it says what becomes of 100 and 1,000 workers.

Many workers on few processors wait for these, which no simulation of this file knows: the share of
them that is busy is printed, and above a half nothing can be said.

    python benchmarks/studies/scale.py               as a table
    python benchmarks/studies/scale.py --json        one object per line
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table

from pipedream_rt import Costs, Observe, Pipeline, Trace, plan_for
from pipedream_rt.simulation import fit, simulate
from pipedream_rt.tracing import summarize

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from emulated import emulated_data, emulated_model
from ours import processor_s

FORWARD_S, BACKWARD_S = 0.010, 0.020
WIDTH, SAMPLES = 256, 8
MEASURED, SIMULATED = (8, 16, 32), (100, 1000)
IDLE_S = 5.0
"""Seconds for which the coordinator is watched while nothing is fed: it gets signs of life."""


def trained(stages: int, times: tuple[float, float], updates: int, k: int) -> dict[str, Any]:
    """Train emulated layers; return the trace, and the processor time of a micro-batch."""
    with Pipeline(
        emulated_model(stages, WIDTH, *times),
        stages=stages,
        loss_fn=F.mse_loss,
        optimizer=(torch.optim.SGD, {"lr": 1e-3}),
        micro_batches=k,
        corrections=(),
        workers="local",
        observe=Observe(trace=True),
    ) as pipe:
        pids = [os.getpid(), *dict.fromkeys(pipe.on_stages(lambda module: os.getpid()))]
        data = emulated_data(updates, SAMPLES * k, WIDTH)
        for _ in pipe.train_epoch(data[: max(2, updates // 8)]):
            pass
        pipe.flush()
        before, start = [sum(processor_s(pid).values()) for pid in pids], time.perf_counter()
        came = [time.perf_counter() for _ in pipe.train_epoch(data)]
        pipe.flush()
        seconds = time.perf_counter() - start
        spent = [sum(processor_s(pid).values()) - b for pid, b in zip(pids, before, strict=True)]
        trace = pipe.trace()
        idle = processor_s(os.getpid())
        threading.Event().wait(IDLE_S)
        rest = sum(processor_s(os.getpid()).values()) - sum(idle.values())
    count = updates * k
    first = len(came) // 3  # by then the pipe is full, and what comes does so at its own pace
    return {
        "trace": trace,
        "rate": (len(came) - 1 - first) * k / (came[-1] - came[first]),
        "idle_share": rest / IDLE_S,
        "coordinator_s": spent[0] / count,
        "worker_s": statistics.fmean(spent[1:]) / count,
        "busy": sum(spent) / seconds / (os.cpu_count() or 1),
    }


def unit_costs(trace: Trace) -> Costs:
    """Return the costs of one stage, which stands for all."""
    fitted = fit(trace)
    means = {
        name: ((statistics.fmean(t for of_stage in getattr(fitted, name) for t in of_stage),),)
        for name in ("forward", "backward", "step")
    }
    return replace(
        fitted, **means, activation_bytes=(0.0,), gradient_bytes=(), stash_bytes=(0.0,),
        weight_bytes=(0.0,), input_gradient=(), weight_gradient=(),
    )  # fmt: skip


def predicted(costs: Costs, stages: int, k: int) -> float:
    """Return the micro-batches per second of a full pipe."""
    plan = plan_for("async-1f1b", num_stages=stages, per_update=k)
    trace = simulate(plan, costs, max(6 * stages, 8 * k))
    return summarize(trace).throughput


@click.command()
@click.option("--json", "as_json", is_flag=True, help="One JSON object per line.")
@click.option("--updates", default=40, show_default=True)
@click.option("--most", default=32, show_default=True, help="Workers that are measured.")
def main(as_json: bool, updates: int, most: int) -> None:
    """Measure, predict, and print."""
    torch.set_num_threads(1)
    empty = trained(2, (0.0, 0.0), 400, 1)
    costs = unit_costs(trained(2, (FORWARD_S, BACKWARD_S), updates, 8)["trace"])
    ideal = 1 / (FORWARD_S + BACKWARD_S)
    lines: list[dict[str, Any]] = []
    for stages in MEASURED:
        if stages > most:
            continue
        found = trained(stages, (FORWARD_S, BACKWARD_S), updates, 8)
        rate, guess = found["rate"], predicted(costs, stages, 8)
        lines.append(
            {
                "workers": stages, "measured": rate, "predicted": guess,
                "error": guess / rate - 1, "of_the_layers": rate / ideal,
                "coordinator_ms": 1e3 * found["coordinator_s"],
                "worker_ms": 1e3 * found["worker_s"], "processors_busy": found["busy"],
                "idle_share": found["idle_share"],
            }
        )  # fmt: skip
    for stages in SIMULATED:
        guess = predicted(costs, stages, 8)
        lines.append({"workers": stages, "predicted": guess, "of_the_layers": guess / ideal})
    facts = {
        "forward_ms": 1e3 * costs.forward[0][0], "backward_ms": 1e3 * costs.backward[0][0],
        "step_ms": 1e3 * costs.step[0][0], "hop_ms": 1e3 * costs.latency,
        "injection_ms": 1e3 * costs.injection, "turnaround_ms": 1e3 * costs.turnaround,
        "coordinator_ms": 1e3 * empty["coordinator_s"], "worker_ms": 1e3 * empty["worker_s"],
    }  # fmt: skip
    if as_json:
        click.echo(json.dumps({"unit": facts}))
        for line in lines:
            click.echo(json.dumps(line))
        return
    table = Table(title="async-1f1b, layers of 30 ms; micro-batches per second")
    for head in ("workers", "measured", "predicted", "error", "of the layers", "processors busy"):
        table.add_column(head, justify="right")
    for line in lines:
        seen = "measured" in line
        table.add_row(
            str(line["workers"]),
            f"{line['measured']:.2f}" if seen else "",
            f"{line['predicted']:.2f}",
            f"{line['error']:+.1%}" if seen else "",
            f"{line['of_the_layers']:.3f}",
            f"{line['processors_busy']:.0%}" if seen else "",
        )
    console = Console(width=110)
    console.print(table)
    console.print(", ".join(f"{name} {value:.3f}" for name, value in facts.items()))
    bears = 1e3 / facts["coordinator_ms"]
    console.print(f"the coordinator bears {bears:.0f} micro-batches per second, of any workers")
    seen = [line for line in lines if "idle_share" in line]
    of_one = seen[-1]["idle_share"] / seen[-1]["workers"]
    console.print(f"signs of life of a worker take {of_one:.4%} of a processor there")


if __name__ == "__main__":
    main()
