"""Checkpoints on disk: their files, how they come into being whole, and how they are checked."""

from pipedream_rt.checkpoint.files import (
    Manifest,
    Part,
    StageState,
    checkpoints,
    newest_good,
    prune,
    put_aside_later,
    read_stage,
    refuse_unsaveable,
    shapes,
    verify,
    weights_of,
    write_manifest,
    write_stage,
)

__all__ = [
    "Manifest",
    "Part",
    "StageState",
    "checkpoints",
    "newest_good",
    "prune",
    "put_aside_later",
    "read_stage",
    "refuse_unsaveable",
    "shapes",
    "verify",
    "weights_of",
    "write_manifest",
    "write_stage",
]
