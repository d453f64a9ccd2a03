"""A loss of whole mini-batches on the last stage, beside plain PyTorch: one loss of all outputs."""

import copy
import functools
import math
import os
import signal

import pytest
import torch
import torch.nn.functional as F
from support.pinned import Flat as Pipeline
from torch import nn

from pipedream_rt import Checkpoints, Clip, ConfigError, LossScale, Recovery, StageFailed, Training
from pipedream_rt.batches.items import Accumulated, batch_of
from pipedream_rt.batches.weighing import is_known_mean
from pipedream_rt.job.defaults import of_loss_by
from pipedream_rt.job.options import Layout, Options
from pipedream_rt.messages.head import OfLoss
from pipedream_rt.schedules import plan_for
from pipedream_rt.stage.whole_loss import mean_of_said

SIZES = (16, 13, 16, 3, 1, 16)  # some leave micro-batches empty, one has a single sample
DATA = [
    (x, torch.arange(len(x)))
    for x in torch.randn(sum(SIZES), 8, generator=torch.Generator().manual_seed(2)).split(SIZES)
]


def model(dropout=0.0):
    torch.manual_seed(0)
    middle = nn.Dropout(dropout) if dropout else nn.Tanh()
    return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 32), middle, nn.Linear(32, 16))


def contrastive(output, y):
    """Compares all samples with each other; of fewer it cannot be computed."""
    features = F.normalize(output, dim=1)
    return F.cross_entropy(features @ features.T / 0.1, y)


def added_up(output, y):
    return (output.sum(1) - y).pow(2).sum()


def correlation(output, y):
    one, other = output.sum(1), y.float()
    return 1 - F.cosine_similarity(one - one.mean(), other - other.mean(), dim=0)


