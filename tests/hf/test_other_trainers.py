"""Trainers that others have written, over a pipeline: those of TRL and of sentence-transformers."""

import random
from types import SimpleNamespace

import pytest
import torch
from support.trainers import FLUSHED, as_plain, llama, logs_of, transformers, weights_of

from pipedream_rt import ConfigError
from pipedream_rt.hf import PipelineMixin
from pipedream_rt.hf.other_trainers import UNDERSTOOD, understood

datasets = pytest.importorskip("datasets", reason="needs the extra hf")

pytestmark = pytest.mark.filterwarnings("ignore")

WORDS = [f"w{i}" for i in range(28)]


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    """No thread that tells others of the run, and no network."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_TELEMETRY", True)
    monkeypatch.setenv("TRL_TELEMETRY", "0")


def tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers

    special = ["<pad>", "<eos>", "<unk>", "<bos>"]
    vocabulary = {word: i for i, word in enumerate([*WORDS, *special])}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>",
        bos_token="<bos>", sep_token="<eos>", cls_token="<bos>",
    )  # fmt: skip


def sentences(count, seed=0):
    generator = random.Random(seed)
    return [" ".join(generator.choices(WORDS, k=generator.randrange(4, 10))) for _ in range(count)]


def options_of(folder, parts):
    return {
        "output_dir": str(folder), "num_train_epochs": 2, "per_device_train_batch_size": 4,
        "report_to": [], "use_cpu": True, "logging_steps": 2, "save_strategy": "no",
        "disable_tqdm": True, "learning_rate": 1e-2, "max_grad_norm": 0.0,
        "eval_strategy": "epoch", "gradient_accumulation_steps": parts,
    }  # fmt: skip


def ended(trainer, cls):
    """Train, and return logs and weights; a pipeline is closed."""
    trainer.train()
    found = logs_of(trainer), weights_of(trainer)
    if issubclass(cls, PipelineMixin):
        trainer.close()
    return found


@pytest.mark.parametrize("parts", [1, 2])
def test_an_sft_trainer_has_the_same_weights_losses_and_metrics_of_evaluations(parts, tmp_path):
    trl = pytest.importorskip("trl", reason="needs trl")
    own = type("Piped", (PipelineMixin, trl.SFTTrainer), {})
    data = datasets.Dataset.from_list([{"text": text} for text in sentences(24)])

    def does(cls):
        options = {**options_of(tmp_path / cls.__name__, parts), "max_length": 16, "bf16": False}
        options |= {"gradient_checkpointing": False}
        trainer = cls(
            model=llama(), args=trl.SFTConfig(**options), train_dataset=data,
            eval_dataset=data.select(range(6)), processing_class=tokenizer(),
            **({"pipeline": {**FLUSHED, "micro_batches": parts}} if cls is own else {}),
        )  # fmt: skip
        logs, weights = ended(trainer, cls)
        of_training = ("entropy", "mean_token_accuracy", "num_tokens", "eval_num_tokens")
        return [{k: v for k, v in row.items() if k not in of_training} for row in logs], weights

    logs, _ = as_plain(does, trl.SFTTrainer, own)
    assert any("eval_mean_token_accuracy" in row for row in logs)


def preferences():
    columns = zip(sentences(16), sentences(16, 1), sentences(16, 2), strict=True)
    rows = [{"prompt": a, "chosen": b, "rejected": c} for a, b, c in columns]
    return datasets.Dataset.from_list(rows)


def of_trl(trl, kind, folder, parts, pipeline=None, **options):
    """Return what trains a trainer of TRL of a class, and returns logs and weights."""
    given = {
        "SFT": lambda: {
            "model": llama(),
            "train_dataset": datasets.Dataset.from_list([{"text": t} for t in sentences(16)]),
        },
        "DPO": lambda: {
            "model": llama(), "ref_model": llama(), "train_dataset": preferences(),
        },
        "Reward": lambda: {"model": scored(), "train_dataset": preferences()},
    }  # fmt: skip
    fixed = {"max_length": 24, "bf16": False, "gradient_checkpointing": False}

    def does(cls):
        made = given[kind]()
        args = {**options_of(folder / cls.__name__, parts), **fixed, **options}
        if args.get("precompute_ref_log_probs"):
            del made["ref_model"]
        if issubclass(cls, PipelineMixin):
            made["pipeline"] = {"stages": 2, "workers": "serial", **(pipeline or {})}
        trainer = cls(
            args=getattr(trl, f"{kind}Config")(**args), processing_class=tokenizer(),
            eval_dataset=made["train_dataset"].select(range(6)), **made,
        )  # fmt: skip
        return ended(trainer, cls)

    return does


def scored():
    """A model with a reward for each row."""
    torch.manual_seed(0)
    return transformers.LlamaForSequenceClassification(
        transformers.LlamaConfig(
            hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, vocab_size=32, max_position_embeddings=32, num_labels=1,
            pad_token_id=28,
        )
    )  # fmt: skip


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("SFT", {"loss_type": "dft"}),
        ("DPO", {}),
        ("DPO", {"loss_type": ["ipo"], "max_grad_norm": 0.1}),
        ("DPO", {"precompute_ref_log_probs": True}),
        ("DPO", {"sync_ref_model": True, "ref_model_sync_steps": 2}),
        ("Reward", {}),
    ],
)
def test_trainers_of_trl_whose_loss_is_in_the_script(kind, options, parts, tmp_path):
    trl = pytest.importorskip("trl", reason="needs trl")
    plain = getattr(trl, f"{kind}Trainer")
    own = type("Piped", (PipelineMixin, plain), {})
    as_plain(of_trl(trl, kind, tmp_path, parts, {"micro_batches": parts}, **options), plain, own)


@pytest.mark.parametrize(
    ("kind", "pipeline"), [("DPO", {}), ("Reward", {}), ("Reward", {"micro_batches": 4})]
)
def test_trainers_of_trl_over_batches_that_are_cut(kind, pipeline, tmp_path):
    """Up to rounding; the output of DPO's model has a loss too, so by default it is not cut."""
    trl = pytest.importorskip("trl", reason="needs trl")
    plain = getattr(trl, f"{kind}Trainer")
    own = type("Piped", (PipelineMixin, plain), {})
    does = of_trl(trl, kind, tmp_path, 1, pipeline)
    weights = [does(cls)[1] for cls in (plain, own)]
    for name, value in weights[0].items():
        torch.testing.assert_close(value, weights[1][name], rtol=1e-3, atol=1e-4)


