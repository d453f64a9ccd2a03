"""Generation of tokens: the loop of transformers, whose forwards the stages do."""

import pytest
import torch
from support.hf import MODELS, SMALL, ids, made, opened, plainly, squares
from support.inside import kill
from support.oracle import assert_same

from pipedream_rt import Checkpoints
from pipedream_rt.coordinator.text_generation import _GenerateCall
from pipedream_rt.errors import ConfigError, StageFailed

transformers = pytest.importorskip("transformers", reason="needs the extra hf")

PROMPT = torch.tensor([[5, 3, 9, 2, 60], [1, 33, 7, 7, 21]])
NEW = {"max_new_tokens": 9, "eos_token_id": None, "pad_token_id": 0, "use_cache": True}


@pytest.mark.thinned(3)
@pytest.mark.threads
@pytest.mark.parametrize("name", ["gpt2", "llama", "qwen"])
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
        "stages": 3, "workers": "serial" if killed_at is None else "local", "seed": 1,
        "schedule": "async-1f1b", "max_restarts": 1, "checkpoint": Checkpoints(folder, every=2),
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


def test_a_text_has_the_tokens_of_the_model_and_no_others():
    call = _GenerateCall(None, 0, iter(()), transformers.LlamaConfig(**SMALL))
    call._refuse_inputs({"input_ids": torch.tensor([[0, 63]])})
    for wrong in (-1, 64):
        with pytest.raises(ConfigError, match=f"has the tokens 0 to 63, and is given {wrong}$"):
            call._refuse_inputs({"input_ids": torch.tensor([[0, wrong]])})


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


def opened_with(model, **options):
    example = {"input_ids": PROMPT}
    return opened(model, [PROMPT], stages=3, loss_fn=squares, example=example, **options)


@pytest.mark.threads
def test_classes_of_ones_own_generate_as_they_are_or_are_refused():
    plain = of_class(LooksAtLength).eval()
    with opened_with(of_class(LooksAtLength)) as pipe:
        for _ in range(2):
            assert torch.equal(pipe.generate(PROMPT, **NEW), plain.generate(PROMPT, **NEW))
    with opened_with(of_class(OwnWeights)) as pipe:
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
    with opened_with(of_class(transformers.LlamaForCausalLM)) as pipe:
        with pytest.raises(ZeroDivisionError):
            pipe.generate(PROMPT, stopping_criteria=[stop], **NEW)
        with pytest.raises(ConfigError, match="has the tokens 0 to 63, and is given 64"):
            pipe.generate(PROMPT + 4, **NEW)
        with pytest.raises(ConfigError, match="the scores: leave output_attentions out"):
            pipe.generate(PROMPT, output_attentions=True, return_dict_in_generate=True, **NEW)
        guided = {**NEW, "guidance_scale": 1.5}  # a second text beside each, with its own cache
        assert torch.equal(pipe.generate(PROMPT, **guided), plain.generate(PROMPT, **guided))


class FailsOnce(torch.nn.Module):
    """A norm that raises in its third forward in eval mode, in the middle of a text."""

    def __init__(self, norm):
        super().__init__()
        self.norm, self.calls = norm, 0

    def forward(self, x):
        self.calls += not self.training
        if self.calls == 3:
            raise KeyError("third")
        return self.norm(x)


@pytest.mark.threads
def test_an_error_of_a_layer_ends_the_text_and_not_the_run():
    plain, model = (of_class(transformers.LlamaForCausalLM).eval() for _ in range(2))
    model.model.norm = FailsOnce(model.model.norm)
    with opened_with(model, max_restarts=2) as pipe:
        with pytest.raises(StageFailed, match="KeyError: 'third'"):
            pipe.generate(PROMPT, **NEW)
        assert not pipe.restarts
        assert not pipe._group.feed.log._holds
        assert torch.equal(pipe.generate(PROMPT, **NEW), plain.generate(PROMPT, **NEW))


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
        assert len(list(pipe.train_epoch(data))) == len(data)
    data = MODELS["t5"][1]()
    encoder = pytest.raises(ConfigError, match="has an encoder")
    with opened(made("t5"), data, stages=2) as pipe, encoder:
        pipe.generate(ids(1, 3), **NEW)
