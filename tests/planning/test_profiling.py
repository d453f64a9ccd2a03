"""The profiler, with layers that move a clock of the tests."""

import copy
import random
import re
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pipedream_rt import ConfigError, LayerSpec, profile
from pipedream_rt.batches.items import batch_of
from pipedream_rt.planning.cuts import cuts_of
from pipedream_rt.planning.profile import LayerCosts
from pipedream_rt.planning.profiling import about_unsettled, hash_of, optimizer_choice

X = torch.ones(3, 4)


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


class Twins(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.ModuleList([nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)])
        self.head = nn.Linear(4, 4)

    def encoded(self, x):
        for layer in self.encoder:
            x = layer(x)
        return x

    def forward(self, x, y):
        return self.head(self.encoded(x) - self.encoded(y))


def test_layers_that_no_two_stages_can_share_are_measured_as_one(clock):
    found = profile(Twins(), ((X, X), {}, X), loss_fn=F.mse_loss)
    assert [layer.name for layer in found.layers] == ["encoder.0", "encoder.1", "head"]


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


def test_a_loss_that_changes_its_target_or_keeps_a_state_changes_copies(clock):
    labels, calls = torch.arange(1, 4), []

    def loss_fn(output, y):
        y.sub_(1)  # a second time would make the least of them negative
        calls.append(1)
        return F.cross_entropy(output, y) * random.random()

    before = random.getstate()
    profile(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), (X, labels), loss_fn=loss_fn)
    assert labels.tolist() == [1, 2, 3]
    assert not calls
    assert random.getstate() == before


def test_a_loss_that_cannot_be_copied_is_called_itself(clock):
    held = threading.Lock()

    def loss_fn(output, y):
        assert not held.locked()
        return F.mse_loss(output, y)

    assert profile(nn.Sequential(nn.Linear(4, 4)), (X, X), loss_fn=loss_fn).layers


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
