"""Calls a user's model to look at it, and leaves it, and all around it, as it was."""

from __future__ import annotations

import copy
import functools
import os
import random
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from pipedream_rt.errors import ConfigError, PipelineError
from pipedream_rt.models.modes import Modes
from pipedream_rt.models.split import has_hooks

OURS = (
    str(Path(__file__).resolve().parent.parent),
    str(Path(torch.__file__).resolve().parent),
)
"""The folders of this library and of torch: messages name lines outside of them."""


def line_now() -> str:
    """Return the innermost line that runs now and is neither of torch nor of this library."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if not code.co_filename.startswith(OURS) and not code.co_filename.startswith("<frozen"):
            return f"{code.co_filename}:{frame.f_lineno} in {code.co_name}"
        frame = frame.f_back
    return "an unknown line"


MANUAL = (
    "Or give Pipeline a list of modules, each of which takes what the one before it gives "
    "(docs/guide/any-model.md shows how)"
)
"""The way out where a forward cannot be followed."""


def refusal(what: str) -> ConfigError:
    """Return the error about something that the forward does, with its line."""
    return ConfigError(f"the model cannot be cut into stages: at {line_now()} {what}. {MANUAL}")


def called_with(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call the model; name the user's line if it fails."""
    try:
        return model(*args, **kwargs)
    except ConfigError:
        raise
    except Exception as error:  # the user's code may raise anything
        place = traceback.extract_tb(error.__traceback__)
        own = [frame for frame in place if not frame.filename.startswith(OURS)]
        at = f" at {own[-1].filename}:{own[-1].lineno} in {own[-1].name}" if own else ""
        how = "" if torch.is_grad_enabled() else " in eval mode, without gradients"
        called_wrongly = isinstance(error, TypeError) and "argument" in str(error)
        raise ConfigError(
            f"the forward of the model, a {type(model).__name__}, does not take the example or the "
            f"mini-batch{how}{at}: {type(error).__name__}: {error}"
            + called_wrongly
            * (
                ". To say what it is called with, give Pipeline prepare=, which makes of an item "
                "the positional arguments, the keyword arguments and the target: "
                "prepare=lambda item: ((a, b), {}, y)"
            )
        ) from error


def modules_inside(layers: Mapping[str, nn.Module]) -> set[int]:
    """Return the ``id`` of each module that is a layer or in one."""
    return {id(each) for layer in layers.values() for each in layer.modules()}


def refuse_unfit_modules(model: nn.Module, layers: Mapping[str, nn.Module]) -> None:
    """Refuse modules of torch.jit; outside of layers, compiled modules and hooks too."""
    inside = modules_inside(layers)
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise ConfigError(
                f"{name or 'the model'} is a module of torch.jit, which keeps its weights where "
                "versions of them cannot be put; give the module as it was before"
            )
        compiled = module._compiled_call_impl is not None or hasattr(module, "_orig_mod")
        if compiled and id(module) not in inside:
            raise ConfigError(
                f"{name or 'the model'} is compiled as a whole, and it is taken apart into layers; "
                "give the model as it was before, and Training(compile=True), with which each "
                "worker compiles its layers"
            )
        if id(module) not in inside and has_hooks(module):
            raise ConfigError(
                f"{name or 'the model'} has hooks, and it is taken apart into layers, so that no "
                f"stage calls it; put them on one of the layers, such as {next(iter(layers), name)}"
            )


def refill(container: Any, content: Any) -> None:
    """Replace the content of a list, a deque, a set or a dict."""
    container.clear()  # in place, since others may hold the container
    (container.update if hasattr(container, "update") else container.extend)(content)


def refusal_of_draws(where: str = "") -> ConfigError:
    """Return the error about random numbers that a forward draws outside of torch."""
    return ConfigError(
        f"the model cannot be cut into stages: {where}its forward draws random numbers of Python "
        "or NumPy, so its way differs from call to call. Draw them with torch inside a layer, or "
        "in the loader; of a model of transformers, set apply_spec_augment to False and layerdrop "
        f"to 0, in its config. {MANUAL}"
    )


_LONGEST = timedelta(hours=1)
"""How long a thread waits for others that compute stages; longer is taken for a deadlock."""

_computing = threading.RLock()
"""Held by the thread that seeds torch's one default generator, of which dropout draws."""


@contextmanager
def drawing_alone() -> Iterator[None]:
    """Keep out of the body other threads that seed or set torch's generators through this library.

    The body may compute, and must wait for nothing that another thread of the script does.
    """
    lock = _computing  # a fork in the body gives the child another
    if not lock.acquire(timeout=_LONGEST.total_seconds()):
        raise PipelineError(
            f"another thread of this process has computed stages for {_LONGEST}, and this one "
            "cannot meanwhile, as torch has one random generator for all threads. If a layer, a "
            'loss or a hook waits for this thread, give one of the pipelines workers="local"'
        )
    try:
        yield
    finally:
        lock.release()


def _forget() -> None:
    """Let a forked child compute: the thread that held the lock is not there."""
    global _computing
    _computing = threading.RLock()


os.register_at_fork(after_in_child=_forget)


