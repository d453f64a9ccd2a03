"""A loss that a Trainer computes in the script, beside a plain Trainer."""

import copy
from contextlib import nullcontext

import pytest
import torch
from support.trainers import (
    CALM,
    Calls,
    as_plain,
    bert,
    classes,
    llama,
    logs_of,
    over_a_pipeline,
    same,
    total,
    trainer_of,
    weights_of,
)
from torch.nn import functional as F
from transformers import BertForSequenceClassification, Trainer

from pipedream_rt import ConfigError
from pipedream_rt.hf import PipelineTrainer
from pipedream_rt.hf.calls import answered

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
        "train": classes(), "evaluated": classes(6, seed=2), "model": bert, "options": options,
    }  # fmt: skip


class OfDifference(Trainer):
    """A Trainer of others, with a frozen copy and a forward without gradients."""

    frozen = None

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        if self.frozen is None:
            self.frozen = copy.deepcopy(model)
        labels = inputs.pop("labels")
        with torch.no_grad():
            before, now = self.frozen(**inputs).logits, model(**inputs).logits
        outputs = model(**inputs)
        assert torch.equal(outputs.logits, now)
        difference = (outputs.logits - before).square().mean()
        loss = F.cross_entropy(outputs.logits, labels) + difference
        return (loss, outputs) if return_outputs else loss


class Breaks(Steps):
    """Says of the third step that its loss is no number."""

    def training_step(self, *args, **kwargs):
        found = super().training_step(*args, **kwargs)
        return found * float("nan") if self.state.global_step == 2 else found


