"""Mini-batches are fed and losses taken: in training with metrics, in evaluation and inference."""

import functools
import logging
import math

import pytest
import torch
from support.between import Forward
from support.device.references import computed_on_the_device
from support.inside import kill
from support.labelled import classifier, labelled
from support.models import Of, Scale, regression
from support.oracle import assert_same
from support.small import losses, small
from torch import nn
from torch.nn import functional as F

from pipedream_rt import (
    Checkpoints,
    ConfigError,
    PipelineClosed,
    PipelineError,
    Recovery,
    StageFailed,
    Training,
)
from pipedream_rt.batches.items import Accumulated, batch_of
from pipedream_rt.coordinator.recovery.feed import Feed
from pipedream_rt.serial.cluster import SerialCluster

SCHEDULES = ("1f1b", "async-1f1b", "gpipe", "2bw")


def mean_of(output, y):
    return output.mean()


def in_parts(output, y):
    loss = F.mse_loss(output, y)
    return {"loss": loss, "twice": 2 * loss, "plain": 3}


def open_pipe(model=None, loss_fn=F.mse_loss, **options):
    return small(model, **{"loss_fn": loss_fn, "micro_batches": 3, **options})


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
        calm, expected = losses(pipe, data), pipe.state_dict()
    metrics = {"again": F.mse_loss, "mean": mean_of, "draws": lambda o, y: torch.rand(()) * 0}
    with open_pipe(schedule=schedule, workers=workers) as pipe:
        results = list(pipe.train_epoch(data, metrics=metrics))
        assert_same(pipe.state_dict(), expected)
    assert [result.loss for result in results] == calm
    # The loss, as a metric, is the loss: as of the version that the mini-batch has read.
    assert [result.metrics["again"] for result in results] == calm
    assert all(math.isfinite(result.metrics["mean"]) for result in results)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_loss_may_be_a_dict_with_parts_beside_the_total(schedule):
    data = regression(5, samples=6)
    with open_pipe(schedule=schedule) as pipe:
        calm = losses(pipe, data)
        assert all(result.metrics == {} for result in pipe.train_epoch(data))
        loss, expected = pipe.evaluate(data), pipe.state_dict()
    with open_pipe(loss_fn=in_parts, schedule=schedule) as pipe:
        results = list(pipe.train_epoch(data))
        list(pipe.train_epoch(data))
        assert pipe.evaluate(data) == loss
        found = pipe.evaluate(data, metrics={"mean": mean_of})
        assert_same(pipe.state_dict(), expected)
    assert [result.loss for result in results] == calm
    assert [result.metrics for result in results] == [
        {"twice": 2 * loss, "plain": 3.0} for loss in calm
    ]
    assert found.keys() == {"loss", "twice", "plain", "mean"}
    assert found["twice"] == 2 * loss


def test_a_metric_that_says_no_number_is_told_of_once_and_ends_nothing(caplog):
    with caplog.at_level(logging.WARNING), open_pipe() as pipe:
        results = list(pipe.train_epoch(regression(4), metrics={"rows": lambda o, y: o}))
        list(pipe.train_epoch(regression(1)))
        pipe.state_dict()
    assert all(math.isnan(result.metrics["rows"]) for result in results)
    assert caplog.text.count('the metric "rows" must return a number') == 1


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
        # Mini-batches are evaluated whole, as by plain PyTorch: micro-batches are for training.
        assert pipe.evaluate(data[:2], metrics={"of": lambda output, y: len(output)})["of"] == 8
        assert pipe.evaluate(data, metrics={}) == {"loss": found["loss"]}


class FailsInEval(nn.Module):
    """Passes on what it gets, unless that is marked, in eval mode."""

    def forward(self, x):
        if not self.training and x[0, 0] == MARK:
            raise KeyError("marked")
        return x


MARK = 7.0


def fails_on_a_mark(output, y):
    if (y[0, 0] == MARK).any():
        raise ZeroDivisionError("marked")
    return F.mse_loss(output, y)


