"""One stage's part of checkpoints: copied between two actions, written by another thread.

The checkpoint of step t holds buffers as they are after the last forward of mini-batch t-1, and all
other state as it is after that mini-batch's update. The command to save follows that forward in the
feed, so the stage copies buffers at the command, and the rest once the update is done. It never
waits for the disk.

An update may be late, as with replicas or when it waits for the norm of all gradients. The stage
does more micro-batches before it, which a run from the checkpoint does again, and may drop older
versions that they read. So it copies these before the update. Replicas of a stage have the same
weights, which replica 0 writes, and buffers of their own.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipedream_rt.checkpoint import read_stage, write_replica, write_stage
from pipedream_rt.errors import ConfigError
from pipedream_rt.messages.snapshot import Snapshot, fitting, replica_name
from pipedream_rt.messages.state_keys import OF_REPLICAS
from pipedream_rt.messages.tree import flatten
from pipedream_rt.models.mark import Mark, mark_of_tensors
from pipedream_rt.stage import stage_state
from pipedream_rt.stage.stage import Stage

_CHANGED_IN_BACKWARD = (
    "a layer changes its buffers in its backward, as BatchNorm inside torch's checkpoint does, so "
    "they have no state between two micro-batches while others are in flight; call save() at the "
    "end of an epoch, or take the layer out of torch's checkpoint"
)
"""Why a stage cannot save without a flush."""

_ATTEMPTS = 100
"""How often to empty a folder into which others may still write."""

Tell = Callable[[int, object], None]
"""``tell(position, result)`` sends the result of the save command at a position; any thread.

The result is the list that `write_stage` returns and the fingerprints of the stage, or a text that
says why the part could not be written. Training goes on either way.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Saving:
    """A checkpoint whose update is not done yet.

    Attributes:
        step: Number of updates after which the checkpoint is made.
        position: The position of the command in the feed.
        begun: Copies of what forwards change, and of older versions that will be read again.
    """

    folder: Path
    step: int
    position: int
    begun: Snapshot


class StageSaver:
    """The writer of one stage's part of checkpoints.

    The worker's thread calls its methods; a thread of the saver writes the files.

    Attributes:
        part: The folder of the checkpoint that was begun last; None if none was.
        saving: The checkpoint that waits for its update; None if none does.
    """

    def __init__(self, stage: Stage, num_stages: int, tell: Tell) -> None:
        self._stage = stage
        self._num_stages = num_stages
        self._tell = tell
        plan, address = stage.plan, stage.address
        self._count = plan.replicas[stage.index]
        self._replica = plan.replica_of(address)
        self.saving: _Saving | None = None
        self.part: Path | None = None
        self._writer: ThreadPoolExecutor | None = None

    @torch.no_grad()
    def begin(self, position: int, folder: str, step: int) -> None:
        """Copy the buffers, between the last forward of a mini-batch and the next one's first."""
        self.part = Path(folder)
        try:
            begun = stage_state.begun(self._stage, self._copy)
        except ConfigError as error:
            self._tell(position, str(error))
            return
        self.saving = _Saving(folder=Path(folder), step=step, position=position, begun=begun)
        self.save_if_due()

    @contextmanager
    def watching_buffers(self) -> Iterator[None]:
        """Give up a waiting checkpoint if the body, a backward, sets buffers."""
        saving, before = self.saving, self._mark_of_buffers()
        yield
        if saving is not None and before != self._mark_of_buffers():
            self.saving = None
            self._tell(saving.position, _CHANGED_IN_BACKWARD)

    def _mark_of_buffers(self) -> Mark:
        return mark_of_tensors(self._stage.module.named_buffers())

    @torch.no_grad()
    def save_if_due(self) -> None:
        """Once the checkpoint's update is done, copy the rest and let the thread write it."""
        saving, stage = self.saving, self._stage
        if saving is None:
            return
        if stage.whole_version < saving.step:
            self._copy_versions(saving)
            return
        self.saving = None
        try:
            state = stage_state.completed(stage, saving.begun, self._copy)
        except ConfigError as error:
            self._tell(saving.position, str(error))
            return
        if self._writer is None:
            self._writer = ThreadPoolExecutor(1, thread_name_prefix=f"checkpoint-{stage.index}")
        self._writer.submit(self._write, saving, state, stage.runner.device.settle())

    def _copy_versions(self, saving: _Saving) -> None:
        """Copy the versions still held that micro-batches after the checkpoint read."""
        stage, parameters = self._stage, self._stage.parameters
        first = stage.plan.reads(stage.index, saving.step * stage.plan.per_update)
        newest: dict[str, Tensor] = dict(parameters.named)
        versions, steps = saving.begun.versions, saving.begun.steps
        for version, named in {**parameters.older(), parameters.ledger.newest: newest}.items():
            is_whole = version <= stage.whole_version
            if first <= version < saving.step and is_whole and version not in versions:
                versions[version] = {name: self._copy(tensor) for name, tensor in named.items()}
                for rule in stage.rules:
                    views = rule.views(version).items()
                    steps.update((key, self._copy(view)) for key, view in views)

    def _copy(self, tensor: Tensor) -> Tensor:
        """Return a copy for a file: on the host, contiguous, with a storage of its own."""
        return self._stage.runner.device.copied(tensor.detach().contiguous())

    def _write(self, saving: _Saving, state: Snapshot, settle: Callable[[], None]) -> None:
        """Write the files and tell the result. The saver's thread: it touches copies alone."""
        result: object
        try:
            settle()  # waits until the copies have come from the device
            if self._replica:
                written: tuple[Any, ...] = self._write_replica(saving, state)
            else:
                written = write_stage(saving.folder, self._stage.index, self._num_stages, state)
            result = [*written, stage_state.fingerprints_at(self._stage, state, saving.step)]
            flatten(result)  # what cannot be told is an error too
        except Exception as error:  # the top of a thread; the training goes on after any error
            result = str(error)
        self._tell(saving.position, result)

    def _write_replica(self, saving: _Saving, state: Snapshot) -> tuple[Any, ...]:
        """Write the state that this replica alone has; return what `write_stage` returns."""
        stage = self._stage
        shards = stage.plan.shape.shards(stage.index)
        own = {k: v for k, v in state.steps.items() if shards or k.part in OF_REPLICAS}
        return write_replica(
            saving.folder,
            stage.address,
            len(stage.plan.addresses),
            replica_name(self._replica, self._count),
            replace(state, steps=own),
        )

    def close(self) -> None:
        """Wait until no checkpoint is being written."""
        if self._writer is not None:
            self._writer.shutdown()


def remove_part(part: Path) -> None:
    """Remove an unfinished checkpoint, as its run is dead."""
    if not part.name.endswith(".part"):  # a whole checkpoint has another name by now
        return
    for _ in range(_ATTEMPTS):  # a writer may add a file while the folder is emptied
        shutil.rmtree(part, ignore_errors=True)
        if not part.exists():
            return


@torch.no_grad()
def restore_stage(
    stage: Stage,
    folder: str,
    files: Collection[str],
    step: int,
    plain: dict[str, Any],
    floor: int,
    with_optimizer: bool = True,
) -> bool:
    """Load a verified checkpoint while nothing is in flight; return whether it has all versions."""
    # `plain` has what the manifest itself keeps of stages, by the texts of keys.
    wanted = stage_state.wanted(stage)  # outside: the model's own code makes a state dict
    with fitting(folder):
        state = read_stage(Path(folder), files, plain, wanted)
    return stage_state.restore(stage, state, step, floor, with_optimizer, folder)
