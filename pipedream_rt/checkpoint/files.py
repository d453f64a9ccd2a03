"""The files of a checkpoint.

A run's folder holds a folder for each checkpoint::

    run/step-00000100/
        model-00001-of-00004.safetensors ...    weights and buffers, keys of the unsplit model
        model.safetensors.index.json            which key is where, as Hugging Face has it
        optimizer-00001-of-00004.safetensors    ...  "PARAMETER/NAME" of each tensor of its state
        versions-00001-of-00004.safetensors     ...  "VERSION/PARAMETER": what later micro-batches
                                                still read in an asynchronous schedule
        buffers-00001-of-00004.safetensors      buffers that are in no state dict
        manifest.msgpack                        everything else, and a checksum of each file

Each worker writes the files of its stages; the coordinator writes manifest and index last, into a
folder with another name, which gets its own by one rename when all is on the disk. So there is
either a whole checkpoint of a name, or none. Nothing here is pickled.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import threading
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from hashlib import blake2b
from pathlib import Path
from typing import Any

import msgpack
from safetensors import SafetensorError, safe_open
from safetensors.torch import load, save, save_file
from torch import Tensor

from pipedream_rt.errors import CheckpointError, ConfigError

_log = logging.getLogger(__name__)

_MAGIC = "pipedream-rt checkpoint"
_FORMAT = 2
_MANIFEST = "manifest.msgpack"
_INDEX = "model.safetensors.index.json"
_NAME = "step-{:08d}"
_OLD = ".old.part"
_IS_ONE = re.compile(r"step-\d{8,}")


@dataclass(frozen=True, slots=True, kw_only=True)
class StageState:
    """What a stage has after an update, as if nothing were in flight. The tensors are its own.

    Attributes:
        weights: Its state dict, newest version, under the keys of the unsplit model.
        optimizer: State of each parameter, by name.
        versions: Older weight versions that micro-batches to come read: trainable weights by name.
        hidden: Buffers that are in no state dict, by name.
    """

    weights: dict[str, Tensor]
    optimizer: dict[str, dict[str, Any]]
    versions: dict[int, dict[str, Tensor]]
    hidden: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a checkpoint says of itself.

    Attributes:
        step: Updates done; the next mini-batch has this number.
        schedule: Name.
        workers, stages_per_worker, per_update: Its shape.
        groups: Plain hyper-parameters of each parameter group.
        files: Size and checksum of each file, by name.
        plain: By parameter, what of its optimizer state is no tensor.
        extra: The user's own.
        floor: Oldest weight version that may be read: that of weights loaded in mid-run.
        passes: Micro-batches that were evaluated or inferred from so far.
        place: Where the loader was; see `pipedream_rt.coordinator.loading`.
        attached: States of the objects given to `Pipeline.attach`, by name.
        results: Results of mini-batches before ``step`` that the script had not seen, as dicts.
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


# -- writing ------------------------------------------------------------------------------------


class Part:
    """A checkpoint on its way to the disk: a folder of another name, until `commit`.

    Args:
        root: Folder of the run; made if it is not there.
        step: Of the checkpoint; one of the same step is replaced.

    Attributes:
        folder: To write into.

    Raises:
        CheckpointError: The folder cannot be made.
    """

    def __init__(self, root: Path, step: int) -> None:
        """Make the folder; tidy up what a dead run has left."""
        self._root = root
        self._final = root / _NAME.format(step)
        self.folder = root / f".{self._final.name}.{os.getpid()}.part"
        try:
            root.mkdir(parents=True, exist_ok=True)
            _tidy(root)
            self.folder.mkdir()
        except OSError as error:
            raise self._unwritable(error) from error

    def commit(self) -> Path:
        """Let the checkpoint appear under its name, whole.

        Raises:
            CheckpointError: It cannot; what was there before stays.
        """
        root, final = self._root, self._final
        try:
            _sync(self.folder)
            if final.exists():
                old = root / f".{final.name}{_OLD}"
                final.rename(old)
                self.folder.rename(final)
                shutil.rmtree(old, ignore_errors=True)
            else:
                self.folder.rename(final)
            _sync(root)
        except OSError as error:
            raise self._unwritable(error) from error
        return final

    def abandon(self) -> None:
        """Remove what was written. Does nothing after `commit`."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _unwritable(self, error: OSError) -> CheckpointError:
        return CheckpointError(f"the checkpoint {self._final} cannot be written: {error}")


