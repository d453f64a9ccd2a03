"""The average of weights is that of torch."""

import torch
from support.rules import context
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from pipedream_rt.schedules import plan_for
from pipedream_rt.stage.rules.ema import Ema
from pipedream_rt.stage.rules.rule import Update

PLAN = plan_for("async-1f1b", num_stages=1)


def test_it_is_torchs_average_and_goes_on_from_a_checkpoint():
    module = nn.Linear(2, 2)
    expected = AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    rule, again = (Ema(0.9, context(module, PLAN)) for _ in range(2))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    assert torch.equal(rule.average()["weight"], module.weight)
    for number in range(5):
        with torch.no_grad():
            module.weight.add_(number)
        if number == 3:
            again.load_state(rule.state(), 3)
        expected.update_parameters(module)
        for each in (rule, again):
            each.after(Update(number, [], [], []), optimizer)
    for each in (rule, again):
        assert torch.equal(each.average()["weight"], expected.module.weight)


def test_a_skipped_update_is_none():
    module = nn.Linear(2, 2)
    rule = Ema(0.9, context(module, PLAN))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    rule.after(Update(0, [], [], [], skipped=True), optimizer)
    rule.after(Update(0, [], [], []), None)
    assert rule.state() == {}
