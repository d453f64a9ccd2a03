"""The profiler, with layers that move a clock of the tests."""

import copy
import itertools
import re
import statistics

import pytest
import torch
import torch.nn.functional as F
from support.ticking import Clock, Layer
from torch import nn

import pipedream_rt.planning.profiling
from pipedream_rt import ConfigError, LayerSpec, profile
from pipedream_rt.batches.items import batch_of
from pipedream_rt.planning.cuts import cuts_of
from pipedream_rt.planning.meter import spread_of, timed_until_settled
from pipedream_rt.planning.profile import LayerCosts
from pipedream_rt.planning.profiling import about_unsettled, hash_of, optimizer_choice


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


class Up(nn.Linear):
    def forward(self, x, skipped):
        return super().forward(x + skipped)


class Skip(nn.Module):
    def __init__(self):
        super().__init__()
        self.down = nn.Linear(6, 3)
        self.blocks = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))
        self.up = Up(3, 6)

    def forward(self, x):
        y = first = self.down(x)
        for block in self.blocks:
            y = torch.relu(block(y))
        return self.up(y, first) * 2


def test_a_model_that_is_no_sequence_has_edges_for_what_passes(clock):
    found = profile(Skip(), (torch.randn(4, 6), torch.randn(4, 6)), loss_fn=F.mse_loss)
    assert [layer.name for layer in found.layers] == ["down", "blocks.0", "blocks.1", "up"]
    # The skipped value goes with the chain to its first user, and from there to the next.
    assert dict(zip(found.edges, found.edge_bytes, strict=True)) == {
        (0, 1): 4 * 3 * 4,
        (1, 2): 4 * 3 * 4,
        (1, 3): 4 * 3 * 4,
        (2, 3): 4 * 3 * 4,
    }
    assert cuts_of(found).passing.tolist() == [48, 96, 96, 0]


class OwnLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, inputs, labels):
        output = self.head(self.body(inputs))
        return {"loss": F.cross_entropy(output, labels), "output": output}


def test_a_model_may_compute_its_loss_itself(clock):
    batch = {"inputs": torch.randn(3, 4), "labels": torch.tensor([0, 1, 1])}
    found = profile(OwnLoss(), batch)
    assert [layer.name for layer in found.layers] == ["body", "head"]


def test_a_layer_may_change_its_input_in_place(clock):
    x = torch.randn(3, 4)
    given = x.clone()
    model = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 4), nn.ReLU(inplace=True))
    profile(model, (x, torch.zeros(3, 4)), loss_fn=F.mse_loss)
    assert torch.equal(x, given)


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x, pair):
        return self.second(self.first(pair["b"])) + x * pair["a"]


def test_a_model_may_take_several_inputs_in_any_nesting(clock):
    pair = {"a": torch.randn(3, 1), "b": torch.randn(3, 4)}
    batch = (torch.randn(3, 4), pair), {}, torch.zeros(3, 4)
    assert len(profile(TwoInputs(), batch, loss_fn=F.mse_loss).layers) == 2


