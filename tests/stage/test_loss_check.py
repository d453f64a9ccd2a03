"""The loss of a whole mini-batch is compared with the mean of those of its micro-batches."""

import functools
import math
import random
import threading

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support.labelled import Counts
from torch import nn

from pipedream_rt.errors import ConfigError
from pipedream_rt.messages.tree import flat_copy
from pipedream_rt.stage.loss_check import Compared, LossCheck, joined, verdict, why_no_mean

CLASSES, SAMPLES = 5, 8
WEIGHTS = torch.tensor([1.0, 5.0, 0.2, 2.0, 1.0])


def contrastive(output, y):
    """Each sample against all others, as in SimCLR."""
    z = F.normalize(output, dim=1)
    return F.cross_entropy(z @ z.T / 0.1, torch.arange(len(z)).roll(1))


def correlation(output, y):
    x, y = output[:, 0] - output[:, 0].mean(), y.double() - y.double().mean()
    return 1 - (x * y).sum() / (x.norm() * y.norm() + 1e-8)


NO_MEANS = {
    "a sum": lambda output, y: F.cross_entropy(output, y, reduction="sum"),
    "a sum by torch": nn.CrossEntropyLoss(reduction="sum"),
    "contrastive": contrastive,
    "a correlation": correlation,
    "a ranking": lambda output, y: (output[:, :1] - output[:, 1:2].T).relu().mean(),
    "a root of a mean": lambda output, y: output.pow(2).mean().sqrt(),
    "weights of classes": lambda output, y: F.cross_entropy(output, y, weight=WEIGHTS),
}

MEANS = {
    "a mean": lambda output, y: output.pow(2).mean(),
    "a module that keeps something": Counts(),
    "a mean of sums": lambda output, y: output.pow(2).sum() / len(output),
    "cross entropy": lambda output, y: F.cross_entropy(output, y),
    "a mean over elements": lambda output, y: F.mse_loss(output, F.one_hot(y, CLASSES).float()),
    "labels made flat": lambda output, y: F.cross_entropy(output.view(-1, CLASSES), y.view(-1)),
}


def of_dict(output, y):
    """Parts of the loss beside the total, which alone is compared."""
    return {"loss": F.cross_entropy(output, y), "sum": output.sum()}


def data(samples=SAMPLES):
    generator = torch.Generator().manual_seed(0)
    y = torch.randint(CLASSES, (samples,), generator=generator)
    return torch.randn(samples, CLASSES, generator=generator), y


def look(check, sizes, x, y, shares=None):
    """Let a check look at a mini-batch in parts of some sizes."""
    shares = shares or [size / len(x) for size in sizes]
    parts = zip(x.split(sizes), y.split(sizes), shares, sizes, strict=True)
    for output, target, share, size in parts:
        look_at(check, output, target, share, len(sizes), size)


def look_at(check, output, target, *numbers):
    """Let a check look at a micro-batch, whose loss then changes output and target in place."""
    output, target = output.clone(), flat_copy(target)
    check.keep(output, target, *numbers)
    for tensor in (output, *target.tensors):
        tensor.zero_()
    check.compare()


@pytest.mark.parametrize("name", NO_MEANS)
def test_a_loss_that_is_no_mean_is_refused_with_both_numbers(name):
    x, y = data()
    with pytest.raises(ConfigError, match="the loss is no mean over samples") as caught:
        look(LossCheck(NO_MEANS[name]), [2, 2, 2, 2], x, y)
    loss_fn = NO_MEANS[name]
    whole = loss_fn(x, y).item()
    mean = sum(loss_fn(a, b).item() for a, b in zip(x.split(2), y.split(2))) / 4
    text = str(caught.value)
    assert f"for 4 micro-batches together it is {whole:.3g}"[:-1] in text
    assert f"the weighed mean of theirs is {mean:.3g}"[:-1] in text
    for way_out in ("weigh=", 'Training(loss="whole")', "check_loss=0"):
        assert way_out in text


@pytest.mark.parametrize("sizes", [[2, 2, 2, 2], [3, 3, 2], [7, 1]], ids=str)
@pytest.mark.parametrize("name", [*MEANS, "a dict"])
def test_a_mean_is_not_refused_and_nothing_is_drawn_or_kept(name, sizes, caplog):
    loss_fn = MEANS.get(name, of_dict)
    x, y = data()
    before, kept = torch.get_rng_state(), x.clone()
    look(LossCheck(loss_fn), sizes, x, y)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(x, kept)
    assert not caplog.records


def test_a_loss_that_is_a_module_stays_as_it_was():
    loss_fn = Counts()
    look(LossCheck(loss_fn), [4, 4], *data())
    assert (loss_fn.calls.item(), loss_fn.scale.dtype) == (0, torch.float32)