def with_failing_layer():
    torch.manual_seed(3)
    return nn.Sequential(
        FailsInEval(), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 8), nn.Linear(8, 8)
    )


def metric_that_fails(output, y):
    raise ValueError("measured")


def marked(data, places, of):
    """Return mini-batches some of which have a mark, in the input (0) or the target (1)."""
    made = [tuple(each.clone() for each in pair) for pair in data]
    for place in places:
        made[place][of][0, 0] = MARK
    return made


def evaluations_that_fail(pipe, data):
    """Make them, and check the errors."""
    of_layer, of_loss = marked(data * 3, (2, 5, 11), 0), marked(data * 3, (4, 5), 1)
    for evaluate in (
        lambda: pipe.evaluate(of_layer),
        lambda: list(pipe.predict(of_layer)),
        lambda: pipe(of_layer[2][0]),
    ):
        with pytest.raises(StageFailed, match=r"stage 0, .*KeyError: 'marked', in layer '0'") as e:
            evaluate()
        assert isinstance(e.value.__cause__, KeyError)
        assert "marked" in e.value.trace
    with pytest.raises(StageFailed, match=r"stage 2, evaluate \d+: ZeroDivisionError: m") as e:
        pipe.evaluate(of_loss)
    assert isinstance(e.value.__cause__, ZeroDivisionError)
    with pytest.raises(ConfigError, match=r'the metric "bad" must .*ValueError: measured'):
        pipe.evaluate(data, metrics={"bad": metric_that_fails})

    def loader():
        yield from data[:3]
        raise OSError("no more")

    with pytest.raises(OSError, match="no more"):
        pipe.evaluate(loader())


@pytest.mark.parametrize(
    ("schedule", "workers"),
    [
        *((schedule, "serial") for schedule in (*SCHEDULES, "zero-bubble")),
        *(
            pytest.param(schedule, "local", marks=pytest.mark.processes)
            for schedule in SCHEDULES[:3]
        ),
    ],
)
def test_an_error_in_an_evaluation_ends_the_evaluation_and_not_the_run(schedule, workers):
    """Training goes on with the same bits as if there had been none."""
    data = regression(5, samples=6)

    def run(workers, meanwhile):
        options = {"schedule": schedule, "optimizer": (torch.optim.Adam, {"lr": 0.01})}
        with open_pipe(with_failing_layer(), fails_on_a_mark, workers=workers, **options) as pipe:
            results = pipe.train_epoch(data)
            found = [next(results).loss]
            meanwhile(pipe, data)  # others are on their way
            found += [result.loss for result in results]
            meanwhile(pipe, data)
            found += losses(pipe, data)
            assert not pipe.restarts
            assert not pipe._group.recovery.inbox._waiting
            return found, pipe.fingerprint().digest, pipe.evaluate(data)

    assert run(workers, evaluations_that_fail) == run("serial", lambda pipe, data: None)


def test_the_first_that_fails_is_the_one_that_is_named():
    """The others, and those of later micro-batches, never see it."""
    model = nn.Sequential(nn.Flatten(), FailsInEval(), nn.Linear(8, 8))
    with open_pipe(model, fails_on_a_mark) as pipe:
        with pytest.raises(StageFailed) as e:
            pipe.evaluate(marked(marked(regression(9), (3, 4, 6), 1), (3, 6), 0))
        assert e.value.stage == 1


# -- another loss -----------------------------------------------------------------------------


def soft(output, y):
    """A loss of probabilities, as after a mixup."""
    return -(y * output.log_softmax(1)).sum(1).mean()


def softened(data):
    return [(x, 0.9 * F.one_hot(y, 5) + 0.02) for x, y in data]


