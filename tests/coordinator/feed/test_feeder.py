"""Mini-batches are fed and losses taken: in training with metrics, in evaluation and inference."""

import functools
import logging
import math

import pytest
import torch
from support.device.references import computed_on_the_device
from support.inside import kill
from support.labelled import classifier, labelled
from support.models import Scale, batches, kitchen_sink, mlp, regression
from support.oracle import assert_same
from support.pinned import Flat as Pipeline
from torch import nn
from torch.nn import functional as F

from pipedream_rt import Checkpoints, ConfigError, Recovery
from pipedream_rt.serial.cluster import SerialCluster

SCHEDULES = ("1f1b", "async-1f1b", "gpipe", "2bw")


def mean_of(output, y):
    return output.mean()


def in_parts(output, y):
    loss = F.mse_loss(output, y)
    return {"loss": loss, "twice": 2 * loss, "plain": 3}


def open_pipe(model=None, loss_fn=F.mse_loss, **options):
    options = {
        "stages": 3, "micro_batches": 3, "workers": "serial", "corrections": (),
        "schedule": "async-1f1b", "optimizer": (torch.optim.SGD, {"lr": 0.05}), **options,
    }  # fmt: skip
    return Pipeline(model or mlp(), loss_fn=loss_fn, **options)


def seen(result):
    return (result.step, result.loss, dict(result.metrics))


@pytest.mark.parametrize(
    ("schedule", "workers"),
    [
        *((schedule, "serial") for schedule in SCHEDULES),
        pytest.param("async-1f1b", "local", marks=pytest.mark.processes),
    ],
)
def test_metrics_are_those_of_their_mini_batch_and_change_nothing(schedule, workers):
    data = regression(6, samples=6)
    with open_pipe(schedule=schedule) as pipe:
        losses = [result.loss for result in pipe.train_epoch(data)]
        expected = pipe.state_dict()
    metrics = {"again": F.mse_loss, "mean": mean_of, "draws": lambda o, y: torch.rand(()) * 0}
    with open_pipe(schedule=schedule, workers=workers) as pipe:
        results = list(pipe.train_epoch(data, metrics=metrics))
        assert_same(pipe.state_dict(), expected)
    assert [result.loss for result in results] == losses
    # The loss, as a metric, is the loss: as of the version that the mini-batch has read.
    assert [result.metrics["again"] for result in results] == losses
    assert all(math.isfinite(result.metrics["mean"]) for result in results)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_loss_may_be_a_dict_with_parts_beside_the_total(schedule):
    data = regression(5, samples=6)
    with open_pipe(schedule=schedule) as pipe:
        losses = [result.loss for result in pipe.train_epoch(data)]
        assert all(result.metrics == {} for result in pipe.train_epoch(data))
        loss, expected = pipe.evaluate(data), pipe.state_dict()
    with open_pipe(loss_fn=in_parts, schedule=schedule) as pipe:
        results = list(pipe.train_epoch(data))
        list(pipe.train_epoch(data))
        assert pipe.evaluate(data) == loss
        found = pipe.evaluate(data, metrics={"mean": mean_of})
        assert_same(pipe.state_dict(), expected)
    assert [result.loss for result in results] == losses
    assert [result.metrics for result in results] == [
        {"twice": 2 * loss, "plain": 3.0} for loss in losses
    ]
    assert found.keys() == {"loss", "twice", "plain", "mean"}
    assert found["twice"] == 2 * loss


@pytest.mark.parametrize(
    ("loss_fn", "words"),
    [
        (lambda o, y: {"loss": F.mse_loss(o, y), "rows": o}, "must be numbers"),
        (
            lambda o, y: {"total": F.mse_loss(o, y)},
            'one element under "loss", it returned NoneType',
        ),
        (lambda o, y: {"loss": o, "a": 1}, 'under "loss", it returned'),
    ],
)
def test_a_dict_that_is_no_loss_is_refused(loss_fn, words):
    with open_pipe(loss_fn=loss_fn) as pipe, pytest.raises(Exception, match=words):
        list(pipe.train_epoch(regression(1)))


