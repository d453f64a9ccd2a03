"""TensorBoard: scalars of each mini-batch, and of evaluations."""

from __future__ import annotations

import os
from typing import Any

from pipedream_rt.errors import ConfigError
from pipedream_rt.paths import given_path, is_address
from pipedream_rt.tracing.events import Begun, Ended, Evaluated, Event, Recovered, Stepped


class TensorBoard:
    """Writes scalars with `torch.utils.tensorboard`. An `Observer`.

    Under ``train/``: loss, learning rate, staleness, samples and micro-batches per second. Under
    ``stage/``: the share of the time in which each stage computed. Under ``eval/``: the loss and
    the metrics of evaluations.

    Args:
        folder: The folder of the run, or an address for which TensorBoard has a package; None for
            one under ``runs/``, as torch's writer names it.

    Raises:
        ConfigError: The package tensorboard is missing, or it cannot write there.
    """

    def __init__(self, folder: str | os.PathLike[str] | None = None) -> None:
        try:
            # An extra that may not be installed.
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ConfigError(
                "to write for TensorBoard its package is needed: pip install tensorboard"
            ) from error
        # Its own writer takes addresses, as gs://bucket/run, where it has a package for them.
        if folder is not None and not is_address(folder):
            folder = given_path(folder, "the folder for TensorBoard")
        try:
            self._writer: Any = SummaryWriter(None if folder is None else os.fspath(folder))
        except Exception as error:  # a file system of a package may raise anything
            raise ConfigError(f"TensorBoard cannot write to {folder}: {error}") from error
        self._last: Stepped | None = None

    def __call__(self, event: Event) -> None:
        """Write the scalars of an event."""
        add = self._writer.add_scalar
        match event:
            case Begun():
                self._last = None
            case Stepped():
                add("train/loss", event.loss, event.step, event.time)
                for i, rate in enumerate(event.rates):
                    add(f"train/rate/{i}" if i else "train/rate", rate, event.step, event.time)
                add("train/staleness", event.staleness, event.step, event.time)
                self._rates(event)
            case Recovered():
                self._last = None  # new workers count their seconds from 0
                self._writer.add_text("recovered", event.reason, event.step, event.time)
            case Evaluated():
                for name, value in event.values.items():
                    add(f"eval/{name}", value, event.step, event.time)
            case Ended():
                self._writer.close()

    def _rates(self, event: Stepped) -> None:
        """Write the rates over the time since the mini-batch before."""
        before, self._last = self._last, event
        if before is None or (seconds := event.time - before.time) <= 0:
            return
        add = self._writer.add_scalar
        add("train/samples_per_s", event.samples / seconds, event.step, event.time)
        add("train/micro_batches_per_s", event.micro_batches / seconds, event.step, event.time)
        for stage, (now, then) in enumerate(zip(event.busy_s, before.busy_s, strict=True)):
            share = min(max(now - then, 0.0) / seconds, 1.0)
            add(f"stage/busy/{stage}", share, event.step, event.time)
