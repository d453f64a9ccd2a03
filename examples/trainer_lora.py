"""Fine-tune a small Llama with LoRA by the Trainer of transformers, on 4 workers, and report.

The model is made here, so nothing is downloaded; its base stays frozen, and the adapters are saved
alone. Two lines differ from a script for `transformers.Trainer`::

    pip install 'pipedream-rt[hf]'
    python examples/trainer_lora.py --report report.html
"""

from __future__ import annotations

import click
import datasets
import torch
from peft import LoraConfig, get_peft_model
from train_charlm import BYTES, Corpus
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

from pipedream_rt import Observe
from pipedream_rt.hf import PipelineTrainer

CONTEXT = 64


def model(layers: int) -> LlamaForCausalLM:
    """A Llama whose tokens are bytes."""
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=BYTES, hidden_size=128, intermediate_size=256, num_hidden_layers=layers,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=CONTEXT,
            bos_token_id=None, eos_token_id=None, pad_token_id=0,
        )
    )  # fmt: skip


def rows(count: int, seed: int) -> datasets.Dataset:
    """Windows of Python's own standard library; the model shifts the labels by itself."""
    windows = [ids[0].tolist() for ids, _ in Corpus.load().batches(1, CONTEXT, count, seed)]
    return datasets.Dataset.from_dict({"input_ids": windows, "labels": windows})


@click.command()
@click.option("--stages", default=4, show_default=True)
@click.option("--workers", default="local", show_default=True)
@click.option("--steps", default=60, show_default=True)
@click.option("--out", default="out/lora", show_default=True)
@click.option("--report", help="A file for a report of the run.")
def main(stages: int, workers: str, steps: int, out: str, report: str | None) -> None:
    """Train, save the adapters, and evaluate."""
    adapted = get_peft_model(
        model(max(stages, 4)),
        LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
    )
    adapted.print_trainable_parameters()
    trainer = PipelineTrainer(
        model=adapted,
        args=TrainingArguments(
            out, max_steps=steps, per_device_train_batch_size=8, learning_rate=1e-2,
            warmup_steps=5, lr_scheduler_type="cosine", logging_steps=10, eval_strategy="steps",
            eval_steps=max(steps // 2, 1), save_strategy="no", report_to=[], use_cpu=True,
        ),
        train_dataset=rows(8 * steps, seed=1),
        eval_dataset=rows(32, seed=2),
        pipeline={"stages": stages, "workers": workers, "observe": Observe(report=report)},
    )  # fmt: skip
    trainer.train()
    trainer.save_model(out)
    print(f"evaluated: {trainer.evaluate()['eval_loss']:.4f}")
    trainer.close()  # the workers end, and the report is written


if __name__ == "__main__":
    main()
