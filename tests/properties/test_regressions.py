"""Ways in which a run was once silently another one, each found by trying to break it."""

import threading

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support.inside import lose
from support.models import mlp, regression
from support.oracle import assert_same
from support.small import SGD, losses, small
from torch import nn

from pipedream_rt import CheckpointError, ConfigError, StageFailed

pytestmark = pytest.mark.threads


class Steps(torch.optim.Optimizer):
    """The base of optimizers that keep something of their own, by which they divide their rate."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        parts = self.counted()
        for p, lr in self.parameters():
            p -= lr / parts * p.grad

    def parameters(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    yield p, group["lr"]


class KeepsAList(Steps):
    """Of its parameters, which were once detached copies after a recovery."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, lr)
        self.flat = [p for group in self.param_groups for p in group["params"]]

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.flat:
            p -= self.param_groups[0]["lr"] * p.grad


class KeepsStateForAll(Steps):
    """Under a key that is no parameter."""

    def counted(self):
        n = self.state["all"]["n"] = self.state["all"].get("n", 0) + 1
        return n


class CountsInGroups(Steps):
    def counted(self):
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
        return self.param_groups[0]["k"]


class KeysById(Steps):
    def __init__(self, params, lr=0.1):
        super().__init__(params, lr)
        self.v = {}

    @torch.no_grad()
    def step(self, closure=None):
        for p, lr in self.parameters():
            v = self.v.setdefault(id(p), torch.zeros_like(p))
            p -= lr * v.mul_(0.9).add_(p.grad)


class KeepsOneTensorTwice(Steps):
    def __init__(self, params, lr=0.1):
        super().__init__(params, lr)
        self.n = torch.tensor(0.0)

    def counted(self):
        self.n += 1
        for p, _ in self.parameters():
            self.state[p]["step"] = self.n
        return self.n


class DiffersByStage(Steps):
    def __init__(self, params, lr=0.1):
        super().__init__(params, lr)
        self.norm = 0.0

    def counted(self):
        self.norm += sum(p.grad.norm().item() for p, _ in self.parameters())
        return 1 + self.norm


class SometimesKeeps(Steps):
    """An attribute that some stages have changed, those with weights of one size."""

    def __init__(self, params, lr=0.1, size=0):
        super().__init__(params, lr)
        self.size, self.big = size, False

    def counted(self):
        self.big = self.big or any(p.shape[0] == self.size for p, _ in self.parameters())
        return 2 if self.big else 1


class OddKeys(Steps):
    """State of a parameter under keys of any kind."""

    def __init__(self, params, lr=0.1, keys=()):
        super().__init__(params, lr)
        self.keys = keys

    @torch.no_grad()
    def step(self, closure=None):
        for p, lr in self.parameters():
            for number, key in enumerate(self.keys, 1):
                n = self.state[p].setdefault(key, torch.zeros(()))
                n += number
                p -= lr / n * p.grad


class HoldsALock(Steps):
    def __init__(self, params, lr=0.1):
        super().__init__(params, lr)
        self.lock = threading.Lock()

    def counted(self):
        with self.lock:
            return 1


def opened(model=None, optimizer=SGD, **options):
    given = {"stages": 2, "schedule": "1f1b", "max_restarts": 3, **options}
    return small(model or mlp(layers=4), optimizer=optimizer, **given)


def with_a_loss_of_a_worker(folder, kill, make=lambda: None, **options):
    data = regression(8)
    with opened(make(), **options) as pipe:
        found = losses(pipe, data[:4])
        pipe.save(folder)
        if kill:
            lose(pipe)
        found += losses(pipe, data[4:])
        assert len(pipe.restarts) == kill
        return found, pipe.fingerprint().digest


@pytest.mark.parametrize("cls", [KeepsAList, KeepsStateForAll, CountsInGroups, HoldsALock])
def test_what_an_optimizer_keeps_survives_a_recovery(tmp_path, cls):
    calm = with_a_loss_of_a_worker(tmp_path / "calm", False, optimizer=(cls, {}))
    assert with_a_loss_of_a_worker(tmp_path / "kill", True, optimizer=(cls, {})) == calm


@pytest.mark.parametrize(
    ("cls", "words"),
    [(KeysById, "under the id of a parameter"), (KeepsOneTensorTwice, "one tensor in two places")],
)
def test_what_an_optimizer_keeps_that_cannot_be_saved_is_refused_by_name(tmp_path, cls, words):
    with opened(optimizer=(cls, {})) as pipe:
        losses(pipe, regression(2))
        with pytest.raises(CheckpointError, match=words):
            pipe.save(tmp_path)


