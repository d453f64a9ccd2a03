"""What rules are given: an update, the context of their stage, and messages of their kind."""

import dataclasses

import pytest
import torch
from support.rules import context
from torch import nn

from pipedream_rt.schedules import Edge, EdgeKind, plan_for
from pipedream_rt.schedules.placement import Tie
from pipedream_rt.stage.rules.rule import Packed, Rule, Update


@pytest.mark.parametrize(
    ("read", "mean"), [([3, 4], 3.5), ([2, 2, 5], 3.0), ([], 7)], ids=["two", "three", "none"]
)
def test_an_update_says_which_versions_were_read_in_the_mean(read, mean):
    assert Update(7, [], [], read).mean_read == mean


def test_the_parameters_of_a_context_are_those_that_the_stage_owns():
    plan = plan_for("async-1f1b", num_stages=2)
    plan = dataclasses.replace(plan, ties=(Tie("head", (0, 1)),))
    module = nn.ParameterDict({n: nn.Parameter(torch.ones(1)) for n in ("tied", "own", "frozen")})
    module["frozen"].requires_grad_(False)
    names = {"tied": "head", "own": "5.weight", "frozen": "6.weight"}
    assert context(module, plan, 0, names=names).named.keys() == {"head", "5.weight"}
    assert context(module, plan, 1, names=names).named == {"5.weight": module["own"]}


def test_tensors_cross_as_they_are_without_values():
    rule, edge, tensors = Rule(), Edge(EdgeKind.PARTIAL, 0, 1), (torch.ones(1), torch.ones(2))
    packed = rule.pack(edge, tensors)
    assert packed == Packed([], tensors)
    assert rule.open(edge, 3, packed) is tensors
