"""Who looks at a loader leaves no trace of it."""

import multiprocessing
import random
import threading

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, Sampler

from pipedream_rt import ConfigError
from pipedream_rt.batches import looking as module
from pipedream_rt.batches.looking import begun, is_loader, looking


class Rows(torch.utils.data.Dataset):
    """Rows to which noise of the data set's own generator is added."""

    def __init__(self, draw):
        self.draw = draw

    def __len__(self):
        return 12

    def __getitem__(self, i):
        return i + self.draw()


class Shuffled(Sampler):
    """A sampler that shuffles in place, by a generator of its own."""

    def __init__(self):
        self.order, self.draws = list(range(12)), random.Random(0)

    def __len__(self):
        return 12

    def __iter__(self):
        self.draws.shuffle(self.order)
        return iter(self.order)


class Counting:
    """A loader of the script that counts its epochs."""

    def __init__(self, *kept):
        self.epoch, self.kept = 0, kept

    def __iter__(self):
        self.epoch += 1
        for i in range(6):
            yield torch.tensor([self.epoch, i, torch.randint(9, ()).item(), random.randrange(9)])


class Stream(torch.utils.data.IterableDataset):
    """Rows that come once, as from a socket."""

    def __init__(self, *kept):
        self.rows, self.kept = iter(range(24)), kept

    def __iter__(self):
        return (row + np.random.randint(2) for row in self.rows)


def numbering():
    count = 0

    def numbered(items):
        nonlocal count
        count += 1
        return torch.tensor([count, *items])

    return numbered


def counting_class():
    class Counted:
        epoch = 0

        def __iter__(self):
            Counted.epoch += 1
            return iter([Counted.epoch, 0, 0])

    return Counted()


def kinds():
    own, lock = np.random.default_rng(0), threading.Lock()
    seeded = torch.Generator().manual_seed(2)
    uneven = RandomSampler(range(12), generator=seeded)
    return {
        "a list": [1, 2, 3],
        "shuffled": DataLoader(range(12), 2, shuffle=True),
        "shuffled by its own generator": DataLoader(range(12), 2, shuffle=True, generator=seeded),
        "a batch sampler": DataLoader(range(12), batch_sampler=BatchSampler(uneven, 2, False)),
        "a sampler": DataLoader(range(12), 2, sampler=Shuffled()),
        "a data set that draws": DataLoader(Rows(own.random), 2),
        "draws of torch": DataLoader(Rows(lambda: torch.rand(()).item()), 2),
        "draws of Python": DataLoader(Rows(random.random), 2),
        "draws of NumPy": DataLoader(Rows(np.random.random), 2),
        "a function with state": DataLoader(range(12), 2, collate_fn=numbering()),
        "a class of the script": Counting(),
        "a class that counts": counting_class(),
        "a stream": DataLoader(Stream(), 2),
        "one that cannot be copied": Counting(lock),
        "a stream that cannot be copied": DataLoader(Stream(lock), 2),
        "a stream with a generator": DataLoader(Stream(lock), 2, generator=seeded),
    }


def epochs_of(name, looks=()):
    """Return what two epochs yield, and what is drawn afterwards."""
    torch.manual_seed(3), random.seed(3), np.random.seed(3)
    loader = kinds()[name]
    for count in looks:
        assert len(looking(loader, count)) == count
    found = [[torch.as_tensor(item).tolist() for item in begun(loader)] for _ in range(2)]
    return found, torch.rand(1).item(), random.random(), np.random.random()


@pytest.mark.parametrize("looks", [[1], [2, 3], [3, 1]], ids=str)
@pytest.mark.parametrize("name", kinds())
def test_a_loader_yields_what_it_would_and_all_generators_are_as_they_were(name, looks):
    assert epochs_of(name, looks) == epochs_of(name)


@pytest.mark.parametrize("kept", [None, threading.Lock()], ids=["a copy", "itself"])
def test_the_script_may_seed_between_looking_and_training(kept):
    def order_of(looks):
        rows = Rows(lambda: kept is None)
        loader = DataLoader(rows, 2, shuffle=True)
        torch.manual_seed(1)
        if looks:
            looking(loader, 2)
        torch.manual_seed(4)
        return [item.tolist() for item in begun(loader)], torch.rand(1).item()

    assert order_of(looks=True) == order_of(looks=False)


def test_a_stream_that_was_looked_at_itself_goes_on_after_another_seed():
    loader = DataLoader(Stream(threading.Lock()), 2)
    torch.manual_seed(1)
    first = looking(loader, 1)[0].tolist()
    torch.manual_seed(4)
    items = begun(loader)
    assert next(items).tolist() == first
    expected = torch.Generator().manual_seed(4)
    torch.empty((), dtype=torch.int64).random_(generator=expected)  # as iter(loader) draws
    assert torch.equal(torch.get_rng_state(), expected.get_state())


def test_a_loader_that_loads_its_place_does_not_go_on_from_where_it_was_looked_at():
    loader = Counting(threading.Lock())
    looking(loader, 1)
    assert next(begun(loader, anew=True))[0] == 2
    assert next(begun(loader))[0] == 3


@pytest.mark.processes
@pytest.mark.parametrize("kept", [[], [threading.Lock()]], ids=["a copy", "itself"])
def test_worker_processes_that_begin_for_a_look_end_with_it(kept):
    rows = Rows(lambda: len(kept))
    loader = DataLoader(rows, 2, num_workers=1, persistent_workers=True)
    before = multiprocessing.active_children()
    assert looking(loader, 1)[0].tolist() == [len(kept), 1 + len(kept)]
    assert multiprocessing.active_children() == before
    for thread in threading.enumerate():
        if thread.name == "QueueFeederThread":  # ends by itself, once torch has closed its queue
            thread.join(20)
    assert loader._iterator is None


def test_an_iterator_is_refused():
    with pytest.raises(ConfigError, match="a list_iterator gives each item once"):
        looking(iter([1]), 1)
    with pytest.raises(ConfigError, match="a generator gives each item once"):
        looking((i for i in range(3)), 1)


def test_a_copy_shares_what_is_large_and_one_of_too_much_is_not_made(monkeypatch):
    class Writing:
        def __init__(self, words):
            self.words, self.small, self.large = words, torch.zeros(2), np.zeros(1 << 12)

        def __iter__(self):
            self.small += 1
            self.large += 1
            yield self.large.sum().item()

    monkeypatch.setattr(module, "_MOST_BYTES", 1 << 14)
    loader = Writing([])
    assert looking(loader, 1) == [1 << 12]
    assert (loader.small.sum(), loader.large.sum()) == (0, 1 << 12)
    longer = Writing(["word"] * 10 + list(range(1 << 14)))
    assert looking(longer, 1) == [1 << 12]
    assert longer.small.sum() == 2


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (DataLoader([1]), True),
        (Counting(), True),
        (range(3), True),
        (iter([1]), True),
        ([1], False),
        ((1, 2), False),
        ({"x": 1}, False),
        (torch.ones(2), False),
        (np.ones(2), False),
        ("xy", False),
        (3, False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_may_be_an_item_is_no_loader(value, expected):
    assert is_loader(value) is expected
