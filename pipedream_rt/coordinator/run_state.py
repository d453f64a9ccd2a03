"""Saving and loading the state of a run, with the objects that the user attaches."""

from __future__ import annotations

import copy
import dataclasses
import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import Tensor, nn

from pipedream_rt.checkpoint import Manifest, checkpoints, newest_good, refuse_unsaveable, shapes
from pipedream_rt.checkpoint.layout import open_tensors
from pipedream_rt.checkpoint.manifest import read_manifest
from pipedream_rt.checkpoint.reading import keys_by_stage, weights_of
from pipedream_rt.checkpoint.writing import write_tensors
from pipedream_rt.coordinator.checkpointing.checkpointer import Checkpointer
from pipedream_rt.coordinator.checkpointing.pipeline_fingerprint import Fingerprint, of_stages
from pipedream_rt.coordinator.checkpointing.preemption import EXIT_CODE, Preemption
from pipedream_rt.coordinator.feed.epochs import Epochs
from pipedream_rt.coordinator.feed.feeder import Feeder
from pipedream_rt.coordinator.recovery.feed_log import Role
from pipedream_rt.coordinator.recovery.group import WorkerGroup
from pipedream_rt.coordinator.recovery.recovery import restore_argument
from pipedream_rt.coordinator.script_settings import ScriptSettings
from pipedream_rt.errors import CheckpointError, ConfigError, PipelineError
from pipedream_rt.job.identity import Identity
from pipedream_rt.job.unsplit_model import UnsplitModel
from pipedream_rt.messages.message import CommandName
from pipedream_rt.messages.snapshot import UNFIT
from pipedream_rt.schema import shown
from pipedream_rt.stage.hyper import set_hyper
from pipedream_rt.telling import log_of

_log = log_of(__name__)


_REMEMBERED = 8
"""The number of checkpoints whose weights the script may have loaded into its model."""

_VALUE = "value"
"""The metadata key, in a file of `Pipeline.keep_best`, of the value for which it was written."""


def _value_in(path: Path) -> float | None:
    """Return the value for which a file of weights was written; None if it has none."""
    try:
        with open_tensors(path, follow=True) as file:
            return float((file.metadata() or {})[_VALUE])
    except (OSError, SafetensorError, KeyError, ValueError):
        return None


class _Unusable(CheckpointError):
    """A checkpoint is whole, but its contents make no sense."""


@contextmanager
def _usable(found: Path) -> Iterator[None]:
    """Raise `_Unusable` if the body stumbles over the contents of a checkpoint."""
    try:
        yield
    except PipelineError:
        raise
    except UNFIT as e:
        raise _Unusable(f"{found} cannot be used: {shown(e)}") from e