def test_shares_say_what_a_micro_batch_weighs():
    def loss_fn(output, y):
        return F.cross_entropy(output, y, weight=WEIGHTS)

    x, y = data()
    sizes = [2, 2, 4]
    weights = [WEIGHTS[part].sum().item() for part in y.split(sizes)]
    look(LossCheck(loss_fn), sizes, x, y, [weight / sum(weights) for weight in weights])
    with pytest.raises(ConfigError, match="no mean over samples"):
        look(LossCheck(loss_fn), sizes, x, y)


def test_each_mini_batch_is_compared():
    x, y = data()
    check = LossCheck(lambda output, y: (output * y[:, None]).sum())
    look(check, [4, 4], x, torch.zeros_like(y))
    with pytest.raises(ConfigError, match="no mean"):
        look(check, [4, 4], x, y)


def test_one_micro_batch_is_not_compared():
    check = LossCheck(lambda output, y: 1 / 0)
    look_at(check, *data(), 1.0, 1, SAMPLES)


def noting_sizes(output, y):
    SIZES.append(len(output))  # copies share it, as they share what is imported
    return output.mean()


SIZES = []


def test_of_large_outputs_two_micro_batches_are_compared(monkeypatch):
    x, y = data()
    monkeypatch.setattr("pipedream_rt.stage.loss_check._MOST_BYTES", x.nbytes - 1)
    monkeypatch.setitem(globals(), "SIZES", [])
    check = LossCheck(noting_sizes)
    for _ in range(2):
        look(check, [2, 2, 2, 2], x, y)
    assert max(SIZES) == 4
    assert SIZES.count(4) == 2


def test_a_loss_is_compared_on_what_it_is_given_though_it_changes_that_in_place():
    y = torch.arange(1, 9)

    def loss_fn(output, y):
        y.sub_(1)  # labels that count from one
        return output.gather(1, y[:, None]).mean()

    x = torch.rand(8, 8)
    look(LossCheck(loss_fn), [4, 4], x, y)
    assert y.tolist() == [*range(1, 9)]


def test_a_loss_that_draws_is_told_once_and_compared_no_more(caplog):
    x, y = data()
    check = LossCheck(lambda output, y: F.cross_entropy(F.dropout(output, 0.5), y))
    for _ in range(2):
        look(check, [4, 4], x, y)
    assert caplog.text.count("the loss draws random numbers") == 1


def counting():
    """A loss in whose closure a count and a moving mean are."""
    state = {"n": 0}

    def loss_fn(output, y):
        loss = output.pow(2).mean()
        state["n"] += 1
        state["mean"] = 0.9 * state.get("mean", loss.item()) + 0.1 * loss.item()
        return loss / state["n"]

    return loss_fn, lambda: state == {"n": 0}


def partial_of_a_list():
    calls = []
    loss_fn = functools.partial(lambda calls, output, y: (calls.append(1), output.mean())[1], calls)
    return loss_fn, lambda: not calls


def moving():
    class Moving:
        """Counts in its class, and has arrays that it changes in place."""

        calls = 0

        def __init__(self):
            self.tensor, self.array = torch.zeros(2), np.zeros(2)

        def __call__(self, output, y):
            Moving.calls += 1
            self.tensor += 1
            self.array += 1
            return output.mean() * self.tensor.sum()

    loss_fn = Moving()
    return loss_fn, lambda: not (Moving.calls or loss_fn.tensor.any() or loss_fn.array.any())


