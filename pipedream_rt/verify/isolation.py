"""Calling the user's code in the script's process so that it leaves no change behind.

It runs on copies of the model and the loss. But the copies share with the script what is pickled by
its name: classes, globals of modules, and all that can be reached from these.
"""

from __future__ import annotations

import io
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pipedream_rt.devices.randomness import kept_generator_state
from pipedream_rt.dynamo import dynamo_spared
from pipedream_rt.errors import ConfigError
from pipedream_rt.job.job import Job
from pipedream_rt.models.code import is_installed
from pipedream_rt.models.holders import PLAIN, Holder, attributes_of
from pipedream_rt.models.mark import GENERATORS, mark_of_tensor, mark_of_value, state_of
from pipedream_rt.models.parcel import Parcel, weights_in
from pipedream_rt.models.preserving_state import drawing_alone, kept_outside, refill
from pipedream_rt.torch_private import preserve_version_counter
from pipedream_rt.verify.compare import MOST, sampled

LIMIT = 64 << 20
"""Bytes of tensors that are copied to be put back, at most."""

_CONSTANT = (*PLAIN, bytes, type, FunctionType, ModuleType, torch.dtype, torch.device)
"""Nothing of these is put back: they do not change."""


class Shared:
    """The objects that copies of a job's model, loss and optimizer share with the script."""

    def __init__(self, job: Job) -> None:
        self._threads = job.options.layout.threads
        optimizer = job.reading.optimizer and job.reading.optimizer.optimizer_class
        roots = [("", root) for root in (job.model.whole, job.options.loss_fn, optimizer)]
        parcel = Parcel(roots, weights_in([job.model.whole]))
        # What travels is a copy already.
        self._holders = [holder for holder in parcel.found.values() if not holder.travels]

    def keep(self) -> Kept:
        """Keep all of it as it is now."""
        return Kept(self._holders, limit=LIMIT)

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Let the block compute as a worker does, and then put back what it has changed."""
        kept = self.keep()
        with ExitStack() as stack:
            stack.enter_context(drawing_alone())
            # Versions tell the runtime what the script has changed: it is not to see this.
            for tensor in kept.tensors:
                stack.enter_context(preserve_version_counter(tensor))
            # Runs before those contexts end, so what it writes is no change either.
            stack.callback(kept.put_back)
            stack.enter_context(kept_generator_state())
            stack.enter_context(kept_outside())
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.enable_grad())
            stack.enter_context(dynamo_spared())
            stack.callback(torch.set_num_threads, torch.get_num_threads())
            torch.set_num_threads(self._threads)
            yield


class Kept:
    """The values of holders, and other objects, as they were: up to ``limit`` bytes of tensors.

    Attributes:
        tensors: The tensors that are put back.
    """

    def __init__(
        self,
        holders: Iterable[Holder],
        others: Iterable[Any] = (),
        spared: Iterable[Any] = (),
        limit: float = math.inf,
    ) -> None:
        self.tensors: list[Tensor] = []
        self._undo: list[Callable[[], object]] = []
        self._left = limit
        left = deque(others)
        for holder in holders:
            if holder.kind in ("dict", "list", "state"):
                left.append(holder.value)  # put back as an object
                continue
            held = dict(holder.raw())
            self._undo.append(partial(holder.restore, held))
            left.extend(held.values())
        # Holds the objects, so that no id is given twice.
        seen: dict[int, Any] = {id(each): each for each in spared}
        while left:
            value = left.pop()
            if id(value) not in seen and not isinstance(value, _CONSTANT):
                seen[id(value)] = value
                left.extend(self._inside(value))

    def put_back(self) -> None:
        for undo in self._undo:
            undo()

    def _inside(self, value: Any) -> Iterator[Any]:
        """Note how to put an object back, and yield what it holds."""
        undo: Callable[[], object] | None = None
        match value:
            case Tensor():
                undo = self._of_tensor(value)
            case np.ndarray():
                self._count(value.nbytes)
                if value.flags.writeable:
                    undo = partial(np.copyto, value, value.copy())
            case _ if isinstance(value, GENERATORS):
                set_state, state = state_of(value)
                undo = partial(set_state, state)
            case dict():
                undo = partial(refill, value, dict(value))
                yield from value.values()
            case list() | deque():
                undo = partial(refill, value, list(value))
                yield from value
            case set():
                undo = partial(refill, value, set(value))
            case tuple():
                yield from value
            case io.IOBase() if not value.closed and value.readable():
                undo = _of_file(value)
            case io.IOBase():  # what was written stays written
                pass
            case _ if hasattr(value, "__next__"):
                raise _no_way_back(value)
            case _ if hasattr(value, "__dict__") and not is_installed(type(value).__module__):
                undo = partial(_restore, value, dict(attributes_of(value)))
                yield from attributes_of(value).values()
        if undo is not None:
            self._undo.append(undo)

    def _of_tensor(self, tensor: Tensor) -> Callable[[], object] | None:
        """Return a function that puts the values of a tensor back."""
        if tensor.is_meta or tensor.is_inference() or tensor.layout is not torch.strided:
            return None
        self._count(tensor.nbytes)
        self.tensors.append(tensor)
        mark, before = mark_of_tensor(tensor), tensor.detach().clone()
        return lambda: None if mark_of_tensor(tensor) == mark else tensor.detach().copy_(before)

    def _count(self, size: int) -> None:
        """Count bytes that are copied."""
        self._left -= size
        if self._left < 0:
            raise ConfigError(
                f"the code reads tensors of more than {LIMIT >> 20} MiB from globals and classes, "
                "too much to copy them so that they can be put back"
            )


def held_by(holders: Iterable[Holder]) -> dict[str, Any]:
    """Return the values of holders by their names in messages, in a form that can be compared."""
    return {h.called(key): _comparable(value) for h in holders for key, value in h.raw().items()}


def generators_in(holders: Iterable[Holder]) -> list[Any]:
    """Return the random generators that holders are or hold."""
    values = (v for h in holders for v in (h.value, *h.raw().values()))
    return [value for value in values if isinstance(value, GENERATORS)]


def _of_file(file: Any) -> Callable[[], object]:
    """Return a function that sets the place back at which a file is read."""
    try:
        return partial(file.seek, file.tell())
    except (OSError, ValueError):  # a pipe; or a text that is being iterated over
        raise _no_way_back(file) from None


def _no_way_back(value: Any) -> ConfigError:
    return ConfigError(
        f"the code reads {value!r:.60}, and what is taken from such an iterator or file cannot be "
        "put back"
    )


def _comparable(value: Any, depth: int = 3) -> Any:
    """Return a value in a form that differs once it was changed; None where none is known."""
    if isinstance(value, Tensor):
        return None if value.is_meta else sampled(value)
    if isinstance(value, np.ndarray):
        return value.tobytes() if value.nbytes <= MOST else value.shape
    if isinstance(value, GENERATORS):
        return mark_of_value(value)
    if isinstance(value, PLAIN) or not depth:
        return value if isinstance(value, PLAIN) else None
    if isinstance(value, list | tuple | set | deque):
        inside: Any = enumerate(value)
    elif isinstance(value, dict):
        inside = value.items()
    else:
        own = hasattr(value, "__dict__") and not is_installed(type(value).__module__)
        inside = attributes_of(value).items() if own and not isinstance(value, _CONSTANT) else ()
    # Of a long container the last entries: there something is added.
    last = deque(inside, _FEW)
    return tuple((str(key), _comparable(each, depth - 1)) for key, each in last)


_FEW = 64
"""The entries of a container that are compared, at most."""


def _restore(value: Any, held: dict[str, Any]) -> None:
    """Give an object the attributes back that it had."""
    # By `object`: the class may have a `__setattr__` of its own, which is the user's code.
    for name in [n for n in attributes_of(value) if n not in held]:
        object.__delattr__(value, name)
    for name, before in held.items():
        if attributes_of(value).get(name) is not before:
            object.__setattr__(value, name, before)
