"""What a pipeline needs of its workers, wherever they run."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

from pipedream_rt.errors import PipelineError
from pipedream_rt.observe.clock import Reading
from pipedream_rt.transport.base import Transport

Fail = Callable[[BaseException], object]
"""Told once that the cluster cannot go on. Called from any thread."""


class Reference(Protocol):
    """What an RRef offers; the in-process cluster has its own."""

    def to_here(self) -> Any:
        """Return a copy of the value."""

    def local_value(self) -> Any:
        """Return the value itself, on its owner."""

    def owner_name(self) -> str:
        """Return the name of the worker that holds the value."""


class Cluster(Protocol):
    """The workers of one pipeline."""

    names: tuple[str, ...]  # of the workers
    transport: Transport

    def waiting(self) -> AbstractContextManager[None]:
        """Entered by the coordinator around every wait."""

    def name_loss(self, error: PipelineError) -> PipelineError:
        """Turn a peer's word that another is gone into an error about that worker."""

    def stories(self) -> list[str]:
        """Say for every worker what it waits for and what it did last, for a stall report."""

    def status(self) -> list[dict[str, Any]]:
        """Describe every worker process, for `pipedream-rt status`; nothing for threads."""

    def clocks(self) -> list[Reading]:
        """Read the clock of every worker, against ``time.monotonic_ns`` here."""

    def reference(self, stage: int, part: str) -> Reference:
        """Return a reference to the ``"module"`` or the ``"optimizer"`` of a stage."""

    def parameter_references(self, stage: int) -> list[Reference]:
        """Return references to the trainable parameters of a stage."""

    def close(self) -> None:
        """End everything that was started. Idempotent."""

    def kill(self) -> None:
        """The same at once: what the workers know is not wanted any more."""