class Around(nn.Module):
    """A module that calls a function with a state."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, output, y):
        return self.inner(output, y)


def module_around_a_function():
    inner, is_unchanged = counting()
    return Around(inner), is_unchanged


def dropping():
    """A loss that draws from a generator of its own."""
    own = torch.Generator().manual_seed(0)
    before = own.get_state()

    def loss_fn(output, y):
        return (output * torch.rand(output.shape, generator=own)).mean()

    return loss_fn, lambda: torch.equal(own.get_state(), before)


def drawing_outside():
    before = np.random.get_state()[1:3], random.getstate()

    def is_unchanged():
        (keys, position), python = before
        now = np.random.get_state()
        return (now[1] == keys).all() and now[2] == position and random.getstate() == python

    return lambda output, y: output.mean() * np.random.random() * random.random(), is_unchanged


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (counting, ""),
        (partial_of_a_list, ""),
        (moving, ""),
        (module_around_a_function, ""),
        (dropping, "so it keeps a state (a count, a moving mean, a random generator of its own)"),
        (drawing_outside, "the loss draws random numbers"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_loss_with_a_state_keeps_it_and_is_no_loss_that_draws(make, words, caplog):
    loss_fn, is_unchanged = make()
    check = LossCheck(loss_fn)
    for _ in range(2):
        look(check, [2, 2, 4], *data())
    assert is_unchanged()
    assert caplog.text.count("WARNING") == bool(words)
    assert words in caplog.text


def test_a_sum_that_keeps_what_it_computed_is_refused_all_the_same():
    kept = []

    def loss_fn(output, y):
        kept.append(output.pow(2).sum().item())
        return output.pow(2).sum()

    with pytest.raises(ConfigError, match="no mean over samples"):
        look(LossCheck(loss_fn), [4, 4], *data())


def test_a_loss_that_cannot_be_copied_is_told(caplog):
    lock = threading.Lock()
    look(LossCheck(lambda output, y: output.mean() + lock.locked()), [4, 4], *data())
    assert "it cannot be copied (cannot pickle '_thread.lock' object" in caplog.text


@pytest.mark.parametrize(
    ("loss_fn", "output", "words"),
    [
        (lambda output, y: output.mean(), torch.arange(2.0), "their outputs cannot be joined"),
        (lambda output, y: output[:4][5], torch.ones(8, 5), "computed of all of them (index 5"),
    ],
    ids=["a scalar", "an error"],
)
def test_what_cannot_be_compared_is_told(loss_fn, output, words, caplog):
    check, y = LossCheck(loss_fn), torch.zeros(8)
    parts = output if output.dim() == 1 else output.split(4)
    for part, target in zip(parts, y.split(4), strict=True):
        look_at(check, part, target, 0.5, 2, 4)
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert words in record.getMessage()


# -- the parts of it ----------------------------------------------------------------------------


def test_values_are_joined_along_their_samples():
    values = [{"x": torch.full((n * 3, 2), float(n)), "n": torch.tensor(7)} for n in (1, 2)]
    structure, (x, n) = joined(values, [1, 2])
    assert x.shape == (9, 2)
    assert n == 7
    assert structure == joined(values[:1], [1])[0]


@pytest.mark.parametrize(
    ("values", "samples"),
    [
        ([torch.ones(2), [torch.ones(2)]], [2, 2]),
        ([torch.ones(2, 3), torch.ones(2, 4)], [2, 2]),
        ([torch.ones(2), torch.ones(6)], [2, 2]),
        ([torch.ones(3), torch.zeros(3)], [2, 2]),
        ([torch.tensor(1.0), torch.tensor(2.0)], [2, 2]),
    ],
    ids=["structures", "shapes", "rows for each sample", "no samples", "numbers"],
)
def test_what_has_no_samples_in_common_is_not_joined(values, samples):
    assert joined(values, samples) is None


def test_a_part_that_weighs_nothing_may_be_nan():
    assert not why_no_mean(2.0, [(2.0, 0.5), (math.nan, 0.0)], 1e-7)
    assert "no mean over samples" in why_no_mean(4.0, [(2.0, 0.5), (math.nan, 0.0)], 1e-7)


@pytest.mark.parametrize("odd", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_is_left_to_others(odd):
    assert not why_no_mean(odd, [(1.0, 0.5), (2.0, 0.5)], 1e-7)
    assert not why_no_mean(1.0, [(odd, 0.5), (2.0, 0.5)], 1e-7)


def test_a_difference_of_rounding_is_none():
    parts = [(1.0, 0.25), (3.0, 0.25)]  # of which the shares are halves
    assert not why_no_mean(2.0, parts, 0.0)
    assert not why_no_mean(2.0002, parts, 1.1e-4)
    assert "together it is 2.0002, and the weighed mean of theirs is 2" in why_no_mean(
        2.0002, parts, 0.9e-4
    )


def test_a_mean_that_is_zero_by_cancelling_has_the_rounding_of_its_parts():
    assert not why_no_mean(1e-5, [(1.0, 0.5), (-1.0, 0.5)], 1e-4)


# -- of what a loss is computed ------------------------------------------------------------------


def found_of(loss_fn, parts=4, **options):
    x, y = data()
    pairs = zip(x.chunk(parts), y.chunk(parts))
    return verdict(loss_fn, [Compared(a, b, len(a) / 8, len(a)) for a, b in pairs], **options)


def of_eight(output, y):
    """Knows how many samples a mini-batch has."""
    return F.cross_entropy(output.view(8, -1), y)


@pytest.mark.parametrize(
    ("loss_fn", "is_mean", "is_of_all", "why"),
    [
        (F.cross_entropy, True, False, ""),
        (NO_MEANS["a sum"], False, True, "no mean over samples"),
        (NO_MEANS["contrastive"], False, True, "no mean over samples"),
        (of_eight, None, True, "computed of 2 of the 8 samples"),
        (lambda output, y: F.cross_entropy(F.dropout(output), y), None, True, "draws random"),
        (counting()[0], True, True, "keeps a state"),
        (lambda output, y: 1 / 0, None, True, "computed of all of them"),
    ],
)
@pytest.mark.parametrize("precisely", [True, False])
def test_a_loss_says_by_a_mini_batch_of_what_it_is_computed(
    loss_fn, is_mean, is_of_all, why, precisely
):
    found = found_of(loss_fn, precisely=precisely)
    assert (found.is_mean, found.is_of_all) == (is_mean, is_of_all)
    assert why in found.why
