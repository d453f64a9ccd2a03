"""The meter of layers, with layers that move a clock of the tests."""

import itertools
import statistics

import torch
import torch.nn.functional as F
from support.ticking import Clock, Layer
from torch import nn

from pipedream_rt import profile
from pipedream_rt.planning.meter import spread_of, timed_until_settled


def test_each_time_is_that_of_the_layer(clock):
    model = nn.Sequential(Layer(1.0, 2.0, 4.0), Layer(8.0, 16.0, 32.0))
    first, last = profile(model, (torch.ones(2, 4), torch.ones(2, 4)), loss_fn=F.mse_loss).layers
    # Nobody wants a gradient of the model's input.
    assert (first.forward, first.backward_input, first.backward_weight) == (1.0, 0.0, 4.0)
    assert (last.forward, last.backward_input, last.backward_weight) == (8.0, 16.0, 32.0)
    assert first.spread == last.spread == 0.0


def test_sizes_are_exact(clock):
    model = nn.Sequential(
        nn.Linear(8, 16), nn.ReLU(), nn.BatchNorm1d(16, affine=False), nn.Linear(16, 4)
    )
    for parameter in model[0].parameters():
        parameter.requires_grad_(False)
    batch = (torch.randn(5, 8), torch.randint(4, (5,)))
    adam = (torch.optim.AdamW, {"lr": 1e-3})
    found = profile(model, batch, loss_fn=F.cross_entropy, optimizer=adam)
    frozen, relu, norm, head = found.layers
    assert (frozen.parameter_bytes, frozen.frozen_bytes) == (0, 4 * (8 * 16 + 16))
    assert (norm.parameter_bytes, norm.frozen_bytes) == (0, 4 * 2 * 16 + 8)
    assert (head.parameter_bytes, head.frozen_bytes) == (4 * (16 * 4 + 4), 0)
    assert head.optimizer_bytes == 2 * head.parameter_bytes + 2 * 4  # and two counters of steps
    assert [each.output_bytes for each in found.layers] == [5 * 16 * 4] * 3 + [0]
    assert frozen.saved_bytes == relu.saved_bytes == 0  # nothing before the head is trained
    assert head.saved_bytes >= 5 * 16 * 4
    assert (found.micro_batch, found.process_bytes, found.is_chain) == (5, 1e6, True)
    assert found.edge_bytes == (5 * 16 * 4,) * 3


def test_a_layer_may_change_its_input_in_place(clock):
    x = torch.randn(3, 4)
    given = x.clone()
    model = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 4), nn.ReLU(inplace=True))
    profile(model, (x, torch.zeros(3, 4)), loss_fn=F.mse_loss)
    assert torch.equal(x, given)


def noisy(*totals):
    """What a layer is timed as, one after another, without an end."""
    times = itertools.chain(totals, itertools.repeat(totals[-1]))
    return lambda: (next(times), 0.0, 0.0)


def test_a_few_times_that_stray_do_not_count():
    assert spread_of([1.0, 1.0, 1.0, 72.0, 1.0]) == 0.0
    assert spread_of([1.0, 72.0]) == 71.0
    assert spread_of([3.0]) == 0.0


def test_times_are_taken_until_they_agree():
    assert len(timed_until_settled(noisy(1.0), 5)) == 5
    assert len(timed_until_settled(noisy(1.0, 1.0, 1.0, 72.0, 1.0), 5)) == 5
    # A round that another process has disturbed is outweighed by two that it has not.
    found = timed_until_settled(noisy(5.0, 9.0, 14.0, 8.0, 2.0, 1.0), 5)
    assert len(found) == 20
    assert statistics.median(total for total, *_ in found) == 1.0
    assert len(timed_until_settled(noisy(1e-6, 90e-6, 1e-6, 60e-6, 1e-6), 5)) == 5
    erratic = itertools.cycle([(0.001, 0.0, 0.0), (0.072, 0.0, 0.0)])
    assert timed_until_settled(lambda: next(erratic), 5) == [(0.001, 0.0, 0.0)] * 15


class Erratic(nn.Linear):
    """A layer that takes one or seventy units of the clock, in turn."""

    calls = 0

    def forward(self, x):
        self.calls += 1
        Clock.now += 70.0 if self.calls % 4 < 2 else 1.0
        return super().forward(x)


def test_of_times_that_never_agree_the_shorter_ones_are_taken(clock):
    model = nn.Sequential(nn.Linear(4, 4), Erratic(4, 4), nn.Linear(4, 4))
    found = profile(model, (torch.ones(2, 4), torch.ones(2, 4)), loss_fn=F.mse_loss)
    assert found.layers[1].forward == 1.0
