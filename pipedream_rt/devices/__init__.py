"""The devices of stages: the memory of the host, or an accelerator of any kind.

A worker computes on one device. The rest of a stage sees only a `Device`, which places its layers,
seeds its random numbers, gives the context of autocast, and carries values between its memory and
the messages. No kind of device has a name here: torch knows which accelerator there is.
"""

from __future__ import annotations

from pipedream_rt.devices.choice import OwnDevice, device_for
from pipedream_rt.devices.device import HOST, DeferredScalar, Device

__all__ = ["HOST", "DeferredScalar", "Device", "OwnDevice", "device_for"]
