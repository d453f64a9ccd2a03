"""The same program with a Trainer of transformers and with one over a pipeline."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers", reason="needs the extra hf")
pytest.importorskip("accelerate", reason="needs the extra hf")

from tqdm import tqdm  # noqa: E402
from transformers import Trainer, TrainerCallback, TrainingArguments  # noqa: E402

from pipedream_rt.hf import PipelineMixin, PipelineTrainer  # noqa: E402

tqdm.monitor_interval = 0  # its thread would outlive the test
transformers.logging.set_verbosity_error()
logging.getLogger("transformers").setLevel(logging.ERROR)

CALM = [
    pytest.mark.filterwarnings(f"ignore::{kind}")
    for kind in ("DeprecationWarning", "FutureWarning", "UserWarning")
]
"""Marks of tests in which transformers and accelerate warn of what does not matter there."""

VOCABULARY = 32
FLUSHED = {"stages": 2, "schedule": "1f1b", "workers": "serial"}
"""A pipeline whose bits are those of a plain Trainer, where it cuts no batch."""

ASYNCHRONOUS = {"stages": 3, "schedule": "async-1f1b", "micro_batches": 2}
EVALUATED = {"eval_strategy": "steps", "eval_steps": 2}
SAVED = {"save_strategy": "steps", "save_steps": 2}

_OF_TIME = ("runtime", "second", "total_flos")


def llama(seed: int = 0, **options: Any) -> transformers.LlamaForCausalLM:
    """Return a small causal model."""
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, vocab_size=VOCABULARY, max_position_embeddings=32, **options,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def bert(seed: int = 0) -> transformers.BertForSequenceClassification:
    """Return a small classifier, whose loss does not know how many labels a mini-batch has."""
    torch.manual_seed(seed)
    config = transformers.BertConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        vocab_size=VOCABULARY, max_position_embeddings=32, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0, num_labels=3,
    )  # fmt: skip
    return transformers.BertForSequenceClassification(config)


def rows(count: int = 14, seed: int = 1, most: int = 8, least: int = 8) -> list[dict[str, Tensor]]:
    """Return rows of ids, of some lengths, whose labels are the ids."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(low: int, high: int, *size: int) -> Tensor:
        return torch.randint(low, high, size, generator=generator)

    ids = [drawn(3, VOCABULARY, int(drawn(least, most + 1, 1))) for _ in range(count)]
    return [{"input_ids": each, "labels": each.clone()} for each in ids]


def classes(count: int = 14, seed: int = 1) -> list[dict[str, Tensor]]:
    """Return rows of ids with a class each."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(3, (count,), generator=generator)
    return [
        {"input_ids": row["input_ids"], "labels": label}
        for row, label in zip(rows(count, seed), labels, strict=True)
    ]


def padded(items: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Collate rows of different lengths."""
    fill = {"input_ids": 0, "labels": -100}
    found = {
        name: torch.nn.utils.rnn.pad_sequence([i[name] for i in items], True, value)
        for name, value in fill.items()
    }
    return {**found, "attention_mask": (found["labels"] != -100).long()}


def arguments(folder: Any, **options: Any) -> TrainingArguments:
    """Return arguments of a short run."""
    given = {
        "num_train_epochs": 2, "per_device_train_batch_size": 4, "report_to": [],
        "use_cpu": True, "logging_steps": 2, "save_strategy": "no", "disable_tqdm": True,
        "learning_rate": 1e-2, "seed": 3,
    }  # fmt: skip
    return TrainingArguments(str(folder), **{**given, **options})


@contextmanager
def trainer_of(
    cls: type[Trainer],
    folder: Any,
    *,
    model: Any = None,
    pipeline: Mapping[str, Any] | None = None,
    train: Any = None,
    evaluated: Any = None,
    options: Mapping[str, Any] | None = None,
    **given: Any,
) -> Iterator[Any]:
    """Yield a trainer, whose workers end behind the body.

    Args:
        cls: Its class.
        folder: For what it writes.
        model: The model, or what makes it; a Llama by default, unless there is ``model_init``.
        pipeline: Options that `FLUSHED` lacks.
        train: The rows to train on.
        evaluated: The rows to evaluate on.
        options: Options of the training arguments.
        **given: Further arguments of the class.
    """
    if issubclass(cls, PipelineMixin):
        given["pipeline"] = {**FLUSHED, **(pipeline or {})}
    if model is None and "model_init" not in given:
        model = llama
    if isinstance(model, FunctionType):
        model = model()
    trainer = cls(
        model=model,
        args=arguments(folder, **(options or {})),
        train_dataset=rows() if train is None else train,
        eval_dataset=rows(6, seed=2) if evaluated is None else evaluated,
        **given,
    )
    trainer.remove_callback(transformers.PrinterCallback)
    try:
        yield trainer
    finally:
        if isinstance(trainer, PipelineMixin):
            trainer.close()


