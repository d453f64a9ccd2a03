"""The methods that a reference to a stage reaches, on the stage itself."""

import pytest
import torch
from support.messages import head
from support.stages import ASYNC, a_stage, back, value
from torch import nn

from pipedream_rt.errors import ConfigError
from pipedream_rt.stage.remote_methods import ask


def stage_1():
    return a_stage([nn.Linear(2, 3), nn.Dropout(0.5), nn.BatchNorm1d(3)], ASYNC, 1, first=4)


def test_only_the_stage_that_is_asked_answers():
    stage = stage_1()
    assert ask(stage, 0, "num_parameters", [], {}) is None
    assert ask(stage, 1, "num_parameters", [], {}) == 2 * 3 + 3 + 3 + 3


def test_names_are_those_of_the_unsplit_model_and_what_is_returned_are_copies():
    stage = stage_1()
    names = ["4.weight", "4.bias", "6.weight", "6.bias"]
    assert ask(stage, 1, "parameter_names", [], {}) == names
    state = ask(stage, 1, "state_dict", [], {})
    assert state.keys() == stage.module.state_dict().keys() > set(names)
    weight, bias = ask(stage, 1, "parameter", ["4.weight"], {}), stage.module[0].bias.clone()
    assert torch.equal(weight, stage.module[0].weight)
    assert not weight.requires_grad
    weight.zero_()
    for tensor in state.values():
        tensor.zero_()
    assert stage.module[0].weight.all()
    assert torch.equal(stage.module[0].bias, bias)


def test_a_forward_is_one_in_eval_mode_and_leaves_no_trace():
    stage, x = stage_1(), torch.randn(5, 2)
    found = ask(stage, 1, "forward", [x], {})
    assert stage.module.training
    assert stage.module[2].num_batches_tracked == 0
    assert not found.requires_grad
    assert torch.equal(found, stage.module.eval()(x))


def test_memory_is_that_of_one_version():
    found = ask(stage_1(), 1, "memory", [], {})
    assert found["weights_bytes"] == 4 * (2 * 3 + 3 + 3 + 3)
    assert found["peak_memory_bytes"] > 1 << 20


def test_versions_are_those_that_the_stage_holds_oldest_first():
    stage = a_stage([nn.Linear(1, 1)], ASYNC, 0)
    for m in range(3):
        stage.forward(head(m), [value(torch.ones(1, 1))])
    assert ask(stage, 0, "versions", [], {}) == [0]
    back(stage, 0, [[torch.ones(1, 1)]])
    stage.step(0)
    assert ask(stage, 0, "versions", [], {}) == [0, 1]


@pytest.mark.parametrize(
    ("method", "inputs", "named", "words"),
    [
        ("forward", [], {}, "forward of a stage does not take these arguments: missing a req"),
        ("memory", [1], {}, "memory of a stage does not take these arguments: too many"),
        ("parameter", [], {"names": "x"}, "parameter of a stage does not take these arguments"),
        ("parameter", ["9.w"], {}, "stage 1 has no parameter '9.w'; it has 4.weight, 4.bias, 6.we"),
        ("forward", ["text"], {}, "forward of stage 1: .*Error: "),
        ("forward", [torch.ones(3, 9)], {}, "forward of stage 1: RuntimeError: mat1 and mat2"),
    ],
    ids=["too few", "too many", "another name", "no parameter", "a text", "another shape"],
)
def test_what_makes_no_sense_is_refused_and_the_stage_goes_on(method, inputs, named, words):
    stage = stage_1()
    with pytest.raises(ConfigError, match=words):
        ask(stage, 1, method, inputs, named)
    assert stage.module.training
    stage.forward(head(0), [value(torch.ones(2, 2))])


def test_a_stage_without_parameters_says_that_it_has_none():
    with pytest.raises(ConfigError, match="stage 0 has no parameter 'w'; it has none"):
        ask(a_stage([nn.ReLU()]), 0, "parameter", ["w"], {})
