"""Checkpoints made while training goes on: begun between two mini-batches, finished later.

The coordinator begins a checkpoint by feeding a command behind a mini-batch. When a stage reaches
that command, it copies its state as of that mini-batch's update and goes on; a thread of the stage
writes the copy. When all stages have replied, and the script has seen the results of all
mini-batches before the checkpoint, the coordinator adds the manifest and gives the folder its name.
No stage waits for the disk, and every micro-batch computes the same bits as without a checkpoint.
"""

from __future__ import annotations

import dataclasses
import functools
import secrets
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipedream_rt.checkpoint import (
    Manifest,
    RunLock,
    UnfinishedCheckpoint,
    prune,
    put_aside_later,
    put_aside_others,
    write_manifest,
)
from pipedream_rt.coordinator.checkpointing.pipeline_fingerprint import of_stages
from pipedream_rt.coordinator.recovery.feed_log import RestorePoint
from pipedream_rt.coordinator.recovery.group import WorkerGroup
from pipedream_rt.coordinator.results import PendingStep, StepResult
from pipedream_rt.errors import CheckpointError
from pipedream_rt.job.options import Checkpoints
from pipedream_rt.messages.message import CommandName
from pipedream_rt.schedules import EdgeKind
from pipedream_rt.telling import log_of

