"""Eval mode for one pass, after which a stage is as it was before; metrics, and another loss.

An evaluation may come anywhere, so it must leave no trace: not in the modes of modules, not in
weights (adapters merge theirs into a layer in eval mode), not in buffers, and not in the extra
state that modules give to state dicts. From pass to pass of one evaluation, buffers change as in
plain PyTorch; the stage keeps them apart from its own, which all other passes see.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from pipedream_rt.errors import ConfigError
from pipedream_rt.messages.tree import Value, unflatten
from pipedream_rt.models import dumps, loads
from pipedream_rt.models.holders import Holder
from pipedream_rt.models.mark import mark_of_tensor, mark_of_tensors
from pipedream_rt.models.modes import Modes
from pipedream_rt.models.parcel import Parcel
from pipedream_rt.models.shipping import Range, alias, why_unpicklable
from pipedream_rt.stage.parameters import VersionedParameters
from pipedream_rt.stage.spec import LossFunction

Metric: TypeAlias = Callable[[Any, Any], Any]
"""``metric(output, target)`` returns a number; it gets what the loss function gets."""


def changes_modes(module: nn.Module) -> bool:
    """Whether a module, or one inside it, overrides `train` or `eval`."""
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
    """Run the body in eval mode and leave everything as it was; call it without gradient."""
    buffers = buffers or same_buffers(module)
    # Restored in reverse order. The modes come first: to set them may change all the others.
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
    """Restore all weights bit for bit, where setting a mode may change them."""
    if not changes_modes(module):
        yield
        return
    # An adapter adds its weights in eval mode and subtracts them again, which rounds.
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
    """Restore the buffers of every module: the same tensors, names and values."""
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
        self._mark = mark_of_tensor(buffer)

    def put_back(self) -> Tensor | None:
        """Return the buffer with the values that it had."""
        if self._buffer is not None and mark_of_tensor(self._buffer) != self._mark:
            assert self._copy is not None
            self._buffer.copy_(self._copy)
        return self._buffer


@contextmanager
def _same_extra_state(module: nn.Module) -> Iterator[None]:
    """Restore the extra state of those modules that define `get_extra_state`."""
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
    """The buffers as each running evaluation has them, by its number."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._kept: dict[int, list[dict[str, Tensor | None]]] = {}

    def __contains__(self, number: int) -> bool:
        """Whether an evaluation has changed buffers so far."""
        return number in self._kept

    def end(self, number: int) -> None:
        self._kept.pop(number, None)

    def of(self, number: int, kept: bool) -> AbstractContextManager[None]:
        """Return the context of a pass of evaluation `number`; 0 is for a pass by itself."""
        if kept:  # the stage's own buffers are to change
            return nullcontext()
        return self._going_on(number) if number else same_buffers(self._module)

    @contextmanager
    def _going_on(self, number: int) -> Iterator[None]:
        """Run the body with the buffers of an evaluation in the modules."""
        owners = list(self._module.modules())
        with same_buffers(self._module):
            if number in self._kept:
                for owner, buffers in zip(owners, self._kept[number], strict=True):
                    owner._buffers.clear()
                    owner._buffers.update(buffers)
                yield
                self._kept[number] = [dict(owner._buffers) for owner in owners]
                return
            # Until a pass changes a buffer, the evaluation needs none of its own.
            before = [mark_of_tensors(owner._buffers.items()) for owner in owners]
            yield
            if [mark_of_tensors(owner._buffers.items()) for owner in owners] != before:
                # Clones, since `same_buffers` puts the old values back into these very tensors.
                copies: dict[int, Tensor | None] = {}  # a buffer may belong to two modules
                self._kept[number] = [
                    {
                        name: copies.setdefault(id(b), None if b is None else b.clone())
                        for name, b in owner._buffers.items()
                    }
                    for owner in owners
                ]


# -- metrics, and the loss of an evaluation -------------------------------------------------------


class Functions(NamedTuple):
    """The functions that come with a micro-batch to the stage of the loss, ready to be called.

    Attributes:
        loss_fn: The loss in the place of that of training; None for that of training.
        metrics: The metrics that are computed beside it, by name.
        holders: By name of each, the holders of the values that it reads; the loss is ``"loss"``.
    """

    loss_fn: LossFunction | None
    metrics: dict[str, Metric]
    holders: dict[str, list[Holder]]

    def changed_by(self, name: str) -> str:
        """Name the value that a function has changed; "" for none."""
        holders = self.holders[name]
        found = [holder.called(key) for holder in holders for key, *_ in holder.changes()]
        return found[0] if found else ""


