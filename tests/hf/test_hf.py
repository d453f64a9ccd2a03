"""Models of Hugging Face's transformers, as they are, on several stages."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support import whole
from support.deadlines import LATEST_S
from support.device.references import computed_on_the_device
from support.faults import losses_through_death
from support.inside import kill
from support.oracle import assert_same
from support.pinned import Pipeline

from pipedream_rt import Checkpoints, without_values
from pipedream_rt.errors import ConfigError

tqdm = pytest.importorskip("tqdm").tqdm
transformers = pytest.importorskip("transformers", reason="needs the extra hf")
tqdm.monitor_interval = 0  # its thread outlives the files that a test reads

SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
}
# A pipeline trains without the cache of generation, which moves some bits of the plain model too.
NO_CACHE = {"use_cache": False}


def gpt2(drop=0.0):
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=64, n_positions=32, n_embd=32, n_layer=4, n_head=2,
            resid_pdrop=drop, embd_pdrop=drop, attn_pdrop=drop, **NO_CACHE,
        )
    )  # fmt: skip


def llama(drop=0.0, tied=True):
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            **SMALL,
            **NO_CACHE,
            num_key_value_heads=1,
            tie_word_embeddings=tied,
            attention_dropout=drop,
        )
    )


def qwen(drop=0.0):
    return transformers.Qwen3ForCausalLM(
        transformers.Qwen3Config(
            **SMALL, num_key_value_heads=1, head_dim=16, attention_dropout=drop,
            tie_word_embeddings=False, **NO_CACHE,
        )
    )  # fmt: skip


def bert(drop=0.0):
    return transformers.BertForMaskedLM(
        transformers.BertConfig(
            **SMALL, max_position_embeddings=32,
            hidden_dropout_prob=drop, attention_probs_dropout_prob=drop,
        )
    )  # fmt: skip


def vit(drop=0.0):
    sizes = {name: size for name, size in SMALL.items() if name != "vocab_size"}
    return transformers.ViTForImageClassification(
        transformers.ViTConfig(
            **sizes, image_size=16, patch_size=4,
            hidden_dropout_prob=drop, attention_probs_dropout_prob=drop,
        )
    )  # fmt: skip


def t5(drop=0.0):
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            vocab_size=64, d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2,
            dropout_rate=drop, decoder_start_token_id=0, pad_token_id=0, **NO_CACHE,
        )
    )  # fmt: skip


def ids(count, length):
    return torch.randint(1, 64, (count, length))


def texts(masked=False, targets=0):
    """Four mini-batches of two lengths; the second half of some texts may be padding."""
    torch.manual_seed(5)
    batches = []
    for length in (10, 7, 10, 10):
        batch = {"input_ids": ids(4, length)}
        if masked:
            keep = torch.ones(4, length, dtype=torch.long)
            keep[:2, length // 2 :] = 0
            # The last mini-batch has no padding, which the model looks at.
            batch["attention_mask"] = keep if len(batches) < 3 else torch.ones_like(keep)
        batch["labels"] = ids(4, targets) if targets else batch["input_ids"]
        batches.append(batch)
    return batches


def pictures():
    torch.manual_seed(6)
    return [
        {"pixel_values": torch.randn(4, 3, 16, 16), "labels": torch.randint(2, (4,))}
        for _ in range(4)
    ]


MODELS = {
    "gpt2": (gpt2, lambda: texts(masked=True)),
    "llama": (llama, texts),
    "qwen": (qwen, lambda: texts(masked=True)),
    "bert": (bert, lambda: texts(masked=True)),
    "vit": (vit, pictures),
    "t5": (t5, lambda: texts(targets=6)),
}
ADAMW = (torch.optim.AdamW, {"lr": 0.01})


@pytest.fixture(params=MODELS)
def name(request):
    return request.param


def made(name, **kwargs):
    torch.manual_seed(0)
    torch.set_num_threads(1)
    return MODELS[name][0](**kwargs)


def opened(model, data, **kwargs):
    kwargs = {"workers": "serial", "schedule": "1f1b", "example": data[0], **kwargs}
    return Pipeline(model, optimizer=ADAMW, **kwargs)


@computed_on_the_device
def plainly(model, data, epochs=1):
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=0.01), []
    model.train()
    for batch in data * epochs:
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.thinned(2)
@pytest.mark.threads
def test_it_trains_to_the_bits_of_plain_pytorch(name):
    """Tied embeddings, masks that the model looks at, and encoders with decoders among them."""
    data = MODELS[name][1]()
    plain = made(name)
    losses = plainly(plain, data)
    for stages in (1, 3, 4):
        with opened(made(name), data, stages=stages) as pipe:
            assert [r.loss for r in pipe.train_epoch(data)] == losses
            assert_same(pipe.state_dict(), plain.state_dict())


def padded(batches):
    """The same with labels of -100, by which models know what does not count."""
    for number, batch in enumerate(batches):
        labels = batch["labels"].clone()
        if labels.dim() > 1:
            labels[0, 1:] = labels[1, number + 2 :] = -100
        else:
            labels[:number] = -100
        batch["labels"] = labels
    return batches


@pytest.mark.thinned(3)
@pytest.mark.parametrize("k", [1, 2, 4])
def test_padded_labels_weigh_nothing(name, k):
    """The gradient is that of plain PyTorch, and so is what an evaluation returns."""
    data, plain = padded(MODELS[name][1]()), made(name)
    start = {n: t for n, t in made(name).state_dict().items() if t.is_floating_point()}
    losses = plainly(plain, data)
    with torch.no_grad():
        whole_losses = [plain.eval()(**batch).loss.item() for batch in data]
    with opened(made(name), data, stages=3, workers="serial", micro_batches=k) as pipe:
        found = [r.loss for r in pipe.train_epoch(data)]
        if k == 1:
            assert found == losses
            assert_same(pipe.state_dict(), plain.state_dict())
        assert found == pytest.approx(losses, rel=1e-4)
        trained, expected = pipe.state_dict(), plain.state_dict()
        off = sum(float((trained[key] - expected[key]).norm() ** 2) for key in start)
        moved = sum(float((start[key] - expected[key]).norm() ** 2) for key in start)
        assert off <= 1e-4 * moved
        labels = [
            _counted(batch["labels"], shifted=name in ("gpt2", "llama", "qwen")) for batch in data
        ]
        mean = sum(n * loss for n, loss in zip(labels, whole_losses, strict=True)) / sum(labels)
        assert pipe.evaluate(data) == pytest.approx(mean, rel=1e-4)


def _counted(labels, shifted):
    """The number of labels that count; a causal model predicts none for the first token."""
    return int(((labels[:, 1:] if shifted else labels) != -100).sum())


@pytest.mark.thinned(2)
@pytest.mark.threads
def test_with_dropout_the_number_of_stages_does_not_matter(name):
    data, found = MODELS[name][1](), []
    for stages in (1, 2, 4):
        with opened(made(name, drop=0.1), data, stages=stages) as pipe:
            losses = [r.loss for r in pipe.train_epoch(data)]
            found.append((losses, pipe.evaluate(data), pipe.state_dict()))
    for losses, evaluated, weights in found[1:]:
        assert losses == found[0][0]
        assert evaluated == found[0][1]
        assert_same(weights, found[0][2])


@pytest.mark.threads
def test_asynchronous_training_equals_the_oracle(name):
    data = MODELS[name][1]() * 2
    with opened(made(name, drop=0.1), data, stages=4, schedule="async-1f1b") as pipe:
        model = made(name, drop=0.1)
        stage_of = {
            key: [
                stage
                for stage, names in enumerate(pipe.plan.layers)
                if any(key == each or key.startswith(f"{each}.") for each in names)
            ]
            for key, _ in model.named_parameters(remove_duplicate=False)
        }
        names = [each for names in pipe.plan.layers for each in names]
        layers = list(dict.fromkeys(n for n in names if n in dict(model.named_modules())))
        weights, losses = whole.oracle(
            model.train(), stage_of, layers, data, lambda output, _: output.loss,
            lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
        )  # fmt: skip
        assert [r.loss for r in pipe.train_epoch(data)] == losses
        assert_same(pipe.state_dict(), weights)


@pytest.mark.processes
@pytest.mark.parametrize(
    "name",
    [
        "gpt2",
        "t5",
        *(
            pytest.param(each, marks=pytest.mark.stress)
            for each in ("llama", "qwen", "bert", "vit")
        ),
    ],
    indirect=True,
)
def test_it_survives_a_worker_and_goes_back_into_the_plain_model(name, tmp_path):
    data = MODELS[name][1]() * 2
    plain = made(name)
    losses = plainly(plain, data)
    kept = Checkpoints(tmp_path / "run", every=3)
    with opened(
        made(name), data, stages=3, workers="local", checkpoint=kept, max_restarts=1
    ) as pipe:
        found = losses_through_death(pipe, data, "worker-2", step=4)
        assert found == losses
        assert len(pipe.restarts) == 1
        model = pipe.module().eval()
        assert_same(model.state_dict(), plain.state_dict())
        model.save_pretrained(tmp_path / "folder")
        batch = data[0]
        with torch.no_grad():
            assert torch.equal(pipe(**batch).logits, plain.eval()(**batch).logits)
    again = type(model).from_pretrained(tmp_path / "folder")
    assert_same(again.state_dict(), plain.state_dict())


def squares(output, batch):
    return output.logits.square().mean()


@pytest.mark.threads
def test_split_points_by_name_and_its_own_example():
    """The model brings an example itself, so with a loss_fn none need be given."""
    model = made("llama")
    points = ["model.layers.1", "model.norm"]
    options = {"stages": points, "loss_fn": squares, "example": None}
    data = [{"input_ids": batch["input_ids"]} for batch in texts()]
    with opened(model, data, **options) as pipe:
        assert pipe.plan.layers[1] == ("model.layers.1", "model.layers.2", "model.layers.3")
        result = next(iter(pipe.train_epoch(data)))
    expected = made("llama")(**data[0]).logits.square().mean().item()
    assert result.loss == expected
    with pytest.raises(ConfigError, match=r"no module 'model.layer.1'; did you mean 'model.layers"):
        opened(model, texts(), stages=["model.layer.1"])


@pytest.mark.threads
def test_inputs_that_the_example_did_not_have_go_from_stage_to_stage():
    """The example has no mask and no positions, so only the first stage takes inputs."""
    plain, data = made("llama"), texts(masked=True)
    for batch in data:
        batch["position_ids"] = torch.arange(batch["input_ids"].shape[1]).flip(0).unsqueeze(0)
        del batch["labels"]
    optimizer, losses = torch.optim.AdamW(plain.parameters(), lr=0.01), []
    for batch in data:
        optimizer.zero_grad()
        loss = squares(plain(**batch), batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    with opened(made("llama"), data, stages=4, loss_fn=squares, example=None) as pipe:
        assert pipe.plan.entries == (0,)
        assert [r.loss for r in pipe.train_epoch(data)] == losses
        assert_same(pipe.state_dict(), plain.state_dict())


@pytest.mark.threads
def test_without_labels_there_is_no_loss_of_its_own():
    data = [{"input_ids": ids(2, 5)}]
    with pytest.raises(ConfigError, match="what the model returns has no loss"):
        opened(made("llama"), data, stages=2)
    with opened(
        made("llama"), data, stages=2, loss_fn=lambda output, batch: output.logits.mean()
    ) as pipe:
        expected = made("llama").eval()(**data[0]).logits.mean().item()
        assert pipe.evaluate(data) == pytest.approx(expected, abs=1e-6)  # of about 0.1 each


# -- weights from a folder -----------------------------------------------------------------------


@pytest.mark.processes
@pytest.mark.parametrize("name", ["gpt2", "t5"], indirect=True)
def test_each_worker_reads_its_part_of_a_folder(name, tmp_path):
    """The model has no values in the script; the files are shards; tied weights are there once."""
    data = MODELS[name][1]()
    plain = made(name)
    plain.save_pretrained(tmp_path, max_shard_size="20KB")
    losses = plainly(plain, data)
    with without_values():
        model = type(plain)(plain.config)
    assert all(p.is_meta for p in model.parameters())
    with opened(model, data, stages=3, workers="local", weights=tmp_path, max_restarts=1) as pipe:
        found = losses_through_death(pipe, data, "worker-2", step=1)
        assert found == losses
        assert len(pipe.restarts) == 1
        back = pipe.module()
        assert_same(back.state_dict(), plain.state_dict())
        assert back.get_output_embeddings().weight is back.get_input_embeddings().weight


@pytest.mark.processes
def test_the_example_saves_a_folder_that_generates_the_same_sample(tmp_path):
    script = Path(__file__).parents[2] / "examples" / "finetune_transformers.py"
    small = ["--stages=3", "--layers=3", "--width=32", "--steps=4", "--micro-batches=2"]
    for more in ([], ["--weights", tmp_path / "one"]):
        out = ["--workers=serial", "--out", tmp_path / "one"]
        command = [sys.executable, script, *small, *out, *more]
        done = subprocess.run(command, capture_output=True, text=True, timeout=LATEST_S)
        assert done.returncode == 0, done.stderr
        assert done.stdout.endswith("loaded by transformers: True\n"), done.stdout


# -- generation ---------------------------------------------------------------------------------

PROMPT = torch.tensor([[5, 3, 9, 2, 60], [1, 33, 7, 7, 21]])
NEW = {"max_new_tokens": 9, "eos_token_id": None, "pad_token_id": 0, "use_cache": True}


@pytest.mark.thinned(3)
@pytest.mark.threads
@pytest.mark.parametrize("name", ["gpt2", "llama", "qwen"], indirect=True)
def test_it_generates_the_tokens_of_the_plain_model(name):
    """Greedy, sampled, with padding, and without a cache; twice, as programs are kept."""
    data = MODELS[name][1]()
    plain = made(name)
    plainly(plain, data)
    plain.eval()
    padded = torch.ones_like(PROMPT)
    padded[0, :2] = 0
    ways = [
        {"do_sample": False},
        {"do_sample": True, "top_k": 20, "temperature": 0.8},
        {"do_sample": True, "attention_mask": padded},
        {"do_sample": False, "use_cache": False},
    ]
    with opened(made(name), data, stages=3, schedule="1f1b") as pipe:
        list(pipe.train_epoch(data))
        for way in ways * 2:
            torch.manual_seed(4)
            expected = plain.generate(PROMPT, **{**NEW, **way})
            torch.manual_seed(4)
            assert torch.equal(pipe.generate(PROMPT, **{**NEW, **way}), expected), way


def generated_beside_training(folder, killed_at):
    """Losses, the tokens that weights of the start give, and evaluations of the average."""
    data, losses = MODELS["gpt2"][1](), []
    options = {
        "stages": 3, "workers": "local", "schedule": "async-1f1b", "max_restarts": 1, "seed": 1,
        "checkpoint": Checkpoints(folder, every=2),
    }  # fmt: skip
    with opened(made("gpt2"), data, ema=0.9, **options) as pipe:

        def results():
            for result in pipe.train_epoch(data * 4):
                losses.append(result.loss)
                if result.step == killed_at:
                    kill(pipe, "worker-1")
                yield result

        under_way = results()
        with pipe.keep_version() as version:
            torch.manual_seed(4)
            tokens = pipe.generate(PROMPT, version=version, beside=under_way, do_sample=True, **NEW)
            assert 6 < pipe.step < len(data) * 4
            assert_same(pipe.module(version=version).state_dict(), made("gpt2").state_dict())
            list(under_way)
        with pipe.keep_version(ema=True) as version:
            average = pipe.evaluate(data, version=version), pipe.state_dict(version=version)
        assert len(pipe.restarts) == (killed_at is not None)
        return losses, tokens, average


@pytest.mark.processes
def test_a_kept_version_generates_while_training_goes_on_and_a_worker_dies(tmp_path):
    losses, tokens, average = generated_beside_training(tmp_path / "whole", None)
    plain = made("gpt2").eval()
    torch.manual_seed(4)
    assert torch.equal(plain.generate(PROMPT, do_sample=True, **NEW), tokens)
    again = generated_beside_training(tmp_path / "killed", 6)
    assert again[0] == losses
    assert torch.equal(again[1], tokens)
    assert again[2][0] == average[0]
    assert_same(again[2][1], average[1])


class LooksAtLength(transformers.LlamaForCausalLM):
    """Its way depends on the number of tokens in the cache, with a threshold of its own."""

    def forward(self, input_ids=None, past_key_values=None, position_ids=None, **kwargs):
        kwargs.pop("attention_mask", None)
        output = super().forward(input_ids, None, position_ids, past_key_values, **kwargs)
        if past_key_values is not None and past_key_values.get_seq_length() > 11:
            output.logits = output.logits.flip(-1)
        return output


class OwnWeights(transformers.LlamaForCausalLM):
    """Computes the embeddings before a forward."""

    def prepare_inputs_for_generation(self, input_ids, **kwargs):
        inputs = super().prepare_inputs_for_generation(input_ids, **kwargs)
        inputs["inputs_embeds"] = self.model.embed_tokens(inputs.pop("input_ids"))
        return inputs


def of_class(cls):
    torch.manual_seed(0)
    return cls(transformers.LlamaConfig(**SMALL, num_key_value_heads=1, initializer_range=0.3))


@pytest.mark.threads
def test_classes_of_ones_own_generate_as_they_are_or_are_refused():
    options = {"stages": 3, "loss_fn": squares, "example": {"input_ids": PROMPT}}
    plain = of_class(LooksAtLength).eval()
    with opened(of_class(LooksAtLength), [PROMPT], **options) as pipe:
        for _ in range(2):
            assert torch.equal(pipe.generate(PROMPT, **NEW), plain.generate(PROMPT, **NEW))
    with opened(of_class(OwnWeights), [PROMPT], **options) as pipe:
        with pytest.raises(ConfigError, match="calls the forward with inputs_embeds on the meta"):
            pipe.generate(PROMPT, **NEW)
        with pytest.raises(ConfigError, match=r"failed on a tensor without values \(.* meta "):
            pipe.generate(PROMPT.to("meta"), **NEW)
        assert pipe(input_ids=PROMPT).logits.shape == (2, 5, 64)


@pytest.mark.threads
def test_two_caches_at_a_time_and_errors_on_the_way_leave_the_pipeline_usable():
    def stop(ids, scores, **kwargs):
        raise ZeroDivisionError

    plain = of_class(transformers.LlamaForCausalLM).eval()
    options = {"stages": 3, "loss_fn": squares, "example": {"input_ids": PROMPT}}
    with opened(of_class(transformers.LlamaForCausalLM), [PROMPT], **options) as pipe:
        with pytest.raises(ZeroDivisionError):
            pipe.generate(PROMPT, stopping_criteria=[stop], **NEW)
        with pytest.raises(ConfigError, match="has the tokens 0 to 63, and is given 64"):
            pipe.generate(PROMPT + 4, **NEW)
        with pytest.raises(ConfigError, match="the scores: leave output_attentions out"):
            pipe.generate(PROMPT, output_attentions=True, return_dict_in_generate=True, **NEW)
        guided = {
            **NEW,
            "guidance_scale": 1.5,
        }  # a second text beside each, with a cache of its own
        assert torch.equal(pipe.generate(PROMPT, **guided), plain.generate(PROMPT, **guided))


@pytest.mark.threads
def test_what_generation_does_not_do_is_refused():
    data = MODELS["llama"][1]()
    with opened(made("llama"), data, stages=2) as pipe:
        with pytest.raises(ConfigError, match="one sequence for each text; give num_beams=1"):
            pipe.generate(ids(1, 3), num_beams=2, **NEW)
        with pytest.raises(ConfigError, match=r"needs weights that stay: give\sversion="):
            pipe.generate(ids(1, 3), beside=pipe.train_epoch(data), **NEW)
        filled = made("llama").eval()(ids(1, 2), use_cache=True).past_key_values
        assert filled.get_seq_length() == 2
        with pytest.raises(ConfigError, match="holds what another model has computed"):
            pipe.generate(ids(1, 3), past_key_values=filled, **NEW)
        with pytest.raises(ConfigError, match=r"give training=Training\(ema=0\.999"):
            pipe.keep_version(ema=True)
        version = pipe.keep_version()
        pipe.load_state_dict(pipe.state_dict())
        with pytest.raises(ConfigError, match=r"made before load\(\) or load_state_dict\(\)"):
            pipe.evaluate(data, version=version)
        version.drop()
        with pytest.raises(ConfigError, match="was dropped"):
            pipe.evaluate(data, version=version)
        assert len(list(pipe.train_epoch(data))) == len(data)
    data = MODELS["t5"][1]()
    with (
        opened(made("t5"), data, stages=2) as pipe,
        pytest.raises(ConfigError, match="has an encoder"),
    ):
        pipe.generate(ids(1, 3), **NEW)
