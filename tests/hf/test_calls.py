"""A loss that a Trainer computes in the script, beside a plain Trainer."""

import pytest
import torch
from torch.nn import functional as F

transformers = pytest.importorskip("transformers", reason="needs the extra hf")
pytest.importorskip("accelerate", reason="needs the extra hf")

from support.trainers import (  # noqa: E402
    CALM,
    as_plain,
    bert,
    calm,  # noqa: F401 - a fixture
    classes,
    logs_of,
    trainer_of,
    weights_of,
)
from transformers import Trainer  # noqa: E402

from pipedream_rt.hf import PipelineMixin  # noqa: E402

pytestmark = CALM

WHOLE = {"schedule": "gpipe", "micro_batches": 1}
"""A pipeline that cuts no batch."""


class Weighted(Trainer):
    """Pops the labels, and weighs classes."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        assert self.accelerator.unwrap_model(model) is model is self.model
        weight = torch.arange(1.0, 1 + model.config.num_labels)
        loss = F.cross_entropy(outputs.logits, labels, weight)
        return (loss, outputs) if return_outputs else loss


class Labelled(Trainer):
    """Gives the model its labels, and adds to its loss."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        loss = loss + 0.01 * outputs.logits.square().mean()
        return (loss, outputs) if return_outputs else loss


class Steps(Trainer):
    """Does the whole step itself, with a backward by accelerate."""

    def training_step(self, model, inputs, num_items_in_batch=None):
        model.train()
        inputs = self._prepare_inputs(inputs)
        loss = self.compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
        self.accelerator.backward(2 * loss)
        return loss.detach()


def over_a_pipeline(cls):
    """The same class over a pipeline."""
    return type(f"Piped{cls.__name__}", (PipelineMixin, cls), {})


def does_with(folder, **given):
    """Return what trains and evaluates a trainer of a class, and returns all that it has."""

    def does(cls):
        options = {"eval_strategy": "epoch", **given.get("options", {})}
        with trainer_of(cls, folder / cls.__name__, **{**given, "options": options}) as trainer:
            trainer.train()
            return logs_of(trainer), weights_of(trainer), trainer.evaluate()["eval_loss"]

    return does


def of_classes(**options):
    return {
        "train": classes(), "evaluated": classes(6, seed=2), "model": bert(), "options": options,
    }  # fmt: skip


@pytest.mark.parametrize("parts", [1, 2, 3])
@pytest.mark.parametrize("cls", [Weighted, Labelled, Steps])
def test_own_methods_have_the_bits_of_a_plain_trainer(cls, parts, tmp_path):
    pipeline = {**WHOLE, "micro_batches": parts}

    def does(each):
        given = of_classes(gradient_accumulation_steps=parts)
        return does_with(tmp_path, pipeline=pipeline, **given)(each)

    as_plain(does, cls, over_a_pipeline(cls))