@contextmanager
def kept_outside() -> Iterator[None]:
    """Restore the random generators of Python and NumPy after the body."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


@contextmanager
def mode_set(model: nn.Module, training: bool | None, modes: Modes) -> Iterator[None]:
    """Set the mode of every module in the body, but the opposite where `Modes` says so.

    ``training`` is None to leave every module in its mode.
    """
    before = [(module, module.training) for module in model.modules()]
    others = modes.in_training if training else modes.in_eval
    try:
        if training is not None:
            # Not by train(), which a module may override to merge weights or keep its mode.
            for module, _ in before:
                module.training = training
            for name in others:
                model.get_submodule(name).training = not training
        yield
    finally:
        for module, mode in before:
            module.training = mode


class Left:
    """The state that a forward has left in modules outside of the layers.

    Attributes:
        values: The values that it has left, by the name of each attribute.
    """

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self._puts: list[Callable[[], object]] = []

    def note(self, name: str, value: Any, put: Callable[[], object]) -> None:
        self.values[name] = value
        self._puts.append(put)

    def put(self) -> None:
        """Leave the same once more."""
        for put in self._puts:
            put()


def refusal_of_change(left: Left, how: str = "", name: str = "") -> ConfigError:
    """Return the error about an attribute that a forward changes outside of the layers."""
    changed = name or next(iter(left.values))
    return ConfigError(
        f"the model cannot be cut into stages: its forward changes the attribute {changed}"
        f"{f' {how}' * bool(how)}, and no stage has the whole module. Keep such state in a layer "
        "that has it to itself, or in a buffer of one. A table that goes by shapes alone may be "
        f"kept, in an attribute or a buffer with persistent=False. {MANUAL}"
    )


@contextmanager
def as_it_was(
    model: nn.Module,
    layers: Mapping[str, nn.Module],
    left: Left | None = None,
    before: Left | None = None,
) -> Iterator[None]:
    """Restore the model and the random generators after the body.

    Refuse a body that has changed modules outside of the layers, has seeded torch, or has drawn
    random numbers of Python or NumPy. With ``left``, changes of attributes are noted there instead;
    ``before`` has those that the body begins with.
    """
    with drawing_alone():
        noted = Left() if left is None else left
        yield from _as_it_was(model, layers, noted, before)
        if left is None and noted.values:
            raise refusal_of_change(noted)


def _as_it_was(
    model: nn.Module, layers: Mapping[str, nn.Module], left: Left, start: Left | None
) -> Iterator[None]:
    """Do what `as_it_was` says, in a thread that draws alone."""
    inside = modules_inside(layers)
    before = [
        (name, module, dict(vars(module)), {k: dict(vars(module)[k]) for k in _DICTS})
        for name, module in model.named_modules()
    ]
    contents = [
        (name, module, key, value, copy.copy(value))
        for name, module in model.named_modules()
        for key, value in vars(module).items()
        if type(value) in (list, dict, set) and key not in _DICTS and not key.endswith("_hooks")
    ]
    drawn = torch.get_rng_state(), random.getstate(), np.random.get_state()
    seed = torch.initial_seed()
    finished = False

    def note(module: nn.Module, name: str, key: str, value: Any, put: Callable[[], object]) -> None:
        if id(module) not in inside:  # a layer may keep what it likes
            left.note(f"{key!r} of {name or 'the model'}", value, put)

    if start is not None:
        start.put()
    try:
        yield
        finished = True
    finally:
        # Through vars(), since setattr of a module registers tensors, or refuses them.
        for name, module, attributes, dicts in before:
            now = vars(module)
            for key, entries in dicts.items():
                if not _same_content(now[key], entries):
                    made = dict(now[key])
                    for short in {**made, **entries}:
                        if made.get(short, now) is not entries.get(short, now):
                            # What a state dict has is no table.
                            saved = (
                                key != "_buffers" or short not in module._non_persistent_buffers_set
                            )
                            value = _SAVED if saved else made.get(short)
                            put = functools.partial(refill, now[key], made)
                            note(module, name, short, value, put)
                    refill(now[key], entries)
            for key in [*now]:
                same = key in attributes and now[key] is attributes[key]
                if not same and key not in ("training", *_DICTS):
                    put = functools.partial(now.__setitem__, key, now[key])
                    note(module, name, key, now[key], put)
                if key not in attributes:
                    del now[key]
            now.update(attributes)
        for name, module, key, value, content in contents:
            if not _same_content(value, content):
                made = copy.copy(value)
                note(module, name, key, made, functools.partial(refill, value, made))
                refill(value, content)
        python, numpy = random.getstate(), np.random.get_state()
        seeded = torch.initial_seed() != seed
        torch.set_rng_state(drawn[0])
        random.setstate(drawn[1])
        np.random.set_state(drawn[2])
    # Only if the body has not failed: its own error says more.
    if finished and seeded:
        raise ConfigError(
            "the model cannot be cut into stages: its forward calls torch.manual_seed, which would "
            "hold for one stage alone; every step is seeded by itself, by the number of the "
            f"micro-batch and its name. {MANUAL}"
        )
    if finished and (python != drawn[1] or str(numpy) != str(drawn[2])):
        raise refusal_of_draws()


_SAVED = object()
"""Stands for a value that state dicts have."""


def _same_content(one: Any, other: Any) -> bool:
    """Whether two lists, dicts or sets hold the same objects; dicts in the same order."""
    if isinstance(one, set):
        return bool(one == other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(one[key] is other[key] for key in one)
    return len(one) == len(other) and all(a is b for a, b in zip(one, other, strict=True))


_DICTS = ("_parameters", "_buffers", "_modules")
