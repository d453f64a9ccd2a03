"""Codecs on the edges of a pipeline: the bits of the oracle with the same codec, through kills."""

import dataclasses
import functools
import threading

import pytest
import torch
import torch.nn.functional as F
from support import coded
from support.both import assert_same, learned
from support.faults import FaultySerial, Plan, faulty_sink
from support.inside import finish_checkpoint, kill, pids, stages
from support.models import OPTIMIZERS, POINTS, batches, kitchen_sink
from support.oracle import assert_same as assert_same_weights
from support.oracle import oracle
from support.pinned import Pipeline
from support.small import small
from torch import nn

from pipedream_rt import Checkpoints, Clip, LossScale
from pipedream_rt.codecs import (
    BFloat16,
    ByteCodec,
    Float16,
    GraphCodec,
    Int8,
    Projection,
    TopK,
)
from pipedream_rt.codecs.projection import orthonormal
from pipedream_rt.errors import ConfigError, StageFailed
from pipedream_rt.stage.rules.coding import Coding

pytestmark = pytest.mark.threads

DATA = batches(12, samples=8)


def projected(x):
    if x.shape[-1] != 16:
        return x
    basis = orthonormal(16, 5)
    return x @ basis @ basis.T


CODECS = {
    "bfloat16": (BFloat16(), lambda: coded.in_graph(coded.cast(torch.bfloat16))),
    "float16 of values": (
        Float16("forward"),
        lambda: coded.Packed(coded.cast(torch.float16), "forward"),
    ),
    "int8": (Int8(), lambda: coded.Packed(coded.int8)),
    "int8 with feedback": (Int8(feedback=True), lambda: coded.Packed(coded.int8, feedback=True)),
    "int8 of gradients by channel": (
        Int8("channel", "backward", feedback=True),
        lambda: coded.Packed(functools.partial(coded.int8, dim=0), "backward", feedback=True),
    ),
    "top k": (
        TopK(0.3),
        lambda: coded.Packed(lambda x: coded.largest(x, 0.3), feedback=True),
    ),
    "a projection": (Projection(16, 5), lambda: coded.in_graph(projected)),
    "one edge": (
        {(1, 2): Int8(feedback=True)},
        lambda: coded.Packed(coded.int8, feedback=True, edges=[(1, 2)]),
    ),
}


def opened(codecs, points=4, optimizer="adam", **options):
    given = {
        "stages": POINTS[points][1:], "loss_fn": F.cross_entropy, "workers": "serial",
        "optimizer": OPTIMIZERS[optimizer], "codecs": codecs, **options,
    }  # fmt: skip
    return Pipeline(kitchen_sink(), **given)


def train(codecs, data=DATA, **options):
    with opened(codecs, **options) as pipe:
        return learned(pipe, data)


def expected(cross, points=4, **options):
    make = functools.partial(OPTIMIZERS["adam"][0], **OPTIMIZERS["adam"][1])
    weights, losses = oracle(
        kitchen_sink(), POINTS[points], DATA, F.cross_entropy, make, cross=cross, **options
    )
    return losses, weights


@pytest.mark.thinned(3)
@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize(
    ("schedule", "reads", "k"),
    [("async-1f1b", "async-1f1b", 1), ("async-1f1b", "async-1f1b", 4), ("2bw", "2bw", 4),
     ("1f1b", "flushed", 4), ("zero-bubble", "flushed", 4)],
)  # fmt: skip
def test_they_give_the_bits_of_the_oracle(name, schedule, reads, k):
    codec, cross = CODECS[name]
    found = train(codec, schedule=schedule, micro_batches=k)
    assert_same(found, expected(cross(), k=k, reads=reads))


def test_a_codec_changes_what_is_computed():
    """Else the tests above would show nothing."""
    plain = train(None)[1]["11.weight"]
    for name, (codec, _) in CODECS.items():
        assert not torch.equal(train(codec)[1]["11.weight"], plain), name


