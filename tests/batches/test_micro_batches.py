"""Mini-batches in micro-batches: what is fed of each, what it weighs, what is refused."""

import math

import pytest
import torch
from support.both import opened
from support.oracle import assert_same
from torch import nn
from torch.nn import functional as F

from pipedream_rt import Clip, ConfigError
from pipedream_rt.batches.forwards import Cache, SequenceForwards
from pipedream_rt.batches.items import Accumulated, Batch, batch_of
from pipedream_rt.batches.micro_batches import EMPTY, Cutter, LossChecks
from pipedream_rt.batches.weighing import Weighing
from pipedream_rt.messages.head import Mode


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
    options = {"stages": stages, "micro_batches": micro_batches, "clip": Clip(norm=0.5)}
    with opened(Net(divides), None, example=parts[0], **options) as pipe:
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
    "a mean of each": (False, [4, 4], None, 0.5, 2),
    "unequal parts": (False, [4, 1, 3], None, 1 / 3, 3),
    "told": (True, [4, 1, 3], 8, 1.0, 3),
    "told, and takes a mean": (False, [4, 3], 7, 1.0, 2),
    "fewer parts at the end": (False, [4, 3], None, 0.5, 4),
}
"""Whether the model divides, the samples of each part, what is told, the factor, and how many."""


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("stages", [1, 2])
def test_with_a_micro_batch_for_each_part_the_bits_are_those_of_plain_accumulation(name, stages):
    divides, sizes, told, factor, of = CASES[name]
    parts = parts_of(sizes, told)
    weights, norms = trained(divides, parts, of, factor, of, stages)
    expected, of_plain = plain(divides, parts, factor)
    assert norms == of_plain
    assert_same(weights, expected)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("more", [1, 4])
def test_parts_that_are_cut_further_weigh_the_same(name, more):
    divides, sizes, told, factor, of = CASES[name]
    parts = parts_of(sizes, told)
    weights, norms = trained(divides, parts, of, factor, of + more)
    expected, of_plain = plain(divides, parts, factor)
    assert norms == pytest.approx(of_plain, rel=1e-4)
    torch.testing.assert_close(weights, expected)


@pytest.mark.parametrize(
    ("count", "of", "words"),
    [
        (3, 3, "up to 3 parts needs at least 3 micro-batches, and is cut into 2; give micro_b"),
        (3, 2, "has 3 parts, and at most 2 were announced; give of="),
    ],
)
def test_parts_that_do_not_fit_are_refused(count, of, words):
    parts = parts_of([2] * 3)
    with opened(Net(False), None, example=parts[0], micro_batches=2) as pipe:
        with pytest.raises(ConfigError, match=words):
            pipe.submit(Accumulated(tuple(map(batch_of, parts[:count])), of))
        assert pipe.submit(parts[0]).result().loss > 0


# -- without a pipeline ---------------------------------------------------------------------------


def cutter(per_update, weigh=None, pairs=lambda batch: False):
    return Cutter(SequenceForwards(), Weighing(weigh, F.mse_loss), per_update, pairs)


def pair(samples):
    x = torch.arange(2.0 * samples).view(samples, 2)
    return Batch((x,), {}, x + 1)


def inputs_of(part):
    (tensor,) = part.inputs.tensors
    return tensor


@pytest.mark.parametrize(
    ("samples", "k", "sizes"), [(8, 4, [2, 2, 2, 2]), (5, 2, [3, 2]), (3, 4, [1, 1, 1, 0])], ids=str
)
def test_micro_batches_weigh_what_their_samples_are(samples, k, sizes):
    cut = cutter(k).cut(pair(samples), True)
    assert [part.samples for part in cut.parts] == sizes
    assert [part.share for part in cut.parts] == pytest.approx([n / samples for n in sizes])
    assert torch.equal(torch.cat([inputs_of(p) for p in cut.filled.values()]), pair(samples)[0][0])
    assert cut.parts[len(cut.filled) :] == [EMPTY] * sizes.count(0)


def test_what_is_fed_is_a_copy():
    batch = pair(4)
    parts = cutter(2).cut(batch, True).parts
    batch.args[0].zero_()
    assert inputs_of(parts[1]).tolist() == [[4.0, 5.0], [6.0, 7.0]]