def test_a_metric_that_says_no_number_is_told_of_once_and_ends_nothing(caplog):
    with caplog.at_level(logging.WARNING), open_pipe() as pipe:
        results = list(pipe.train_epoch(regression(4), metrics={"rows": lambda o, y: o}))
        list(pipe.train_epoch(regression(1)))
        pipe.state_dict()
    assert all(math.isnan(result.metrics["rows"]) for result in results)
    assert caplog.text.count('the metric "rows" must return a number') == 1
    with open_pipe() as pipe, pytest.raises(ConfigError, match="metrics must be functions"):
        list(pipe.train_epoch(regression(1), metrics={"loss": mean_of}))


@pytest.mark.processes
def test_after_a_kill_and_after_a_resume_they_are_the_same(tmp_path):
    data = regression(12, samples=6)
    options = {"loss_fn": in_parts, "recovery": Recovery(max_restarts=2)}
    with open_pipe(**options) as pipe:
        expected = [seen(r) for r in pipe.train_epoch(data, metrics={"mean": mean_of})]
    found = []
    kept = Checkpoints(tmp_path, every=2)
    with open_pipe(**options, workers="local", checkpoint=kept) as pipe:
        for result in pipe.train_epoch(data, metrics={"mean": mean_of}):
            found.append(seen(result))
            if result.step == 4:
                kill(pipe, "worker-2")
        assert len(pipe.restarts) == 1
    assert found == expected
    # In a checkpoint within an epoch are results that the script had not seen.
    with open_pipe(**options) as pipe:
        epoch = pipe.train_epoch(data, metrics={"mean": mean_of})
        before = [seen(next(epoch)) for _ in range(3)]
        pipe.save(tmp_path / "other")
        epoch.close()
    with open_pipe(**options) as pipe:
        pipe.load(tmp_path / "other")
        after = [seen(r) for r in pipe.train_epoch(data, metrics={"mean": mean_of})]
    assert before + after == expected


def test_a_part_that_some_micro_batches_lack_is_a_mean_over_the_others():
    def loss_fn(output, y):
        loss = F.mse_loss(output, y)
        return {"loss": loss, "rare": 10} if y[0, 0] > 0 else {"loss": loss}

    x, y = torch.randn(6, 8), -torch.ones(6, 8)
    y[0, 0] = 1.0  # of the first of three micro-batches
    with open_pipe(loss_fn=loss_fn) as pipe:
        (result,) = pipe.train_epoch([(x, y)])
        assert result.metrics["rare"] == pytest.approx(10.0)
        assert pipe.evaluate([(x, y)], metrics={})["rare"] == 10.0


def test_metrics_come_with_the_loss():
    def accuracy(output, y):
        return (output.argmax(1) == y).double().mean()

    metrics = {"accuracy": accuracy, "largest": lambda output, y: output.max().item()}
    data = labelled(count=3, ignored=False)
    data[2] = (data[2][0][:4], data[2][1][:4])
    model = classifier()
    hits = sum(int((model(x).argmax(1) == y).sum()) for x, y in data)
    with open_pipe(model, F.cross_entropy) as pipe:
        found = pipe.evaluate(data, metrics=metrics)
        assert list(found) == ["loss", "accuracy", "largest"]
        assert found["accuracy"] == pytest.approx(hits / 20)
        assert found["loss"] == pipe.evaluate(data)
        assert pipe.evaluate(data, metrics={}) == {"loss": found["loss"]}


@pytest.mark.parametrize(
    ("metrics", "words"),
    [
        ({"bad": lambda output, y: 1 / 0}, '"bad" must return a number.*ZeroDivisionError'),
        ({"bad": lambda output, y: output}, '"bad" must return a number'),
        ({"bad": lambda output, y: None}, '"bad" must return a number'),
        ({"bad": 3}, "bad"),
        ({"loss": lambda output, y: 1}, "loss"),
        ([lambda output, y: 1], "metrics"),
    ],
)
def test_a_bad_metric_is_refused_and_the_pipeline_goes_on(metrics, words):
    data = labelled()
    with open_pipe(classifier(), F.cross_entropy) as pipe:
        list(pipe.train_epoch(data))
        before = pipe.fingerprint().digest
        with pytest.raises(ConfigError, match=words):
            pipe.evaluate(data, metrics=metrics)
        assert pipe.fingerprint().digest == before
        list(pipe.train_epoch(data))


