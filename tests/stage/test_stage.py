"""A stage by itself: it takes tensors and returns what is to be sent. Nothing moves here."""

import copy
import math
import random
from collections import deque
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from support import diamond
from support.messages import head
from support.models import (
    OPTIMIZERS,
    POINTS,
    Noisy,
    NoisySGD,
    batches,
    kitchen_sink,
    mlp,
    regression,
)
from support.oracle import assert_same, layer_seed, oracle
from support.stages import ASYNC, TWO, a_stage, back, back_weight, content, pickled, value
from torch import nn

from pipedream_rt.errors import ConfigError, NonFiniteLoss, ScheduleError, VersionError
from pipedream_rt.messages.head import LossTask
from pipedream_rt.messages.snapshot import Snapshot
from pipedream_rt.messages.tree import Value, own
from pipedream_rt.schedules import COORDINATOR, Edge, EdgeKind, Kind, plan_for
from pipedream_rt.stage import stage_state


def split(model, points, plan, loss_fn, optimizer):
    """A model as stages, the last of which computes the loss."""
    layers, bounds = list(copy.deepcopy(model)), [*points, len(model)]
    return [
        a_stage(
            layers[first:end], plan, index, loss_fn=loss_fn if index in plan.exits else None,
            optimizer=optimizer, first=first,
        )
        for index, (first, end) in enumerate(pairwise(bounds))
    ]  # fmt: skip


def state_of(stages):
    return {key: t for stage in stages for key, t in stage.module.state_dict().items()}


