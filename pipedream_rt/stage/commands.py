"""The commands that a stage carries out between two micro-batches."""

from __future__ import annotations

from typing import Any

import torch
from typing_extensions import assert_never

from pipedream_rt.errors import ScheduleError
from pipedream_rt.messages.message import CommandName
from pipedream_rt.stage.methods import ask
from pipedream_rt.stage.saving import restore_stage
from pipedream_rt.stage.stage import Stage


@torch.no_grad()
def carry_out(stage: Stage, name: CommandName, argument: Any) -> object:
    """Carry out a command on a stage.

    Args:
        stage: The stage.
        name: Name of the command.
        argument: The command's argument, as the coordinator gave it.

    Returns:
        The result, for the reply. Its tensors may be the stage's own.

    Raises:
        ScheduleError: The command is one that the loop carries out itself.
    """
    match name:
        case CommandName.STATE:
            return stage.state_dict(argument or 0)
        case CommandName.KEEP:
            stage.keep(**argument)
        case CommandName.DROP:
            stage.kept.drop(argument)
        case CommandName.CALL:
            return stage.call(argument)
        case CommandName.END_CACHE:
            stage.caches.pop(argument, None)
            stage.evaluations.end(argument)
        case CommandName.LOAD_STATE:
            stage.load_state(argument)
        case CommandName.OPTIMIZER:
            return stage.set_optimizer(argument)
        case CommandName.OPTIMIZER_STATE:
            return stage.optimizer.state() if stage.optimizer else {}
        case CommandName.LOAD_OPTIMIZER_STATE:
            if stage.optimizer:
                stage.optimizer.load_state(argument, keep_average=True)
        case CommandName.TRAINING:
            only, training = argument
            if only in (None, stage.index):
                stage.set_mode(training)
        case CommandName.METHOD:
            return ask(stage, *argument)
        case CommandName.LOAD:
            return restore_stage(stage, **argument)
        case CommandName.FINGERPRINT:
            return stage.fingerprints()
        case CommandName.FLUSH | CommandName.TRACE | CommandName.SAVE | CommandName.STATISTICS:
            raise ScheduleError(f"stage {stage.index}: the loop carries {name.value} out itself")
        case other:
            assert_never(other)
    return None
