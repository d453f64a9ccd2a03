"""Two stages with a link of a given rate and delay between them: one case, measured and predicted.

Both stages are emulated (see emulated.py), and what they exchange is real. Micro-batches per second
are from an empty pipe to an empty pipe, measured as well as simulated. There are two wires:

- ``namespaces``: two network namespaces, which are two machines to every socket, joined by a veth
  pair that tc shapes. The coordinator and one worker are in one, the other worker in the other.
  It needs root, and a delay needs netem, which not every kernel has: it is refused.
- ``simulated``: threads of one process, and a transport on which messages queue and arrive late.

    python benchmarks/slow_link.py async-1f1b 70e6 0 --wire namespaces

The last line is one JSON object. Where namespaces cannot be made, that is ``unavailable`` with the
reason, and the exit code is 3.
"""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from types import FrameType
from typing import Any, NoReturn

import click
import torch
import torch.nn.functional as F
from chain import (
    PAYLOAD,
    Unavailable,
    add,
    command,
    coordinated,
    join,
    require_namespaces,
    shape,
)  # fmt: skip
from emulated import emulated_model, narrow_links

from pipedream_rt import Costs, Layout, Pipeline, Recovery, plan_for, simulate
from pipedream_rt.tracing import summarize

SCHEDULES = ("async-1f1b", "1f1b", "gpipe")
STAGES, MICRO_BATCHES, WARM_UP, MOST_SLACK = 2, 4, 2, 4
WIDTH = 1024
ROW_BYTES = 4 * WIDTH
NETWORK = "10.77.0"
ADDRESS = f"{NETWORK}.1:29500"
START_S = 60.0
"""The deadline of all imports and the meeting."""


@dataclass(frozen=True)
class Case:
    """What is trained, and over which wire.

    Args:
        schedule: Name of the schedule.
        rate: Bits per second in each direction; 0 for as many as there are.
        delay_s: Seconds under way besides.
        wire: "namespaces" or "simulated".
        size: Bytes of an activation, and of a gradient.
        forward_s, backward_s: Seconds of a stage for a micro-batch.
        updates: Mini-batches that are timed.
    """

    schedule: str
    rate: float
    delay_s: float
    wire: str
    size: int
    forward_s: float
    backward_s: float
    updates: int

    @property
    def transfer_s(self) -> float:
        """Seconds for which an activation occupies the wire."""
        return self.size * 8 / self.rate if self.rate else 0.0

    def throughput(self, seconds: float) -> float:
        """Micro-batches per second, if all updates take so long."""
        return self.updates * MICRO_BATCHES / seconds


# -- what the simulator says -----------------------------------------------------------------------


def predicted(case: Case, slack: int) -> float:
    """Micro-batches per second, simulated from the same costs."""
    share = PAYLOAD if case.wire == "namespaces" else 1.0
    costs = Costs(
        forward=((case.forward_s,),),
        backward=((case.backward_s,),),
        activation_bytes=(float(case.size),),
        bandwidth=case.rate / 8 * share if case.rate else math.inf,
        hop_latency=(case.delay_s,),
    )
    plan = plan_for(case.schedule, num_stages=STAGES, per_update=MICRO_BATCHES, slack=slack)
    return case.throughput(summarize(simulate(plan, costs, case.updates * MICRO_BATCHES)).makespan)


def chosen_slack(case: Case, wanted: str) -> int:
    """Return the slack that was wanted, or the least that is as good as any to 1 %."""
    if plan_for(case.schedule, num_stages=STAGES, per_update=MICRO_BATCHES).flushes:
        return 0
    if wanted != "auto":
        return int(wanted)
    rates = [predicted(case, slack) for slack in range(MOST_SLACK + 1)]
    return next(slack for slack, rate in enumerate(rates) if rate >= 0.99 * max(rates))


# -- the run ---------------------------------------------------------------------------------------


def measured(case: Case, slack: int, workers: Any) -> float:
    """Train, and return the seconds from an empty pipe to an empty pipe."""
    samples = MICRO_BATCHES * case.size // ROW_BYTES
    # Classes and not vectors as targets, which go from the coordinator over the same wire.
    batch = (torch.randn(samples, WIDTH), torch.zeros(samples, dtype=torch.long))
    with Pipeline(
        emulated_model(STAGES, WIDTH, case.forward_s, case.backward_s),
        stages=STAGES,
        loss_fn=F.cross_entropy,
        optimizer=(torch.optim.SGD, {"lr": 1e-3}),
        schedule=case.schedule,
        micro_batches=MICRO_BATCHES,
        layout=Layout(slack=slack),
        recovery=Recovery(heartbeat=timedelta(seconds=60), start=timedelta(seconds=START_S)),
        workers=workers,
        # Signs of life share the wire with what is measured, and queue behind it.
    ) as pipe:
        for _ in pipe.train_epoch([batch] * WARM_UP):
            pass
        pipe.flush()
        start = time.perf_counter()
        for _ in pipe.train_epoch([batch] * case.updates):
            pass
        pipe.flush()
        return time.perf_counter() - start


# -- a wire between two namespaces -----------------------------------------------------------------


