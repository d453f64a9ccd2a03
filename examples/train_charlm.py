"""Train a byte-level transformer on the source of Python's own standard library.

The main job of this project: four stages on four local worker processes, asynchronous 1F1B::

    python examples/train_charlm.py
    python examples/train_charlm.py --compare
    python examples/train_charlm.py --stages auto
    python examples/train_charlm.py --schedule 1f1b --micro-batches 4 --optimizer adamw --lr 2e-3
    python examples/train_charlm.py --stages 2 --workers serial
    pipedream-rt run --nproc-per-node 4 examples/train_charlm.py
    pipedream-rt run --nproc-per-node 4 --resume examples/train_charlm.py --checkpoint out/run
    torchrun --nproc-per-node 4 examples/train_charlm.py

Letters in shapes: B samples, T positions, D width, V byte values (256).
"""

from __future__ import annotations

import hashlib
import math
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import click
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor, nn

from pipedream_rt import Checkpoints, Layout, Pipeline
from pipedream_rt.optimizers import Muon, hidden_matrices

BYTES = 256


class Embedding(nn.Module):
    """Bytes and their positions to vectors: (B, T) -> (B, T, D)."""

    def __init__(self, width: int, context: int) -> None:
        super().__init__()
        self.byte = nn.Embedding(BYTES, width)
        self.position = nn.Parameter(torch.randn(context, width) * 0.02)

    def forward(self, bytes_BT: Tensor) -> Tensor:  # noqa: N803
        return self.byte(bytes_BT) + self.position[: bytes_BT.size(1)]


