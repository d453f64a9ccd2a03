"""Checkpoints of a model that is not there, written as a run writes them."""

import contextlib

import torch

from pipedream_rt.checkpoint import (
    Manifest,
    UnfinishedCheckpoint,
    checkpoints,
    write_manifest,
    write_stage,
)
from pipedream_rt.messages.snapshot import Snapshot
from pipedream_rt.messages.state_keys import optimizer_state


@contextlib.contextmanager
def committing(root, step):
    part = UnfinishedCheckpoint(root, step)
    try:
        yield part.folder
        part.commit()
    finally:
        part.abandon()


SHARED = torch.arange(6.0).view(2, 3)


def state(stage, step):
    names = (f"{stage}.weight", f"{stage}.bias")
    return Snapshot(
        weights={
            names[0]: (SHARED.t() + step).contiguous(),
            names[1]: torch.zeros(0),
            f"{stage}.n": torch.tensor(step),
        },
        steps=optimizer_state({names[0]: {"m": SHARED * 2, "on": True, "none": None}}),
        versions={step - 1: {name: torch.ones(2) for name in names}},
    )  # fmt: skip


def write(root, step=7, stages=2, **changes):
    with committing(root, step) as part:
        files, plain, weights = {}, {}, {}
        for stage in range(stages):
            written = write_stage(part, stage, stages, state(stage, step))
            for whole, of_stage in zip((files, plain, weights), written):
                whole.update(of_stage)
        about = {"schedule": "async-1f1b", "workers": 2, "stages_per_worker": 1, "per_update": 1}
        manifest = Manifest(step=step, files=files, plain=plain, **about, **changes)
        write_manifest(part, manifest, weights)
    return checkpoints(root)[0]
