"""Asynchronous pipeline-parallel training for PyTorch that is reproducible bit for bit.

The names below are loaded when they are first used: importing torch takes seconds, which the
command line and a waiting worker need not spend.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pipedream_rt.coordinator.distributed_optimizer import DistributedOptimizer
    from pipedream_rt.coordinator.recovery import Restart
    from pipedream_rt.coordinator.results import PendingStep, StepResult
    from pipedream_rt.errors import (
        CheckpointError,
        ConfigError,
        MessageTimeout,
        NonFiniteLoss,
        PeerLost,
        PipelineClosed,
        PipelineError,
        PoisonedMicroBatch,
        RendezvousTimeout,
        ScheduleError,
        StageFailed,
        TraceError,
        TransportError,
        VersionError,
        WorkerLost,
    )
    from pipedream_rt.observe.replay import Replay
    from pipedream_rt.observe.trace import Trace
    from pipedream_rt.pipeline import Pipeline

__version__ = "0.1.0"

__all__ = [
    "CheckpointError",
    "ConfigError",
    "DistributedOptimizer",
    "MessageTimeout",
    "NonFiniteLoss",
    "PeerLost",
    "PendingStep",
    "Pipeline",
    "PipelineClosed",
    "PipelineError",
    "PoisonedMicroBatch",
    "RendezvousTimeout",
    "Replay",
    "Restart",
    "ScheduleError",
    "StageFailed",
    "StepResult",
    "Trace",
    "TraceError",
    "TransportError",
    "VersionError",
    "WorkerLost",
]

_HOMES = {
    "DistributedOptimizer": "pipedream_rt.coordinator.distributed_optimizer",
    "PendingStep": "pipedream_rt.coordinator.results",
    "Pipeline": "pipedream_rt.pipeline",
    "Replay": "pipedream_rt.observe.replay",
    "Restart": "pipedream_rt.coordinator.recovery",
    "Trace": "pipedream_rt.observe.trace",
    "StepResult": "pipedream_rt.coordinator.results",
}


def __getattr__(name: str) -> object:
    """Import a public name on first use."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES.get(name, "pipedream_rt.errors")), name)
