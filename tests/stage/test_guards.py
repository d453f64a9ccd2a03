"""Changes that weight versions, other stages or checkpoints would not know of are refused."""

import dataclasses
from contextlib import nullcontext

import pytest
import torch
from support.messages import head
from support.stages import ASYNC, ONE, TWO, a_stage, value
from torch import nn

from pipedream_rt.errors import ConfigError
from pipedream_rt.stage.guards import Guards, telling_changed_inputs


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
        stage.forward(head(0), [value(torch.ones(2))])
        assert stage.module[0].weight.tolist() == [0.5, 0.5]
    else:
        with pytest.raises(ConfigError, match=words):
            stage.forward(head(0), [value(torch.ones(2))])


class Makes(nn.Module):
    """Makes in a forward what was not there at the start, or was something else."""

    def __init__(self, how):
        super().__init__()
        self.linear, self.how = nn.Linear(2, 2), how
        if how == "thaws":
            self.linear.requires_grad_(False)

    def forward(self, x):
        match self.how:
            case "buffer":
                self.register_buffer("mean", x.detach().mean(0))
            case "parameter":
                self.scale = nn.Parameter(torch.ones(2))
            case "thaws":
                self.linear.requires_grad_(True)
        return self.linear(x)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("buffer", r"stage 0: a forward has made '0.mean' a buffer; it was not there"),
        ("parameter", r"stage 0: a forward has made '0.scale' a parameter; it was not there"),
        ("thaws", r"a forward has made '0.linear.weight' a parameter; it was a frozen parameter"),
    ],
)
def test_what_a_forward_makes_is_refused(how, words):
    with pytest.raises(ConfigError, match=words):
        a_stage([Makes(how)]).forward(head(0), [value(torch.ones(1, 2))])


@pytest.mark.parametrize("micro_batch", range(9))
def test_weights_are_compared_in_the_micro_batches_0_1_2_4_8(micro_batch):
    stage = a_stage([nn.Linear(2, 2)], ASYNC, 0)
    with torch.no_grad():
        stage.module[0].weight.fill_(1)
    stage.parameters.begin(micro_batch, 0, 0)

    refused = pytest.raises(ConfigError, match=r"changed the parameter '0.weight'")
    is_compared = micro_batch in (0, 1, 2, 4, 8)
    given = [value(torch.ones(1, 2))]
    with refused if is_compared else nullcontext(), stage._around_forward(micro_batch, given):
        stage.module[0].weight.data.clamp_(-0.1, 0.1)


@pytest.mark.parametrize(
    "change",
    [
        lambda layer: setattr(layer, "table", layer.table + 1),
        lambda layer: layer.table.add_(1),
        lambda layer: layer.table.data[:1].fill_(5),
    ],
    ids=["assigns", "adds", "writes"],
)
def test_a_buffer_that_other_stages_share_does_not_change(change):
    layer = nn.Linear(2, 2)
    layer.register_buffer("table", torch.ones(2))
    layer.register_buffer("own", torch.ones(2))
    stage = a_stage([layer], TWO, 0)
    spec = dataclasses.replace(stage.spec, shared=("0.table",))
    guards = Guards(spec, stage.weights, stage.given)
    with guards.watching(3):
        layer.own.add_(1)
    stage.parameters.begin(4, 0, 0)
    words = r"stage 0: a forward changed the buffer '0.table'"
    with pytest.raises(ConfigError, match=words), guards.watching(4):
        change(layer)


@pytest.mark.parametrize("plan", [ONE, ASYNC], ids=["one version", "several versions"])
def test_weights_that_have_copies_are_put_back_where_a_function_changes_them(plan):
    stage = a_stage([nn.Linear(1, 1)], plan, 0)
    before = stage.module[0].weight.clone()
    words = r"stage 0: the function changed the parameter '0.weight'.*Use load_state_dict"
    refused = nullcontext() if plan is ONE else pytest.raises(ConfigError, match=words)
    with refused, stage.guards.refusing_changes("the function"):
        stage.module[0].weight.detach().mul_(2)
    assert torch.equal(stage.module[0].weight, before * (2 if plan is ONE else 1))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda m: setattr(m[0], "weight", nn.Parameter(torch.ones(1, 1))), "replaced 'weight'"),
        (lambda m: delattr(m[0], "bias"), "removed 'bias'"),
        (lambda m: setattr(m, "0", nn.Linear(1, 1)), "replaced '0'"),
        (lambda m: m.add_module("more", nn.Linear(1, 1)), "added 'more'"),
        (
            lambda m: setattr(m[0].weight, "data", m[0].weight.data * 2),
            "given another .data to '0.weight'",
        ),
        (lambda m: m[0].weight.requires_grad_(False), "changed requires_grad of '0.weight'"),
    ],
)
def test_what_a_function_puts_in_the_place_of_another_is_put_back(change, words):
    stage = a_stage([nn.Linear(1, 1)])
    layer = stage.module[0]
    parts = [*layer.named_parameters()]
    data = [parameter.data_ptr() for _, parameter in parts]
    words = f"stage 0: the function has {words}, of which the stage"
    with pytest.raises(ConfigError, match=words), stage.guards.refusing_others():
        change(stage.module)
    assert [*stage.module] == [layer]
    assert all(now is before for (_, now), (_, before) in zip(layer.named_parameters(), parts))
    assert [parameter.data_ptr() for parameter in layer.parameters()] == data
    assert all(parameter.requires_grad for parameter in layer.parameters())


def test_tensors_of_the_mini_batch_that_are_changed_are_told_by_name(caplog):
    given = value({"left": torch.ones(2), "right": [torch.ones(2)]})
    for kept in (given, None):
        with telling_changed_inputs(kept):
            given.tensors[1].add_(1)
    (record,) = caplog.records
    assert "changes the tensor 'right.0' of the mini-batch in place" in record.getMessage()