def test_values_that_differ_from_stage_to_stage_need_the_same_split(tmp_path):
    with opened(optimizer=(DiffersByStage, {})) as pipe:
        losses(pipe, regression(4))
        pipe.save(tmp_path)
        expected = losses(pipe, regression(4))
    with opened(optimizer=(DiffersByStage, {})) as pipe:
        pipe.load(tmp_path)
        assert losses(pipe, regression(4)) == expected
    with (
        pytest.raises(StageFailed, match=r"\(norm\) that differ from stage to stage"),
        opened(optimizer=(DiffersByStage, {}), stages=4) as pipe,
    ):
        pipe.load(tmp_path)


def narrowing():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 6), nn.Linear(6, 4), nn.Linear(4, 8))


@pytest.mark.parametrize("size", [8, 4])  # of the last layer, and of the one before it
def test_a_stage_without_own_values_goes_on_without_any(size, tmp_path):
    optimizer = (SometimesKeeps, {"size": size})
    with opened(narrowing(), optimizer, stages=4) as pipe:
        losses(pipe, regression(4))
        pipe.save(tmp_path)
        expected = losses(pipe, regression(4))
    with opened(narrowing(), optimizer, stages=4) as pipe:
        pipe.load(tmp_path)
        assert losses(pipe, regression(4)) == expected


def test_a_value_that_is_not_a_number_is_the_same_on_all_stages(tmp_path):
    rules = [("0.*", {"note": float("nan")})]
    with opened(optimizer=(*SGD, rules)) as pipe:
        losses(pipe, regression(2))
        pipe.optimizer.load_state_dict(pipe.optimizer.state_dict())
        losses(pipe, regression(2))


@pytest.mark.parametrize("key", [True, ("a", 0), 1.5, None, 2**63])
def test_an_odd_key_of_an_optimizer_is_refused_and_ends_nothing(key, tmp_path):
    with opened(optimizer=(OddKeys, {"keys": [key]})) as pipe:
        losses(pipe, regression(2))
        with pytest.raises(ConfigError, match=r"keeps a value of 0\.weight under"):
            pipe.optimizer.state_dict()
        with pytest.raises(CheckpointError, match="only texts and integers"):
            pipe.save(tmp_path)
        losses(pipe, regression(2))


def test_other_keys_of_an_optimizer_come_back_as_they_were(tmp_path):
    keys = ["a/b", "#1", "100%", "1", 1, 0, -1, 2**63 - 1]
    with opened(optimizer=(OddKeys, {"keys": keys})) as pipe:
        losses(pipe, regression(2))
        pipe.save(tmp_path)
        assert list(pipe.optimizer.state_dict()["state"][0]) == keys
        expected = losses(pipe, regression(2))
    with opened(optimizer=(OddKeys, {"keys": keys}), stages=4) as pipe:
        pipe.load(tmp_path)
        assert losses(pipe, regression(2)) == expected


def test_going_back_takes_back_what_the_optimizer_has_counted(tmp_path):
    with opened(optimizer=(CountsInGroups, {})) as pipe:
        pipe.save(tmp_path)
        first = losses(pipe, regression(4))
        pipe.load(tmp_path)
        assert losses(pipe, regression(4)) == first


def test_accepted_hyper_parameters_are_those_of_the_script(tmp_path):
    with opened() as pipe:
        state = pipe.optimizer.state_dict()
        state["param_groups"][0]["lr"] = 0.01
        pipe.optimizer.load_state_dict(state)
        losses(pipe, regression(2))
        pipe.save(tmp_path)
        weights = pipe.state_dict()
    model = mlp(layers=4)
    model.load_state_dict(weights)
    with opened(model, (torch.optim.SGD, {"lr": 0.5})) as pipe:
        expected = losses(pipe, regression(3))
    with opened(optimizer=(torch.optim.SGD, {"lr": 0.5})) as pipe:
        pipe.load(tmp_path, accept=["hyper_parameters"])
        assert losses(pipe, regression(3)) == expected


class Fills(nn.Module):
    """A buffer that has no value at the start."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("mean", None)

    def forward(self, x):
        now = x.detach().mean(0)
        self.mean = now if self.mean is None else 0.9 * self.mean + 0.1 * now
        return self.linear(x - self.mean)


def test_a_buffer_that_is_filled_later_is_in_state_dicts(tmp_path):
    def make():
        torch.manual_seed(1)
        return nn.Sequential(Fills(), Fills())

    calm = with_a_loss_of_a_worker(tmp_path / "calm", False, make)
    assert with_a_loss_of_a_worker(tmp_path / "kill", True, make) == calm
    with opened(make()) as pipe:
        losses(pipe, regression(2))
        assert {"0.mean", "1.mean"} <= pipe.state_dict().keys()


class Asks(nn.Module):
    """A layer that goes by what its weight is."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.linear.weight.gain = 2.0

    def forward(self, x):
        w = self.linear.weight
        return self.linear(x) * getattr(w, "gain", 1.0) * isinstance(w, nn.Parameter)


