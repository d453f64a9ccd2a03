"""Models of Hugging Face's transformers, as they are, on several stages."""

import pytest
import torch
from support import whole
from support.examples import run_example
from support.faults import losses_through_death
from support.hf import (
    MODELS,
    ids,
    made,
    opened,
    plainly,
    squares,
    texts,
)
from support.oracle import assert_same

from pipedream_rt import Checkpoints, without_values
from pipedream_rt.errors import ConfigError

transformers = pytest.importorskip("transformers", reason="needs the extra hf")


@pytest.fixture(params=MODELS)
def name(request):
    return request.param


@pytest.mark.thinned(2)
@pytest.mark.threads
def test_it_trains_to_the_bits_of_plain_pytorch(name):
    """Tied embeddings, masks that the model looks at, and encoders with decoders among them."""
    data = MODELS[name][1]()
    plain = made(name)
    losses = plainly(plain, data)
    for stages in (1, 4):
        with opened(made(name), data, stages=stages) as pipe:
            assert [r.loss for r in pipe.train_epoch(data)] == losses
            assert_same(pipe.state_dict(), plain.state_dict())


SOUND = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32,
    "conv_dim": (8, 8), "conv_kernel": (10, 3), "conv_stride": (5, 2),
    "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 2, "vocab_size": 12, "ctc_loss_reduction": "mean",
    "hidden_dropout": 0.0, "attention_dropout": 0.0, "feat_proj_dropout": 0.0,
    "activation_dropout": 0.0, "final_dropout": 0.0,
}  # fmt: skip


def of_sound(kind, **changes):
    torch.manual_seed(7)
    options = {**SOUND, "layerdrop": 0.0, "apply_spec_augment": False, **changes}
    model = getattr(transformers, f"{kind}ForCTC")(
        getattr(transformers, f"{kind}Config")(**options)
    )
    return model, [
        {"input_values": torch.randn(4, 600), "labels": torch.randint(1, 12, (4, 5))}
        for _ in range(3)
    ]


@pytest.mark.parametrize("kind", ["Wav2Vec2", "Hubert"])
def test_a_model_of_sound_trains_with_ctc(kind):
    """Its forward asks for a gradient of its input, and turns cuDNN off around the loss."""
    plain, data = of_sound(kind)
    losses = plainly(plain, data)
    with opened(of_sound(kind)[0], data, stages=2, micro_batches=1) as pipe:
        assert [r.loss for r in pipe.train_epoch(data)] == losses
        assert_same(pipe.state_dict(), plain.state_dict())


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ({"apply_spec_augment": True}, "in _mask_hidden_states .*set apply_spec_augment to False"),
        ({"layerdrop": 0.3}, "were drawn at random.*set layerdrop to 0, in its config"),
        ({"output_hidden_states": True}, "set output_hidden_states, .* to False, in its config"),
    ],
)
def test_what_a_model_of_sound_must_be_without_is_named(option, words):
    model, data = of_sound("Wav2Vec2", **option)
    with pytest.raises(ConfigError, match=words):
        opened(model, data, stages=2).close()


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
    for stages in (1, 3):
        with opened(made(name, drop=0.1), data, stages=stages) as pipe:
            losses = [r.loss for r in pipe.train_epoch(data)]
            found.append((losses, pipe.evaluate(data), pipe.state_dict()))
    (losses, evaluated, weights), others = found
    assert (losses, evaluated) == others[:2]
    assert_same(weights, others[2])


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


@pytest.mark.threads
def test_split_points_by_name_and_its_own_example():
    """The model brings an example itself, so with a loss_fn none need be given."""
    model = made("llama")
    points = ["model.layers.1", "model.norm"]
    options = {"stages": points, "loss_fn": squares, "example": None}
    data = [{"input_ids": batch["input_ids"]} for batch in texts()]
    with opened(model, data, **options) as pipe:
        assert pipe.plan.layers[1] == ("model.layers.1", "model.layers.2")
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
    with (
        opened(made("llama"), data, stages=2) as pipe,
        pytest.raises(ConfigError, match="train_epoch needs a loss on the stages"),
    ):
        pipe.train_epoch(data)
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


@pytest.mark.filterwarnings("ignore")
def test_the_example_saves_a_folder_that_generates_the_same_sample(tmp_path, capsys):
    small = ["--stages=3", "--layers=3", "--width=32", "--steps=4", "--micro-batches=2"]
    for more in ([], [f"--weights={tmp_path}"]):
        options = [*small, "--workers=serial", f"--out={tmp_path}", *more]
        run_example("finetune_transformers.py", options)
        assert capsys.readouterr().out.endswith("loaded by transformers: True\n")
