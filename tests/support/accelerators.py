"""Accelerators of which only the names are there."""

import torch

from pipedream_rt.devices import choice


def two_accelerators(monkeypatch):
    """Let there be two accelerators of the kind ``xpu``."""
    monkeypatch.setattr(choice, "_kind", lambda: "xpu")
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
