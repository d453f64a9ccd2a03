"""The manifest of a checkpoint: what it holds besides tensors in files, and a seal."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields
from hashlib import blake2b
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import msgpack
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from pipedream_rt import schema
from pipedream_rt.checkpoint.layout import MANIFEST, is_file_name
from pipedream_rt.errors import CheckpointError, ConfigError
from pipedream_rt.messages.state_keys import key_of
from pipedream_rt.packing import packb, unpackb

_MAGIC = "pipedream-rt checkpoint"
_FORMAT = 5

_LARGEST = 1 << 32
"""Bytes that a manifest may have; it holds the states of attached objects."""

_TENSOR = 1
"""Code of msgpack's extension for tensors."""


def _generator(value: Any) -> bool:
    """Whether a value can be the state of torch's generator on the host."""
    return isinstance(value, Tensor) and value.dtype is torch.uint8 and value.shape == (5056,)


def _run(value: Any) -> bool:
    """Whether a value can be the identity of a run."""
    return isinstance(value, str) and re.fullmatch("([0-9a-f]{32})?", value) is not None


def _is_key(value: Any) -> bool:
    """Whether a value is the text of a key."""
    try:
        key_of(value)
    except (TypeError, ValueError, AttributeError):
        return False
    return len(value) <= 1 << 12


def _generator_there(value: Any) -> bool:
    """Whether a value can be the state of the generator of an accelerator of any kind."""
    is_tensor = isinstance(value, Tensor) and value.dtype == torch.uint8 and value.dim() == 1
    return is_tensor and value.numel() <= _LARGEST_STATE


def _group(value: Any) -> bool:
    """Whether a value can be the packed hyper-parameters of a group."""
    return _VALUES(value) and "params" not in value


def _real(value: Any) -> bool:
    """Whether a value is a number, finite or not."""
    return type(value) in (int, float)


_NAME = schema.text(1 << 12)
_COUNT = schema.whole(0, 1 << 53)
_TWISTER = 624  # words of 32 bits in the state of the generators of Python and NumPy
_LARGEST_STATE = 1 << 16  # bytes; those of CUDA have 16
_GENERATORS = schema.fields(
    {
        "torch": _generator,
        "python": schema.row(
            schema.whole(3, 3),
            lambda v: schema.list_of(schema.whole(0, 2**32 - 1))(v) and len(v) == _TWISTER + 1,
            schema.maybe(schema.number),
        ),
        "numpy": schema.row(
            lambda v: v == "MT19937",
            schema.exactly(4 * _TWISTER),
            schema.whole(0, _TWISTER),
            schema.whole(0, 1),
            schema.number,
        ),
        "loader": schema.list_of(_generator),
        "devices": schema.list_of(_generator_there),
        "counted": schema.list_of(schema.mapping(_NAME, schema.whole(0, (1 << 63) - 1))),
    },
    optional=("devices", "counted"),
)
_BETWEEN_EPOCHS = schema.fields(
    {
        "epoch": _COUNT,
        "drawn": lambda v: v is None,
        "now": _GENERATORS,
        "loader": schema.anything,
        "warm": schema.truth,
    }
)
_WITHIN_AN_EPOCH = schema.fields(
    {
        "epoch": _COUNT,
        "drawn": _COUNT,
        "start": _GENERATORS,
        "before": _GENERATORS,
        "after": schema.maybe(_GENERATORS),
        "loader": schema.anything,
        "warm": schema.truth,
        "first": schema.maybe(schema.line(32)),
    },
    optional=("first",),
)


def _place(value: Any) -> bool:
    """Whether a value is a place of a loader; see `pipedream_rt.coordinator.feed.loading`."""
    return _BETWEEN_EPOCHS(value) or _WITHIN_AN_EPOCH(value)


