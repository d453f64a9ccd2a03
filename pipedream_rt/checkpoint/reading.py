"""Finds, verifies and reads checkpoints."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import torch
from safetensors import SafetensorError
from torch import Tensor

from pipedream_rt.checkpoint.layout import (
    AS_PAIRS,
    EXTRA,
    EXTRA_OF_REPLICA,
    MANIFEST,
    checkpoints,
    digest_of,
    files_of,
    is_name,
    open_tensors,
    step_of,
)
from pipedream_rt.checkpoint.lock import restore_replaced_if_idle
from pipedream_rt.checkpoint.manifest import Manifest, read_manifest
from pipedream_rt.errors import CheckpointError
from pipedream_rt.messages.snapshot import Snapshot, Wanted
from pipedream_rt.messages.state_keys import OF_OPTIMIZERS, StateKey, StepState, by_key, parsed
from pipedream_rt.schema import list_of, printable, shown, text
from pipedream_rt.telling import log_of

_log = log_of(__name__)


def newest_good(path: Path, spare: Collection[Path] = ()) -> tuple[Path, Manifest]:
    """Find the checkpoint to load: `path` itself, or the newest whole one of a run."""
    try:
        if (path / MANIFEST).exists() or (is_name(path.name) and not checkpoints(path)):
            return path, verify(path)
        restore_replaced_if_idle(path)
        folders = checkpoints(path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
    reasons, run = [], None
    for folder in folders:
        if folder in spare:
            continue
        try:
            manifest = read_manifest(folder)
            run = manifest.run if run is None else run
            if folder.is_symlink() or manifest.step != step_of(folder):
                raise CheckpointError(
                    f"{folder} is no checkpoint of this run: it is a link, or was made as step "
                    f"{manifest.step}"
                )
            # An older one that another run left in the folder is no state of this run.
            if manifest.run != run:
                raise CheckpointError(f"{folder} is of another run than the newest one")
            _verify_files(folder, manifest)
            return folder, manifest
        except CheckpointError as error:
            _log.warning("%s; trying the one before", error)
            reasons.append(str(error))
    raise CheckpointError(
        f"there is no whole checkpoint in {path}" + "".join(f"; {reason}" for reason in reasons)
    )


def verify(folder: Path) -> Manifest:
    """Check every byte of a checkpoint against its checksums."""
    manifest = read_manifest(folder)
    _verify_files(folder, manifest)
    return manifest


def _verify_files(folder: Path, manifest: Manifest) -> None:
    """Check the files of a checkpoint against its manifest."""
    for name, (size, digest) in manifest.files.items():
        _verify_file(folder / name, size, digest)
    try:
        others = sorted(set(os.listdir(folder)) - {MANIFEST, *manifest.files})
    except OSError as error:  # it is being removed
        raise CheckpointError(f"{folder} cannot be read: {error.strerror}") from error
    if others:
        _log.warning(
            "%s has files that its manifest does not list, which are not read: %s", folder,
            printable(", ".join(others)),
        )  # fmt: skip


def _verify_file(path: Path, size: int, digest: bytes) -> None:
    """Check a file against the size in bytes and the checksum that its manifest has."""
    try:
        found = path.lstat().st_size
        if found != size:
            raise CheckpointError(f"{path} has {found} bytes, it was written with {size}")
        if digest_of(path) != digest:
            raise CheckpointError(
                f"{path} is damaged or was changed after it was written: its checksum differs"
            )
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error


def read_stage(
    folder: Path, files: Collection[str], plain: dict[str, Any], wanted: Wanted
) -> Snapshot:
    """Read the parts that a stage wants; ``plain`` has the manifest's values, by texts of keys."""

    def tensors(kind: str, wanted: Callable[[str], bool]) -> dict[str, Tensor]:
        return _tensors(files_of(folder, files, kind), wanted)

    def written_tensors(kind: str, wanted: Callable[[Parts], bool]) -> dict[Parts, Tensor]:
        found = _tensors(files_of(folder, files, kind), lambda text: wanted(parsed(text)))
        return {parsed(text): tensor for text, tensor in found.items()}

    values = by_key(plain)
    weights, buffers = set(wanted.weights), set(wanted.buffers)
    # What replica 0 (with the empty name) has is in the files of the stage.
    of_replica = written_tensors("replica", lambda key: key[0] == wanted.replica)
    both = (weights | buffers).__contains__
    there = tensors("model", both) | tensors("loss", both)
    there |= {str(name): tensor for (_, name), tensor in of_replica.items()}
    if missing := [key for key in wanted.weights if key not in there]:
        raise CheckpointError(f"{folder} has no weight {missing[0]!r}; is it of another model?")
    return Snapshot(
        weights={key: tensor for key, tensor in there.items() if key in weights},
        steps=_step_state(written_tensors, {*wanted.parameters, *wanted.others}, values),
        versions=_older_versions(written_tensors, set(wanted.versions)),
        extra={str(k.path[-1]): v for k, v in values.items() if k.part == EXTRA}
        | {
            str(k.path[-1]): v
            for k, v in values.items()
            if (k.part, k.name) == (EXTRA_OF_REPLICA, wanted.replica)
        },
        buffers={key: tensor for key, tensor in there.items() if key in buffers},
        hidden=tensors("buffers", buffers.__contains__),
    )


