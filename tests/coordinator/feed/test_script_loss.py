"""The loss in the script: bits, loops that are left, and what is refused."""

import dataclasses
import functools
import gc
import threading
import weakref
from contextlib import suppress
from datetime import timedelta

import pytest
import torch
from support.between import Forward
from support.inside import feed_log, kill, script_loss
from support.late import Late, late_at
from support.models import OPTIMIZERS, POINTS, Of, batches, kitchen_sink, mlp, regression
from support.oracle import assert_same, oracle
from support.outside import Plain, train_by_hand, train_joined, train_outputs
from support.pinned import Pipeline
from support.small import SGD
from support.small import losses as trained_with_loss
from support.small import small as with_loss
from torch import nn
from torch.nn import functional as F

import pipedream_rt
from pipedream_rt import (
    Along,
    Checkpoints,
    Clip,
    ConfigError,
    Costs,
    NonFiniteLoss,
    PipelineClosed,
    plan_for,
    simulate,
)
from pipedream_rt.codecs import BFloat16, Int8
from pipedream_rt.errors import ScheduleError, StageFailed
from pipedream_rt.observers import Stepped
from pipedream_rt.schedules import COORDINATOR
from pipedream_rt.tracing.trace import GAVE, INJECTED, LOSS_CAME, Trace


def make(parameters):
    cls, options = OPTIMIZERS["adamw"]
    return cls(parameters, **options)


sgd = functools.partial(torch.optim.SGD, lr=0.1)
both_ways = pytest.mark.parametrize(
    "train", [train_outputs, train_by_hand], ids=["outputs", "by hand"]
)


def sink(stages=3, **options):
    """A pipeline over the kitchen sink, whose loss the script computes."""
    given = {"optimizer": OPTIMIZERS["adamw"], "schedule": "gpipe", "workers": "serial"}
    return Pipeline(kitchen_sink(), stages=POINTS[stages][1:], **{**given, **options})


def small(model=None, **options):
    """A pipeline over some linear layers, whose loss the script computes."""
    return with_loss(model, **{"loss_fn": None, "schedule": "gpipe", **options})


def joined(data, k=1, **options):
    """The weights and the losses of plain PyTorch."""
    model = kitchen_sink()
    losses = train_joined(model, data, F.cross_entropy, make, k=k, **options)
    return model.state_dict(), losses


def trained(pipe, data, train=train_outputs, **options):
    """Train on a pipeline that is closed behind it; return the weights and the losses."""
    with pipe:
        losses = train(pipe, data, **options)
        return pipe.state_dict(), losses


def assert_equal(found, expected):
    assert_same(found[0], expected[0])
    assert found[1] == expected[1]


# -- bits ------------------------------------------------------------------------------------------


@both_ways
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero-bubble"])
def test_schedules_that_flush_have_the_bits_of_plain_pytorch(schedule, train):
    data = batches(6)
    assert_equal(trained(sink(schedule=schedule), data, train), joined(data))


@pytest.mark.parametrize("samples", [8, 5, 3, 2], ids=["all", "last short", "one empty", "two"])
def test_micro_batches_are_joined_also_where_a_mini_batch_is_too_short_for_all(samples):
    data = [*batches(2, samples=8), *batches(1, samples=samples), *batches(1, samples=8, seed=4)]
    assert_equal(trained(sink(micro_batches=4), data), joined(data, 4))


@both_ways
@pytest.mark.parametrize(
    ("stages", "reads", "slack"),
    [(2, "async-1f1b", ()), (3, "async-1f1b", ()), (3, "vertical-sync", ()),
     (3, "async-1f1b", (2, 1))],
)  # fmt: skip
def test_asynchronous_schedules_read_the_versions_of_the_oracle(stages, reads, slack, train):
    schedule = "async-1f1b" if reads == "async-1f1b" else "async-1f1b+vertical-sync"
    data = batches(9)
    pipe = sink(stages, schedule=schedule, **({"slack": slack} if slack else {}))
    expected = oracle(
        kitchen_sink(), POINTS[stages], data, F.cross_entropy, make, reads=reads, slack=slack
    )
    assert_equal(trained(pipe, data, train), expected)


def test_two_backwards_are_added():
    data, model = regression(3), mlp()
    optimizer = sgd(model.parameters())
    for x, y in data:
        optimizer.zero_grad()
        output = model(x)
        leaf = output.detach().requires_grad_()
        F.mse_loss(leaf, y).backward()
        leaf.pow(2).mean().backward()
        output.backward(leaf.grad)
        optimizer.step()
    with small() as pipe:
        for output, (_, y) in pipe.outputs(data):
            F.mse_loss(output, y).backward()
            output.pow(2).mean().backward()
        assert_same(pipe.state_dict(), model.state_dict())


def test_a_script_may_put_the_gradient_on_an_output_itself():
    def by_grad(output, loss):
        (output.grad,) = torch.autograd.grad(loss, output)

    def clipped(output, loss):
        loss.backward()
        output.grad.clamp_(-0.1, 0.1)

    def afterwards(output, loss):
        (gradient,) = torch.autograd.grad(loss, output)
        output.backward(gradient.clamp(-0.1, 0.1))

    found = []
    for way in (by_grad, lambda output, loss: loss.backward(), clipped, afterwards):
        with small() as pipe:
            for output, (_, y) in pipe.outputs(regression(3)):
                way(output, F.mse_loss(output, y))
            found.append(pipe.state_dict())
    assert_same(found[0], found[1])
    assert_same(found[2], found[3])
    assert not torch.equal(found[0]["0.weight"], found[2]["0.weight"])


