"""Loops by hand that nobody has thought of: each gives what autograd gives for the whole model.

They draw how many forwards an update has, which inputs require a gradient, which outputs get one,
and whether the update is made.
"""

import random

import pytest
import torch
from support.inside import recovery
from support.models import OPTIMIZERS, mlp
from support.outside import train_outputs
from support.pinned import Pipeline
from torch.nn import functional as F

PLANS = [
    {"schedule": "gpipe", "micro_batches": 4},
    {"schedule": "gpipe", "micro_batches": 3, "stages": 2},
    {"schedule": "zero-bubble"},
    {"schedule": "1f1b"},
    {"schedule": "gpipe", "micro_batches": 3, "stages": 2, "replicas": 2},
]


def called(draw, forward, count, asks):
    """Call some forwards; return the sum of the losses of some of them, and the inputs."""
    total, inputs = None, []
    for _ in range(count):
        x = torch.randn(draw.choice([1, 3]), 8, dtype=torch.float64)
        inputs.append(x.requires_grad_(asks and draw.random() < 0.5))
        output, factor = forward(x), draw.choice([1.0, -2.0, None])
        if factor is not None:
            loss = factor * output.pow(2).mean()
            total = loss if total is None else total + loss
    return total, inputs


def backward(seed, forward, count, asks):
    """Do the same forwards for the same seed, and a backward; return the inputs' gradients."""
    torch.manual_seed(seed)
    total, inputs = called(random.Random(seed), forward, count, asks)
    if total is not None:
        total.backward()
    return total is not None, [x.grad for x in inputs]


def update_by_hand(draw, pipe, model, optimizer):
    k, seed = pipe.plan.per_update, draw.randrange(1 << 30)
    count, asks = draw.randint(1, k), not pipe.plan.replicated
    optimizer.zero_grad()
    used, expected = backward(seed, model, count, asks)
    _, found = backward(seed, pipe.forward, count, asks)
    for one, other in zip(found, expected, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other)
    # An update is applied with the gradient of the input of its last micro-batch.
    makes = draw.random() < 0.6 or count == k
    pipe.step(update=makes)
    if makes and used:
        optimizer.step()


def update_of_outputs(draw, pipe, model, optimizer):
    x, y = torch.randn(2, draw.choice([1, 2, 5]), 8, dtype=torch.float64)
    leaves_out = draw.random() < 0.3
    optimizer.zero_grad()
    train_outputs(pipe, [(x, y)], F.mse_loss, leaves_out=lambda step: leaves_out)
    if not leaves_out:
        F.mse_loss(model(x), y).backward()
        optimizer.step()


@pytest.mark.parametrize("seed", range(20))
def test_drawn_loops_give_what_the_unsplit_model_gives(seed):
    draw, plan = random.Random(seed), PLANS[seed % len(PLANS)]
    torch.manual_seed(seed)
    model, (cls, options) = mlp().double(), OPTIMIZERS[draw.choice(["sgd", "adam", "adamw"])]
    optimizer = cls(model.parameters(), **options)
    with Pipeline(
        mlp().double(), optimizer=(cls, options), workers="serial", **{"stages": 3, **plan}
    ) as pipe:
        for _ in range(8):
            update = draw.choice([update_by_hand, update_by_hand, update_of_outputs])
            update(draw, pipe, model, optimizer)
            if draw.random() < 0.3:
                pipe.flush()
        assert pipe.step == 8
        torch.testing.assert_close(pipe.state_dict(), model.state_dict())
        assert not recovery(pipe).inbox._waiting  # nothing that nobody will take
