"""An accelerator of any kind that torch knows, as the device of the stages of one worker.

Everything that a worker computes runs in one stream of its own: forwards, hooks, backwards, steps.
The host only launches it, and waits for nothing. Copies to and from the device go on two more
streams, so that copies and computation do not wait for each other:

- what arrives in the memory of the host is put into pinned memory and copied from there, and the
  stream of the worker waits for the copy;
- what is sent is copied at once, in the stream of the worker, as a layer may write over it when it
  computes the next micro-batch. That copy goes to pinned memory, and is sent when it is there; or
- it is handed as it is to another worker of this process on an accelerator, with an event: the
  stream of the other waits for the event.

Memory that one stream allocated and another reads is marked (`Tensor.record_stream`), so that the
allocator does not reuse it too early.

Workers that share a device share a process and its one thread: launches from several threads would
take turns at the GIL all the same, and a process has one generator for each device.
"""

from __future__ import annotations

import dataclasses
import queue
import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from pipedream_rt.devices.device import DeferredScalar, accept, moved
from pipedream_rt.devices.events import DeviceEvents
from pipedream_rt.lifecycle import name_this_thread
from pipedream_rt.messages.message import Key, Loss, Message, Payload, Send, Sender
from pipedream_rt.messages.tree import own
from pipedream_rt.models.program import on_device, replaced
from pipedream_rt.schedules.channels import OF_ACTIONS
from pipedream_rt.torch_private import is_multithreading_enabled, set_multithreading_enabled

_COMPUTED = {channel.kind for channel in OF_ACTIONS}
"""The kinds of messages whose tensors a stage computes with; all others it reads on the host."""


