"""One weight on several stages: versions from its owner, gradients back to it."""

import dataclasses

import torch
from support.rules import context
from torch import nn

from pipedream_rt.schedules import EdgeKind, plan_for
from pipedream_rt.schedules.placement import Tie
from pipedream_rt.stage.rules.rule import Update
from pipedream_rt.stage.rules.ties import Ties


def plan(k):
    made = plan_for("async-1f1b", num_stages=3, per_update=k)
    return dataclasses.replace(made, ties=(Tie("w", (0, 1, 2)),))


def at(stage, k=2):
    torch.manual_seed(0)
    module = nn.ParameterDict({"w": nn.Parameter(torch.ones(2)), "b": nn.Parameter(torch.ones(1))})
    names = {"w": "w", "b": f"b{stage}"}
    where = context(module, plan(k), stage, names=names)
    return where.weights, Ties(where)


def test_the_owner_gives_each_version_a_user_takes_it():
    weights, owner = at(0)
    with torch.no_grad():
        weights.own.named["w"].mul_(3)
    given = owner.after(Update(0, [], [], []), None)[EdgeKind.WEIGHT]
    assert given["w"].tolist() == [3, 3]
    its_weights, user = at(2)
    user.receive(EdgeKind.WEIGHT, 0, given)
    borrowed = its_weights.borrowed[0]
    assert borrowed.ledger.newest == 1
    assert borrowed.named["w"].tolist() == [3, 3]
    assert not user.after(Update(0, [], [], []), None)


def test_a_share_is_passed_on_at_the_end_of_an_update_with_the_stages_own():
    weights, middle = at(1)
    weights.borrowed[0].add_gradient("w", torch.tensor([1.0, 1.0]))
    assert middle.ended(0) == {}
    middle.receive(EdgeKind.SHARE, 2, {"w": torch.tensor([0.5, 0.0])})
    assert middle.roots(1) == []
    (share,) = middle.ended(1)[EdgeKind.SHARE].values()
    assert share.tolist() == [1.5, 1.0]
    assert weights.borrowed[0].take_gradients() == [None]


def test_the_owner_adds_what_comes_to_its_own():
    weights, owner = at(0)
    weights.own.add_gradient("w", torch.tensor([1.0, 1.0]))
    owner.receive(EdgeKind.SHARE, 1, {"w": torch.tensor([2.0, 3.0])})
    assert owner.ended(1) == {}
    pending = dict(zip(weights.own.named, weights.own.take_gradients(), strict=True))
    assert pending["w"].tolist() == [3.0, 4.0]


def test_with_one_micro_batch_per_update_a_share_is_a_root_of_the_backward():
    """So autograd sums the uses one after another, as in the unsplit model."""
    weights, owner = at(0, k=1)
    weights.begin(0)
    owner.receive(EdgeKind.SHARE, 1, {"w": torch.tensor([2.0, 3.0])})
    ((edge, share),) = owner.roots(0)
    assert edge.node.variable is weights.own.leaf("w", 0)
    assert share.tolist() == [2.0, 3.0]
    assert owner.roots(0) == []
    assert owner.ended(0) == {}