def _tidy(root: Path) -> None:
    """Remove what a run left that died while it wrote; give back what it was replacing."""
    _give_back(root)
    for left in root.glob(".step-*.part"):
        shutil.rmtree(left, ignore_errors=True)


def _give_back(root: Path) -> None:
    """Give a checkpoint its name again that was being replaced when a run died."""
    for left in root.glob(f".step-*{_OLD}"):
        whole = root / left.name.removeprefix(".").removesuffix(_OLD)
        if not whole.exists():
            with suppress(OSError):  # a folder that can only be read
                left.rename(whole)


def write_stage(
    folder: Path, stage: int, num_stages: int, state: StageState
) -> tuple[dict[str, list[Any]], dict[str, dict[str, Any]], dict[str, dict[str, int]]]:
    """Write the files of one stage, to the disk.

    Args:
        folder: Of the checkpoint; there already.
        stage: Index.
        num_stages: How many there are.
        state: What to write.

    Returns:
        Size and checksum of each file by name; what of the optimizer state is no tensor; the bytes
        of each weight, by file and key.

    Raises:
        CheckpointError: It cannot be written, or holds what has no place in such a file.
    """
    plain: dict[str, dict[str, Any]] = {}
    moments: dict[str, Tensor] = {}
    for parameter, values in state.optimizer.items():
        for name, value in values.items():
            if isinstance(value, Tensor):
                moments[f"{parameter}/{name}"] = value
            elif is_plain(value):
                plain.setdefault(parameter, {})[name] = value
            else:
                raise CheckpointError(
                    f"the optimizer state {name!r} of {parameter} is a {type(value).__name__}; "
                    "tensors, numbers, texts and lists of them can be saved"
                )
    older = {f"{v}/{name}": t for v, named in state.versions.items() for name, t in named.items()}
    found, weights = {}, {}
    kinds = {
        "model": state.weights, "optimizer": moments, "versions": older, "buffers": state.hidden
    }  # fmt: skip
    for kind, tensors in kinds.items():
        if not tensors:
            continue
        name = f"{kind}-{stage + 1:05d}-of-{num_stages:05d}.safetensors"
        # By another name first: after a recovery the same part is written once more, and the
        # coordinator may be reading this one.
        part = folder / f".{name}.{os.getpid()}.{threading.get_ident()}"
        try:
            save_file(tensors, part, metadata={"format": "pt"})
            _sync(part)
            part.replace(folder / name)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{folder / name} cannot be written: {error}") from error
        found[name] = [(folder / name).stat().st_size, _digest(folder / name)]
        if kind == "model":
            weights[name] = {key: t.nbytes for key, t in tensors.items()}
    return found, plain, weights


def write_manifest(folder: Path, manifest: Manifest, weights: dict[str, dict[str, int]]) -> None:
    """Write manifest and index.

    Args:
        folder: Of the checkpoint.
        manifest: Without the index among its files, which is added.
        weights: Bytes of each weight, by file and key.

    Raises:
        CheckpointError: Some of the files are not there, or ``extra`` cannot be written.
    """
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
        _write_manifest(folder, manifest, index)
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be written: {error}") from error


