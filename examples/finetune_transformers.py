"""Train a Llama of transformers, as it is, and generate text with it.

The model comes from a config, so nothing is downloaded. It is trained on the bytes of Python's own
standard library with bfloat16 autocast, clipping and a warm-up, saved as a folder that transformers
loads, and asked for a sample, by the pipeline and by the loaded model::

    pip install 'pipedream-rt[hf]'
    python examples/finetune_transformers.py
    python examples/finetune_transformers.py --schedule async-1f1b --micro-batches 1 --stages 2
    python examples/finetune_transformers.py --weights out/llama     # goes on from its own folder
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import click
import torch
from torch import Tensor
from train_charlm import BYTES, Corpus
from transformers import LlamaConfig, LlamaForCausalLM

from pipedream_rt import Clip, Layout, Pipeline, Training, without_values

CONTEXT, BATCH = 128, 8
PROMPT = b"def "


def config(layers: int, width: int) -> LlamaConfig:
    """A Llama whose tokens are bytes."""
    return LlamaConfig(
        vocab_size=BYTES,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2 * CONTEXT,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )


def batches(pairs: Iterator[tuple[Tensor, Tensor]]) -> Iterator[dict[str, Tensor]]:
    """Mini-batches as the model takes them: it shifts the labels by itself. Ids are (B, T)."""
    for ids, _ in pairs:
        yield {"input_ids": ids, "labels": ids}


def warm_up(step: int) -> float:
    """The factor of the learning rate: it rises over the first 20 updates."""
    return min(1.0, (step + 1) / 20)


def sample(generate: Callable[..., Tensor], seed: int) -> bytes:
    """A hundred bytes after the prompt, drawn with a seed of their own."""
    torch.manual_seed(seed)
    ids = torch.tensor([list(PROMPT)])
    made = generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=100, do_sample=True, top_k=50
    )
    return bytes(made[0].tolist())


@click.command()
@click.option("--stages", default=4, show_default=True)
@click.option("--layers", default=8, show_default=True)
@click.option("--width", default=128, show_default=True)
@click.option("--steps", default=400, show_default=True)
@click.option("--schedule", default="1f1b", show_default=True)
@click.option("--micro-batches", default=4, show_default=True, help="Per mini-batch.")
@click.option("--workers", default=None, help="As of Pipeline.")
@click.option("--weights", type=Path, default=None, help="A folder to begin from.")
@click.option("--out", type=Path, default=Path("out/llama"), show_default=True)
def main(
    stages: int,
    layers: int,
    width: int,
    steps: int,
    schedule: str,
    micro_batches: int,
    workers: str | None,
    weights: Path | None,
    out: Path,
) -> None:
    """Train, save, and generate."""
    torch.manual_seed(0)
    torch.set_num_threads(1)  # as many as the workers have, so that the samples are equal
    corpus = Corpus.load()
    if weights is None:
        model = LlamaForCausalLM(config(layers, width))
    else:
        with without_values():  # each worker reads its part
            model = LlamaForCausalLM(LlamaConfig.from_pretrained(weights))
    validation = list(batches(corpus.validation_batches(BATCH, CONTEXT, 8)))
    no_decay = ("*norm.weight", {"weight_decay": 0.0})
    with Pipeline(
        model,
        stages=stages,
        example=validation[0],
        layout=Layout(weights=weights),
        training=Training(autocast=torch.bfloat16, clip=Clip(norm=1.0)),
        optimizer=(torch.optim.AdamW, {"lr": 1e-3, "weight_decay": 0.1}, [no_decay]),
        schedule=schedule,
        micro_batches=micro_batches,
        workers=workers,
    ) as pipe:
        scheduler = torch.optim.lr_scheduler.LambdaLR(pipe.optimizer, warm_up)
        print(f"before: {pipe.evaluate(validation):.3f} nats per byte")
        for result in pipe.train_epoch(batches(corpus.batches(BATCH, CONTEXT, steps, seed=1))):
            scheduler.step()
            if (result.step + 1) % 50 == 0:
                print(f"step {result.step + 1}: {result.loss:.3f}")
        print(f"after: {pipe.evaluate(validation):.3f} nats per byte")
        pipe.module().save_pretrained(out)
        mine = sample(pipe.generate, seed=2)
    loaded = LlamaForCausalLM.from_pretrained(out).eval()
    with torch.autocast("cpu", dtype=torch.bfloat16):  # as in the pipeline
        theirs = sample(loaded.generate, seed=2)
    print(mine.decode(errors="replace"))
    print(f"the same sample from {out}, loaded by transformers: {mine == theirs}")


if __name__ == "__main__":
    main()
