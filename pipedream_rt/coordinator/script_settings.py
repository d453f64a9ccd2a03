"""Settings of the script while it trained, in checkpoints: values that travel, and modes."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

from pipedream_rt.checkpoint import Manifest
from pipedream_rt.coordinator.feed.feeder import Feeder
from pipedream_rt.coordinator.recovery.group import WorkerGroup
from pipedream_rt.job.script_values import ScriptValues
from pipedream_rt.messages.message import CommandName
from pipedream_rt.schema import printable
from pipedream_rt.telling import log_of

_log = log_of(__name__)


class ScriptSettings:
    """Settings of the script: values that travel, the modes of the stages, its own model.

    Attributes:
        values: The values of the script that stages have copies of.
    """

    def __init__(self, group: WorkerGroup, feeder: Feeder, values: ScriptValues) -> None:
        self._group, self._feeder, self.values = group, feeder, values

    def saved(self) -> dict[str, Any]:
        """Return the fields of a manifest that hold them."""
        layers = self._group.plan.layers
        apart = self._group.feed.restore_point().apart
        return {
            "values": self.values.kept(),
            "training": self._group.feed.training,
            "modes": {name: mode for stage, mode in apart for name in layers[stage]},
        }

    def put_back_values(self, found: Path, manifest: Manifest, accept: Collection[str]) -> None:
        """Give the script the values of a checkpoint; say where its own are others."""
        if manifest.values is None or "values" in accept:
            return
        unknown, others = self.values.put_back(manifest.values)
        if unknown:
            _log.warning(
                "%s has values that its script had set while it trained, and this script has no "
                "such place: %s; the run goes on without them",
                found,
                printable(", ".join(unknown)),
            )
        if others:
            _log.warning(
                "%s was made by a script that began with other values (%s): the run goes on with "
                "those of the checkpoint; accept=['values'] takes those of the script instead",
                found,
                printable(", ".join(others)),
            )

    def put_back_modes(self, found: Path, manifest: Manifest) -> None:
        """Set the modes that the stages had."""
        if manifest.values is None:
            return
        if manifest.training is not None:
            self._feeder.set_training(manifest.training)
        elif self._feeder.training is not None:
            _log.warning(
                "%s was made before a mode was set; the modules stay in that of pipe.train(%s)",
                found,
                self._feeder.training,
            )
        modes = manifest.modes or {}
        for stage, layers in enumerate(self._group.plan.layers):
            mode = {modes.get(name) for name in layers}
            if len(mode) > 1:
                _log.warning(
                    "%s was made with another split, and stage %d has layers of several modes; set "
                    "one by pipe.stages[%d].rref.rpc_sync().train(mode)",
                    found,
                    stage,
                    stage,
                )
            elif None not in mode:
                self._group.command(CommandName.TRAINING, (stage, mode.pop()))
