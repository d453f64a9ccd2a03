"""Which methods of a Trainer a subclass may have over a pipeline."""

import inspect

import pytest
from support.trainers import (
    CALM,
    EVALUATED,
    SAVED,
    logs_of,
    rows,
    same,
    trainer_of,
    weights_of,
)
from transformers import Trainer

from pipedream_rt import ConfigError
from pipedream_rt.hf import PipelineMixin, PipelineTrainer
from pipedream_rt.hf.overrides import IN_SCRIPT, NEVER_CALLED, REPLACED, SAME, owns_loss

pytestmark = CALM


ANOTHER_NUMBER = {
    "_load_optimizer_and_scheduler": "the state of the pipeline has both",
    "_load_scaler": "no losses are scaled here",
    "_get_num_items_in_batch": "micro-batches are weighed by it too",
    "get_sp_size": "_get_num_items_in_batch calls it",
    "get_cp_size": "_get_num_items_in_batch calls it",
}
"""Methods that are not called as often as by a plain Trainer, and why."""


def counting(cls, calls):
    """Return a class whose methods all count, and call those of a class."""

    def counts(name):
        def method(self, *args, **kwargs):
            calls[name] = calls.get(name, 0) + 1
            return getattr(super(own, self), name)(*args, **kwargs)

        return method

    names = [
        name
        for name in SAME | REPLACED.keys()
        if inspect.isfunction(vars(Trainer).get(name)) and name not in ("__init__", "end")
    ]
    own = type(f"Counting{cls.__name__}", (cls,), {name: counts(name) for name in names})
    return own


def test_own_methods_are_called_as_often_as_by_a_plain_trainer(tmp_path):
    """With evaluations, checkpoints, the best model, a resume, a prediction and a saved model."""
    found = []
    for cls in (Trainer, PipelineTrainer):
        calls, folder = {}, tmp_path / cls.__name__
        own = counting(cls, calls)
        options = {
            **SAVED, **EVALUATED, "load_best_model_at_end": True, "gradient_accumulation_steps": 2,
            "include_num_input_tokens_seen": "all",
        }  # fmt: skip
        given = {"options": options, "pipeline": {"micro_batches": 2}, "train": rows(22)}
        with trainer_of(own, folder, **given) as trainer:
            trainer.train()
            trainer.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
            trainer.evaluate()
            trainer.predict(rows(5, seed=9))
            trainer.save_model(str(folder / "model"))
            found.append((calls, logs_of(trainer), weights_of(trainer)))
    calls = [{k: v for k, v in each.items() if k not in ANOTHER_NUMBER} for each, *_ in found]
    assert calls[0] == calls[1]
    assert len(calls[0]) > 40
    assert found[1][0]["_prepare_inputs"] > 0
    same(found[0][2], found[1][2])


def test_every_method_is_known_and_those_that_are_replaced_are_as_expected():
    names = {n for n in vars(Trainer) if callable(getattr(Trainer, n)) and n[:2] != "__"}
    assert not names - SAME - NEVER_CALLED.keys() - IN_SCRIPT.keys() - REPLACED.keys()
    for name, expected in REPLACED.items():
        assert tuple(inspect.signature(getattr(Trainer, name)).parameters) == expected


@pytest.mark.parametrize("name", NEVER_CALLED)
def test_methods_that_are_never_called_are_refused_by_name(name, tmp_path):
    body = {name: lambda self, *args, **kwargs: None}
    own = type("Own", (PipelineTrainer,), body)
    theirs = type("Piped", (PipelineMixin, type("Theirs", (Trainer,), body)), {})
    for cls, said in ((own, f"an own {name}"), (theirs, f"Theirs.{name}")):
        with pytest.raises(ConfigError, match=f"cannot do {said}: "), trainer_of(cls, tmp_path):
            pass


def test_a_method_that_a_new_version_brings_is_refused_if_somebody_has_it(tmp_path, monkeypatch):
    monkeypatch.setattr(Trainer, "of_tomorrow", lambda self: None, raising=False)
    with trainer_of(PipelineTrainer, tmp_path):
        pass
    own = type("Own", (PipelineTrainer,), {"of_tomorrow": lambda self: None})
    with (
        pytest.raises(ConfigError, match="an own of_tomorrow: it is a method of transformers"),
        trainer_of(own, tmp_path),
    ):
        pass
    monkeypatch.setattr(Trainer, "_run_epoch", lambda self, other: None)
    with (
        pytest.raises(ConfigError, match=r"_run_epoch takes .*take a version of transformers"),
        trainer_of(PipelineTrainer, tmp_path),
    ):
        pass


def test_a_method_that_is_put_on_the_object_is_refused_when_training_begins(tmp_path):
    with trainer_of(PipelineTrainer, tmp_path) as trainer:
        trainer._clip_grad_norm = lambda *args, **kwargs: None
        with pytest.raises(ConfigError, match="an own _clip_grad_norm"):
            trainer.train()
        del trainer._clip_grad_norm


@pytest.mark.parametrize("name", IN_SCRIPT)
def test_a_loss_is_in_the_script_where_the_last_stage_knows_nothing_of_it(name):
    body = {name: lambda self, *args, **kwargs: None}
    theirs = type("Theirs", (Trainer,), body)
    known = type("SFTTrainer", (Trainer,), {**body, "__module__": "trl.trainer.sft_trainer"})
    for cls, own, expected in (
        (PipelineTrainer, {}, False),
        (PipelineTrainer, body, True),
        (type("Own", (PipelineTrainer,), body), {}, True),
        (type("Piped", (PipelineMixin, theirs), {}), {}, True),
        (type("Piped", (PipelineMixin, known), {}), {}, False),
        (type("Own", (PipelineMixin, known), body), {}, True),
    ):
        assert owns_loss(cls, PipelineMixin, own) is expected


def test_a_loss_that_is_put_on_the_object_is_in_the_script_from_the_next_training_on(tmp_path):
    def does(cls):
        with trainer_of(cls, tmp_path / cls.__name__, pipeline={"micro_batches": 1}) as trainer:
            trainer.train()
            plain = trainer.compute_loss
            trainer.compute_loss = lambda *args, **kwargs: 2 * plain(*args, **kwargs)
            trainer.train()
            del trainer.compute_loss
            return logs_of(trainer), weights_of(trainer), trainer.evaluate()["eval_loss"]

    same(*map(does, (Trainer, PipelineTrainer)))
