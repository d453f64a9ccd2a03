"""Changes that weight versions, other stages or checkpoints would not know of are refused."""

import pytest
import torch
from support.stages import ASYNC, HYPER, ONE, a_stage, value
from torch import nn

from pipedream_rt.errors import ConfigError


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
