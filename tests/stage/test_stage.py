"""A stage by itself: it takes tensors and returns what is to be sent. Nothing moves here."""

import copy
import dataclasses
import math
import random
from collections import deque
from itertools import pairwise

import cloudpickle
import pytest
import torch
import torch.nn.functional as F
from support import diamond
from support.models import (
    OPTIMIZERS,
    POINTS,
    Blocked,
    Noisy,
    NoisySGD,
    Pair,
    batches,
    kitchen_sink,
    mlp,
    regression,
)
from support.oracle import assert_same, layer_seed, oracle
from support.stages import with_layers
from torch import nn

from pipedream_rt.errors import ConfigError, NonFiniteLoss, ScheduleError, VersionError
from pipedream_rt.messages.snapshot import Snapshot
from pipedream_rt.messages.tree import Value, flatten, own, unflatten
from pipedream_rt.schedules import COORDINATOR, Edge, EdgeKind, Kind, plan_for
from pipedream_rt.stage import stage_state
from pipedream_rt.stage.commands import set_mode
from pipedream_rt.stage.optimizer import GroupSpec, OptimizerSpec
from pipedream_rt.stage.spec import StageSpec
from pipedream_rt.stage.stage import Stage

ONE = plan_for("1f1b", num_stages=1)
TWO = plan_for("1f1b", num_stages=2)
ASYNC = plan_for("async-1f1b", num_stages=3)

HYPER = [{}]
"""One parameter group, whose hyper-parameters stay."""


def value(x, wanted=False):
    """A value as the coordinator sends it; wanted: as a producer does, who wants gradients."""
    structure, tensors = flatten(x)
    return Value(structure, tuple(tensors), (wanted,) * len(tensors))


def content(made):
    """What a value holds, or the only value that a stage has made."""
    if isinstance(made, list):
        (made,) = made
    return unflatten(made.structure, made.tensors)


def a_stage(
    layers, plan=ONE, index=0, *, loss_fn=None, optimizer="sgd", on_nan="raise", first=0, seed=0
):
    """A stage with layers that are named by their place in the unsplit model."""
    module = nn.Sequential()
    for number, layer in enumerate(layers, first):
        module.add_module(str(number), layer)
    stage = Stage(
        StageSpec(
            stage=index,
            layers=module,
            loss_fn=loss_fn,
            plan=with_layers(plan, index, module),
            seed=seed,
            on_nan=on_nan,
        )
    )
    if optimizer is not None:
        cls, kwargs = OPTIMIZERS[optimizer] if isinstance(optimizer, str) else optimizer
        names = tuple(name for name, _ in module.named_parameters())
        stage.set_optimizer(pickled(cls, kwargs, names))
    return stage


def back(stage, micro_batch, gradients=()):
    """A whole backward, to the end of the flight."""
    found = stage.backward(micro_batch, gradients)
    assert not stage.end(micro_batch)
    return found


def back_weight(stage, micro_batch):
    stage.backward_weight(micro_batch)
    assert not stage.end(micro_batch)


def pickled(cls, kwargs, names):
    groups = (GroupSpec(names=names),)
    return cloudpickle.dumps(OptimizerSpec(optimizer_class=cls, kwargs=kwargs, groups=groups))


def split(model, points, plan, loss_fn, optimizer, seed=0):
    """A model as stages, the last of which computes the loss."""
    layers, bounds = list(copy.deepcopy(model)), [*points, len(model)]
    return [
        a_stage(
            layers[first:end],
            plan,
            index,
            loss_fn=loss_fn if index in plan.exits else None,
            optimizer=optimizer,
            first=first,
            seed=seed,
        )
        for index, (first, end) in enumerate(pairwise(bounds))
    ]


def state_of(stages):
    return {key: t for stage in stages for key, t in stage.module.state_dict().items()}


class Driver:
    """Does the orders of a plan on stages of this process, and carries what they return.

    Whoever has what its next action needs may be next: a seed says who is.

    Attributes:
        reads: By stage, the versions that its forwards have read.
        most_kept: By stage, the most versions that it held.
    """

    def __init__(self, plan, stages, seed=0):
        self.plan, self.stages, self._random = plan, stages, random.Random(seed)
        self.reads = [[] for _ in stages]
        self._on_edges = {}

    def train(self, data):
        """Train on micro-batches from number 0 on; return the losses."""
        plan = self.plan
        for m, (x, y) in enumerate(data):
            for stage in plan.entries:
                self._on_edges[Edge(EdgeKind.ACTIVATION, COORDINATOR, stage), m] = value(x)
            for edge in plan.edges(EdgeKind.TARGET):
                self._on_edges[edge, m] = value(y)
        orders = [deque(plan.order(w, 0, len(data))) for w in range(plan.workers)]
        while any(orders):
            able = [w for w, order in enumerate(orders) if order and self._can(w, order[0])]
            worker = self._random.choice(able)  # nobody is: a deadlock
            self._do(self._stage(worker, orders[worker][0]), orders[worker].popleft())
        (loss,) = plan.edges(EdgeKind.LOSS)
        losses = [self._on_edges.pop((loss, m)) for m in range(len(data))]
        assert not self._on_edges, "sent, and never needed"
        return losses

    def _stage(self, worker, action):
        return self.plan.stages_of(worker)[0] if action.stage is None else action.stage

    def _can(self, worker, action):
        needed = self.plan.needs(action, self._stage(worker, action))
        return all((each.edge, each.number) in self._on_edges for each in needed)

    def _do(self, index, action):
        stage, (kind, m, _) = self.stages[index], action
        gives, made = self.plan.gives(action, index), []
        needed = [self._on_edges.pop((e.edge, e.number)) for e in self.plan.needs(action, index)]
        match kind:
            case Kind.FORWARD:
                target = needed.pop() if index in self.plan.exits else None
                made = stage.forward(m, needed, HYPER, target)
                made = made if isinstance(made, list) else [made]
                self.reads[index].append(stage.version_of(m))
            case Kind.BACKWARD:
                made = back(stage, m, needed)
            case Kind.INPUT:
                made = stage.backward_input(m, needed)
            case Kind.WEIGHT:
                back_weight(stage, m)
            case Kind.STEP:
                stage.step(m)
        for each, what in zip(gives, made):
            self._on_edges[each.edge, m] = arrived(what)


