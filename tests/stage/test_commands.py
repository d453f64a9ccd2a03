"""What a stage does between two micro-batches."""

import pytest
import torch
from support import one_worker
from support.models import Merges
from support.one_worker import Worker, an_optimizer, command, replied
from support.stages import ASYNC, ONE, a_stage

from pipedream_rt.errors import ConfigError
from pipedream_rt.messages.message import CommandName
from pipedream_rt.stage.commands import set_mode


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
        command(0, 2, CommandName.OPTIMIZER, an_optimizer(stage.module, 0.5)),
        command(0, 3, CommandName.LOAD_OPTIMIZER_STATE, moments),
        command(0, 4, CommandName.OPTIMIZER_STATE),
        command(0, 5, CommandName.STATISTICS),
    )
    assert worker.run() == [f"reply {p} 0>*" for p in range(6)]
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