@contextmanager
def two_machines(case: Case) -> Iterator[tuple[str, str]]:
    """Make two namespaces with a shaped wire between them, and remove them with all processes.

    Raises:
        Unavailable: This machine does not allow it.
    """
    require_namespaces()
    a, b = (f"slow-link-{os.getpid()}-{end}" for end in "ab")
    with ExitStack() as removal:
        for machine in (a, b):
            add(machine, removal)
        removal.callback(ignore_signals)
        join(a, "ethA", b, "ethB")
        for machine, device, last in ((a, "ethA", 1), (b, "ethB", 2)):
            command("ip", "-n", machine, "addr", "add", f"{NETWORK}.{last}/24", "dev", device)
            if case.rate:
                # What is sent ahead has room, because what is measured is a narrow wire and not a
                # lossy one.
                shape(machine, device, case.rate, (1 << 20) + 8 * case.size)
        yield a, b


def across_namespaces(case: Case, slack: int) -> float:
    """Measure on two machines, with a coordinator of its own on the first of them.

    Raises:
        Unavailable: This machine cannot pretend to be two.
        ClickException: The run failed, or did not end in time.
    """
    limit_s = START_S + 4 * (case.updates + WARM_UP) * MICRO_BATCHES / predicted(case, slack)
    words = (*sys.argv[1:], "--slack", str(slack))  # the last of two equal options counts
    with two_machines(case) as (a, b):
        at = [(a, "ethA"), (b, "ethB")]
        return float(coordinated(at, a, ADDRESS, __file__, words, START_S, limit_s)["seconds"])


# -- the command -----------------------------------------------------------------------------------


def ignore_signals() -> None:
    """Let nothing interrupt the end."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def end_by_signal(number: int, frame: FrameType | None) -> NoReturn:
    """End as after an error, so that everything is cleaned up."""
    ignore_signals()
    sys.exit(128 + number)


def checked(context: click.Context, option: click.Parameter, wanted: str) -> str:
    """Refuse a slack that is neither a number nor "auto"."""
    if wanted != "auto" and not (wanted.isascii() and wanted.isdecimal()):
        raise click.BadParameter(f"give auto or a number of at least 0, not {wanted!r}")
    return wanted


@click.command()
@click.argument("schedule", type=click.Choice(SCHEDULES))
@click.argument("rate", metavar="RATE_BITS_PER_S", type=click.FloatRange(min=0))
@click.argument("delay_s", metavar="DELAY_S", type=click.FloatRange(min=0))
@click.option("--wire", type=click.Choice(["namespaces", "simulated"]), default="simulated",
              show_default=True)  # fmt: skip
@click.option("--slack", default="auto", show_default=True, callback=checked,
              help="auto: what the simulator says. A schedule that flushes has 0.")  # fmt: skip
@click.option("--updates", type=click.IntRange(min=1), default=15, show_default=True)
@click.option("--bytes", "size", type=click.IntRange(min=ROW_BYTES), default=256 * 1024,
              show_default=True, help=f"Of an activation; a multiple of {ROW_BYTES}.")  # fmt: skip
@click.option("--forward", type=click.FloatRange(min=0, min_open=True), default=0.020,
              show_default=True, help="Seconds.")  # fmt: skip
@click.option("--backward", type=click.FloatRange(min=0, min_open=True), default=0.040,
              show_default=True, help="Seconds.")  # fmt: skip
@click.option("--join", hidden=True, help="Only coordinate workers that join at this address.")
def main(
    schedule: str,
    rate: float,
    delay_s: float,
    wire: str,
    slack: str,
    updates: int,
    size: int,
    forward: float,
    backward: float,
    join: str | None,
) -> None:
    """Measure one case. A rate of 0 is an unshaped wire."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, end_by_signal)
    if size % ROW_BYTES:
        raise click.UsageError(f"--bytes {size}: give a multiple of {ROW_BYTES}")
    if wire == "namespaces" and delay_s:
        raise click.UsageError(
            "a delay between namespaces needs netem, which many kernels lack; give DELAY_S 0, or "
            "--wire simulated"
        )
    torch.set_num_threads(1)
    case = Case(schedule, rate, delay_s, wire, size, forward, backward, updates)
    extra = chosen_slack(case, slack)
    if join is not None:
        click.echo(json.dumps({"seconds": measured(case, extra, join)}))
        return
    try:
        if wire == "namespaces":
            seconds = across_namespaces(case, extra)
        else:
            seconds = measured(case, extra, narrow_links(case.rate, case.delay_s))
    except Unavailable as error:
        click.echo(json.dumps({"unavailable": str(error)}))
        sys.exit(3)
    line = {
        "schedule": schedule,
        "rate_bits_per_s": rate,
        "delay_s": delay_s,
        "wire": wire,
        "slack": extra,
        "micro_batches_per_s": case.throughput(seconds),
        "transfer_s": case.transfer_s,
        "transfer_over_compute": case.transfer_s / (forward + backward),
        "predicted_micro_batches_per_s": predicted(case, extra),
    }
    click.echo(json.dumps(line))


if __name__ == "__main__":
    main()
