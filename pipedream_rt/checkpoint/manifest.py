"""The manifest of a checkpoint: what it holds besides tensors in files, and a seal."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from hashlib import blake2b
from pathlib import Path
from typing import Any

import msgpack
from safetensors.torch import load, save
from torch import Tensor

from pipedream_rt.checkpoint.layout import MANIFEST
from pipedream_rt.errors import CheckpointError, ConfigError

_MAGIC = "pipedream-rt checkpoint"
_FORMAT = 3

_TENSOR = 1
"""Code of msgpack's extension for tensors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a checkpoint says of itself.

    Attributes:
        step: Number of updates done, which is the number of the next mini-batch.
        schedule: Name of the schedule.
        workers: Number of workers.
        stages_per_worker: Number of stages that each worker hosts.
        per_update: Micro-batches per update.
        groups: Hyper-parameters of each parameter group, packed by `pack_hyper`.
        files: Size in bytes and checksum of each file, by name.
        plain: The optimizer state that is no tensor, by parameter and name.
        extra: The user's own data.
        floor: Oldest weight version that may be read: that of weights loaded in mid-run.
        passes: Number of micro-batches that were evaluated or inferred from so far.
        place: Where the loader was; see `pipedream_rt.coordinator.loading`.
        attached: States of the objects given to `Pipeline.attach`, by name.
        results: Results of mini-batches before ``step`` that the script had not seen, as dicts.
        slack: Extra warm-up forwards before each hop; empty for none.
        identity: What a script that goes on must give again; see
            `pipedream_rt.coordinator.identity`.
        fingerprints: The fingerprints of each stage; see `pipedream_rt.stage.fingerprint`.
    """

    step: int
    schedule: str
    workers: int
    stages_per_worker: int
    per_update: int
    groups: list[dict[str, Any]] = field(default_factory=list)
    files: dict[str, list[Any]] = field(default_factory=dict)
    plain: dict[str, dict[str, Any]] = field(default_factory=dict)
    extra: Any = None
    floor: int = 0
    passes: int = 0
    place: dict[str, Any] | None = None
    attached: dict[str, Any] = field(default_factory=dict)
    results: list[dict[str, Any]] = field(default_factory=list)
    slack: list[int] = field(default_factory=list)
    identity: dict[str, Any] = field(default_factory=dict)
    fingerprints: list[dict[str, Any]] = field(default_factory=list)


def seal(manifest: Manifest) -> bytes:
    """Pack a manifest, with format and checksum, into the bytes of its file.

    Raises:
        CheckpointError: The user's data in it cannot be packed.
    """
    try:
        packed = _pack({f.name: getattr(manifest, f.name) for f in fields(manifest)})
    except (TypeError, ValueError, OverflowError) as error:
        raise CheckpointError(
            "extra, attached objects and loaders can hold numbers, texts, bytes, tensors, lists "
            f"and dicts: {error}"
        ) from error
    return bytes(msgpack.packb([_MAGIC, _FORMAT, packed, _checksum(packed)]))


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a checkpoint.

    Args:
        folder: Folder of the checkpoint.

    Raises:
        CheckpointError: There is none, it is damaged, or this version cannot read its format.
    """
    try:
        magic, version, packed, checksum = msgpack.unpackb((folder / MANIFEST).read_bytes())
        if magic != _MAGIC:
            raise ValueError("it is no manifest of pipedream-rt")
        if version != _FORMAT:
            raise CheckpointError(
                f"{folder} is a checkpoint of format {version}, this version reads {_FORMAT}"
            )
        if _checksum(packed) != checksum:
            raise ValueError("its checksum does not fit")
        return Manifest(**_unpack(packed))
    except (OSError, ValueError, TypeError, msgpack.UnpackException) as error:
        raise CheckpointError(f"the manifest of {folder} cannot be used: {error}") from error


def refuse_unsaveable(name: str, value: Any) -> None:
    """Refuse a value that a manifest cannot hold.

    Args:
        name: What the value is the state of, for the message.
        value: The value.

    Raises:
        ConfigError: It holds more than numbers, texts, bytes, tensors, lists and dicts.
    """
    try:
        _pack(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise ConfigError(
            f"the state of {name} cannot go into a checkpoint, which holds numbers, texts, bytes, "
            f"tensors, lists and dicts: {error}"
        ) from error


def is_plain(value: Any) -> bool:
    """Whether a value is a number, a text, bytes, None, or a list or dict of these."""
    if isinstance(value, list):
        return all(map(is_plain, value))
    if isinstance(value, dict):
        return all(isinstance(k, str | int) for k in value) and all(map(is_plain, value.values()))
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        return False  # msgpack has no place for it
    return value is None or isinstance(value, bool | int | float | str | bytes)


def _checksum(packed: bytes) -> bytes:
    """Checksum of a packed manifest."""
    return blake2b(packed, digest_size=16).digest()


def _pack(value: Any) -> bytes:
    """Pack a value of a manifest."""

    def default(odd: Any) -> msgpack.ExtType:
        if not isinstance(odd, Tensor):
            raise TypeError(f"a {type(odd).__name__}")
        return msgpack.ExtType(_TENSOR, save({"": odd.detach().contiguous()}))

    return bytes(msgpack.packb(value, default=default))


def _unpack(data: bytes) -> Any:
    """Unpack a value that `_pack` has packed."""

    def extension(code: int, data: bytes) -> Tensor:
        if code != _TENSOR:
            raise ValueError(f"an unknown extension {code}")
        return load(data)[""]

    return msgpack.unpackb(data, ext_hook=extension, strict_map_key=False)
