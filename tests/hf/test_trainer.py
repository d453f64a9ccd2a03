"""`PipelineTrainer`: what a Trainer does, done by a pipeline."""

import json

import pytest
import torch
from support.examples import run_example
from support.inside import kill

from pipedream_rt import ConfigError, Observe, Pipeline, Recovery
from pipedream_rt.corrections import WeightPrediction

transformers = pytest.importorskip("transformers", reason="needs the extra hf")
pytest.importorskip("accelerate", reason="needs the extra hf")

from support.trainers import FLUSHED, as_plain, calm, llama, rows  # noqa: E402, F401 - a fixture
from transformers import (  # noqa: E402
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from pipedream_rt.hf import PipelineMixin, PipelineTrainer  # noqa: E402
from pipedream_rt.hf import trainer as trainer_module  # noqa: E402
from pipedream_rt.observers import Evaluated  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning"),
]


def gpt2():
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            n_layer=2, n_embd=16, n_head=2, vocab_size=32, n_positions=16,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        )
    )  # fmt: skip


def data_of(count, seed=1):
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randint(32, (12,), generator=generator) for _ in range(count)]
    return [{"input_ids": row, "labels": row.clone()} for row in rows]


DATA = data_of(24)


def arguments(folder, **options):
    given = {
        "num_train_epochs": 2, "per_device_train_batch_size": 4, "learning_rate": 1e-2,
        "logging_steps": 3, "eval_strategy": "epoch", "save_strategy": "no", "report_to": [],
        "use_cpu": True, "disable_tqdm": True, "warmup_steps": 2, "max_grad_norm": 0.0,
        "seed": 3,
    }  # fmt: skip
    return TrainingArguments(str(folder), **{**given, **options})


def trained(cls, folder, resume=None, model=None, callbacks=(), pipeline=None, **options):
    extra = {} if cls is Trainer else {"pipeline": pipeline or SYNCHRONOUS}
    trainer = cls(
        model=model or gpt2(), args=arguments(folder, **options), train_dataset=DATA,
        eval_dataset=data_of(6, seed=2), callbacks=list(callbacks), **extra,
    )  # fmt: skip
    try:
        trainer.train(resume_from_checkpoint=resume)
        logs = [
            {k: v for k, v in entry.items() if "second" not in k and "runtime" not in k}
            for entry in trainer.state.log_history
        ]
        weights = {name: value.clone() for name, value in trainer.model.state_dict().items()}
        return weights, logs, trainer.state
    finally:
        if cls is not Trainer:
            trainer.close()


SYNCHRONOUS = {"stages": 2, "schedule": "1f1b", "micro_batches": 1, "workers": "serial"}
ASYNCHRONOUS = {"stages": 2, "workers": "serial"}


def assert_equal(one, other):
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


def test_a_run_goes_on_from_a_checkpoint_with_the_same_bits(tmp_path):
    options = {"save_strategy": "steps", "save_steps": 4, "pipeline": ASYNCHRONOUS}
    whole = trained(PipelineTrainer, tmp_path / "run", **options)
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [
        "checkpoint-12", "checkpoint-4", "checkpoint-8",
    ]  # fmt: skip
    again = trained(
        PipelineTrainer,
        tmp_path / "again",
        resume=str(tmp_path / "run" / "checkpoint-8"),
        **options,
    )
    assert_equal(whole[0], again[0])
    assert whole[2].global_step == again[2].global_step
    loaded = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "run" / "checkpoint-12")
    assert_equal(whole[0], loaded.state_dict())


@pytest.mark.processes
def test_a_killed_worker_changes_no_bit(tmp_path):
    class Kills(TrainerCallback):
        """Kills a worker once."""

        trainer = None
        done = False

        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 5 and self.trainer is not None and not self.done:
                self.done = True
                kill(self.trainer.pipe, "worker-1")

    ends = []
    for disturbed in (False, True):
        killer = Kills()
        trainer = PipelineTrainer(
            model=gpt2(), args=arguments(tmp_path / str(disturbed)), train_dataset=DATA,
            eval_dataset=DATA[:4], callbacks=[killer],
            pipeline={
                "stages": 2, "workers": "local" if disturbed else "serial",
                "recovery": Recovery(max_restarts=1),
            },
        )  # fmt: skip
        killer.trainer = trainer if disturbed else None
        trainer.train()
        assert len(trainer.pipe.restarts) == disturbed
        trainer.close()
        ends.append(trainer.model.state_dict())
    assert_equal(*ends)