class Block(nn.Module):
    """Attention and a feed-forward layer, both after a norm and beside a residual."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x_BTD: Tensor) -> Tensor:  # noqa: N803
        x_BTD = x_BTD + self.dropout(self.attend(self.norm1(x_BTD)))  # noqa: N806
        return x_BTD + self.dropout(self.down(F.gelu(self.up(self.norm2(x_BTD)))))

    def attend(self, x_BTD: Tensor) -> Tensor:  # noqa: N803
        b, t, d = x_BTD.shape
        q, k, v = self.qkv(x_BTD).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(b, t, d))


def build_model(
    layers: int = 8, width: int = 128, heads: int = 4, context: int = 128, dropout: float = 0.0
) -> nn.Sequential:
    """The model, as a sequence that can be cut anywhere."""
    blocks = [Block(width, heads, dropout) for _ in range(layers)]
    head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, BYTES))
    return nn.Sequential(Embedding(width, context), *blocks, head)


def loss_fn(logits_BTV: Tensor, target_BT: Tensor) -> Tensor:  # noqa: N803
    """Mean cross-entropy in nats per byte."""
    return F.cross_entropy(logits_BTV.flatten(0, 1), target_BT.flatten())


@dataclass
class Corpus:
    """All source files of the standard library, split by file."""

    train: Tensor
    validation: Tensor

    @classmethod
    def load(cls) -> Corpus:
        root = Path(sysconfig.get_paths()["stdlib"])
        parts: dict[bool, list[bytes]] = {True: [], False: []}
        for path in sorted(root.rglob("*.py")):
            if "site-packages" in path.parts or "test" in path.parts or "tests" in path.parts:
                continue
            # By a hash of the name, so that a file stays on its side in every Python version.
            name = str(path.relative_to(root)).encode()
            parts[hashlib.sha256(name).digest()[0] < 230].append(path.read_bytes())
        train, validation = (
            torch.frombuffer(bytearray(b"\n".join(parts[side])), dtype=torch.uint8)
            for side in (True, False)
        )
        return cls(train, validation)

    def batches(
        self, batch: int, context: int, count: int, seed: int
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Random windows of the training files and the same windows one byte on: (B, T) each."""
        generator = torch.Generator().manual_seed(seed)
        for _ in range(count):
            starts = torch.randint(len(self.train) - context - 1, (batch,), generator=generator)
            windows = torch.stack([self.train[s : s + context + 1] for s in starts.tolist()]).long()
            yield windows[:, :-1], windows[:, 1:]

    def validation_batches(
        self, batch: int, context: int, count: int
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Windows spread evenly over the validation files; the same every time."""
        starts = torch.linspace(0, len(self.validation) - context - 2, batch * count).long()
        for group in starts.view(count, batch):
            windows = torch.stack([self.validation[s : s + context + 1] for s in group.tolist()])
            yield windows[:, :-1].long(), windows[:, 1:].long()

    def bigram_loss(self) -> float:
        """Validation loss of the best model that sees one byte back, in nats per byte."""
        pairs = self.train[:-1].long() * BYTES + self.train[1:].long()
        counts = torch.bincount(pairs, minlength=BYTES * BYTES).view(BYTES, BYTES).double() + 0.01
        log_p = (counts / counts.sum(1, keepdim=True)).log()
        return -log_p[self.validation[:-1].long(), self.validation[1:].long()].mean().item()


def learning_rate_factor(step: int, steps: int, part: int = 20) -> float:
    """Linear warm-up over one of so many parts of the steps, then a cosine to a tenth."""
    warm_up = max(1, steps // part)
    if step < warm_up:
        return (step + 1) / warm_up
    progress = (step - warm_up) / max(1, steps - warm_up)
    return 0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, progress)))


def sample(model: nn.Module, prompt: bytes, length: int, context: int) -> str:
    """Generate text with the unsplit model."""
    generator = torch.Generator().manual_seed(0)
    text = torch.tensor(list(prompt))[None]
    model.eval()
    with torch.no_grad():
        for _ in range(length):
            logits = model(text[:, -context:])[0, -1] / 0.7
            text = torch.cat(
                [text, torch.multinomial(logits.softmax(0), 1, generator=generator)[None]], 1
            )
    return bytes(text[0].tolist()).decode(errors="replace")


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is trained, and how."""

    schedule: str
    stages: int | Literal["auto"]
    replicas: Literal["auto"] | None
    workers: str | None
    micro_batches: int
    steps: int
    batch: int
    context: int
    optimizer: str
    lr: float
    seed: int
    checkpoint: str | None = None
    checkpoint_every: int = 200

    def optimizer_of(self, model: nn.Module) -> tuple[Any, ...]:
        """AdamW; or Muon on the matrices inside the model, and AdamW on all else."""
        if self.optimizer == "adamw":
            options = {"weight_decay": 0.05, "betas": (0.9, 0.95), "fused": True}
            return (torch.optim.AdamW, {"lr": self.lr, **options})
        matrices = [(hidden_matrices(model), {"matrices": True})]
        return (Muon, {"lr": self.lr, "weight_decay": 0.05}, matrices)


def number_or_auto(_: Any, option: click.Parameter, value: str) -> int | str:
    """Read the number of stages."""
    if value == "auto":
        return value
    if not (value.isascii() and value.isdecimal() and int(value)):
        raise click.BadParameter("a number of at least 1, or auto", param=option)
    return int(value)


@click.command()
@click.option("--schedule", default="async-1f1b", show_default=True)
@click.option("--stages", default="4", show_default=True, callback=number_or_auto,
              help="A number; or auto, which measures the layers, and plans.")  # fmt: skip
@click.option("--replicas", default=None, type=click.Choice(["auto"]),
              help="With --stages auto: whether the plan may have replicas.")  # fmt: skip
@click.option("--workers", default=None, help="serial, local or HOST:PORT.")
@click.option("--micro-batches", default=4, show_default=True, help="Per mini-batch.")
@click.option("--steps", default=1200, show_default=True)
@click.option("--batch", default=8, show_default=True)
@click.option("--context", default=128, show_default=True)
@click.option("--optimizer", default="muon", show_default=True,
              type=click.Choice(["muon", "adamw"]))  # fmt: skip
@click.option("--lr", default=8e-3, show_default=True)
@click.option("--seed", default=0, show_default=True)
@click.option("--checkpoint", default=None, help="Folder for checkpoints; a killed worker is then "
              "replaced, and a killed script goes on with --resume.")  # fmt: skip
@click.option("--checkpoint-every", default=200, show_default=True, help="Steps.")
@click.option("--compare", is_flag=True, help="Train also by 1f1b, with micro-batches as many as "
              "stages: with as many samples, and for as long.")  # fmt: skip
@click.option(
    "--out", default="out/charlm.safetensors", show_default=True, type=click.Path(path_type=Path)
)
def main(compare: bool, out: Path, **options: Any) -> None:
    """Train, validate, save and sample."""
    console, job = Console(), Job(**options)
    corpus = Corpus.load()
    bigram = corpus.bigram_loss()
    console.print(
        f"{len(corpus.train):,} bytes to train on, {len(corpus.validation):,} to validate; "
        f"a bigram model gets {bigram:.3f} nats per byte"
    )
    trained, loss, elapsed_s = run(console, corpus, job)
    save(out, trained.state_dict())
    rate = job.steps * job.batch * job.context / elapsed_s
    console.print(
        f"validation loss {loss:.3f} nats per byte (bigram {bigram:.3f}); "
        f"{rate:,.0f} bytes/s over {elapsed_s:.0f} s; saved {out}"
    )
    console.print(sample(trained, b"def ", 300, job.context), markup=False, highlight=False)
    if compare:
        count = job.micro_batches if job.stages == "auto" else job.stages
        other = replace(job, schedule="1f1b", micro_batches=count, checkpoint=None)
        _, same_samples, other_s = run(console, corpus, other)
        shorter = replace(other, steps=max(1, round(job.steps * elapsed_s / other_s)))
        _, same_time, shorter_s = run(console, corpus, shorter)
        table = Table("schedule", "steps", "seconds", "validation loss")
        for each, seconds, found in (
            (job, elapsed_s, loss),
            (other, other_s, same_samples),
            (shorter, shorter_s, same_time),
        ):
            table.add_row(each.schedule, f"{each.steps}", f"{seconds:.0f}", f"{found:.3f}")
        console.print(table)


def run(console: Console, corpus: Corpus, job: Job) -> tuple[nn.Module, float, float]:
    """Do a job; return the model, its validation loss, and the seconds of its training."""
    torch.manual_seed(job.seed)
    model = build_model(context=job.context)
    validation = list(corpus.validation_batches(job.batch, job.context, 24))
    folder = job.checkpoint
    with Pipeline(
        model,
        stages=job.stages,
        layout=Layout(replicas=job.replicas or ()),
        example=next(corpus.batches(job.batch, job.context, 1, job.seed)),
        loss_fn=loss_fn,
        optimizer=job.optimizer_of(model),
        schedule=job.schedule,
        micro_batches=job.micro_batches,
        corrections="auto",
        workers=job.workers,
        seed=job.seed,
        checkpoint=Checkpoints(folder, every=job.checkpoint_every) if folder else None,
    ) as pipe:
        console.print(pipe.explain())
        scheduler = torch.optim.lr_scheduler.LambdaLR(
            pipe.optimizer, lambda step: learning_rate_factor(step, job.steps)
        )
        pipe.attach(scheduler=scheduler)
        console.print(f"validation loss before training: {pipe.evaluate(validation):.3f}")
        loader = corpus.batches(job.batch, job.context, job.steps, job.seed)
        start = time.perf_counter()
        train(console, pipe, scheduler, loader, job.steps, job.batch * job.context, validation)
        elapsed_s = time.perf_counter() - start
        return pipe.module(), pipe.evaluate(validation), elapsed_s


def train(
    console: Console,
    pipe: Pipeline,
    scheduler: torch.optim.lr_scheduler.LRScheduler,
    loader: Iterator[tuple[Tensor, Tensor]],
    steps: int,
    bytes_per_step: int,
    validation: list[tuple[Tensor, Tensor]],
) -> None:
    """One pass over the loader, with a progress line and validation three times on the way."""
    columns = (
        BarColumn(bar_width=20),
        TextColumn("{task.completed}/{task.total} loss {task.fields[loss]:.3f}"),
        TextColumn("{task.fields[rate]:,.0f} bytes/s  busy {task.fields[busy]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=steps, loss=float("nan"), rate=0.0, busy="")
        smooth, since, busy_then = float("nan"), time.perf_counter(), [0.0] * len(pipe.stages)
        validated = False
        for result in pipe.train_epoch(loader):
            scheduler.step()
            smooth = result.loss if math.isnan(smooth) else 0.95 * smooth + 0.05 * result.loss
            if validated:  # what the stages computed in it is not part of the next figures
                since, busy_then, validated = time.perf_counter(), list(result.busy_s), False
            elif (result.step + 1) % 20 == 0:
                now = time.perf_counter()
                busy = [b - a for a, b in zip(busy_then, result.busy_s, strict=True)]
                progress.update(
                    task,
                    completed=result.step + 1,
                    loss=smooth,
                    rate=20 * bytes_per_step / (now - since),
                    busy=" ".join(f"{100 * b / (now - since):.0f}%" for b in busy),
                )
                since, busy_then = now, list(result.busy_s)
            if (result.step + 1) % (steps // 4 or 1) == 0 and result.step + 1 < steps:
                loss = pipe.evaluate(validation)
                progress.console.print(
                    f"step {result.step + 1}: training loss {smooth:.3f}, validation {loss:.3f}, "
                    f"staleness {result.staleness}"
                )
                validated = True


def save(path: Path, state: dict[str, Tensor]) -> None:
    """Write a checkpoint in the model's own keys."""
    from safetensors.torch import save_file

    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(state, path)


if __name__ == "__main__":
    main()
