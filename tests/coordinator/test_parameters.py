"""What an optimizer over references refuses."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from pipedream_rt.coordinator.parameters import Parameters, refuse_not_stepped_once
from pipedream_rt.errors import ConfigError
from pipedream_rt.job.unsplit_model import UnsplitModel
from pipedream_rt.schedules import plan_for
from pipedream_rt.stage.optimizer import GroupSpec, OptimizerSpec


def refuse(names, stepped, **plan):
    spec = OptimizerSpec(optimizer_class=torch.optim.SGD, groups=(GroupSpec(names=names),))
    refuse_not_stepped_once(spec, plan_for("1f1b", num_stages=2, **plan), stepped)


def test_without_torch_rpc_a_parameter_has_one_reference_for_good_that_only_stands_for_its_name():
    model = UnsplitModel(nn.Sequential(nn.Linear(2, 2)))
    group = SimpleNamespace(cluster=SimpleNamespace(without_rpc="they run in containers"))
    parameters = Parameters(group, None, model, ["0.weight", "0.bias"], None)
    found = parameters.of_parameters()
    assert [name for _, name in found] == ["0.weight", "0.bias"]
    for (reference, _), (again, _) in zip(found, parameters.of_parameters(), strict=True):
        assert reference is again
        with pytest.raises(ConfigError, match="they run in containers"):
            reference.to_here()


def test_every_parameter_of_a_group_is_stepped_by_one_stage():
    refuse(("a", "b"), [["a"], ["b"]])
    refuse(("a",), [["a"], ["b"]])  # what is in no group may be stepped elsewhere
    with pytest.raises(ConfigError, match=r"the parameter b .* stepped by none"):
        refuse(("a", "b"), [["a"], []])
    with pytest.raises(ConfigError, match=r"the parameter a .* stepped by the stages \[0, 1\]"):
        refuse(("a", "b"), [["a"], ["a", "b"]])


def test_replicas_step_the_same_or_each_its_part():
    refuse(("a", "b"), [["a"], ["a"], ["b"]], replicas=(2, 1))
    options = {"replicas": (2, 1), "shard_optimizer": True, "per_update": 2}
    refuse(("a", "b", "c"), [["a"], ["c"], ["b"]], **options)
    with pytest.raises(ConfigError, match=r"stepped by the stages \[0, 0\]"):
        refuse(("a", "b"), [["a"], ["a"], ["b"]], **options)