def test_a_weight_in_forward_is_a_parameter_with_its_attributes():
    torch.manual_seed(1)
    model = nn.Sequential(Asks(), Asks())
    with opened(model) as pipe:
        assert losses(pipe, regression(1)) == [
            F.mse_loss(model(regression(1)[0][0]), regression(1)[0][1]).item()
        ]


class Tagged(torch.Tensor):
    pass


class Tags(nn.Linear):
    def forward(self, x):
        return super().forward(x).as_subclass(Tagged)


def test_a_subclass_of_tensor_does_not_cross_a_hop():
    with (
        pytest.raises(StageFailed, match="is a Tagged, a subclass of Tensor"),
        opened(nn.Sequential(Tags(8, 8), nn.Linear(8, 8))) as pipe,
    ):
        losses(pipe, regression(1))


def test_hooks_of_all_modules_are_refused():
    handle = nn.modules.module.register_module_forward_hook(lambda module, args, output: None)
    try:
        with pytest.raises(ConfigError, match="a forward_hook was registered on all modules"):
            opened()
    finally:
        handle.remove()


def test_hooks_of_tied_and_of_frozen_parameters():
    tied = mlp(layers=3)
    tied[1].weight = tied[0].weight
    tied[0].weight.register_hook(lambda gradient: gradient * 0.5)
    with opened(tied, stages=[2]) as pipe:
        losses(pipe, regression(2))
    frozen = mlp(layers=3)
    frozen[0].weight.register_hook(lambda gradient: gradient)
    frozen[0].requires_grad_(False)
    with opened(frozen) as pipe:
        losses(pipe, regression(2))


class Noisy(nn.Linear):
    """Integers of 128 bits in its extra state."""

    def get_extra_state(self):
        return np.random.default_rng(0).bit_generator.state

    def set_extra_state(self, state):
        pass


def test_extra_state_that_cannot_be_packed_is_told_of_at_once(tmp_path):
    with opened(nn.Sequential(Noisy(8, 8), nn.Linear(8, 8))) as pipe:
        losses(pipe, regression(2))
        with pytest.raises(CheckpointError, match="_extra_state"):
            pipe.save(tmp_path)
        assert len(losses(pipe, regression(2))) == 2


class SplitsColumns(nn.Module):
    """Two parameters cut from one tensor, which have no element in common."""

    def __init__(self):
        super().__init__()
        left, right = torch.randn(8, 16).chunk(2, 1)
        self.a, self.b = nn.Parameter(left), nn.Parameter(right)

    def forward(self, x):
        return x @ self.a + torch.tanh(x @ self.b)


def test_parameters_beside_each_other_in_one_memory_are_trained():
    torch.manual_seed(1)
    with opened(nn.Sequential(SplitsColumns(), nn.Linear(8, 8))) as pipe:
        losses(pipe, regression(2))


def test_a_split_point_that_is_none():
    with pytest.raises(ConfigError, match=r"a split point is the index or the name of a layer"):
        opened(stages=[4 / 2])


class Counts(nn.Linear):
    """A count in extra state."""

    n = 0

    def get_extra_state(self):
        return self.n

    def set_extra_state(self, n):
        self.n = n


def test_states_that_differ_in_what_is_no_tensor_have_other_fingerprints():
    marks = set()
    for n in (0, 1):
        torch.manual_seed(1)
        layer = Counts(8, 8)
        layer.n = n
        with opened(nn.Sequential(layer, nn.Linear(8, 8))) as pipe:
            marks.add(pipe.fingerprint().digest)
    assert len(marks) == 2


class Halves(nn.Module):
    """Gives two tensors."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        y = self.linear(x)
        return y * 1, y * 2


class AddsInPlace(nn.Module):
    """Works in place on a tensor that it was given in a tuple."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, pair):
        first, second = pair
        return self.linear(torch.tanh(first.mul_(3)) + second)


def test_activations_that_are_computed_again_from_a_tuple_on_which_a_layer_works_in_place():
    """Only a tensor that came alone was copied for the second time."""

    def trained(recompute):
        torch.manual_seed(0)
        model = nn.Sequential(Halves(), AddsInPlace())
        with small(model, stages=2, recompute=recompute) as pipe:
            losses(pipe, [(torch.ones(2, 8), torch.zeros(2, 8))] * 3)
            return pipe.state_dict()

    assert_same(trained(True), trained(False))
