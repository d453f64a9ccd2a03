"""What a checkpoint must hold besides the obvious: found by trying to break it.

Each model is trained with a failure in the middle, after a checkpoint that did not stop the pipe,
and must give the bits of an undisturbed run.
"""

import functools
import gc
import os
import threading

import pytest
import torch
import torch.nn.functional as F
from support.compatibility import OldStyle, ScheduleFreeSGD
from support.deadlines import LATEST_S
from support.models import Recomputes
from support.oracle import assert_same
from support.pinned import Pipeline
from torch import nn

from pipedream_rt import Checkpoints

pytestmark = pytest.mark.threads


class FailsOnce(nn.Module):
    """Raises in a forward that comes after a checkpoint, once in its life."""

    def __init__(self, marker, at):
        super().__init__()
        self.marker, self.at, self.calls = str(marker), at, 0

    def forward(self, x):
        self.calls += self.training
        if self.marker and self.calls == self.at and not os.path.exists(self.marker):
            os.close(os.open(self.marker, os.O_CREAT))
            raise RuntimeError("once")
        return x


class Tied(nn.Module):
    """Two names for one weight."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.b.weight = self.a.weight

    def forward(self, x):
        return self.b(torch.relu(self.a(x)))


class Counts(nn.Module):
    """A buffer in no state dict, which every forward changes."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(8), persistent=False)
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        if self.training:
            self.seen += x.detach().mean(0)
        return self.linear(x) + 0.1 * self.seen


class Lazy(nn.Module):
    """A buffer that the first forward makes."""

    def __init__(self, persistent=True):
        super().__init__()
        self.register_buffer("mean", None, persistent=persistent)
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        if self.training:
            now = x.detach().mean(0)
            self.mean = now if self.mean is None else 0.9 * self.mean + 0.1 * now
        return self.linear(x) + (0 if self.mean is None else self.mean)


class Drops(nn.Module):
    """A buffer that the fourth forward drops, and the first of two names of another one."""

    def __init__(self, persistent=True):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("gain", torch.full((8,), 4.0), persistent=persistent)
        self.register_buffer("first", torch.ones(8), persistent=persistent)
        self.register_buffer("second", self.first, persistent=persistent)

    def forward(self, x):
        if self.gain is not None:
            x = x * self.gain
            self.gain = self.gain - 1
            if self.gain[0] < 1:
                self.gain = self.first = None
        return self.linear(x) + self.second + (0 if self.first is None else self.first)


class Shares(nn.Module):
    """One hidden buffer in two modules."""

    def __init__(self):
        super().__init__()
        self.a, self.b = Counts(), Counts()
        self.b.seen = self.a.seen

    def forward(self, x):
        return self.b(self.a(x))


class Convolves(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 2, 3, padding=1).to(memory_format=torch.channels_last)

    def forward(self, x):
        return self.conv(x.view(-1, 2, 2, 2)).flatten(1)


class Turned(nn.Module):
    """A weight whose strides are not those of a contiguous one."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8).t() / 3)

    def forward(self, x):
        return x @ self.weight


class Phases(nn.Module):
    """A complex buffer of double precision, which every forward turns."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("phase", torch.ones(8, dtype=torch.complex128))

    def forward(self, x):
        if self.training:
            self.phase = self.phase * (0.6 + 0.8j)
        return self.linear(x) * self.phase.real.float()


class Curious(nn.Module):
    """A count in Python, which it gives as extra state."""

    def __init__(self):
        super().__init__()
        self.linear, self.seen = nn.Linear(8, 8), {"calls": 0}

    def forward(self, x):
        self.seen["calls"] += self.training
        return self.linear(x) / self.seen["calls"]

    def get_extra_state(self):
        return dict(self.seen)

    def set_extra_state(self, state):
        self.seen = dict(state)


class Hooked(nn.Linear):
    def __init__(self):
        super().__init__(8, 8)
        self.weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))


def Normed():  # noqa: N802 - stands for a class
    return nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))


