"""Asynchronous pipeline-parallel training for PyTorch that is reproducible bit for bit.

The names below are imported at first use: importing torch takes seconds, which the command line and
a waiting worker save.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pipedream_rt.batches.cutting import Along, Whole
    from pipedream_rt.cluster.engines.ray import RayWorkers
    from pipedream_rt.cluster.forked_workers import prepare
    from pipedream_rt.coordinator.checkpointing.pipeline_fingerprint import Fingerprint
    from pipedream_rt.coordinator.choosing import Choice, choose
    from pipedream_rt.coordinator.distributed_optimizer import DistributedOptimizer
    from pipedream_rt.coordinator.kept_versions import KeptVersion
    from pipedream_rt.coordinator.recovery.decision import Restart
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
        UnknownOption,
        VersionError,
        WorkerLost,
    )
    from pipedream_rt.job.options import Checkpoints, Layout, Observe, Recovery, Training
    from pipedream_rt.models.layer_spec import LayerSpec
    from pipedream_rt.models.pretrained import without_values
    from pipedream_rt.pipeline import Pipeline
    from pipedream_rt.planning.link_costs import LinkCosts, measure_codec, measure_links
    from pipedream_rt.planning.profile import LayerCosts, Profile
    from pipedream_rt.planning.profiling import profile
    from pipedream_rt.schedules import Action, Kind, Plan, Shape, check, plan_for
    from pipedream_rt.simulation import Costs, simulate
    from pipedream_rt.stage.rules.clipping import Clip
    from pipedream_rt.stage.rules.scaling import LossScale
    from pipedream_rt.tracing.replay import Replay
    from pipedream_rt.tracing.trace import Trace
    from pipedream_rt.verify.compare import Verification

__version__ = "0.1.0"

__all__ = [
    "Action",
    "Along",
    "CheckpointError",
    "Checkpoints",
    "Choice",
    "Clip",
    "ConfigError",
    "Costs",
    "DistributedOptimizer",
    "Fingerprint",
    "KeptVersion",
    "Kind",
    "LayerCosts",
    "LayerSpec",
    "Layout",
    "LinkCosts",
    "LossScale",
    "MessageTimeout",
    "NonFiniteLoss",
    "Observe",
    "PeerLost",
    "PendingStep",
    "Pipeline",
    "PipelineClosed",
    "PipelineError",
    "Plan",
    "PoisonedMicroBatch",
    "Profile",
    "RayWorkers",
    "Recovery",
    "RendezvousTimeout",
    "Replay",
    "Restart",
    "ScheduleError",
    "Shape",
    "StageFailed",
    "StepResult",
    "Trace",
    "TraceError",
    "Training",
    "TransportError",
    "UnknownOption",
    "Verification",
    "VersionError",
    "Whole",
    "WorkerLost",
    "check",
    "choose",
    "measure_codec",
    "measure_links",
    "plan_for",
    "prepare",
    "profile",
    "simulate",
    "without_values",
]

_HOMES = {
    "Action": "pipedream_rt.schedules",
    "Along": "pipedream_rt.batches.cutting",
    "Checkpoints": "pipedream_rt.job.options",
    "Choice": "pipedream_rt.coordinator.choosing",
    "Clip": "pipedream_rt.stage.rules.clipping",
    "Costs": "pipedream_rt.simulation",
    "DistributedOptimizer": "pipedream_rt.coordinator.distributed_optimizer",
    "Fingerprint": "pipedream_rt.coordinator.checkpointing.pipeline_fingerprint",
    "KeptVersion": "pipedream_rt.coordinator.kept_versions",
    "Kind": "pipedream_rt.schedules",
    "LayerCosts": "pipedream_rt.planning.profile",
    "LayerSpec": "pipedream_rt.models.layer_spec",
    "Layout": "pipedream_rt.job.options",
    "LinkCosts": "pipedream_rt.planning.link_costs",
    "LossScale": "pipedream_rt.stage.rules.scaling",
    "Observe": "pipedream_rt.job.options",
    "PendingStep": "pipedream_rt.coordinator.results",
    "Pipeline": "pipedream_rt.pipeline",
    "Plan": "pipedream_rt.schedules",
    "Profile": "pipedream_rt.planning.profile",
    "RayWorkers": "pipedream_rt.cluster.engines.ray",
    "Recovery": "pipedream_rt.job.options",
    "Replay": "pipedream_rt.tracing.replay",
    "Restart": "pipedream_rt.coordinator.recovery.decision",
    "Shape": "pipedream_rt.schedules",
    "StepResult": "pipedream_rt.coordinator.results",
    "Trace": "pipedream_rt.tracing.trace",
    "Training": "pipedream_rt.job.options",
    "Verification": "pipedream_rt.verify.compare",
    "Whole": "pipedream_rt.batches.cutting",
    "check": "pipedream_rt.schedules",
    "choose": "pipedream_rt.coordinator.choosing",
    "measure_codec": "pipedream_rt.planning.link_costs",
    "measure_links": "pipedream_rt.planning.link_costs",
    "plan_for": "pipedream_rt.schedules",
    "prepare": "pipedream_rt.cluster.forked_workers",
    "profile": "pipedream_rt.planning.profiling",
    "simulate": "pipedream_rt.simulation",
    "without_values": "pipedream_rt.models.pretrained",
}


def __getattr__(name: str) -> object:
    """Import a public name on first use."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module(_HOMES.get(name, "pipedream_rt.errors")), name)
    except AttributeError as error:
        # For Python an AttributeError here means that there is no such name, and its text is lost.
        raise ImportError(f"pipedream_rt.{name} cannot be loaded: {error}") from error


def __dir__() -> list[str]:
    """Return the public names, though most are not imported yet."""
    return [*__all__, "__version__"]


# `pipedream-rt run` asks for it, on behalf of the script: nothing else starts at an import. No
# process that the script starts is to do it again.
if os.environ.pop("PIPEDREAM_RT_PREPARE", ""):
    __getattr__("prepare")()  # type: ignore[operator]
