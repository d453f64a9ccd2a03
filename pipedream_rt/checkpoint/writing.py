"""Writes checkpoints so that a folder with the name of one is always whole."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import threading
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from pipedream_rt.checkpoint.layout import (
    AS_PAIRS,
    BEING_REPLACED,
    EXTRA,
    EXTRA_OF_REPLICA,
    INDEX,
    MANIFEST,
    checkpoints,
    file_name,
    name_of,
    remove,
    size_and_digest,
    step_of,
    sync,
)
from pipedream_rt.checkpoint.manifest import Manifest, is_plain, read_manifest, seal
from pipedream_rt.errors import CheckpointError
from pipedream_rt.messages.snapshot import Snapshot
from pipedream_rt.messages.state_keys import StateKey, StepState, written
from pipedream_rt.schedules.placement import LOSS_LAYER
from pipedream_rt.telling import log_of

_log = log_of(__name__)


_PRIVATE_FILE, _PRIVATE_FOLDER = 0o600, 0o700
"""Modes of what is made, less the user's umask."""


class UnfinishedCheckpoint:
    """A checkpoint that is being written: a folder of a hidden name, until `commit`."""

    def __init__(self, root: Path, step: int) -> None:
        self._root = root
        self._final = root / name_of(step)
        self.folder = root / f".{self._final.name}.{os.getpid()}.part"
        try:
            root.mkdir(parents=True, exist_ok=True, mode=_PRIVATE_FOLDER)
            self.folder.mkdir(mode=_PRIVATE_FOLDER)
        except OSError as error:
            raise self._unwritable(error) from error

    def commit(self) -> Path:
        """Give the checkpoint its name, once all its files are written."""
        root, final = self._root, self._final
        try:
            # What has the name of a checkpoint must be on the disk, also after a power cut.
            sync(self.folder)
            if final.exists():
                old = root / f".{final.name}{BEING_REPLACED}"
                # Not removed yet: if the run dies between the renames, `give_back` finds it.
                final.rename(old)
                self.folder.rename(final)
                shutil.rmtree(old, ignore_errors=True)
            else:
                self.folder.rename(final)
            sync(root)
        except OSError as error:
            raise self._unwritable(error) from error
        return final

    def abandon(self) -> None:
        """Remove what was written. Does nothing after `commit`."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _unwritable(self, error: OSError) -> CheckpointError:
        """Make the error about a checkpoint that cannot be written."""
        return CheckpointError(f"the checkpoint {self._final} cannot be written: {error}")


def write_stage(
    folder: Path, stage: int, num_stages: int, state: Snapshot
) -> tuple[dict[str, list[Any]], dict[str, Any], dict[str, dict[str, int]]]:
    """Write and sync the files of one stage; return their entries for manifest and index."""
    moments, plain = _tensors_and_plain(state.steps)
    plain |= {str(StateKey(EXTRA, str(stage), (key,))): value for key, value in state.extra.items()}
    older = {
        written(version, name): tensor
        for version, named in state.versions.items()
        for name, tensor in named.items()
    }
    there = state.weights | state.buffers
    loss = {key: t for key, t in there.items() if key.startswith(f"{LOSS_LAYER}.")}
    kinds = {
        "model": {key: t for key, t in there.items() if key not in loss},
        "loss": loss, "optimizer": moments, "versions": older, "buffers": state.hidden,
    }  # fmt: skip
    files = _write_kinds(folder, kinds, stage, num_stages)
    of_model = file_name("model", stage, num_stages)
    weights = {of_model: {key: t.nbytes for key, t in kinds["model"].items()}}
    # Size in bytes and checksum, by file; what is no tensor, by text of key; bytes of each weight.
    return files, plain, weights if of_model in files else {}


def _write_kinds(
    folder: Path, kinds: dict[str, dict[str, Tensor]], number: int, count: int
) -> dict[str, list[Any]]:
    """Write a file for each kind of which there are tensors; return size and checksum, by name."""
    files = {}
    for kind, tensors in kinds.items():
        if tensors:
            path = folder / file_name(kind, number, count)
            write_tensors(path, tensors)
            files[path.name] = size_and_digest(path)
    return files


def write_replica(
    folder: Path,
    address: int,
    num_addresses: int,
    name: str,
    state: Snapshot,
) -> tuple[dict[str, list[Any]], dict[str, Any], dict[str, dict[str, int]]]:
    """Write and sync the buffers, extra state and steps of another replica than 0."""
    moments, plain = _tensors_and_plain(state.steps)
    plain |= {
        str(StateKey(EXTRA_OF_REPLICA, name, (address, key))): value
        for key, value in state.extra.items()
    }
    buffers = state.buffers | state.hidden
    own = {written(name, key): tensor for key, tensor in buffers.items()}
    kinds = {"replica": own, "shard": moments}
    return _write_kinds(folder, kinds, address, num_addresses), plain, {}


def _tensors_and_plain(steps: StepState) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Split a stage's state for its steps into tensors and other values, by texts of keys."""
    tensors: dict[str, Tensor] = {}
    plain: dict[str, Any] = {}
    for key, value in steps.items():
        if isinstance(value, Tensor):
            tensors[str(key)] = value
        elif is_plain(value):
            plain[str(key)] = value
        else:
            raise CheckpointError(
                f"the optimizer state {key.path[-1]!r} of {key.name} is a {type(value).__name__}; "
                "tensors, numbers, texts and lists of them can be saved"
            )
    return tensors, plain


