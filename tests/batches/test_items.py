"""What the items of a loader mean."""

import collections

import pytest
import torch
from support.both import opened
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from pipedream_rt import Along, ConfigError
from pipedream_rt.batches.items import Batch, Items, Takes, batch_of, require_loader

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
    ("item", "words", "way"),
    [
        (X, "this item is a Tensor", r"\(\(item.a, item.b\), {}, item.y\)"),
        ((X,), "is a tuple of 1, and a sequence of layers takes 1", r"\(\(item.a, "),
        ("xy", "is a str", r"\(\(item.a, "),
    ],
    ids=["a tensor", "one", "a text"],
)
def test_another_item_is_refused_with_what_it_is_and_a_triple(item, words, way):
    with pytest.raises(ConfigError, match=rf"yield pairs .*\(\(a, b\), {{}}, y\).*{words}.*{way}"):
        batch_of(item)
    assert Items().batch(item, prepare=lambda item: (X, Y)) == Batch((X,), {}, Y)


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
    assert Items().inputs(X) == Items().inputs([X]) == Batch((X,), {}, None)
    mark = Along(X, 1)
    assert Items().inputs(mark) == Batch((mark,), {}, None)
    with pytest.raises(ConfigError, match="this item is a range"):
        Items().inputs(range(2))


def test_an_example_may_be_an_input_or_a_loader():
    items = Items()
    assert items.example(X) == Batch((X,), {}, None)
    assert items.example((X, Y)) == Batch((X,), {}, Y)
    loader = torch.utils.data.DataLoader([(X[0], Y[0]), (X[1], Y[1])], batch_size=2)
    assert torch.equal(items.example(loader).args[0], X)
    of_class = torch.utils.data.BatchSampler(["x", "y"], 2, False)
    assert items.example(of_class) == Batch(("x",), {}, "y")
    with pytest.raises(ConfigError, match="a generator gives each item once"):
        items.example((X, Y) for _ in range(2))
    with pytest.raises(ConfigError, match="the loader given as example yields nothing"):
        items.example(torch.utils.data.DataLoader([]))


# -- what the signatures say ----------------------------------------------------------------------


def takes(forward):
    """What a module with this forward can be called with."""
    return Takes.of(type("Net", (nn.Module,), {"forward": forward})())


def any_loss(output, target):
    """A loss of whose target the signature says nothing."""


ONE = takes(lambda self, x: x)
TWO = takes(lambda self, first, second: first)
ONE_OR_TWO = takes(lambda self, x, mask=None: x)
NAMED = takes(lambda self, *, x, mask=None: x)
ANY = takes(lambda self, *args, **kwargs: args)


def test_a_pair_whose_x_is_a_tuple_is_called_with_its_parts_where_the_forward_needs_them():
    for x in ((X, Y), [X, Y]):
        assert Items(TWO, F.mse_loss).batch((x, Y)) == Batch((X, Y), {}, Y)
        assert Items(ONE, F.mse_loss).batch((x, Y)) == Batch((x,), {}, Y)
        assert Items().batch((x, Y)) == Batch((x,), {}, Y)  # of a sequence
    packed = nn.utils.rnn.pack_sequence([X, X])  # a named tuple is one value
    assert Items(takes(lambda self, a, b, c, d: a)).batch((packed, Y)) == Batch((packed,), {}, Y)


@pytest.mark.parametrize("forward", [ONE_OR_TWO, ANY], ids=["defaults", "any"])
def test_a_pair_whose_x_fits_as_one_value_and_in_parts_is_refused_with_both(forward):
    both = r"\(\(item\[0\],\), {}, item\[1\]\), or .*\(\(\*item\[0\],\), {}, item\[1\]\)"
    with pytest.raises(ConfigError, match=rf"x is a tuple of 2, and the forward of Net .*{both}"):
        Items(forward, any_loss).batch(((X, Y), Y))
    for way in (((X, Y),), {}, Y), ((X, Y), {}, Y):
        assert Items(forward, any_loss).batch(way) == Batch(*way)


def test_x_stays_one_value_where_it_was_one_before():
    """Lists of images, of which the last of an epoch has as many as the forward has arguments."""
    items, images = Items(ONE_OR_TWO, any_loss), [X, X, X]
    assert items.batch((images, Y)) == Batch((images,), {}, Y)
    assert items.batch((images[:2], Y)) == Batch((images[:2],), {}, Y)