@pytest.mark.parametrize(
    ("cls", "parts", "options", "schedule"),
    [
        *[(cls, parts, {}, "gpipe") for cls in (Weighted, Labelled, Steps) for parts in (1, 2, 3)],
        (Weighted, 1, {"bf16": True}, "gpipe"),
        (Weighted, 1, {}, "1f1b"),
        (OfDifference, 1, {}, "gpipe"),
        (Breaks, 1, {"logging_steps": 4}, "gpipe"),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_own_methods_have_the_bits_of_a_plain_trainer(cls, parts, options, schedule, tmp_path):
    given = of_classes(gradient_accumulation_steps=parts, **options)
    pipeline = {"schedule": schedule, "micro_batches": parts}
    as_plain(does_with(tmp_path, pipeline=pipeline, **given), cls)


def test_an_asynchronous_schedule_trains(tmp_path):
    pipeline = {"schedule": "async-1f1b", "micro_batches": 1}
    logs, *_ = does_with(tmp_path, pipeline=pipeline, **of_classes())(over_a_pipeline(Weighted))
    assert sum("loss" in row for row in logs) == 4


@pytest.mark.parametrize("parts", [1, 2])
def test_smoothed_labels_have_the_bits_of_a_plain_trainer(parts, tmp_path):
    pipeline = {**WHOLE, "micro_batches": parts}
    options = {"label_smoothing_factor": 0.1, "gradient_accumulation_steps": parts}
    as_plain(does_with(tmp_path, options=options, pipeline=pipeline))


@pytest.mark.parametrize("parts", [1, 3])
def test_a_function_of_outputs_and_labels_has_the_bits_of_a_plain_trainer(parts, tmp_path):
    def squares(outputs, labels, num_items_in_batch=None):
        losses = F.cross_entropy(outputs.logits.flatten(0, 1), labels.flatten(), reduction="none")
        count = labels.numel() if num_items_in_batch is None else num_items_in_batch
        return losses.square().sum() / count

    pipeline = {**WHOLE, "micro_batches": parts}
    options = {"gradient_accumulation_steps": parts, "max_grad_norm": 0.1}
    as_plain(does_with(tmp_path, options=options, pipeline=pipeline, compute_loss_func=squares))


@pytest.mark.parametrize(
    ("cls", "pipeline"),
    [
        (Weighted, {"micro_batches": 4, "schedule": "gpipe"}),
        (Weighted, {"schedule": None}),
        (Labelled, {"schedule": None}),
    ],
)
@pytest.mark.parametrize("parts", [1, 2])
def test_batches_that_are_cut_are_rounded_otherwise(cls, pipeline, parts, tmp_path):
    given = of_classes(gradient_accumulation_steps=parts)
    does = does_with(tmp_path, pipeline=pipeline, **given)
    found = does(cls), does(over_a_pipeline(cls))
    plain, ours = (weights for _, weights, _ in found)
    for name, value in plain.items():
        torch.testing.assert_close(value, ours[name], rtol=1e-3, atol=1e-4)
    losses = [[row["loss"] for row in logs if "loss" in row] for logs, *_ in found]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


@pytest.mark.parametrize("given", [{}, {"micro_batches": 2, "workers": "local"}])
def test_a_run_goes_on_from_a_checkpoint_with_the_same_bits(given, tmp_path):
    cls, ends = over_a_pipeline(Weighted), []
    for folder, resume in ((tmp_path / "run", None), (tmp_path / "again", "run/checkpoint-4")):
        options = {"save_strategy": "steps", "save_steps": 4}
        with trainer_of(cls, folder, pipeline={**WHOLE, **given}, **of_classes(**options)) as made:
            made.train(resume_from_checkpoint=resume and str(tmp_path / resume))
            ends.append((weights_of(made), made.state.global_step))
    same(*ends)


def test_an_evaluation_and_a_prediction_come_first(tmp_path):
    def does(cls):
        with trainer_of(cls, tmp_path / cls.__name__, pipeline=WHOLE, **of_classes()) as trainer:
            found = [trainer.evaluate()["eval_loss"]]
            found += trainer.predict(classes(5, seed=7))[0].tolist()
            trainer.train()
            found.append(trainer.evaluate()["eval_loss"])
            trainer.model.classifier.bias.data.zero_()
            return *found, trainer.evaluate()["eval_loss"]

    as_plain(does, Weighted)


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("before", [True, False])
def test_an_error_in_a_loss_leaves_a_pipeline_that_goes_on(before, parts, tmp_path):
    class Fails(Weighted):
        """Fails once, before or behind its forward of the last part of the second update."""

        calls = 0

        def compute_loss(self, *args, **kwargs):
            self.calls += self.model.training
            fails = self.model.training and self.calls == 2 * parts
            loss = None if fails and before else super().compute_loss(*args, **kwargs)
            if fails:
                self.model.zero_grad()
                raise KeyboardInterrupt
            return loss

    def does(cls):
        given = of_classes(gradient_accumulation_steps=parts)
        given["pipeline"] = {**WHOLE, "micro_batches": parts}
        with trainer_of(cls, tmp_path / cls.__name__, **given) as trainer:
            with pytest.raises(KeyboardInterrupt):
                trainer.train()
            assert type(trainer.model) is BertForSequenceClassification
            found = [trainer.evaluate()["eval_loss"], weights_of(trainer)]
            trainer.train()
            return *found, trainer.evaluate()["eval_loss"]

    as_plain(does, Fails)


def test_callbacks_read_the_model_at_each_step(tmp_path):
    def does(cls):
        reads = Calls([], on_step_end=lambda model, state, found, _: found.append(total(model)))
        given = {**of_classes(), "pipeline": WHOLE, "callbacks": [reads]}
        return does_with(tmp_path, **given)(cls), reads.seen

    as_plain(does, Weighted)


def of_loss(function):
    """Return a class whose loss a function computes of the trainer, the model and the inputs."""
    body = {"compute_loss": lambda self, model, inputs, **kwargs: function(self, model, inputs)}
    return type("Own", (PipelineTrainer,), body)


def penalized(trainer, model, inputs):
    penalty = sum(p.square().sum() for p in model.parameters())
    return model(**inputs).loss + penalty


def in_eval_mode(trainer, model, inputs):
    return model.eval()(**inputs).loss


REFUSED = [
    (lambda t, model, i: model(**i).loss + model(**i).loss, "called a second time with gradients"),
    (lambda t, model, i: torch.zeros((), requires_grad=True), "has not called the model"),
    (in_eval_mode, "the model is in eval mode, and was called with gradients"),
    (penalized, "has a gradient in the script"),
    (lambda t, model, i: model.base_model(i["input_ids"])[0].sum(), "has a gradient in the script"),
]
"""Losses that are refused by name."""


@pytest.mark.parametrize(("function", "said"), REFUSED)
def test_what_a_loss_cannot_do_is_refused_by_name(function, said, tmp_path):
    own, given = of_loss(function), {"pipeline": WHOLE, **of_classes()}
    with trainer_of(own, tmp_path, **given) as trainer, pytest.raises(ConfigError, match=said):
        trainer.train()


@pytest.mark.parametrize("begins", [0, 1])
@pytest.mark.parametrize("call", ["train", "evaluate"])
def test_an_adapter_that_is_left_out_is_refused(call, begins, tmp_path):
    """Also if the pipeline is open."""
    peft = pytest.importorskip("peft", reason="needs peft")
    calls = []

    def beside(trainer, model, inputs):
        calls.append(trainer)
        leaves_out = model.disable_adapter() if len(calls) > begins else nullcontext()
        with torch.no_grad(), leaves_out:
            before = model(**inputs).logits
        loss = (model(**inputs).logits - before).square().mean()
        return (loss, {"logits": before}) if call == "evaluate" else loss

    model = peft.get_peft_model(llama(), peft.LoraConfig(r=2, target_modules=["q_proj"]))
    given = {"pipeline": WHOLE, "model": model, "options": {"per_device_eval_batch_size": 2}}
    with (
        trainer_of(of_loss(beside), tmp_path, **given) as trainer,
        pytest.raises(ConfigError, match="which adapter is active"),
    ):
        getattr(trainer, call)()
    assert len(calls) == begins + 1


def test_a_loss_function_for_the_last_stage_beside_an_own_loss_is_refused(tmp_path):
    given = {"pipeline": {"loss_fn": lambda output, batch: output.logits.sum()}, **of_classes()}
    with (
        pytest.raises(ConfigError, match="leave one of them out"),
        trainer_of(over_a_pipeline(Weighted), tmp_path, **given),
    ):
        pass


def test_the_pipeline_of_an_own_loss_starts_with_the_first_mini_batch(tmp_path):
    with trainer_of(over_a_pipeline(Weighted), tmp_path, **of_classes()) as trainer:
        with pytest.raises(ConfigError, match="starts with the first mini-batch"):
            _ = trainer.pipe
        trainer.evaluate()
        assert trainer.pipe.step == 0


def test_only_the_model_itself_is_answered_and_only_meanwhile():
    model = torch.nn.Linear(1, 1)
    with answered(model, lambda x: (type(model), 2 * x)):
        assert model(3) == (torch.nn.Linear, 6)
        assert isinstance(model, torch.nn.Linear)
        assert copy.deepcopy(model)(torch.ones(1)).shape == (1,)
    assert type(model) is torch.nn.Linear
    assert model(torch.ones(1)).shape == (1,)


def test_a_copy_that_a_loss_makes_of_the_model_is_one_of_its_own_class():
    model = torch.nn.Linear(2, 2)
    with answered(model, lambda x: "answered"):
        made = copy.deepcopy(model)
        assert model(torch.ones(2)) == "answered"
    assert type(made) is torch.nn.Linear
    assert torch.equal(made.weight, model.weight)
