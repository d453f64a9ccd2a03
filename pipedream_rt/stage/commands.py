"""The commands that a stage carries out between two micro-batches."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Sequence
from typing import Any

import torch
from typing_extensions import assert_never

from pipedream_rt.errors import ScheduleError
from pipedream_rt.messages.message import CommandName
from pipedream_rt.messages.state_keys import by_key, by_text
from pipedream_rt.messages.tree import flatten
from pipedream_rt.models.shipping import loads
from pipedream_rt.stage import stage_state
from pipedream_rt.stage.evaluation import changes_modes
from pipedream_rt.stage.remote_methods import ask
from pipedream_rt.stage.saving import restore_stage
from pipedream_rt.stage.stage import Stage


@torch.no_grad()
def carry_out(stage: Stage, name: CommandName, argument: Any) -> object:
    """Carry out a command on a stage; tensors of the result may be the stage's own."""
    match name:
        case CommandName.STATE:
            return stage_state.state_dict(stage, argument or 0)
        case CommandName.KEEP:
            stage_state.keep(stage, **argument)
        case CommandName.DROP:
            stage.kept.drop(argument)
        case CommandName.CALL:
            return _call(stage, argument)
        case CommandName.END_CACHE:
            # Caches of generations and buffers of evaluations share one numbering.
            stage.runner.caches.pop(argument, None)
            stage.passes.evaluations.end(argument)
        case CommandName.LOAD_STATE:
            stage_state.load_state(stage, argument)
        case CommandName.OPTIMIZER:
            return stage.set_optimizer(argument)
        case CommandName.OPTIMIZER_STATE:
            return by_text(stage_state.optimizer_state(stage))
        case CommandName.LOAD_OPTIMIZER_STATE:
            if stage.optimizer:
                stage.optimizer.load_state(by_key(ChainMap(*argument.values())))
        case CommandName.TRAINING:
            only, training = argument
            if only in (None, stage.index):
                set_mode(stage, training)
        case CommandName.METHOD:
            return ask(stage, *argument)
        case CommandName.LOAD:
            return restore_stage(stage, **argument)
        case CommandName.FINGERPRINT:
            return stage_state.fingerprints(stage)
        case (
            CommandName.FLUSH
            | CommandName.TRACE
            | CommandName.SAVE
            | CommandName.STATISTICS
            | CommandName.DEFINE
        ):
            raise ScheduleError(f"stage {stage.index}: the loop carries {name.value} out itself")
        case other:
            assert_never(other)
    return None


def define(stage: Stage, definitions: Sequence[bytes], forgotten: Sequence[int] = ()) -> None:
    """Add programs, each pickled with its number and a part for every stage; forget others."""
    for pickled in definitions:
        number, parts = loads(pickled)
        stage.runner.define(number, parts[stage.index])
    for number in forgotten:
        stage.runner.forget(number)


def set_mode(stage: Stage, training: bool) -> None:
    """Set all modules to training or eval mode; refuse it where that changes shared weights."""
    modes = stage.passes.modes
    if not changes_modes(stage.module):
        modes.set(stage.module, training)
        return
    # An adapter may merge its weights into a layer's, which older versions would not follow.
    with stage.guards.refusing_changes("to set the mode"):
        modes.set(stage.module, training)


def _call(stage: Stage, pickled: bytes) -> tuple[bool, Any]:
    """Call a user's function with the module; return (True, result) or (False, the error)."""
    function, args, kwargs = loads(pickled)
    guards = stage.guards
    try:
        with guards.refusing_changes("the function"), guards.refusing_others():
            result = function(stage.module, *args, **kwargs)
        flatten(result)  # what cannot be sent is an error of the function too
    except Exception as error:  # the function may raise anything
        return False, f"{type(error).__name__}: {error}"
    return True, result