class Stateful(nn.Module):
    """A layer whose buffer goes on from one mini-batch to the next, in eval mode too."""

    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(8, 8, batch_first=True)
        self.register_buffer("state", torch.zeros(1, 4, 8))

    def forward(self, x):
        output, (state, _) = self.lstm(x, (self.state, torch.zeros_like(self.state)))
        self.state = state.detach()
        return output


def stateful():
    torch.manual_seed(4)
    return nn.Sequential(Stateful(), nn.Linear(8, 8), Stateful())


def sequences(count):
    torch.manual_seed(5)
    return [(torch.randn(4, 3, 8), torch.randn(4, 3, 8)) for _ in range(count)]


@computed_on_the_device
def evaluated(model, data):
    """Plain PyTorch's loop of evaluation."""
    model.eval()
    with torch.no_grad():
        return sum(F.mse_loss(model(x), y).item() for x, y in data) / len(data)


def test_buffers_go_on_during_an_evaluation_and_are_then_what_they_were():
    data, expected = sequences(5), evaluated(stateful(), sequences(5))
    with open_pipe(stateful(), F.mse_loss, micro_batches=1) as pipe:
        before = pipe.fingerprint().digest
        assert pipe.evaluate(data) == pytest.approx(expected, abs=1e-12)
        assert pipe.fingerprint().digest == before
        assert pipe.evaluate(data) == pytest.approx(expected, abs=1e-12)


@pytest.mark.processes
@pytest.mark.parametrize("keep", [False, True])
def test_a_worker_that_dies_in_an_evaluation_changes_nothing(keep):
    """Its passes are done again, from the buffers that there were before the first one."""
    data, train = sequences(24), sequences(4)

    def run(victim):
        def loader():
            for i, item in enumerate(data):
                if victim and i == 15:
                    kill(pipe, victim)
                yield item

        options = {
            "max_restarts": 1,
            "micro_batches": 1,
            "workers": "local" if victim else "serial",
        }
        with open_pipe(stateful(), F.mse_loss, **options) as pipe:
            losses = [result.loss for result in pipe.train_epoch(train)]
            losses.append(pipe.evaluate(loader(), keep_buffers=keep))
            losses += [result.loss for result in pipe.train_epoch(train)]
            assert len(pipe.restarts) == (1 if victim else 0)
            return losses, pipe.fingerprint().digest

    assert run("worker-1") == run(None)


def test_buffers_stay_if_the_user_asks_for_it():
    data, model = sequences(5), stateful()
    evaluated(model, data)
    with open_pipe(stateful(), F.mse_loss, micro_batches=1) as pipe:
        pipe.evaluate(data, keep_buffers=True)
        assert all(torch.equal(t, model.state_dict()[n]) for n, t in pipe.state_dict().items())
        with pytest.raises(ConfigError, match="keep_buffers"):
            pipe.evaluate(data, keep_buffers=1)
        with pipe.keep_version() as version, pytest.raises(ConfigError, match="keep_buffers"):
            pipe.evaluate(data, version=version, keep_buffers=True)


def test_an_evaluation_that_is_left_in_the_middle_leaves_no_buffers():
    data = sequences(5)

    def failing():
        yield from data[:3]
        raise ZeroDivisionError

    with open_pipe(stateful(), F.mse_loss, micro_batches=1) as pipe:
        before = pipe.fingerprint().digest
        with pytest.raises(ZeroDivisionError):
            pipe.evaluate(failing())
        assert pipe.fingerprint().digest == before
        assert pipe.evaluate(data) == pytest.approx(evaluated(stateful(), data), abs=1e-12)


def test_mini_batches_are_evaluated_whole():
    """As plain PyTorch does: micro-batches are for training."""
    with open_pipe(mlp(), F.mse_loss, micro_batches=2) as pipe:
        found = pipe.evaluate(regression(2), metrics={"samples": lambda output, y: len(output)})
        assert found["samples"] == 4


def test_losses_that_come_late_are_not_lost_to_an_inference_between_them():
    for seed in range(10):
        workers = functools.partial(SerialCluster, shuffle_seed=seed)
        with open_pipe(workers=workers, micro_batches=1) as pipe:
            pending = [pipe.submit(x, y) for x, y in regression(3)]
            pipe(torch.ones(1, 8))
            pipe.evaluate(regression(1))
            assert [p.result().step for p in pending] == [0, 1, 2]