def test_an_evaluation_may_have_another_loss_and_changes_no_bit_of_the_training():
    data = labelled(4, ignored=False)
    options = {"loss_fn": soft, "schedule": "1f1b"}
    with open_pipe(classifier(), **options) as pipe:
        expected = losses(pipe, softened(data)) + losses(pipe, softened(data))
        weights = pipe.state_dict()
    with open_pipe(classifier(), **options) as pipe:
        first = losses(pipe, softened(data))
        of_training = pipe.evaluate(softened(data))
        found = pipe.evaluate(data, loss_fn=F.cross_entropy, metrics={"mean": mean_of})
        model = pipe.module().eval()
        outputs, y = model(torch.cat([x for x, _ in data])), torch.cat([y for _, y in data])
        assert found["loss"] == pytest.approx(F.cross_entropy(outputs, y).item(), rel=1e-5)
        assert found["mean"] == pytest.approx(outputs.mean().item(), abs=1e-6)
        # The loss of training is still that of the others.
        assert pipe.evaluate(softened(data), loss_fn=soft) == of_training
        assert first + losses(pipe, softened(data)) == expected
        assert_same(pipe.state_dict(), weights)


def test_another_loss_weighs_by_its_own_labels():
    (x, y), (other, of_other) = labelled(2, ignored=False)
    y = torch.where(torch.arange(len(y)) == 0, y, -100)  # one label counts
    with open_pipe(classifier(), soft) as pipe:
        outputs = pipe.module().eval()(torch.cat([x, other]))
        plain = F.cross_entropy(outputs, torch.cat([y, of_other])).item()
        data = [(x, y), (other, of_other)]
        for loss in (F.cross_entropy, nn.CrossEntropyLoss()):
            assert pipe.evaluate(data, loss_fn=loss) == pytest.approx(plain, rel=1e-5)
    weigh = Training(weigh=lambda x, y: (y != -100).sum())
    with open_pipe(classifier(), soft, training=weigh) as pipe:
        found = pipe.evaluate(data, loss_fn=lambda o, y: F.cross_entropy(o, y))
        assert found == pytest.approx(plain, rel=1e-5)


class Centres(nn.Module):
    """A loss with weights of its own."""

    def __init__(self):
        super().__init__()
        self.centres, self.drop = nn.Parameter(torch.zeros(8)), nn.Dropout(0.5)

    def forward(self, output, y):
        return F.mse_loss(self.drop(output), y + self.centres)


def test_a_loss_that_is_a_module_is_in_eval_mode_and_that_of_training_has_its_trained_weights():
    loss, data = Centres(), regression(4)
    with open_pipe(loss_fn=loss) as pipe:
        list(pipe.train_epoch(data))
        trained = pipe.evaluate(data)
        assert pipe.evaluate(data, loss_fn=loss) == trained
        copy = pipe.loss_module()
        assert pipe.evaluate(data, loss_fn=copy) == trained
        other = Centres()
        assert pipe.evaluate(data, loss_fn=other) == pipe.evaluate(data, loss_fn=F.mse_loss)
        with pytest.raises(ConfigError, match=r"loss_fn refers to .*centres.*pipe\.module\(\)"):
            pipe.evaluate(data, loss_fn=lambda o, y: loss(o, y))
        assert loss.training
        assert other.training


@pytest.mark.parametrize("workers", ["serial", pytest.param("local", marks=pytest.mark.processes)])
def test_a_pipeline_without_a_loss_evaluates_one_that_is_given(workers):
    data = regression(3)
    for optimizer in (None, (torch.optim.SGD, {"lr": 0.1})):
        options = {"loss_fn": None, "optimizer": optimizer, "schedule": "gpipe", "workers": workers}
        with open_pipe(**options) as pipe:
            for output, (_, y) in pipe.outputs(data) if optimizer else ():
                F.mse_loss(output, y).backward()
            outputs = zip(pipe.predict(data), data, strict=True)
            expected = sum(F.mse_loss(output, y).item() for output, (_, y) in outputs) / 3
            assert pipe.evaluate(data, loss_fn=F.mse_loss) == pytest.approx(expected, rel=1e-5)
            for output, (_, y) in pipe.outputs(data) if optimizer else ():
                F.mse_loss(output, y).backward()


