"""Calling the user's code in the script's process so that it leaves no change behind.

It runs on copies of the model and the loss. But the copies share with the script what is pickled by
its name: classes, globals of modules, and all that can be reached from these.
"""

from __future__ import annotations

import io
import random
from collections import deque
from collections.abc import Callable, Iterator
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
from pipedream_rt.models.holders import PLAIN, attributes_of
from pipedream_rt.models.parcel import Parcel, weights_in
from pipedream_rt.models.preserving_state import (
    drawing_alone,
    drawn_outside,
    kept_outside,
    refill,
)
from pipedream_rt.torch_private import preserve_version_counter

LIMIT = 64 << 20
"""Bytes of tensors that are copied to be put back, at most; also the bytes of weights up to which
the first mini-batch of a model is verified by itself."""


def drawn() -> tuple[Any, ...]:
    """Return the states of the random generators: they differ once numbers were drawn."""
    return torch.get_rng_state().numpy().tobytes(), *drawn_outside()


_CONSTANT = (
    *PLAIN, bytes, type, FunctionType, ModuleType, torch.dtype, torch.device, io.IOBase
)  # fmt: skip
"""Nothing of these is put back: they do not change, or are files, where it cannot be."""


@contextmanager
def apart(job: Job) -> Iterator[None]:
    """Let the block compute as a worker does, and then put back what it shares with the script."""
    roots = [job.model.whole, job.options.loss_fn, job.optimizer and job.optimizer.optimizer_class]
    kept = _Kept(Parcel([("", root) for root in roots], weights_in([job.model.whole])))
    with ExitStack() as stack:
        stack.enter_context(drawing_alone())
        # Versions tell the runtime what the script has changed: it is not to see this.
        for tensor in kept.tensors:
            stack.enter_context(preserve_version_counter(tensor))
        # Runs before those contexts end, so what it writes does not count as a change either.
        stack.callback(kept.put_back)
        stack.enter_context(kept_generator_state())
        stack.enter_context(kept_outside())
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(dynamo_spared())
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(job.options.layout.threads)
        yield


class _Kept:
    """What the script and the copies of its model share, as it was."""

    def __init__(self, parcel: Parcel) -> None:
        self.tensors: list[Tensor] = []
        self._undo: list[Callable[[], object]] = []
        self._size = 0
        left: deque[Any] = deque()
        for holder in parcel.found.values():
            if not holder.travels:  # what travels is a copy already
                held = dict(holder.raw())
                self._undo.append(partial(holder.restore, held))
                left.extend(held.values())
        seen: dict[int, Any] = {}  # holds the objects, so that no id is given twice
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
            case torch.Generator():
                undo = partial(value.set_state, value.get_state())
            case np.ndarray():
                self._count(value.nbytes)
                if value.flags.writeable:
                    undo = partial(np.copyto, value, value.copy())
            case np.random.Generator():
                bits = value.bit_generator
                undo = partial(setattr, bits, "state", bits.state)
            case np.random.RandomState():
                undo = partial(value.set_state, value.get_state())
            case random.Random():
                undo = partial(value.setstate, value.getstate())
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
            case _ if hasattr(value, "__next__"):
                raise ConfigError(
                    f"the code reads {value!r:.60} from a global or a class, and what is taken "
                    "from an iterator cannot be put back"
                )
            case _ if hasattr(value, "__dict__") and not is_installed(type(value).__module__):
                undo = partial(_restore, value, dict(attributes_of(value)))
                yield from attributes_of(value).values()
        if undo is not None:
            self._undo.append(undo)

    def _of_tensor(self, tensor: Tensor) -> Callable[[], object] | None:
        """Return what puts the values of a tensor back."""
        if tensor.is_meta or tensor.is_inference() or tensor.layout is not torch.strided:
            return None
        self._count(tensor.nbytes)
        self.tensors.append(tensor)
        version, before = tensor._version, tensor.detach().clone()
        return lambda: None if tensor._version == version else tensor.detach().copy_(before)

    def _count(self, size: int) -> None:
        """Count bytes that are copied, up to `LIMIT`."""
        self._size += size
        if self._size > LIMIT:
            raise ConfigError(
                f"the code reads tensors of more than {LIMIT >> 20} MiB from globals and classes, "
                "too much to copy them so that they can be put back"
            )


def _restore(value: Any, held: dict[str, Any]) -> None:
    """Give an object the attributes back that it had."""
    # By `object`: the class may have a `__setattr__` of its own, which is the user's code.
    for name in [n for n in attributes_of(value) if n not in held]:
        object.__delattr__(value, name)
    for name, before in held.items():
        if attributes_of(value).get(name) is not before:
            object.__setattr__(value, name, before)
