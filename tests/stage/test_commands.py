"""What a stage does between two micro-batches."""

import dataclasses

import cloudpickle
import pytest
import torch
from support import one_worker
from support.models import Merges
from support.one_worker import Worker, command, replied
from support.stages import ASYNC, ONE, a_stage, pickled
from torch import nn

from pipedream_rt.errors import ConfigError, ScheduleError
from pipedream_rt.messages.message import CommandName
from pipedream_rt.stage.commands import carry_out, define, set_mode


def test_a_mode_that_changes_weights_is_refused_where_there_are_versions():
    for plan, refused in ((ONE, False), (ASYNC, True)):
        stage = a_stage([Merges()], plan, 0)
        if refused:
            with pytest.raises(ConfigError, match=r"to set the mode changed the parameter '0.weig"):
                set_mode(stage, False)
        else:
            set_mode(stage, False)
            assert stage.module[0].merged


def test_commands_change_what_they_say_and_reply():
    worker = Worker(one_worker.ONE)
    stage = worker.stages[0]
    loaded = {"0.weight": torch.ones(2, 2), "0.bias": torch.zeros(2)}
    key = "optimizer/0.weight/momentum_buffer"
    moments = {"0.weight": {key: torch.full((2, 2), 3.0)}}
    worker.put(
        command(0, 0, CommandName.TRAINING, (None, False)),
        command(0, 1, CommandName.LOAD_STATE, loaded),
        command(0, 2, CommandName.OPTIMIZER, pickled(torch.optim.SGD, {"lr": 0.5}, loaded)),
        command(0, 3, CommandName.LOAD_OPTIMIZER_STATE, moments),
        command(0, 4, CommandName.OPTIMIZER_STATE),
        command(0, 5, CommandName.STATISTICS),
    )
    assert worker.run() == ", ".join(f"reply {p} 0>*" for p in range(6))
    steps = ["0.weight", "0.bias"]
    assert [replied(worker, p) for p in range(4)] == [None, None, steps, None]
    assert not stage.module.training
    assert stage.module[0].weight.tolist() == [[1, 1], [1, 1]]
    assert stage.optimizer.torch_optimizer.param_groups[0]["lr"] == 0.5
    momentum = replied(worker, 4)[key]
    assert momentum.tolist() == [[3, 3], [3, 3]]
    statistics = replied(worker, 5)
    assert statistics.items() >= stage.statistics().items()
    assert statistics["busy_ns"] > 0
    assert statistics["peak_memory_bytes"] > 0


def call(stage, function, *args, **kwargs):
    return carry_out(stage, CommandName.CALL, cloudpickle.dumps((function, args, kwargs)))


def test_a_mode_may_be_for_one_stage():
    stage = a_stage([nn.Linear(1, 1)], ASYNC, 1)
    modes = []
    for only in (0, 1, None):
        stage.module.train()
        assert carry_out(stage, CommandName.TRAINING, (only, False)) is None
        modes.append(stage.module[0].training)
    assert modes == [True, False, False]


def test_a_function_gets_the_module_and_its_result_is_returned():
    stage = a_stage([nn.Linear(2, 3)])
    found = call(stage, lambda module, n, more=0: [n + more, module[0].bias.shape], 1, more=2)
    assert found == (True, [3, torch.Size([3])])


def fails(module):
    raise ZeroDivisionError("its own words")


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (fails, "ZeroDivisionError: its own words"),
        (lambda module: module, "module"),
        (lambda module: module[0].weight.mul_(2), "the function changed the parameter '0.weight'"),
    ],
    ids=["raises", "returns a module", "changes a weight"],
)
def test_what_goes_wrong_in_a_function_is_returned_as_a_text(function, words):
    stage = a_stage([nn.Linear(1, 1)], ASYNC, 0)
    before = stage.module[0].weight.clone()
    went_well, text = call(stage, function)
    assert not went_well
    assert words in text
    assert torch.equal(stage.module[0].weight, before)


def test_a_kept_version_can_be_asked_for_until_it_is_dropped():
    stage = a_stage([nn.Linear(1, 1)])
    kept = stage.module[0].weight.clone()
    carry_out(stage, CommandName.KEEP, {"number": 1, "average": False, "borrowed": {}})
    carry_out(stage, CommandName.LOAD_STATE, {"0.weight": torch.zeros(1, 1)})
    assert torch.equal(carry_out(stage, CommandName.STATE, 1)["0.weight"], kept)
    assert carry_out(stage, CommandName.STATE, None)["0.weight"].item() == 0
    carry_out(stage, CommandName.DROP, 1)
    with pytest.raises(ConfigError, match="version 1 is not kept; those kept are none"):
        carry_out(stage, CommandName.STATE, 1)


def test_buffers_of_an_evaluation_and_a_cache_end_by_their_number():
    stage = a_stage([nn.BatchNorm1d(2)])
    with stage.passes.evaluations.of(3, kept=False):
        stage.module(torch.randn(4, 2))
    stage.runner.caches.update({3: {}, 4: {}})
    carry_out(stage, CommandName.END_CACHE, 3)
    carry_out(stage, CommandName.END_CACHE, 5)  # of which this stage has nothing
    assert 3 not in stage.passes.evaluations
    assert stage.runner.caches == {4: {}}


def test_programs_come_with_their_numbers_and_are_forgotten_by_them():
    stage = a_stage([nn.Linear(1, 1), nn.ReLU()], ASYNC, 1)
    whole = stage.runner.programs[0].whole
    short = dataclasses.replace(whole, steps=whole.steps[:1])
    first, second, third = (cloudpickle.dumps((n, [None, short, None])) for n in (1, 2, 7))
    define(stage, [first])
    define(stage, [second, third], [1, 5])  # a stage that recovers was not sent 5
    assert {n: len(ready.calls) for n, ready in stage.runner.programs.items()} == {0: 2, 2: 1, 7: 1}


def test_without_an_optimizer_there_is_no_state_to_load_or_to_return():
    stage = a_stage([nn.Linear(1, 1)], optimizer=None)
    carry_out(stage, CommandName.LOAD_OPTIMIZER_STATE, {"0.weight": {"optimizer/0.weight/x": 1}})
    assert carry_out(stage, CommandName.OPTIMIZER_STATE, None) == {}


@pytest.mark.parametrize("name", ["FLUSH", "TRACE", "SAVE", "STATISTICS", "DEFINE"])
def test_a_command_of_the_loop_is_not_for_the_stage(name):
    command = CommandName[name]
    words = f"stage 0: the loop carries {command.value} out itself"
    with pytest.raises(ScheduleError, match=words):
        carry_out(a_stage([nn.Linear(1, 1)]), command, None)