class OwnLoss(Forward):
    """Computes its loss where it gets labels."""

    def forward(self, x, labels=None):
        x = self.c(self.b(self.a(x)))
        return {"loss": None if labels is None else F.mse_loss(x, labels), "out": x}


def test_a_model_with_a_loss_of_its_own_needs_none_for_another():
    data = [{"x": x[:, :4], "labels": y[:, :4]} for x, y in regression(3)]

    def other(output, batch):
        return F.l1_loss(output["out"], batch["y"])

    bare = [{"x": each["x"], "y": each["labels"]} for each in data]
    with open_pipe(OwnLoss(None), None, example=data[0]) as pipe:
        outs = zip(pipe.predict(data), data, strict=True)
        expected = sum(F.l1_loss(out["out"], each["labels"]).item() for out, each in outs) / 3
        assert pipe.evaluate(bare, loss_fn=other) == pytest.approx(expected, rel=1e-5)
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


@pytest.mark.processes
@pytest.mark.parametrize(
    ("model", "k", "dies", "failed", "options"),
    [
        (with_failing_layer, 3, "worker-2", False, {"loss_fn": F.l1_loss}),
        (with_failing_layer, 3, "worker-1", True, {}),
        (stateful, 1, "worker-1", False, {}),
        (stateful, 1, "worker-1", False, {"keep_buffers": True}),
    ],
    ids=["another loss", "after one that has failed", "buffers", "buffers that stay"],
)
def test_an_evaluation_in_which_a_worker_dies_is_computed_again(model, k, dies, failed, options):
    """From the buffers that there were before it; what has failed before is not fed again."""
    data = sequences(24) if model is stateful else regression(24)

    def run(victim):
        def killing():
            for i, item in enumerate(data):
                if victim and i == 15:
                    kill(pipe, victim)
                yield item

        workers = "local" if victim else "serial"
        how = {"max_restarts": 1, "workers": workers, "micro_batches": k}
        with open_pipe(model(), fails_on_a_mark, **how) as pipe:
            found = losses(pipe, data[:4])
            for keep in (False, True) if failed else ():
                with pytest.raises(StageFailed):
                    pipe.evaluate(marked(data, (5,), 0), keep_buffers=keep)
            found.append(pipe.evaluate(killing(), **options))
            found += losses(pipe, data[:4])
            assert len(pipe.restarts) == bool(victim)
            return found, pipe.fingerprint().digest

    assert run(dies) == run(None)


def test_messages_that_come_in_any_order_do_not_mix_what_has_failed():
    data = regression(5, samples=6)
    expected = None
    for seed in range(8):
        workers = functools.partial(SerialCluster, shuffle_seed=seed)
        with open_pipe(with_failing_layer(), fails_on_a_mark, workers=workers) as pipe:
            list(pipe.train_epoch(data))
            evaluations_that_fail(pipe, data)
            list(pipe.train_epoch(data))
            found = pipe.fingerprint().digest
        expected = expected or found
        assert found == expected


def test_buffers_go_on_during_an_evaluation_and_are_then_what_they_were():
    data, expected = sequences(5), evaluated(stateful(), sequences(5))
    with open_pipe(stateful(), F.mse_loss, micro_batches=1) as pipe:
        before = pipe.fingerprint().digest
        assert pipe.evaluate(data) == pytest.approx(expected, abs=1e-12)
        assert pipe.fingerprint().digest == before
        assert pipe.evaluate(data) == pytest.approx(expected, abs=1e-12)


def test_buffers_stay_if_the_user_asks_for_it():
    data, model = sequences(5), stateful()
    evaluated(model, data)
    with open_pipe(stateful(), F.mse_loss, micro_batches=1) as pipe:
        pipe.evaluate(data, keep_buffers=True)
        assert_same(pipe.state_dict(), model.state_dict())
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


