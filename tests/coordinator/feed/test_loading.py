"""Coming back to a place in a loader, in what stands for another process: the same items follow."""

import logging

import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

from pipedream_rt.coordinator.feed.loading import (
    Loading,
    _fingerprint,
    begin_epoch_at,
    between_epochs,
)

DATA = TensorDataset(torch.arange(24.0))


class Counting(RandomSampler):
    """Shuffles by a seed and an epoch that it counts by itself, as accelerate's does."""

    def __init__(self, data):
        super().__init__(data)
        self.initial_seed, self._epoch = int(torch.randint(1000, ())), 0

    def __iter__(self):
        drawn = torch.Generator().manual_seed(self.initial_seed + self._epoch)
        yield from torch.randperm(len(DATA), generator=drawn).tolist()
        self._epoch += 1


class Hidden(Counting):
    """Counts by a name that says nothing."""

    turns = -1

    def __iter__(self):
        self.turns += 1
        self._epoch = 0
        drawn = torch.Generator().manual_seed(self.turns)
        yield from torch.randperm(len(DATA), generator=drawn).tolist()


def plain():
    return DataLoader(DATA, batch_size=4, shuffle=True)


def own_generator():
    return DataLoader(DATA, batch_size=4, shuffle=True, generator=torch.Generator())


def counting():
    return DataLoader(DATA, batch_size=4, sampler=Counting(DATA))


def prepared(**options):
    accelerate = pytest.importorskip("accelerate")
    config = accelerate.DataLoaderConfiguration(**options)
    return accelerate.Accelerator(cpu=True, dataloader_config=config).prepare(plain())


def seedable():
    return prepared(use_seedable_sampler=True)


def run(make, seed, epochs):
    """A loader of a new script that has gone through some epochs."""
    torch.manual_seed(seed)
    loader = make()
    for number in range(epochs):
        epoch_of(loader, number)
    return loader


any_loader = pytest.mark.parametrize("make", [plain, own_generator, counting, prepared, seedable])


def epoch_of(loader, number, place=None, most=100):
    """The items of an epoch, or the first of them, and the place after them."""
    loading, found = Loading(loader, number, place), []
    while loading.fetched and len(found) < most:
        found.append(loading.fetched.pop()[0].tolist())
        loading.fetch()
    return found, loading.place()


@any_loader
@pytest.mark.parametrize("epoch", [0, 1, 2])
@pytest.mark.parametrize("most", [0, 1, 3])
def test_the_same_items_follow(make, epoch, most, caplog):
    before, place = epoch_of(run(make, 1, epoch), epoch, most=most)
    loader = run(make, 1, epoch)
    whole, _ = epoch_of(loader, epoch)
    following, _ = epoch_of(loader, epoch + 1)

    loader = run(make, 2, 0)
    after, _ = epoch_of(loader, epoch, place)
    assert before + after == whole
    assert epoch_of(loader, epoch + 1)[0] == following
    assert sorted(number for item in whole for number in item) == DATA.tensors[0].tolist()
    assert not caplog.records


@any_loader
def test_between_two_epochs_the_next_one_is_the_same(make):
    loader = run(make, 1, 1)
    place = between_epochs(1, loader)
    expected, _ = epoch_of(loader, 1)
    loader = run(make, 2, 0)
    begin_epoch_at(place, loader)
    assert epoch_of(loader, 1)[0] == expected


@pytest.mark.parametrize("most", [0, 2])
def test_a_loader_that_yields_others_is_told_of(most, caplog):
    loader = DataLoader(DATA, batch_size=4, sampler=Hidden(DATA))
    epoch_of(loader, 0)
    _, place = epoch_of(loader, 1, most=most)
    with caplog.at_level(logging.WARNING):
        epoch_of(DataLoader(DATA, batch_size=4, sampler=Hidden(DATA)), 1, place)
    assert "the first item of epoch 1 is another one than before the checkpoint" in caplog.text


def test_the_first_items_of_all_kinds_are_compared():
    values = [
        torch.zeros(2), torch.ones(2), torch.zeros(2, dtype=torch.int64), torch.zeros(1, 2),
        torch.tensor([1 + 2j]).conj(), torch.eye(2).to_sparse(), [1, 2], (1, 2), [12], {"a": 1},
        {"b": 1}, {"a": 2}, None, "None", b"a", "a", object(), torch.zeros(2).numpy(),
        torch.eye(3)[1:].T, torch.tensor(3.0), [], [[]],
    ]  # fmt: skip
    assert len({_fingerprint(value) for value in values}) == len(values)
    assert _fingerprint([torch.ones(2), {"a": "b"}]) == _fingerprint([torch.ones(2), {"a": "b"}])


def test_what_the_user_sets_anew_holds():
    """The number of mini-batches of an epoch, or a seed, that the script says."""

    def make(per_epoch, seed):
        loader = DataLoader(DATA, batch_size=4)
        loader.sampler.batches_per_epoch, loader.sampler.seed = per_epoch, seed
        loader.sampler.num_epochs = seed
        return loader

    _, place = epoch_of(make(4, 1), 0, most=2)
    loader = make(10, 2)
    epoch_of(loader, 0, place)
    assert vars(loader.sampler).items() >= {
        "batches_per_epoch": 10, "seed": 2, "num_epochs": 2
    }.items()  # fmt: skip


def test_an_item_that_cannot_be_told_from_others_is_let_be():
    item = [torch.ones(2)]
    item.append(item)
    assert _fingerprint(item) is None
    loading = Loading([item], 0)
    assert loading.fetched == [item]
