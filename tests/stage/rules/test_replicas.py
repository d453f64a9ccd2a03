"""Gradients of replicas are added up in the order of their ranks."""

import pytest
import torch
from support.rules import context
from torch import nn

from pipedream_rt.errors import ConfigError
from pipedream_rt.schedules import EdgeKind, plan_for
from pipedream_rt.stage.rules.replicas import ReplicaGradients, Replicas
from pipedream_rt.stage.rules.rule import Update

PLAN = plan_for("1f1b", num_stages=1, replicas=[3], per_update=3)
PARTIAL = EdgeKind.PARTIAL


def gradients(value):
    return [torch.full((1, 2), value), None]


def made(value, read):
    return Update(0, gradients(value), [{"lr": value}], [read])


def test_the_sum_does_not_depend_on_which_came_first():
    """In float32 the order of a sum is seen: 1e8 + 1 - 1e8 is 0, 1e8 - 1e8 + 1 is 1."""
    values = {0: 1e8, 1: 1.0, 2: -1e8}
    for order in ([1, 2], [2, 1]):
        rule = Replicas(context(nn.Linear(2, 1), PLAN, address=0))
        gifts = rule.reduce(made(values[0], 7))
        assert gifts[PARTIAL].read == [7]
        for other in order:
            rule.receive(PARTIAL, other, ReplicaGradients(gradients(values[other]), [{}], [other]))
        update = Update(0, [], [], [])
        assert rule.collect(update) == {}
        assert update.gradients[0].tolist() == [[0.0, 0.0]]
        assert update.gradients[1] is None
        assert (update.hyper, update.read) == ([{"lr": 1e8}], [7, 1, 2])


def test_what_was_handed_over_does_not_change_with_the_sum():
    rule = Replicas(context(nn.Linear(2, 1), PLAN, address=0))
    part = rule.reduce(made(1.0, 0))[PARTIAL]
    rule.receive(PARTIAL, 1, ReplicaGradients(gradients(2.0), [{}], []))
    update = Update(0, [], [], [])
    rule.collect(update)
    update.gradients[0].zero_()
    assert part.gradients[0].tolist() == [[1.0, 1.0]]


def test_a_replica_without_a_micro_batch_takes_what_others_have():
    rule = Replicas(context(nn.Linear(2, 1), PLAN, address=2))
    rule.receive(PARTIAL, 1, ReplicaGradients(gradients(2.0), [{"lr": 0.5}], [3]))
    update = Update(0, [], [], [])
    rule.collect(update)
    assert update.gradients[0].tolist() == [[2.0, 2.0]]
    assert (update.hyper, update.mean_read) == ([{"lr": 0.5}], 3)


def test_a_sparse_gradient_is_refused():
    rule = Replicas(context(nn.Embedding(3, 2, sparse=True), PLAN))
    sparse = torch.sparse_coo_tensor([[0]], torch.ones(1, 2), (3, 2), check_invariants=True)
    with pytest.raises(ConfigError, match="sparse"):
        rule.reduce(Update(0, [sparse], [{}], [0]))