def test_a_pair_whose_x_is_a_dict_is_called_with_its_entries_where_the_forward_needs_them():
    x = {"first": X, "second": Y}
    assert Items(TWO, F.mse_loss).batch((x, Y)) == Batch((), x, Y)
    assert Items(NAMED, F.mse_loss).batch(({"x": X}, Y)) == Batch((), {"x": X}, Y)
    assert Items(ONE, F.mse_loss).batch((x, Y)) == Batch((x,), {}, Y)
    encoded = collections.UserDict(x=X, mask=Y)  # as a BatchEncoding, which is not sent as one
    assert Items(ONE_OR_TWO, F.mse_loss).batch((encoded, Y)) == Batch((), dict(encoded), Y)
    with pytest.raises(ConfigError, match=r"a dict of 1, .* or .*\(\(\), item\[0\], item\[1\]\)"):
        Items(ONE, F.mse_loss).batch(({"x": X}, Y))


@pytest.mark.parametrize(
    ("forward", "loss", "item", "expected"),
    [
        (TWO, F.mse_loss, (X, X, Y), ((X, X), {}, Y)),
        (TWO, any_loss, [X, X, Y], ((X, X), {}, Y)),
        (ONE, any_loss, (X, Y, 0.3), ((X,), {}, (Y, 0.3))),
        (None, any_loss, (X, Y, 0.3), ((X,), {}, (Y, 0.3))),
        (ONE_OR_TWO, F.cross_entropy, (X, Y, Y), ((X, Y), {}, Y)),
        (ONE_OR_TWO, nn.CrossEntropyLoss(), (X, Y, Y), ((X, Y), {}, Y)),
        (ONE_OR_TWO, any_loss, (X, X, Y, Y), None),
        (TWO, None, (X, X, Y), ((X, X), {}, Y)),
        (takes(lambda self, a, b, labels: a), None, (X, X, Y), ((X, X, Y), {}, None)),
        (TWO, None, (X, Y), ((X, Y), {}, None)),
    ],
    ids=[
        "two inputs", "a list", "two targets", "of a sequence", "a target that is a tensor",
        "a loss that is a module", "either", "the loss in the script", "the model's own loss",
        "a pair for a model with its own loss",
    ],
)  # fmt: skip
def test_several_values_are_read_by_the_signatures(forward, loss, item, expected):
    items = Items(forward, loss)
    if expected is not None:
        assert items.batch(item) == items.inputs(item) == Batch(*expected)
        return
    ways = r"\(\(item\[0\],\), {}, \(item\[1\], .*\)\), or .*\(\(item\[0\], item\[1\]\), {}, \("
    with pytest.raises(ConfigError, match=f"the forward of Net takes 1 to 2, .*{ways}"):
        items.batch(item)


def test_several_values_that_nothing_takes_are_refused_with_a_triple_that_has_the_target():
    way = r"\(\(item\[0\], item\[1\], item\[2\]\), {}, item\[3\]\)"
    with pytest.raises(
        ConfigError, match=rf"a tuple of 4, and the forward of Net takes 2\..*{way}"
    ):
        Items(TWO, F.mse_loss).batch((X, X, X, Y))
    with pytest.raises(
        ConfigError,
        match=r"takes 0 and others by name\..*\(\(item\[0\], item\[1\]\), {}, item\[2\]\)",
    ):
        Items(NAMED, F.mse_loss).batch((X, X, Y))
    with pytest.raises(ConfigError, match=r"and a sequence of layers takes 1\."):
        Items(None, F.mse_loss).batch((X, X, Y))


def test_what_is_predicted_is_read_as_what_is_trained_on_and_may_lack_the_target():
    items = Items(TWO, F.mse_loss)
    assert items.inputs((X, X, Y)) == Batch((X, X), {}, Y)
    assert items.inputs((X, X)) == Batch((X, X), {}, None)
    three = Items(takes(lambda self, a, b, c: a), F.mse_loss)
    assert three.inputs((X, X, X)) == Batch((X, X, X), {}, None)


class Graph:
    """A batch of graphs, as torch_geometric has them: entries, and no mapping."""

    def __init__(self, **entries):
        self.entries = entries

    def to_dict(self):
        return self.entries