Parts: TypeAlias = tuple[str | int, ...]
"""The parts of a key."""

Written: TypeAlias = Callable[[str, Callable[[Parts], bool]], dict[Parts, Tensor]]
"""``tensors(kind, wanted)`` reads the tensors of a kind whose keys are wanted."""


def _step_state(tensors_of: Written, names: set[str], values: Mapping[StateKey, Any]) -> StepState:
    """The state for steps: under some names, under none (for all stages), and of optimizers."""

    def wanted(key: StateKey) -> bool:
        return key.name in names or not key.name or key.part in OF_OPTIMIZERS

    def named(parts: Parts) -> bool:
        return len(parts) > 1 and parts[1] in names

    found: StepState = {key: value for key, value in values.items() if wanted(key)}
    for kind in ("optimizer", "shard"):
        for (part, name, *path), tensor in tensors_of(kind, named).items():
            found[StateKey(str(part), str(name), tuple(path))] = tensor
    return found


def _older_versions(tensors_of: Written, parameters: set[str]) -> dict[int, dict[str, Tensor]]:
    """The older versions of parameters, by version and name."""
    versions: dict[int, dict[str, Tensor]] = {}
    found = tensors_of("versions", lambda parts: parts[-1] in parameters)
    for parts, tensor in found.items():
        if len(parts) != 2 or not isinstance(parts[0], int) or parts[0] < 0:
            raise CheckpointError(f"a file of versions has the key {shown(parts, 100)}")
        versions.setdefault(parts[0], {})[str(parts[1])] = tensor
    return versions


def shapes(folder: Path, files: Collection[str]) -> dict[str, tuple[int, ...]]:
    """Shapes of all weights in a checkpoint that was verified, those of the loss too, by key."""
    found = {}
    for path in (*files_of(folder, files, "model"), *files_of(folder, files, "loss")):
        with _opened(path) as file:
            pairs = _as_pairs(file)
            for key in file.keys():  # noqa: SIM118 - no dict
                shape = tuple(file.get_slice(key).get_shape())
                found[key] = shape[:-1] if key in pairs else shape
    return found


def keys_by_stage(folder: Path, files: Collection[str]) -> list[list[str]]:
    """Keys of the weights and buffers in a checkpoint that was verified, by stage."""
    found = []
    for path in files_of(folder, files, "model"):
        with _opened(path) as file:
            found.append(list(file.keys()))
    return found


def weights_of(folder: Path, files: Collection[str]) -> dict[str, Tensor]:
    """All weights and buffers of a checkpoint that was verified, by key of the unsplit model."""
    return _tensors(files_of(folder, files, "model"), lambda key: True)


_UNREADABLE = (
    OSError, SafetensorError, ValueError, TypeError, KeyError, OverflowError, RuntimeError,
)  # fmt: skip
"""The errors from a file without tensors, or with tensors that torch cannot make."""


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """Open a file of tensors."""
    try:
        with open_tensors(path) as file:
            yield file
    except _UNREADABLE as error:
        raise CheckpointError(f"{path} cannot be read: {printable(str(error))}") from error


def _tensors(paths: Sequence[Path], wanted: Callable[[str], bool]) -> dict[str, Tensor]:
    """The tensors whose keys are wanted, from the files of all stages."""
    found: dict[str, Tensor] = {}
    for path in paths:
        with _opened(path) as file:
            pairs = _as_pairs(file)
            for key in filter(wanted, file.keys()):
                tensor = file.get_tensor(key)
                found[key] = torch.view_as_complex(tensor) if key in pairs else tensor
    return found


def _as_pairs(file: Any) -> set[str]:
    """The keys of a file whose complex numbers are stored as pairs of real ones."""
    pairs = json.loads((file.metadata() or {}).get(AS_PAIRS, "[]"))
    if not list_of(text(1 << 12))(pairs):
        raise ValueError("what it says of its complex numbers is no list of keys")
    return set(pairs)