def test_the_caller_may_reuse_its_buffers_at_once():
    x, y = torch.empty(4, 8), torch.empty(4, 8)
    found = []
    for reuse in (True, False):
        with open_pipe(micro_batches=1) as pipe:
            pending = []
            for xi, yi in regression(6):
                if reuse:
                    x.copy_(xi), y.copy_(yi)
                pending.append(pipe.submit(x, y) if reuse else pipe.submit(xi, yi))
                x.zero_()
            found.append([p.result().loss for p in pending])
    assert found[0] == found[1]


# -- what is refused ------------------------------------------------------------------------------


def evaluating(**options):
    return lambda pipe: pipe.evaluate(regression(2), **options)


def measuring(metric):
    return evaluating(metrics={"bad": metric})


NO_NUMBER = "must return a tensor with one element"  # which the stage finds out


@pytest.mark.parametrize(
    ("use", "words"),
    [
        (lambda pipe: pipe.evaluate([]), "the loader given to evaluate yielded nothing"),
        (lambda pipe: torch.no_grad()(pipe.submit)(*regression(1)[0]), "no_grad"),
        (evaluating(loss_fn=nn.CrossEntropyLoss),
         "loss_fn is the class CrossEntropyLoss; give an instance"),
        (evaluating(loss_fn=3), "loss_fn must be callable"),
        (evaluating(loss_fn=nn.TripletMarginLoss()),
         "loss_fn takes positive and negative beside the output"),
        (evaluating(loss_fn=lambda o, y: o), NO_NUMBER),
        (measuring(lambda output, y: 1 / 0), '"bad" must return a number.*ZeroDivisionError'),
        (measuring(lambda output, y: output), '"bad" must return a number'),
        (measuring(lambda output, y: None), '"bad" must return a number'),
        (measuring(3), "bad"),
        (evaluating(metrics={"loss": mean_of}), "loss"),
        (evaluating(metrics=[mean_of]), "metrics"),
        (lambda pipe: list(pipe.train_epoch(regression(1), metrics={"loss": mean_of})),
         "metrics must be functions"),
    ],
    ids=[
        "nothing to evaluate", "no gradients", "class of a loss", "no loss", "loss of two targets",
        "loss of no number", "metric that raises", "metric of no number", "metric of None",
        "no metric", "metric called loss", "list of metrics", "metric called loss in training",
    ],
)  # fmt: skip
def test_what_cannot_be_fed_or_computed_is_refused_and_the_run_goes_on(use, words):
    with open_pipe() as pipe:
        losses(pipe, regression(2))
        before = pipe.fingerprint().digest
        with pytest.raises((ConfigError, StageFailed), match=words) as caught:
            use(pipe)
        assert (type(caught.value) is StageFailed) is (words == NO_NUMBER)
        assert pipe.fingerprint().digest == before
        assert len(list(pipe.train_epoch(regression(2)))) == 2


@pytest.mark.parametrize(
    ("loss_fn", "words"),
    [
        (lambda o, y: {"loss": F.mse_loss(o, y), "rows": o}, "must be numbers"),
        (lambda o, y: {"total": mean_of(o, y)}, 'one element under "loss", it returned NoneType'),
        (lambda o, y: {"loss": o, "a": 1}, 'under "loss", it returned'),
    ],
    ids=["a part", "no loss", "a loss"],
)
def test_a_dict_that_is_no_loss_is_refused(loss_fn, words):
    with open_pipe(loss_fn=loss_fn) as pipe, pytest.raises(Exception, match=words):
        list(pipe.train_epoch(regression(1)))


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


def test_an_error_of_a_signal_handler_between_two_micro_batches_ends_the_pipeline(monkeypatch):
    """A mini-batch is then fed in part, which the pipeline says afterwards."""
    with open_pipe() as pipe:
        list(pipe.train_epoch(regression(2, samples=6)))
        send, fed = Feed._send_entry, []

        def late(feed, entry):
            send(feed, entry)
            fed.append(entry)
            if len(fed) == 2:
                raise TimeoutError  # as a handler would

        monkeypatch.setattr(Feed, "_send_entry", late)
        with pytest.raises(TimeoutError):
            list(pipe.train_epoch(regression(2, samples=6)))
        with pytest.raises(
            PipelineClosed, match=r"has failed: TimeoutError, .* micro-batch was fed"
        ):
            pipe.flush()