_RESULT = schema.fields(
    {
        "step": _COUNT,
        "loss": _real,
        "losses": schema.list_of(_real),
        "versions": schema.list_of(_COUNT),
        "staleness": _COUNT,
        "busy_s": schema.list_of(_real),
        "processor_s": schema.list_of(_real),
        "process_s": schema.list_of(_real),
        "fingerprint": schema.maybe(schema.line(256)),
        "metrics": schema.mapping(schema.text(10_000), _real),
    },
    optional=("processor_s", "process_s", "fingerprint", "metrics"),
)


def _key(value: Any) -> bool:
    """Whether a value can be the key of a value: a name, or a place in a list."""
    return isinstance(value, str | int)


_VALUES = schema.mapping(_key, schema.anything)
# Its holder, which of the holders of that name, its key, its value, and its first one if known.
_OF_SCRIPT = schema.row(
    schema.text(1 << 16), _COUNT, _key, schema.anything, schema.list_of(schema.anything, 1)
)
_PARTS = {
    "seed": lambda v: type(v) is int,
    "optimizer": schema.line(1 << 12),
    "groups": schema.list_of(schema.list_of(_NAME)),
    "hyper_parameters": schema.list_of(
        schema.mapping(schema.line(1 << 12), lambda v: not isinstance(v, Tensor))
    ),
    "loss": schema.text(1 << 16),
    "schedule": schema.line(256),
    "corrections": schema.list_of(schema.text(1 << 16)),
    "codecs": schema.list_of(schema.text(1 << 16)),
    "threads": _COUNT,
    "torch": schema.line(256),
}
_IDENTITY = schema.fields(_PARTS, optional=_PARTS)
_MARK = schema.line(64)
_FINGERPRINT = schema.fields(
    {
        "version": _COUNT,
        "weights": _MARK,
        "buffers": _MARK,
        "optimizer": _MARK,
        "rest": schema.list_of(_MARK),
        "older": schema.mapping(lambda v: isinstance(v, str | int), _MARK),
    }
)
_FILES = schema.mapping(is_file_name, schema.row(_COUNT, schema.exactly(16)))
_PLAIN = schema.mapping(_is_key, schema.anything)

Count: TypeAlias = Annotated[int, _COUNT]


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """A checkpoint's record of itself.

    Attributes:
        step: Number of updates done, which is the number of the next mini-batch.
        per_update: Micro-batches per update.
        groups: Hyper-parameters of each parameter group, packed by `pack_hyper`.
        files: Size in bytes and checksum of each file, by name.
        plain: The plain values that stages keep, by the texts of their keys (`state_keys`).
        extra: The user's own data.
        floor: Oldest weight version that may be read: that of weights loaded in mid-run.
        passes: Number of micro-batches that were evaluated or inferred from so far.
        place: Where the loader was; see `pipedream_rt.coordinator.feed.loading`.
        attached: States of the objects given to `Pipeline.attach`, by name.
        results: Results of mini-batches before ``step`` that the script had not seen, as dicts.
        slack: Extra warm-up forwards before each hop; empty for none.
        identity: The options that a script must give again to go on; see
            `pipedream_rt.job.identity`.
        fingerprints: Those of each stage; see `pipedream_rt.stage.fingerprint`.
        run: Identity of the run that made it, drawn when the run began; empty if not known.
        values: The plain values that the script had changed; see `ScriptValues.kept`. None in a
            checkpoint of an older version, which has no modes either.
        training: The mode that all modules were set to (`Pipeline.train`); None if never.
        modes: By name, the modes of layers whose stage was set to one by itself after that.
        whole: Whether the loss is computed of whole mini-batches; None if that was not decided.
    """

    step: Count
    schedule: Annotated[str, schema.line(256)]
    workers: Annotated[int, schema.whole(1, 1 << 20)]
    stages_per_worker: Annotated[int, schema.whole(1, 1 << 20)]
    per_update: Annotated[int, schema.whole(1)]
    groups: list[Annotated[dict[str, Any], _group]] = field(default_factory=list)
    files: Annotated[dict[str, list[Any]], _FILES] = field(default_factory=dict)
    plain: Annotated[dict[str, Any], _PLAIN] = field(default_factory=dict)
    extra: Any = None
    floor: Count = 0
    passes: Count = 0
    place: Annotated[dict[str, Any] | None, schema.maybe(_place)] = None
    attached: dict[Annotated[str, _NAME], Any] = field(default_factory=dict)
    results: list[Annotated[dict[str, Any], _RESULT]] = field(default_factory=list)
    slack: list[Count] = field(default_factory=list)
    identity: Annotated[dict[str, Any], _IDENTITY] = field(default_factory=dict)
    fingerprints: list[Annotated[dict[str, Any], _FINGERPRINT]] = field(default_factory=list)
    run: Annotated[str, _run] = ""
    values: Annotated[list[list[Any]] | None, schema.maybe(schema.list_of(_OF_SCRIPT))] = None
    training: bool | None = None
    modes: dict[Annotated[str, _NAME], bool] | None = None
    whole: bool | None = None