def test_inference_and_modes():
    """In eval mode, unless told to keep the mode of training, which eval() and train() set."""
    x = torch.ones(64, 8)
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), Scale(8))
    with open_pipe(model, stages=2) as pipe:
        output = pipe(x)
        assert not output.requires_grad
        assert torch.equal(output, pipe.module().eval()(x))
        assert (pipe(x, training=True) == 0).any()
        assert torch.equal(pipe.train(False)(x, training=True), output)
        assert (pipe.train()(x, training=True) == 0).any()


def test_evaluate_is_the_mean_in_eval_mode_and_keeps_each_modules_mode():
    model = kitchen_sink()
    data = batches(5, samples=7)
    with open_pipe(model, loss_fn=F.cross_entropy, micro_batches=2) as pipe:
        model.eval()
        with torch.no_grad():
            expected = sum(F.cross_entropy(model(x), y).item() for x, y in data) / len(data)
        assert pipe.evaluate(data) == pytest.approx(expected, rel=1e-6)
        # Back in training mode: dropout acts again.
        x = data[0][0]
        assert not torch.equal(pipe(x, training=True), pipe(x, training=True))


def test_the_caller_may_reuse_its_buffers_at_once():
    x, y = torch.empty(4, 8), torch.empty(4, 8)
    losses = []
    for reuse in (True, False):
        with open_pipe(micro_batches=1) as pipe:
            pending = []
            for xi, yi in regression(6):
                if reuse:
                    x.copy_(xi), y.copy_(yi)
                pending.append(pipe.submit(x, y) if reuse else pipe.submit(xi, yi))
                x.zero_()
            losses.append([p.result().loss for p in pending])
    assert losses[0] == losses[1]


# -- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("use", "words"),
    [
        (lambda pipe: pipe.evaluate([]), "the loader given to evaluate yielded nothing"),
        (lambda pipe: pipe.evaluate(3), "evaluate takes a loader"),
        (lambda pipe: list(pipe.predict(3)), "predict takes a loader"),
        (lambda pipe: pipe.submit(torch.ones(0, 8), torch.ones(0, 8)), "without samples"),
    ],
    ids=["nothing to evaluate", "evaluate", "predict", "no samples"],
)
def test_what_cannot_be_fed_is_refused_and_the_run_goes_on(use, words):
    with open_pipe() as pipe:
        with pytest.raises(ConfigError, match=words):
            use(pipe)
        assert len(list(pipe.train_epoch(regression(2)))) == 2


def test_training_needs_a_loss_and_an_optimizer_and_evaluation_a_loss():
    x, y = regression(1)[0]
    with open_pipe(loss_fn=None, optimizer=None) as pipe:
        with pytest.raises(ConfigError, match="training needs loss_fn and optimizer"):
            pipe.submit(x, y)
        with pytest.raises(ConfigError, match="evaluate needs a loss: give Pipeline loss_fn"):
            pipe.evaluate([(x, y)])
        assert pipe(x).shape == (4, 8)
    with open_pipe() as pipe, torch.no_grad(), pytest.raises(ConfigError, match="no_grad"):
        pipe.submit(x, y)


def test_as_many_mini_batches_are_on_their_way_as_there_are_credits():
    with open_pipe() as pipe:
        feeder, credits = pipe._run.feeder, pipe.plan.credits()
        for number, (x, y) in enumerate(regression(7)):
            pipe.submit(x, y)
            assert [p.step for p in feeder.pending] == list(
                range(max(0, number + 1 - credits), number + 1)
            )
        pipe.flush()
        assert not feeder.pending
        assert (feeder.step, feeder.passes) == (7, 0)


def test_predictions_that_nobody_takes_leave_nothing_on_its_way():
    data = [x for x, _ in regression(20)]
    with open_pipe() as pipe:
        outputs = pipe.predict(data)
        assert torch.equal(next(outputs), pipe.module().eval()(data[0]))
        outputs.close()
        assert torch.equal(pipe(data[3]), pipe.module().eval()(data[3]))
