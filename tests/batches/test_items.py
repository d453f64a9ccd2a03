"""What the items of a loader mean."""

import collections

import pytest
import torch
from support.pinned import Flat as Pipeline
from torch import nn
from torch.nn import functional as F

from pipedream_rt import ConfigError
from pipedream_rt.batches.items import Batch, batch_of, example_of, input_of, require_loader

X, Y = torch.ones(2, 3), torch.zeros(2)


@pytest.mark.parametrize(
    ("item", "expected"),
    [
        ((X, Y), ((X,), {}, Y)),
        ([X, Y], ((X,), {}, Y)),
        (((X, 2), {"mask": Y}, Y), ((X, 2), {"mask": Y}, Y)),
        ([[X], {}, None], ((X,), {}, None)),
    ],
    ids=["a pair", "a list", "a triple", "a triple of lists"],
)
def test_an_item_is_a_pair_or_a_triple(item, expected):
    assert batch_of(item) == Batch(*expected)


def test_of_a_dict_the_model_gets_the_entries_and_the_loss_the_whole():
    named = {"x": X, "labels": Y}
    assert batch_of(collections.UserDict(named)) == Batch((), named, named)
    assert batch_of((named, Y)) == Batch((named,), {}, Y)  # a pair, of which x is a dict


@pytest.mark.parametrize(
    ("item", "words"),
    [
        (X, "this item is a Tensor. "),
        ((X,), "is a tuple of 1. "),
        ((X, Y, Y), "is a tuple of 3. "),
        (((X,), {}, Y, Y), "is a tuple of 4. "),
        ("xy", "is a str. "),
    ],
    ids=["a tensor", "one", "three tensors", "four", "a text"],
)
def test_another_item_is_refused_with_what_it_is(item, words):
    with pytest.raises(ConfigError, match=f"must yield pairs .*{words}Give prepare="):
        batch_of(item)
    assert batch_of(item, prepare=lambda item: (X, Y)) == Batch((X,), {}, Y)


@pytest.mark.parametrize("loader", [3, None, len], ids=["number", "none", "function"])
def test_what_is_no_loader_is_refused(loader):
    with pytest.raises(ConfigError, match="evaluate takes a loader, something that yields"):
        require_loader(loader, "evaluate")


def test_a_loader_may_be_iterated_over_in_either_way():
    class Old:
        def __getitem__(self, i):
            raise IndexError

    class Untouched:
        def __iter__(self):
            raise AssertionError("something was drawn")

    require_loader(Old(), "train_epoch")
    require_loader(Untouched(), "train_epoch")


def test_an_item_to_predict_may_be_an_input_and_is_no_loader():
    assert input_of(X) == Batch((X,), {}, None)
    with pytest.raises(ConfigError, match="this item is a range"):
        input_of(range(2))


def test_an_example_may_be_an_input_or_a_loader():
    assert example_of(X) == Batch((X,), {}, None)
    assert example_of((X, Y)) == Batch((X,), {}, Y)
    loader = torch.utils.data.DataLoader([(X[0], Y[0]), (X[1], Y[1])], batch_size=2)
    assert torch.equal(example_of(loader).args[0], X)
    of_class = torch.utils.data.BatchSampler(["x", "y"], 2, False)
    assert example_of(of_class) == Batch(("x",), {}, "y")
    with pytest.raises(ConfigError, match="a generator gives each item once"):
        example_of((X, Y) for _ in range(2))
    with pytest.raises(ConfigError, match="the loader given as example yields nothing"):
        example_of(torch.utils.data.DataLoader([]))


class Rows(torch.utils.data.IterableDataset):
    """Rows that come once, as from a socket."""

    def __init__(self):
        self.rows = iter(range(24))

    def __iter__(self):
        return ((torch.full((6,), float(i)), i % 3) for i in self.rows)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x):
        return self.two(torch.tanh(self.one(x)))


def test_an_example_takes_no_rows_out_of_a_stream():
    loader, seen = torch.utils.data.DataLoader(Rows(), batch_size=4), []
    with Pipeline(
        Net(), stages=2, example=loader, loss_fn=F.cross_entropy, workers="serial",
        optimizer=(torch.optim.SGD, {"lr": 0.1}), schedule="1f1b",
    ) as pipe:  # fmt: skip
        for _ in pipe.train_epoch(loader, prepare=lambda item: seen.append(item[0][:, 0]) or item):
            pass
    assert torch.cat(seen).tolist() == list(range(24))
