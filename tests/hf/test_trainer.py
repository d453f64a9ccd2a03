"""`PipelineTrainer`: what a Trainer does, done by a pipeline."""

import functools
import json

import pytest
import torch
from support.examples import run_example
from support.inside import kill
from support.trainers import (
    EVALUATED,
    FLUSHED,
    SAVED,
    Calls,
    arguments,
    as_plain,
    llama,
    logs_of,
    rows,
    same,
    trainer_of,
    transformers,
    weights_of,
)
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, Trainer

from pipedream_rt import ConfigError, Observe, Pipeline, Recovery
from pipedream_rt.corrections import WeightPrediction
from pipedream_rt.hf import PipelineTrainer
from pipedream_rt.hf import trainer as trainer_module
from pipedream_rt.observers import Evaluated

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning"),
]

CHOSEN = {"schedule": None}
"""A pipeline with staleness, as is chosen."""


def gpt2():
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            n_layer=2, n_embd=16, n_head=2, vocab_size=32, n_positions=16,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        )
    )  # fmt: skip


def trained(cls, folder, resume=None, **given):
    """The weights, the logs and the state of a trainer that has trained."""
    given = {"model": gpt2(), **given}
    given["options"] = {"eval_strategy": "epoch", "warmup_steps": 2, **given.get("options", {})}
    with trainer_of(cls, folder, **given) as trainer:
        trainer.train(resume_from_checkpoint=resume and str(resume))
    return weights_of(trainer), logs_of(trainer), trainer.state


def test_a_run_goes_on_from_a_checkpoint_with_the_same_bits(tmp_path):
    given = {"options": {"save_strategy": "steps", "save_steps": 3}, "pipeline": CHOSEN}
    whole = trained(PipelineTrainer, tmp_path / "run", **given)
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [
        "checkpoint-3", "checkpoint-6", "checkpoint-8",
    ]  # fmt: skip
    resume = tmp_path / "run" / "checkpoint-6"
    again = trained(PipelineTrainer, tmp_path / "again", resume, **given)
    same(whole[0], again[0])
    assert whole[2].global_step == again[2].global_step
    loaded = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "run" / "checkpoint-8")
    same(whole[0], {**loaded.state_dict()})


@pytest.mark.processes
def test_a_killed_worker_changes_no_bit(tmp_path):
    def kills(model, state, seen, given):
        if state.global_step == 5 and not seen:
            seen.append("killed")
            kill(trainer.pipe, "worker-1")

    given = {"model": gpt2(), "options": {"eval_strategy": "epoch", "warmup_steps": 2}}
    given["pipeline"] = {**CHOSEN, "workers": "local", "recovery": Recovery(max_restarts=1)}
    with trainer_of(
        PipelineTrainer, tmp_path, callbacks=[Calls([], on_step_end=kills)], **given
    ) as trainer:
        trainer.train()
        assert len(trainer.pipe.restarts) == 1
    same(trained(PipelineTrainer, tmp_path, pipeline=CHOSEN)[0], weights_of(trainer))


def test_evaluation_prediction_and_metrics(tmp_path):
    def metrics(found):
        logits, labels = found
        return {"accuracy": float((logits.argmax(-1)[:, :-1] == labels[:, 1:]).mean())}

    events = []

    def does(cls):
        with trainer_of(
            cls, tmp_path / cls.__name__, model=gpt2().eval(), evaluated=rows(7),
            compute_metrics=metrics, pipeline={"observe": Observe(to=[events.append])},
        ) as trainer:  # fmt: skip
            values = trainer.evaluate()
            predicted = trainer.predict(rows(3)).predictions
            return values["eval_loss"], values["eval_accuracy"], predicted

    loss, accuracy, _ = as_plain(does)
    (told,) = [event for event in events if isinstance(event, Evaluated)]
    assert (told.values["loss"], told.values["accuracy"]) == (loss, accuracy)


class OwnLoss(PipelineTrainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        return (2 * loss, outputs) if return_outputs else 2 * loss


class OwnOptimizer(PipelineTrainer):
    def create_optimizer(self, *args):
        if self.optimizer is None:
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=self.args.learning_rate)
        return self.optimizer


