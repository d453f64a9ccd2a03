"""A trace: what every stage did when, measured or simulated, and its file."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from hashlib import blake2b
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgpack
import numpy as np

from pipedream_rt.errors import TraceError
from pipedream_rt.observe.spans import SPAN, Spans
from pipedream_rt.schedules import Action, Kind, Plan

_MAGIC = "pipedream-rt trace"
_VERSION = 2

INJECTED, LOSS_CAME = ord("N"), ord("L")
"""Spans of the coordinator: a micro-batch was injected, the loss of one arrived."""

PASS, COMMAND, DRAIN = ord("E"), ord("C"), ord("D")
"""Spans of a stage beside its actions: a forward of evaluation or inference, a command that was
carried out, and the end of a flush."""

CODES = {kind: ord(kind.value) for kind in Kind}
"""The number that stands for an action's kind in a span."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerFacts:
    """What a trace knows of a worker beside its spans.

    Attributes:
        name: As given at its start.
        dropped: Spans that the ring has overwritten, the oldest ones.
        clock_error_ns: Bound on the error of its times against the coordinator's clock.
        peak_memory_bytes: Resident; 0 if unknown.
    """

    name: str
    dropped: int = 0
    clock_error_ns: int = 0
    peak_memory_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """What a run did.

    Attributes:
        plan: The stages, their places, the edges between them, and the schedule.
        credits: Mini-batches that the coordinator injects ahead.
        simulated: Whether it was computed, not measured.
        workers: Facts about each.
        stage_bytes: Of one weight version, by stage; empty if unknown.
        activation_bytes: That a stage holds for each micro-batch in flight; empty if unknown.
        spans: An array of `SPAN`, each stage's in the order in which they happened.
    """

    plan: Plan
    credits: int
    simulated: bool
    workers: tuple[WorkerFacts, ...]
    spans: Spans = field(repr=False)
    stage_bytes: tuple[int, ...] = ()
    activation_bytes: tuple[int, ...] = ()

    def of_stage(self, stage: int) -> Spans:
        """The spans of a stage, in the order in which they happened; -1 for the coordinator's."""
        mine: Spans = self.spans[self.spans["stage"] == stage]
        return mine

    def by_stage(self) -> list[Spans]:
        """The spans of every stage; quicker than one after another."""
        order = np.argsort(self.spans["stage"], kind="stable")
        bounds = np.searchsorted(
            self.spans["stage"], np.arange(self.plan.num_stages + 1), sorter=order
        )
        return [self.spans[order[a:b]] for a, b in pairwise(bounds)]

    def actions(self, worker: int) -> Iterator[Action]:
        """Yield what a worker did of its order, in order."""
        stages = self.plan.stages_of(worker)
        wanted = np.isin(self.spans["kind"], list(CODES.values()))
        mine = self.spans[wanted & np.isin(self.spans["stage"], stages)]
        mine = mine[np.argsort(mine["end"], kind="stable")]
        several = len(stages) > 1
        kinds = {code: kind for kind, code in CODES.items()}
        for kind, index, stage in zip(
            mine["kind"].tolist(), mine["index"].tolist(), mine["stage"].tolist(), strict=True
        ):
            yield Action(kinds[kind], index, stage if several else None)

    @property
    def dropped(self) -> int:
        """Spans that were overwritten in all."""
        return sum(worker.dropped for worker in self.workers)

    # -- the file -----------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the trace; whoever reads ``path`` sees the old file or the whole new one.

        Raises:
            TraceError: It cannot be written.
        """
        path = Path(path)
        header = {
            "plan": self.plan.packed(),
            "credits": self.credits,
            "simulated": self.simulated,
            "workers": [asdict(worker) for worker in self.workers],
            "stage_bytes": list(self.stage_bytes),
            "activation_bytes": list(self.activation_bytes),
        }
        packed = msgpack.packb(header)
        spans = np.ascontiguousarray(self.spans).view(np.uint8).data
        part = path.with_name(f".{path.name}.{os.getpid()}.part")
        try:
            with part.open("wb") as file:
                packer = msgpack.Packer()
                file.write(packer.pack([_MAGIC, _VERSION, packed, _digest(packed, spans)]))
                file.write(spans)
            part.replace(path)
        except OSError as error:
            part.unlink(missing_ok=True)
            raise TraceError(f"the trace cannot be written to {path}: {error}") from error

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Trace:
        """Read a trace.

        Raises:
            TraceError: There is no such file, or it is not a whole trace.
        """
        try:
            data = Path(path).read_bytes()
        except (OSError, ValueError) as error:  # a path may hold a NUL
            reason = getattr(error, "strerror", None) or error
            raise TraceError(f"the trace {path} cannot be read: {reason}") from error
        unpacker = msgpack.Unpacker(max_buffer_size=max(len(data), 1))
        unpacker.feed(data)
        try:
            magic, version, packed, digest = unpacker.unpack()
        except (msgpack.UnpackException, ValueError, TypeError) as error:
            raise TraceError(f"{path} is no trace of pipedream-rt, or its start is cut") from error
        if magic != _MAGIC:
            raise TraceError(f"{path} is no trace of pipedream-rt")
        if version != _VERSION:
            raise TraceError(
                f"{path} is a trace of format {version}, this version reads format {_VERSION}"
            )
        spans = memoryview(data)[unpacker.tell() :]
        if not isinstance(packed, bytes) or digest != _digest(packed, spans):
            raise TraceError(f"the trace {path} is cut or changed: its checksum does not fit")
        try:
            return _made(msgpack.unpackb(packed), np.frombuffer(spans, dtype=SPAN))
        except (msgpack.UnpackException, ValueError, TypeError, KeyError) as error:
            raise TraceError(f"the header of the trace {path} makes no sense: {error!r}") from error


def _digest(packed: bytes, spans: memoryview) -> bytes:
    """Checksum of a file's two parts."""
    digest = blake2b(packed, digest_size=16)
    digest.update(spans)
    return digest.digest()


def _made(header: dict[str, Any], spans: Spans) -> Trace:
    """Make a trace of what a file holds."""
    return Trace(
        plan=Plan.unpacked(header["plan"]),
        credits=header["credits"],
        simulated=header["simulated"],
        workers=tuple(WorkerFacts(**worker) for worker in header["workers"]),
        stage_bytes=tuple(header["stage_bytes"]),
        activation_bytes=tuple(header["activation_bytes"]),
        spans=spans,
    )
