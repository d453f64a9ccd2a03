"""A worker that dies after the step of an update, and before the update is applied.

Its norm, or its gradients, have gone to others by then, who may have applied the update.
"""

import pytest
import torch
import torch.nn.functional as F
from support.faults import FaultyAdamW, Plan
from support.oracle import assert_same
from support.pinned import Pipeline
from torch import nn

from pipedream_rt import Checkpoints, Clip, LossScale, Training
from pipedream_rt import Pipeline as Plain
from pipedream_rt.corrections import Extrapolation, WeightPrediction

NORM = Clip(norm=0.05)
SYNC = {"schedule": "async-1f1b+vertical-sync"}
CASES = {
    "exact": {**SYNC, "clip": NORM},
    "exact, two micro-batches": {**SYNC, "clip": NORM, "micro_batches": 2},
    "exact, in a schedule that flushes": {"schedule": "1f1b", "clip": NORM, "micro_batches": 2},
    "delayed": {"clip": NORM},
    "exact, with a tie": {**SYNC, "clip": NORM, "tie": True},
    "delayed, with a tie": {"clip": NORM, "tie": True, "micro_batches": 2},
    "replicas without a micro-batch": {"replicas": (3, 1, 2), "micro_batches": 2},
    "replicas that flush, exact": {
        "schedule": "1f1b", "replicas": (3, 1, 2), "micro_batches": 2, "clip": NORM
    },
}  # fmt: skip


def model(tie):
    """Three stages with different numbers of own parameters."""
    torch.manual_seed(5)
    layers = [
        nn.Embedding(7, 6), nn.Linear(6, 6), nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 6),
        nn.Dropout(0.1), nn.Linear(6, 7, bias=False),
    ]  # fmt: skip
    if tie:
        layers[-1].weight = layers[0].weight
    sizes = [7 * 6 + 42, 56 + 16, 54 + (0 if tie else 42)]
    return nn.Sequential(*layers), ["2", "4"], sizes


def trained(case, folder, faults, workers, **more):
    options = dict(case)
    layers, points, sizes = model(options.pop("tie", False))
    plan = Plan(folder / "plan", faults)
    optimizer = (
        FaultyAdamW,
        {"lr": 0.01, "foreach": False, "folder": str(folder / "plan"), "sizes": sizes},
    )
    generator = torch.Generator().manual_seed(1)
    data = [
        (torch.randint(7, (4,), generator=generator), torch.randint(7, (4,), generator=generator))
        for _ in range(14)
    ]
    options = {"micro_batches": 1, "corrections": (), **options, **more}
    with Pipeline(
        layers, stages=points, loss_fn=F.cross_entropy, optimizer=optimizer, workers=workers,
        **options,
    ) as pipe:  # fmt: skip
        losses = [result.losses for result in pipe.train_epoch(data)]
        return losses, pipe.state_dict(), pipe.optimizer.state_dict()["state"], plan.struck


@pytest.mark.thinned(2)
@pytest.mark.processes
@pytest.mark.parametrize("name", CASES)
def test_the_bits_are_the_same(name, tmp_path):
    """Killed on each stage in turn, in the middle of an update that others may have done."""
    case = CASES[name]
    losses, weights, state, _ = trained(case, tmp_path / "alone", [], "serial")
    faults = [
        {"stage": stage, "phase": "step", "after": after, "kind": "kill"}
        for stage, after in ((1, 4), (0, 2), (2, 3))
    ]
    found, its_weights, its_state, struck = trained(
        case, tmp_path / "struck", faults, "local",
        checkpoint=Checkpoints(tmp_path / "run", every=3), max_restarts=9,
    )  # fmt: skip
    assert struck == len(faults)
    assert found == losses
    assert_same(its_weights, weights)
    for number, values in state.items():
        assert_same(its_state[number], values)


CLIPPED = Training(clip=Clip(norm=0.1))
SCALED = Training(autocast=torch.float16, loss_scale=LossScale())


@pytest.mark.parametrize(
    ("training", "correction", "schedule"),
    [
        (CLIPPED, Extrapolation(), "2bw"),
        (CLIPPED, WeightPrediction(), "async-1f1b+vertical-sync"),
        (SCALED, Extrapolation(), "async-1f1b+vertical-sync"),
        (SCALED, WeightPrediction(), "2bw"),
    ],
)
def test_what_corrections_have_made_of_older_versions_is_resumed(
    tmp_path, schedule, correction, training
):
    """An update that waits for a norm is applied when the versions before it are gone."""
    generator = torch.Generator().manual_seed(5)
    data = [torch.randn(2, 8, 8, generator=generator).unbind() for _ in range(14)]

    def pipeline(**more):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        return Plain(
            model, stages=2, loss_fn=F.mse_loss, optimizer=(torch.optim.AdamW, {"lr": 0.02}),
            schedule=schedule, micro_batches=4, corrections=[correction], workers="serial",
            training=training, **more,
        )  # fmt: skip

    with pipeline(checkpoint=Checkpoints(tmp_path, every=3)) as pipe:
        losses = [result.loss for result in pipe.train_epoch(data)]
    folders = sorted(tmp_path.glob("step-*"))
    assert folders
    for folder in folders:
        with pipeline() as pipe:
            step = pipe.load(folder).step
            found = {r.step: r.loss for r in pipe.train_epoch(data)}
        assert [found[i] for i in range(step, 14)] == losses[step:]
