"""Observers are told the events of a run, and show it: files, TensorBoard, Prometheus, a page.

An `Observer` is any function of one event; `events` has all kinds of events. Give yours, or these,
to ``Observe(to=[...])``.
"""

from __future__ import annotations

from pipedream_rt.observers.prometheus import Prometheus
from pipedream_rt.observers.tensorboard import TensorBoard
from pipedream_rt.observers.writers import CSV, JSONLines
from pipedream_rt.tracing.events import (
    Begun,
    Ended,
    Evaluated,
    Event,
    Observer,
    Recovered,
    Saved,
    Stepped,
    Warned,
)

__all__ = [
    "CSV",
    "Begun",
    "Ended",
    "Evaluated",
    "Event",
    "JSONLines",
    "Observer",
    "Prometheus",
    "Recovered",
    "Saved",
    "Stepped",
    "TensorBoard",
    "Warned",
]