def weights_of(trainer: Any) -> dict[str, Tensor]:
    """Return a copy of the weights."""
    return {name: value.clone() for name, value in trainer.model.state_dict().items()}


def logs_of(trainer: Any) -> list[dict[str, Any]]:
    """Return the logs, without what depends on the clock."""
    return [
        {k: v for k, v in row.items() if not any(part in k for part in _OF_TIME)}
        for row in trainer.state.log_history
    ]


def same(one: Any, other: Any, where: str = "") -> None:
    """Assert that two values are equal, bit for bit, whatever they are made of."""
    assert type(one) is type(other), where
    if isinstance(one, dict):
        assert one.keys() == other.keys(), where
        for key, value in one.items():
            same(value, other[key], f"{where}.{key}")
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), f"{where}: {one} {other}"
        for i, (mine, theirs) in enumerate(zip(one, other, strict=True)):
            same(mine, theirs, f"{where}[{i}]")
    elif isinstance(one, Tensor):
        torch.testing.assert_close(
            other, one, rtol=0, atol=0, equal_nan=True, msg=lambda text: f"{where}: {text}"
        )
    elif hasattr(one, "dtype"):
        assert (one == other).all(), where
    else:
        assert one == other or (one != one and other != other), f"{where}: {one!r} {other!r}"


def trained(folder: Any, **given: Any) -> Callable[[type[Trainer]], Any]:
    """Return what trains a trainer of a class, and returns weights, logs and the number of steps.

    Args:
        folder: For what it writes.
        **given: What `trainer_of` takes.
    """

    def does(cls: type[Trainer]) -> Any:
        with trainer_of(cls, folder / cls.__name__, **given) as trainer:
            trainer.train()
            return weights_of(trainer), logs_of(trainer), trainer.state.global_step

    return does


def over_a_pipeline(cls: type[Trainer]) -> type[Trainer]:
    """Return the same class over a pipeline."""
    if cls is Trainer:
        return PipelineTrainer
    return type(f"Piped{cls.__name__}", (PipelineMixin, cls), {})


def as_plain(
    does: Callable[[type[Trainer]], Any],
    plain: type[Trainer] = Trainer,
    ours: type[Trainer] | None = None,
) -> Any:
    """Assert that something gives the same with a class and over a pipeline, and return it."""
    found = does(plain)
    same(found, does(ours or over_a_pipeline(plain)))
    return found


class Calls(TrainerCallback):
    """Calls functions at events; each gets the model, the state and what was seen so far."""

    def __init__(self, seen: list[Any], **events: Callable[..., object]) -> None:
        self.seen, self.events = seen, events

    def _call(self, event: str, state: Any, given: dict[str, Any]) -> None:
        if event in self.events:
            self.events[event](given["model"], state, self.seen, given)


def _event(name: str) -> Callable[..., None]:
    def event(self: Calls, args: Any, state: Any, control: Any, **given: Any) -> None:
        self._call(name, state, {**given, "control": control})

    return event


for _name in [each for each in vars(TrainerCallback) if each.startswith("on_")]:
    setattr(Calls, _name, _event(_name))


def total(model: torch.nn.Module) -> float:
    """Return the sum of all weights without their signs."""
    return sum(float(p.detach().double().abs().sum()) for p in model.parameters())


def with_callback(
    folder: Any, options: Any = None, pipeline: Any = None, **events: Callable[..., object]
) -> Callable[[type[Trainer]], Any]:
    """Return what trains a trainer of a class with a callback, and returns all that there is."""

    def does(cls: type[Trainer]) -> Any:
        seen: list[Any] = []
        weights, logs, steps = trained(
            folder, callbacks=[Calls(seen, **events)], pipeline=pipeline,
            options={"logging_steps": 1, "eval_strategy": "epoch", **(options or {})},
        )(cls)  # fmt: skip
        return weights, logs, seen, steps

    return does
