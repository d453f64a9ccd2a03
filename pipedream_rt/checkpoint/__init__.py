"""Checkpoints on disk: their files, how they come into being whole, and how they are checked."""

from pipedream_rt.checkpoint.files import (
    Manifest,
    StageState,
    checkpoints,
    committing,
    newest_good,
    prune,
    read_stage,
    shapes,
    verify,
    write_manifest,
    write_stage,
)

__all__ = [
    "Manifest",
    "StageState",
    "checkpoints",
    "committing",
    "newest_good",
    "prune",
    "read_stage",
    "shapes",
    "verify",
    "write_manifest",
    "write_stage",
]
