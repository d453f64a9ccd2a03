"""What `make demo` runs: a worker is killed while a transformer trains, and no bit of it differs.

    python examples/demo.py
    python examples/demo.py --steps 20 --stages 2

The same is trained twice on worker processes, the second time in peace. The report of the first run
is a file for a browser.
"""

from __future__ import annotations

import os
import shutil
import signal
import time
from pathlib import Path

import click
import torch
from torch import Tensor
from train_charlm import Corpus, build_model, learning_rate_factor, loss_fn

from pipedream_rt import Checkpoints, Observe, Pipeline
from pipedream_rt.optimizers import Muon, hidden_matrices

BATCH, CONTEXT = 8, 128


def trained(corpus: Corpus, stages: int, steps: int, out: Path | None) -> dict[str, Tensor]:
    """Train, and return the weights; with a folder, kill a worker in the middle, and report."""
    torch.manual_seed(0)
    model = build_model(context=CONTEXT)
    matrices = [(hidden_matrices(model), {"matrices": True})]
    with Pipeline(
        model,
        stages=stages,
        loss_fn=loss_fn,
        optimizer=(Muon, {"lr": 8e-3, "weight_decay": 0.05}, matrices),
        schedule="async-1f1b",
        checkpoint=None if out is None else Checkpoints(out / "run", every=max(1, steps // 8)),
        observe=Observe() if out is None else Observe(report=out / "report.html"),
    ) as pipe:
        scheduler = torch.optim.lr_scheduler.LambdaLR(
            pipe.optimizer, lambda step: learning_rate_factor(step, steps)
        )
        pipe.attach(scheduler=scheduler)
        if out is not None:
            click.echo(pipe.explain())
        victim = pipe.on_stages(lambda module: os.getpid())[-1]
        loader = list(corpus.batches(BATCH, CONTEXT, steps, 0))
        start = time.perf_counter()
        for result in pipe.train_epoch(loader, progress=True):
            scheduler.step()
            if out is not None and result.step == steps // 2:
                os.kill(victim, signal.SIGKILL)
                click.echo(f"step {result.step}: the worker of the last stage is killed")
        click.echo(
            f"{steps} steps of {BATCH} x {CONTEXT} bytes in {time.perf_counter() - start:.0f} s"
        )
        for restart in pipe.restarts:
            click.echo(
                f"replaced in {restart.seconds:.2f} s, {restart.replayed} micro-batches done again"
            )
        loss = pipe.evaluate(corpus.validation_batches(BATCH, CONTEXT, 24))
        click.echo(f"validation loss {loss:.3f} nats per byte")
        return pipe.state_dict()


@click.command()
@click.option("--stages", default=4, show_default=True)
@click.option("--steps", default=300, show_default=True)
@click.option("--out", default="out/demo", show_default=True, type=click.Path(path_type=Path))
def main(stages: int, steps: int, out: Path) -> None:
    """Train twice, once with a worker that is killed, and compare the weights."""
    corpus = Corpus.load()
    out.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(out / "run", ignore_errors=True)  # of an earlier demo
    click.echo(f"a transformer on {stages} workers; a bigram model gets {corpus.bigram_loss():.3f}")
    weights = trained(corpus, stages, steps, out)
    click.echo("\nthe same in peace, to compare with")
    calm = trained(corpus, stages, steps, None)
    differ = [name for name, value in calm.items() if not torch.equal(value, weights[name])]
    if differ:
        raise click.ClickException(f"{len(differ)} of {len(calm)} weights differ: {differ[0]}, ...")
    click.echo(f"\nall {len(calm)} weights are equal, bit for bit, though a worker was killed")
    click.echo(f"the report of the run with the kill: {(out / 'report.html').resolve()}")
    click.echo(
        "\nnext:\n"
        "  a pipeline of your own    the ten lines of README.md\n"
        "  how fast it can be        pipedream-rt simulate --stages 4 --compare async-1f1b,1f1b\n"
        "  if something is wrong     pipedream-rt doctor, and docs/guide/troubleshooting.md"
    )


if __name__ == "__main__":
    main()
