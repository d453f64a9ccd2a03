"""A trace: the spans of a run, measured or simulated, and the file that holds them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from hashlib import blake2b
from itertools import pairwise
from typing import Any

import msgpack
import numpy as np

from pipedream_rt.errors import ConfigError, TraceError
from pipedream_rt.packing import Unpacker, packb, unpackb
from pipedream_rt.paths import given_path
from pipedream_rt.schedules import Action, Kind, Plan
from pipedream_rt.schedules.actions import OF_STAGES
from pipedream_rt.schema import (
    fields,
    line,
    list_of,
    one_of,
    printable,
    problem_of,
    read_file,
    row,
    shown,
    truth,
    whole,
    write_file,
)
from pipedream_rt.tracing.spans import NOBODY, SPAN, Spans

_MAGIC = "pipedream-rt trace"
_VERSION = 2

_LARGEST = 1 << 34
"""Bytes that a trace may have: more spans than any run leaves."""

_MOST = 1 << 12
"""Stages, workers and edges that a plan in a trace may have, at most."""

PLAN = fields(
    {
        "name": line(256),
        "workers": whole(1, _MOST),
        "per_update": whole(1, 1 << 31),
        "stages_per_worker": whole(1, _MOST),
        "slack": list_of(whole(0, 1 << 31), _MOST),
        "synchronous": whole(0, 1 << 31),
        "layers": list_of(list_of(line(1 << 12)), _MOST),
        "hosts": list_of(whole(0, _MOST), _MOST),
        "links": list_of(row(whole(-1, _MOST), whole(-1, _MOST)), _MOST),
        "entries": list_of(whole(0, _MOST), _MOST),
        "ties": list_of(row(line(1 << 12), list_of(whole(0, _MOST), _MOST)), _MOST),
        "replicas": list_of(whole(1, _MOST), _MOST),
        "shard_optimizer": truth,
        "norms": one_of("none", "estimated", "exact", "delayed"),
        "loss_in_script": truth,
    },
    optional=("entries", "ties", "synchronous", "shard_optimizer", "norms", "loss_in_script"),
)
"""The check of what `Plan.packed` returns."""

_HEADER = {
    "plan": PLAN,
    "credits": whole(0),
    "simulated": truth,
    "workers": list_of(
        fields(
            {
                "name": line(100),
                "dropped": whole(0),
                "clock_error_ns": whole(0),
                "peak_memory_bytes": whole(0),
            }
        ),
        _MOST,
    ),
    "stage_bytes": list_of(whole(0), _MOST),
    "activation_bytes": list_of(whole(0), _MOST),
}
"""The fields of the header of a trace."""

_UNREADABLE = (
    msgpack.UnpackException, ValueError, TypeError, KeyError, RecursionError, ConfigError,
)  # fmt: skip
"""Errors that a damaged header leads to."""

CODES = {kind: ord(kind.value) for kind in Kind}
"""The number that stands for each kind of action in a span."""

INJECTED, LOSS_CAME, GAVE = CODES[Kind.INJECT], ord("L"), CODES[Kind.GRADIENT]
"""The kinds of the coordinator's spans: the injection of a micro-batch, the arrival of its loss or
output, and the gradient of an output."""

DRAIN, PASS, COMMAND = CODES[Kind.DRAIN], ord("E"), ord("C")
"""The kinds of a stage's spans in which it trains nothing: the end of a flush, a forward of
evaluation or inference, and a command."""

_ON_A_DEVICE = 1 << 8
"""A bit above all kinds, set in a file in the kind of a span of a device."""

COMPUTES = tuple(CODES[kind] for kind in OF_STAGES)
"""The kinds of the spans in which a stage trains."""

_OF_A_STAGE = (PASS, COMMAND, DRAIN, *COMPUTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerFacts:
    """Facts about a worker in a trace, beside its spans.

    Attributes:
        dropped: The number of its oldest spans that were overwritten.
        clock_error_ns: The largest possible error of its times on the coordinator's clock, in ns.
        peak_memory_bytes: The largest resident memory that its process has had; 0 if unknown.
    """

    name: str
    dropped: int = 0
    clock_error_ns: int = 0
    peak_memory_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """The spans of a run with the plan and other facts about it.

    Attributes:
        plan: The plan of the run.
        credits: The number of mini-batches that the coordinator injected ahead.
        simulated: Whether the run was simulated rather than measured.
        workers: Facts about each worker.
        stage_bytes: By stage, the bytes of one weight version; empty if unknown.
        activation_bytes: By stage, the bytes that it holds for each micro-batch in flight; empty if
            unknown.
        spans: The spans, an array of `SPAN`; those of a stage are in the order of time.
        device_spans: The spans of what accelerators did after the workers had launched it, in the
            same form; empty where all stages compute on the host.
    """

    plan: Plan
    credits: int
    simulated: bool
    workers: tuple[WorkerFacts, ...]
    spans: Spans = field(repr=False)
    stage_bytes: tuple[int, ...] = ()
    activation_bytes: tuple[int, ...] = ()
    device_spans: Spans = field(
        default_factory=lambda: np.empty(0, SPAN), repr=False, compare=False
    )

    def of_stage(self, stage: int) -> Spans:
        """Return the spans of an address in the order of time; -1 stands for the coordinator."""
        mine: Spans = self.spans[self.spans["stage"] == stage]
        return mine

    def by_stage(self) -> list[Spans]:
        """Return the spans of every address: in less time than by `of_stage` for each."""
        # Stable, so that the spans of a stage stay in the order of time. Those of the coordinator,
        # -1, come before the first bound.
        order = np.argsort(self.spans["stage"], kind="stable")
        bounds = np.searchsorted(
            self.spans["stage"], np.arange(len(self.plan.addresses) + 1), sorter=order
        )
        return [self.spans[order[a:b]] for a, b in pairwise(bounds)]

    def actions(self, worker: int) -> Iterator[Action]:
        """Yield the actions that a worker did, in the order of time, without ends of flushes."""
        stages = self.plan.stages_of(worker)
        wanted = np.isin(self.spans["kind"], COMPUTES)
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
        """The number of spans that were overwritten, on all workers."""
        return sum(worker.dropped for worker in self.workers)

    # -- the file -----------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the trace to a file; one that is there is replaced as a whole.

        Raises:
            TraceError: The file cannot be written.
        """
        header = {
            "plan": self.plan.packed(),
            "credits": self.credits,
            "simulated": self.simulated,
            "workers": [asdict(worker) for worker in self.workers],
            "stage_bytes": list(self.stage_bytes),
            "activation_bytes": list(self.activation_bytes),
        }
        packed = packb(header)
        on_devices = self.device_spans.copy()
        on_devices["kind"] |= _ON_A_DEVICE
        spans = np.concatenate([self.spans, on_devices]).view(np.uint8).data
        try:
            head = packb([_MAGIC, _VERSION, packed, _digest(packed, spans)])
            write_file(given_path(path, "the file"), head, spans)
        except (OSError, ConfigError) as error:
            reason = getattr(error, "strerror", None) or error
            raise TraceError(f"the trace cannot be written to {path}: {reason}") from error

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Trace:
        """Return the trace that a file holds.

        Raises:
            TraceError: There is no such file, or it does not hold a whole trace.
        """
        try:
            data = read_file(given_path(path, "the file"), _LARGEST)
        except (OSError, ValueError) as error:  # a ValueError for a path with a NUL in it
            reason = getattr(error, "strerror", None) or error
            raise TraceError(f"the trace {path} cannot be read: {reason}") from error
        unpacker = Unpacker(max_buffer_size=max(len(data), 1))
        unpacker.feed(data)
        try:
            magic, version, packed, digest = unpacker.unpack()
        except (msgpack.UnpackException, ValueError, TypeError, RecursionError) as error:
            raise TraceError(
                f"{path} is no trace of pipedream-rt, or its beginning is missing"
            ) from error
        if magic != _MAGIC:
            raise TraceError(f"{path} is no trace of pipedream-rt")
        if version != _VERSION:
            raise TraceError(
                f"{path} is a trace of format {shown(version, 20)}, this version reads "
                f"format {_VERSION}"
            )
        spans = memoryview(data)[unpacker.tell() :]
        if not isinstance(packed, bytes) or digest != _digest(packed, spans):
            raise TraceError(f"the trace {path} is cut or changed: its checksum does not fit")
        try:
            header = unpackb(packed)
            problem = problem_of(header, _HEADER) if isinstance(header, dict) else "it is no map"
            if problem:
                raise ValueError(problem)
            return fitting(_made(header, np.frombuffer(spans, dtype=SPAN)))
        except _UNREADABLE as error:
            reason = printable(str(error))
            raise TraceError(f"the header of the trace {path} makes no sense: {reason}") from error


