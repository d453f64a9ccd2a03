"""The layout of checkpoints on disk, and how files and folders are named, synced and digested.

A run's folder holds a folder for each checkpoint::

    run/step-00000100/
        model-00001-of-00004.safetensors ...    weights and buffers, keys of the unsplit model
        model.safetensors.index.json            which key is in which file, as in Hugging Face's
                                                format
        loss-00004-of-00004.safetensors         weights of a loss that has some
        optimizer-00001-of-00004.safetensors    what optimizer and rules keep, by the texts of keys
                                                (`messages/state_keys.py`), such as
                                                "optimizer/PARAMETER/NAME"
        versions-00001-of-00004.safetensors     ...  "#VERSION/PARAMETER": older weights that later
                                                micro-batches of an asynchronous schedule read
        buffers-00001-of-00004.safetensors      buffers that are in no state dict
        replica-00002-of-00004.safetensors      "1 of 2/NAME": the buffers of replica 1 of a stage
        shard-00002-of-00004.safetensors        as optimizer: the part that this replica steps
        manifest.msgpack                        everything else, and a checksum of each file

Each worker writes the files of its stages. Of the replicas of a stage, replica 0 writes them; the
others write only their buffers, and their part of a divided optimizer. The numbers in names count
stages, or addresses in the files of those others. The coordinator writes index and manifest last.
All write into a folder of another name, which gets its own by one rename when everything is on the
disk. So a folder of that name is always a whole checkpoint. Nothing in it is pickled.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any

from safetensors import safe_open

from pipedream_rt.schema import open_file

MANIFEST = "manifest.msgpack"
INDEX = "model.safetensors.index.json"

AS_PAIRS = "complex128 as pairs"
"""Metadata of a file of tensors: a JSON list of the keys whose complex numbers stand there as pairs
of real ones, along a last dimension."""

EXTRA, EXTRA_OF_REPLICA = "extra", "extra-of-replica"
"""The parts of keys in a manifest for plain values that modules give by ``get_extra_state``: of a
stage, by its number, or of a replica, by its name."""

BEING_REPLACED = ".old.part"
"""The end of the hidden name that a checkpoint has while another one takes its place."""

_TENSORS = re.compile(
    r"(model|loss|optimizer|versions|buffers|replica|shard)-\d{5,}-of-\d{5,}\.safetensors"
)
_CHECKPOINT = re.compile(r"step-\d{8,}")


def name_of(step: int) -> str:
    """Name of the folder of a checkpoint, by the number of updates done."""
    return f"step-{step:08d}"


def is_name(name: str) -> bool:
    """Whether a folder of this name would be a checkpoint."""
    return _CHECKPOINT.fullmatch(name) is not None


def file_name(kind: str, stage: int, num_stages: int) -> str:
    """Name of the file with one kind of tensors of a stage, or, by address, of a replica."""
    return f"{kind}-{stage + 1:05d}-of-{num_stages:05d}.safetensors"


def files_of(folder: Path, files: Iterable[str], kind: str) -> list[Path]:
    """Files with one kind of tensors, in the order of stages."""
    # Only of those that the manifest lists: a file that was put beside them is never read.
    return [folder / name for name in sorted(files) if name.startswith(f"{kind}-")]


def is_file_name(name: Any) -> bool:
    """Whether a value can be the name of a file that a manifest lists."""
    return isinstance(name, str) and (name == INDEX or _TENSORS.fullmatch(name) is not None)


def checkpoints(root: Path) -> list[Path]:
    """List the checkpoints of a run, newest first; they are not verified."""
    if not root.is_dir():
        return []
    # A folder with another name, as the user's copy step-00000200-best, is none.
    return sorted((f for f in root.iterdir() if is_name(f.name)), key=step_of, reverse=True)


def step_of(folder: Path) -> int:
    """Step of a checkpoint, by the name of its folder."""
    return int(folder.name.removeprefix("step-"))


def give_back(root: Path) -> None:
    """Rename back a checkpoint that was being replaced when its run died. Only under the lock."""
    for left in root.glob(f".step-*{BEING_REPLACED}"):
        whole = root / left.name.removeprefix(".").removesuffix(BEING_REPLACED)
        if not whole.exists():
            with suppress(OSError):  # a folder that can only be read
                left.rename(whole)


def remove_parts(root: Path) -> None:
    """Remove the leftovers of a run that died while it wrote or pruned. Only under the lock."""
    # After `give_back`: a whole checkpoint that was being replaced has such a name too.
    for left in root.glob(".step-*.part"):
        remove(left)


def remove(path: Path) -> None:
    """Remove a folder, or a file or link in its place; what cannot be removed stays."""
    if path.is_symlink() or not path.is_dir():
        with suppress(OSError):
            path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)


def size_and_digest(path: Path) -> list[int | bytes]:
    """Size of a file in bytes and its checksum, as a manifest lists them."""
    return [path.stat().st_size, digest_of(path)]


def digest_of(path: Path) -> bytes:
    """Checksum of a file, 16 bytes of BLAKE2b; it must be an ordinary file."""
    digest = blake2b(digest_size=16)
    with open_file(path, follow=False) as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.digest()


@contextmanager
def open_tensors(path: Path, *, follow: bool = False) -> Iterator[Any]:
    """Open a file of safetensors, which must be an ordinary file; ``follow``: or a link to one."""
    with open_file(path, follow=follow) as file:
        # By its descriptor, as the path may lead to another file by now.
        opened = f"/proc/self/fd/{file.fileno()}"
        # Safetensors opens the file twice, and reports a damaged one if descriptors run out: so two
        # are tried here, which fails with the true reason.
        with open_file(opened), open_file(opened):
            pass
        with safe_open(opened, framework="pt") as tensors:
            yield tensors


def sync(path: Path) -> None:
    """Wait until a file or a folder is on the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
