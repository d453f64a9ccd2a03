"""Eval mode for a while, after which a stage is as it was before.

An evaluation is not fed again in a recovery, and may come anywhere, so it must leave no trace: not
in the modes of modules, not in weights (adapters merge theirs into a layer in eval mode), not in
buffers, and not in the extra state that modules give to state dicts.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from pipedream_rt.stage.parameters import VersionedParameters


def changes_modes(module: nn.Module) -> bool:
    """Whether a module, or one inside it, does something of its own when its mode is set."""
    return any(
        type(each).train is not nn.Module.train or type(each).eval is not nn.Module.eval
        for each in module.modules()
    )


@contextmanager
def eval_mode(module: nn.Module, parameters: VersionedParameters) -> Iterator[None]:
    """Set every module to eval mode while the body runs, and leave everything as it was.

    Call it without gradient.

    Args:
        module: The module of a stage.
        parameters: The weights of the stage.
    """
    # Left in the reverse order: the modes first, since to set them may change what comes after.
    with _same_extra_state(module), _same_buffers(module), _same_weights(module, parameters):
        modes = [(each, each.training) for each in module.modules()]
        try:
            module.eval()
            yield
        finally:
            for each, mode in modes:  # parents come first, and may change the modes of children
                if each.training != mode:
                    each.train(mode)


@contextmanager
def _same_weights(module: nn.Module, parameters: VersionedParameters) -> Iterator[None]:
    """Give weights the very bits back that they had, where setting a mode may change them."""
    if not changes_modes(module):
        yield
        return
    trained = parameters.named.values()
    mine = {id(p) for p in trained}
    kept = [p.detach().clone() for p in trained]
    frozen = [(p, p.data, p.data.clone()) for p in module.parameters() if id(p) not in mine]
    try:
        yield
    finally:
        parameters.put_back(kept)
        for parameter, data, values in frozen:
            parameter.data = data.copy_(values)


@contextmanager
def _same_buffers(module: nn.Module) -> Iterator[None]:
    """Give every module the buffers back that it had, with their values."""
    before = [
        (owner, {n: _Kept(b) for n, b in owner._buffers.items()}) for owner in module.modules()
    ]
    try:
        yield
    finally:
        for owner, kept in before:
            for name in owner._buffers.keys() - kept.keys():
                del owner._buffers[name]
            owner._buffers.update({name: each.put_back() for name, each in kept.items()})


class _Kept:
    """A buffer with a copy of its values.

    Args:
        buffer: The buffer; None if it has no value.
    """

    def __init__(self, buffer: Tensor | None) -> None:
        """Copy the values, and note the count of changes in place."""
        self._buffer = buffer
        self._copy = None if buffer is None else buffer.clone()
        self._version = 0 if buffer is None else buffer._version

    def put_back(self) -> Tensor | None:
        """Return the buffer with the values that it had."""
        if self._buffer is not None and self._buffer._version != self._version:
            assert self._copy is not None
            self._buffer.copy_(self._copy)
        return self._buffer


@contextmanager
def _same_extra_state(module: nn.Module) -> Iterator[None]:
    """Give every module the extra state back that it had."""
    before = [
        (each, copy.deepcopy(each.get_extra_state()))
        for each in module.modules()
        if type(each).get_extra_state is not nn.Module.get_extra_state
    ]
    try:
        yield
    finally:
        for each, state in before:
            each.set_extra_state(state)