@pytest.mark.parametrize("name", ["bfloat16", "int8 with feedback", "a projection"])
def test_on_processes(name):
    codec, cross = CODECS[name]
    assert_same(train(codec, workers="local", micro_batches=2), expected(cross(), k=2))


@pytest.mark.thinned(2)
@pytest.mark.parametrize("replicas", [(2, 1), (1, 3), (3, 2)])
@pytest.mark.parametrize("k", [1, 2, 4])
def test_each_pair_of_replicas_has_its_own_residuals(replicas, k):
    found = train(Int8(feedback=True), points=2, replicas=replicas, micro_batches=k)
    cross = coded.Packed(coded.int8, feedback=True)
    assert_same(found, expected(cross, points=2, replicas=replicas, k=k))


@pytest.mark.parametrize("recompute", [False, True])
def test_two_codecs_of_one_edge(recompute):
    """That of the graph acts first, and what it makes is packed."""
    both = [Projection(16, 5), Int8(feedback=True)]
    found = train(both, recompute=recompute)

    class Both(coded.Packed):
        def __call__(self, edge, value):
            if value.dim() < 2:
                return value
            basis = orthonormal(16, 5)
            fits = value.shape[-1] == 16
            arrives = super().__call__(edge, value @ basis if fits else value)
            return arrives @ basis.T if fits else arrives

    assert_same(found, expected(Both(coded.int8, feedback=True)))


# -- failures, and what is kept -------------------------------------------------------------------


@pytest.mark.thinned(3)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("options", [
    {"micro_batches": 2},
    {"micro_batches": 2, "schedule": "zero-bubble"},
    {"micro_batches": 2, "clip": Clip(norm=0.5), "schedule": "async-1f1b"},
], ids=str)  # fmt: skip
def test_failures_change_no_bit(seed, options, tmp_path):
    """Residuals are those of between two mini-batches, however far a stage was ahead."""
    data = batches(30, samples=8)
    codec = [BFloat16(), Int8(feedback=True)] if seed % 2 else TopK(0.3)
    undisturbed = train(codec, data, optimizer="adamw", **options)
    plan = Plan.random(tmp_path / "faults", seed, 3, 4, ["raise"], ["forward", "backward", "step"])
    model, points, optimizer = faulty_sink(4, plan.folder)
    with Pipeline(
        model, stages=points, loss_fn=F.cross_entropy, optimizer=optimizer, codecs=codec,
        checkpoint=Checkpoints(tmp_path / "run", every=4), max_restarts=10,
        workers=functools.partial(FaultySerial, shuffle_seed=seed), **options,
    ) as pipe:  # fmt: skip
        assert_same(learned(pipe, data), undisturbed)
        assert pipe.restarts


@pytest.mark.parametrize("replicas", [(1, 1), (2, 1), (1, 3)])
def test_a_run_goes_on_from_a_checkpoint(replicas, tmp_path):
    data = batches(20, samples=8)
    options = {"points": 2, "replicas": replicas, "micro_batches": 2}
    codec = Int8(feedback=True)
    losses, weights = train(codec, data, **options)

    def interrupted():
        kept = Checkpoints(tmp_path, every=4, resume=False)
        with opened(codec, checkpoint=kept, **options) as pipe:
            for result in pipe.train_epoch(data):
                if result.step == 9:
                    finish_checkpoint(pipe)
                if result.step == 14:
                    raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    kept = Checkpoints(tmp_path, every=4, resume=True)
    with opened(codec, checkpoint=kept, **options) as pipe:
        assert 0 < pipe.step <= 14
        found = learned(pipe, data)
    assert_same(found, (losses[-len(found[0]) :], weights))


def test_a_killed_worker_changes_no_bit(tmp_path):
    data = batches(40, samples=8)
    codec, losses = Int8(feedback=True), []
    with opened(codec, workers="local", checkpoint=Checkpoints(tmp_path, every=5)) as pipe:
        for result in pipe.train_epoch(data):
            losses.append(result.loss)
            if result.step in (9, 23):
                workers = list(pids(pipe))
                kill(pipe, workers[result.step % len(workers)])
        assert pipe.restarts
        assert_same((losses, pipe.state_dict()), train(codec, data))


