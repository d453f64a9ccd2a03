"""Checkpoints on disk: how they are written whole, found, verified and read."""

from pipedream_rt.checkpoint.layout import checkpoints
from pipedream_rt.checkpoint.lock import RunLock
from pipedream_rt.checkpoint.manifest import Manifest, read_manifest, refuse_unsaveable
from pipedream_rt.checkpoint.reading import newest_good, read_stage, shapes, verify, weights_of
from pipedream_rt.checkpoint.writing import (
    UnfinishedCheckpoint,
    prune,
    put_aside_later,
    put_aside_others,
    write_manifest,
    write_replica,
    write_stage,
)

__all__ = [
    "Manifest",
    "RunLock",
    "UnfinishedCheckpoint",
    "checkpoints",
    "newest_good",
    "prune",
    "put_aside_later",
    "put_aside_others",
    "read_manifest",
    "read_stage",
    "refuse_unsaveable",
    "shapes",
    "verify",
    "weights_of",
    "write_manifest",
    "write_replica",
    "write_stage",
]
