"""Which device a worker computes on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from pipedream_rt.devices.device import HOST, Device
from pipedream_rt.errors import ConfigError
from pipedream_rt.models.tensors import accelerator_here


class OwnDevice(NamedTuple):
    """The device that a process was told at its start.

    Attributes:
        name: The device, in the place of the pipeline's choice; None for that choice.
        number: The number of this process among those of its machine: where the name of a device
            has no number, it picks one of several.
    """

    name: str | None = None
    number: int = 0


def device_named(name: str) -> torch.device:
    """Return the device of a name, which may be one of another machine."""
    try:
        device = torch.device(name)
    except RuntimeError as error:
        text = str(error).partition("\n")[0]
        raise ConfigError(f"{name!r} is no device: {text}; {_there()}") from error
    if device.type == "meta":
        raise ConfigError(
            f"the device {name!r} cannot be used: nothing is computed on the meta device; give "
            "'cpu' or an accelerator"
        )
    return device


def device_there(name: str, number: int = 0) -> torch.device:
    """Return a device of this process; a name without a number takes them in turn, by `number`."""
    device = device_named(name)
    if device.type == "cpu":
        return torch.device("cpu")
    kind = _kind()
    count = torch.accelerator.device_count()
    if kind != device.type or not count:
        raise ConfigError(
            f"the device {name!r} cannot be used: there is no accelerator of kind "
            f"{device.type!r}; {_there()}"
        )
    index: int | None = device.index
    if index is None:
        return torch.device(device.type, number % count)
    if not 0 <= index < count:
        raise ConfigError(
            f"the device {name!r} cannot be used: its number must be less than {count}; {_there()}"
        )
    return device


def accelerators() -> list[str]:
    """Return the names of the accelerators that are there."""
    return [f"{_kind()}:{number}" for number in range(torch.accelerator.device_count())]


def _kind() -> str | None:
    """Return the kind of the accelerator that there is; None for none."""
    found = accelerator_here()
    return None if found is None else found.type


def _there() -> str:
    """Return which devices this process has, in words."""
    return f"this process has {', '.join(['cpu', *accelerators()])}"


def module_in_use(unknown: bool) -> Any:
    """Return torch's module for the accelerator in use; `unknown` is for one that cannot say so."""
    kind = accelerator_here()
    if kind is None:
        return None
    module = torch.get_device_module(kind)
    # To ask an accelerator for anything else would begin to use it.
    return module if getattr(module, "is_initialized", lambda: unknown)() else None


def device_for(
    devices: Sequence[str],
    worker: int,
    own: OwnDevice,
    addresses: Sequence[Sequence[int]],
    *,
    threaded: bool,
    name: str,
) -> Device:
    """Return the device of a worker.

    Args:
        devices: By worker of the plan, the name of its device; empty for the host.
        worker: Index of the worker.
        own: The device that this process was told.
        addresses: By worker of the plan, the addresses that it hosts.
        threaded: Whether an accelerator sends messages by a thread of its own; else by the thread
            that computes.
        name: The name of the worker, for that thread.

    Raises:
        ConfigError: This process has no such device.
    """
    device_name = own.name or (devices[worker] if devices else "cpu")
    if device_name == "cpu":
        return HOST
    device = device_there(device_name, own.number)
    if device.type == "cpu":
        return HOST
    from pipedream_rt.devices.accelerator import Accelerator  # a job on CPUs does not need it

    near = {
        address
        for number, hosted in enumerate(addresses)
        if own.name or (devices and devices[number] != "cpu")
        for address in hosted
    }
    return Accelerator(device, near, threaded, name)