def test_after_another_split_the_residuals_of_the_same_edges_go_on(tmp_path):
    """Where the model is cut elsewhere too, the numbers of the stages are others."""
    given = {"codecs": Int8(feedback=True), "schedule": "1f1b"}
    with opened(stages=[5, 9], checkpoint=tmp_path, **given) as pipe:
        list(pipe.train_epoch(DATA))
        pipe.save()
    go_on = Checkpoints(tmp_path, resume=True)
    with opened(stages=[1, 5, 9], checkpoint=go_on, **given) as pipe:
        names = {key.name for key in residuals_of(pipe)}
    assert names == {"4 -> 5", "8 -> 9"}


def test_after_another_split_residuals_of_other_edges_are_left_out(tmp_path):
    with opened(TopK(0.3), stages=[3, 5, 9], checkpoint=tmp_path) as pipe:
        list(pipe.train_epoch(DATA))
        pipe.save()
    go_on = Checkpoints(tmp_path, resume=True)
    with opened(TopK(0.3), stages=[4, 9], checkpoint=go_on) as pipe:
        assert pipe.step == len(DATA)
        list(pipe.train_epoch(DATA))


def test_with_another_optimizer_residuals_go_on(tmp_path):
    given = {"codecs": Int8(feedback=True), "micro_batches": 2}
    with opened(optimizer="sgd", **given) as pipe:
        list(pipe.train_epoch(DATA))
        pipe.save(tmp_path)  # one that is due while another is written is left out
        before = residuals_of(pipe)
    go_on = Checkpoints(tmp_path, resume=True, accept=["optimizer", "hyper_parameters", "groups"])
    with opened(checkpoint=go_on, **given) as pipe:
        found = residuals_of(pipe)
    assert before.keys() == found.keys()
    assert before
    assert all(torch.equal(before[key], found[key]) for key in before)


def residuals_of(pipe):
    """What the stages of a pipeline in this thread keep of their edges."""
    return {
        key: value for stage in stages(pipe) for key, value in stage.rule(Coding).state().items()
    }


# -- what is left as it is ------------------------------------------------------------------------


def test_an_evaluation_has_the_codecs_of_the_graph_alone():
    """What packs bytes belongs to training, and keeps no residual of anything else."""

    def evaluated(codecs, evaluate=True):
        with opened(codecs) as pipe:
            before = pipe.evaluate(DATA) if evaluate else None
            for _ in pipe.train_epoch(DATA):
                if evaluate:
                    pipe.evaluate(DATA[:2])
            return before, pipe.state_dict()

    packed, plain = evaluated(TopK(0.2)), evaluated(None)
    assert packed[0] == plain[0]
    assert evaluated(Projection(16, 2))[0] != plain[0]
    assert_same_weights(packed[1], evaluated(TopK(0.2), evaluate=False)[1])


def test_gradients_that_are_not_finite_skip_their_update():
    scale = LossScale(init_scale=2.0**126)
    losses, state = train(
        Int8(), schedule="1f1b", micro_batches=2, loss_scale=scale, optimizer="sgd"
    )
    assert all(value.isfinite().all() for value in state.values())
    assert losses[0] != losses[-1]
    with pytest.raises(ConfigError, match="another scale"):
        train(TopK(), schedule="1f1b", micro_batches=2, loss_scale=scale)