def test_evaluation_prediction_and_metrics(tmp_path):
    def metrics(found):
        logits, labels = found
        return {"accuracy": float((logits.argmax(-1)[:, :-1] == labels[:, 1:]).mean())}

    found, events = [], []
    observed = {"pipeline": {**SYNCHRONOUS, "observe": Observe(to=[events.append])}}
    for cls, extra in ((Trainer, {}), (PipelineTrainer, observed)):
        trainer = cls(
            model=gpt2().eval(), args=arguments(tmp_path / cls.__name__), train_dataset=DATA,
            eval_dataset=DATA[:7], compute_metrics=metrics, **extra,
        )  # fmt: skip
        values = trainer.evaluate()
        predicted = trainer.predict(DATA[:3])
        found.append((values["eval_loss"], values["eval_accuracy"], predicted.predictions))
        if extra:
            trainer.close()
    (told,) = [event for event in events if isinstance(event, Evaluated)]
    assert (told.values["loss"], told.values["accuracy"]) == found[0][:2]
    assert found[0][:2] == found[1][:2]
    assert (found[0][2] == found[1][2]).all()


class OwnLoss(PipelineTrainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        return (2 * loss, outputs) if return_outputs else 2 * loss


class OwnOptimizer(PipelineTrainer):
    def create_optimizer(self, *args):
        if self.optimizer is None:
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=self.args.learning_rate)
        return self.optimizer


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
    first, cls, rate, starts, tmp_path, monkeypatch
):
    opened = []
    monkeypatch.setattr(
        trainer_module, "Pipeline", lambda *a, **k: opened.append(Pipeline(*a, **k)) or opened[-1]
    )
    ends = []
    for early in (False, True):
        opened.clear()
        trainer = cls(
            model=gpt2(), args=arguments(tmp_path, eval_strategy="no"), train_dataset=DATA,
            eval_dataset=DATA[:3], pipeline=ASYNCHRONOUS,
        )  # fmt: skip
        if early and first == "pipe":
            assert trainer.pipe is trainer.pipe
        elif early and first == "predict without labels":
            trainer.predict([{"input_ids": row["input_ids"]} for row in DATA[:3]])
        elif early:
            trainer.evaluate()
            assert trainer.optimizer is None  # as of a plain Trainer
        if early and first == "close":
            trainer.close()
        trainer.args.learning_rate = rate
        trainer.train()
        assert trainer.optimizer.param_groups[0]["initial_lr"] == rate
        if early:
            assert len(opened) == starts
        trainer.close()
        ends.append(trainer.model.state_dict())
    assert_equal(*ends)


def test_an_evaluation_alone_asks_for_nothing_that_only_a_training_needs(tmp_path, monkeypatch):
    trainer = PipelineTrainer(
        model=gpt2(), args=arguments(tmp_path), train_dataset=DATA, eval_dataset=DATA[:3],
        pipeline={**SYNCHRONOUS, "corrections": [WeightPrediction()]},
    )  # fmt: skip
    monkeypatch.setattr(WeightPrediction, "require_fit", refused)
    assert trainer.evaluate()["eval_loss"] > 0
    with pytest.raises(ConfigError, match="not for this optimizer"):
        trainer.train()
    trainer.close()


def refused(self, optimizer, group):
    raise ConfigError("not for this optimizer")


def test_callbacks_may_stop_a_run_and_the_best_model_is_loaded(tmp_path):
    class Stops(TrainerCallback):
        """Stops a run after some steps."""

        def on_step_end(self, args, state, control, **kwargs):
            control.should_training_stop = state.global_step >= 7

    options = {
        "eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2,
        "load_best_model_at_end": True, "pipeline": ASYNCHRONOUS,
    }  # fmt: skip
    weights, logs, state = trained(PipelineTrainer, tmp_path, callbacks=[Stops()], **options)
    assert 7 <= state.global_step < 12
    best = json.loads(
        (tmp_path / f"checkpoint-{state.best_global_step}/trainer_state.json").read_text()
    )
    assert best["best_metric"] == min(e["eval_loss"] for e in logs if "eval_loss" in e)
    saved = transformers.GPT2LMHeadModel.from_pretrained(state.best_model_checkpoint)
    assert_equal(weights, saved.state_dict())


