"""Finds, verifies and reads checkpoints."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from pipedream_rt.checkpoint.layout import (
    AS_PAIRS,
    MANIFEST,
    checkpoints,
    digest_of,
    files_of,
    is_name,
)
from pipedream_rt.checkpoint.manifest import Manifest, read_manifest
from pipedream_rt.checkpoint.state import StageState
from pipedream_rt.errors import CheckpointError
from pipedream_rt.schedules.plan import EVERY_STAGE

_log = logging.getLogger(__name__)


def newest_good(path: Path) -> tuple[Path, Manifest]:
    """Find the checkpoint to load: the one given, or the newest of a run that is whole.

    Args:
        path: Folder of a checkpoint or of a run.

    Returns:
        Folder of the checkpoint, and its manifest.

    Raises:
        CheckpointError: There is no checkpoint, or none is whole.
    """
    if (path / MANIFEST).exists() or (is_name(path.name) and not checkpoints(path)):
        return path, verify(path)
    reasons = []
    for folder in checkpoints(path):
        try:
            return folder, verify(folder)
        except CheckpointError as error:
            _log.warning("%s; trying the one before", error)
            reasons.append(str(error))
    raise CheckpointError(
        f"there is no whole checkpoint in {path}" + "".join(f"; {reason}" for reason in reasons)
    )


def verify(folder: Path) -> Manifest:
    """Check every byte of a checkpoint against its checksums.

    Args:
        folder: Folder of the checkpoint.

    Returns:
        Its manifest.

    Raises:
        CheckpointError: It is not whole; the message says which file is wrong, and how.
    """
    manifest = read_manifest(folder)
    for name, (size, digest) in manifest.files.items():
        _verify_file(folder / name, size, digest)
    return manifest


def _verify_file(path: Path, size: int, digest: bytes) -> None:
    """Check a file against the size in bytes and the checksum that its manifest has.

    Raises:
        CheckpointError: The file is not what was written.
    """
    try:
        found = path.stat().st_size
        if found != size:
            raise CheckpointError(f"{path} has {found} bytes, it was written with {size}")
        if digest_of(path) != digest:
            raise CheckpointError(f"{path} was changed: its checksum does not fit")
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error


def read_stage(
    folder: Path,
    weights: Sequence[str],
    parameters: Sequence[str],
    buffers: Sequence[str],
    plain: dict[str, Any],
) -> StageState:
    """Read the state of a stage, whichever files it is in.

    The stages need not be those that wrote the checkpoint.

    Args:
        folder: Folder of a checkpoint that was verified.
        weights: Keys of the stage's state dict, all of which must be there.
        parameters: Names of the stage's trainable parameters.
        buffers: Names of the stage's buffers. They come as ``hidden``, also those that are in a
            state dict.
        plain: The optimizer state that is no tensor, from the manifest.

    Returns:
        The state. It has an older weight version only if that has all of the stage's parameters.

    Raises:
        CheckpointError: A weight is missing.
    """
    buffered = set(buffers).__contains__
    mine = set(weights).__contains__
    found = _tensors(folder, "model", mine) | _tensors(folder, "loss", mine)
    missing = [key for key in weights if key not in found]
    if missing:
        raise CheckpointError(f"{folder} has no weight {missing[0]!r}; is it of another model?")
    return StageState(
        weights=found,
        optimizer=_optimizer_state(folder, parameters, plain),
        versions=_older_versions(folder, set(parameters)),
        extra={
            key: value
            for name, values in plain.items()
            if name.startswith(f"{EVERY_STAGE}extra/")
            for key, value in values.items()
        },
        hidden=_tensors(folder, "buffers", buffered)
        | _tensors(folder, "model", buffered)
        | _tensors(folder, "loss", buffered),
    )


def _optimizer_state(
    folder: Path, parameters: Sequence[str], plain: dict[str, Any]
) -> dict[str, dict[str, Any]]:
    """Optimizer state of some parameters, by parameter and name; and that of the optimizers."""
    own = tuple(f"{EVERY_STAGE}{kind}/" for kind in ("group", "attributes", "state"))
    mine = {*parameters, *(name for name in plain if name.startswith(own))}
    state = {name: dict(plain[name]) for name in mine if name in plain}
    tensors = _tensors(folder, "optimizer", lambda key: key.rpartition("/")[0] in mine)
    for key, tensor in tensors.items():
        parameter, _, name = key.rpartition("/")
        state.setdefault(parameter, {})[name] = tensor
    return state


def _older_versions(folder: Path, parameters: set[str]) -> dict[int, dict[str, Tensor]]:
    """The older weight versions that have all of some parameters, by version and name."""
    versions: dict[int, dict[str, Tensor]] = {}
    tensors = _tensors(folder, "versions", lambda key: key.partition("/")[2] in parameters)
    for key, tensor in tensors.items():
        version, _, name = key.partition("/")
        versions.setdefault(int(version), {})[name] = tensor
    return {v: named for v, named in versions.items() if named.keys() == parameters}


def shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Shapes of all weights in a checkpoint that was verified, those of the loss too, by key.

    Args:
        folder: Folder of the checkpoint.
    """
    found = {}
    for path in (*files_of(folder, "model"), *files_of(folder, "loss")):
        with safe_open(path, framework="pt") as file:
            pairs = _as_pairs(file)
            for key in file.keys():  # noqa: SIM118 - no dict
                shape = tuple(file.get_slice(key).get_shape())
                found[key] = shape[:-1] if key in pairs else shape
    return found


def weights_of(folder: Path) -> dict[str, Tensor]:
    """All weights and buffers of a checkpoint that was verified, by key of the unsplit model.

    Args:
        folder: Folder of the checkpoint.
    """
    return _tensors(folder, "model", lambda key: True)


def _tensors(folder: Path, kind: str, wanted: Callable[[str], bool]) -> dict[str, Tensor]:
    """The tensors of one kind whose keys are wanted, from the files of all stages."""
    found: dict[str, Tensor] = {}
    for path in files_of(folder, kind):
        with safe_open(path, framework="pt") as file:
            pairs = _as_pairs(file)
            for key in filter(wanted, file.keys()):
                tensor = file.get_tensor(key)
                found[key] = torch.view_as_complex(tensor) if key in pairs else tensor
    return found


def _as_pairs(file: Any) -> list[str]:
    """The keys of a file whose complex numbers stand there as pairs of real ones."""
    return list(json.loads((file.metadata() or {}).get(AS_PAIRS, "[]")))