def arrived(what):
    """What a transport makes of it: the receiver's own."""
    match what:
        case Value():
            return what._replace(tensors=tuple(own(t, copy=True) for t in what.tensors))
        case list():
            return [None if g is None else own(g, copy=True) for g in what]
    return what


def trained(stage, data):
    """Train a stage that is the whole model; return the losses."""
    return Driver(stage.plan, [stage]).train(data)


# -- training ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_one_stage_is_plain_pytorch(name):
    model, data = mlp(), regression(5)
    stage = a_stage(copy.deepcopy(model), loss_fn=F.mse_loss, optimizer=name)
    losses = trained(stage, data)
    cls, kwargs = OPTIMIZERS[name]
    optimizer = cls(model.parameters(), **kwargs)
    for m, (x, y) in enumerate(data):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        assert losses[m] == loss.item()
    assert_same(stage.module.state_dict(), model.state_dict())


def test_two_stages_by_hand_are_the_unsplit_model():
    """What the first returns is the input of the second; gradients come back."""
    model, ((x, y),) = mlp(layers=4), regression(1)
    first, last = split(model, [0, 2], TWO, F.mse_loss, "sgd")
    (hidden,) = first.forward(0, [value(x)], HYPER)
    assert hidden.requires_grad == (True,)
    loss = last.forward(0, [arrived(hidden)], HYPER, value(y))
    (gradients,) = back(last, 0)
    assert back(first, 0, [arrived(gradients)]) == [[]]  # nobody wants any of the model's input
    last.step(0)
    first.step(0)

    middle = model[:2](x)
    middle.retain_grad()
    expected = F.mse_loss(model[2:](middle), y)
    expected.backward()
    torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9).step()
    assert loss == expected.item()
    assert torch.equal(hidden.tensors[0], middle)
    assert torch.equal(gradients[0], middle.grad)
    assert_same(state_of([first, last]), model.state_dict())


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_a_micro_batch_reads_the_version_of_the_plan_while_updates_go_on(seed, optimizer):
    """Weight stashing, whoever is quick or slow: equal to the oracle to the bit."""
    cls, kwargs = OPTIMIZERS[optimizer]
    model, data = kitchen_sink(), batches(8)
    stages = split(model, POINTS[3], ASYNC, F.cross_entropy, optimizer)
    driver = Driver(ASYNC, stages, seed)
    losses = driver.train(data)
    assert driver.reads == [
        [0, 0, 0, 1, 2, 3, 4, 5],
        [0, 0, 1, 2, 3, 4, 5, 6],
        [0, 1, 2, 3, 4, 5, 6, 7],
    ]
    assert [stage.statistics()["versions_kept_most"] for stage in stages] == [3, 2, 1]
    weights, expected = oracle(model, POINTS[3], data, F.cross_entropy, lambda p: cls(p, **kwargs))
    assert losses == expected
    assert_same(state_of(stages), weights)


@pytest.mark.parametrize("name", ["zero-bubble", "interleaved-1f1b", "gpipe"])
def test_a_schedule_with_a_flush_is_gradient_accumulation(name):
    """Two halves of a backward, several stages on a worker: the same bits. Equal shares of 1."""
    plan = plan_for(name, num_stages=4, per_update=4)
    model, data = kitchen_sink(), batches(8)
    stages = split(model, POINTS[4], plan, F.cross_entropy, "adamw")
    losses = Driver(plan, stages, 1).train(data)
    cls, kwargs = OPTIMIZERS["adamw"]
    one = a_stage(
        kitchen_sink(),
        plan_for("gpipe", num_stages=1, per_update=4),
        loss_fn=F.cross_entropy,
        optimizer=(cls, kwargs),
    )
    assert losses == trained(one, data)
    assert_same(state_of(stages), one.module.state_dict())


def test_a_plan_that_is_no_chain():
    """Stage 3 takes a pair, stage 0 adds the gradients of two consumers."""
    plan, data = diamond.plan(), regression(6)
    stages = split(diamond.model(), range(4), plan, F.mse_loss, "adamw")
    losses = Driver(plan, stages, 2).train(data)
    cls, kwargs = OPTIMIZERS["adamw"]
    weights, expected = diamond.oracle(
        diamond.model(), data, F.mse_loss, lambda p: cls(p, **kwargs)
    )
    assert losses == expected
    assert_same(state_of(stages), weights)