@pytest.mark.parametrize(
    "options",
    [
        {"recompute": True},
        {"clip": Clip(norm=0.01)},
        {"autocast": torch.bfloat16},
        {"ema": 0.5},
        {"codecs": BFloat16()},
        {"codecs": Int8()},
        {"replicas": (2, 1, 1), "micro_batches": 2},
        {"replicas": (2, 1, 1), "schedule": "async-1f1b"},
        {"clip": Clip(norm=0.01), "schedule": "async-1f1b+vertical-sync"},
        {"synchronous_updates": 3, "schedule": "async-1f1b"},
        {"corrections": "auto", "schedule": "async-1f1b", "optimizer": OPTIMIZERS["adamw"]},
    ],
    ids="-".join,
)
def test_options_have_the_bits_that_they_have_with_a_loss_on_the_stages(options):
    """By a loss that is a sum over samples of a mean, so that the shares are powers of two."""

    def loss_fn(output, y):
        return F.mse_loss(output.float(), y)

    data = regression(5)
    with small(**options) as pipe, small(loss_fn=loss_fn, **options) as other:
        train_outputs(pipe, data, loss_fn)
        trained_with_loss(other, data)
        assert_same(pipe.state_dict(), other.state_dict())


@dataclasses.dataclass
class Said:
    one: torch.Tensor
    more: dict


def said_of(self, x, beside, factor=1):
    """The forward of a model with two inputs, of which the second enters the second stage."""
    hidden = torch.relu(self.a(x))
    late = self.b(hidden + 2 * beside) * factor
    return Said(self.c(late), {"late": late, "hidden": hidden})


def of_three():
    torch.manual_seed(2)
    return Forward(said_of)


def of_all(said, y):
    return F.mse_loss(said.one, y) + said.more["late"].pow(2).mean() + said.more["hidden"].mean()


def recorded(k=1, **options):
    example = ((torch.randn(4, 4), torch.randn(4, 4)), {}, None)
    options = {"stages": ["b", "c"], "example": example, "micro_batches": k, **options}
    return small(of_three(), **options)


def two_inputs(count):
    return [((x, y), {}, y) for x, y in regression(count, width=4)]


@pytest.mark.parametrize("schedule", ["gpipe", "zero-bubble"])
def test_a_recorded_model_gives_all_that_its_forward_returns(schedule):
    found = []
    with recorded(schedule=schedule) as pipe:
        for model in (pipe, Plain(of_three())):
            for said, (_, _, y) in model.outputs(two_inputs(4)):
                assert isinstance(said, Said)
                of_all(said, y).backward()
            found.append(model.state_dict())
    assert_same(*found)


def test_a_recorded_model_in_micro_batches_has_all_its_outputs_joined():
    data = two_inputs(3)
    with recorded(k=2) as pipe, recorded() as whole:
        for each in (pipe, whole):
            for said, (_, _, y) in each.outputs(data):
                assert len(said.more["late"]) == 4
                of_all(said, y).backward()
        one, other = pipe.state_dict(), whole.state_dict()
    for key, value in one.items():
        torch.testing.assert_close(value, other[key])


def test_an_output_that_gets_no_gradient_has_none():
    """Else weights that plain PyTorch leaves alone would decay."""
    options = {"optimizer": (torch.optim.SGD, {"lr": 0.1, "weight_decay": 0.5})}
    with recorded(**options) as pipe:
        for said, _ in pipe.outputs(two_inputs(2)):
            said.more["hidden"].mean().backward()
        found = pipe.state_dict()
    fresh = of_three().state_dict()
    assert torch.equal(found["c.weight"], fresh["c.weight"])
    assert not torch.equal(found["a.weight"], fresh["a.weight"])


# -- loops that are left -----------------------------------------------------------------------


def test_a_break_after_a_backward_keeps_its_update_and_skips_those_on_their_way(caplog):
    data = regression(9)
    with small(schedule="async-1f1b") as pipe:
        for output, (_, y) in pipe.outputs(data):
            F.mse_loss(output, y).backward()
            break
        assert (pipe.seen, pipe.step) == (1, pipe.plan.credits())
        assert "left with 3 mini-batches on their way, up to 3" in caplog.text
        found = pipe.state_dict()
        assert train_outputs(pipe, data, F.mse_loss)
        assert pipe.step == 9 + pipe.plan.credits()
    with small(schedule="async-1f1b") as pipe:
        train_outputs(pipe, data[:1], F.mse_loss)
        assert_same(found, pipe.state_dict())


@pytest.mark.parametrize("error", [None, KeyError])
def test_a_loop_left_before_a_backward_changes_nothing_and_the_pipeline_trains_on(error):
    with small(schedule="async-1f1b") as pipe:
        with suppress(KeyError):
            for _ in pipe.outputs(regression(9)):
                if error:
                    raise error
                break
        assert_same(pipe.state_dict(), mlp().state_dict())
        assert len(train_outputs(pipe, regression(4), F.mse_loss)) == 4


def test_an_error_of_the_loader_comes_behind_the_mini_batches_before_it():
    def loader():
        yield from regression(3)
        raise KeyError("the loader's own")

    seen = []
    with small(schedule="async-1f1b") as pipe:
        with pytest.raises(KeyError, match="the loader's own"):
            train_outputs(pipe, loader(), F.mse_loss, at=seen.append)
        assert len(seen) == pipe.step == 3


@pytest.mark.parametrize("workers", ["serial", pytest.param("local", marks=pytest.mark.processes)])
def test_a_pipeline_is_closed_in_the_middle(workers):
    with small(stages=2, workers=workers, schedule="async-1f1b") as pipe:
        loop = pipe.outputs(regression(6))
        output, _ = next(loop)
        output.sum().backward()
        pipe.close()
        with pytest.raises(PipelineClosed):
            next(loop)
    with small(stages=2, workers=workers, micro_batches=2) as pipe:
        output = pipe.forward(regression(1)[0][0])
        pipe.close()
        with pytest.raises(PipelineClosed):
            pipe.step()
        del output


