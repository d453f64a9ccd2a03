"""Eval mode for a while, after which a stage is as it was before.

An evaluation may come anywhere, so it must leave no trace: not in the modes of modules, not in
weights (adapters merge theirs into a layer in eval mode), not in buffers, and not in the extra
state that modules give to state dicts. From one pass of an evaluation to the next, buffers go on as
they do in plain PyTorch; the stage keeps them beside its own, which other passes see.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from pipedream_rt.errors import ConfigError
from pipedream_rt.messages.tree import Value, unflatten
from pipedream_rt.models import dumps, loads
from pipedream_rt.models.holders import Holder, Holders
from pipedream_rt.models.modes import Modes
from pipedream_rt.stage.parameters import VersionedParameters

Metric: TypeAlias = Callable[[Any, Any], Any]
"""``metric(output, target)`` returns a number, of what the loss is computed of."""


def changes_modes(module: nn.Module) -> bool:
    """Whether a module, or one inside it, does something of its own when its mode is set."""
    return any(
        type(each).train is not nn.Module.train or type(each).eval is not nn.Module.eval
        for each in module.modules()
    )


@contextmanager
def eval_mode(
    module: nn.Module,
    parameters: VersionedParameters,
    modes: Modes,
    buffers: AbstractContextManager[None] | None = None,
) -> Iterator[None]:
    """Set every module to eval mode while the body runs, and leave everything as it was.

    Call it without gradient.
    """
    buffers = buffers or same_buffers(module)
    # Left in the reverse order: the modes first, since to set them may change what comes after.
    with _same_extra_state(module), buffers, _same_weights(module, parameters):
        before = [(each, each.training) for each in module.modules()]
        try:
            modes.set(module, training=False)
            yield
        finally:
            for each, mode in before:  # parents come first, and may change the modes of children
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
def same_buffers(module: nn.Module) -> Iterator[None]:
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
    """A buffer with a copy of its values."""

    def __init__(self, buffer: Tensor | None) -> None:
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


class EvaluationBuffers:
    """The buffers of a stage as evaluations that are under way have them."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._kept: dict[int, list[dict[str, Tensor | None]]] = {}

    def __contains__(self, number: int) -> bool:
        """Whether an evaluation has changed buffers so far."""
        return number in self._kept

    def end(self, number: int) -> None:
        """Forget the buffers of an evaluation."""
        self._kept.pop(number, None)

    def of(self, number: int, kept: bool) -> AbstractContextManager[None]:
        """Return the context of a pass: what becomes of the buffers."""
        if kept:
            return nullcontext()
        return self._going_on(number) if number else same_buffers(self._module)

    @contextmanager
    def _going_on(self, number: int) -> Iterator[None]:
        """Let modules have the buffers of an evaluation while the body runs."""
        owners = list(self._module.modules())
        with same_buffers(self._module):
            if number in self._kept:
                for owner, buffers in zip(owners, self._kept[number], strict=True):
                    owner._buffers.clear()
                    owner._buffers.update(buffers)
                yield
                self._kept[number] = [dict(owner._buffers) for owner in owners]
                return
            before = [_marks(owner) for owner in owners]
            yield
            if [_marks(owner) for owner in owners] != before:
                copies: dict[int, Tensor | None] = {}  # a buffer may belong to two modules
                self._kept[number] = [
                    {
                        name: copies.setdefault(id(b), None if b is None else b.clone())
                        for name, b in owner._buffers.items()
                    }
                    for owner in owners
                ]


def _marks(owner: nn.Module) -> dict[str, tuple[int, int] | None]:
    """Return what tells whether a buffer was changed, or another one took its place."""
    return {
        name: None if buffer is None else (id(buffer), buffer._version)
        for name, buffer in owner._buffers.items()
    }


# -- metrics ------------------------------------------------------------------------------------


def packed_metrics(metrics: Mapping[str, Metric]) -> bytes:
    """Return metrics as bytes, for the stage that computes the loss; none for no metrics."""
    named = metrics.items() if isinstance(metrics, Mapping) else [("metrics", metrics)]
    for name, metric in named:
        if not isinstance(name, str) or name == "loss" or not callable(metric):
            raise ConfigError(
                'metrics must be functions of output and target by name, as {"accuracy": lambda '
                "output, y: (output.argmax(-1) == y).float().mean()}, of which none is called "
                f'"loss"; it has {name!r}: {metric!r}'
            )
    try:
        return dumps(dict(metrics))[0] if metrics else b""
    except Exception as error:  # pickling runs the user's code
        raise ConfigError(f"the metrics do not pickle: {error}") from error


@functools.lru_cache(maxsize=1)
def _unpacked(packed: bytes) -> list[tuple[str, Metric, list[Holder]]]:
    """Return the metrics of an evaluation, or of an epoch, which all bring the same ones.

    With each comes what holds values that it reads, as they are before the first pass.
    """
    metrics: dict[str, Metric] = loads(packed)
    found = []
    for name, metric in metrics.items():
        holders = Holders()
        holders.walk([("the metric", metric)])
        for holder in holders.found.values():
            holder.look()
        found.append((name, metric, list(holders.found.values())))
    return found


def measured(packed: bytes, output: Any, target: Value) -> dict[str, float | str]:
    """Return what metrics say by name; of one that says no number, what is wrong with it.

    An error here does not end the run, as one in the loss does: nothing depends on a metric.
    """
    said: dict[str, float | str] = {}
    given = unflatten(target.structure, target.tensors) if packed else None
    for name, metric, holders in _unpacked(packed) if packed else ():
        try:
            with torch.no_grad():
                found = float(metric(output, given))
        except Exception as error:  # the user's code
            said[name] = f"{type(error).__name__}: {error}"
            continue
        changed = [holder.called(key) for holder in holders for key, *_ in holder.changes()]
        said[name] = (
            f"it changes {changed[0]}, as to collect something, which the script would not see: "
            "evaluate() takes the mean over mini-batches, and predict() yields all outputs"
            if changed
            else found
        )
    return said


def refuse_bad_metrics(said: Mapping[str, float | str]) -> None:
    """Refuse a metric that said no number."""
    for name, value in said.items():
        if isinstance(value, str):
            raise ConfigError(words_of_bad_metric(name, value))


def words_of_bad_metric(name: str, said: str) -> str:
    """Return what is told of a metric that said no number."""
    return f'the metric "{name}" must return a number for an output and a target; {said}'