@pytest.fixture(scope="module")
def at_once(tmp_path_factory):
    """The weights of a training that nothing comes before, of a class at a rate."""

    @functools.cache
    def weights(cls, rate):
        folder = tmp_path_factory.mktemp("at-once")
        options = {"num_train_epochs": 1, "learning_rate": rate}
        with trainer_of(cls, folder, model=gpt2(), pipeline=CHOSEN, options=options) as trainer:
            trainer.train()
        return weights_of(trainer)

    return weights


@pytest.mark.parametrize(
    ("first", "cls", "rate", "starts"),
    [
        ("evaluate", PipelineTrainer, 1e-2, 1),
        ("evaluate", OwnLoss, 1e-2, 1),
        ("pipe", PipelineTrainer, 1e-2, 1),
        ("close", PipelineTrainer, 1e-2, 2),
        ("evaluate", PipelineTrainer, 3e-2, 2),  # set after the evaluation, so it counts
        ("evaluate", OwnOptimizer, 1e-2, 2),  # which may depend on more than is known before
        ("predict without labels", PipelineTrainer, 1e-2, 2),
    ],
)
def test_a_training_goes_on_with_the_workers_of_an_evaluation_before_it_and_with_its_bits(
    first, cls, rate, starts, at_once, tmp_path, monkeypatch
):
    expected, opened = at_once(cls, rate), []
    monkeypatch.setattr(
        trainer_module, "Pipeline", lambda *a, **k: opened.append(Pipeline(*a, **k)) or opened[-1]
    )
    options = {"num_train_epochs": 1}
    with trainer_of(cls, tmp_path, model=gpt2(), pipeline=CHOSEN, options=options) as trainer:
        if first == "pipe":
            assert trainer.pipe is trainer.pipe
        elif first == "predict without labels":
            trainer.predict([{"input_ids": row["input_ids"]} for row in rows(3)])
        else:
            trainer.evaluate()
            assert trainer.optimizer is None  # as of a plain Trainer
        if first == "close":
            trainer.close()
        trainer.args.learning_rate = rate
        trainer.train()
        assert trainer.optimizer.param_groups[0]["initial_lr"] == rate
        assert len(opened) == starts
    same(expected, weights_of(trainer))


def test_an_evaluation_alone_asks_for_nothing_that_only_a_training_needs(tmp_path, monkeypatch):
    corrected = {"corrections": [WeightPrediction()]}
    with trainer_of(PipelineTrainer, tmp_path, model=gpt2(), pipeline=corrected) as trainer:
        monkeypatch.setattr(WeightPrediction, "require_fit", refused)
        assert trainer.evaluate()["eval_loss"] > 0
        with pytest.raises(ConfigError, match="not for this optimizer"):
            trainer.train()


def refused(self, optimizer, group):
    raise ConfigError("not for this optimizer")


def test_callbacks_may_stop_a_run_and_the_best_model_is_loaded(tmp_path):
    def stops(model, state, seen, given):
        given["control"].should_training_stop = state.global_step >= 5

    options = {**EVALUATED, **SAVED, "load_best_model_at_end": True}
    weights, logs, state = trained(
        PipelineTrainer, tmp_path, callbacks=[Calls([], on_step_end=stops)], options=options,
        pipeline=CHOSEN,
    )  # fmt: skip
    assert 5 <= state.global_step < 8
    best = json.loads(
        (tmp_path / f"checkpoint-{state.best_global_step}/trainer_state.json").read_text()
    )
    assert best["best_metric"] == min(e["eval_loss"] for e in logs if "eval_loss" in e)
    saved = transformers.GPT2LMHeadModel.from_pretrained(state.best_model_checkpoint)
    same(weights, {**saved.state_dict()})