class Average(nn.Module):
    """Keeps a buffer that each forward makes anew."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x):
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return x - self.mean


def test_a_buffer_that_a_forward_makes_anew_comes_back(clock):
    model = nn.Sequential(nn.Linear(4, 4), Average())
    before = model[1].mean
    profile(model, (torch.ones(3, 4), torch.zeros(3, 4)), loss_fn=F.mse_loss)
    assert model[1].mean is before
    assert torch.equal(before, torch.zeros(4))


def test_layers_that_workers_build_and_inference_mode_are_refused():
    with pytest.raises(ConfigError, match="has layers without values here"):
        profile([LayerSpec(nn.Linear, 2, 2)], (torch.ones(1, 2), 0))
    with torch.inference_mode(), pytest.raises(ConfigError, match="inference_mode"):
        profile(nn.Linear(2, 2), (torch.ones(1, 2), 0))


def test_an_optimizer_that_cannot_step_is_refused(clock):
    batch = (torch.ones(1, 2), torch.ones(1, 2))
    model = nn.Sequential(nn.Linear(2, 2))
    for wrong, message in (
        ((torch.optim.LBFGS, {}), "LBFGS cannot step"),
        ((torch.optim.SGD, {"rate": 1}), "SGD cannot step"),
        ("sgd", "must be a pair"),
    ):
        with pytest.raises(ConfigError, match=message):
            profile(model, batch, loss_fn=F.mse_loss, optimizer=wrong)


def test_nothing_of_the_model_or_of_the_generator_changes(clock):
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.Linear(4, 4))
    model[0].weight.grad = torch.ones(4, 4)
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    profile(
        model,
        (torch.randn(3, 4), torch.randn(3, 4)),
        loss_fn=F.mse_loss,
        optimizer=(torch.optim.SGD, {"lr": 1.0}),
    )
    torch.set_rng_state(state)  # the batch was drawn from it, too
    expected = torch.randn(3, 4), torch.randn(3, 4)
    torch.set_rng_state(state)
    drawn = torch.randn(3, 4), torch.randn(3, 4)
    profile(model, drawn, loss_fn=F.mse_loss)
    after = torch.get_rng_state()
    torch.set_rng_state(state)
    assert all(map(torch.equal, expected, (torch.randn(3, 4), torch.randn(3, 4))))
    assert torch.equal(after, torch.get_rng_state())
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert torch.equal(model[0].weight.grad, torch.ones(4, 4))
    assert model[3].weight.grad is None


def test_the_hash_tells_models_batches_and_optimizers_apart():
    adam, sgd = (torch.optim.Adam, {"lr": 1.0}), (torch.optim.SGD, {"lr": 1.0})
    narrow, wide = nn.Linear(2, 2), nn.Linear(2, 3)
    one, two = batch_of((torch.ones(1, 2), 0)), batch_of((torch.ones(2, 2), 0))
    hashes = {
        hash_of(narrow, one, adam),
        hash_of(wide, one, adam),
        hash_of(narrow, two, adam),
        hash_of(narrow, one, sgd),
        hash_of(narrow, one, None),
        hash_of(narrow, one, adam, F.mse_loss),
        hash_of(narrow, one, adam, None, torch.bfloat16),
    }
    assert len(hashes) == 7
    assert hash_of(narrow, one, adam) == hash_of(nn.Linear(2, 2), one, adam)


def test_the_optimizer_of_a_script_is_made_again():
    weights = nn.Linear(2, 2).parameters()
    cls, options = optimizer_choice(torch.optim.SGD(weights, lr=0.5, momentum=0.9))
    assert cls is torch.optim.SGD
    assert (options["lr"], options["momentum"]) == (0.5, 0.9)
    assert optimizer_choice((torch.optim.SGD, {"lr": 1.0})) == (torch.optim.SGD, {"lr": 1.0})
    rules = (torch.optim.SGD, {"lr": 1.0}, [("*.bias", {"lr": 0.1})])
    assert optimizer_choice(rules) == (torch.optim.SGD, {"lr": 1.0})
    few, many = nn.Linear(2, 2), nn.Linear(2, 2)
    groups = [
        {"params": [few.bias]},
        {"params": [*many.parameters(), few.weight], "momentum": 0.9},
    ]
    assert optimizer_choice(torch.optim.SGD(groups, lr=0.5))[1]["momentum"] == 0.9
    assert optimizer_choice(None) is None


def test_a_worker_without_a_stage_takes_some_memory():
    assert 5e7 < pipedream_rt.planning.profiling._process_bytes() < 2e9


class Bare(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(2))

    def forward(self, x):
        return x * self.w


@pytest.mark.parametrize(
    ("model", "batch", "options", "message"),
    [
        (nn.Linear(2, 2), (torch.ones(1, 2), 0), {"repeats": 0}, "repeats must be at least 1"),
        (nn.Linear(2, 2), (torch.ones(1, 2), 0), {"repeats": 1.5}, "repeats must be at least 1"),
        (nn.Linear(2, 2), (torch.ones(1, 2), 0), {"warm_up": -1}, "warm_up at least 0"),
        (nn.Sequential(nn.Linear(2, 2)), {"x": torch.ones(1, 2)}, {}, "takes a pair"),
        (nn.Sequential(), (torch.ones(1, 2), 0), {}, "no layers"),
        (Bare(), (torch.ones(1, 2), 0), {}, "calls no layers"),
        (nn.Sequential(nn.Linear(2, 2)), 3, {}, "the loader must yield"),
    ],
)
def test_what_cannot_be_profiled_is_refused(model, batch, options, message):
    with pytest.raises(ConfigError, match=message):
        profile(model, batch, **options)


# -- times that differ ----------------------------------------------------------------------------


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


def test_times_that_say_little_are_told_of():
    def layer(name, seconds, spread):
        zeros = dict.fromkeys(("backward_input", "backward_weight", "step"), 0.0)
        sizes = ("output", "parameter", "frozen", "saved", "optimizer")
        return LayerCosts(
            name=name, forward=seconds, spread=spread, **zeros, **{f"{s}_bytes": 0.0 for s in sizes}
        )

    assert not about_unsettled([layer("a", 0.010, 0.001), layer("b", 0.010, 0.002)])
    assert not about_unsettled([layer("a", 10e-6, 60e-6), layer("b", 10e-6, 90e-6)])
    assert not about_unsettled([layer("a", 1.0, 0.01), layer("b", 0.001, 0.1)])
    (said,) = about_unsettled([layer("a", 0.0004, 0.072), layer("b", 0.0004, 0.0)])
    assert re.search(r"0\.8 ms, .* differ by 72 ms .* of a, .*quiet", said)


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