_FIELDS = schema.checks_of(Manifest)
"""The fields of a manifest, each with the check that it must pass before it is used."""


def seal(manifest: Manifest) -> bytes:
    """Pack a manifest, with format and checksum, into the bytes of its file."""
    try:
        packed = _pack({f.name: getattr(manifest, f.name) for f in fields(manifest)})
    except (TypeError, ValueError, OverflowError) as error:
        raise CheckpointError(
            "extra, attached objects and loaders can hold numbers, texts, bytes, tensors, lists "
            f"and dicts: {error}"
        ) from error
    # Checked as a reader will check it: else the run would make checkpoints that nobody can load.
    if problem := schema.problem_of(_unpack(packed), _FIELDS):
        raise CheckpointError(f"the manifest was not written, as it would be unreadable: {problem}")
    return bytes(packb([_MAGIC, _FORMAT, packed, _checksum(packed)]))


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a checkpoint, and check all of it."""
    try:
        data = schema.read_file(folder / MANIFEST, _LARGEST, follow=False)
        magic, version, packed, checksum = unpackb(data)
        if magic != _MAGIC:
            raise ValueError("it is no manifest of pipedream-rt")
        if version != _FORMAT:
            raise CheckpointError(
                f"{folder} is a checkpoint of format {schema.shown(version, 20)}, this "
                f"version reads {_FORMAT}"
            )
        if _checksum(packed) != checksum:
            raise ValueError(
                "it is damaged or was changed after it was written: its checksum differs"
            )
        found = _unpack(packed)
        if not isinstance(found, dict):
            raise ValueError(f"it holds a {type(found).__name__} in place of a dict of fields")
        if unknown := [repr(key) for key in found if key not in _FIELDS]:
            raise ValueError(f"it has fields that no manifest has: {', '.join(unknown)}")
        if problem := schema.problem_of(found, _FIELDS):
            raise ValueError(problem)
        return Manifest(**found)
    except _UNREADABLE as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise CheckpointError(
            f"the manifest of {folder} cannot be used: {schema.printable(reason)}"
        ) from error


_UNREADABLE = (
    OSError, ValueError, TypeError, KeyError, RecursionError, SafetensorError,
    msgpack.UnpackException,
)  # fmt: skip
"""The errors from bytes that are no manifest."""


def refuse_unsaveable(name: str, value: Any) -> None:
    """Refuse a value that a manifest cannot hold."""
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
    """Pack a value; tensors are an extension, in the format of safetensors."""

    def default(odd: Any) -> msgpack.ExtType:
        if not isinstance(odd, Tensor):
            raise TypeError(f"a {type(odd).__name__}")
        return msgpack.ExtType(_TENSOR, save({"": odd.detach().contiguous()}))

    return bytes(packb(value, default=default))


def _unpack(data: bytes) -> Any:
    """Unpack a value that `_pack` packed."""

    def extension(code: int, data: bytes) -> Tensor:
        if code != _TENSOR:
            raise ValueError(f"an unknown extension {code}")
        return load(data)[""]

    return unpackb(data, ext_hook=extension, strict_map_key=False)
