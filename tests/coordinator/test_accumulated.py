"""Mini-batches whose parts are not joined: `Accumulated`."""

import pytest
import torch
from support.pinned import Flat as Pipeline
from torch import nn
from torch.nn import functional as F

from pipedream_rt import Clip, ConfigError, Training
from pipedream_rt.batches.items import Accumulated, batch_of


class Net(nn.Module):
    """A model with a loss of its own, which divides by what it is told, or takes a mean."""

    def __init__(self, divides):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)])
        self.divides = divides

    def forward(self, x, y, **told):
        for layer in self.layers:
            x = layer(x)
        losses = F.mse_loss(x, y, reduction="none").mean(-1)
        if self.divides and "num_items_in_batch" in told:
            return {"loss": losses.sum() / told["num_items_in_batch"]}
        return {"loss": losses.mean()}


def parts_of(sizes, told=None):
    generator = torch.Generator().manual_seed(3)
    parts = [
        {"x": torch.randn(n, 6, generator=generator), "y": torch.randn(n, 3, generator=generator)}
        for n in sizes
    ]
    extra = {} if told is None else {"num_items_in_batch": torch.tensor(float(told))}
    return [{**part, **extra} for part in parts]


def trained(divides, parts, of, factor, micro_batches, stages=2):
    """Return the weights after two updates, and the norms of the gradients."""
    torch.manual_seed(0)
    model = Net(divides)
    with Pipeline(
        model, stages=stages, example=parts[0], optimizer=(torch.optim.SGD, {"lr": 0.1}),
        schedule="1f1b", micro_batches=micro_batches, workers="serial",
        training=Training(clip=Clip(norm=0.5)),
    ) as pipe:  # fmt: skip
        item = Accumulated(tuple(map(batch_of, parts)), of, factor)
        for _ in range(2):
            pipe.submit(item).result()
        pipe.flush()
        norms = pipe.statistics()[0]["grad_norms"]
        return pipe.state_dict(), [norm for _, norm in norms[-2:]]


def plain(divides, parts, factor):
    torch.manual_seed(0)
    model, norms = Net(divides), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        for part in parts:
            (model(**part)["loss"] * factor).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
    return model.state_dict(), norms


CASES = {
    "a mean of each": (False, [4, 4], None, 0.5),
    "unequal parts": (False, [4, 1, 3], None, 1 / 3),
    "told": (True, [4, 1, 3], 8, 1.0),
    "told, and takes a mean": (False, [4, 3], 7, 1.0),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("stages", [1, 2])
def test_with_a_micro_batch_for_each_part_the_bits_are_those_of_plain_accumulation(name, stages):
    divides, sizes, told, factor = CASES[name]
    parts = parts_of(sizes, told)
    weights, norms = trained(divides, parts, len(parts), factor, len(parts), stages)
    expected, of_plain = plain(divides, parts, factor)
    assert norms == of_plain
    for key, value in expected.items():
        assert torch.equal(weights[key], value), key


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("more", [1, 3, 4])
def test_parts_that_are_cut_further_weigh_the_same(name, more):
    divides, sizes, told, factor = CASES[name]
    parts = parts_of(sizes, told)
    weights, norms = trained(divides, parts, len(parts), factor, len(parts) + more)
    expected, of_plain = plain(divides, parts, factor)
    assert norms == pytest.approx(of_plain, rel=1e-4)
    for key, value in expected.items():
        torch.testing.assert_close(weights[key], value)


def test_a_short_mini_batch_has_empty_micro_batches_at_its_end():
    parts = parts_of([4, 3])
    weights, _ = trained(False, parts, 4, 0.5, 4)
    expected, _ = plain(False, parts, 0.5)
    for key, value in expected.items():
        assert torch.equal(weights[key], value), key


@pytest.mark.parametrize(
    ("count", "of", "words"),
    [
        (3, 3, "up to 3 parts needs at least 3 micro-batches, and is cut into 2; give micro_b"),
        (3, 2, "has 3 parts, and at most 2 were announced; give of="),
    ],
)
def test_parts_that_do_not_fit_are_refused(count, of, words):
    parts = parts_of([2] * 3)
    with Pipeline(
        Net(False), stages=2, example=parts[0], optimizer=(torch.optim.SGD, {"lr": 0.1}),
        schedule="1f1b", micro_batches=2, workers="serial",
    ) as pipe:  # fmt: skip
        with pytest.raises(ConfigError, match=words):
            pipe.submit(Accumulated(tuple(map(batch_of, parts[:count])), of))
        assert pipe.submit(parts[0]).result().loss > 0
