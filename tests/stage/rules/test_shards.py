"""Each replica steps its own part of the weights, and takes the rest from the others."""

import torch
from support.rules import context
from torch import nn

from pipedream_rt.schedules import EdgeKind, plan_for
from pipedream_rt.stage.rules.rule import Update
from pipedream_rt.stage.rules.shards import Shards

PLAN = plan_for("1f1b", num_stages=1, replicas=[2], per_update=2, shard_optimizer=True)


def replicas():
    """Weights of 12, 3, 6 and 2 elements: the largest to the first, the others to the second."""
    made = []
    for address in range(2):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
        made.append((module, Shards(context(module, PLAN, address=address))))
    return made


def test_the_largest_weights_are_dealt_first():
    (one, first), (other, second) = replicas()
    assert [*first.stepped(dict(one.named_parameters()))] == ["0.weight"]
    assert [*second.stepped(dict(other.named_parameters()))] == ["0.bias", "1.weight", "1.bias"]


def test_all_have_all_weights_after_an_update():
    (one, first), (other, second) = replicas()
    with torch.no_grad():
        for module, rule in ((one, first), (other, second)):
            for parameter in rule.stepped(dict(module.named_parameters())).values():
                parameter.add_(1)
    update = Update(4, [], [], [])
    gifts = [rule.after(update, None)[EdgeKind.STEPPED] for rule in (first, second)]
    first.receive(EdgeKind.STEPPED, 1, gifts[1])
    second.receive(EdgeKind.STEPPED, 0, gifts[0])
    for rule in (first, second):
        rule.take(4)
    for mine, theirs in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, theirs)
