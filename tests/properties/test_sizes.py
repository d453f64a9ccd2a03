"""Models between whose layers sizes differ in every mini-batch: the bits of plain PyTorch.

After the first few sizes they follow one program for all, with other numbers in it; and whatever
number of programs they need, those that were followed longest ago are forgotten on all sides.
"""

import functools

import pytest
import torch
import torch.nn.functional as F
from support.faults import losses_through_death
from support.oracle import assert_same
from support.pinned import Pipeline
from torch import nn

from pipedream_rt import Checkpoints
from pipedream_rt.batches import recorded_forwards

SGD = (torch.optim.SGD, {"lr": 0.1})


class Texts(nn.Module):
    """A mask, positions and heads between layers; with ``reads``, the lengths are read."""

    def __init__(self, reads=False):
        super().__init__()
        torch.manual_seed(2)
        self.embed = nn.Embedding(20, 8)
        self.positions = nn.Parameter(torch.randn(64, 8))
        self.blocks = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])
        self.drop, self.head = nn.Dropout(0.2), nn.Linear(8, 3)
        self.reads = reads

    def forward(self, words, lengths):
        samples, length = words.shape
        h = self.embed(words) + self.positions[:length]
        mask = torch.tril(torch.ones(length, length, dtype=torch.bool))
        for block in self.blocks:
            q = block(h).view(samples, length, 2, 4).transpose(1, 2)
            mixed = F.scaled_dot_product_attention(q, q, q, attn_mask=mask)
            h = h + self.drop(mixed.transpose(1, 2).reshape(samples, length, 8))
        if self.reads:
            return self.head(
                torch.stack([h[i, :n].mean(0) for i, n in enumerate(lengths.tolist())])
            )
        return self.head(h.sum(1) / length)


def texts(count, samples=4):
    generator = torch.Generator().manual_seed(7)

    def item(i):
        length = 5 + i % 23
        words = torch.randint(20, (samples, length), generator=generator)
        lengths = torch.randint(1, length + 1, (samples,), generator=generator)
        return (words, lengths), {}, torch.randint(3, (samples,), generator=generator)

    return [item(i) for i in range(count)]


def open_pipe(model, data, **options):
    # With dropout: what is drawn has the names of steps, which are the same in both programs.
    kept = {"stages": 3, "loss_fn": F.cross_entropy, "optimizer": SGD, "example": data[0]}
    return Pipeline(model, **{**kept, "workers": "serial", **options})


def trained(model, data, victim="", **options):
    with open_pipe(model, data, **options) as pipe:
        losses = losses_through_death(pipe, data, victim, step=9)
        known = len(pipe._run.feeder.forwards.cuts)
        assert len(pipe.restarts) == bool(victim)
        return losses, pipe.evaluate(data), pipe.state_dict(), known


@functools.cache
def recorded_for_each(reads=False, count=14, samples=4, **options):
    """The same with a program for each size: this way does nothing that the other might."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(recorded_forwards, "_FIRST", 10**6)
        return trained(Texts(reads), texts(count, samples), **options)


@pytest.mark.parametrize("schedule", ["async-1f1b", "1f1b", "gpipe", "2bw", "zero-bubble"])
def test_one_program_for_all_sizes_has_the_bits_of_one_for_each(schedule):
    data = texts(14, samples=8)
    options = {"schedule": schedule, "micro_batches": 4 if schedule != "async-1f1b" else 1}
    losses, loss, weights, known = trained(Texts(), data, **options)
    expected = recorded_for_each(samples=8, **options)
    assert (losses, loss) == expected[:2]
    assert_same(weights, expected[2])
    assert known < expected[3]


def test_it_is_plain_training():
    data = texts(14)
    model = Texts()
    model.drop.p = 0.0
    plain = Texts()
    plain.drop.p = 0.0
    optimizer, expected = torch.optim.SGD(plain.parameters(), lr=0.1), []
    for (words, lengths), _, target in data:
        optimizer.zero_grad()
        loss = F.cross_entropy(plain(words, lengths), target)
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    losses, _, weights, _ = trained(model, data, schedule="1f1b")
    assert losses == expected
    assert_same(weights, plain.state_dict())


@pytest.mark.thinned(2)
@pytest.mark.processes
@pytest.mark.parametrize("reads", [False, True], ids=["sizes", "values"])
@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "again"])
@pytest.mark.parametrize("kept", [False, True], ids=["from the start", "from a checkpoint"])
def test_programs_are_forgotten_and_a_recovery_has_those_it_needs(
    monkeypatch, tmp_path, reads, recompute, kept
):
    """Four are known at a time; a mini-batch brings a new one, and a worker dies."""
    data = texts(17)
    options = {"schedule": "async-1f1b"}
    expected = recorded_for_each(reads, 17, **options)
    monkeypatch.setattr(recorded_forwards, "_MOST", 4)
    monkeypatch.setattr(recorded_forwards, "_FIRST", 3 if not reads else 10**6)
    checkpoint = Checkpoints(tmp_path / "run", every=3) if kept else None
    losses, loss, weights, known = trained(
        Texts(reads), data, "worker-1", workers="local", max_restarts=1, checkpoint=checkpoint,
        recompute=recompute, **options,
    )  # fmt: skip
    assert (losses, loss) == expected[:2]
    assert_same(weights, expected[2])
    if kept and reads:
        assert known < expected[3]  # else the log of the feed needs all of them
