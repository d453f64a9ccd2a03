"""What the weight versions of one stage cost, in time and in memory, without communication.

The stage is the first of an asynchronous 1F1B pipeline with one update for each micro-batch: after
W forwards, forward m, the backward of micro-batch m - W, and a step take turns. Three methods:

- none: no versions, wrong on purpose. The backward uses whatever the weights are by then;
- ours: the versions of the runtime, used as its stage uses them;
- state-dict: as the optimizer with weight stashing of the original PipeDream (runtime/optimizer.py
  there): a queue of W + 1 state dicts, cloned at the start. Before a backward the oldest one is
  loaded into the module, and the newest one after it; after a step the weights are copied into the
  oldest one, which becomes the newest.

PyTorch of today refuses the first and the third: weights that a backward needs were changed. There
the stage computes with a twin of the module that has the same memory and other Parameters, of whose
changes autograd knows nothing.

The last line is one JSON object. ``loss`` is that of the last forward: equal bits with ours and
state-dict, other ones with none (if W is not 0).

    python benchmarks/stash.py ours adamw
"""

from __future__ import annotations

import copy
import json
import os
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"

import click
import torch
from torch import Tensor, nn
from workload import Block

from pipedream_rt.optimizers import Muon
from pipedream_rt.stage.parameters import VersionedParameters

WIDTH, CONTEXT, SAMPLES, BLOCKS = 256, 128, 8, 2
UNTIMED, TIMED = 4, 40
INPUTS = 5
"""Mini-batches, which are taken in turn."""


def matrices_apart(parameters: list[nn.Parameter]) -> list[dict[str, Any]]:
    """Return the groups for Muon: every matrix of a block is inside the model."""
    return [
        {"params": [p for p in parameters if p.ndim == 2], "matrices": True},
        {"params": [p for p in parameters if p.ndim != 2]},
    ]


OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-2),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=1e-2, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
    "adamw-fused": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, fused=True),
    "muon": lambda parameters: Muon(matrices_apart(parameters), lr=1e-3),
}


class Method(Protocol):
    """What a stage does to weights around its forwards, backwards and steps."""

    versions_most: int
    version_bytes: int

    def forward(self, micro_batch: int, x: Tensor) -> Tensor:
        """Return the loss of a micro-batch."""

    def backward(self, micro_batch: int, loss: Tensor) -> None:
        """Add to the gradients of the pending update."""

    def step(self, update: int, next_forward: int) -> None:
        """Apply the pending update."""


def loss_of(module: nn.Module, x: Tensor) -> Tensor:
    """Return the mean of the squares of the output."""
    output: Tensor = module(x)
    return output.square().mean()


class Unversioned:
    """Weights that change under the graphs of micro-batches in flight.

    Args:
        module: The stage, whose Parameters the optimizer changes.
        optimizer: Its optimizer.
        warm_up: Forwards before the first backward.
    """

    versions_most, version_bytes = 1, 0

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer, warm_up: int) -> None:
        self._optimizer = optimizer
        self._twin = copy.deepcopy(module)
        self._pairs = list(zip(module.parameters(), self._twin.parameters(), strict=True))
        for parameter, twin in self._pairs:
            twin.data = parameter.data

    def forward(self, micro_batch: int, x: Tensor) -> Tensor:
        """See `Method`."""
        return loss_of(self._twin, x)

    def backward(self, micro_batch: int, loss: Tensor) -> None:
        """See `Method`."""
        loss.backward()

    def step(self, update: int, next_forward: int) -> None:
        """See `Method`."""
        for parameter, twin in self._pairs:
            parameter.grad, twin.grad = twin.grad, None
        self._optimizer.step()
        for parameter, _ in self._pairs:
            parameter.grad = None


class StateDicts(Unversioned):
    """The same, but for state dicts that are loaded around a backward."""

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer, warm_up: int) -> None:
        super().__init__(module, optimizer, warm_up)
        self._module = module
        self._queue = deque(
            {name: value.clone() for name, value in module.state_dict().items()}
            for _ in range(warm_up + 1)
        )
        self.versions_most = len(self._queue)
        self.version_bytes = sum(v.nbytes for each in self._queue for v in each.values())

    def backward(self, micro_batch: int, loss: Tensor) -> None:
        """See `Method`."""
        # With one version the original neither loads nor copies.
        if len(self._queue) > 1:
            self._module.load_state_dict(self._queue[0])
        loss.backward()
        if len(self._queue) > 1:
            self._module.load_state_dict(self._queue[-1])

    def step(self, update: int, next_forward: int) -> None:
        """See `Method`."""
        super().step(update, next_forward)
        if len(self._queue) > 1:
            self._queue.rotate(-1)
            for name, value in self._module.state_dict().items():
                self._queue[-1][name].copy_(value)