def test_a_dropped_loop_ends_with_its_pipeline():
    with small(schedule="async-1f1b") as pipe:
        loop = pipe.outputs(regression(6))
        next(loop)
        next(loop)
    del loop
    assert pipe.state.value == "closed"


def test_an_output_is_freed_when_the_loop_goes_on():
    """Outputs may be large, and the collector of garbage does not look at their sizes."""
    kept, gone = [], []
    gc.disable()
    try:
        with small() as pipe:
            for output, _ in pipe.outputs(regression(4)):
                output.sum().backward()
                kept.append(weakref.ref(output))
                gone = [reference() is None for reference in kept[:-1]]
                del output
    finally:
        gc.enable()
    assert all(gone)


# -- in the body of the loop -----------------------------------------------------------------------


def test_with_nothing_on_its_way_the_stages_can_be_asked_in_the_loop():
    """That ends the update, whose gradient is there."""
    data, model = regression(4), mlp()
    train_joined(model, data, F.mse_loss, sgd)
    updates = []
    with small() as pipe:
        for output, (_, y) in pipe.outputs(data):
            F.mse_loss(output, y).backward()
            updates.append(pipe.statistics()[0]["updates"])
            assert "gpipe" in pipe.explain()
            with pytest.raises(ConfigError, match="a backward reaches an output whose update"):
                output.sum().backward()
            last = pipe.state_dict()
        assert updates == [1, 2, 3, 4]
        assert_same(pipe.state_dict(), last)
        assert_same(last, model.state_dict())


@pytest.mark.parametrize(
    "ask", [lambda p: p.statistics(), lambda p: p.flush(), lambda p: p.state_dict(),
            lambda p: p(torch.ones(4, 8))], ids=["statistics", "flush", "state_dict", "inference"],
)  # fmt: skip
def test_with_others_on_their_way_the_loop_goes_on_after_a_refusal(ask):
    data = regression(6)
    with small(schedule="async-1f1b") as pipe, small(schedule="async-1f1b") as calm:
        for output, (_, y) in pipe.outputs(data):
            F.mse_loss(output, y).backward()
            if pipe.seen == 1:
                with pytest.raises(
                    ConfigError, match="whose loss the script has not computed are on their way"
                ):
                    ask(pipe)
        train_outputs(calm, data, F.mse_loss)
        assert_same(pipe.state_dict(), calm.state_dict())


@pytest.mark.parametrize(
    ("schedule", "where"),
    [("gpipe", "loader"), ("async-1f1b", "loader"), ("async-1f1b", "prepare")],
)
def test_what_draws_the_items_may_ask_the_stages_or_is_refused(schedule, where):
    """As a loader that labels its own items with the model does."""
    with small(schedule=schedule, answer=timedelta(seconds=1)) as pipe:

        def look(item):
            pipe(item[0])
            return item

        items, prepare = regression(4), look
        if where == "loader":
            items, prepare = map(look, items), None
        try:
            for output, _ in pipe.outputs(items, prepare=prepare):
                output.sum().backward()
        except ConfigError:
            pass
        pipe.flush()


# -- by hand ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["gpipe", "zero-bubble", "1f1b"])
@pytest.mark.parametrize("twice", [False, True], ids=["two inputs", "one that is given twice"])
def test_two_entries_give_the_gradients_of_their_inputs(schedule, twice):
    """An input that is given twice gets the sum."""
    (x, y), found = regression(1, width=4)[0], []
    with recorded(schedule=schedule) as pipe:
        for forward in (of_three(), pipe.forward):
            one = x.clone().requires_grad_()
            two = one if twice else y.clone().requires_grad_()
            of_all(forward(one, two), y).backward()
            found.append((one.grad, two.grad))
        pipe.step()
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("codec", [BFloat16(), Int8()], ids=repr)
def test_codecs_on_edges_do_not_touch_the_gradients_of_inputs(codec):
    x = torch.randn(4, 8, requires_grad=True)
    with small(codecs=codec) as pipe:
        pipe.forward(x).sum().backward()
        pipe.step()
    assert x.grad.shape == x.shape


def test_an_update_is_dropped_before_or_after_the_gradients_of_its_inputs():
    fresh, x = mlp().state_dict(), torch.randn(4, 8, requires_grad=True)
    with small(micro_batches=2) as pipe:
        pipe.forward(x).sum().backward()
        assert x.grad is not None
        pipe.step(update=False)
        pipe.forward(x.detach()).sum().backward()
        pipe.step(update=False)
        pipe.forward(x)
        pipe.step()  # without a backward
        assert_same(pipe.state_dict(), fresh)
        assert pipe.step == 3
        pipe.forward(x).sum().backward()
        pipe.step()
        assert not torch.equal(pipe.state_dict()["0.weight"], fresh["0.weight"])
    with small() as pipe:
        pipe.forward(x).sum().backward()
        with pytest.raises(ConfigError, match="micro_batches=2 or more, one more"):
            pipe.step(update=False)
        pipe.step()


def gan(made, judge):
    """Train a generator and its judge; return their weights."""
    for z, real in regression(4):
        fake = made.forward(z)
        a, b = judge.forward(real), judge.forward(fake.detach())
        (a.mean() - b.mean()).backward()
        judge.step()
        judge.forward(fake).mean().backward()
        made.step()
        judge.step(update=False)
    return made.state_dict(), judge.state_dict()