def test_dpo_whose_reference_is_its_model_without_the_adapter_is_refused(tmp_path):
    trl = pytest.importorskip("trl", reason="needs trl")
    peft = pytest.importorskip("peft", reason="needs peft")
    own = type("Piped", (PipelineMixin, trl.DPOTrainer), {})
    args = trl.DPOConfig(**options_of(tmp_path, 1), bf16=False)
    with pytest.raises(ConfigError, match="precompute_ref_log_probs=True can be done"):
        own(model=llama(), args=args, train_dataset=preferences(), processing_class=tokenizer(),
            eval_dataset=preferences(), peft_config=peft.LoraConfig(target_modules=["q_proj"]),
            pipeline=FLUSHED)  # fmt: skip


def of_pairs(folder, parts, kind):
    """Return what trains a trainer of a cross encoder of a class; with logs, weights and scores."""
    from sentence_transformers import cross_encoder
    from sentence_transformers.cross_encoder import losses

    pairs = zip(sentences(24), sentences(24, 1), strict=True)
    rows = [{"one": a, "other": b, "label": float(i % 2)} for i, (a, b) in enumerate(pairs)]
    data = datasets.Dataset.from_list(rows)

    def does(cls):
        where = folder / cls.__name__
        torch.manual_seed(0)
        config = transformers.BertConfig(
            hidden_size=16, num_hidden_layers=3, num_attention_heads=2, intermediate_size=32,
            vocab_size=32, max_position_embeddings=32, hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0, num_labels=1,
        )  # fmt: skip
        transformers.BertForSequenceClassification(config).save_pretrained(where / "bert")
        tokenizer().save_pretrained(where / "bert")
        model = cross_encoder.CrossEncoder(str(where / "bert"), device="cpu", num_labels=1)
        ours = {"stages": 2, "workers": "serial", "micro_batches": parts}
        trainer = cls(
            model=model, train_dataset=data, eval_dataset=data.select(range(8)),
            args=cross_encoder.CrossEncoderTrainingArguments(**options_of(where, parts)),
            loss=getattr(losses, kind)(model),
            **({"pipeline": ours} if issubclass(cls, PipelineMixin) else {}),
        )  # fmt: skip
        return (*ended(trainer, cls), model.predict([("w1 w2", "w3")]))

    return does


