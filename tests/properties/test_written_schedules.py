"""Schedules that somebody wrote, in real pipelines: refused before, or run to their end."""

import functools
import random

import pytest
import torch
import torch.nn.functional as F
from support.oracle import assert_same
from support.pinned import Flat as Pipeline
from support.written import Late
from torch import nn

from pipedream_rt import Clip, LossScale
from pipedream_rt.errors import ConfigError, ScheduleError
from pipedream_rt.serial.cluster import SerialCluster

MANY = [pytest.param(seed, marks=pytest.mark.stress) for seed in range(30, 1500)]


def tied(stages):
    """An embedding, some layers, and a head with its weight: a tie of the first and last stage."""
    torch.manual_seed(3)
    layers = [nn.Embedding(9, 6), *(nn.Linear(6, 6) for _ in range(stages)), nn.Linear(6, 9, False)]
    layers[-1].weight = layers[0].weight
    return nn.Sequential(*layers)


class SecondStageLate(Late):
    """Stage 0 does F I W S for each micro-batch; stage 1 does each weight half one later."""

    def __init__(self):
        super().__init__([0, 1], [0, 0], [0, 1])


def test_a_schedule_that_runs_without_a_tie_is_refused_with_it():
    """Before anything starts, with both actions named."""
    data = [(torch.arange(4), torch.arange(4))] * 3
    options = {
        "stages": 2, "loss_fn": F.cross_entropy, "optimizer": (torch.optim.SGD, {"lr": 0.1}),
        "schedule": SecondStageLate(), "micro_batches": 1, "workers": "serial", "corrections": (),
    }  # fmt: skip
    free = tied(2)
    free[-1].weight = nn.Parameter(free[0].weight.detach().clone())
    with Pipeline(free, **options) as pipe:
        assert len(list(pipe.train_epoch(data))) == 3
    with pytest.raises(ScheduleError, match=r"in W0 for share 0 from stage 1.* in F1 for activ"):
        Pipeline(tied(2), **options)


@pytest.mark.parametrize("seed", [*range(30), *MANY])
def test_a_written_schedule_with_ties_and_clipping_is_refused_or_ends(seed):
    """With a flush on the way; and the order alone decides what comes out of it."""
    draw = random.Random(seed)
    written = Late.drawn(draw)
    clip = draw.choice((None, Clip(norm=0.05), Clip(norm=0.05), Clip(value=0.01)))
    generator = torch.Generator().manual_seed(seed)
    data = [
        tuple(torch.randint(9, (2 * written.k,), generator=generator) for _ in range(2))
        for _ in range(5)
    ]
    found = []
    for workers in ("serial", functools.partial(SerialCluster, shuffle_seed=seed)):
        try:
            pipe = Pipeline(
                tied(written.num_stages), stages=written.num_stages, loss_fn=F.cross_entropy,
                optimizer=(torch.optim.Adam, {"lr": 0.01}), schedule=written, clip=clip,
                micro_batches=written.k, workers=workers, corrections=(),
            )  # fmt: skip
        except (ConfigError, ScheduleError):
            return
        with pipe:
            list(pipe.train_epoch(data[:3]))
            pipe.flush()
            list(pipe.train_epoch(data[3:]))
            found.append(pipe.state_dict())
    assert_same(*found)


class Exact(Late):
    """Every update is read so late that its norm is known; stage 1 reads later than the last."""

    def __init__(self):
        super().__init__([2, 4, 2], [2, 1, 0])

    def in_flight(self, stage, shape):
        return self.ahead[stage] + 1


def test_losses_are_scaled_back_on_a_stage_that_reads_later_than_the_last():
    """It has not applied the update after which the loss was scaled, and knows its scale."""
    data = [(torch.arange(4), torch.arange(4))] * 10
    states = []
    for scale in (None, LossScale(init_scale=512.0, growth_interval=2)):
        with Pipeline(
            tied(3), stages=3, loss_fn=F.cross_entropy, optimizer=(torch.optim.Adam, {"lr": 0.01}),
            schedule=Exact(), micro_batches=1, workers="serial", corrections=(), loss_scale=scale,
        ) as pipe:  # fmt: skip
            list(pipe.train_epoch(data))
            states.append(pipe.state_dict())
    assert_same(*states)  # scales are powers of two