@pytest.mark.parametrize("workers", ["serial", pytest.param("local", marks=pytest.mark.processes)])
def test_two_pipelines_are_a_generator_and_its_judge(workers):
    with (
        small(mlp(layers=4), stages=2, workers=workers) as made,
        small(mlp(layers=4), stages=2, micro_batches=3) as judge,
    ):
        found = gan(made, judge)
    for one, other in zip(found, gan(Plain(mlp(layers=4)), Plain(mlp(layers=4)))):
        assert_same(one, other)


def test_without_gradients_a_forward_is_an_inference_in_training_mode(caplog):
    x = regression(1)[0][0]
    with small(micro_batches=2) as pipe, torch.no_grad():
        assert torch.equal(pipe.forward(x), mlp()(x))
        with torch.enable_grad():
            one = pipe.forward(x)
        pipe.forward(x)
        with torch.enable_grad():
            one.sum().backward()
        pipe.step()
        assert pipe.step == 1
    assert caplog.text.count("an inference in training mode") == 1


@pytest.mark.parametrize("k", [1, 2])
def test_a_learning_rate_that_is_set_before_the_step_is_that_of_the_update(k):
    """As plain PyTorch has it. With a micro-batch left over it is so, without one it is not."""
    x = regression(1)[0][0]
    found = []
    for forwards in (1, k):
        with small(micro_batches=k) as pipe:
            for _ in range(forwards):
                pipe.forward(x).sum().backward()
            pipe.optimizer.param_groups[0]["lr"] = 0.0
            pipe.step()
            found.append(torch.equal(pipe.state_dict()["0.weight"], mlp()[0].weight))
    assert found == [True, True]


def test_a_learning_rate_that_is_set_after_its_update_was_applied_is_refused():
    """With the gradient of the input of the last micro-batch the stages step."""
    x = regression(1)[0][0].requires_grad_()
    with small() as pipe:
        pipe.forward(x).sum().backward()
        pipe.optimizer.param_groups[0]["lr"] = 0.01
        with pytest.raises(ConfigError, match="before the script has set other hyper-parameters"):
            pipe.step()
        assert pipe.step == 1
        assert pipe.state_dict()  # nothing is left open
    with small(micro_batches=2) as pipe:
        pipe.forward(x).sum().backward()
        pipe.optimizer.param_groups[0]["lr"] = 0.0
        pipe.step()
        assert torch.equal(pipe.state_dict()["0.weight"], mlp()[0].weight)


def test_gradients_that_are_set_to_zero_are_dropped():
    x = regression(1)[0][0]
    with small(micro_batches=2) as pipe, small(micro_batches=2) as other:
        pipe.forward(x).sum().backward()
        pipe.optimizer.zero_grad()
        for each in (pipe, other):
            each.forward(x).square().sum().backward()
            each.step()
        assert_same(pipe.state_dict(), other.state_dict())
        pipe.forward(x.requires_grad_()).sum().backward()
        with pytest.raises(ConfigError, match=r"step\(update=False\) drops the update"):
            pipe.optimizer.zero_grad()
        pipe.step(update=False)


def test_a_look_at_the_stages_before_the_backward_is_refused_and_costs_nothing():
    with small() as pipe, small() as other:
        for output, _ in pipe.outputs(regression(2)):
            with pytest.raises(ConfigError, match=r"do it after loss.backward\(\)"):
                pipe.state_dict()
            output.grad = torch.ones_like(output)
        for output, _ in other.outputs(regression(2)):
            output.sum().backward()
        assert_same(pipe.state_dict(), other.state_dict())


def test_forwards_for_weights_and_for_inputs_alone_do_not_share_an_update():
    x = regression(1)[0][0]
    with small(micro_batches=2) as pipe:
        pipe.forward(x).sum().backward()
        alone = x.clone().requires_grad_()
        with pytest.raises(ConfigError, match="1 had the gradient of their input computed alone"):
            torch.autograd.grad(pipe.forward(alone).sum(), alone)
        with pytest.raises(ConfigError, match=r"step\(update=False\) drops this update"):
            pipe.step()
        pipe.step(update=False)
        assert torch.equal(pipe.state_dict()["0.weight"], mlp()[0].weight)


def test_a_backward_that_finds_an_error_of_the_script_leaves_an_update_that_can_be_dropped():
    x = regression(1)[0][0].requires_grad_()
    with small(micro_batches=3) as pipe:
        output, group = pipe.forward(x), pipe.optimizer.param_groups[0]
        rate, group["lr"] = group["lr"], object()
        with pytest.raises(ConfigError, match="hyper-parameter 'lr'"):
            output.sum().backward()
        group["lr"] = rate
        pipe.step(update=False)
        assert pipe.forward(x.detach()).shape == x.shape
        pipe.step(False)


def test_gradients_of_sparse_rows_are_those_of_dense_ones():
    rows, data = torch.tensor([1, 2, 2]), regression(1)
    found = []
    for sparse in (True, False):
        with small(micro_batches=1) as pipe:
            for output, _ in pipe.outputs(data):
                F.embedding(rows, output, sparse=sparse).sum().backward()
            F.embedding(rows, pipe.forward(data[0][0]), sparse=sparse).sum().backward()
            pipe.step()
            found.append(pipe.state_dict())
    assert_same(*found)


@pytest.mark.parametrize("schedule", ["gpipe", "zero-bubble"])
def test_the_gradient_of_an_input_can_be_asked_for_alone_and_trains_no_weight(schedule):
    """As plain PyTorch has it: of adversarial inputs, which come before the update itself."""
    x = regression(1)[0][0].requires_grad_()
    (expected,) = torch.autograd.grad(mlp()(x).pow(2).sum(), x)
    with small(schedule=schedule) as pipe:
        (found,) = torch.autograd.grad(pipe.forward(x).pow(2).sum(), x)
        pipe.step()
        assert_same(pipe.state_dict(), mlp().state_dict())
    assert torch.equal(found, expected)
    assert x.grad is None