_log = log_of(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Begun:
    """A checkpoint that the stages are writing.

    Attributes:
        position: Position of the command to save, in the feed.
        manifest: The manifest, without files, fingerprints and results.
        unseen: The mini-batches before it whose results the script had not seen by then.
        root: Folder of the run, in which ``part`` becomes a checkpoint.
        keep: Number of the newest checkpoints to keep; None to keep all.
    """

    part: UnfinishedCheckpoint
    position: int
    restore_point: RestorePoint
    manifest: Manifest
    unseen: tuple[PendingStep, ...]
    root: Path
    keep: int | None


class Checkpointer:
    """The maker of checkpoints, one at a time.

    Attributes:
        every: Mini-batches from one checkpoint that it makes by itself to the next; None for none.
        folder: Folder of the run; None if the script gives a folder each time.
        keep: Number of the newest checkpoints to keep; None to keep all.
        blocked_s: Seconds for which checkpoints have kept the coordinator from other work.
    """

    def __init__(self, group: WorkerGroup, options: Checkpoints | None) -> None:
        self._group = group
        # The recovery gets no strong reference to this object, which refers to the group: the
        # workers of a dropped pipeline would never end.
        abandon = weakref.WeakMethod(self.abandon)
        group.recovery.before_workers_end.append(lambda: (still := abandon()) and still())
        self._locks: dict[Path, RunLock] = {}
        # At last, since workers may write until they have ended.
        group.recovery.after_workers_end.append(functools.partial(_release, self._locks))
        self._run = secrets.token_hex(16)
        self._runs: dict[Path, str] = {}  # by folder, the run as which this one goes on there
        self._cleared_folders: set[Path] = set()  # folders that hold no checkpoint of another run
        self.folder = options.path if options else None
        self.every = options.every if options else None
        self.keep = options.keep if options else None
        self._begun: _Begun | None = None
        self._attempts = options.attempts if options else None
        self._failed = 0
        self.blocked_s = 0.0
        if options is not None and options.every is not None:
            self.hold(options.path)

    def interrupted(self, step: int) -> None:
        """Say, after Ctrl-C, how far the run had come and what it can go on from."""
        if self.every is None:
            return
        saved = self._group.feed.log.restore_points[-1].folder
        if saved is None:
            _log.warning("interrupted after %d mini-batches, before the first checkpoint", step)
        else:
            _log.warning(
                "interrupted after %d mini-batches; the last checkpoint is %s, from which a script "
                "with Checkpoints(resume=True), or under `pipedream-rt run --resume`, goes on",
                step, saved,
            )  # fmt: skip

    def hold(self, root: Path) -> None:
        """Lock a folder against checkpoints of other runs, until the pipeline ends."""
        place = root.resolve()
        lock = self._locks.pop(place, None)
        if lock is not None and lock.is_good:
            self._locks[place] = lock
            return
        if lock is not None:  # the folder was removed; what is there now may be another run's
            lock.release()
        self._cleared_folders.discard(place)
        self._locks[place] = RunLock(place)

    def go_on(self, root: Path, run: str) -> None:
        """Go on, in this folder alone, as the run whose checkpoint was loaded from there."""
        self._runs[root.resolve()] = run or self._run

    def _run_in(self, root: Path) -> str:
        """Return the identity that the run has in a folder."""
        return self._runs.get(root.resolve(), self._run)

    def due(self, step: int) -> bool:
        """Whether a checkpoint is due after ``step`` mini-batches."""
        return self.every is not None and step % self.every == 0

    def begin(
        self,
        root: Path,
        keep: int | None,
        manifest: Manifest,
        unseen: Sequence[PendingStep],
    ) -> None:
        """Begin a checkpoint behind what was fed last; no other one may be unfinished."""
        start = time.monotonic()
        assert self._begun is None
        self.hold(root)
        manifest = dataclasses.replace(manifest, run=self._run_in(root))
        part = UnfinishedCheckpoint(root, manifest.step)
        try:
            argument = {"folder": str(part.folder), "step": manifest.step}
            position = self._group.feed.command(CommandName.SAVE, argument)
        except BaseException:
            part.abandon()
            raise
        self._begun = _Begun(
            part=part,
            position=position,
            restore_point=self._group.feed.restore_point(),
            manifest=manifest,
            unseen=tuple(unseen),
            root=root,
            keep=keep,
        )
        self.blocked_s += time.monotonic() - start

    def begin_by_itself(self, manifest: Manifest, unseen: Sequence[PendingStep]) -> None:
        """Begin a due checkpoint; if its folder cannot be made, log that and go on."""
        assert self.folder is not None
        try:
            self.begin(self.folder, self.keep, manifest, unseen)
        except CheckpointError as error:
            self._tell_of(error)

    @property
    def is_begun(self) -> bool:
        """Whether a checkpoint has begun and is not finished."""
        return self._begun is not None

    def finish_if_written(self) -> None:
        """Finish the begun checkpoint if that needs no waiting."""
        begun = self._begun
        if begun is None or not self._group.replied(begun.position, EdgeKind.SAVED):
            return
        # Their results go into the manifest.
        if all(pending.outcome is not None for pending in begun.unseen):
            try:
                self.finish()
            except CheckpointError as error:
                self._tell_of(error)

    def finish(self) -> Path | None:
        """Wait until the begun checkpoint is written, and name it. The caller flushes before."""
        begun, self._begun = self._begun, None
        if begun is None:
            return None
        start = time.monotonic()
        try:
            # A stage replies when the update before is done and the copy of its state is written.
            replies = self._group.replies(begun.position, EdgeKind.SAVED)
            # Not sooner: a recovery meanwhile feeds the command again, and stages write again.
            self._group.feed.log.forget(begun.position)
            for reply in replies:
                if isinstance(reply, str):
                    raise CheckpointError(reply)
            weights: dict[str, dict[str, int]] = {}
            manifest = dataclasses.replace(
                begun.manifest,
                results=[dataclasses.asdict(p.result()) for p in begun.unseen],
            )
            for files, plain, of_stage, _ in replies:
                manifest.files.update(files)
                manifest.plain.update(plain)
                weights.update(of_stage)
            marks = [fingerprints for *_, fingerprints in replies]
            manifest.fingerprints.extend(of_stages(self._group.plan, marks))
            self._refuse_replicas_apart(marks)
            write_manifest(begun.part.folder, manifest, weights)
            place = begun.root.resolve()
            if place not in self._cleared_folders:
                put_aside_others(place, manifest.run)
                self._cleared_folders.add(place)
            folder = begun.part.commit()
        finally:
            begun.part.abandon()  # nothing is left to remove after `commit`
        self._failed = 0
        log = self._group.feed.log
        log.begin(dataclasses.replace(begun.restore_point, folder=folder, run=manifest.run))
        # A run that went back to an earlier step has given up later checkpoints: a resume must not
        # take one.
        put_aside_later(begun.root, folder)
        if begun.keep is not None:
            # The checkpoints of restore points stay, whatever their number: a recovery goes back to
            # them.
            prune(
                begun.root,
                begun.keep,
                [o.folder for o in log.restore_points if o.folder is not None],
            )
        self.blocked_s += time.monotonic() - start
        return folder

    def _refuse_replicas_apart(self, fingerprints: Sequence[dict[str, Any]]) -> None:
        """Refuse a checkpoint if replicas of a stage have different weights."""
        plan = self._group.plan
        for address in plan.addresses:
            first = plan.address_of(plan.stage_of(address))
            if fingerprints[address]["weights"] != fingerprints[first]["weights"]:
                raise CheckpointError(
                    f"{plan.title_of(address)} has other weights than {plan.title_of(first)}. If "
                    "nothing in the model changes weights by itself, their machines round "
                    "differently: give the replicas of a stage machines of one kind, with the same "
                    "version of torch and the same number of threads"
                )

    def abandon(self) -> None:
        """Forget the begun checkpoint, and remove what was written of it."""
        if self._begun is not None:
            self._begun.part.abandon()
            self._begun = None

    def _tell_of(self, error: CheckpointError) -> None:
        """Log that a due checkpoint failed; raise if too many in a row did."""
        self._failed += 1
        if self._failed == self._attempts:
            self._failed = 0
            raise CheckpointError(
                f"{self._attempts} checkpoints in a row could not be written; the last one: {error}"
            ) from error
        restore_point = self._group.feed.log.restore_points[-1]
        back = f"to {restore_point.folder}" if restore_point.folder else "to its start"
        _log.error("%s; the run goes on, and a recovery would go back %s", error, back)


def _release(locks: dict[Path, RunLock]) -> None:
    for lock in locks.values():
        lock.release()


def result_of(saved: dict[str, Any]) -> StepResult:
    """Return a result from the form in which a manifest keeps it, with lists for tuples."""
    values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in saved.items()}
    return StepResult(**values)
