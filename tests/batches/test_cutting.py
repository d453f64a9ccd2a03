"""Mini-batches are cut where that is clear, or marked, and refused elsewhere."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.both import opened, plain
from support.models import regression
from support.pinned import Flat as Pipeline
from torch import nn
from torch.nn import functional as F

from pipedream_rt import Along, ConfigError, Training, Whole
from pipedream_rt.batches.cutting import (
    Lists,
    cut_batch,
    keeps_state,
    kept_by_forward,
    micro_batch_sizes,
    samples_of,
    unmarked,
)
from pipedream_rt.batches.items import Batch


@given(st.integers(1, 200), st.integers(1, 20))
def test_micro_batches_are_cut_as_torch_chunks_are(samples, k):
    sizes = micro_batch_sizes(samples, k)
    chunks = [len(c) for c in torch.zeros(samples).chunk(k)]
    assert sizes == chunks + [0] * (k - len(chunks))


@given(st.integers(2, 200), st.integers(1, 20))
def test_in_pairs_no_sample_stands_alone(samples, k):
    sizes = micro_batch_sizes(samples, k, pairs=True)
    assert len(sizes) == k
    assert sum(sizes) == samples
    assert 1 not in sizes
    assert sizes == sorted(sizes, reverse=True)
    alone = micro_batch_sizes(samples, k)
    assert 1 in alone or sizes == alone


def batch(*args, target=None, **kwargs):
    return Batch(args, kwargs, target)


def test_a_sparse_tensor_stays_whole_or_is_refused():
    graph = torch.eye(4).to_sparse()
    given = batch(torch.arange(4), graph)
    assert cut_batch(given, [4])[0].args[1] is graph
    with pytest.raises(ConfigError, match=r"input 1 of the mini-batch is a sparse .*Whole\(value"):
        cut_batch(given, [2, 2])
    parts = cut_batch(batch(torch.arange(4), Whole(graph)), [2, 2])
    assert [part.args[1] is graph for part in parts] == [True, True]


def test_tensors_are_cut_and_the_rest_is_repeated():
    given = batch(x=torch.arange(5), scale=torch.tensor(2.0), name="n")
    first, second, empty = (each.kwargs for each in cut_batch(given, [3, 2, 0]))
    assert first["x"].tolist() == [0, 1, 2]
    assert second["x"].tolist() == [3, 4]
    assert second["scale"].item() == 2.0
    assert len(empty["x"]) == 0
    assert empty["name"] == "n"


def test_tensors_that_disagree_about_the_samples_are_refused_with_both_marks():
    with pytest.raises(ConfigError, match=r"input 1 .* has 4 samples where 5 .*Whole.*Along"):
        cut_batch(batch(torch.zeros(5), torch.zeros(4)), [3, 2])
    with pytest.raises(ConfigError, match=r"y\['boxes'\]\[0\] .* has 1 samples"):
        cut_batch(batch(torch.zeros(5), y={"boxes": [torch.zeros(1)]}), [3, 2])


def test_marks_say_how_to_cut():
    given = batch(
        Whole(torch.arange(5)), Along(torch.arange(10).view(2, 5), 1), lengths=Along(list("abcde"))
    )
    assert samples_of(given) == 5
    first, second = cut_batch(given, [3, 2])
    assert first.args[0].tolist() == second.args[0].tolist() == [0, 1, 2, 3, 4]
    assert second.args[1].tolist() == [[3, 4], [8, 9]]
    assert (first.kwargs["lengths"], second.kwargs["lengths"]) == (list("abc"), list("de"))
    assert unmarked(given).kwargs == {"lengths": list("abcde")}


@pytest.mark.parametrize("value", ["abc", 3, torch.zeros(3)])
def test_a_mark_that_makes_no_sense_is_refused(value):
    with pytest.raises(ConfigError, match="Along marks a tensor with the dimension 1"):
        Along(value, 1)


def test_samples():
    assert samples_of(batch("a", torch.tensor(1.0), torch.zeros(3, 2))) == 3
    assert samples_of(batch("a")) is None


@pytest.mark.parametrize("value", [[1, 2, 3], ("a", "b", "c"), [[1], [2], [3]], {"n": [1, 2, 3]}])
def test_a_list_with_as_many_entries_as_samples_is_refused(value):
    with pytest.raises(ConfigError, match=r"of 3 entries, .*Whole.*Along"):
        Lists().refuse_unclear(batch(torch.zeros(3), value), 3)


def test_a_list_that_had_another_length_before_is_none_of_samples():
    lists = Lists()
    lists.refuse_unclear(batch(torch.zeros(8), [3, 224, 224]), 8)
    lists.refuse_unclear(batch(torch.zeros(3), [3, 224, 224]), 3)
    with pytest.raises(ConfigError, match="target"):
        lists.refuse_unclear(batch(torch.zeros(3), [3, 224, 224], target=["a"] * 3), 3)


class Scaled(nn.Linear):
    def forward(self, given):
        rows, lengths = given
        return super().forward(rows) * torch.tensor(lengths).unsqueeze(1)


@pytest.mark.parametrize("micro_batches", [1, 2, 3])
def test_a_list_that_is_marked_trains_as_in_plain_pytorch(micro_batches):
    data = regression(3, samples=6, width=4)
    lengths = [0.5, 1.0, 1.5, 2.0, 0.25, 3.0]
    model = nn.Sequential(Scaled(4, 4), nn.Tanh(), nn.Linear(4, 4))
    with opened(model, micro_batches=micro_batches) as pipe:
        for _ in pipe.train_epoch(((x, Along(lengths)), y) for x, y in data):
            pass
        found = pipe.state_dict()
        mean = pipe.evaluate((((x, Along(lengths)), y) for x, y in data))
    _, expected = plain(model, data=[((x, lengths), y) for x, y in data])
    torch.testing.assert_close(found, expected)
    model.load_state_dict(expected)
    losses = [F.mse_loss(model((x, lengths)), y).item() for x, y in data]
    assert mean == pytest.approx(sum(losses) / 3)


class TimeFirst(nn.Linear):
    def forward(self, x):
        return super().forward(x).mean(0)


def test_where_time_comes_first_evaluate_asks_what_counts():
    model = TimeFirst(6, 3)
    data = [(torch.randn(5, n, 6), torch.randn(n, 3)) for n in (8, 2)]
    plain = sum(F.mse_loss(model(x), y).item() * len(y) for x, y in data) / 10
    with Pipeline([model], loss_fn=F.mse_loss, workers="serial") as pipe:
        with pytest.raises(ConfigError, match=r"not clear what each weighs.*weigh=.*Along"):
            pipe.evaluate(data)
        assert pipe.evaluate((Along(x, 1), y) for x, y in data) == pytest.approx(plain)
        assert pipe.evaluate(data[:1]) > 0  # nothing to weigh
    weigh = Training(weigh=lambda x, y: len(y))
    with Pipeline([model], loss_fn=F.mse_loss, workers="serial", training=weigh) as pipe:
        assert pipe.evaluate(data) == pytest.approx(plain)


@pytest.mark.parametrize("last", [5, 9, 12, 13, 14])
def test_a_short_last_mini_batch_leaves_no_sample_alone_to_batch_norm(last):
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 8), nn.Linear(8, 3))
    data = [(torch.randn(n, 6), torch.randint(3, (n,))) for n in (16, last)]
    with opened(model, F.cross_entropy, stages=4, micro_batches=4) as pipe:
        assert len(list(pipe.train_epoch(data))) == 2


class Codebook(nn.Module):
    """Codes that are a moving average, a count of steps, and a table that stays."""

    def __init__(self):
        super().__init__()
        self.count, self.shown, self.width = 0, None, 8
        for name in ("codes", "steps", "table"):
            self.register_buffer(name, torch.zeros(8))

    def forward(self, x):
        self.steps = self.steps + 1
        self.codes.mul_(0.9)
        self.count += 1
        self.shown = x.detach()  # set, and never read
        return x * self.width


class Masked(nn.Module):
    """A buffer that a forward reads, and a change in place of something else."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mask", torch.ones(8).bool())
        self.scale = 1.0

    def forward(self, x):
        return (x * self.scale).masked_fill_(self.mask, 0.0)


def test_what_a_forward_changes_of_its_own_is_found_by_names():
    assert kept_by_forward(Codebook()) == (["count"], ["codes", "steps"])
    assert kept_by_forward(Masked()) == ([], [])
    assert kept_by_forward(nn.BatchNorm1d(2)) == ([], [])  # a library's


@pytest.mark.parametrize(
    ("model", "expected"),
    [(Codebook(), True), (nn.BatchNorm1d(2), True), (Masked(), False), (nn.LSTM(2, 2), False)],
    ids=lambda value: type(value).__name__,
)
def test_layers_go_by_what_earlier_forwards_have_left(model, expected):
    assert keeps_state(nn.Sequential(nn.Linear(2, 2), model)) is expected
