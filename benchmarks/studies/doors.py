"""How long anything of a group listens while it forms, and whom it listens to.

A pipeline on local worker processes is opened several times. In the coordinator's process, which is
the only one that calls by torch RPC, and in each worker, this measures

- the window: from before torch's RPC agent begins to listen until its guard stands. Where the
  kernel holds torch up at ``listen`` (see `transport/rpc/listening.py`), nobody can connect in
  it; elsewhere it bounds the time for which somebody can (and is cut off);
- the time for which the agent, and in the coordinator the gates to it, listen at all.

    python benchmarks/studies/doors.py --json
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import click
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import nn

from pipedream_rt import Pipeline
from pipedream_rt.transport.rpc import endpoint as rpc
from pipedream_rt.transport.rpc.tunnel import Tunnel

_times: dict[str, float] = {}


def _timed(cls: Any, name: str, *, before: str = "", after: str = "") -> None:
    """Have a method note the time before or after it runs."""
    method: Callable[..., Any] = getattr(cls, name)

    def noting(self: Any, *arguments: Any) -> Any:
        if before:
            _times[before] = time.perf_counter()
        result = method(self, *arguments)
        if after:
            _times[after] = time.perf_counter()
        return result

    setattr(cls, name, noting)


class _Agent:
    """Stands for torch's function that starts an agent, and notes when."""

    def __init__(self, start: Callable[[Any], Any]) -> None:
        self._start = start

    def __call__(self, agent: Any) -> Any:
        _times["starts"] = time.perf_counter()
        return self._start(agent)


@click.command()
@click.option("--groups", default=20, show_default=True, help="Number of groups to form.")
@click.option("--workers", default=4, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON line.")
def main(groups: int, workers: int, as_json: bool) -> None:
    """Form groups, and print how long they listen."""
    _timed(Tunnel, "_filter", after="filtered")
    _timed(Tunnel, "start", before="opens")
    _timed(Tunnel, "shut", after="shut")
    rpc.rpc.api._init_rpc_states = _Agent(rpc.rpc.api._init_rpc_states)
    windows, listening = [], []
    for number in range(groups):
        model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(workers)))
        with Pipeline(
            model, stages=workers, loss_fn=F.mse_loss, optimizer=(torch.optim.SGD, {"lr": 0.1})
        ):
            if number:  # the first one starts the fork server
                windows.append(_times["filtered"] - _times["starts"])
                listening.append(_times["shut"] - _times["opens"])
    found = {
        "groups": groups,
        "window_ms_median": 1e3 * statistics.median(windows),
        "window_ms_most": 1e3 * max(windows),
        "listening_ms_median": 1e3 * statistics.median(listening),
        "listening_ms_most": 1e3 * max(listening),
    }
    if as_json:
        print(json.dumps(found))
        return
    table = Table("milliseconds", "median", "most")
    for name in ("window", "listening"):
        table.add_row(name, *(f"{found[f'{name}_ms_{which}']:.2f}" for which in ("median", "most")))
    Console().print(table)


if __name__ == "__main__":
    main()
