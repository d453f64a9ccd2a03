"""Which device each worker computes on, and which workers share a process for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import nn

from pipedream_rt.devices.choice import accelerators, device_named, device_there
from pipedream_rt.errors import ConfigError
from pipedream_rt.job.process_assignment import workers_by_process
from pipedream_rt.models import tensors_of
from pipedream_rt.schedules import Plan

Devices: TypeAlias = str | torch.device | Sequence[str | torch.device] | None
"""A device for all workers, or one for each stage or worker; None for where the model's tensors
are."""


def devices_of(
    devices: Devices, plan: Plan, parts: Sequence[nn.Module], here: bool
) -> tuple[str, ...]:
    """Return the device of each worker of a plan; empty where all compute on the host."""
    if devices is None:
        names = _by_worker([_of_part(stage, part) for stage, part in enumerate(parts)], plan)
    elif isinstance(devices, str | torch.device):
        names = [str(devices)] * plan.workers
    elif isinstance(devices, Sequence):
        names = _by_worker([str(device) for device in devices], plan)
    else:
        raise ConfigError(
            "devices must be the name of a device, or a list with one for each stage or worker, "
            f"not {devices!r}" + "; stages= is how many there are" * isinstance(devices, int)
        )
    # "cuda" without a number means all that are here; each worker elsewhere takes its own.
    if here:
        names = _numbered(names)
    else:
        names = ["cpu" if device_named(name).type == "cpu" else name for name in names]
    return () if all(name == "cpu" for name in names) else tuple(names)


def shared_seats(devices: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Return the workers of each process, one process per accelerator; empty if none is shared."""
    groups: dict[str, list[int]] = {}
    for worker, name in enumerate(devices):
        # Only workers on an accelerator share a process; those on the host each have their own.
        groups.setdefault(f"{name} {worker}" if name == "cpu" else name, []).append(worker)
    return tuple(map(tuple, groups.values())) if len(groups) < len(devices) else ()


def _has_number(name: str) -> bool:
    """Whether a name means one device, as ``cuda:1`` and ``cpu`` do."""
    device = device_named(name)
    return device.type == "cpu" or device.index is not None


def _numbered(names: Sequence[str]) -> list[str]:
    """Give a number to each name without one; neighbouring workers share a device."""
    found = [str(device_there(name)) for name in names]
    open_ones = [worker for worker, name in enumerate(names) if not _has_number(name)]
    if open_ones:
        there = accelerators()
        shares = workers_by_process(len(open_ones), min(len(there), len(open_ones)))
        for device, places in zip(there, shares):
            for place in places:
                found[open_ones[place]] = device
    return found


def _by_worker(names: Sequence[str], plan: Plan) -> list[str]:
    """Return the device of each worker, from names by stage or by worker."""
    if len(names) == plan.num_stages:
        found = []
        for worker in range(plan.workers):
            stages = sorted({plan.stage_of(address) for address in plan.stages_of(worker)})
            if len({names[stage] for stage in stages}) > 1:
                where = ", ".join(f"stage {stage} on {names[stage]}" for stage in stages)
                raise ConfigError(
                    f"worker {worker} computes on one device, and hosts {where}; give its stages "
                    "the same one"
                )
            found.append(names[stages[0]])
        return found
    if len(names) == plan.workers:
        return list(names)
    raise ConfigError(
        f"devices has {len(names)} names, and the plan has {plan.num_stages} stages on "
        f"{plan.workers} workers; give one for each stage or worker"
    )


def _of_part(stage: int, part: nn.Module) -> str:
    """Return the device that the tensors of a stage are on."""
    names: dict[str, str] = {}
    for name, tensor in tensors_of(part, ""):
        if not tensor.is_meta:
            names.setdefault(str(tensor.device), name)
    if len(names) > 1:
        where = ", ".join(f"{name} on {device}" for device, name in names.items())
        raise ConfigError(
            f"stage {stage} has tensors on several devices: {where}; move the layers of a stage to "
            "one, or give devices="
        )
    return next(iter(names), "cpu")