@both_ways
def test_learning_rates_follow_a_scheduler(train):
    data, model = regression(5), mlp()
    optimizer = sgd(model.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    for item in data:
        train_joined(model, [item], F.mse_loss, lambda parameters: optimizer)
        schedule.step()
    with small() as pipe:
        schedule = torch.optim.lr_scheduler.StepLR(pipe.optimizer, 1, 0.5)
        for item in data:
            train(pipe, [item], F.mse_loss)
            schedule.step()
        assert_same(pipe.state_dict(), model.state_dict())


def test_without_gradients_an_open_update_with_replicas_is_asked_or_refuses():
    """The replica that computes it may have done all its forwards of the update."""
    x = torch.ones(4, 8)
    one_each = {"stages": 1, "replicas": 2, "micro_batches": 2}
    with small(**one_each, answer=timedelta(seconds=1)) as pipe:
        output = pipe.forward(x)
        with torch.no_grad(), suppress(ConfigError):
            pipe.forward(x)
        output.sum().backward()
        pipe.step()


# -- refusals --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"weigh": lambda x, y: 1}, ConfigError, "weigh"),
        ({"autocast": torch.float16}, ConfigError, "float16"),
        # Schedules whose stages would wait, with one that does not.
        *(({"schedule": schedule, "micro_batches": k}, ScheduleError, 'use schedule="gpipe"')
          for schedule, k in (("1f1b", 4), ("async-1f1b", 2), ("zero-bubble", 4), ("2bw", 3))),
    ],
    ids=["weigh", "float16", "1f1b", "async-1f1b", "zero-bubble", "2bw"],
)  # fmt: skip
def test_what_a_loss_in_the_script_excludes_is_refused_by_name(options, error, words):
    with pytest.raises(error, match=words):
        small(**options)


def forward_of(wanted):
    return lambda pipe: pipe.forward(torch.ones(4, 8, requires_grad=wanted))


BESIDE, OF_SCRIPT = {"loss_fn": F.mse_loss}, "is for a loss that the script computes"


@pytest.mark.parametrize(
    ("options", "use", "words"),
    [
        ({}, lambda pipe: pipe.train_epoch(regression(1)), "train_epoch needs a loss on the stage"),
        ({}, lambda pipe: pipe.submit(regression(1)), "submit needs a loss on the stages"),
        (BESIDE, lambda pipe: list(pipe.outputs([])), OF_SCRIPT),
        (BESIDE, forward_of(False), OF_SCRIPT),
        (BESIDE, lambda pipe: pipe.step(), OF_SCRIPT),
        ({"optimizer": None}, forward_of(False), "needs an optimizer"),
        ({"schedule": "async-1f1b"}, forward_of(True), "a gradient, which with async-1f1b"),
        ({"stages": 2, "replicas": 2}, forward_of(True), "a gradient, which with replicas"),
    ],
    ids=["epoch", "submit", "outputs", "forward", "step", "no optimizer", "stale", "replicas"],
)
def test_what_the_loss_or_the_schedule_does_not_allow_is_refused(options, use, words):
    with small(**options) as pipe, pytest.raises(ConfigError, match=words):
        use(pipe)


def test_too_many_forwards_and_too_few_are_refused():
    x = torch.ones(4, 8)
    with small(micro_batches=2) as pipe:
        with pytest.raises(ConfigError, match="there was none"):
            pipe.step()
        for _ in range(2):
            pipe.forward(x)
        with pytest.raises(ConfigError, match="an update is of at most 2 forwards"):
            pipe.forward(x)
        pipe.step()
        with pytest.raises(ConfigError, match="update must be True or False"):
            pipe.step(update=1)


@pytest.mark.parametrize("k", [1, 2])
def test_an_open_update_keeps_all_else_from_the_stages_and_nothing_is_lost(k):
    x = torch.ones(4, 8)
    with small(micro_batches=k) as pipe:
        output = pipe.forward(x)
        for ask in (
            pipe.state_dict, pipe.flush, pipe.statistics, lambda: pipe(x), pipe.explain,
            lambda: next(pipe.outputs(regression(2))),
        ):  # fmt: skip
            with pytest.raises(ConfigError, match=r"call step\(\) first"):
                ask()
        output.sum().backward()
        pipe.step()
        assert pipe.statistics()[0]["updates"] == pipe.step == 1


def test_forwards_in_a_loop_over_outputs_are_refused():
    with small(schedule="async-1f1b") as pipe:
        for output, (x, _) in pipe.outputs(regression(4)):
            with pytest.raises(ConfigError, match="forward cannot be called in a loop over"):
                pipe.forward(x)
            output.sum().backward()
        assert pipe.step == 4


def test_backwards_that_come_too_late_are_refused():
    x = torch.ones(4, 8)
    with small(micro_batches=2) as pipe:
        output = pipe.forward(x)
        pipe.step()
        with pytest.raises(ConfigError, match="whose gradient has gone to the stages"):
            output.sum().backward()
        leaf = x.clone().requires_grad_()
        loss = pipe.forward(leaf).sum()
        loss.backward(retain_graph=True)
        with pytest.raises(ConfigError, match="gradient"):
            loss.backward()
        with pytest.raises(ConfigError, match="stages have ended the forwards"):
            pipe.forward(x)
        pipe.step()
        with pytest.raises(ConfigError, match="create_graph=True"):
            torch.autograd.grad(pipe.forward(leaf).sum(), leaf, create_graph=True)
        pipe.step(update=False)
        assert pipe.step == 3


