"""The protocol of devices, and the host as one of them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from pipedream_rt.devices.events import DeviceEvents
from pipedream_rt.messages.message import Message, Send, Sender
from pipedream_rt.models.program import replaced
from pipedream_rt.models.tensors import accelerator_here, in_place_of, is_away, named_tensors
from pipedream_rt.torch_private import shares_type


class DeferredScalar(NamedTuple):
    """A number that a device is still computing; nobody on the host waits for it.

    It takes the place of a float in a payload until the message leaves the process.

    Attributes:
        value: The tensor with the number, on the device.
        check: Called with the number once it is known; an error of it ends the worker.
    """

    value: Tensor
    check: Callable[[float], object]


def accept(number: float) -> None:
    """A check that accepts every number."""


class Device(Protocol):
    """The device of the stages of one worker.

    Attributes:
        name: Its name for torch, as ``"cpu"`` or ``"cuda:1"``.
    """

    name: str

    def settle_in(self) -> None:
        """Make it the device of the calling thread, which uses no other one."""

    def entered(self) -> AbstractContextManager[object]:
        """Return the context in which the stages of the worker do everything."""

    def place(self, module: nn.Module) -> None:
        """Move the parameters and buffers of a module there; those that are shared stay shared."""

    def placed(self, value: Any) -> Any:
        """Return a constant of a recorded forward, its tensors and devices changed to this one."""

    def seed(self, seed: int) -> None:
        """Seed the random numbers that layers there draw."""

    def autocast(self, dtype: torch.dtype) -> AbstractContextManager[object]:
        """Return the context in which torch's autocast casts to a dtype there."""

    def number(
        self, value: Tensor, check: Callable[[float], object] = accept
    ) -> float | DeferredScalar:
        """Return the number in a tensor of one element, deferred if the host had to wait for it.

        Args:
            value: The tensor.
            check: Called with the number; see `DeferredScalar`.

        Raises:
            BaseException: What ``check`` raises, where the number is known at once.
        """

    def brings_back(self) -> bool:
        """Whether outputs of layers may be on another device, so that `brought_back` is needed."""

    def brought_back(self, value: Any) -> Any:
        """Return an output of layers with its tensors on this device.

        A layer may put them on another one, whose streams this one knows nothing of; gradients then
        go the same way back.
        """

    def taken(self, message: Message) -> Message:
        """Return a received message with its tensors on this device, as the stages use them."""

    def sending(self, send: Sender, failed: Callable[[BaseException], object]) -> Send:
        """Return the function by which a stage sends tensors that may be on this device.

        Args:
            send: Hands messages to the transport, with tensors in the memory of the host.
            failed: Called with the error that a check of a `DeferredScalar` raises, from any
                thread.
        """

    def copied(self, tensor: Tensor) -> Tensor:
        """Begin to copy a tensor to the host; return the copy, for which `settle` waits.

        It is made as `torch.clone` makes one, before anything that the stage computes next. If it
        is sent, it leaves once it is there.
        """

    def settle(self) -> Callable[[], None]:
        """Return a function that waits until all copies that were begun are there. Any thread."""

    def marks(self, capacity: int) -> DeviceEvents | None:
        """Return a recorder of when the device did the actions of the worker; None for the host."""

    def facts(self) -> Mapping[str, Any]:
        """Return its name, and for an accelerator the bytes of its memory, for statistics."""

    def close(self) -> None:
        """Let all messages leave, and end the threads that were started."""


class Host:
    """The memory of the host, where a tensor is there as soon as it is made."""

    name = "cpu"

    def settle_in(self) -> None: ...

    def entered(self) -> AbstractContextManager[object]:
        return nullcontext()

    def place(self, module: nn.Module) -> None:
        # What was shipped with its attributes may be on an accelerator.
        if any(is_away(tensor) for _, tensor in named_tensors(module)):
            moved(module, torch.device("cpu"))

    def placed(self, value: Any) -> Any:
        return value

    def seed(self, seed: int) -> None:
        torch.default_generator.manual_seed(seed)

    def autocast(self, dtype: torch.dtype) -> AbstractContextManager[object]:
        return torch.autocast("cpu", dtype=dtype)

    def number(
        self, value: Tensor, check: Callable[[float], object] = accept
    ) -> float | DeferredScalar:
        found = float(value.item())
        check(found)
        return found

    def brings_back(self) -> bool:
        return accelerator_here() is not None

    def brought_back(self, value: Any) -> Any:
        return replaced(value, (Tensor,), lambda t: t.cpu() if is_away(t) else t)

    def taken(self, message: Message) -> Message:
        return message

    def sending(self, send: Sender, failed: Callable[[BaseException], object]) -> Send:
        return send

    def copied(self, tensor: Tensor) -> Tensor:
        return tensor.clone()

    def settle(self) -> Callable[[], None]:
        return _nothing

    def marks(self, capacity: int) -> DeviceEvents | None:
        return None  # an action has ended when it returns

    def facts(self) -> Mapping[str, Any]:
        return {"device": self.name}

    def close(self) -> None: ...


def _nothing() -> None:
    """The wait for copies on the host, which are there at once."""


HOST = Host()
"""The host, which has no state: one for all workers."""


@torch.no_grad()
def moved(module: nn.Module, device: torch.device) -> None:
    """Move the parameters and buffers of a module; those that are shared stay shared."""
    there: dict[int, Tensor] = {}
    for name, tensor in list(named_tensors(module)):
        if id(tensor) not in there:
            there[id(tensor)] = _in_memory_of(tensor, tensor.detach().to(device))
        if there[id(tensor)] is not tensor:
            path, _, short = name.rpartition(".")
            setattr(module.get_submodule(path), short, there[id(tensor)])


def _in_memory_of(tensor: Tensor, there: Tensor) -> Tensor:
    """Return a parameter or buffer that has other memory now; the object itself where possible."""
    # Not every backend lets its memory be assigned to a tensor of the host.
    if shares_type(tensor, there):
        tensor.data = there
        return tensor
    made = in_place_of(tensor, there, tensor.requires_grad)
    # What is referred to weakly, as the weights of an LSTM, cannot be swapped either.
    if weakref.getweakrefcount(tensor):
        return made
    torch.utils.swap_tensors(tensor, made)
    return tensor