class Moving(nn.Module):
    """A loss with a weight, and a buffer that it goes by."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.tensor(0.3))
        self.register_buffer("mean", torch.zeros(1))

    def forward(self, output, target):
        loss = F.cross_entropy(output, target)
        if self.training:
            self.mean.mul_(0.9).add_(0.1 * loss.detach())
        return loss * torch.exp(-self.w) + self.w * (1 + self.mean.sum())


FUSED = (torch.optim.Adam, {"lr": 1e-2, "fused": True})


def row(layer, optimizer=FUSED, dtype=torch.float32):
    return layer, optimizer, dtype


CASES = {
    "tied weights": row(Tied),
    "a hidden buffer": row(Counts),
    "a lazy buffer": row(Lazy),
    "a lazy hidden buffer": row(functools.partial(Lazy, persistent=False)),
    "a buffer that is dropped": row(Drops),
    "a hidden buffer that is dropped": row(functools.partial(Drops, persistent=False)),
    "a shared hidden buffer": row(Shares),
    "buffers of a backward": row(Recomputes),
    "channels last, fused": row(Convolves),
    "strides, fused": row(Turned),
    "momentum, fused": row(
        Turned, (torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9, "fused": True})
    ),
    "state of another type": row(Turned, (torch.optim.NAdam, {"lr": 1e-2}), torch.float64),
    "lower precision": row(Turned, (torch.optim.AdamW, {"lr": 1e-2}), torch.bfloat16),
    "values in groups": row(Turned, (ScheduleFreeSGD, {})),
    "values in attributes": row(Turned, (OldStyle, {})),
    "complex numbers": row(Phases),
    "extra state": row(Curious),
    "a loss with weights and buffers": row(Turned),
    "a hook of a parameter": row(Hooked),
    "parametrizations": row(Normed),
}  # fmt: skip


def _tensor(value):
    """Return a tensor to compare, also of extra state."""
    return value if isinstance(value, torch.Tensor) else torch.tensor(list(value.values()))


@pytest.mark.thinned(2)
@pytest.mark.parametrize("name", CASES)
def test_a_failure_after_a_checkpoint(tmp_path, name, caplog):
    layer, optimizer, dtype = CASES[name]

    def train(marker, folder, resume=False, until=16):
        torch.manual_seed(3)
        model = nn.Sequential(layer(), nn.ReLU(), layer(), nn.ReLU(), layer())
        if dtype is not torch.float32:  # which would make complex numbers real
            model.to(dtype)
        model.insert(1, FailsOnce(marker, 11))
        generator = torch.Generator().manual_seed(1)
        data = [
            (torch.randn(4, 8, generator=generator).to(dtype), torch.randint(8, (4,)))
            for _ in range(16)
        ]
        with Pipeline(
            model, stages=[2, 4], optimizer=optimizer, workers="serial",
            loss_fn=Moving() if "loss" in name else F.cross_entropy,
            checkpoint=Checkpoints(folder, every=5, resume=resume, attempts=None),
            max_restarts=1,
        ) as pipe:  # fmt: skip
            losses = [r.loss for r in pipe.train_epoch(data[:until])]
            buffers = dict(pipe.stages[0].rref.to_here().named_buffers())
            weights = {**pipe.state_dict(), **buffers}
            if "loss" in name:
                weights.update(pipe.loss_module().state_dict())
            return losses, {k: _tensor(v) for k, v in weights.items()}, len(pipe.restarts)

    losses, weights, _ = train("", tmp_path / "calm")
    found, found_weights, restarts = train(tmp_path / "marker", tmp_path / "stormy")
    assert restarts == 1
    assert found == losses
    assert_same(found_weights, weights)
    if name == "buffers of a backward":  # then there is no checkpoint, and that is said
        assert "a layer changes its buffers in its backward" in caplog.text
        return
    train("", tmp_path / "stopped", until=12)
    found, found_weights, _ = train("", tmp_path / "stopped", resume=True)
    assert found == losses[-len(found) :]
    assert_same(found_weights, weights)


class Remembers:
    """A loader that says where it is, in a list that it goes on with."""

    def __init__(self, items):
        self.items, self.left, self.drawn = items, [], 0

    def __len__(self):
        return len(self.items)

    def __iter__(self):
        self.left = self.left or list(range(len(self.items)))
        while self.left:
            self.drawn += 1
            yield self.items[self.left.pop()]

    def state_dict(self):
        return {"left": self.left}

    def load_state_dict(self, state):
        self.left = list(state["left"])


def shuffling(data, kind):
    """A loader of each kind that has a state of its own."""
    if kind == "remembers":
        return Remembers(data)
    dataset = torch.utils.data.TensorDataset(*(torch.cat(parts) for parts in zip(*data)))
    options = {
        "torch's generator": {},
        "its own generator": {"generator": torch.Generator().manual_seed(5)},
        "kept workers": {"num_workers": 1, "persistent_workers": True},
    }[kind]
    return torch.utils.data.DataLoader(dataset, batch_size=4, shuffle=True, **options)


@pytest.mark.thinned(3)
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
@pytest.mark.parametrize(
    "kind", ["torch's generator", "its own generator", "kept workers", "remembers"]
)
@pytest.mark.parametrize(("between", "stop"), [(False, 7), (False, 9), (False, 11), (True, None)])
def test_a_loader_goes_on_where_it_was(tmp_path, kind, between, stop):
    """In the middle of the second epoch, at its end, and between two."""
    generator = torch.Generator().manual_seed(1)
    data = [
        (torch.randn(4, 8, generator=generator), torch.randn(4, 8, generator=generator))
        for _ in range(6)
    ]

    loaders = []

    def train(folder, epochs, resume=False, stop=None):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        loader, losses = shuffling(data, kind), {}
        loaders.append(loader)
        with Pipeline(
            model, stages=2, loss_fn=F.mse_loss, optimizer=(torch.optim.SGD, {"lr": 0.1}),
            workers="serial", max_restarts=0,
            checkpoint=Checkpoints(folder, every=None if between else 4, resume=resume),
        ) as pipe:  # fmt: skip
            for _ in range(pipe.epoch, epochs):
                for result in pipe.train_epoch(loader):
                    losses[result.step] = result.loss
                    if result.step == stop:
                        return losses
                if between:
                    pipe.save()
        return losses

    def train_and_end(*arguments, **options):
        """And end the processes that a loader keeps."""
        try:
            return train(*arguments, **options)
        finally:
            for loader in loaders:
                if getattr(loader, "_iterator", None) is not None:
                    loader._iterator._shutdown_workers()
            loaders.clear()
            gc.collect()
            for thread in threading.enumerate():
                if thread.name == "QueueFeederThread":
                    thread.join(LATEST_S)

    losses = train_and_end(tmp_path / "calm", 3)
    train_and_end(tmp_path / "run", 2 if between else 3, stop=stop)
    torch.manual_seed(99)
    found = train_and_end(tmp_path / "run", 3, resume=True)
    assert found
    assert found == {step: loss for step, loss in losses.items() if step in found}
    assert max(found) == 17