def _digest(packed: bytes, spans: memoryview) -> bytes:
    """Return the checksum of a file's two parts, header and spans."""
    digest = blake2b(packed, digest_size=16)
    digest.update(spans)
    return digest.digest()


def fitting(trace: Trace) -> Trace:
    """Return a trace if its plan, workers and spans fit each other; else raise a ValueError."""
    plan, spans = trace.plan, trace.spans
    stages, kinds, causes = spans["stage"], spans["kind"], spans["waited_for"]
    if len(trace.workers) not in (0, plan.workers):
        raise ValueError(f"it has facts about {len(trace.workers)} of {plan.workers} workers")
    for name in ("stage_bytes", "activation_bytes"):
        if len(getattr(trace, name)) not in (0, plan.num_stages):
            raise ValueError(f"its {name!r} are not those of {plan.num_stages} stages")
    if len(spans) and not -1 <= stages.min() <= stages.max() < len(plan.addresses):
        raise ValueError(f"it has spans of other stages than {plan.num_stages}")
    if len(spans) and not NOBODY <= causes.min() <= causes.max() < len(plan.addresses):
        raise ValueError("it has spans that waited for no stage of it")
    on_devices = trace.device_spans
    if not np.isin(on_devices["kind"], _OF_A_STAGE).all() or (
        len(on_devices)
        and not 0 <= on_devices["stage"].min() <= on_devices["stage"].max() < len(plan.addresses)
    ):
        raise ValueError("it has spans of devices that are those of no stage")
    of_coordinator = np.isin(kinds, (INJECTED, LOSS_CAME, GAVE))
    of_stage = np.isin(kinds, _OF_A_STAGE)
    if not (np.where(stages < 0, of_coordinator, of_stage)).all():
        raise ValueError("it has spans of a kind that does not fit their place")
    return trace


def _made(header: dict[str, Any], spans: Spans) -> Trace:
    """Return the trace of the header and the spans of a file."""
    away = (spans["kind"] & _ON_A_DEVICE) != 0
    on_devices = spans[away]
    on_devices["kind"] &= ~np.uint16(_ON_A_DEVICE)
    return Trace(
        plan=Plan.unpacked(header["plan"]),
        credits=header["credits"],
        simulated=header["simulated"],
        workers=tuple(WorkerFacts(**worker) for worker in header["workers"]),
        stage_bytes=tuple(header["stage_bytes"]),
        activation_bytes=tuple(header["activation_bytes"]),
        spans=spans[~away],
        device_spans=on_devices,
    )
