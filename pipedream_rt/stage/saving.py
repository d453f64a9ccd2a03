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
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipedream_rt.checkpoint import (
    Snapshot,
    read_stage,
    replica_name,
    write_replica,
    write_stage,
)
from pipedream_rt.errors import CheckpointError, ConfigError, PipelineError
from pipedream_rt.messages.state_keys import OF_REPLICAS, StepState
from pipedream_rt.messages.tree import flatten
from pipedream_rt.schema import printable
from pipedream_rt.stage import stage_state
from pipedream_rt.stage.buffers import buffer_slots
from pipedream_rt.stage.fingerprint import fingerprints_of
from pipedream_rt.stage.hyper import packed_extra, unpack_hyper
from pipedream_rt.stage.rules.corrections import Corrections
from pipedream_rt.stage.stage import Stage
from pipedream_rt.torch_private import EXTRA_STATE

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
        buffers: Copies of the buffers that the state dict has, by name.
        hidden: Copies of the buffers that the state dict leaves out, by name.
        extra: Entries of the state dict that are not tensors, packed.
        versions: Copies of older versions that will be read again, by version and name.
        views: Copies of what corrections have made of these.
    """

    folder: Path
    step: int
    position: int
    buffers: dict[str, Tensor]
    hidden: dict[str, Tensor]
    extra: dict[str, Any]
    versions: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    views: StepState = field(default_factory=dict)


class StageSaver:
    """The writer of one stage's part of checkpoints.

    The worker's thread calls its methods; a thread of the saver writes the files.

    Attributes:
        part: The folder of the checkpoint that was begun last; None if none was.
    """

    def __init__(self, stage: Stage, num_stages: int, tell: Tell) -> None:
        self._stage = stage
        self._num_stages = num_stages
        self._tell = tell
        plan, address = stage.plan, stage.address
        self._count = plan.replicas[stage.index]
        self._replica = plan.replica_of(address)
        self._saving: _Saving | None = None
        self.part: Path | None = None
        self._writer: ThreadPoolExecutor | None = None

    @torch.no_grad()
    def begin(self, position: int, folder: str, step: int) -> None:
        """Copy the buffers, between the last forward of a mini-batch and the next one's first."""
        module, self.part = self._stage.module, Path(folder)
        # The other entries are weights, or made of them by a layer's own state dict.
        buffers, names = {id(b) for b in module.buffers()}, buffer_slots(module)
        state = module.state_dict(keep_vars=True)
        rest = {
            n: t
            for n, t in state.items()
            if n in names or id(t) in buffers or n.endswith(EXTRA_STATE)
        }
        try:
            extra = packed_extra(
                {**rest, **dict.fromkeys(stage_state.buffers_set_to_none(self._stage))}
            )
        except ConfigError as error:
            self._tell(position, str(error))
            return
        self._saving = _Saving(
            folder=Path(folder),
            step=step,
            position=position,
            buffers={name: self._copy(t) for name, t in rest.items() if isinstance(t, Tensor)},
            extra=extra,
            hidden={n: self._copy(b) for n, b in module.named_buffers() if n not in state},
        )
        self.save_if_due()

    def watching_buffers(self) -> AbstractContextManager[None]:
        """Give up a checkpoint that waits for its update if a backward, the body, sets buffers."""
        return nullcontext() if self._saving is None else self._watching(self._saving)

    @contextmanager
    def _watching(self, saving: _Saving) -> Iterator[None]:
        before = self._buffers_now()
        yield
        if before != self._buffers_now():
            self._saving = None
            self._tell(saving.position, _CHANGED_IN_BACKWARD)

    def _buffers_now(self) -> list[tuple[str, int, int]]:
        """Return what differs once a buffer was changed in place or replaced."""
        return [(n, id(b), b._version) for n, b in self._stage.module.named_buffers()]

    @torch.no_grad()
    def save_if_due(self) -> None:
        """Once the checkpoint's update is done, copy the rest and let the thread write it."""
        saving, stage = self._saving, self._stage
        if saving is None:
            return
        if stage.whole_version < saving.step:
            self._copy_versions(saving)
            return
        self._saving = None
        try:
            steps = stage_state.step_state(stage)
        except ConfigError as error:
            self._tell(saving.position, str(error))
            return
        state = Snapshot(
            weights={
                name: saving.buffers[name] if name in saving.buffers else self._copy(tensor)
                for name, tensor in stage_state.state_dict(stage).items()
                if name not in saving.extra
            },
            extra=saving.extra,
            hidden=saving.hidden,
            steps=saving.views
            | {k: self._copy(v) if isinstance(v, Tensor) else v for k, v in steps.items()},
            versions=saving.versions
            | {
                version: {name: self._copy(tensor) for name, tensor in named.items()}
                for version, named in stage.parameters.older().items()
                if version not in saving.versions
            },
        )
        if self._writer is None:
            self._writer = ThreadPoolExecutor(1, thread_name_prefix=f"checkpoint-{stage.index}")
        self._writer.submit(self._write, saving, state, stage.runner.device.settle())

    def _copy_versions(self, saving: _Saving) -> None:
        """Copy the versions still held that micro-batches after the checkpoint read."""
        stage, parameters = self._stage, self._stage.parameters
        first = stage.plan.reads(stage.index, saving.step * stage.plan.per_update)
        newest: dict[str, Tensor] = dict(parameters.named)
        corrections = stage.rule(Corrections)
        for version, named in {**parameters.older(), parameters.ledger.newest: newest}.items():
            is_whole = version <= stage.whole_version
            if first <= version < saving.step and is_whole and version not in saving.versions:
                saving.versions[version] = {
                    name: self._copy(tensor) for name, tensor in named.items()
                }
                if corrections is not None:
                    saving.views.update(
                        (key, self._copy(view)) for key, view in corrections.views(version).items()
                    )

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
            result = [*written, self._fingerprints(saving.step, state)]
            flatten(result)  # what cannot be told is an error too
        except Exception as error:  # the top of a thread; the training goes on after any error
            result = str(error)
        self._tell(saving.position, result)

    def _write_replica(self, saving: _Saving, state: Snapshot) -> tuple[Any, ...]:
        """Write what this replica alone has; return what `write_stage` does."""
        stage = self._stage
        shards = stage.plan.shape.shards(stage.index)
        return write_replica(
            saving.folder,
            stage.address,
            len(stage.plan.addresses),
            replica_name(self._replica, self._count),
            {**saving.buffers, **saving.hidden},
            {k: v for k, v in state.steps.items() if shards or k.part in OF_REPLICAS},
            state.extra,
        )

    def _fingerprints(self, step: int, state: Snapshot) -> dict[str, Any]:
        """Return the fingerprints of the state that was written."""
        module, tensors = self._stage.module, {**state.weights, **state.hidden}
        buffers = [name for name, _ in module.named_buffers()]
        return fingerprints_of(
            stage_state.owned(self._stage, tensors),
            {name: tensors[name] for name in buffers if name in tensors},
            state.steps,
            state.versions,
            step,
            state.extra,
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
    # Micro-batches to come read no version older than `floor`, and the newest in the place of one
    # that is missing. `plain` has what the manifest itself keeps of stages, by the texts of keys.
    plan = stage.plan
    first = step * plan.per_update
    names = list(stage.parameters.named)
    slots = buffer_slots(stage.module)
    there = stage.module.state_dict()
    keys = [k for k, v in there.items() if k not in slots and isinstance(v, Tensor)]
    replica = plan.replica_of(stage.address)
    own_name = replica_name(replica, plan.replicas[stage.index]) if replica else ""
    others = [name for rule in stage.rules for name in rule.names]
    state = _read(Path(folder), files, keys, names, list(slots), plain, own_name, others)
    whole, older = True, {}
    for index, weights in [(stage.index, stage.parameters), *stage.weights.borrowed.items()]:
        read, of_owner = max(floor, plan.reads(index, first)), list(weights.named)
        versions = state.versions
        if index != stage.index:
            versions = _read(Path(folder), files, (), of_owner, (), plain).versions
        needed = range(read, step) if of_owner else range(0)
        if all(version in versions for version in needed):
            older[index] = {version: versions[version] for version in needed}
        else:
            whole, older[index] = False, {}
    extra = {key: value for key, value in state.extra.items() if key in there and key not in slots}
    for name in slots.keys() & state.extra.keys():  # where a forward had put None
        owner, _, short = name.rpartition(".")
        stage.module.get_submodule(owner)._buffers[short] = None
    own = older.pop(stage.index)
    stage_state.restore(stage, step, {**state.weights, **extra}, own, state.hidden, older)
    load = stage_state.load_step_state if with_optimizer else stage_state.load_totals
    with _usable(folder):
        load(stage, state.steps, step)
    # Without the optimizer no views are loaded: another one would have made others.
    stage.parameters.loaded = floor if with_optimizer else step
    corrections = stage.rule(Corrections)
    return whole and (corrections is None or not corrections.lacks_views())


def _read(folder: Path, *about: Any) -> Snapshot:
    """Read the state of a stage, and unpack it."""
    with _usable(folder):
        state = read_stage(folder, *about)
        return replace(state, extra={k: unpack_hyper(v) for k, v in state.extra.items()})


@contextmanager
def _usable(folder: object) -> Iterator[None]:
    """Turn errors of the body, which uses a checkpoint, into an error about the checkpoint."""
    try:
        yield
    except PipelineError:
        raise
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as e:
        raise CheckpointError(
            f"{folder} does not fit this pipeline: to load it raised {printable(repr(e))}; was it "
            "written by another version, or by another model?"
        ) from e