def test_a_forward_on_the_output_of_another_one_is_refused_in_its_backward():
    with small(micro_batches=2) as pipe:
        one = pipe.forward(torch.ones(4, 8))
        with pytest.raises(ConfigError, match="a backward reaches the output of a forward"):
            pipe.forward(one * 2).sum().backward()
        pipe.step()


def beside():
    """A pipeline whose last layer also returns a mean over samples."""
    last = Of(lambda x, layer: (layer(x), layer(x).mean()), nn.Linear(8, 8))
    return small(nn.Sequential(nn.Linear(8, 8), last), stages=2, micro_batches=2)


def test_outputs_that_cannot_be_joined_are_refused_and_the_pipeline_goes_on():
    with beside() as pipe:
        with pytest.raises(ConfigError, match="and only tensors of"):
            next(pipe.outputs(regression(2)))
        pipe.forward(torch.ones(4, 8))[1].backward()
        pipe.step()
        assert not torch.equal(pipe.state_dict()["0.bias"], torch.zeros(8))


def test_a_mini_batch_of_one_micro_batch_may_have_outputs_that_are_not_of_samples():
    """The others are empty, so nothing is joined."""
    with beside() as pipe:
        for (output, mean), _ in pipe.outputs(regression(2, samples=1)):
            (output.sum() + mean).backward()
        assert pipe.step == 2


def test_an_output_may_require_a_gradient_in_some_micro_batches_alone():
    def twice(x, layer):
        output = layer(x)
        return output.detach() if x.detach().abs().max() > 50 else output * 2, output

    torch.manual_seed(0)
    layer, x = nn.Linear(8, 8), torch.randn(4, 8)
    x[0, 0] = 100.0
    ones, others = torch.randn(4, 8), torch.randn(4, 8)
    with small(nn.Sequential(Of(twice, layer)), stages=1, micro_batches=2) as pipe:
        for (one, other), _ in pipe.outputs([(x, x)]):
            ((one * ones).sum() + (other * others).sum()).backward()
        found = pipe.state_dict()["0.part0.weight"]
    for part in (slice(0, 2), slice(2, 4)):
        one, other = twice(x[part], layer)
        ((one * ones[part]).sum() + (other * others[part]).sum()).backward()
    torch.testing.assert_close(found, layer.weight - 0.1 * layer.weight.grad)


def test_mini_batches_that_are_cut_along_another_dimension_are_not_joined_along_the_first():
    """Their steps are as many as the samples of a micro-batch, which nobody may count on."""
    x = torch.randn(2, 4, 8)  # two steps, four samples
    with small(micro_batches=2) as pipe:
        try:
            for output, _ in pipe.outputs([((Along(x, 1),), {}, None)]):
                assert output.shape == x.shape
        except ConfigError:
            pass


@pytest.mark.processes
def test_stages_are_chosen_for_a_loss_in_the_script():
    with pipedream_rt.Pipeline(
        mlp(), stages="auto", example=torch.ones(4, 8), optimizer=SGD, workers="local"
    ) as pipe:
        assert train_outputs(pipe, regression(2, samples=16), F.mse_loss)


# -- observers, traces -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("train", "schedule", "left"),
    [
        (train_outputs, "async-1f1b", []),
        (train_outputs, "async-1f1b", [(0, 3), (1, 3), (2, 3), (3, 3)]),
        (train_by_hand, "gpipe", []),
    ],
    ids=["outputs", "after a break", "by hand"],
)
def test_observers_are_told_of_each_mini_batch(train, schedule, left):
    told = []
    with small(schedule=schedule, to=[told.append]) as pipe:
        for output, _ in pipe.outputs(regression(9, samples=3)) if left else ():
            output.sum().backward()
            break
        train(pipe, regression(2, samples=5), F.mse_loss)
        first = pipe.plan.credits() if left else 0
    steps = [(each.step, each.samples) for each in told if isinstance(each, Stepped)]
    assert steps == [*left, (first, 5), (first + 1, 5)]


@both_ways
@pytest.mark.parametrize(("schedule", "k"), [("gpipe", 2), ("async-1f1b", 1)])
def test_a_trace_shows_when_the_script_gave_its_gradients(tmp_path, schedule, k, train):
    path = tmp_path / "trace.json"
    with small(schedule=schedule, micro_batches=k, trace=path) as pipe:
        train(pipe, regression(4), F.mse_loss)
    found = Trace.load(path)
    assert found.plan.loss_in_script
    spans = found.spans[found.spans["stage"] == COORDINATOR]
    for kind in (INJECTED, GAVE) if train is train_by_hand else (INJECTED, GAVE, LOSS_CAME):
        assert spans["index"][spans["kind"] == kind].tolist() == [*range(4 * k)]


def test_an_update_that_is_open_at_the_end_is_dropped_so_that_the_trace_is_written(tmp_path):
    path = tmp_path / "trace.json"
    with small(micro_batches=2, trace=path) as pipe:
        pipe.forward(regression(1)[0][0]).sum().backward()
    assert Trace.load(path).spans["kind"].tolist().count(INJECTED) == 2


@pytest.mark.parametrize(("schedule", "k"), [("gpipe", 4), ("zero-bubble", 1), ("async-1f1b", 1)])
def test_a_loss_in_the_script_is_simulated(schedule, k):
    plan = plan_for(schedule, num_stages=3, per_update=k)
    plan = dataclasses.replace(plan, loss_in_script=True)
    costs = Costs(forward=((0.001,),), backward=((0.002,),), latency=1e-4)
    spans = simulate(plan, costs, 16).spans
    assert (spans["kind"] == GAVE).sum() == 16