def _write_manifest(folder: Path, manifest: Manifest, index: dict[str, Any]) -> None:
    """Write the two files."""
    (folder / _INDEX).write_text(json.dumps(index, indent=1, sort_keys=True) + "\n")
    manifest.files[_INDEX] = [(folder / _INDEX).stat().st_size, _digest(folder / _INDEX)]
    try:
        packed = _pack({f.name: getattr(manifest, f.name) for f in fields(manifest)})
    except (TypeError, ValueError, OverflowError) as error:
        raise CheckpointError(
            "extra, attached objects and loaders can hold numbers, texts, bytes, tensors, lists "
            f"and dicts: {error}"
        ) from error
    seal = blake2b(packed, digest_size=16).digest()
    (folder / _MANIFEST).write_bytes(msgpack.packb([_MAGIC, _FORMAT, packed, seal]))
    _sync(folder / _INDEX)
    _sync(folder / _MANIFEST)


def prune(root: Path, keep: int, spare: Collection[Path] = ()) -> None:
    """Remove the oldest checkpoints of a run.

    Args:
        root: Folder of the run.
        keep: How many stay.
        spare: Others that stay.
    """
    for folder in checkpoints(root)[keep:]:
        if folder in spare:
            continue
        # Renamed first: what is half removed must not look like a checkpoint.
        gone = folder.with_name(f".{folder.name}.gone.part")
        try:
            folder.rename(gone)
        except OSError as error:  # somebody else was quicker, or it is not ours to remove
            _log.warning("the old checkpoint %s cannot be removed: %s", folder, error)
        shutil.rmtree(gone, ignore_errors=True)


def put_aside_later(root: Path, newest: Path) -> None:
    """Rename checkpoints of later steps than the one just written: the run had gone back.

    Else a resume would take one of them, which belongs to what was given up.
    """
    for folder in checkpoints(root):
        if folder.name > newest.name:
            aside = folder.with_name(f"abandoned-{folder.name}")
            _log.warning("the run went back: %s is put aside as %s", folder, aside.name)
            try:
                shutil.rmtree(aside, ignore_errors=True)
                folder.rename(aside)
            except OSError as error:
                _log.warning("%s cannot be put aside: %s", folder, error)


# -- reading ------------------------------------------------------------------------------------


def checkpoints(root: Path) -> list[Path]:
    """The checkpoints of a run, newest first; not verified.

    One that was being replaced when a run died gets its name again.
    """
    _give_back(root)
    return sorted(root.glob("step-[0-9]*"), key=lambda folder: folder.name, reverse=True)


