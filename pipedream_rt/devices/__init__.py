"""What stages compute on: the memory of the host, or an accelerator of any kind.

A worker computes on one device. Everything else of a stage knows that as a `Device`, which places
its layers, lends its random numbers and its autocast, and carries values between its memory and the
messages. No kind of device has a name here: torch knows which accelerator there is.
"""

from __future__ import annotations

from pipedream_rt.devices.base import HOST, Device, Late
from pipedream_rt.devices.choice import OwnDevice, device_for

__all__ = ["HOST", "Device", "Late", "OwnDevice", "device_for"]