class Accelerator:
    """An accelerator, on which the stages of one worker compute."""

    def __init__(
        self, device: torch.device, near: Collection[int], threaded: bool, name: str
    ) -> None:
        self.name = str(device)
        self._device = device
        # Addresses on accelerators: what goes to those in this process need not go by the host.
        self._near = near
        self._module = torch.get_device_module(device)
        torch.empty(0, device=device)  # begins to use the device: until then a seed is only queued
        self._streams = _streams_on(device)
        self.stream, self._in, self._out = self._streams
        self._leaving = ByThread(f"{name}-out", self.settle_in) if threaded else AtOnce()

    def settle_in(self) -> None:
        # Else the thread would begin to use the first device as well.
        torch.accelerator.set_device_index(self._device.index)

    def entered(self) -> AbstractContextManager[object]:
        return _Entered(self.stream)

    # -- layers and what they draw --------------------------------------------------------------

    def place(self, module: nn.Module) -> None:
        moved(module, self._device)

    def placed(self, value: Any) -> Any:
        return on_device(value, self._device)

    def seed(self, seed: int) -> None:
        # A layer may draw on the host too.
        torch.default_generator.manual_seed(seed)
        self._module.manual_seed(seed)

    def autocast(self, dtype: torch.dtype) -> AbstractContextManager[object]:
        return torch.autocast(self._device.type, dtype=dtype)

    # -- values ---------------------------------------------------------------------------------

    def number(
        self, value: Tensor, check: Callable[[float], object] = accept
    ) -> float | DeferredScalar:
        # The host does not wait: the number is known when the message with it leaves.
        return DeferredScalar(value.detach().to(self._device), check)

    def brings_back(self) -> bool:
        return True

    def brought_back(self, value: Any) -> Any:
        def back(tensor: Tensor) -> Tensor:
            # What needs no gradient may stay on the host.
            if tensor.device == self._device or (tensor.is_cpu and not tensor.requires_grad):
                return tensor
            return tensor.to(self._device)

        return replaced(value, (Tensor,), back)

    def taken(self, message: Message) -> Message:
        if not message.tensors or message.key.edge.kind not in _COMPUTED:
            return message
        tensors = message.tensors
        if message.ready is not None:
            # Another worker's stream may still be computing these.
            self.stream.wait_event(message.ready)
            tensors = tuple(t if t.is_cpu else self._taken_over(t) for t in tensors)
        if any(tensor.is_cpu for tensor in tensors):
            tensors = self._brought(tensors)
        return dataclasses.replace(message, tensors=tensors, ready=None)

    def _brought(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Copy tensors from the host, in a stream that does not wait for computations."""
        with self._in:
            moved = tuple(own(t, copy=True, clone=self._up) if t.is_cpu else t for t in tensors)
            there = self._in.record_event()
        self.stream.wait_event(there)
        for tensor, before in zip(moved, tensors, strict=True):
            if before.is_cpu:  # allocated in one stream, read in another
                tensor.record_stream(self.stream)
        return moved

    def _up(self, tensor: Tensor) -> Tensor:
        """Copy a tensor to the device; torch keeps pinned memory alive until that is done."""
        pinned = torch.empty_like(tensor, pin_memory=True).copy_(tensor)
        return torch.empty_like(pinned, device=self._device).copy_(pinned, non_blocking=True)

    def _taken_over(self, tensor: Tensor) -> Tensor:
        """Return a tensor from another worker of this process, or a copy of it on this device."""
        if tensor.device == self._device:
            tensor.record_stream(self.stream)
            return tensor
        made = own(tensor, copy=True, clone=self._from_there)
        # Between devices torch copies in the current stream of the source.
        tensor.record_stream(torch.accelerator.current_stream(tensor.device))
        return made

    def _from_there(self, tensor: Tensor) -> Tensor:
        """Return a copy here of a tensor on another device."""
        return torch.empty_like(tensor, device=self._device).copy_(tensor, non_blocking=True)

    def _down(self, tensor: Tensor) -> Tensor:
        """Begin to copy a tensor to pinned memory, in the current stream."""
        return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(
            tensor, non_blocking=True
        )

    def sending(self, send: Sender, failed: Callable[[BaseException], object]) -> Send:
        def leave(key: Key, payload: Payload, tensors: tuple[Tensor, ...]) -> None:
            if isinstance(payload, Loss) and isinstance(payload.loss, DeferredScalar):
                tensors = (*tensors, payload.loss.value)
            # A layer may write over its output later, so it is cloned now. What is on the host is a
            # copy already, or nobody changes it; see `copied`.
            tensors = tuple(t if t.is_cpu else own(t, copy=True) for t in tensors)
            near = bool(tensors) and key.edge.target in self._near
            if near and send.hand_over(key, payload, tensors, self.stream.record_event):
                return
            copies, copied = self._leave(tensors) if tensors else ((), None)
            self._leaving.put(Leaving(send, failed, key, payload, copies, copied))

        return leave

    def _leave(self, tensors: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], torch.Event | None]:
        """Begin to copy tensors to the host; return the copies, and the event of the last one."""
        # What is on the host may be a copy that the stream has still to make; see `copied`.
        if all(tensor.is_cpu for tensor in tensors):
            return tensors, self.stream.record_event()
        self._out.wait_stream(self.stream)
        with self._out:
            copies = tuple(t if t.is_cpu else own(t, copy=True, clone=self._down) for t in tensors)
            copied = self._out.record_event()
        for tensor in tensors:
            if not tensor.is_cpu:
                tensor.record_stream(self._out)
        return copies, copied

    def copied(self, tensor: Tensor) -> Tensor:
        # In the stream of the worker, straight to the host: that takes no memory of the device.
        if tensor.is_cpu:
            return tensor.clone()
        # Of a conjugate view torch copies the values and conjugates them on the host, too early.
        return self._down(tensor.resolve_conj().resolve_neg())

    def settle(self) -> Callable[[], None]:
        event = self.stream.record_event()

        def wait() -> None:
            self.settle_in()  # any thread may wait
            event.synchronize()

        return wait

    def marks(self, capacity: int) -> DeviceEvents | None:
        return DeviceEvents(self.stream, capacity)

    def facts(self) -> Mapping[str, Any]:
        # The figures are those of torch's allocator in this process.
        return {
            "device": self.name,
            "device_memory_bytes": self._module.memory_allocated(self._device),
            "peak_device_memory_bytes": self._module.max_memory_allocated(self._device),
        }

    def close(self) -> None:
        if self._streams:
            self._leaving.close()
            _FREE[self._device].append(self._streams)
            self._streams = ()


_FREE: dict[torch.device, list[tuple[torch.Stream, ...]]] = defaultdict(list)
"""The streams of workers that have ended, for later ones. The allocator keeps memory for the stream
that it was allocated for, so with new streams it would grow with each pipeline."""


def _streams_on(device: torch.device) -> tuple[torch.Stream, ...]:
    """Return the streams of a worker that has ended, or new ones: computing, in, out."""
    with suppress(IndexError):
        return _FREE[device].pop()
    return tuple(torch.Stream(device) for _ in range(3))


class _Entered:
    """The context in which a worker does all: its stream, and backwards on its own thread."""

    __slots__ = ("_before", "_stream")

    def __init__(self, stream: torch.Stream) -> None:
        self._stream = stream
        self._before = True

    def __enter__(self) -> None:
        # Autograd has one thread for each device: the backwards of all stages would take turns on
        # it, and it may still hold what a backward left when the process ends.
        self._before = is_multithreading_enabled()
        set_multithreading_enabled(False)
        self._stream.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._stream.__exit__(*error)
        set_multithreading_enabled(self._before)


@dataclass(frozen=True, slots=True)
class Leaving:
    """A message on its way out.

    Attributes:
        failed: Called with the error that the check of a late loss raises.
        payload: Its payload, whose loss may be `DeferredScalar`.
        tensors: Copies of its tensors on the host; one more, the last, for a loss that is late.
        copied: The event after which the copies are there; None if there are none.
    """

    send: Send
    failed: Callable[[BaseException], object]
    key: Key
    payload: Payload
    tensors: tuple[Tensor, ...]
    copied: torch.Event | None

    def leave(self) -> None:
        """Wait for the copies, check a late loss, and hand the message over."""
        payload, tensors = self.payload, self.tensors
        if self.copied is not None:
            self.copied.synchronize()
        if isinstance(payload, Loss) and isinstance(payload.loss, DeferredScalar):
            *rest, value = tensors
            number, tensors = float(value.item()), tuple(rest)
            payload.loss.check(number)
            payload = replace(payload, loss=number)
        self.send(self.key, payload, tensors)


class AtOnce:
    """Messages that leave at once, by the thread that sends them."""

    def put(self, leaving: Leaving) -> None:
        """Hand a message over, as soon as its tensors are there. Blocks until then."""
        leaving.leave()

    def close(self) -> None:
        """Do nothing: all have left."""


class ByThread:
    """Messages that leave by a thread of their own, in the order in which they were sent."""

    def __init__(self, name: str, begin: Callable[[], object] = lambda: None) -> None:
        self._begin = begin
        self._leaving: queue.SimpleQueue[Leaving | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, leaving: Leaving) -> None:
        """Let a message leave once its tensors are there. Never blocks."""
        self._leaving.put(leaving)

    def _run(self) -> None:
        """Hand messages over until `close`, or until an error, which ends the worker."""
        name_this_thread(self._thread.name)
        self._begin()
        while (leaving := self._leaving.get()) is not None:
            try:
                leaving.leave()
            except BaseException as error:  # the top of a thread: the stages report it
                leaving.failed(error)
                # What follows a loss that is not finite must not leave: a reply to the command to
                # save would make a checkpoint of it.
                return

    def close(self) -> None:
        """Wait until all messages have left. Idempotent."""
        self._leaving.put(None)
        self._thread.join()
