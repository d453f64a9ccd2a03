"""The buffers of a module: where they are held, loaded, and kept as a backward needs them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from pipedream_rt.devices import HOST, Device
from pipedream_rt.models.mark import Mark, mark_of_tensor
from pipedream_rt.torch_private import NormWithBuffers


def buffer_slots(module: nn.Module) -> dict[str, list[tuple[nn.Module, str]]]:
    """Return by name of each buffer all its places: (submodule, name in its ``_buffers``)."""
    # named_buffers() lacks buffers that are None, and all names of a shared buffer but the first.
    found: dict[str, list[tuple[nn.Module, str]]] = {}
    by_tensor: dict[int, list[tuple[nn.Module, str]]] = {}
    for prefix, owner in module.named_modules():
        for short, buffer in owner._buffers.items():
            shared = [] if buffer is None else by_tensor.setdefault(id(buffer), [])
            shared.append((owner, short))
            found[f"{prefix}.{short}" if prefix else short] = shared
    return found


def names_of_buffers(module: nn.Module) -> set[str]:
    """Return the names of all places of a module that hold a buffer which is not None."""
    return {name for name, _ in module.named_buffers(remove_duplicate=False)}


def load_buffers(module: nn.Module, state: dict[str, Tensor], device: Device = HOST) -> None:
    """Load buffers by name, in place where shape and dtype agree, since tensors may be shared."""
    for name, slots in buffer_slots(module).items():
        if name not in state:
            continue
        owner, short = slots[0]
        current, saved = owner._buffers[short], state[name]
        if current is not None and (current.shape, current.dtype) == (saved.shape, saved.dtype):
            current.copy_(saved)
            continue
        made = device.placed(saved.clone())
        for holder, its_name in slots:
            holder._buffers[its_name] = made


def load_state(module: nn.Module, state: dict[str, Tensor]) -> None:
    """Load those entries of a state dict that belong to this module, and ignore the others."""
    keys = module.state_dict()
    module.load_state_dict({k: state[k] for k in keys if k in state}, strict=False)


class ForwardBuffers:
    """Copies the buffers that forwards change, so that each backward finds the saved ones."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        by_tensor: dict[int, list[tuple[nn.Module, str]]] = {}
        for owner in module.modules():
            for name, buffer in owner._buffers.items():
                # The backward of BatchNorm and its kin reads no statistics that a forward changes.
                if buffer is not None and not isinstance(owner, NormWithBuffers):
                    by_tensor.setdefault(id(buffer), []).append((owner, name))
        self._slots = list(by_tensor.values())
        self._changing: set[int] = set()

    def copies(self) -> dict[str, Tensor]:
        """Return copies of all buffers, by name, for `put_back_for_a_while`."""
        return {n: b.detach().clone() for n, b in self._module.named_buffers()}

    @contextmanager
    def put_back_for_a_while(self, copies: dict[str, Tensor]) -> Iterator[None]:
        """Put copies from earlier in the place of the buffers while the body runs."""
        places = buffer_slots(self._module)
        slots = [
            (owner._buffers, short, owner._buffers[short])
            for of_buffer in places.values()
            for owner, short in of_buffer
        ]
        for name, copy in copies.items():
            own = copy.clone()  # the body may change it, and may run once more
            for owner, short in places.get(name, ()):
                owner._buffers[short] = own
        try:
            yield
        finally:
            for holder, short, buffer in slots:
                holder[short] = buffer

    @property
    def any(self) -> bool:
        """Whether there are buffers that a backward may read."""
        return bool(self._slots)

    @contextmanager
    def kept_for_backward(self, others: bool) -> Iterator[None]:
        """Guard a forward, the body; `others`: whether other micro-batches are in flight."""
        # Autograd may have saved a buffer for a backward to come, which would find it changed in
        # place. So this forward changes a copy of each buffer that a forward was seen to change.
        if others:
            for number in self._changing:
                self._replace(self._slots[number])
        before = [self._mark(slots) for slots in self._slots]
        yield
        for number, slots in enumerate(self._slots):
            if self._mark(slots) != before[number]:
                self._changing.add(number)

    @staticmethod
    def _mark(slots: list[tuple[nn.Module, str]]) -> Mark:
        """Return the mark of what the first of its places holds."""
        owner, name = slots[0]
        return mark_of_tensor(owner._buffers.get(name))

    @staticmethod
    def _replace(slots: list[tuple[nn.Module, str]]) -> None:
        """Put a copy in the place of a buffer, in all places that hold it."""
        owner, name = slots[0]
        buffer = owner._buffers.get(name)
        if buffer is None:
            return
        copy = buffer.clone()
        for holder, its_name in slots:
            if holder._buffers.get(its_name) is buffer:
                holder._buffers[its_name] = copy
