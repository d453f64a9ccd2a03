"""The user's code is called in the script's process and leaves no change behind."""

import collections
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.verified import job_of
from torch.nn import functional as F

from pipedream_rt import ConfigError
from pipedream_rt.job.options import Layout
from pipedream_rt.models.holders import Holder
from pipedream_rt.verify import isolation
from pipedream_rt.verify.isolation import Shared, held_by


class Counter:
    """An object of the script, whose class has a count too."""

    made = 0

    def __init__(self):
        self.calls = 0
        Counter.made += 1


SEEN, QUEUE, NAMES = [1], collections.deque([1]), {"a"}
COUNTS = {"calls": 0, "mean": torch.zeros(2), "of": np.zeros(2)}
OBJECT = Counter()
GENERATOR, DICE = torch.Generator().manual_seed(3), random.Random(3)
NUMBERS, OLD_NUMBERS = np.random.default_rng(3), np.random.RandomState(3)


def change():
    """Change everything that a loss can reach by its globals."""
    SEEN.append(2)
    QUEUE.append(2)
    NAMES.add("b")
    COUNTS["calls"] += 1
    COUNTS["new"] = True
    COUNTS["mean"] += 1
    COUNTS["of"] += 1
    OBJECT.calls += 1
    OBJECT.other = 3
    Counter.made += 1


def draw():
    """What each generator, of the script and of the libraries, gives next."""
    return (
        torch.rand((), generator=GENERATOR).item(), DICE.random(), NUMBERS.random(),
        OLD_NUMBERS.rand(), torch.rand(()).item(), random.random(), np.random.rand(),
    )  # fmt: skip


def state():
    held = {
        key: value.tolist() if key in ("mean", "of") else value for key, value in COUNTS.items()
    }
    return list(SEEN), list(QUEUE), set(NAMES), held, dict(vars(OBJECT)), Counter.made


def loss_fn(output, target):
    change()
    draw()
    return F.mse_loss(output, target)


@pytest.mark.parametrize("error", [None, ZeroDivisionError], ids=["ended", "raised"])
def test_what_the_block_changes_and_draws_is_as_before(error):
    job, before, version = job_of(None, loss_fn), state(), COUNTS["mean"]._version
    mean, of = COUNTS["mean"], COUNTS["of"]
    with Shared(job).apart():
        expected = draw()
    try:
        with Shared(job).apart():
            change()
            assert state() != before
            assert draw() == expected
            if error is not None:
                raise error
    except ZeroDivisionError:
        assert error is not None
    assert state() == before
    assert draw() == expected
    assert COUNTS["mean"] is mean
    assert COUNTS["of"] is of
    assert mean._version == version  # by which the runtime tells what the script has changed


def test_the_block_computes_with_gradients_and_threads_as_a_worker_does():
    threads = torch.get_num_threads()
    job = job_of(layout=Layout(threads=threads + 1))
    with torch.inference_mode(), Shared(job).apart():
        assert torch.is_grad_enabled()
        assert not torch.is_inference_mode_enabled()
        assert torch.get_num_threads() == threads + 1
    assert torch.get_num_threads() == threads


TAKEN = iter(range(3))


def takes(output, target):
    return F.mse_loss(output, target) * next(TAKEN)


def assert_refused(loss_fn, words):
    with pytest.raises(ConfigError, match=words), Shared(job_of(None, loss_fn)).apart():
        raise AssertionError("the block has begun")


def test_what_cannot_be_put_back_is_refused(monkeypatch):
    assert_refused(takes, "from such an iterator or file cannot be put back")
    monkeypatch.setattr(isolation, "LIMIT", 15)  # two tensors of 8 bytes each, and an array
    assert_refused(loss_fn, "too much to copy them so that they can be put back")
    assert next(TAKEN) == 0


FILES = []


def reads(output, target):
    return F.mse_loss(output, target) * float(FILES[0].readline())


def test_a_file_is_wound_back_if_it_can_be(tmp_path):
    path = tmp_path / "factors"
    path.write_text("1\n2\n3\n")
    with path.open() as file:
        FILES[:] = [file]
        with Shared(job_of(None, reads)).apart():
            assert file.readline() == "1\n"
        assert file.readline() == "1\n"
        next(file)  # while it is iterated over, its place is unknown
        assert_refused(reads, "from such an iterator or file cannot be put back")


def writes(output, target):
    FILES[0].write("2")
    return F.mse_loss(output, target)


def test_what_was_written_stays_written(tmp_path):
    with (tmp_path / "notes").open("w") as file:
        FILES[:] = [file]
        file.write("1")
        with Shared(job_of(None, writes)).apart():
            file.write("2")
        file.write("3")
    assert (tmp_path / "notes").read_text() == "123"


@pytest.mark.parametrize(
    ("value", "change"),
    [
        (np.zeros(3), lambda array: array.fill(1)),
        (np.zeros(1 << 20), lambda array: array.resize(5, refcheck=False)),
        ([1, (2, {3})], lambda held: held[1][1].add(4)),
        (random.Random(3), random.Random.random),
    ],
    ids=["array", "large array", "container", "generator"],
)
def test_a_value_that_was_changed_in_place_can_be_told(value, change):
    holder = Holder(SimpleNamespace(value=value), "object", "here")
    before = held_by([holder])
    assert held_by([holder]) == before
    change(value)
    assert held_by([holder]) != before


def test_what_is_kept_can_be_put_back_more_than_once():
    job, before = job_of(None, loss_fn), state()
    shared = Shared(job)
    with shared.apart():
        kept = shared.keep()
        for _ in range(2):
            change()
            kept.put_back()
            assert state() == before