# -- what is decided at the first mini-batch ------------------------------------------------------


def added_up(output, y):
    return output.pow(2).sum() + y.sum()


class Told(nn.Module):
    """Its own loss: a sum, divided by the total that it is told or by its own number."""

    def __init__(self, heeds=True):
        super().__init__()
        self.first, self.second, self.heeds = nn.Linear(8, 8), nn.Linear(8, 8), heeds

    def forward(self, x, labels, num_items_in_batch=None):
        lost = ((self.second(self.first(x)) - labels) * (labels != -100)).pow(2).sum()
        heeded = self.heeds and num_items_in_batch is not None
        return {"loss": lost / (num_items_in_batch if heeded else labels.numel())}


class AddsUp(Told):
    def forward(self, x, labels):
        return {"loss": added_up(self.second(self.first(x)), labels)}


@pytest.mark.parametrize("own", [False, True], ids=["loss function", "loss of the model"])
def test_an_infinite_first_loss_says_nothing_of_whether_it_is_a_mean(own):
    data = [(x, y.abs()) for x, y in regression(8)]
    infinite = [(x, y * math.inf) for x, y in data[:1]]
    options = {"training": Training(on_nan="ignore"), "stages": 2, "micro_batches": 2}
    if own:
        data, infinite = ([{"x": x, "labels": y} for x, y in each] for each in (data, infinite))
        options |= {"model": AddsUp(), "loss_fn": None, "example": data[0]}
    else:
        options |= {"loss_fn": added_up}
    with open_pipe(**options) as pipe:
        (first,) = pipe.train_epoch(infinite)
        assert first.loss == math.inf
        with pytest.raises(PipelineError, match="the loss is no mean over samples"):
            list(pipe.train_epoch(data))


@pytest.mark.parametrize("heeds", [True, False])
@pytest.mark.parametrize("label", [math.nan, -100.0], ids=["NaN", "no labels"])
def test_a_loss_that_says_nothing_does_not_tell_whether_losses_add_up(heeds, label):
    def part(label=None):
        x, y = torch.randn(4, 8), torch.randn(4, 8)
        y = y if label is None else torch.full_like(y, label)
        return batch_of({"x": x, "labels": y, "num_items_in_batch": torch.tensor(64)})

    example = {"x": torch.randn(4, 8), "labels": torch.randn(4, 8)}
    with open_pipe(Told(heeds), None, example=example, stages=2, micro_batches=4) as pipe:
        feeder = pipe._run.feeder
        nothing = Accumulated((part(label), part(label)), 2)
        assert feeder._losses_add(nothing)  # as by models that take the total
        assert feeder._losses_add(Accumulated((part(label), part()), 2)) is heeds
        assert feeder._losses_add(nothing) is heeds
        assert feeder.passes == 0


@pytest.mark.parametrize("where", ["layer", "loss"])
def test_an_error_of_a_part_says_how_much_of_the_mini_batch_it_had(where):
    def of_sixteen(x):
        return x.view(16, 8)  # as if all mini-batches had as many samples

    layers = [nn.Linear(8, 8), Of(of_sixteen) if where == "layer" else nn.Tanh(), nn.Linear(8, 8)]
    loss_fn = F.mse_loss if where == "layer" else lambda out, y: F.mse_loss(of_sixteen(out), y)
    x = torch.randn(16, 8)
    options = {"stages": 2, "micro_batches": 8, "schedule": "1f1b"}
    with (
        open_pipe(nn.Sequential(*layers), loss_fn, **options) as pipe,
        pytest.raises(StageFailed, match="given 2 of the 16 samples of mini-batch 1") as caught,
    ):
        list(pipe.train_epoch([(torch.randn(128, 8), torch.randn(128, 8)), (x, x)]))
    assert 'micro_batches=1, schedule="gpipe" gives layers all of them' in str(caught.value)
