"""How long the simulator takes, and how much memory, for many stages and micro-batches.

Its complexity is linear in the actions: stages x micro-batches x 3, and 64 bytes for each. Each
size runs in a process of its own.

Prints a table, or with --json one object per line: stages, micro_batches, actions, seconds,
peak_memory_bytes.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time

import click
from rich.console import Console
from rich.table import Table

from pipedream_rt.schedules import plan_for
from pipedream_rt.simulation import costs_of, simulate

SIZES = ("10x4000", "100x4000", "1000x4000")


def measured(size: str) -> None:
    """Simulate one size in this process and print what it took."""
    import resource

    stages, micro_batches = map(int, size.split("x"))
    costs = costs_of({"forward": "10ms", "backward": "20ms", "step": "1ms", "latency": "0.1ms"})
    schedule = plan_for("async-1f1b", num_stages=stages)
    start = time.perf_counter()
    trace = simulate(schedule, costs, micro_batches)
    elapsed_s = time.perf_counter() - start
    line = {
        "stages": stages,
        "micro_batches": micro_batches,
        "actions": int((trace.spans["stage"] >= 0).sum()),
        "seconds": elapsed_s,
        "peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }
    click.echo(json.dumps(line))


@click.command()
@click.option("--json", "as_json", is_flag=True, help="One JSON object per line.")
@click.option("--size", "sizes", multiple=True, default=SIZES, show_default=True)
@click.option("--one", hidden=True)
def main(as_json: bool, sizes: tuple[str, ...], one: str | None) -> None:
    """Measure the simulator."""
    if one is not None:
        measured(one)
        return
    table = Table()
    for head in ("stages", "micro-batches", "actions", "seconds", "us per action", "peak GiB"):
        table.add_column(head, justify="right")
    for size in sizes:
        command = [sys.executable, __file__, "--one", size]
        output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        line = json.loads(output)
        table.add_row(
            str(line["stages"]), str(line["micro_batches"]), f"{line['actions']:,}",
            f"{line['seconds']:.1f}", f"{line['seconds'] / line['actions'] * 1e6:.2f}",
            f"{line['peak_memory_bytes'] / 2**30:.2f}",
        )  # fmt: skip
        if as_json:
            click.echo(output.strip())
    if not as_json:
        Console().print(table)


if __name__ == "__main__":
    main()