class Driver:
    """Does the orders of a plan on stages of this process, and carries what they return.

    Whoever has what its next action needs may be next: a seed says who is.

    Attributes:
        reads: By stage, the versions that its forwards have read.
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
                made = stage.forward(head(m), needed, target)
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
    accumulates = plan_for("gpipe", num_stages=1, per_update=4)
    one = a_stage(kitchen_sink(), accumulates, loss_fn=F.cross_entropy, optimizer="adamw")
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
    assert stage.forward(head(0), inputs, value(torch.tensor([5.0, 7.0]))) == -24.0
    ((of_left,), (of_right,)) = back(stage, 0)
    assert of_left.tolist() == [5, 7]
    assert of_right.tolist() == [-5, -7]


def test_a_layer_that_stands_there_twice_runs_twice():
    layer = nn.Linear(2, 2)
    x = torch.ones(1, 2)
    made = a_stage([layer, layer]).forward(head(0), [value(x)])
    assert torch.equal(content(made), layer(layer(x)))


def test_random_numbers_depend_on_seed_micro_batch_and_layer_alone():
    """Not on what was drawn before, nor on the stage at which a layer is."""
    x = torch.ones(50)
    for index in range(2):
        stage = a_stage([nn.Dropout(0.5)], ASYNC, index, first=7, seed=5)
        for m in range(2):
            torch.rand(m)
            made = content(stage.forward(head(m), [value(x)]))
            torch.manual_seed(layer_seed(5, m, "7"))
            assert torch.equal(made, F.dropout(x, 0.5))


@pytest.mark.parametrize("wanted", [False, True])
@pytest.mark.parametrize("halves", [False, True])
def test_so_do_those_of_a_backward_and_of_a_step(halves, wanted):
    """Whatever came between; the first half draws where the gradient of an input is wanted."""
    states = []
    for between in (0, 3):
        torch.manual_seed(0)
        stage = a_stage([Noisy()], loss_fn=F.mse_loss, optimizer=(NoisySGD, {"lr": 0.1}))
        ((x, y),) = regression(1)
        stage.forward(head(0), [value(x, wanted)], value(y))
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
        losses.append(
            stage.forward(head(m), [value(x[part])], value(y[part]), LossTask(share=share))
        )
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
        stage.forward(head(0), [value(torch.ones(1, 1))], value(torch.tensor(bad)))
    assert (e.value.stage, e.value.action) == (1, "F0")


def test_or_ignored_if_the_user_says_so():
    stage = a_stage([nn.Linear(1, 1)], loss_fn=lambda x, y: x.sum() * y, on_nan="ignore")
    loss = stage.forward(head(0), [value(torch.ones(1, 1))], value(torch.tensor(math.nan)))
    assert math.isnan(loss)
    back(stage, 0)
    stage.step(0)


@pytest.mark.parametrize(
    ("loss_fn", "found"),
    [
        (lambda x, y: x, r"one element, it returned \(2, 3\)"),
        (lambda x, y: 1.5, "float"),
        (lambda x, y: None, "NoneType"),
    ],
)
@pytest.mark.parametrize("ask", ["forward", "evaluate"])
def test_a_loss_that_is_no_scalar_is_refused(loss_fn, found, ask):
    stage = a_stage([nn.Identity()], loss_fn=loss_fn)
    inputs, target = [value(torch.ones(2, 3))], value(None)
    arguments = (0 if ask == "evaluate" else head(0), inputs, target)
    with pytest.raises(ConfigError, match=f"loss_fn.*{found}"):
        getattr(stage if ask == "forward" else stage.passes, ask)(*arguments)


def test_a_loss_with_one_element_is_a_scalar():
    stage = a_stage([nn.Linear(1, 1)], loss_fn=lambda x, y: (x * y).sum(0))
    assert type(stage.forward(head(0), [value(torch.ones(1, 1))], value(torch.ones(1)))) is float
    back(stage, 0)


# -- backward ---------------------------------------------------------------------------------


@pytest.mark.parametrize("halves", [False, True])
def test_where_no_consumer_has_a_gradient_none_goes_back_and_nothing_is_learnt(halves):
    """A weight without a gradient is not decayed either: an optimizer leaves it alone."""
    stage = a_stage([nn.Linear(2, 2)], TWO, 0, optimizer="adamw")
    before = copy.deepcopy(stage.module.state_dict())
    stage.forward(head(0), [value(torch.ones(1, 2), wanted=True)])
    assert back(stage, 0, [[None]], halves) == [[None]]
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
        stage.forward(head(m, hyper), [value(x)])
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
    last.forward(head(0), [value(x, wanted=True)], value(y))
    ((found,),) = back(last, 0)
    assert torch.equal(y, kept)
    sent = found.clone()
    last.step(0)
    last.forward(head(1), [value(torch.randn(1, 2), wanted=True)], value(y))
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
        stage.forward(head(0), [value(x)], value(y))
        back(stage, 0)
        if empty:
            assert stage.forward(head(1), None) is None
            assert back(stage, 1, halves=halves) == []
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
        stage.forward(head(m, [{"lr": rate}]), [value(torch.ones(1, 1))])
    for m, weight in enumerate((-0.5, -0.75, -0.875)):
        back(stage, m, [[torch.ones(1, 1)]])
        stage.step(m)
        assert stage.module[0].weight.item() == weight


def test_a_step_needs_an_optimizer():
    stage = a_stage([nn.Linear(1, 1)], optimizer=None, loss_fn=F.mse_loss)
    stage.forward(head(0), [value(torch.ones(1, 1))], value(torch.ones(1, 1)))
    back(stage, 0)
    with pytest.raises(ConfigError, match="optimizer"):
        stage.step(0)


def test_a_stage_without_weights_steps_all_the_same():
    """Its versions are numbers only."""
    stage = a_stage([nn.ReLU()], TWO, 0)
    for m in range(2):
        assert not stage.forward(head(m), [value(torch.ones(1))])[0].requires_grad[0]
        assert back(stage, m, [[]]) == [[]]
        stage.step(m)
    assert stage.statistics()["updates"] == 2


# -- what is no training ----------------------------------------------------------------------


class Rebinds(torch.optim.SGD):
    """Assigns .data, as old optimizers do."""

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.data = p.data - group["lr"] * p.grad


def test_an_optimizer_may_assign_data():
    stage = a_stage([nn.Linear(1, 1)], ASYNC, 0)
    plain = copy.deepcopy(stage.module)
    stage.set_optimizer(pickled(Rebinds, {"lr": 0.5}, ["0.weight"]))
    for m in range(3):
        stage.forward(head(m), [value(torch.ones(1, 1))])
    back(stage, 0, [[torch.ones(1, 1)]])
    stage.step(0)
    assert torch.equal(stage.module[0].weight, plain[0].weight - 0.5)
    assert [stage.parameters.leaves(m)[0].item() for m in (1, 2)] == [plain[0].weight.item()] * 2


def test_passes_read_the_newest_weights_and_change_nothing_that_is_in_flight():
    stage = a_stage([nn.Linear(1, 1)], ASYNC, 0)
    for m in range(3):
        stage.forward(head(m), [value(torch.ones(1, 1))])
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


# -- state ------------------------------------------------------------------------------------


def with_versions():
    """Stage 0 of 3 after four updates, with nothing in flight and versions 2 to 4 kept."""
    torch.manual_seed(0)
    stage = a_stage([nn.Linear(1, 1)], ASYNC, 0, optimizer=(torch.optim.SGD, {"lr": 0.1}))
    x, gradient = torch.ones(1, 1), torch.ones(1, 1)
    for action in ASYNC.order(0, 0, 4):
        match action.kind:
            case Kind.FORWARD:
                stage.forward(head(action.index), [value(x)])
            case Kind.BACKWARD:
                back(stage, action.index, [[gradient]])
            case Kind.STEP:
                stage.step(action.index)
    assert stage.parameters.ledger.kept == {2, 3, 4}
    return stage


def test_loading_a_state_forgets_the_versions_before():
    """The next forward reads the newest, though the plan says an older one."""
    stage = with_versions()
    weight, bias = torch.tensor([[5.0]]), torch.tensor([7.0])
    loaded = {"0.weight": weight, "0.bias": bias, "9.x": torch.ones(1)}
    stage_state.load_state(stage, loaded)
    weight.zero_()  # a copy was taken
    assert stage.parameters.ledger.kept == {4}
    assert ASYNC.reads(0, 4) == 2
    assert content(stage.forward(head(4), [value(torch.ones(1, 1))])).tolist() == [[12]]
    assert stage.version_of(4) == 4


def test_what_a_state_does_not_have_stays():
    stage = a_stage([nn.Linear(1, 1)])
    bias = stage.module[0].bias.item()
    stage_state.load_state(stage, {"0.weight": torch.tensor([[5.0]])})
    assert (stage.module[0].weight.item(), stage.module[0].bias.item()) == (5, bias)


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
        assert content(stage.forward(head(m), [value(torch.zeros(1))])).item() == output
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
        "stage": 0, "parameters": 2, "updates": 4, "updates_skipped": 0, "versions_kept": 3,
        "versions_kept_most": 3, "buffers_allocated": 3, "weight_bytes": 8, "correction_bytes": 0,
    }  # fmt: skip


# -- what is out of turn ----------------------------------------------------------------------


ONES = value(torch.ones(1, 1))


@pytest.mark.parametrize(
    ("ask", "error", "words"),
    [
        (lambda stage: stage.backward(3), ScheduleError, r"stage 0.*micro-batch 3.*\[0\]"),
        (lambda stage: stage.backward_input(3), ScheduleError, r"stage 0.*micro-batch 3.*\[0\]"),
        (lambda stage: stage.backward_weight(3), ScheduleError, r"stage 0.*micro-batch 3.*\[0\]"),
        (lambda stage: stage.version_of(3), VersionError, "in flight"),
        (lambda stage: stage.forward(head(0), [ONES]), VersionError, "micro-batch 0 .*twice"),
        # The plan says that micro-batch 1 reads version 1, which no step has made.
        (lambda stage: stage.forward(head(1), [ONES]), VersionError, r"F1 .*version 1.*\[0\]"),
        (lambda stage: stage_state.load_state(stage, {}), VersionError, "in flight"),
        (lambda stage: stage_state.restore(stage, Snapshot(), 0, 0), VersionError, "in flight"),
    ],
)
def test_what_comes_while_micro_batch_0_is_in_flight_and_may_not(ask, error, words):
    stage = a_stage([nn.Linear(1, 1)])
    stage.forward(head(0), [ONES])
    with pytest.raises(error, match=words):
        ask(stage)