# -- NaN -------------------------------------------------------------------------------------------


def test_a_gradient_that_is_nan_is_not_sent_and_the_pipeline_trains_on():
    with small() as pipe:
        with pytest.raises(NonFiniteLoss, match=r"the output of mini-batch 0 is NaN.*not sent"):
            train_outputs(pipe, regression(3), lambda output, _: output.sum() * float("nan"))
        assert_same(pipe.state_dict(), mlp().state_dict())
        train_outputs(pipe, regression(2), F.mse_loss)
    with small(on_nan="ignore") as pipe:
        for output, _ in pipe.outputs(regression(1)):
            (output.sum() * float("nan")).backward()
        assert pipe.state_dict()["0.weight"].isnan().any()


def test_an_update_by_hand_whose_gradient_is_nan_can_be_dropped():
    with small() as pipe:
        (pipe.forward(torch.ones(4, 8)) * float("nan")).sum().backward()
        with pytest.raises(NonFiniteLoss):
            pipe.step()
        pipe.step(update=False)
        assert_same(pipe.state_dict(), mlp().state_dict())


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_gradient_that_is_nan_is_told_of_after_a_break_too(caplog):
    with small() as pipe:
        for output, _ in pipe.outputs(regression(3)):
            (output.sum() * float("nan")).backward()
            break
    assert "NaN" in caplog.text


def test_gradients_of_complex_outputs_are_looked_at_too():
    with small(nn.Sequential(nn.Linear(8, 8), Of(torch.fft.fft)), stages=1) as pipe:
        for output, _ in pipe.outputs(regression(2)):
            output.abs().sum().backward()
        assert pipe.step == 2


# -- failures --------------------------------------------------------------------------------------


@pytest.mark.processes
@pytest.mark.parametrize(
    ("train", "schedule", "kills"),
    [
        *((train_outputs, schedule, {(3,): victim})
          for schedule in ("gpipe", "async-1f1b") for victim in ("worker-0", "worker-1")),
        *((train_by_hand, "gpipe", {(2, where): "worker-1"})
          for where in ("forward", "backward", "step")),
        (train_outputs, "gpipe", {(4,): "worker-0", (7,): "worker-1"}),  # behind a checkpoint
    ],
    ids=lambda value: str([*value.items()]) if isinstance(value, dict) else None,
)  # fmt: skip
def test_a_worker_dies_while_the_script_thinks(tmp_path, train, schedule, kills):
    """What the script is asked for it is asked for once."""
    data, calls = batches(10 if len(kills) > 1 else 7), []
    calm = trained(sink(2, schedule=schedule), data, train)
    kept = Checkpoints(tmp_path, every=3) if len(kills) > 1 else None
    with sink(2, schedule=schedule, workers="local", max_restarts=3, checkpoint=kept) as pipe:

        def at(*place):
            calls.append(place)
            if place in kills:
                kill(pipe, kills[place])

        losses = train(pipe, data, at=at)
        assert_equal((pipe.state_dict(), losses), calm)
        assert len(calls) == len(set(calls)) == len(data) * (3 if train is train_by_hand else 1)
        assert len(pipe.restarts) == len(kills)


@pytest.mark.processes
def test_a_worker_dies_after_a_loop_was_left():
    """What was skipped is skipped again."""
    found = []
    for workers in ("serial", "local"):
        with small(stages=2, schedule="async-1f1b", workers=workers, max_restarts=1) as pipe:
            for output, _ in pipe.outputs(regression(9)):
                output.mean().backward()
                if pipe.seen == 2:
                    break
            if workers == "local":
                kill(pipe, "worker-0")
            train_outputs(pipe, regression(3), F.mse_loss)
            found.append(pipe.state_dict())
            assert len(pipe.restarts) == (workers == "local")
    assert_same(*found)


def test_an_interrupt_between_two_gradients_ends_the_pipeline(monkeypatch):
    """Else the stages wait for the rest of a mini-batch for ever."""
    with small(micro_batches=2, answer=timedelta(seconds=1)) as pipe:
        script, given = script_loss(pipe), []
        send = script._give

        def give(*arguments):
            given.append(arguments)
            if len(given) == 2:
                raise KeyboardInterrupt
            send(*arguments)

        monkeypatch.setattr(script, "_give", give)
        with suppress(KeyboardInterrupt):
            train_outputs(pipe, regression(2), F.mse_loss)
        with pytest.raises(PipelineClosed):
            pipe.flush()


@pytest.mark.processes
def test_a_worker_dies_while_gradients_of_inputs_are_on_their_way():
    data, found = regression(4), []
    for victim in (None, "worker-0"):
        x = torch.ones(4, 8, requires_grad=True)
        with small(stages=2, micro_batches=3, workers="local", max_restarts=2) as pipe:
            for step, (z, y) in enumerate(data):
                one, two = pipe.forward(x), pipe.forward(z)
                if victim and step == 1:
                    kill(pipe, victim)
                (F.mse_loss(one, y) + two.mean()).backward()
                if victim and step == 2:
                    kill(pipe, victim)
                pipe.step()
            found.append({"x": x.grad, **pipe.state_dict()})
            assert len(pipe.restarts) == (2 if victim else 0)
    assert_same(*found)


@pytest.mark.processes
def test_a_script_may_think_longer_than_an_answer_may_take():
    """A wait has a deadline where stages compute, and none where the script does."""
    never = threading.Event()
    with small(stages=2, workers="local", answer=timedelta(seconds=1)) as pipe:
        for output, _ in pipe.outputs(regression(2)):
            never.wait(2.5)
            output.sum().backward()
        output = pipe.forward(torch.ones(4, 8))
        never.wait(2.5)
        output.sum().backward()
        pipe.step()
        pipe.flush()
        assert pipe.step == 3