def write_tensors(
    path: Path, tensors: dict[str, Tensor], texts: Mapping[str, str] | None = None
) -> None:
    """Write and sync one file of tensors, with texts about them."""
    # Under another name first: a recovery writes the same file again while the coordinator may be
    # reading this one.
    part = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    # safetensors has no complex128: such numbers are written as pairs.
    pairs = [key for key, tensor in tensors.items() if tensor.dtype is torch.complex128]
    tensors = {**tensors, **{key: torch.view_as_real(tensors[key]) for key in pairs}}
    metadata = {"format": "pt", **(texts or {})} | ({AS_PAIRS: json.dumps(pairs)} if pairs else {})
    try:
        save_file(tensors, part, metadata=metadata)
        sync(part)
        part.replace(path)
    except BaseException as error:  # also Ctrl-C: a best file lies where nobody clears up
        with suppress(OSError):
            part.unlink()
        if not isinstance(error, OSError | SafetensorError):
            raise
        raise CheckpointError(f"{path} cannot be written: {error}") from error


def write_manifest(folder: Path, manifest: Manifest, weights: dict[str, dict[str, int]]) -> None:
    """Write and sync manifest and index, which the manifest lists too."""
    missing = [name for name in manifest.files if not (folder / name).exists()]
    if missing:
        raise CheckpointError(
            f"{missing[0]} was written by its worker, but is not in {folder}; the folder must be "
            "one that all workers and the coordinator share"
        )
    index = {
        "metadata": {"total_size": sum(sum(sizes.values()) for sizes in weights.values())},
        "weight_map": {key: name for name, sizes in weights.items() for key in sizes},
    }
    try:
        text = json.dumps(index, indent=1, sort_keys=True) + "\n"
        _write_private(folder / INDEX, text.encode())
        manifest.files[INDEX] = size_and_digest(folder / INDEX)
        _write_private(folder / MANIFEST, seal(manifest))
        sync(folder / INDEX)
        sync(folder / MANIFEST)
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be written: {error}") from error


def _write_private(path: Path, data: bytes) -> None:
    """Write a file that nobody else can read, as safetensors makes those of the weights."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
    with open(os.open(path, flags, _PRIVATE_FILE), "wb") as file:
        file.write(data)


def prune(root: Path, keep: int, spare: Collection[Path] = ()) -> None:
    """Remove the checkpoints of a run, except the newest and those to spare."""
    for folder in checkpoints(root)[keep:]:
        if folder in spare:
            continue
        # Renamed first: a folder that is half removed must not look like a checkpoint.
        gone = folder.with_name(f".{folder.name}.gone.part")
        try:
            folder.rename(gone)
        except OSError as error:  # another process was quicker, or it is not ours to remove
            _log.warning("the old checkpoint %s cannot be removed: %s", folder, error)
        remove(gone)


def put_aside_others(root: Path, run: str) -> None:
    """Rename the checkpoints of other runs, so that this one neither replaces nor removes them."""
    for folder in checkpoints(root):
        try:
            other = read_manifest(folder).run
        except CheckpointError:
            other = ""
        if other == run:
            continue
        name = f"abandoned-{other[:8] or 'unknown'}-{folder.name}"
        names = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
        aside = next(a for n in names if not os.path.lexists(a := folder.with_name(n)))
        try:
            folder.rename(aside)
        except OSError as error:
            raise CheckpointError(
                f"{folder} is of another run and cannot be put aside: {error}"
            ) from error
        _log.warning("%s is of another run: it is put aside as %s", folder, aside.name)


def put_aside_later(root: Path, newest: Path) -> None:
    """Rename the checkpoints of later steps than the one written last."""
    # A run that went back to an earlier step has left them. A resume would take one of these.
    for folder in checkpoints(root):
        if step_of(folder) > step_of(newest):
            aside = folder.with_name(f"abandoned-{folder.name}")
            _log.warning("the run went back: %s is put aside as %s", folder, aside.name)
            try:
                shutil.rmtree(aside, ignore_errors=True)
                folder.rename(aside)
            except OSError as error:
                _log.warning("%s cannot be put aside: %s", folder, error)
