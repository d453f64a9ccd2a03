"""Checkpoints as the coordinator makes them: begun between two mini-batches, done some time later.

To begin is to feed a command behind a mini-batch. Every stage copies what it has as of that
mini-batch's update, when it comes to it, and goes on; a thread of its own writes the copies. When
all have replied and the script has seen the results before, the coordinator adds the manifest and
gives the folder its name. Nothing waits for anything, and no micro-batch is computed otherwise.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipedream_rt.checkpoint import Manifest, Part, prune, put_aside_later, write_manifest
from pipedream_rt.coordinator.feed_log import Origin
from pipedream_rt.coordinator.group import WorkerGroup
from pipedream_rt.coordinator.options import Checkpoints
from pipedream_rt.coordinator.results import PendingStep, StepResult
from pipedream_rt.errors import CheckpointError
from pipedream_rt.messages.message import CommandName
from pipedream_rt.schedules import EdgeKind

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Begun:
    """A checkpoint that the stages are writing."""

    part: Part
    position: int
    origin: Origin
    manifest: Manifest
    unseen: tuple[PendingStep, ...]
    root: Path
    keep: int | None


class Checkpointer:
    """Makes checkpoints, one at a time.

    Args:
        group: Of the pipeline.
        options: Where they are kept and when they are made; None if the script says each time.

    Attributes:
        folder: Of the run; None if the script gives one each time.
        blocked_s: For how long the coordinator was kept from other work by them.
    """

    def __init__(self, group: WorkerGroup, options: Checkpoints | None) -> None:
        """None is begun."""
        self._group = group
        group.at_end.append(self.abandon)
        self.folder = options.path if options else None
        self._every = options.every if options else None
        self._keep = options.keep if options else None
        self._begun: _Begun | None = None
        self.blocked_s = 0.0

    def due(self, step: int) -> bool:
        """Whether one is to be made after so many mini-batches."""
        return self._every is not None and step % self._every == 0

    def begin(
        self,
        root: Path,
        keep: int | None,
        manifest: Manifest,
        unseen: Sequence[PendingStep],
    ) -> None:
        """Begin one behind what was fed last; none must be begun already.

        Args:
            root: Folder of the run.
            keep: How many of the newest to keep.
            manifest: Without what the stages will add.
            unseen: Mini-batches before it whose results the script has not seen.

        Raises:
            CheckpointError: The folder cannot be made.
        """
        start = time.monotonic()
        assert self._begun is None
        part = Part(root, manifest.step)
        try:
            argument = {"folder": str(part.folder), "step": manifest.step}
            position = self._group.tell(CommandName.SAVE, argument)
        except BaseException:
            part.abandon()
            raise
        self._begun = _Begun(
            part=part,
            position=position,
            origin=self._group.origin(),
            manifest=manifest,
            unseen=tuple(unseen),
            root=root,
            keep=keep,
        )
        self.blocked_s += time.monotonic() - start

    def begin_by_itself(self, manifest: Manifest, unseen: Sequence[PendingStep]) -> None:
        """Begin one that is due. One that cannot be made is told of, and the run goes on."""
        assert self.folder is not None
        try:
            self.begin(self.folder, self._keep, manifest, unseen)
        except CheckpointError as error:
            self._tell_of(error)

    @property
    def is_begun(self) -> bool:
        """Whether one is not finished."""
        return self._begun is not None

    def finish_if_written(self) -> None:
        """Finish the one that is begun if nothing has to be waited for."""
        begun = self._begun
        if begun is None or not self._group.replied(begun.position, EdgeKind.SAVED):
            return
        if all(pending.outcome is not None for pending in begun.unseen):
            try:
                self.finish()
            except CheckpointError as error:
                self._tell_of(error)

    def finish(self) -> Path | None:
        """Wait until the one that is begun is written, and give it its name.

        To be called after a flush: the stages write it when its update is done.

        Returns:
            Its folder; None if none was begun.

        Raises:
            CheckpointError: It cannot be written. Nothing else has happened.
        """
        begun, self._begun = self._begun, None
        if begun is None:
            return None
        start = time.monotonic()
        try:
            replies = self._group.replies(begun.position, EdgeKind.SAVED)
            for reply in replies:
                if isinstance(reply, str):
                    raise CheckpointError(reply)
            weights: dict[str, dict[str, int]] = {}
            manifest = dataclasses.replace(
                begun.manifest,
                results=[dataclasses.asdict(p.result()) for p in begun.unseen],
            )
            for files, plain, of_stage in replies:
                manifest.files.update(files)
                manifest.plain.update(plain)
                weights.update(of_stage)
            write_manifest(begun.part.folder, manifest, weights)
            folder = begun.part.commit()
        finally:
            begun.part.abandon()
        log = self._group.log
        log.begin(dataclasses.replace(begun.origin, folder=folder))
        put_aside_later(begun.root, folder)
        if begun.keep is not None:
            prune(begun.root, begun.keep, [o.folder for o in log.origins if o.folder is not None])
        self.blocked_s += time.monotonic() - start
        return folder

    def abandon(self) -> None:
        """Forget the one that is begun; what was written of it goes."""
        if self._begun is not None:
            self._begun.part.abandon()
            self._begun = None

    def _tell_of(self, error: CheckpointError) -> None:
        """Say that a checkpoint that comes by itself could not be made."""
        origin = self._group.log.origins[-1]
        back = f"to {origin.folder}" if origin.folder else "to its start"
        _log.error("%s; the run goes on, and can go back %s alone", error, back)


def result_of(saved: dict[str, Any]) -> StepResult:
    """Read a result that a manifest has kept."""
    values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in saved.items()}
    return StepResult(**values)
