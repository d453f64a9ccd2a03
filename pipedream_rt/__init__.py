"""Asynchronous pipeline-parallel training for PyTorch that is reproducible bit for bit.

The names below are imported at first use: importing torch takes seconds, which the command line and
a waiting worker save. Ten are for every script; the reference has the others.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    # Under their own names again, so that type checkers know those that `__all__` leaves out.
    from pipedream_rt.batches.marks import Along as Along
    from pipedream_rt.batches.marks import Whole as Whole
    from pipedream_rt.cluster.engines.ray import RayWorkers as RayWorkers
    from pipedream_rt.cluster.forked_workers import prepare as prepare
    from pipedream_rt.coordinator.checkpointing.pipeline_fingerprint import (
        Fingerprint as Fingerprint,
    )
    from pipedream_rt.coordinator.distributed_optimizer import (
        DistributedOptimizer as DistributedOptimizer,
    )
    from pipedream_rt.coordinator.kept_versions import KeptVersion as KeptVersion
    from pipedream_rt.coordinator.recovery.decision import Restart as Restart
    from pipedream_rt.coordinator.results import PendingStep as PendingStep
    from pipedream_rt.coordinator.results import StepResult as StepResult
    from pipedream_rt.errors import CheckpointError as CheckpointError
    from pipedream_rt.errors import ConfigError as ConfigError
    from pipedream_rt.errors import MessageTimeout as MessageTimeout
    from pipedream_rt.errors import NonFiniteLoss as NonFiniteLoss
    from pipedream_rt.errors import PeerLost as PeerLost
    from pipedream_rt.errors import PipelineClosed as PipelineClosed
    from pipedream_rt.errors import PipelineError as PipelineError
    from pipedream_rt.errors import PoisonedMicroBatch as PoisonedMicroBatch
    from pipedream_rt.errors import RendezvousTimeout as RendezvousTimeout
    from pipedream_rt.errors import ScheduleError as ScheduleError
    from pipedream_rt.errors import StageFailed as StageFailed
    from pipedream_rt.errors import TraceError as TraceError
    from pipedream_rt.errors import TransportError as TransportError
    from pipedream_rt.errors import UnknownOption as UnknownOption
    from pipedream_rt.errors import VersionError as VersionError
    from pipedream_rt.errors import WorkerLost as WorkerLost
    from pipedream_rt.job.options import Checkpoints as Checkpoints
    from pipedream_rt.job.options import Layout as Layout
    from pipedream_rt.job.options import Observe as Observe
    from pipedream_rt.job.options import Recovery as Recovery
    from pipedream_rt.job.options import Training as Training
    from pipedream_rt.models.layer_spec import LayerSpec as LayerSpec
    from pipedream_rt.models.pretrained import without_values as without_values
    from pipedream_rt.pipeline import Pipeline as Pipeline
    from pipedream_rt.planning.choosing import Choice as Choice
    from pipedream_rt.planning.choosing import choose as choose
    from pipedream_rt.planning.link_costs import LinkCosts as LinkCosts
    from pipedream_rt.planning.link_costs import measure_codec as measure_codec
    from pipedream_rt.planning.link_costs import measure_links as measure_links
    from pipedream_rt.planning.profile import LayerCosts as LayerCosts
    from pipedream_rt.planning.profile import Profile as Profile
    from pipedream_rt.planning.profiling import profile as profile
    from pipedream_rt.schedules import Action as Action
    from pipedream_rt.schedules import Kind as Kind
    from pipedream_rt.schedules import Plan as Plan
    from pipedream_rt.schedules import Shape as Shape
    from pipedream_rt.schedules import check as check
    from pipedream_rt.schedules import plan_for as plan_for
    from pipedream_rt.simulation import Costs as Costs
    from pipedream_rt.simulation import simulate as simulate
    from pipedream_rt.stage.rules.clipping import Clip as Clip
    from pipedream_rt.stage.rules.scaling import LossScale as LossScale
    from pipedream_rt.tracing.replay import Replay as Replay
    from pipedream_rt.tracing.trace import Trace as Trace
    from pipedream_rt.verify.compare import Verification as Verification

__version__ = "0.1.0"

__all__ = [
    "Along",
    "Checkpoints",
    "Clip",
    "Layout",
    "Observe",
    "Pipeline",
    "PipelineError",
    "Recovery",
    "Training",
    "Whole",
]

_HOMES = {
    "Action": "pipedream_rt.schedules",
    "Along": "pipedream_rt.batches.marks",
    "CheckpointError": "pipedream_rt.errors",
    "Checkpoints": "pipedream_rt.job.options",
    "Choice": "pipedream_rt.planning.choosing",
    "Clip": "pipedream_rt.stage.rules.clipping",
    "ConfigError": "pipedream_rt.errors",
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
    "MessageTimeout": "pipedream_rt.errors",
    "NonFiniteLoss": "pipedream_rt.errors",
    "Observe": "pipedream_rt.job.options",
    "PeerLost": "pipedream_rt.errors",
    "PendingStep": "pipedream_rt.coordinator.results",
    "Pipeline": "pipedream_rt.pipeline",
    "PipelineClosed": "pipedream_rt.errors",
    "PipelineError": "pipedream_rt.errors",
    "Plan": "pipedream_rt.schedules",
    "PoisonedMicroBatch": "pipedream_rt.errors",
    "Profile": "pipedream_rt.planning.profile",
    "RayWorkers": "pipedream_rt.cluster.engines.ray",
    "Recovery": "pipedream_rt.job.options",
    "RendezvousTimeout": "pipedream_rt.errors",
    "Replay": "pipedream_rt.tracing.replay",
    "Restart": "pipedream_rt.coordinator.recovery.decision",
    "ScheduleError": "pipedream_rt.errors",
    "Shape": "pipedream_rt.schedules",
    "StageFailed": "pipedream_rt.errors",
    "StepResult": "pipedream_rt.coordinator.results",
    "Trace": "pipedream_rt.tracing.trace",
    "TraceError": "pipedream_rt.errors",
    "Training": "pipedream_rt.job.options",
    "TransportError": "pipedream_rt.errors",
    "UnknownOption": "pipedream_rt.errors",
    "Verification": "pipedream_rt.verify.compare",
    "VersionError": "pipedream_rt.errors",
    "Whole": "pipedream_rt.batches.marks",
    "WorkerLost": "pipedream_rt.errors",
    "check": "pipedream_rt.schedules",
    "choose": "pipedream_rt.planning.choosing",
    "measure_codec": "pipedream_rt.planning.link_costs",
    "measure_links": "pipedream_rt.planning.link_costs",
    "plan_for": "pipedream_rt.schedules",
    "prepare": "pipedream_rt.cluster.forked_workers",
    "profile": "pipedream_rt.planning.profiling",
    "simulate": "pipedream_rt.simulation",
    "without_values": "pipedream_rt.models.pretrained",
}
"""All names that can be imported from here, with their modules; `__all__` shows ten of them."""


def __getattr__(name: str) -> object:
    """Import a public name on first use."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module(_HOMES[name]), name)
    except AttributeError as error:
        # For Python an AttributeError here means that there is no such name, and its text is lost.
        raise ImportError(f"pipedream_rt.{name} cannot be loaded: {error}") from error


def __dir__() -> list[str]:
    """Return the names to begin with, though most are not imported yet."""
    return [*__all__, "__version__"]


# `pipedream-rt run` asks for it, on behalf of the script: nothing else starts at an import. No
# process that the script starts is to do it again.
if os.environ.pop("PIPEDREAM_RT_PREPARE", ""):
    __getattr__("prepare")()  # type: ignore[operator]