def newest_good(path: Path) -> tuple[Path, Manifest]:
    """Find what to load: the checkpoint itself, or the newest of a run that is whole.

    Args:
        path: Folder of a checkpoint or of a run.

    Raises:
        CheckpointError: There is none, or none is whole.
    """
    if (path / _MANIFEST).exists() or (_IS_ONE.fullmatch(path.name) and not checkpoints(path)):
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

    Returns:
        Its manifest.

    Raises:
        CheckpointError: It is not whole; the message says what is wrong.
    """
    try:
        magic, version, packed, seal = msgpack.unpackb((folder / _MANIFEST).read_bytes())
        if magic != _MAGIC:
            raise ValueError("it is no manifest of pipedream-rt")
        if version != _FORMAT:
            raise CheckpointError(
                f"{folder} is a checkpoint of format {version}, this version reads {_FORMAT}"
            )
        if blake2b(packed, digest_size=16).digest() != seal:
            raise ValueError("its checksum does not fit")
        manifest = Manifest(**_unpack(packed))
    except (OSError, ValueError, TypeError, msgpack.UnpackException) as error:
        raise CheckpointError(f"the manifest of {folder} cannot be used: {error}") from error
    for name, (size, digest) in manifest.files.items():
        path = folder / name
        try:
            found = path.stat().st_size
            if found != size:
                raise CheckpointError(f"{path} has {found} bytes, it was written with {size}")
            if _digest(path) != digest:
                raise CheckpointError(f"{path} was changed: its checksum does not fit")
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    return manifest


def read_stage(
    folder: Path,
    weights: Sequence[str],
    parameters: Sequence[str],
    buffers: Sequence[str],
    plain: dict[str, Any],
) -> StageState:
    """Read what a stage needs, whichever files it is in.

    Args:
        folder: Of a checkpoint that was verified.
        weights: Keys of its state dict that must be there.
        parameters: Names of its trainable parameters.
        buffers: Names of its buffers, which come as ``hidden`` whether they are in a state dict.
        plain: Of the manifest.

    Returns:
        The state; versions are there only if all of the stage's parameters are.

    Raises:
        CheckpointError: A weight is missing.
    """
    mine = set(parameters)
    buffered = set(buffers).__contains__
    state = StageState(
        weights=_tensors(folder, "model", set(weights).__contains__),
        optimizer={name: dict(plain[name]) for name in parameters if name in plain},
        versions={},
        hidden=_tensors(folder, "buffers", buffered) | _tensors(folder, "model", buffered),
    )
    missing = [key for key in weights if key not in state.weights]
    if missing:
        raise CheckpointError(f"{folder} has no weight {missing[0]!r}; is it of another model?")
    moments = _tensors(folder, "optimizer", lambda key: key.rpartition("/")[0] in mine)
    for key, tensor in moments.items():
        parameter, _, name = key.rpartition("/")
        state.optimizer.setdefault(parameter, {})[name] = tensor
    older = _tensors(folder, "versions", lambda key: key.partition("/")[2] in mine)
    for key, tensor in older.items():
        version, _, name = key.partition("/")
        state.versions.setdefault(int(version), {})[name] = tensor
    for number in [v for v, named in state.versions.items() if named.keys() != mine]:
        del state.versions[number]
    return state


def shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """The shape of every weight in a checkpoint that was verified."""
    found = {}
    for path in sorted(folder.glob("model-*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118 - no dict
                found[key] = tuple(file.get_slice(key).get_shape())
    return found


def weights_of(folder: Path) -> dict[str, Tensor]:
    """All weights and buffers of a checkpoint that was verified, by key of the unsplit model."""
    return _tensors(folder, "model", lambda key: True)


def _tensors(folder: Path, kind: str, wanted: Any) -> dict[str, Tensor]:
    """The tensors of one kind of file whose keys are wanted."""
    found: dict[str, Tensor] = {}
    for path in sorted(folder.glob(f"{kind}-*.safetensors")):
        with safe_open(path, framework="pt") as file:
            found.update({key: file.get_tensor(key) for key in file.keys() if wanted(key)})  # noqa: SIM118
    return found


_TENSOR = 1
"""Code of msgpack's extension for tensors."""


def _pack(value: Any) -> bytes:
    """Write what a manifest holds."""

    def default(odd: Any) -> msgpack.ExtType:
        if not isinstance(odd, Tensor):
            raise TypeError(f"a {type(odd).__name__}")
        return msgpack.ExtType(_TENSOR, save({"": odd.detach().contiguous()}))

    return bytes(msgpack.packb(value, default=default))


def _unpack(data: bytes) -> Any:
    """Read what `_pack` wrote."""

    def extension(code: int, data: bytes) -> Tensor:
        if code != _TENSOR:
            raise ValueError(f"an unknown extension {code}")
        return load(data)[""]

    return msgpack.unpackb(data, ext_hook=extension, strict_map_key=False)


def refuse_unsaveable(name: str, value: Any) -> None:
    """Refuse what a manifest cannot hold.

    Raises:
        ConfigError: It holds more than numbers, texts, bytes, lists and dicts.
    """
    try:
        _pack(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise ConfigError(
            f"the state of {name} cannot go into a checkpoint, which holds numbers, texts, bytes, "
            f"tensors, lists and dicts: {error}"
        ) from error


def is_plain(value: Any) -> bool:
    """Whether msgpack gives a value back as it was."""
    if isinstance(value, list):
        return all(map(is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)


def _digest(path: Path) -> bytes:
    """Checksum of a file."""
    digest = blake2b(digest_size=16)
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.digest()


def _sync(path: Path) -> None:
    """Have a file or a folder on the disk before going on."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