@pytest.mark.parametrize("kind", [dict, collections.UserDict, Graph])
def test_entries_that_the_forward_does_not_take_are_left_to_the_loss(kind, caplog):
    caplog.set_level("INFO", "pipedream_rt")
    item = kind(first=X, second=X, y=Y, ptr=Y)
    all_of_it = {"first": X, "second": X, "y": Y, "ptr": Y}
    items, taken = Items(TWO, any_loss), {"first": X, "second": X}
    for _ in range(2):
        assert items.batch(item) == Batch((), taken, all_of_it)
    assert caplog.text.count("takes no 'y' and no 'ptr' of an item") == 1
    # A loss that takes a tensor gets the one that is called a target, or that is left alone.
    assert Items(TWO, F.mse_loss).batch(item) == Batch((), taken, Y)
    assert Items(TWO, F.mse_loss).batch({**taken, "mass": Y}) == Batch((), taken, Y)
    assert Items(ANY, any_loss).batch(item) == Batch((), all_of_it, all_of_it)


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        (
            {"y": Y, "labels": Y},
            r"which of them is the target.*item\['y'\]\), or .*item\['labels'\]",
        ),
        (
            {"mass": Y, "ptr": Y},
            r"which of them is the target.*item\['mass'\]\), or .*item\['ptr'\]",
        ),
        ({}, r"none of its entries is left to be the target.*, item\['labels'\]\)"),
    ],
    ids=["two targets", "two others", "none"],
)
def test_entries_of_which_none_is_the_target_for_sure_are_refused(entries, words):
    item = {"first": X, "second": X, **entries}
    kept = r"\(\(\), {'first': item\['first'\], 'second': item\['second'\]}, item"
    with pytest.raises(ConfigError, match=words) as raised:
        Items(TWO, F.mse_loss).batch(item)
    assert raised.match(kept)
    found = Items(TWO, F.mse_loss).inputs(item)  # nothing is asked for a target
    assert found == Batch((), {"first": X, "second": X}, None)


def test_entries_that_do_not_fit_go_to_the_forward_which_says_so():
    for entries in ({"first": X}, {"x": X}):
        assert Items(TWO, any_loss).batch(entries) == Batch((), entries, entries)
        assert Items().batch(entries) == Batch((), entries, entries)


def test_a_loss_of_several_targets_is_refused_with_what_to_give():
    with pytest.raises(ConfigError, match=r"takes y and w beside the output.*\*target"):
        Items(ONE, lambda output, y, w: output)
    with pytest.raises(ConfigError, match="takes positive and negative beside"):
        Items().for_loss(nn.TripletMarginLoss())
    Items(ONE, lambda output, y, w=None: output)
    Items(ONE, torch.add)  # of which nobody can tell


def test_another_loss_reads_the_same_items():
    items = Items(ONE_OR_TWO, F.cross_entropy, prepare=lambda item: item[1:])
    assert items.batch((0, X, Y, Y)) == Batch((X, Y), {}, Y)
    with pytest.raises(ConfigError, match="the loss may take what is left"):
        items.for_loss(any_loss).batch((0, X, Y, Y))


def test_the_prepare_of_a_call_goes_before_that_of_the_pipeline_and_none_reads_a_batch():
    items = Items(prepare=lambda item: (item["x"], item["y"]))
    assert items.batch({"x": X, "y": Y}) == items.inputs({"x": X, "y": Y}) == Batch((X,), {}, Y)
    assert items.batch(3, prepare=lambda item: (X, item)) == Batch((X,), {}, 3)
    assert items.example({"x": X, "y": Y}) == Batch((X,), {}, Y)
    with pytest.raises(ConfigError, match=r"prepare raised TypeError.*is an item as the loader"):
        items.example(3)
    read = Batch((X, X), {}, Y)
    assert items.batch(read) == items.example(read) == read
    with pytest.raises(ConfigError, match="prepare must be a function of an item"):
        Items(prepare=(X, Y))


def test_a_forward_that_has_no_signature_takes_one_input(monkeypatch):
    net = nn.Identity()
    monkeypatch.setattr(net, "forward", torch.add, raising=False)
    assert Items(Takes.of(net), any_loss).batch(((X, X), Y)) == Batch(((X, X),), {}, Y)


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
    with opened(Net(), F.cross_entropy, example=loader) as pipe:
        for _ in pipe.train_epoch(loader, prepare=lambda item: seen.append(item[0][:, 0]) or item):
            pass
    assert torch.cat(seen).tolist() == list(range(24))


def test_single_samples_in_the_place_of_mini_batches_are_answered_with_a_loader():
    dataset = TensorDataset(torch.ones(4, 2), torch.ones(4))
    with pytest.raises(ConfigError, match=r"train_epoch takes a loader.*give DataLoader"):
        require_loader(dataset, "train_epoch")
    with pytest.raises(ConfigError, match="TensorDataset yields single samples"):
        Items().example(dataset)
    require_loader(DataLoader(dataset, batch_size=2), "train_epoch")