@pytest.fixture
def one_thread():
    """One thread of torch, as the stages have: the sum over rows of a LayerNorm depends on it."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("parts", [1, 2])
def test_a_trainer_of_cross_encoders(parts, tmp_path):
    of_sentences = pytest.importorskip(
        "sentence_transformers", reason="needs sentence-transformers"
    )
    plain = of_sentences.CrossEncoderTrainer
    own = type("Piped", (PipelineMixin, plain), {})
    as_plain(of_pairs(tmp_path, parts, "BinaryCrossEntropyLoss"), plain, own)


def test_a_loss_of_a_cross_encoder_that_calls_it_several_times_is_refused(tmp_path):
    of_sentences = pytest.importorskip(
        "sentence_transformers", reason="needs sentence-transformers"
    )
    own = type("Piped", (PipelineMixin, of_sentences.CrossEncoderTrainer), {})
    with pytest.raises(ConfigError, match="called a second time with gradients"):
        of_pairs(tmp_path, 1, "MultipleNegativesRankingLoss")(own)


@pytest.mark.parametrize(
    ("kind", "parts"),
    [("CosineSimilarityLoss", 1), ("CosineSimilarityLoss", 2), ("MultipleNegativesRankingLoss", 1)],
)
def test_a_trainer_of_sentence_transformers(kind, parts, tmp_path):
    of_sentences = pytest.importorskip(
        "sentence_transformers", reason="needs sentence-transformers"
    )
    from sentence_transformers import losses, models

    trainers = of_sentences.SentenceTransformerTrainer
    own = type("Piped", (PipelineMixin, trainers), {})
    rows = [
        {"one": one, "other": other, "score": i / 24}
        for i, (one, other) in enumerate(zip(sentences(24), sentences(24, 1), strict=True))
    ]
    data = datasets.Dataset.from_list(rows)
    if kind != "CosineSimilarityLoss":
        data = data.remove_columns(["score"])

    def does(cls):
        folder = tmp_path / cls.__name__
        torch.manual_seed(0)
        config = transformers.BertConfig(
            hidden_size=16, num_hidden_layers=3, num_attention_heads=2, intermediate_size=32,
            vocab_size=32, max_position_embeddings=32, hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )  # fmt: skip
        transformers.BertModel(config).save_pretrained(folder / "bert")
        tokenizer().save_pretrained(folder / "bert")
        words = models.Transformer(str(folder / "bert"))
        model = of_sentences.SentenceTransformer(
            modules=[words, models.Pooling(words.get_word_embedding_dimension())], device="cpu"
        )
        args = of_sentences.SentenceTransformerTrainingArguments(**options_of(folder, parts))
        trainer = cls(
            model=model, args=args, train_dataset=data, eval_dataset=data.select(range(8)),
            loss=getattr(losses, kind)(model),
            **({"pipeline": {**FLUSHED, "micro_batches": parts}} if cls is own else {}),
        )  # fmt: skip
        return (*ended(trainer, cls), model.encode(["w1 w2"]))

    as_plain(does, trainers, own)


def known(name):
    """What is known of a class by its name."""
    return next(each for full, each in UNDERSTOOD.items() if full.endswith(name))


def test_a_class_is_known_by_its_full_name_alone():
    assert understood(type("SFTTrainer", (), {"__module__": "trl.trainer.sft_trainer"}))
    assert understood(type("SFTTrainer", (), {"__module__": "mine"})) is None
    assert understood(type("Own", (), {"__module__": "trl.trainer.sft_trainer"})) is None


@pytest.mark.parametrize(
    ("loss", "of_experts", "expected"),
    [("nll", False, False), ("dft", False, True), ("nll", True, True)],
)
def test_the_last_stage_computes_the_likelihood_alone(loss, of_experts, expected):
    trainer = SimpleNamespace(args=SimpleNamespace(loss_type=loss), aux_loss_enabled=of_experts)
    assert known("SFTTrainer").in_script(trainer) is expected


class OfSentences:
    """What is used of a trainer of sentence-transformers."""

    def __init__(self, loss):
        self.loss, self.model = loss, loss.model

    def collect_features(self, inputs):
        return inputs["features"], inputs["label"]


class Parts(torch.nn.Module):
    """A loss of two parts, which calls its model."""

    def __init__(self):
        super().__init__()
        self.model = torch.nn.Linear(1, 1)
        self.model.model_card_data = "a log of the run"
        self.scale = torch.nn.Parameter(torch.ones(()))

    def forward(self, features, label):
        found = self.scale * self.model(features).sum() - label
        return {"one": found, "other": 2 * found}


def test_the_loss_of_sentences_is_the_sum_of_its_parts_and_trains_the_same_weights():
    trainer = OfSentences(Parts())
    module = known("BaseTrainer").module(trainer)
    found = module(features=torch.ones(1, 1), label=torch.tensor(1.0))
    features, label = torch.ones(1, 1), torch.tensor(1.0)
    assert found["loss"] == sum(trainer.loss(features, label).values())
    assert {*map(id, module.parameters())} == {*map(id, trainer.loss.parameters())}
    assert module.loss.model.model_card_data is None
    assert trainer.model.model_card_data == "a log of the run"


def test_a_loss_for_each_dataset_is_refused():
    assert known("BaseTrainer").unless(SimpleNamespace(loss={"a": 1})) == "a loss for each dataset"
    assert known("BaseTrainer").unless(SimpleNamespace(loss=Parts())) == ""