class RunState:
    """Everything that a run needs to go on, saved in checkpoints and loaded from them.

    Attributes:
        resumed: The manifest of the checkpoint from which the run goes on; None if from none.
        is_read: Whether somebody has asked for weights, or saved them.
    """

    def __init__(
        self,
        group: WorkerGroup,
        feeder: Feeder,
        epochs: Epochs,
        model: UnsplitModel,
        checkpointer: Checkpointer,
        identity: Callable[[], Identity],
        preemption: Preemption | None,
        settings: ScriptSettings,
    ) -> None:
        self._own = settings.values.own
        # No strong reference: a pipeline that nobody refers to any more ends its workers at once.
        saved = weakref.WeakMethod(self._saved)
        self._own.saved = lambda: () if (read := saved()) is None else read()
        self._folders: list[Path] = []  # that were written or read, newest last
        self._identity = identity
        self._preemption = preemption
        self._settings = settings
        self._group = group
        self._feeder = feeder
        self._epochs = epochs
        self._model = model
        self._checkpointer = checkpointer
        self._floor = 0  # the oldest weight version that a stage reads from here on
        self._attached: dict[str, Any] = {}
        self._with_groups = True  # whether a checkpoint's hyper-parameters are taken
        self.resumed: Manifest | None = None
        self.is_read = checkpointer.folder is not None
        self._best: dict[Path, float] = {}

    # -- weights --------------------------------------------------------------------------------

    def state_dict(self, version: int = 0) -> dict[str, Any]:
        """Flush, and return weights and buffers; see `Pipeline.state_dict`."""
        self.is_read = True
        self._feeder.script.end()
        return self._model.in_order(self.gathered(version))

    def gathered(self, version: int = 0) -> dict[str, Any]:
        """Flush, and return the state dicts of all stages as one, with that of the loss."""
        self._feeder.flush()
        found: dict[str, Any] = {}
        for part in self._group.of_stages(self._group.command(CommandName.STATE, version)):
            found.update(part)
        self._own.gave(found)
        return found

    def _saved(self) -> Iterator[dict[str, Tensor]]:
        """Yield the weights of the newest checkpoints that were written or read."""
        for folder in reversed(self._folders[-_REMEMBERED:]):
            with suppress(*UNFIT, CheckpointError):  # it may be gone
                yield weights_of(folder, read_manifest(folder).files)

    def keep_best(self, path: Path, value: float, highest: bool) -> bool:
        """Write the weights of now if a value is the best so far; see `Pipeline.keep_best`."""
        best = self._best.get(path)
        if best is None and self.resumed is not None:
            best = _value_in(path)
        sign = -1 if highest else 1
        if not sign * value < (math.inf if best is None else sign * best):  # so also for NaN
            return False
        state = self.state_dict()
        if extra := [key for key, value in state.items() if not isinstance(value, Tensor)]:
            raise CheckpointError(
                f"{path} cannot be written: {extra[0]} is no tensor, and such a file holds tensors "
                "alone; pipe.save(folder) keeps extra state too"
            )
        # Copies, since safetensors refuses memory that two names share, as that of tied weights.
        weights = {key: value.clone() for key, value in state.items()}
        texts = {_VALUE: repr(value), "step": str(self._feeder.step)}
        write_tensors(path, weights, texts)
        self._best[path] = value
        return True

    def fingerprint(self) -> Fingerprint:
        """Flush, and return the fingerprint of the state of now; see `Pipeline.fingerprint`."""
        self._feeder.flush()
        found = self._group.command(CommandName.FINGERPRINT)
        return Fingerprint.of_plain(of_stages(self._group.plan, found))

    def loss_module(self) -> nn.Module:
        """Flush, and return a copy of the loss function; see `Pipeline.loss_module`."""
        self.is_read = True
        return self._model.loss_with(self.gathered())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Flush, and load weights and buffers; see `Pipeline.load_state_dict`."""
        self._model.require_fit(state_dict)
        self._feeder.flush()
        self.finish_checkpoint()
        self._group.command(CommandName.LOAD_STATE, dict(state_dict), Role.OWN)
        self._own.gave(state_dict)
        self._floor = self._feeder.step

    # -- saving ---------------------------------------------------------------------------------

    def save(self, folder: Path | None, keep: int | None, extra: Any) -> Path:
        """Flush, and write a checkpoint; see `Pipeline.save`."""
        root, self.is_read = folder or self._checkpointer.folder, True
        if root is None:
            raise ConfigError(
                "save needs a folder: pipe.save(folder), or Pipeline(checkpoint=folder)"
            )
        self._feeder.flush()
        self.finish_checkpoint()
        self._checkpointer.begin(root, keep, self._manifest(extra), self._epochs.unseen())
        written = self._checkpointer.finish()
        assert written is not None
        self._folders.append(written)
        try:
            self._feeder.script.end()
        except ConfigError as error:  # what was trained so far is not lost by that
            _log.warning("%s was saved, and the run will be refused: %s", written, error)
        return written

    def rest_is_due(self) -> bool:
        """Look after workers; return whether a checkpoint wants that nothing is on its way."""
        self._look_after_workers()
        noted = self._preemption is not None and self._preemption.noted
        return noted or self._checkpointer.due(self._feeder.step)

    def _look_after_workers(self) -> None:
        """Finish a written checkpoint, and let workers join behind it."""
        if self._checkpointer.every is not None:
            self._checkpointer.finish_if_written()
        self._group.recovery.grow()

    def mini_batch_was_fed(self) -> None:
        """Finish a written checkpoint, let workers join behind it, and begin one if it is due."""
        if self._preemption is not None and self._preemption.noted:
            self._end_with_checkpoint()
        checkpointer, step = self._checkpointer, self._feeder.step
        self._look_after_workers()
        if checkpointer.every is None or not checkpointer.due(step):
            return
        if checkpointer.is_begun:
            # This one is left out. To wait would need a flush, which takes time; and where a layer
            # changes buffers in its backward, a flush at a time that depends on the disk would
            # make the result depend on the disk.
            _log.info("no checkpoint after step %d: the previous one is not written yet", step)
            return
        checkpointer.begin_by_itself(self._manifest(None), self._epochs.unseen())

    def _end_with_checkpoint(self) -> None:
        """Make a checkpoint as of the mini-batch that was fed last, and end the script."""
        # Before the flush, which takes the results that the script has not seen.
        manifest, unseen = self._manifest(None), self._epochs.unseen()
        self._feeder.flush()
        self.finish_checkpoint()
        assert self._checkpointer.folder is not None
        self._checkpointer.begin(
            self._checkpointer.folder, self._checkpointer.keep, manifest, unseen
        )
        _log.warning("SIGTERM: %s is written; the script ends", self._checkpointer.finish())
        raise SystemExit(EXIT_CODE)

    def finish_checkpoint(self) -> None:
        """Wait, after a flush, for the begun checkpoint; log if it cannot be written."""
        try:
            self._checkpointer.finish()
        except CheckpointError as error:
            _log.error("%s", error)

    def _manifest(self, extra: Any) -> Manifest:
        """Return the manifest of a checkpoint that begins now, still without files and results."""
        plan, optimizer = self._group.plan, self._feeder.optimizer
        return Manifest(
            step=self._feeder.step,
            schedule=plan.name,
            workers=plan.workers,
            stages_per_worker=plan.shape.stages_per_worker,
            per_update=plan.per_update,
            groups=optimizer.groups() if optimizer else [],
            extra=extra,
            floor=self._floor,
            passes=self._feeder.passes,
            whole=self._feeder.decision.whole,
            place=self._epochs.place(),
            # Copies, since the manifest is written when the script has gone on.
            attached={name: copy.deepcopy(v.state_dict()) for name, v in self._attached.items()},
            slack=list(plan.shape.slack),
            identity=self._identity().plain(),
            **self._settings.saved(),
        )

    # -- loading --------------------------------------------------------------------------------

    def load(self, path: Path, accept: Sequence[str] = ()) -> Manifest:
        """Flush, and go on from a checkpoint; see `Pipeline.load`."""
        self._group.life.check()
        found, manifest = newest_good(path)
        self._go_on_from(found, manifest, accept)
        return manifest

    def _go_on_from(self, found: Path, manifest: Manifest, accept: Sequence[str]) -> None:
        """Go on from a checkpoint that was verified."""
        with _usable(found):
            self._take_over(found, manifest, accept)
        self.attach(**self._attached)  # outside: an error of these is not the checkpoint's

    def _take_over(self, found: Path, manifest: Manifest, accept: Sequence[str]) -> None:
        """Take over the values of a checkpoint, except those of attached objects."""
        for packed in manifest.groups:
            set_hyper({}, packed)  # raises for what is no packed value
        self._require_fit(found, manifest, accept)
        self._warn_of_other_slack(found, manifest)
        self._warn_of_other_cut(found, manifest)
        self._settings.put_back_values(found, manifest, accept)
        self._feeder.flush()
        self.finish_checkpoint()
        same_optimizer = "optimizer" not in accept or (
            manifest.identity.get("optimizer") == self._identity().optimizer
        )
        self._restore(found, manifest, same_optimizer)
        self._count_from(manifest)
        with self._group.life.guard("a checkpoint was loaded"):
            self._feeder.flush()  # the stages begin their orders anew, at that step
        self._settings.put_back_modes(found, manifest)
        here = dataclasses.replace(
            self._group.feed.restore_point(),
            folder=found,
            run=manifest.run,
            floor=self._floor,
            with_optimizer=same_optimizer,
        )
        self._checkpointer.go_on(found.parent, manifest.run)
        self._folders.append(found)
        self._group.feed.log.begin(here)
        self.resumed = manifest
        self._with_groups = same_optimizer and not {"hyper_parameters", "groups"} & {*accept}
        if self._feeder.optimizer is not None and "hyper_parameters" in accept:
            self._feeder.optimizer.insist(manifest.groups)
        self._epochs.resume(manifest)

    def _warn_of_other_slack(self, found: Path, manifest: Manifest) -> None:
        """Warn if the run goes on with other slack: forwards then read other versions."""
        plan = self._group.plan
        if not plan.flushes and manifest.slack != list(plan.shape.slack):
            _log.warning(
                "%s was made with slack %s, this pipeline has %s: from here on micro-batches read "
                "other weight versions than in a run that never stopped",
                found,
                manifest.slack or 0,
                list(plan.shape.slack) or 0,
            )

    def _warn_of_other_cut(self, found: Path, manifest: Manifest) -> None:
        """Warn if layers were on other stages, on which their gradients were more or less stale."""
        plan = self._group.plan
        if plan.flushes:
            return
        parameters = self._model.parameters
        tied = Counter(map(id, parameters.values()))  # they are written by one stage of several
        stage_of: dict[str, int] = {}
        for stage, keys in enumerate(keys_by_stage(found, manifest.files)):
            for key in keys:
                if key in parameters and tied[id(parameters[key])] == 1:
                    parts = key.split(".")
                    stage_of.update((".".join(parts[:i]), stage) for i in range(1, len(parts) + 1))
        firsts: dict[int, str] = {}
        moved, there = False, 0
        for here, layers in enumerate(plan.layers):
            for layer in layers:
                if layer in stage_of:  # what has no weights goes with the layer before it
                    there = stage_of[layer]
                    moved = moved or there != here
                firsts.setdefault(there, layer)
        if moved:
            _log.warning(
                "%s was made with other stages: from here on the gradients of some layers are more "
                "or less stale than in a run that never stopped. stages=%s would go on as it was",
                found,
                [firsts[stage] for stage in sorted(firsts)[1:]] or 1,
            )

    def _require_fit(self, found: Path, manifest: Manifest, accept: Sequence[str]) -> None:
        """Refuse a checkpoint that does not belong to this model, optimizer and split."""
        per_update, optimizer = self._group.plan.per_update, self._feeder.optimizer
        if manifest.per_update != per_update:
            raise CheckpointError(
                f"{found} was made with {manifest.per_update} micro-batches per update, this "
                f"pipeline has {per_update}; give the same number to Pipeline"
            )
        if misfit := self._model.first_misfit(shapes(found, manifest.files)):
            raise CheckpointError(f"{found} was made with another model: {misfit}")
        if optimizer:
            self._identity().compare(manifest.identity, found, accept)

    def _restore(self, found: Path, manifest: Manifest, with_optimizer: bool) -> None:
        """Let every stage load its state from a checkpoint."""
        self._floor = manifest.floor
        argument = restore_argument(found, manifest, with_optimizer=with_optimizer)
        if all(self._group.command(CommandName.LOAD, argument)):
            return
        _log.warning(
            "%s lacks older weight versions that this split reads: the first micro-batches read "
            "the version of the checkpoint instead",
            found,
        )
        # All stages then, so that the result does not depend on which of them lacked one.
        self._floor = manifest.step
        argument = restore_argument(found, manifest, self._floor, with_optimizer)
        self._group.command(CommandName.LOAD, argument)

    def _count_from(self, manifest: Manifest) -> None:
        """Count steps, passes and micro-batches on from a checkpoint."""
        self._feeder.step, self._feeder.passes = manifest.step, manifest.passes
        self._feeder.decision.resume(manifest.whole)
        number = manifest.step * self._group.plan.per_update
        self._group.feed.next_micro_batch = self._group.recovery.next_loss = number

    def resume(self, accept: Sequence[str]) -> None:
        """Load the newest usable checkpoint of the run; without any, begin at the start."""
        folder = self._checkpointer.folder
        assert folder is not None
        self._checkpointer.hold(folder)
        if not checkpoints(folder):
            _log.warning("there is no checkpoint in %s yet; the run begins at its start", folder)
            return
        unusable: list[Path] = []
        with self._group.life.guard("the run was resumed"):
            while True:
                found, manifest = newest_good(folder, unusable)
                try:
                    self._go_on_from(found, manifest, accept)
                    break
                except _Unusable as error:
                    _log.warning("%s; trying the one before", error)
                    unusable.append(found)
        _log.warning("the run goes on after step %d of %s", self._feeder.step, folder)

    # -- what the user attaches -----------------------------------------------------------------

    def attach(self, **stateful: Any) -> None:
        """Save objects in every checkpoint and load them with it; see `Pipeline.attach`."""
        resumed = self.resumed
        # Once the run has gone on, what the checkpoint has is too old to be loaded.
        at_once = resumed is not None and resumed.step == self._feeder.step
        back = resumed.attached if resumed is not None and at_once else {}
        for name, value in stateful.items():
            if not (hasattr(value, "state_dict") and hasattr(value, "load_state_dict")):
                raise ConfigError(f"{name} has no state_dict and load_state_dict")
            refuse_unsaveable(name, value.state_dict())
            if name in back:
                value.load_state_dict(back[name])
        self._attached.update(stateful)
        if resumed is not None and at_once and self._with_groups:
            groups = self._feeder.optimizer.param_groups if self._feeder.optimizer else []
            for group, saved in zip(groups, resumed.groups):
                set_hyper(group, saved)
