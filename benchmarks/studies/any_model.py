"""What large models cost in memory, and activations that are computed again.

``memory`` opens a pipeline over layers that workers build (`LayerSpec`), and over a model whose
weights they read from a folder, and compares the peak memory of the script and of the workers with
that of the same pipeline over tiny layers.

``recompute`` trains a deep pipeline twice, with activations kept and with activations computed
again, and compares the peak memory of the first stage with the formula: m micro-batches in flight
keep m times the activations A of a stage, or m times its input I and A once. The memory of the same
run with a mini-batch of one sample is subtracted.

Prints a line of text, or with --json one JSON line.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import click
import torch
import torch.nn.functional as F
from torch import nn

from pipedream_rt import LayerSpec, Layout, Pipeline, Training, without_values
from pipedream_rt.stage.process_memory import peak_memory_bytes


def _print(found: dict[str, Any], text: str, as_json: bool) -> None:
    """Print what was found."""
    print(json.dumps(found) if as_json else text)


@click.group()
def main() -> None:
    """Measure the memory of large models."""


def _peaks(model: Any, **options: Any) -> list[int]:
    """Open a pipeline; return the peak memory of the script and of each worker in bytes."""
    with Pipeline(model, stages=4, **options) as pipe:
        workers = [each["peak_memory_bytes"] for each in pipe.statistics()]
        return [peak_memory_bytes(), *workers]


@main.command()
@click.option("--width", default=2048, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON line.")
def memory(width: int, as_json: bool) -> None:
    """Compare the memory of a model that is nowhere whole with the size of its parts."""
    with tempfile.TemporaryDirectory() as folder:
        # Written by another process, whose memory does not count.
        script = (
            "import torch, sys; from safetensors.torch import save_file\n"
            "w, folder = int(sys.argv[1]), sys.argv[2]\n"
            "save_file({f'{i}.weight': torch.randn(w, w) for i in range(16)}, folder)"
        )
        path = Path(folder) / "model.safetensors"
        subprocess.run([sys.executable, "-c", script, str(width), str(path)], check=True)
        tiny = _peaks([LayerSpec(nn.Linear, 2, 2, bias=False) for _ in range(16)])
        built = _peaks([LayerSpec(nn.Linear, width, width, bias=False) for _ in range(16)])
        with without_values():
            model = nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(16)])
        read = _peaks(model, layout=Layout(weights=folder))
    layer = width * width * 4
    found: dict[str, Any] = {"layer": layer, "part": 4 * layer}
    for name, peaks in (("built", built), ("read", read)):
        more = [a - b for a, b in zip(peaks, tiny, strict=True)]
        found[f"{name}_script"], found[f"{name}_worker"] = more[0], max(more[1:])
    text = "; ".join(
        f"{name}: {found[f'{name}_script'] / 2**20:.0f} MiB more in the script, "
        f"{found[f'{name}_worker'] / 2**20:.0f} in a worker"
        for name in ("built", "read")
    )
    _print(
        found,
        f"a part has {4 * layer / 2**20:.0f} MiB, a layer {layer / 2**20:.0f}; {text}",
        as_json,
    )


def _peak(samples: int, width: int, depth: int, stages: int, recompute: bool) -> int:
    """Train a few mini-batches; return the peak memory of stage 0 in bytes."""
    pairs = [nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(depth * stages)]
    data = [(torch.randn(samples, width), torch.randn(samples, width)) for _ in range(stages + 2)]
    with Pipeline(
        pairs,
        stages=stages,
        loss_fn=F.mse_loss,
        optimizer=(torch.optim.SGD, {"lr": 0.1}),
        micro_batches=1,
        training=Training(recompute=recompute),
    ) as pipe:
        for _ in pipe.train_epoch(data):
            pass
        return pipe.statistics()[0]["peak_memory_bytes"]


@main.command()
@click.option("--stages", default=8, show_default=True)
@click.option("--depth", default=24, show_default=True, help="Pairs of layers in each stage.")
@click.option("--samples", default=4096, show_default=True)
@click.option("--width", default=256, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON line.")
def recompute(stages: int, depth: int, samples: int, width: int, as_json: bool) -> None:
    """Compare the peak memory of stage 0 with and without recompute."""
    kept, again = (
        _peak(samples, width, depth, stages, twice) - _peak(1, width, depth, stages, twice)
        for twice in (False, True)
    )
    one = samples * width * 4
    formula = stages * 2 * depth * one / (stages * one + 2 * depth * one)
    found = {"kept": kept, "again": again, "factor": kept / again, "formula": formula}
    sizes = f"{kept / 2**20:.0f} MiB kept, {again / 2**20:.0f} MiB computed again"
    text = f"{sizes}: a factor of {kept / again:.2f}; by the formula {formula:.2f}"
    _print(found, text, as_json)


if __name__ == "__main__":
    main()