def test_a_weight_of_the_user_takes_the_place_of_the_samples():
    cut = cutter(2, weigh=lambda x, y: int(y.sum())).cut(
        Batch((torch.zeros(4, 1),), {}, torch.tensor([0, 1, 2, 1])), True
    )
    assert [(part.weight, part.share) for part in cut.parts] == [(1, 0.25), (3, 0.75)]


@pytest.mark.parametrize(
    ("needs", "samples", "sizes"),
    [(False, 5, [2, 2, 1, 0]), (True, 5, [3, 2, 0, 0]), (True, 3, [3, 0])],
    ids=["alone", "pairs", "only the first is no single one"],
)
def test_no_sample_stands_alone_where_the_model_needs_pairs(needs, samples, sizes):
    cut = cutter(len(sizes), pairs=lambda batch: needs).cut(pair(samples), True)
    assert [part.samples for part in cut.parts] == sizes


@pytest.mark.parametrize(
    ("x", "words"),
    [(torch.ones(0, 2), "without samples cannot be trained on"), (3, "no tensor with a dimension")],
    ids=["empty", "a number"],
)
def test_what_cannot_be_cut_is_refused(x, words):
    with pytest.raises(ConfigError, match=words):
        cutter(2).cut(Batch((x,), {}, None), True)


def test_one_micro_batch_needs_no_samples_and_inference_no_target():
    (part,) = cutter(1).cut(Batch((3,), {}, None), True).parts
    assert (part.samples, part.share) == (1, 1.0)
    assert cutter(1).part(pair(2), Mode.INFER, None).target.tensors == ()


class Generates(SequenceForwards):
    """Forwards whose programs are what they were asked for."""

    def cached(self, inputs, cache, length):
        return inputs, cache, length


def test_a_forward_of_a_generation_is_fed_a_copy_and_follows_the_program_for_its_cache():
    batch, cache = pair(2), Cache("past_key_values", None)
    part = Cutter(Generates(), Weighing(None, None), 1).cached(batch, cache, 3)
    batch.args[0].zero_()
    assert inputs_of(part).tolist() == [[0.0, 1.0], [2.0, 3.0]]
    assert part.program == (part.inputs, cache, 3)


def test_the_first_micro_batches_are_compared_as_one_and_alone():
    (whole, size), *alone = cutter(4).cut(pair(8), True).first(3)
    assert (size, [count for _, count in alone]) == (6, [2, 2, 2])
    assert torch.equal(torch.cat([batch.args[0] for batch, _ in alone]), whole.args[0])


def test_the_parts_of_an_accumulated_mini_batch_share_its_micro_batches():
    cut = cutter(5).cut(Accumulated((pair(4), pair(2)), 3, 0.5), True)
    assert [part.samples for part in cut.parts] == [2, 2, 1, 1, 0]  # the third part is not there
    assert [part.share for part in cut.parts] == [0.25, 0.25, 0.25, 0.25, 0.0]
    assert len(cut.first_part.parts) == 2


def test_losses_are_compared_at_first_and_where_labels_are_first_ignored():
    def labelled(*labels):
        return cutter(2).cut(Batch((torch.ones(2, 1),), {}, torch.tensor(labels)), True)

    checks = LossChecks(1)
    assert not checks.takes(cutter(1).cut(pair(2), True), 0)  # there is nothing to compare it with
    cuts = [labelled(1, 2), labelled(1, 2), labelled(1, -100), labelled(-100, 1)]
    assert [checks.takes(cut, i) for i, cut in enumerate(cuts)] == [True, False, True, False]
    none = LossChecks(0)
    assert not any(none.takes(cut, i) for i, cut in enumerate(cuts))


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_for_a_loss_that_is_not_finite_another_mini_batch_is_compared(loss):
    checks, cut = LossChecks(1), cutter(2).cut(pair(2), True)
    assert [checks.takes(cut, 0), checks.takes(cut, 1)] == [True, False]
    checks.came(1, [loss])  # of one that was not compared
    assert not checks.takes(cut, 2)
    checks.came(0, [1.0, loss])
    assert checks.takes(cut, 3)
    checks.came(3, [1.0, 2.0])
    assert not checks.takes(cut, 4)
