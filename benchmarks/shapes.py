"""What mini-batches of a new shape cost: bags of words and batches of graphs, beside plain PyTorch.

    python benchmarks/shapes.py bags|graphs

The model is cut into two stages, which compute in one thread (``workers="serial"``), so that the
processor time of a step holds all that it costs. The last line is one JSON object: milliseconds of
a processor for a step of plain PyTorch, for one of a shape that was seen, and of a shape that is
new, as the median over 60 steps, after 8.
"""

from __future__ import annotations

import copy
import json
import logging
import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipedream_rt import Pipeline, Training

STEPS, FIRST = 60, 8
Item = tuple[tuple[Any, ...], dict[str, Any], Tensor]


class Bags(nn.Module):
    """A model of recommendations in the manner of DLRM: bags of words, whose products are taken."""

    def __init__(self, tables: int = 26, width: int = 32) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(1000, width, mode="sum") for _ in range(tables))
        self.bottom = nn.Sequential(nn.Linear(13, 128), nn.ReLU(), nn.Linear(128, width))
        pairs = (tables + 1) * tables // 2
        self.top = nn.Sequential(nn.Linear(width + pairs, 256), nn.ReLU(), nn.Linear(256, 1))

    def forward(self, dense: Tensor, words: list[Tensor], offsets: list[Tensor]) -> Tensor:
        x = self.bottom(dense)
        bags = [table(w, o) for table, w, o in zip(self.tables, words, offsets, strict=True)]
        stacked = torch.stack([x, *bags], 1)
        products = torch.bmm(stacked, stacked.transpose(1, 2))
        row, column = torch.tril_indices(len(bags) + 1, len(bags) + 1, -1)
        made: Tensor = self.top(torch.cat([x, products[:, row, column]], 1))
        return torch.sigmoid(made)


def bags(number: int, samples: int = 256) -> Item:
    counts = [3 * samples + (7 * number + table) % 97 for table in range(26)]
    words = [torch.randint(1000, (count,)) for count in counts]
    offsets = [torch.arange(0, 3 * samples, 3) for _ in counts]
    return (torch.randn(samples, 13), words, offsets), {}, torch.rand(samples, 1)


class Convolution(nn.Module):
    """Adds the neighbours of each node of a graph."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.mix = nn.Linear(width, out)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        made: Tensor = self.mix(x + torch.zeros_like(x).index_add(0, edges[1], x[edges[0]]))
        return made


class Graphs(nn.Module):
    """Three convolutions of a batch of graphs, whose nodes are summed up at the end."""

    def __init__(self) -> None:
        super().__init__()
        widths = (16, 64, 64, 64)
        self.layers = nn.ModuleList(map(Convolution, widths, widths[1:]))
        self.head = nn.Linear(64, 1)

    def forward(self, x: Tensor, edges: Tensor, graph: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.relu(layer(x, edges))
        count = int(graph.max()) + 1
        made: Tensor = self.head(x.new_zeros(count, 64).index_add(0, graph, x) / count)
        return made


def graphs(number: int, count: int = 32) -> Item:
    nodes = 700 + 13 * number % 800
    edges = torch.randint(nodes, (2, 3 * nodes + 7 * number))
    graph = torch.cat([torch.arange(count), torch.randint(count, (nodes - count,))]).sort()[0]
    return (torch.randn(nodes, 16), edges, graph), {}, torch.randn(count, 1)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Item]]] = {
    "bags": (Bags, bags),
    "graphs": (Graphs, graphs),
}


def milliseconds(step: Callable[[Item], object], items: list[Item]) -> float:
    """Return the processor time of a step, in milliseconds: the median without the first ones."""
    times = []
    for item in items:
        began = time.process_time()
        step(item)
        times.append(1e3 * (time.process_time() - began))
    return median(times[FIRST:])


def measured(name: str) -> dict[str, float]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    make, item = MODELS[name]
    model, items = make(), [item(number) for number in range(FIRST + STEPS)]
    usual = items[len(items) // 2]  # the shape that was seen: of the example
    plain = copy.deepcopy(model)
    optimizer = torch.optim.SGD(plain.parameters(), lr=1e-4)

    def step(each: Item) -> None:
        args, kwargs, target = each
        optimizer.zero_grad()
        loss = F.mse_loss(plain(*args, **kwargs), target)
        loss.backward()
        optimizer.step()
        loss.item()

    with Pipeline(
        model,
        stages=2,
        loss_fn=F.mse_loss,
        optimizer=(torch.optim.SGD, {"lr": 1e-4}),
        schedule="1f1b",
        micro_batches=1,
        workers="serial",
        example=usual,
        training=Training(verify=False),
    ) as pipe:
        return {
            "plain_ms": milliseconds(step, items),
            "new_ms": milliseconds(lambda each: pipe.submit(*each).result(), items),
            "seen_ms": milliseconds(lambda each: pipe.submit(*each).result(), [usual] * len(items)),
        }


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1] not in MODELS:
        raise SystemExit(f"usage: {sys.argv[0]} {'|'.join(MODELS)}")
    logging.getLogger("pipedream_rt").setLevel(logging.ERROR)
    print(json.dumps(measured(sys.argv[1])))