NO_WEIGHTS: Mapping[int, tuple[Range, str]] = {}


def packed_metrics(
    metrics: Mapping[str, Metric],
    loss_fn: LossFunction | None = None,
    weights: Mapping[int, tuple[Range, str]] = NO_WEIGHTS,
) -> bytes:
    """Return metrics, and the loss of an evaluation, pickled for the stage that computes the loss.

    They are empty if there is neither. ``weights`` has, by ``id``, the memory and the name of each
    weight of the model: a function that holds one would see the script's copy.
    """
    named = [*metrics.items()] if isinstance(metrics, Mapping) else [(0, metrics)]
    for name, metric in named:
        if not isinstance(name, str) or name == "loss" or not callable(metric):
            raise ConfigError(
                'metrics must be functions of output and target by name, as {"accuracy": lambda '
                "output, y: (output.argmax(-1) == y).float().mean()}, of which none is called "
                f'"loss"; it has {name!r}: {metric!r}'
            )
    things: list[tuple[str, Any]] = [] if loss_fn is None else [("loss_fn", loss_fn)]
    things += [(f"the metric {name!r}", metric) for name, metric in named]
    for what, thing in things:
        try:
            tensors = dumps(thing)[1]
        except Exception as error:  # pickling runs the user's code
            raise ConfigError(
                f"{what} ({type(thing).__name__}) cannot be pickled, so it cannot reach a worker: "
                f"{why_unpicklable(thing, error)}"
            ) from error
        own = next((weights[each][1] for each in tensors if each in weights), "")
        if weight := own or alias(tensors, weights):
            raise ConfigError(
                f"{what} refers to {weight}, by a global, a closure or an attribute, and would get "
                "it as the script has it, whatever training makes of it. Take it from "
                "pipe.module(), which has the weights of now, or compute of what "
                "pipe.predict(loader) yields"
            )
    return dumps((loss_fn, dict(metrics)))[0] if things else b""


# One entry is enough: all micro-batches of an evaluation, or an epoch, bring the same bytes.
@functools.lru_cache(maxsize=1)
def unpacked(packed: bytes) -> Functions:
    """Return the functions that `packed_metrics` has packed."""
    loss_fn, metrics = loads(packed) if packed else (None, {})
    if isinstance(loss_fn, nn.Module):
        loss_fn.eval()
    things = {"loss": ("loss_fn", loss_fn)} if loss_fn is not None else {}
    things |= {name: ("the metric", metric) for name, metric in metrics.items()}
    holders = {name: list(Parcel([thing]).found.values()) for name, thing in things.items()}
    for each in (holder for of_one in holders.values() for holder in of_one):
        each.look()  # before the first pass, so that `changed_by` tells what that has changed
    return Functions(loss_fn, metrics, holders)


def measured(packed: bytes, output: Any, target: Value) -> dict[str, float | str]:
    """Return the number of each metric by name; for one that gives none, a text that says why."""
    numbers: dict[str, float | str] = {}
    if not packed:
        return numbers
    functions, expected = unpacked(packed), unflatten(target.structure, target.tensors)
    for name, metric in functions.metrics.items():
        try:
            with torch.no_grad():
                found = float(metric(output, expected))
        except Exception as error:  # the user's; the run goes on, since nothing needs a metric
            numbers[name] = f"{type(error).__name__}: {error}"
            continue
        changed = functions.changed_by(name)
        numbers[name] = (
            f"it changes {changed}, as to collect something, which the script would not see: "
            "evaluate() takes the mean over mini-batches, and predict() yields all outputs"
            if changed
            else found
        )
    return numbers


def refuse_bad_metrics(metrics: Mapping[str, float | str]) -> None:
    """Raise for the first metric that has a text in the place of a number."""
    for name, value in metrics.items():
        if isinstance(value, str):
            raise ConfigError(words_of_bad_metric(name, value))


def words_of_bad_metric(name: str, problem: str) -> str:
    """Return the error text of a metric that gave no number."""
    return f'the metric "{name}" must return a number for an output and a target; {problem}'
