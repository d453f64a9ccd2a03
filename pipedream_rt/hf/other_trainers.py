"""Trainers of other libraries that were tried over a pipeline (trl, sentence-transformers)."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Understood:
    """The facts about a class with its own ``compute_loss`` or ``training_step``.

    Attributes:
        other: The differences from a run without a pipeline, for people.
        tells: Arguments that the model gets beside the mini-batch.
        module: Returns the module to train, given a trainer; None for the trainer's model.
        in_script: Whether a trainer computes its loss in the script, and not on the last stage.
        unless: Returns why a trainer cannot run over a pipeline; empty if it can.
    """

    other: str
    tells: Mapping[str, Any] = field(default_factory=dict)
    module: Callable[[Any], nn.Module] | None = None
    in_script: Callable[[Any], bool] = lambda trainer: False
    unless: Callable[[Any], str] = lambda trainer: ""


class SentenceLoss(nn.Module):
    """Wraps a loss of sentence-transformers, which calls its model itself, as a model with a loss.

    ``collect`` returns features and labels of a mini-batch.
    """

    def __init__(self, loss: nn.Module, collect: Callable[[Mapping[str, Any]], Any]) -> None:
        super().__init__()
        self.loss, self._collect = loss, collect

    def forward(self, **inputs: Any) -> dict[str, Tensor]:
        found = self.loss(*self._collect(inputs))
        parts = list(found.values()) if isinstance(found, dict) else []
        return {"loss": torch.stack(parts).sum() if parts else found}


def _sentence_loss(trainer: Any) -> nn.Module:
    """Return the loss of a trainer of sentence-transformers, around its model."""
    collect, model = type(trainer).collect_features, trainer.model
    # The model writes logs of the run into its card, but what a forward may read must not change.
    quiet = copy.copy(model)
    quiet.model_card_data = None
    # The copy of the loss keeps the trainer's own parameters and buffers.
    same = {id(t): t for t in (*trainer.loss.parameters(), *trainer.loss.buffers())}
    loss = copy.deepcopy(trainer.loss, {**same, id(model): quiet})
    return SentenceLoss(loss, lambda inputs: collect(None, inputs))


def _several_losses(trainer: Any) -> str:
    """Return a reason if a trainer of sentence-transformers has a loss for each dataset."""
    return "a loss for each dataset" if isinstance(trainer.loss, dict) else ""


def _other_losses(trainer: Any) -> bool:
    """Whether an SFTTrainer has another loss than the likelihood."""
    return bool(trainer.args.loss_type != "nll" or trainer.aux_loss_enabled)


def _adapters_left_out(trainer: Any) -> str:
    """Return a reason if the reference of a DPOTrainer is its model without the adapter."""
    if trainer.ref_model is not None or trainer.precompute_ref_logps:
        return ""
    return (
        "the model without its adapter as the reference, in the middle of a forward by the stages; "
        "precompute_ref_log_probs=True can be done"
    )


UNDERSTOOD: Mapping[str, Understood] = {
    "trl.trainer.sft_trainer.SFTTrainer": Understood(
        other="`entropy`, `mean_token_accuracy` and `num_tokens` are in the logs of evaluations "
        "alone; another `loss_type` than `nll`, and an auxiliary loss, are computed in the script",
        tells={"use_cache": False, "fused_lm_head": True},
        in_script=_other_losses,
    ),
    "trl.trainer.dpo_trainer.DPOTrainer": Understood(
        other="the loss is in the script, and so is `ref_model`; a PEFT model needs "
        "`precompute_ref_log_probs=True`",
        in_script=lambda trainer: True,
        unless=_adapters_left_out,
    ),
    "trl.trainer.reward_trainer.RewardTrainer": Understood(
        other="the loss is in the script", in_script=lambda trainer: True
    ),
    "sentence_transformers.base.trainer.BaseTrainer": Understood(
        other="the components of a loss are not logged; evaluations run in the script; a loss over "
        "pairs of a mini-batch needs `micro_batches=1`",
        module=_sentence_loss,
        unless=_several_losses,
    ),
    "sentence_transformers.cross_encoder.trainer.CrossEncoderTrainer": Understood(
        other="the loss is in the script; a loss that calls the model several times is refused",
        in_script=lambda trainer: True,
    ),
}
"""By the full name of the class."""


def understood(cls: type) -> Understood | None:
    """Return the facts about a class; None if it is not known."""
    return UNDERSTOOD.get(f"{cls.__module__}.{cls.__qualname__}")