class Ours:
    """The versions of the runtime, with the policy of weight stashing.

    Args:
        module: The stage.
        optimizer: Its optimizer.
        warm_up: Forwards before the first backward.
    """

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer, warm_up: int) -> None:
        self._module, self._optimizer, self._warm_up = module, optimizer, warm_up
        self._weights = VersionedParameters(module, 0)

    def _reads(self, micro_batch: int) -> int:
        """Return the version that a micro-batch reads."""
        return max(0, micro_batch - self._warm_up)

    def forward(self, micro_batch: int, x: Tensor) -> Tensor:
        """See `Method`."""
        self._weights.begin(micro_batch, self._reads(micro_batch), micro_batch)
        with self._weights.reading(micro_batch):
            return loss_of(self._module, x)

    def backward(self, micro_batch: int, loss: Tensor) -> None:
        """See `Method`."""
        with self._weights.accumulating(micro_batch):
            loss.backward()
        self._weights.end(micro_batch)

    def step(self, update: int, next_forward: int) -> None:
        """See `Method`."""
        gradients = self._weights.take_gradients()
        with self._weights.making(gradients, self._reads(next_forward)):
            self._optimizer.step()

    @property
    def versions_most(self) -> int:
        """The largest number of versions that were kept at a time."""
        return self._weights.ledger.kept_most

    @property
    def version_bytes(self) -> int:
        """What was allocated besides the module's own weights."""
        return (self._weights.allocated - 1) * self._weights.nbytes


METHODS: dict[str, Any] = {"none": Unversioned, "ours": Ours, "state-dict": StateDicts}


def train(method: Method, warm_up: int, inputs: list[Tensor]) -> tuple[list[float], float]:
    """Run the stage; return the seconds of each forward, backward and step, and the last loss."""
    losses: deque[Tensor] = deque()
    times, last = [], torch.tensor(0.0)
    # The second time W, since until then sets of buffers are made.
    for m in range(warm_up + warm_up + UNTIMED + TIMED):
        # A leaf of its own, as the message of each micro-batch is.
        x = inputs[m % len(inputs)].detach().requires_grad_()
        start = time.perf_counter()
        losses.append(last := method.forward(m, x))
        if m >= warm_up:
            method.backward(m - warm_up, losses.popleft())
            method.step(m - warm_up, m + 1)
            times.append(time.perf_counter() - start)
    return times[-TIMED:], last.item()


def resident(field: str) -> int:
    """Return a figure of this process's memory, in bytes."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.partition(f"{field}:")[2].split()[0])


def measure(method: str, optimizer: str, warm_up: int) -> dict[str, Any]:
    """Train with one method and one optimizer."""
    torch.manual_seed(0)
    inputs = [torch.randn(SAMPLES, CONTEXT, WIDTH) for _ in range(INPUTS)]
    module = nn.Sequential(*(Block(WIDTH) for _ in range(BLOCKS)))
    weight_bytes = sum(p.nbytes for p in module.parameters())
    # Once beside, so that what the libraries allocate for themselves is no growth.
    loss_of(copy.deepcopy(module), inputs[0]).backward()
    before = resident("VmRSS")
    with_versions = METHODS[method](module, OPTIMIZERS[optimizer]([*module.parameters()]), warm_up)
    times, loss = train(with_versions, warm_up, inputs)
    return {
        "step_s": statistics.median(times),
        "weight_bytes": weight_bytes,
        "version_bytes": with_versions.version_bytes,
        "formula_versions": warm_up + 1,
        "versions_most": with_versions.versions_most,
        "peak_bytes": resident("VmHWM") - before,
        "loss": loss,
    }


@click.command()
@click.argument("method", type=click.Choice([*METHODS]))
@click.argument("optimizer", type=click.Choice([*OPTIMIZERS]))
@click.option("--warm-up", default=3, show_default=True, type=click.IntRange(0))
def main(method: str, optimizer: str, warm_up: int) -> None:
    """Measure a stage that keeps weight versions by a METHOD and steps with an OPTIMIZER."""
    if sys.platform != "linux":
        raise click.ClickException("peak memory is read from /proc, which is Linux's")
    torch.set_num_threads(1)
    found = measure(method, optimizer, warm_up)
    line = {"method": method, "optimizer": optimizer, "warm_up": warm_up, **found}
    click.echo(json.dumps(line))


if __name__ == "__main__":
    main()