# -- forward ----------------------------------------------------------------------------------


class Both(nn.Module):
    """Takes a pair."""

    def forward(self, pair):
        assert type(pair) is tuple
        left, right = pair
        return left - right["right"]


def test_a_stage_with_two_producers_takes_the_tuple_of_their_outputs():
    """In their order, each as it was sent, and gives each its gradient."""
    stage = a_stage([Both()], diamond.plan(), 3, loss_fn=lambda x, y: (x * y).sum())
    left, right = torch.ones(2), torch.full((2,), 3.0)
    inputs = [value(left, wanted=True), value({"right": right}, wanted=True)]
    assert stage.forward(0, inputs, HYPER, value(torch.tensor([5.0, 7.0]))) == -24.0
    ((of_left,), (of_right,)) = back(stage, 0)
    assert of_left.tolist() == [5, 7]
    assert of_right.tolist() == [-5, -7]


class MakesPair(nn.Module):
    """Differentiable, integer and frozen members; a buffer and its own input among them."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x):
        self.calls += 1
        return Pair(self.linear(x), x > 0, "pair", None, {"calls": self.calls, "x": x})


def test_an_output_says_which_of_its_tensors_want_a_gradient():
    stage = a_stage([MakesPair()])
    (made,) = stage.forward(0, [value(torch.ones(1, 2))], HYPER)
    assert made.requires_grad == (True, False, False, False)
    pair = content(made)
    assert (type(pair), pair.name, pair.nothing) == (Pair, "pair", None)
    assert not any(t.requires_grad for t in made.tensors)


def test_what_was_returned_does_not_change_with_what_the_stage_does_next():
    """A buffer that the next forward changes, and the model's input, which is the caller's."""
    stage, x = a_stage([MakesPair()], ASYNC), torch.ones(1, 2)
    made = stage.forward(0, [value(x)], HYPER)
    stage.forward(1, [value(x)], HYPER)
    x.zero_()
    assert content(made).extra["calls"].tolist() == [1]
    assert content(made).extra["x"].tolist() == [[1, 1]]


def test_only_the_tensors_that_asked_for_a_gradient_get_one_in_their_order():
    """None where nothing depends on a tensor."""

    class Uses(nn.Module):
        def forward(self, pair):
            return pair["a"] * pair["count"] + pair["b"] * 3

    stage = a_stage([Uses()], TWO, 1, loss_fn=lambda x, y: (x * y).sum())
    structure, tensors = flatten(
        {"a": torch.ones(1), "count": torch.tensor(2), "unused": torch.ones(1), "b": torch.ones(1)}
    )
    stage.forward(
        0,
        [Value(structure, tuple(tensors), (True, False, True, True))],
        HYPER,
        value(torch.ones(1)),
    )
    ((a, unused, b),) = back(stage, 0)
    assert (a.tolist(), unused, b.tolist()) == ([2], None, [3])


def test_a_first_layer_may_work_in_place():
    """Its input is no leaf, as inside an unsplit model."""
    stage = a_stage([nn.ReLU(inplace=True)], TWO, 1, loss_fn=lambda x, y: (x * y).sum())
    x = torch.tensor([-1.0, 2.0])
    stage.forward(0, [value(x, wanted=True)], HYPER, value(torch.tensor([5.0, 7.0])))
    ((gradient,),) = back(stage, 0)
    assert gradient.tolist() == [0, 7]


def test_gradients_keep_the_strides_that_the_unsplit_model_gives_them():
    """Not those of the input: kernels round differently for other strides."""
    stage = a_stage([nn.Flatten()], TWO, 1, loss_fn=lambda x, y: x.sum())
    x = torch.ones(2, 3, 4).transpose(1, 2)
    stage.forward(0, [value(x, wanted=True)], HYPER, value(None))
    ((gradient,),) = back(stage, 0)
    assert gradient.shape == (2, 4, 3)
    assert gradient.stride() == (0, 0, 0)  # an expanded one, as of every sum


def test_a_layer_that_stands_there_twice_runs_twice():
    layer = nn.Linear(2, 2)
    x = torch.ones(1, 2)
    made = a_stage([layer, layer]).forward(0, [value(x)], HYPER)
    assert torch.equal(content(made), layer(layer(x)))


def test_random_numbers_depend_on_seed_micro_batch_and_layer_alone():
    """Not on what was drawn before, nor on the stage at which a layer is."""
    x = torch.ones(50)
    for index in range(2):
        stage = a_stage([nn.Dropout(0.5)], ASYNC, index, first=7, seed=5)
        for m in range(2):
            torch.rand(m)
            made = content(stage.forward(m, [value(x)], HYPER))
            torch.manual_seed(layer_seed(5, m, "7"))
            assert torch.equal(made, F.dropout(x, 0.5))


@pytest.mark.parametrize("halves", [False, True])
def test_so_do_those_of_a_backward_and_of_a_step(halves):
    """Whatever came between."""
    states = []
    for between in (0, 3):
        torch.manual_seed(0)
        stage = a_stage([Noisy()], loss_fn=F.mse_loss, optimizer=(NoisySGD, {"lr": 0.1}))
        ((x, y),) = regression(1)
        stage.forward(0, [value(x)], HYPER, value(y))
        torch.rand(between)
        if halves:
            stage.backward_input(0)
            torch.rand(between)
            back_weight(stage, 0)
        else:
            back(stage, 0)
        torch.rand(between)
        stage.step(0)
        states.append(copy.deepcopy(stage.module.state_dict()))
    assert_same(states[0], states[1])


# -- the loss ---------------------------------------------------------------------------------


def test_a_share_weighs_what_is_derived_and_not_what_is_reported():
    """Two micro-batches of one and of three samples are one mini-batch of four."""
    plan = plan_for("1f1b", num_stages=1, per_update=2)
    stage = a_stage([nn.Linear(1, 1)], plan, loss_fn=F.mse_loss)
    x, y = torch.tensor([[1.0], [2.0], [3.0], [4.0]]), torch.zeros(4, 1)
    weights = {k: t.clone() for k, t in stage.module.state_dict().items()}
    losses = []
    for m, part in enumerate((slice(0, 1), slice(1, 4))):
        share = (0.25, 0.75)[m]
        losses.append(stage.forward(m, [value(x[part])], HYPER, value(y[part]), share))
        back(stage, m)
    stage.step(0)

    plain = nn.Sequential(nn.Linear(1, 1))
    plain.load_state_dict(weights)
    for m, part in enumerate((slice(0, 1), slice(1, 4))):
        loss = F.mse_loss(plain(x[part]), y[part])
        assert losses[m] == loss.item()
        (loss * (0.25, 0.75)[m]).backward()
    torch.optim.SGD(plain.parameters(), lr=0.05, momentum=0.9).step()
    assert_same(stage.module.state_dict(), plain.state_dict())


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_is_refused_with_its_place(bad):
    stage = a_stage([nn.Linear(1, 1)], TWO, 1, loss_fn=lambda x, y: x.abs().sum() * y)
    with pytest.raises(NonFiniteLoss, match=f"stage 1.*micro-batch 0.*{bad}") as e:
        stage.forward(0, [value(torch.ones(1, 1))], HYPER, value(torch.tensor(bad)))
    assert (e.value.stage, e.value.action) == (1, "F0")


def test_or_ignored_if_the_user_says_so():
    stage = a_stage([nn.Linear(1, 1)], loss_fn=lambda x, y: x.sum() * y, on_nan="ignore")
    loss = stage.forward(0, [value(torch.ones(1, 1))], HYPER, value(torch.tensor(math.nan)))
    assert math.isnan(loss)
    back(stage, 0)
    stage.step(0)


@pytest.mark.parametrize(
    ("loss_fn", "found"),
    [(lambda x, y: x, r"\(2, 3\)"), (lambda x, y: 1.5, "float"), (lambda x, y: None, "NoneType")],
)
@pytest.mark.parametrize("ask", ["forward", "evaluate"])
def test_a_loss_that_is_no_scalar_is_refused(loss_fn, found, ask):
    stage = a_stage([nn.Identity()], loss_fn=loss_fn)
    inputs, target = [value(torch.ones(2, 3))], value(None)
    arguments = (0, inputs, target) if ask == "evaluate" else (0, inputs, HYPER, target)
    with pytest.raises(ConfigError, match=f"loss_fn.*{found}"):
        getattr(stage if ask == "forward" else stage.passes, ask)(*arguments)


def test_a_loss_with_one_element_is_a_scalar():
    stage = a_stage([nn.Linear(1, 1)], loss_fn=lambda x, y: (x * y).sum(0))
    assert type(stage.forward(0, [value(torch.ones(1, 1))], HYPER, value(torch.ones(1)))) is float
    back(stage, 0)


# -- backward ---------------------------------------------------------------------------------


@pytest.mark.parametrize("index", range(3))
def test_both_halves_of_a_backward_are_a_backward(index):
    """On the first stage, in the middle and on the last; the first half has what is waited for."""
    found = []
    for halves in (False, True):
        torch.manual_seed(0)
        layers = [nn.Linear(4, 4), nn.LayerNorm(4), nn.Dropout(0.5), nn.Linear(4, 4)]
        loss_fn = F.mse_loss if index == 2 else None
        stage = a_stage(layers, ASYNC, index, loss_fn=loss_fn, optimizer="adamw")
        x, other = torch.randn(3, 4), torch.randn(3, 4)
        target, gradients = (value(other), ()) if index == 2 else (None, [[other]])
        stage.forward(0, [value(x, wanted=index > 0)], HYPER, target)
        if halves:
            caught = stage.backward_input(0, gradients)
            assert stage.ended == 0
            assert stage.version_of(0) == 0
            back_weight(stage, 0)
        else:
            caught = back(stage, 0, gradients)
        assert stage.ended == 1
        stage.step(0)
        found.append((caught, copy.deepcopy(stage.module.state_dict())))
    (one, one_state), (two, two_state) = found
    assert_same(one_state, two_state)
    assert [len(of_input) for of_input in one] == [1 if index else 0]
    assert all(torch.equal(a, b) for a, b in zip(one[0], two[0], strict=True))


@pytest.mark.parametrize("halves", [False, True])
def test_gradients_of_several_consumers_are_added_in_the_order_of_the_consumers(halves):
    """Which floats can tell: (1e8 - 1e8) + 1 is 1, (1 + 1e8) - 1e8 is 0."""
    sums = []
    for given in ((1e8, -1e8, 1.0), (1.0, 1e8, -1e8)):
        fan = dataclasses.replace(diamond.plan(), links=((0, 1), (0, 2), (0, 3), (1, 3), (2, 3)))
        stage = a_stage([nn.Identity()], fan, 0)
        stage.forward(0, [value(torch.zeros(1), wanted=True)], HYPER)
        backward = stage.backward_input if halves else stage.backward
        ((gradient,),) = backward(0, [[torch.tensor([g])] for g in given])
        sums.append(gradient.item())
    assert sums == [1, 0]


@pytest.mark.parametrize("halves", [False, True])
def test_a_consumer_that_has_no_gradient_adds_none(halves):
    stage = a_stage([nn.Identity()], diamond.plan(), 0)
    stage.forward(0, [value(torch.zeros(1), wanted=True)], HYPER)
    backward = stage.backward_input if halves else stage.backward
    ((gradient,),) = backward(0, [[None], [torch.tensor([3.0])]])
    assert gradient.tolist() == [3]


@pytest.mark.parametrize("halves", [False, True])
def test_where_no_consumer_has_a_gradient_none_goes_back_and_nothing_is_learnt(halves):
    """A weight without a gradient is not decayed either: an optimizer leaves it alone."""
    stage = a_stage([nn.Linear(2, 2)], TWO, 0, optimizer="adamw")
    before = copy.deepcopy(stage.module.state_dict())
    stage.forward(0, [value(torch.ones(1, 2), wanted=True)], HYPER)
    if halves:
        assert stage.backward_input(0, [[None]]) == [[None]]
        back_weight(stage, 0)
    else:
        assert back(stage, 0, [[None]]) == [[None]]
    stage.step(0)
    assert_same(stage.module.state_dict(), before)


def test_what_the_caller_gave_is_not_changed():
    """Inputs, targets and gradients: their bits stay."""
    torch.manual_seed(0)
    stage = a_stage([nn.Linear(2, 2), nn.ReLU(inplace=True)], TWO, 0)
    x, gradient = torch.randn(1, 2), torch.randn(1, 2)
    kept = x.clone(), gradient.clone()
    hyper = [{"lr": 0.5}]
    for m in range(2):
        stage.forward(m, [value(x)], hyper)
        back(stage, m, [[gradient]])
        stage.step(m)
    stage.passes.evaluate(0, [value(x)], None)
    stage.passes.infer(0, [value(x)])
    assert torch.equal(x, kept[0])
    assert torch.equal(gradient, kept[1])
    assert not x.requires_grad
    assert hyper == [{"lr": 0.5}]
    y = torch.randn(1, 2)
    last = a_stage([nn.Linear(2, 2)], TWO, 1, loss_fn=F.mse_loss)
    kept = y.clone()
    last.forward(0, [value(x, wanted=True)], HYPER, value(y))
    ((found,),) = back(last, 0)
    assert torch.equal(y, kept)
    sent = found.clone()
    last.step(0)
    last.forward(1, [value(torch.randn(1, 2), wanted=True)], HYPER, value(y))
    back(last, 1)
    assert torch.equal(found, sent)


# -- a micro-batch without samples ------------------------------------------------------------


@pytest.mark.parametrize("halves", [False, True])
def test_a_micro_batch_without_samples_changes_nothing(halves):
    """The update is that of the others; weights and buffers are as if it were not there."""
    states = []
    for empty in (False, True):
        torch.manual_seed(0)
        plan = plan_for("gpipe", num_stages=1, per_update=2 if empty else 1)
        stage = a_stage(
            [nn.Linear(8, 8), nn.BatchNorm1d(8)], plan, loss_fn=F.mse_loss, optimizer="adamw"
        )
        ((x, y),) = regression(1)
        stage.forward(0, [value(x)], HYPER, value(y))
        back(stage, 0)
        if empty:
            assert stage.forward(1, None, HYPER) is None
            if halves:
                assert stage.backward_input(1) == []
                back_weight(stage, 1)
            else:
                assert back(stage, 1) == []
            assert (stage.next_forward, stage.ended) == (2, 2)
        stage.step(0)
        states.append(copy.deepcopy(stage.module.state_dict()))
    assert_same(states[0], states[1])


# -- step -------------------------------------------------------------------------------------


def test_an_update_takes_the_hyper_parameters_that_came_with_its_last_micro_batch():
    """Not with the micro-batch that went forward last."""
    stage = a_stage([nn.Linear(1, 1, bias=False)], ASYNC, 0, optimizer=(torch.optim.SGD, {"lr": 9}))
    nn.init.zeros_(stage.module[0].weight)
    for m, rate in enumerate((0.5, 0.25, 0.125)):
        stage.forward(m, [value(torch.ones(1, 1))], [{"lr": rate}])
    for m, weight in enumerate((-0.5, -0.75, -0.875)):
        back(stage, m, [[torch.ones(1, 1)]])
        stage.step(m)
        assert stage.module[0].weight.item() == weight


def test_a_step_needs_an_optimizer():
    stage = a_stage([nn.Linear(1, 1)], optimizer=None, loss_fn=F.mse_loss)
    stage.forward(0, [value(torch.ones(1, 1))], HYPER, value(torch.ones(1, 1)))
    back(stage, 0)
    with pytest.raises(ConfigError, match="optimizer"):
        stage.step(0)


def test_a_stage_without_weights_steps_all_the_same():
    """Its versions are numbers only."""
    stage = a_stage([nn.ReLU()], TWO, 0)
    for m in range(2):
        assert not stage.forward(m, [value(torch.ones(1))], HYPER)[0].requires_grad[0]
        assert back(stage, m, [[]]) == [[]]
        stage.step(m)
    assert stage.statistics()["updates"] == 2


# -- what is no training ----------------------------------------------------------------------


class Modes(nn.Module):
    """Returns its mode, and its input doubled by its weight."""

    def __init__(self, fail=False):
        super().__init__()
        self.w, self.fail = nn.Parameter(torch.tensor(2.0)), fail
        self.seen = []

    def forward(self, x):
        self.seen.append((self.training, torch.is_grad_enabled()))
        if self.fail:
            raise ZeroDivisionError
        return x * self.w


@pytest.mark.parametrize("fail", [False, True])
def test_evaluate_leaves_every_module_its_mode(fail):
    stage = a_stage([Modes(), Modes(fail)])
    stage.module[1].eval()
    modes = [module.training for module in stage.module.modules()]
    if fail:
        with pytest.raises(ZeroDivisionError):
            stage.passes.evaluate(0, [value(torch.ones(1))], None)
    else:
        assert content(stage.passes.evaluate(0, [value(torch.ones(1))], None)[0]).tolist() == [4]
    assert [module.seen for module in stage.module] == [[(False, False)]] * 2
    assert [module.training for module in stage.module.modules()] == modes


def test_evaluate_returns_the_loss_where_there_is_a_target():
    """Whatever it is: nothing is trained on it."""
    stage = a_stage([Modes()], loss_fn=lambda x, y: (x * y).sum())
    assert stage.passes.evaluate(0, [value(torch.ones(1))], value(torch.tensor(3.0))) == (6.0, {})
    nan, _ = stage.passes.evaluate(1, [value(torch.ones(1))], value(torch.tensor(math.nan)))
    assert math.isnan(nan)


@pytest.mark.parametrize("mode", [True, False])
@pytest.mark.parametrize("training", [True, False])
def test_infer_runs_in_eval_mode_unless_told_otherwise(mode, training):
    stage = a_stage([Modes()])
    stage.module.train(mode)
    assert content(stage.passes.infer(0, [value(torch.ones(1))], training=training)).tolist() == [2]
    assert stage.module[0].seen == [(mode and training, False)]
    assert stage.module.training == mode


class Merges(nn.Module):
    """As adapters do: in eval mode it adds to the weight what it has learned beside it."""

    def __init__(self):
        super().__init__()
        self.weight, self.beside = nn.Parameter(torch.ones(2) / 3), nn.Parameter(torch.ones(2) / 7)
        self.merged = False

    def train(self, mode=True):
        if mode is self.merged:
            with torch.no_grad():
                self.weight.add_(self.beside, alpha=-1 if self.merged else 1)
            self.merged = not mode
        return super().train(mode)

    def forward(self, x):
        return x * (self.weight if self.merged else self.weight + self.beside)


@pytest.mark.parametrize("run", ["evaluate", "infer"])
def test_modules_that_do_more_than_set_a_mode_are_called_and_put_back(run):
    stage, x = a_stage([Merges(), nn.BatchNorm1d(2)]), torch.ones(2, 2)
    stage.module[1].eval()  # a frozen one stays so
    before = {k: v.clone() for k, v in stage.module.state_dict().items()}
    if run == "evaluate":
        made, _ = stage.passes.evaluate(0, [value(x)], None)
    else:
        made = stage.passes.infer(0, [value(x)])
    assert torch.equal(content(made), stage.module[1](x * (torch.ones(2) / 3 + torch.ones(2) / 7)))
    assert_same(stage.module.state_dict(), before)
    assert (stage.module[0].training, stage.module[0].merged) == (True, False)
    assert not stage.module[1].training


def test_a_mode_that_changes_weights_is_refused_where_there_are_versions():
    for plan, refused in ((ONE, False), (ASYNC, True)):
        stage = a_stage([Merges()], plan, 0)
        if refused:
            with pytest.raises(ConfigError, match=r"to set the mode changed the parameter '0.weig"):
                set_mode(stage, False)
        else:
            set_mode(stage, False)
            assert stage.module[0].merged


class CountsInEval(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))
        self.register_buffer("table", None)

    def forward(self, x):
        self.calls += 1
        self.table = torch.ones(3)
        return x + self.calls


def test_an_evaluation_leaves_no_trace_in_buffers():
    stage = a_stage([CountsInEval()])
    for _ in range(2):
        assert content(stage.passes.infer(0, [value(torch.ones(1))])).tolist() == [2]
    assert stage.module[0].calls.tolist() == [0]
    assert stage.module[0].table is None
    stage.passes.infer(0, [value(torch.ones(1))], training=True)
    assert stage.module[0].calls.tolist() == [1]


class Edits(nn.Module):
    """Changes its weight in forward, in one of three ways."""

    def __init__(self, how):
        super().__init__()
        self.weight, self.how = nn.Parameter(torch.ones(2)), how

    def forward(self, x):
        with torch.no_grad():
            if self.how == "in place":
                self.weight.mul_(0.5)
            elif self.how == "data":
                self.weight.data = self.weight.data * 0.5
            elif self.how == "another":
                self._parameters["weight"] = nn.Parameter(torch.zeros(2))
        return x * self.weight


@pytest.mark.parametrize(
    ("how", "plan", "words"),
    [
        ("in place", ASYNC, r"stage 0: the forward changed the parameter '0.weight' in place"),
        ("in place", ONE, None),
        ("data", ASYNC, r"changed the parameter '0.weight' by assigning its .data"),
        ("data", ONE, r"changed the parameter '0.weight' by assigning its .data"),
        ("another", ONE, r"another tensor in the place of its parameter '0.weight'"),
    ],
)
def test_weights_that_a_forward_changes(how, plan, words):
    stage = a_stage([Edits(how)], plan, 0)
    if words is None:
        stage.forward(0, [value(torch.ones(2))], HYPER)
        assert stage.module[0].weight.tolist() == [0.5, 0.5]
    else:
        with pytest.raises(ConfigError, match=words):
            stage.forward(0, [value(torch.ones(2))], HYPER)


class Rebinds(torch.optim.SGD):
    """Assigns .data, as old optimizers do."""

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.data = p.data - group["lr"] * p.grad


def test_an_optimizer_may_assign_data():
    stage = a_stage([nn.Linear(1, 1)], ASYNC, 0)
    plain = copy.deepcopy(stage.module)
    spec = OptimizerSpec(
        optimizer_class=Rebinds, kwargs={"lr": 0.5}, groups=(GroupSpec(names=("0.weight",)),)
    )
    stage.set_optimizer(cloudpickle.dumps(spec))
    for m in range(3):
        stage.forward(m, [value(torch.ones(1, 1))], HYPER)
    back(stage, 0, [[torch.ones(1, 1)]])
    stage.step(0)
    assert torch.equal(stage.module[0].weight, plain[0].weight - 0.5)
    assert [stage.parameters.leaves(m)[0].item() for m in (1, 2)] == [plain[0].weight.item()] * 2


def test_passes_take_the_tuple_of_two_producers_outputs_too():
    stage = a_stage([Both()], diamond.plan(), 3)
    inputs = [value(torch.ones(1)), value({"right": torch.ones(1)})]
    assert content(stage.passes.evaluate(0, inputs, None)[0]).tolist() == [0]
    assert content(stage.passes.infer(0, inputs)).tolist() == [0]


def test_passes_read_the_newest_weights_and_change_nothing_that_is_in_flight():
    stage = a_stage([nn.Linear(1, 1)], ASYNC, 0)
    for m in range(3):
        stage.forward(m, [value(torch.ones(1, 1))], HYPER)
    back(stage, 0, [[torch.ones(1, 1)]])
    stage.step(0)
    newest = stage.module[0](torch.ones(1, 1))
    assert torch.equal(content(stage.passes.infer(0, [value(torch.ones(1, 1))])), newest)
    assert torch.equal(
        content(stage.passes.evaluate(0, [value(torch.ones(1, 1))], None)[0]), newest
    )
    assert [stage.version_of(m) for m in (1, 2)] == [0, 0]


def test_random_numbers_of_passes_depend_on_kind_number_and_layer():
    stage, x = a_stage([nn.Dropout(0.5)], first=3, seed=5), torch.ones(50)
    for number in range(2):
        made = content(stage.passes.infer(number, [value(x)], training=True))
        torch.manual_seed(layer_seed(5, f"infer {number}", "3"))
        assert torch.equal(made, F.dropout(x, 0.5))


def test_the_output_of_a_pass_is_not_changed_by_the_next():
    stage = a_stage([MakesPair()])
    first = stage.passes.infer(0, [value(torch.ones(1, 2))])
    stage.passes.infer(1, [value(torch.ones(1, 2))])
    assert content(first).extra["calls"].tolist() == [1]


# -- state ------------------------------------------------------------------------------------


def with_versions():
    """Stage 0 of 3 after four updates, with nothing in flight and versions 2 to 4 kept."""
    torch.manual_seed(0)
    stage = a_stage([nn.Linear(1, 1)], ASYNC, 0, optimizer=(torch.optim.SGD, {"lr": 0.1}))
    x, gradient = torch.ones(1, 1), torch.ones(1, 1)
    for action in ASYNC.order(0, 0, 4):
        match action.kind:
            case Kind.FORWARD:
                stage.forward(action.index, [value(x)], HYPER)
            case Kind.BACKWARD:
                back(stage, action.index, [[gradient]])
            case Kind.STEP:
                stage.step(action.index)
    assert stage.parameters.ledger.kept == {2, 3, 4}
    return stage


def test_loading_a_state_forgets_the_versions_before():
    """The next forward reads the newest, though the plan says an older one."""
    stage = with_versions()
    loaded = {
        "0.weight": torch.tensor([[5.0]]),
        "0.bias": torch.tensor([7.0]),
        "9.x": torch.ones(1),
    }
    stage_state.load_state(stage, loaded)
    loaded["0.weight"].zero_()  # a copy was taken
    assert stage.parameters.ledger.kept == {4}
    assert ASYNC.reads(0, 4) == 2
    assert content(stage.forward(4, [value(torch.ones(1, 1))], HYPER)).tolist() == [[12]]
    assert stage.version_of(4) == 4


def test_what_a_state_does_not_have_stays():
    stage = a_stage([nn.Linear(1, 1)])
    bias = stage.module[0].bias.item()
    stage_state.load_state(stage, {"0.weight": torch.tensor([[5.0]])})
    assert (stage.module[0].weight.item(), stage.module[0].bias.item()) == (5, bias)


def test_weights_are_not_replaced_while_micro_batches_are_in_flight():
    stage = a_stage([nn.Linear(1, 1)])
    stage.forward(0, [value(torch.ones(1, 1))], HYPER)
    with pytest.raises(VersionError, match="in flight"):
        stage_state.load_state(stage, {})
    with pytest.raises(VersionError, match="in flight"):
        stage_state.restore(stage, Snapshot(), 0, 0)


def test_a_stage_goes_on_as_of_an_update_with_its_older_versions_and_buffers():
    """With k micro-batches per update, the next one is k times the updates."""

    class Adds(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.zeros(1))
            self.register_buffer("hidden", torch.zeros(1), persistent=False)

        def forward(self, x):
            return x + self.w + self.hidden

    plan = plan_for("async-1f1b", num_stages=3, per_update=2)
    stage = a_stage([Adds()], plan, 0)
    snapshot = Snapshot(
        weights={"0.w": torch.tensor([50.0])},
        versions={4: {"0.w": torch.tensor([40.0])}},
        hidden={"0.hidden": torch.tensor([0.5])},
    )
    assert stage_state.restore(stage, snapshot, 5, floor=4)
    assert (stage.next_forward, stage.ended) == (10, 10)
    assert stage.statistics()["updates"] == 5
    for m, (version, output) in enumerate(((4, 40.5), (4, 40.5), (5, 50.5)), 10):
        assert content(stage.forward(m, [value(torch.zeros(1))], HYPER)).item() == output
        assert stage.version_of(m) == version


def test_a_new_optimizer_begins_without_state():
    stage = a_stage([nn.Linear(8, 8)], loss_fn=F.mse_loss, optimizer="adam")
    trained(stage, regression(1))
    assert any(key.part == "optimizer" for key in stage.optimizer.state())
    cls, kwargs = OPTIMIZERS["adam"]
    stage.set_optimizer(pickled(cls, kwargs, ("0.weight", "0.bias")))
    assert {key.part for key in stage.optimizer.state()} == {"split"}


def test_statistics():
    stage = with_versions()
    assert stage.statistics() == {
        "stage": 0,
        "updates": 4,
        "updates_skipped": 0,
        "versions_kept": 3,
        "versions_kept_most": 3,
        "buffers_allocated": 3,
        "weight_bytes": 8,
        "correction_bytes": 0,
        "parameters": 2,
    }


# -- what is out of turn ----------------------------------------------------------------------


@pytest.mark.parametrize("ask", ["backward", "backward_input", "backward_weight"])
def test_a_backward_needs_a_forward_in_flight(ask):
    stage = a_stage([nn.Linear(1, 1)], TWO, 0)
    stage.forward(0, [value(torch.ones(1, 1))], HYPER)
    with pytest.raises(ScheduleError, match=r"stage 0.*micro-batch 3.*\[0\]"):
        getattr(stage, ask)(3)


def test_a_micro_batch_that_is_not_in_flight_reads_no_version():
    with pytest.raises(VersionError, match="in flight"):
        a_stage([nn.Linear(1, 1)]).version_of(0)


def test_a_micro_batch_goes_forward_once():
    stage = a_stage([nn.Linear(1, 1)])
    stage.forward(0, [value(torch.ones(1, 1))], HYPER)
    with pytest.raises(VersionError, match=r"micro-batch 0 .*twice"):
        stage.forward(0, [value(torch.ones(1, 1))], HYPER)


def test_a_version_that_is_not_there_cannot_be_read():
    """The plan says that micro-batch 1 reads version 1, which no step has made."""
    stage = a_stage([nn.Linear(1, 1)])
    stage.forward(0, [value(torch.ones(1, 1))], HYPER)
    with pytest.raises(VersionError, match=r"F1 .*version 1.*\[0\]"):
        stage.forward(1, [value(torch.ones(1, 1))], HYPER)


@pytest.mark.parametrize("halves", [False, True])
def test_where_no_gradient_comes_to_the_entrance_none_is_sent(halves):
    """Zeros in its place would let an optimizer decay weights of the stage before."""
    stage = a_stage([Blocked(), nn.Linear(2, 2)], TWO, 1, loss_fn=F.mse_loss)
    stage.forward(0, [value(torch.ones(1, 2), wanted=True)], HYPER, value(torch.ones(1, 2)))
    backward = stage.backward_input if halves else stage.backward
    assert backward(0) == [[None]]