def test_adapters_are_trained_and_saved_alone(tmp_path):
    peft = pytest.importorskip("peft", reason="needs the extra hf")
    config = peft.LoraConfig(r=2, target_modules=["c_attn"], lora_dropout=0.0, fan_in_fan_out=True)
    ends = []
    for cls, extra in ((Trainer, {}), (PipelineTrainer, {"pipeline": SYNCHRONOUS})):
        torch.manual_seed(5)
        model = peft.get_peft_model(gpt2(), config)
        base = {n: p.clone() for n, p in model.named_parameters() if not p.requires_grad}
        trainer = cls(model=model, args=arguments(tmp_path / cls.__name__), train_dataset=DATA,
                      eval_dataset=DATA[:4], **extra)  # fmt: skip
        trainer.train()
        trainer.save_model(tmp_path / f"adapter-{cls.__name__}")
        assert_equal(base, {n: p for n, p in model.named_parameters() if not p.requires_grad})
        ends.append(peft.get_peft_model_state_dict(model))
        if extra:
            trainer.close()
    assert_equal(*ends)
    names = {path.name for path in (tmp_path / "adapter-PipelineTrainer").iterdir()}
    assert "adapter_model.safetensors" in names
    assert "model.safetensors" not in names


def test_a_dataset_of_datasets_and_a_collator(tmp_path):
    datasets = pytest.importorskip("datasets", reason="needs the extra hf")
    rows = [{"input_ids": row["input_ids"].tolist()} for row in DATA]
    data = datasets.Dataset.from_list(rows)

    def collate(items):
        ids = torch.tensor([item["input_ids"] for item in items])
        return {"input_ids": ids, "labels": ids.clone()}

    ends = []
    for cls, extra in ((Trainer, {}), (PipelineTrainer, {"pipeline": SYNCHRONOUS})):
        trainer = cls(model=gpt2(), args=arguments(tmp_path / cls.__name__, eval_strategy="no"),
                      train_dataset=data, data_collator=collate, **extra)  # fmt: skip
        trainer.train()
        ends.append(trainer.model.state_dict())
        if extra:
            trainer.close()
    assert_equal(*ends)


@pytest.mark.parametrize(
    ("options", "given", "message"),
    [
        ({}, {}, "give PipelineTrainer the number of stages"),
        ({}, {"stages": 2, "optimizer": 1}, "optimizer of the pipeline is what the Trainer makes"),
    ],
    ids=str,
)
def test_what_cannot_be_done_is_refused_by_name(tmp_path, options, given, message):
    with pytest.raises(ConfigError, match=message):
        PipelineTrainer(
            model=gpt2(),
            args=arguments(tmp_path, eval_strategy="no", **options),
            train_dataset=DATA,
            pipeline=given,
        )


def test_a_run_of_a_plain_trainer_goes_on_from_its_checkpoint(tmp_path):
    """With its weights, what its optimizer keeps and its schedule."""
    options = {"save_strategy": "steps", "save_steps": 6}
    whole = trained(Trainer, tmp_path / "plain", model=llama(), **options)
    checkpoint = tmp_path / "plain" / "checkpoint-6"
    found = trained(
        PipelineTrainer, tmp_path / "ours", model=llama(), resume=str(checkpoint), **options
    )
    assert_equal(whole[0], found[0])


def test_generation_in_the_evaluation_of_a_seq2seq_trainer(tmp_path):
    class Piped(PipelineMixin, Seq2SeqTrainer):
        """A Seq2SeqTrainer over a pipeline."""

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
            **({"pipeline": FLUSHED} if cls is Piped else {}),
        )  # fmt: skip
        trainer.train()
        seen.append(trainer.predict(rows(3, seed=4), max_length=5).predictions)
        if cls is Piped:
            trainer.close()
        return seen

    assert len(as_plain(does, Seq2SeqTrainer, Piped)) == 3


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