class FailsOnce(nn.Module):
    """Raises in the backward of a micro-batch, once in the life of its file."""

    def __init__(self, folder, at):
        super().__init__()
        self.file, self.at, self.calls = folder / "failed", at, 0

    def forward(self, x):
        self.calls += self.training
        if self.calls == self.at and x.requires_grad and not self.file.exists():
            x.register_hook(self._fail)
        return x

    def _fail(self, gradient):
        self.file.touch()
        raise RuntimeError("once")


@pytest.mark.threads
@both_ways
@pytest.mark.parametrize("schedule", ["gpipe", "async-1f1b"])
def test_a_backward_that_fails_is_done_again_without_asking_the_script(tmp_path, schedule, train):
    def model(at):
        return nn.Sequential(*mlp(), FailsOnce(tmp_path, at), nn.Linear(8, 8))

    options = {"schedule": schedule, "max_restarts": 2}
    torch.manual_seed(4)
    calm = trained(small(model(0), **options), regression(6), train, loss_fn=F.mse_loss)
    torch.manual_seed(4)
    with small(model(3), **options) as pipe:
        losses = train(pipe, regression(6), F.mse_loss)
        assert_equal((pipe.state_dict(), losses), calm)
        assert len(pipe.restarts) == 1
        assert pipe.step == 6


@pytest.mark.threads
def test_gradients_are_kept_since_the_last_two_checkpoints(tmp_path):
    with small(checkpoint=Checkpoints(tmp_path), max_restarts=1) as pipe:
        for count in (4, 3, 2):
            train_outputs(pipe, regression(count), F.mse_loss)
            pipe.save()
        train_outputs(pipe, regression(1), F.mse_loss)
        assert len(feed_log(pipe).gradients) == 2 + 1
    with small(max_restarts=0) as pipe:
        train_outputs(pipe, regression(3), F.mse_loss)
        assert feed_log(pipe).gradients == {}


def test_an_error_of_a_stage_reaches_the_loop():
    def fails(x):
        if x.abs().max() > 50:
            raise ZeroDivisionError("the layer's own words")
        return x

    bad = (torch.full((4, 8), 100.0), torch.ones(4, 8))
    said = pytest.raises(StageFailed, match="the layer's own words")
    with small(nn.Sequential(Of(fails), *mlp()), max_restarts=0) as pipe, said:
        train_outputs(pipe, [*regression(2), bad, *regression(1)], F.mse_loss)


# -- checkpoints -----------------------------------------------------------------------------------


class Script:
    """A script with a head of its own, which may stop and go on from a checkpoint."""

    def __init__(self, folder, **options):
        torch.manual_seed(6)
        self.head = nn.Linear(4, 4)
        self.optimizer = torch.optim.Adam(self.head.parameters(), lr=0.01)
        self.pipe = sink(2, checkpoint=Checkpoints(folder, every=3, resume=True), **options)
        self.pipe.attach(head=self.head, optimizer=self.optimizer)

    def train(self, data, stop=None):
        """Train on the rest of the data; return the losses by number."""
        losses = {}
        loop = self.pipe.outputs(data)
        for output, (_, y) in loop:
            loss = F.cross_entropy(self.head(output), y)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            losses[self.pipe.seen] = loss.item()
            if self.pipe.seen == stop:
                break
        return losses


@pytest.mark.threads
@pytest.mark.parametrize("schedule", ["gpipe", "async-1f1b"])
def test_a_script_with_a_head_of_its_own_goes_on_from_a_checkpoint(tmp_path, schedule):
    data = batches(11)
    calm = Script(tmp_path / "calm", schedule=schedule)
    with calm.pipe:
        losses = calm.train(data)
        weights = calm.pipe.state_dict()
    first = Script(tmp_path / "run", schedule=schedule)
    with first.pipe:
        first.train(data, stop=7)
    second = Script(tmp_path / "run", schedule=schedule)
    with second.pipe as pipe:
        # The second is left out where the first one is not written yet.
        assert pipe.step in (3, 6)
        found = second.train(data)
        assert_same(pipe.state_dict(), weights)
    assert found == {step: loss for step, loss in losses.items() if step in found}
    assert_same(second.head.state_dict(), calm.head.state_dict())


@pytest.mark.processes
@pytest.mark.parametrize("after", [0, 3, 5])  # each of six outputs is looked for at least once
def test_a_loop_that_a_signal_handler_has_ended_in_a_wait_trains_on_nothing_more(after):
    """What is on its way changes no weight, and another loop goes on with what is left."""
    data, trained = regression(6), []

    def loop(pipe, items):
        for output, (x, y) in pipe.outputs(items):
            F.mse_loss(output, y).backward()
            trained.append((x, y))

    with small(workers="local") as pipe:
        with late_at(pipe, "_find", after) as came, suppress(Late):
            loop(pipe, data)
        assert came
        loop(pipe, data)
        found = pipe.state_dict()
    with small() as calm:
        loop(calm, trained[:])
        assert_same(found, calm.state_dict())


@pytest.mark.processes
def test_a_forward_by_hand_that_a_signal_handler_has_ended_says_so_later():
    with small(workers="local") as pipe:
        with late_at(pipe, "_find"), pytest.raises(Late):
            pipe.forward(regression(1)[0][0])
        with pytest.raises(PipelineClosed, match=r"has failed: Late, which came while"):
            pipe.forward(regression(1)[0][0])
