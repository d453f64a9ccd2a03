"""Eight stages whose links are slower than their layers: torch's pipeline, ours, ours with codecs.

The stages are emulated (see emulated.py), and what they exchange is real: 256 KiB of values in one
direction and of gradients in the other for each micro-batch, 64 columns of 4 bytes for each of 1024
tokens. The rate of the links is such that the values of a micro-batch occupy a link for 86/14 of
the time that a stage computes with it, as in a step of ProtocolNanoGPT (204 M parameters, 8 stages,
200 Mbit/s: 86 of 100 seconds are wire). There are two wires:

- ``namespaces``: eight network namespaces in a row, joined by veth pairs that tc shapes; see
  chain.py. It needs root.
- ``emulated``: threads of one process, and a transport on which messages queue and arrive late.

    python benchmarks/wire.py namespaces torch 1f1b
    python benchmarks/wire.py emulated ours async-1f1b --codec "int8 with feedback"

The last line is one JSON object, with the seconds of an update while the pipe goes on.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import click
import torch
from chain import Unavailable, address, chain, coordinated
from emulated import narrow_links
from learning import CODECS as OF_LEARNING
from workload import WARM_UP, Workload, batches, loss_fn, optimizer_choice, whole

from pipedream_rt import Costs, Layout, Pipeline, Recovery, plan_for, simulate
from pipedream_rt.codecs import GraphCodec
from pipedream_rt.tracing import summarize

STAGES, MICRO_BATCHES, TOKENS, WIDTH = 8, 64, 1024, 64
FORWARD_S, BACKWARD_S = 0.005, 0.010
WIRE_OVER_COMPUTE = 86 / 14
TRANSFER_S = WIRE_OVER_COMPUTE * (FORWARD_S + BACKWARD_S)
SIZE = 4 * WIDTH * TOKENS
RATE = 8 * SIZE / TRANSFER_S
"""Bits per second of each direction of a link."""

DELAY_S = 0.001
"""Seconds under way besides, on the emulated wire: 50 ms beside steps of 100 s would be less."""

MOST_SLACK = 3
START_S = 120.0

CODECS = {name: codec for name, codec in OF_LEARNING.items() if "learned" not in name}
"""Those that need no other model, on the same 64 columns."""


def workload(updates: int) -> Workload:
    """What is trained."""
    return Workload(
        "emulated", stages=STAGES, micro_batches=MICRO_BATCHES, updates=updates, samples=TOKENS,
        width=WIDTH, forward_s=FORWARD_S, backward_s=BACKWARD_S,
    )  # fmt: skip


def slack_for(schedule: str, size: float) -> int:
    """Return the slack of each hop that the simulator finds to be the least as good as any."""
    costs = Costs(
        forward=((FORWARD_S,),),
        backward=((BACKWARD_S,),),
        activation_bytes=(size,),
        bandwidth=RATE / 8,
        latency=DELAY_S,
    )
    plans = [
        plan_for(schedule, num_stages=STAGES, per_update=MICRO_BATCHES, slack=slack)
        for slack in range(MOST_SLACK + 1)
    ]
    takes = [summarize(simulate(plan, costs, 4 * MICRO_BATCHES)).makespan for plan in plans]
    return next(slack for slack, seconds in enumerate(takes) if seconds <= 1.01 * min(takes))


def coded_size(codec: Any) -> float:
    """Return the bytes that cross in the place of the values of a micro-batch."""
    tensor = torch.randn(TOKENS, WIDTH)
    parts: tuple[torch.Tensor, ...] = (tensor,)
    for each in codec if isinstance(codec, list) else [codec] if codec else []:
        of_graph = isinstance(each, GraphCodec)
        parts = (each.encode(parts[0]),) if of_graph else each.pack(parts[0])
    return float(sum(part.nbytes for part in parts))


def trained(w: Workload, schedule: str, codec: str, slack: int, workers: Any) -> dict[str, Any]:
    """Train with our pipeline; return the seconds of an update."""
    optimizer, options = optimizer_choice(w)
    data = batches(w)
    with Pipeline(
        whole(w),
        stages=STAGES,
        loss_fn=loss_fn,
        optimizer=(optimizer, options),
        schedule=schedule,  # type: ignore[arg-type]
        micro_batches=MICRO_BATCHES,
        corrections=(),
        layout=Layout(slack=slack, codecs=CODECS[codec]),
        recovery=Recovery(heartbeat=timedelta(seconds=60), start=timedelta(seconds=START_S)),
        workers=workers,
    ) as pipe:
        came = [time.perf_counter() for _ in pipe.train_epoch(data)]
    return {"update_s": (came[-1] - came[WARM_UP - 1]) / w.updates}


def across_chain(words: list[str]) -> dict[str, Any]:
    """Train on a chain of machines, with the coordinator beside them.

    Raises:
        Unavailable: This machine cannot pretend to be several.
        ClickException: The run failed, or did not end in time.
    """
    with chain(STAGES, RATE, (1 << 20) + 8 * SIZE) as machines:
        workers, at = [(machine, "me") for machine in machines[:-1]], f"{address(STAGES)}:29500"
        return coordinated(workers, machines[-1], at, __file__, words, START_S, 600)


def torchs(w: Workload, schedule: str) -> dict[str, Any]:
    """Train with torch.distributed.pipelining, a rank on each machine of a chain."""
    script = str(Path(__file__).resolve().parent / "peers" / "torch_pipelining.py")
    with chain(STAGES, RATE, (1 << 20) + 8 * SIZE) as machines:
        environment = {**os.environ, "PEERS_MACHINES": ",".join(machines), "PEERS_INTERFACE": "me"}
        done = subprocess.run(
            [sys.executable, "-W", "ignore", script, w.to_json(), schedule],
            env=environment, capture_output=True, text=True, timeout=600,
        )  # fmt: skip
    if done.returncode:
        raise ChildProcessError(done.stderr)
    return {"update_s": json.loads(done.stdout.splitlines()[-1])["seconds"] / w.updates}


@click.command()
@click.argument("wire", type=click.Choice(["namespaces", "emulated"]))
@click.argument("who", type=click.Choice(["torch", "ours"]))
@click.argument("schedule")
@click.option("--codec", type=click.Choice(list(CODECS)), default="")
@click.option("--updates", default=3, show_default=True, type=click.IntRange(min=1))
@click.option("--join", hidden=True, help="Only coordinate workers that join at this address.")
def main(wire: str, who: str, schedule: str, codec: str, updates: int, join: str | None) -> None:
    """Measure one case."""
    torch.set_num_threads(1)
    w = workload(updates)
    size = coded_size(CODECS[codec])
    slack = slack_for(schedule, size) if who == "ours" and schedule.startswith("async") else 0
    try:
        if who == "torch":
            if wire != "namespaces" or codec:
                raise click.UsageError("torch runs in namespaces, and has no codecs")
            found = torchs(w, schedule)
        elif join is not None:
            found = trained(w, schedule, codec, slack, join)
        elif wire == "emulated":
            found = trained(w, schedule, codec, slack, narrow_links(RATE, DELAY_S))
        else:
            found = across_chain(sys.argv[1:])
    except Unavailable as error:
        click.echo(json.dumps({"unavailable": str(error)}))
        sys.exit(3)
    facts = {"slack": slack, "bytes": size, "dense_bytes": SIZE, "transfer_s": TRANSFER_S}
    click.echo(json.dumps({**found, **facts}))


if __name__ == "__main__":
    main()