class Head(nn.Module):
    """A loss with weights of its own."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.out = nn.Linear(16, 4)

    def forward(self, output, y):
        return contrastive(self.out(output), y)


def plainly(loss_fn, k, data=DATA, clip=None):
    """Train in plain PyTorch: forwards of micro-batches, one loss, their backwards in order."""
    trained, loss_fn = model(), copy.deepcopy(loss_fn)
    weights = [*trained.parameters()]
    if isinstance(loss_fn, nn.Module):
        weights += loss_fn.parameters()
    optimizer, losses = torch.optim.AdamW(weights, lr=1e-2), []
    for x, y in data:
        optimizer.zero_grad()
        outputs = [trained(part) for part in x.chunk(k)]
        joined = torch.cat([each.detach() for each in outputs]).requires_grad_()
        loss = loss_fn(joined.mul(1), y)  # no leaf, which torch lets nobody change
        loss.backward()
        losses.append(loss.item())
        for output, gradient in zip(outputs, joined.grad.split([len(each) for each in outputs])):
            output.backward(gradient)
        if clip is not None:
            nn.utils.clip_grad_norm_(weights, clip)
        optimizer.step()
    own = loss_fn.state_dict() if isinstance(loss_fn, nn.Module) else {}
    return losses, trained.state_dict() | own


def opened(loss_fn, made=None, **options):
    """A pipeline that decides by itself what is not said."""
    loss_fn = copy.deepcopy(loss_fn) if isinstance(loss_fn, nn.Module) else loss_fn
    defaults = {
        "stages": 2, "schedule": None, "workers": "serial", "micro_batches": None,
        "optimizer": (torch.optim.AdamW, {"lr": 1e-2}),
    }  # fmt: skip
    return Pipeline(made or model(), loss_fn=loss_fn, **{**defaults, **options})


def assert_same(found, expected):
    losses, state = found
    assert losses == expected[0]
    for (name, value), other in zip(state.items(), expected[1].values(), strict=True):
        assert torch.equal(value, other), name


def trained(loss_fn, data=DATA, **options):
    with opened(loss_fn, **options) as pipe:
        losses = [result.loss for result in pipe.train_epoch(data)]
        own = pipe.loss_module().state_dict() if isinstance(loss_fn, nn.Module) else {}
        return losses, pipe.state_dict() | own


WHOLE = Training(loss="whole")


@pytest.mark.parametrize(
    ("loss_fn", "workers"),
    [
        *((loss_fn, "serial") for loss_fn in (contrastive, correlation, added_up)),
        *((Head(), workers) for workers in ("serial", "local")),
    ],
)
def test_a_loss_that_is_no_mean_is_computed_of_the_whole_by_itself(loss_fn, workers, caplog):
    caplog.set_level("INFO", "pipedream_rt")
    data = [DATA[i] for i in (0, 1, 2, 5)]  # a correlation needs two samples
    assert_same(trained(loss_fn, data, workers=workers), plainly(loss_fn, 8, data))
    assert caplog.text.count('chosen: loss="whole"') == 1


@pytest.mark.parametrize("k", [2, 4, 16])
@pytest.mark.parametrize("loss_fn", [contrastive, Head()])
def test_it_has_the_bits_of_plain_pytorch(loss_fn, k):
    found = trained(loss_fn, micro_batches=k, training=WHOLE)
    assert_same(found, plainly(loss_fn, k))


@pytest.mark.parametrize("option", [{"recompute": True}, {"verify": True}, {"check_loss": 0}])
def test_other_options_change_no_bit_of_it(option):
    training = Training(loss="whole", **option)
    found = trained(contrastive, stages=3, micro_batches=4, training=training)
    assert_same(found, plainly(contrastive, 4))


def test_gradients_are_clipped_as_those_of_one_loss():
    training = Training(loss="whole", clip=Clip(norm=0.01))
    _, found = trained(contrastive, micro_batches=4, training=training)
    expected = plainly(contrastive, 4, clip=0.01)[1]
    assert max((found[n] - value).abs().max() for n, value in expected.items()) < 1e-6


def test_a_scaled_loss_is_scaled_once():
    scale = LossScale(init_scale=1024.0, growth_interval=1000)
    training = Training(loss="whole", loss_scale=scale)
    found = trained(contrastive, micro_batches=4, training=training)
    expected = plainly(contrastive, 4)
    assert found[0] == pytest.approx(expected[0], rel=1e-5)


@pytest.mark.parametrize("schedule", ["1f1b", "async-1f1b", "zero-bubble"])
def test_with_one_micro_batch_every_schedule_has_the_whole(schedule):
    losses, _ = trained(
        contrastive, schedule=schedule, micro_batches=1, training=WHOLE, corrections=()
    )
    assert losses[0] == plainly(contrastive, 1, DATA[:1])[0][0]


def ignores_some(output, y):
    """No label of the first micro-batch counts, so the mean of these is NaN."""
    return F.cross_entropy(output, torch.where(y < 2, -100, y))


def works_in_place(output, y):
    return output.sub_(y[:, None]).square_().sum()


def asks_for_a_gradient(output, y):
    (gradient,) = torch.autograd.grad(output.square().sum(), output, create_graph=True)
    return (output.sum(1) - y).pow(2).sum() + gradient.mean()


@pytest.mark.parametrize("loss_fn", [ignores_some, works_in_place, asks_for_a_gradient])
def test_what_micro_batches_cannot_tell_is_of_the_whole(loss_fn):
    data = [DATA[0]] * 3
    assert_same(trained(loss_fn, data), plainly(loss_fn, 8, data))


def test_a_loss_of_the_whole_that_raises_is_no_error_of_a_part():
    def loss_fn(output, y):
        return output.nothing

    with pytest.raises(StageFailed, match="no attribute 'nothing'") as caught:
        trained(loss_fn)
    assert "samples of mini-batch" not in str(caught.value)


class WithMean(nn.Module):
    """Returns its output and a number beside it, which cannot be joined."""

    def __init__(self):
        super().__init__()
        self.layers = model()

    def forward(self, x):
        output = self.layers(x)
        return output, output.square().mean()


def flat():
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Flatten(0))


@pytest.mark.parametrize(
    ("made", "loss_fn", "options", "words"),
    [
        (
            *(WithMean, lambda output, y: output[1] * 2, {"example": DATA[0]}),
            'name a schedule, as schedule="1f1b"',
        ),
        (
            *(flat, lambda output, y: output.sum(), {"micro_batches": 4, "training": WHOLE}),
            'micro_batches=1, schedule="gpipe"',
        ),
    ],
    ids=["by default", "asked for"],
)
def test_outputs_that_nobody_can_join_are_refused_with_what_to_do(made, loss_fn, options, words):
    pipe = opened(loss_fn, made(), **options)
    with pipe, pytest.raises(StageFailed, match=words):
        list(pipe.train_epoch(DATA[:1]))


def test_a_mean_is_computed_of_micro_batches_as_if_nobody_had_asked():
    def mean(output, y):
        return (output.sum(1) - y).pow(2).mean()

    with opened(mean) as pipe:
        assert (pipe.plan.name, pipe.plan.per_update) == ("gpipe", 8)
        found = [(r.loss, r.losses) for r in pipe.train_epoch(DATA)], pipe.state_dict()
    with opened(mean, schedule="1f1b", micro_batches=8) as pipe:
        expected = [(r.loss, r.losses) for r in pipe.train_epoch(DATA)], pipe.state_dict()
    assert_same(found, expected)


def test_parts_of_a_loss_and_metrics_are_those_of_the_whole():
    def loss_fn(output, y):
        return {"loss": contrastive(output, y), "size": output.abs().sum()}

    metrics = {"samples": lambda output, y: len(y)}
    with opened(loss_fn, micro_batches=4, training=WHOLE) as pipe:
        (result,) = pipe.train_epoch(DATA[:1], metrics=metrics)
        assert result.metrics["samples"] == 16
        assert len(result.losses) == 1
        assert result.losses[0] == result.loss
        assert result.metrics["size"] == pytest.approx(model()(DATA[0][0]).abs().sum().item())


def test_a_mean_with_parts_has_their_means_in_the_mini_batch_that_decides():
    def loss_fn(output, y):
        return {"loss": output.pow(2).mean(), "size": output.abs().mean()}

    metrics = {"samples": lambda output, y: len(y)}
    with opened(loss_fn) as pipe:
        for result, (x, _) in zip(pipe.train_epoch(DATA[:2], metrics=metrics), DATA):
            sizes = [len(part) for part in x.chunk(8)]
            expected = sum(n * n for n in sizes) / sum(sizes)
            assert result.metrics["samples"] == pytest.approx(expected)
            assert result.metrics["size"] > 0


def test_a_run_that_goes_on_knows_what_its_first_mini_batch_has_decided(tmp_path, caplog):
    caplog.set_level("INFO", "pipedream_rt")
    loss_fn, data = added_up, [DATA[0]] * 6
    expected = trained(loss_fn, data)
    with opened(loss_fn, checkpoint=Checkpoints(tmp_path / "run")) as pipe:
        list(pipe.train_epoch(data[:3]))
        pipe.save()
    caplog.clear()
    options = {"checkpoint": Checkpoints(tmp_path / "run", resume=True)}
    with opened(loss_fn, **options) as pipe:
        # A mini-batch of zeros, which would say nothing of the loss, is where it begins.
        losses = [pipe.submit(*each).result().loss for each in data[3:]]
        assert_same((losses, pipe.state_dict()), (expected[0][3:], expected[1]))
    assert "chosen: loss" not in caplog.text


@pytest.mark.parametrize("after", [0, 3])
def test_a_killed_worker_costs_no_bit_of_it(after):
    data = [DATA[0]] * 6
    options = {"workers": "local", "recovery": Recovery(max_restarts=1)}
    with opened(added_up, **options) as pipe:
        victim, losses = pipe.on_stages(lambda module: os.getpid())[-1], []
        for step, (x, y) in enumerate(data):
            if step == after:
                os.kill(victim, signal.SIGKILL)
            losses.append(pipe.submit(x, y).result().loss)
        found = losses, pipe.state_dict()
        assert len(pipe.restarts) == 1
    assert_same(found, plainly(added_up, 8, data))


def test_an_evaluation_has_the_loss_of_whole_mini_batches():
    with opened(contrastive) as pipe:
        first = pipe.evaluate(DATA[:1])
        list(pipe.train_epoch(DATA))
    assert first == plainly(contrastive, 1, DATA[:1])[0][0]


def test_verify_computes_it_of_the_whole_too():
    with opened(contrastive) as pipe:
        assert pipe.verify(DATA[:2], steps=2)
        list(pipe.train_epoch(DATA))
        assert pipe.verify(DATA[:2], steps=2)
        assert pipe._run.feeder.decision.whole is True


def test_random_layers_are_verified_with_a_loss_of_the_whole(caplog):
    caplog.set_level("INFO", "pipedream_rt.verify")
    training = Training(loss="whole", verify=True)
    with opened(contrastive, model(dropout=0.5), micro_batches=4, training=training) as pipe:
        list(pipe.train_epoch(DATA[:1]))
    assert "is what plain PyTorch computes, in 7 values" in caplog.text


# -- a loss that the model computes ---------------------------------------------------------------


class Words(nn.Module):
    """Returns its outputs and the mean loss over the targets that count, as many GPTs do."""

    def __init__(self, reduction="mean"):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.out = nn.Embedding(20, 16), nn.Linear(16, 20)
        self.layers = nn.ModuleList([nn.Linear(16, 16) for _ in range(2)])
        self.reduction = reduction

    def forward(self, words, targets=None):
        x = self.embed(words)
        for layer in self.layers:
            x = x + layer(x).tanh()
        logits = self.out(x)
        if targets is None:
            return logits, None
        given = {"ignore_index": -1, "reduction": self.reduction}
        return logits, F.cross_entropy(logits.view(-1, 20), targets.view(-1), **given)


def second(output, y):
    return output[1]


def words(samples=16):
    torch.manual_seed(3)
    found = torch.randint(20, (samples, 12))
    counts = torch.arange(12) < torch.randint(1, 12, (samples, 1))
    targets = torch.where(counts, (found * 3 + 1) % 20, -1)
    return (found, targets), {}, targets


def words_trained(made, **options):
    item, sgd = words(), (torch.optim.SGD, {"lr": 0.1})
    with opened(second, made, example=item, optimizer=sgd, **options) as pipe:
        losses = [result.loss for result in pipe.train_epoch([item] * 3)]
        return losses, pipe.state_dict(), pipe.plan


def words_plainly(made):
    optimizer = torch.optim.SGD(made.parameters(), lr=0.1)
    (found, targets), _, _ = words()
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = made(found, targets)[1]
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
    return losses, made.state_dict()


def test_micro_batches_weigh_by_the_labels_that_count_in_the_model():
    losses, state, plan = words_trained(Words())
    expected, weights = words_plainly(Words())
    assert losses == pytest.approx(expected, rel=1e-5)
    assert all(torch.allclose(state[name], value, atol=1e-6) for name, value in weights.items())
    assert (plan.name, plan.per_update) == ("1f1b", 8)


def test_a_loss_of_the_model_that_adds_up_has_whole_mini_batches_by_itself(caplog):
    caplog.set_level("INFO", "pipedream_rt")
    losses, state, _plan = words_trained(Words("sum"))
    expected, weights = words_plainly(Words("sum"))
    assert losses == expected
    assert all(torch.equal(state[name], value) for name, value in weights.items())
    assert "chosen: whole mini-batches, of which the model computes its loss" in caplog.text
    assert "no mean over samples" in caplog.text


@pytest.mark.parametrize("options", [{"schedule": "1f1b"}, {"micro_batches": 4}], ids=str)
def test_where_something_is_asked_for_it_is_refused_with_the_way_out(options):
    with pytest.raises(ConfigError, match='micro_batches=1, schedule="gpipe"'):
        words_trained(Words("sum"), **{"micro_batches": 8, **options})


# -- what is chosen, and refused ------------------------------------------------------------------


def of_loss(loss_fn, optimizer=torch.optim.AdamW, **options):
    return of_loss_by(Options(loss_fn=loss_fn, **options), optimizer)


def test_a_loss_of_torch_is_known_and_others_are_not():
    for known in (
        F.cross_entropy, F.mse_loss, nn.MSELoss(), nn.CTCLoss(), F.binary_cross_entropy_with_logits,
        functools.partial(F.cross_entropy, label_smoothing=0.1),
    ):  # fmt: skip
        assert is_known_mean(known)
    for other in (
        None, contrastive, nn.MSELoss(reduction="sum"), Head(),
        functools.partial(F.mse_loss, reduction="sum"), functools.partial(contrastive),
    ):  # fmt: skip
        assert not is_known_mean(other)


def test_only_what_was_left_out_is_decided_by_the_first_mini_batch():
    assert of_loss(contrastive) is OfLoss.DECIDE
    assert of_loss(F.mse_loss) is OfLoss.PARTS
    assert of_loss(contrastive, training=WHOLE) is OfLoss.WHOLE
    for options in (
        {"schedule": "gpipe"}, {"micro_batches": 4}, {"corrections": "auto"},
        {"layout": Layout(replicas=2)}, {"layout": Layout(synchronous_updates=1)},
        {"layout": Layout(slack=1)}, {"layout": Layout(stages_per_worker=2)},
        {"training": Training(weigh=len)}, {"training": Training(check_loss=0)},
    ):  # fmt: skip
        assert of_loss(contrastive, **options) is OfLoss.PARTS
    assert of_loss(contrastive, optimizer=None) is OfLoss.PARTS


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "async-1f1b", "zero-bubble"])
@pytest.mark.parametrize("k", [1, 4])
def test_the_outputs_come_first_in_gpipe_and_with_one_micro_batch(name, k):
    plan = plan_for(name, num_stages=2, per_update=k)
    assert plan.outputs_come_first == (name == "gpipe" or k == 1)


def test_forwards_of_another_stage_of_the_worker_are_no_outputs():
    """It does those of stage 1 first: as many as there are micro-batches."""
    plan = plan_for("interleaved-1f1b", num_stages=4, stages_per_worker=2, per_update=2)
    assert not plan.outputs_come_first


def test_replicas_of_the_last_stage_have_a_part_of_the_outputs_each():
    for replicas, first in (((1, 2), False), ((2, 1), True)):
        plan = plan_for("gpipe", num_stages=2, per_update=4, replicas=replicas)
        assert plan.outputs_come_first == first


@pytest.mark.parametrize("schedule", ["1f1b", "async-1f1b"])
def test_a_schedule_that_cannot_wait_is_refused_before_anything_starts(schedule):
    with pytest.raises(ConfigError, match='use schedule="gpipe"'):
        opened(contrastive, schedule=schedule, micro_batches=4, training=WHOLE)


def test_a_loss_of_the_whole_is_an_option_with_one_value():
    with pytest.raises(ConfigError, match='is "whole", or left out'):
        Training(loss=contrastive)


def test_what_is_asked_for_is_refused_with_the_option_that_helps():
    with pytest.raises(StageFailed, match=r'Training\(loss="whole"\)'):
        trained(added_up, schedule="gpipe", micro_batches=4)


def test_an_accumulated_mini_batch_has_no_loss_of_the_whole():
    item = Accumulated([batch_of(DATA[0])] * 2, of=2)
    with opened(contrastive, micro_batches=4, training=WHOLE) as pipe:
        with pytest.raises(ConfigError, match="has a loss for each of its parts"):
            pipe._run.feeder.inject(item)
        list(pipe.train_epoch(DATA[:1]))


def test_a_text_of_a_metric_stays_and_numbers_are_weighed():
    said = [{"a": 1.0, "b": 2.0}, {"a": 3.0, "c": "wrong"}, {"a": math.nan}]
    found = mean_of_said(said, [0.25, 0.75, 0.0])
    assert found == {"a": 2.5, "b": 2.0, "c": "wrong"}
