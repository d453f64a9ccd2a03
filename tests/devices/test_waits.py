"""No wait of the product can be forgotten: the check of the stand-in says so for each of them."""

import contextlib
import gc
import itertools

import pytest
import torch
import torch.nn.functional as F
from support.device import standin
from support.device.threads import ThreadCluster
from support.device.waits import watched
from support.pinned import Flat as Pipeline
from torch import nn

from pipedream_rt import Checkpoints, Clip, Layout, PipelineError, Training

pytestmark = [pytest.mark.standin, pytest.mark.threads]


def net():
    """A model with layers that work in place and that change buffers, and without dropout.

    Threads that share a process share its generators, which no two workers do otherwise.
    """
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 8), nn.ReLU(inplace=True), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)
    )


def data_of(mini_batches):
    torch.manual_seed(1)
    return [(torch.randn(8, 6), torch.randint(4, (8,))) for _ in range(mini_batches)]


def train(folder, devices, workers=ThreadCluster, **options):
    """Train a little, look at everything, and make a checkpoint."""
    data = data_of(5)
    with Pipeline(
        net(), stages=3, loss_fn=F.cross_entropy, optimizer=(torch.optim.AdamW, {"lr": 0.01}),
        devices=devices, workers=workers, checkpoint=Checkpoints(folder, every=3), **options,
    ) as pipe:  # fmt: skip
        losses = [result.loss for result in pipe.train_epoch(data)]
        evaluated = pipe.evaluate(data[:2])
        predicted = list(pipe.predict(data[:2]))
        return losses, evaluated, predicted, pipe.state_dict()


def same(one, other):
    return (
        one[:2] == other[:2]
        and all(torch.equal(a, b) for a, b in zip(one[2], other[2], strict=True))
        and all(torch.equal(value, other[3][key]) for key, value in one[3].items())
    )


LAYOUTS = {
    "mixed": ["standin:0", "cpu", "standin:1"],
    "each": ["standin:0", "standin:1", "standin:0"],
    "one": "standin:0",
}
CLIPPED = {"training": Training(clip=Clip(norm=0.3))}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "options", [{}, CLIPPED, {"layout": Layout(replicas=2)}], ids=["plain", "clipped", "replicas"]
)
def test_the_bits_are_the_hosts_and_nothing_is_reported(layout, options, tmp_path):
    expected = train(tmp_path / "cpu", "cpu", **options)
    found = train(tmp_path / layout, LAYOUTS[layout], **options)
    assert same(found, expected)


def end_what_is_left():
    """Free what a run with a dropped wait has left, which the next one would be blamed for."""
    gc.collect()
    for index in range(torch.accelerator.device_count()):
        torch.accelerator.synchronize(index)
    standin.violations()


ON_THE_HOST = {
    "devices/accelerator.py leave item",
    "models/settings.py _flushes_denormals item",
    "messages/wire.py elements_of cpu",
}
"""Calls for tensors in the memory of the host, which wait for nothing."""


def test_each_wait_that_is_dropped_is_missed(tmp_path):
    """In one of the layouts, each in turn; for where a wait is of use depends on the layout.

    Where the host is slow, another wait may come before the tensor is read, so that this once it is
    of no use: there are four turns.
    """
    places, missed, runs = set(), set(), itertools.count()
    for turn, devices in itertools.product(range(4), LAYOUTS.values()):
        if turn and missed == places:
            break
        with watched() as found:
            train(tmp_path / f"{next(runs)}", devices, **CLIPPED)
        assert standin.violations() == []
        places |= found.keys() - ON_THE_HOST
        for place in [*found.keys() - ON_THE_HOST - missed]:
            with watched(dropped=place), contextlib.suppress(PipelineError, RuntimeError):
                train(tmp_path / f"{next(runs)}", devices, **CLIPPED)
            if standin.violations():
                missed.add(place)
            end_what_is_left()
    assert len(places) > 8
    assert missed == places


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("options", [{}, CLIPPED], ids=["plain", "clipped"])
def test_the_thread_that_launches_waits_for_nothing(layout, options, tmp_path):
    """In the micro-batches 17 to 31, in which no guard looks at the weights.

    What leaves for the host is waited for by the threads that hand it over: a loss, and what goes
    to a stage on the host.
    """
    with Pipeline(
        net(), stages=3, loss_fn=F.cross_entropy, optimizer=(torch.optim.AdamW, {"lr": 0.01}),
        devices=LAYOUTS[layout], workers=ThreadCluster, micro_batches=1, corrections=(), **options,
    ) as pipe:  # fmt: skip
        for _ in pipe.train_epoch(data_of(18)):
            pass
        pipe.flush()
        standin.forget_waits()
        with watched() as found:
            for _ in pipe.train_epoch(data_of(10)):
                pass
            pipe.flush()
    waits = {kind: count for kind, count in standin.waits().items() if count}
    assert waits.keys() == {"event"}
    by_host = [place for place in found if place.split()[-1] in ("synchronize", "item", "cpu")]
    assert set(by_host) <= {"devices/accelerator.py leave synchronize", *ON_THE_HOST}
    # A flush has a reply of each stage on a device, with a message of its own.
    of_losses = 10 if layout != "mixed" else 10 + 10 * 2
    assert of_losses <= waits["event"] <= of_losses + 3 + 10 * 3 * bool(options)