def test_adapters_are_trained_and_saved_alone(tmp_path):
    peft = pytest.importorskip("peft", reason="needs the extra hf")
    config = peft.LoraConfig(r=2, target_modules=["c_attn"], lora_dropout=0.0, fan_in_fan_out=True)

    def does(cls):
        torch.manual_seed(5)
        model = peft.get_peft_model(gpt2(), config)
        base = {n: p.clone() for n, p in model.named_parameters() if not p.requires_grad}
        options = {"eval_strategy": "epoch"}
        with trainer_of(cls, tmp_path / cls.__name__, model=model, options=options) as trainer:
            trainer.train()
            trainer.save_model(tmp_path / f"adapter-{cls.__name__}")
            same(base, {n: p.data for n, p in model.named_parameters() if not p.requires_grad})
        return peft.get_peft_model_state_dict(model), logs_of(trainer)

    as_plain(does)
    names = {path.name for path in (tmp_path / "adapter-PipelineTrainer").iterdir()}
    assert "adapter_model.safetensors" in names
    assert "model.safetensors" not in names


def test_a_dataset_of_datasets_and_a_collator(tmp_path):
    datasets = pytest.importorskip("datasets", reason="needs the extra hf")
    data = datasets.Dataset.from_list([{"input_ids": row["input_ids"].tolist()} for row in rows()])

    def collate(items):
        ids = torch.tensor([item["input_ids"] for item in items])
        return {"input_ids": ids, "labels": ids.clone()}

    def does(cls):
        options = {"eval_strategy": "no"}
        given = {"train": data, "data_collator": collate, "options": options}
        return trained(cls, tmp_path / cls.__name__, **given)[:2]

    as_plain(does)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "give PipelineTrainer the number of stages"),
        ({"stages": 2, "optimizer": 1}, "optimizer of the pipeline is what the Trainer makes"),
    ],
    ids=str,
)
def test_what_cannot_be_done_is_refused_by_name(tmp_path, given, message):
    with pytest.raises(ConfigError, match=message):
        PipelineTrainer(
            model=gpt2(), args=arguments(tmp_path), train_dataset=rows(), pipeline=given
        )


def test_a_run_of_a_plain_trainer_goes_on_from_its_checkpoint(tmp_path):
    """With its weights, what its optimizer keeps and its schedule."""
    options = {"save_strategy": "steps", "save_steps": 6}
    whole = trained(Trainer, tmp_path / "plain", model=llama(), options=options)
    checkpoint = tmp_path / "plain" / "checkpoint-6"
    found = trained(PipelineTrainer, tmp_path / "ours", checkpoint, model=llama(), options=options)
    same(whole[0], found[0])


def test_generation_in_the_evaluation_of_a_seq2seq_trainer(tmp_path):
    def does(cls):
        torch.manual_seed(0)
        model = transformers.T5ForConditionalGeneration(
            transformers.T5Config(
                d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, vocab_size=32,
                decoder_start_token_id=0, dropout_rate=0.0, eos_token_id=1, pad_token_id=0,
            )
        )  # fmt: skip
        args = Seq2SeqTrainingArguments(
            str(tmp_path / cls.__name__), num_train_epochs=1, per_device_train_batch_size=4,
            report_to=[], use_cpu=True, save_strategy="no", disable_tqdm=True, learning_rate=1e-2,
            predict_with_generate=True, generation_max_length=6, eval_strategy="epoch",
        )  # fmt: skip
        seen = []
        trainer = cls(
            model=model, args=args, train_dataset=rows(), eval_dataset=rows(6, 2),
            compute_metrics=lambda found: seen.append(found.predictions) or {},
            **({} if cls is Seq2SeqTrainer else {"pipeline": FLUSHED}),
        )  # fmt: skip
        trainer.train()
        seen.append(trainer.predict(rows(3, seed=4), max_length=5).predictions)
        if cls is not Seq2SeqTrainer:
            trainer.close()
        return seen

    assert len(as_plain(does, Seq2SeqTrainer)) == 3


@pytest.mark.filterwarnings("ignore")
def test_the_example_saves_adapters_and_a_report(tmp_path, capsys):
    for package in ("peft", "datasets"):
        pytest.importorskip(package, reason="needs the extra hf")
    options = ["--stages=2", "--workers=serial", "--steps=4", "--out", tmp_path / "out"]
    run_example("trainer_lora.py", [*options, "--report", tmp_path / "report.html"])
    assert "evaluated: " in capsys.readouterr().out
    assert (tmp_path / "out" / "adapter_model.safetensors").exists()
    assert not (tmp_path / "out" / "model.safetensors").exists()
    assert "Where the time goes" in (tmp_path / "report.html").read_text()