class Mixed(nn.Module):
    """Its value has hidden states, and beside them what asks for no gradient."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, value):
        x, mask, angle = value if isinstance(value, tuple) else (value, value > 0, value * 0.1)
        return self.linear(x) * mask + angle, mask, angle


class First(nn.Module):
    def forward(self, value):
        return value[0]


def test_only_what_asks_for_a_gradient_is_packed():
    torch.manual_seed(0)
    layers = [Mixed() for _ in range(3)]
    data = [(torch.randn(4, 8), torch.randn(4, 8)) for _ in range(3)]
    with small(nn.Sequential(*layers, First()), codecs=Int8()) as pipe:
        list(pipe.train_epoch(data))
        found = pipe.statistics()[0]
        text = pipe.explain()
    plain = 4 * 8 * (4 + 1 + 4)
    coded_size = plain - 4 * 8 * 3 + 4 * 4
    assert found["packed"] == [[0, 1, "forward", 3, 3 * plain, 3 * coded_size]]
    assert f"{coded_size} B of values in the place of {plain} B, for a micro-batch" in text


# -- bad input ------------------------------------------------------------------------------------


class Transposes(ByteCodec):
    """Gives back another shape, where the last dimension is 16 alone."""

    def pack(self, tensor):
        return (tensor.clone(),)

    def unpack(self, parts, shape, dtype):
        return parts[0].T if shape[-1] == 16 else parts[0]


class Whole(GraphCodec):
    """Encodes as what has no gradient."""

    def encode(self, tensor):
        return tensor.int() if tensor.shape[-1] == 16 else tensor.clone()

    def decode(self, coded, shape, dtype):
        return coded.to(dtype)


@dataclasses.dataclass
class Unhashable(Transposes):
    """As a dataclass is that is not frozen; it raises late in a run."""

    places: list = dataclasses.field(default_factory=list)

    def pack(self, tensor):
        self.places.append(1)
        if len(self.places) > 9:
            raise ZeroDivisionError("its own words")
        return (tensor.clone(),)

    def unpack(self, parts, shape, dtype):
        return parts[0]


def test_an_error_of_a_codec_names_it_and_the_edge():
    words = r"from stage \d to stage \d: the codec .*Unhashable.* raised ZeroDivisionErr"
    with pytest.raises(StageFailed, match=words):
        train(Unhashable())


def test_a_codec_that_does_not_pickle_is_named():
    codec = Transposes()
    codec.lock = threading.Lock()
    with pytest.raises(ConfigError, match="the codec Transposes"):
        train(codec)


@pytest.mark.parametrize(
    ("codec", "words"),
    [(Transposes(), "Transposes.* was given a tensor of float32 of shape .* must give back"),
     (Whole(), "Whole.* must encode as a floating-point tensor")],
)  # fmt: skip
def test_what_goes_wrong_in_a_run_names_the_codec_and_the_edge(codec, words):
    with pytest.raises((StageFailed, ConfigError), match=words) as caught:
        train(codec)
    assert "2" in str(caught.value)
    assert "3" in str(caught.value)


# -- residuals ------------------------------------------------------------------------------------


class TwoValues(nn.Module):
    """Gives two tensors, of which a micro-batch uses both or the second alone."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x), self.linear(2 * x)


class UsesSome(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.calls = nn.Linear(4, 4), 0

    def forward(self, value):
        self.calls += 1
        first, second = value
        return self.linear(second if self.calls % 2 else first + second)


class Records(ByteCodec):
    """Loses everything, so that a residual is all that came before at its place."""

    direction, feedback = "backward", True

    def pack(self, tensor):
        return (torch.zeros_like(tensor),)

    def unpack(self, parts, shape, dtype):
        return parts[0]


def test_residuals_stay_with_their_tensor_where_some_have_no_gradient():
    torch.manual_seed(0)
    data = [(torch.randn(2, 4), torch.randn(2, 4)) for _ in range(2)]
    model = nn.Sequential(TwoValues(), UsesSome())
    with small(model, stages=2, codecs=Records(), devices="cpu") as pipe:
        list(pipe.train_epoch(data))
        kept = {key.path[-1]: value for key, value in residuals_of(pipe).items()}
    assert sorted(kept) == [0, 1]
    assert not torch.equal(kept[0], kept[1])
