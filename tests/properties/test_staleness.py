"""Schedules that are about staleness: synchronous updates at first, backwards on newest weights."""

import functools

import pytest
import torch
import torch.nn.functional as F
from support.faults import losses_through_death
from support.models import POINTS, batches, kitchen_sink
from support.oracle import READS, assert_same, oracle
from support.small import small

from pipedream_rt import Checkpoints, Clip, ConfigError, check, plan_for

WORKERS = [
    pytest.param("serial", marks=pytest.mark.threads),
    pytest.param("local", marks=pytest.mark.processes),
]


# -- synchronous updates at first ---------------------------------------------------------------

KINDS = {
    "async": ("async-1f1b", 1),
    "async, 2 per update": ("async-1f1b", 2),
    "vertical": ("async-1f1b+vertical-sync", 1),
    "2bw": ("2bw", 4),
}


def after(kind, synchronous):
    """The formula of the versions, written for this test alone: flushed at first, then as ever."""

    def reads(m, s, w, k):
        t = synchronous
        if m < t * k:
            return m // k
        if kind == "2bw":
            return max(t, m // k - 1)
        return max(t, (m - (w[0] if kind == "vertical" else w[s])) // k)

    return reads


def opened(schedule, k, **options):
    return small(
        kitchen_sink(), stages=POINTS[4][1:], loss_fn=F.cross_entropy, schedule=schedule,
        optimizer=(torch.optim.AdamW, {"lr": 0.01}), micro_batches=k, **options,
    )  # fmt: skip


def piped(kind, synchronous, **options):
    return opened(*KINDS[kind], synchronous_updates=synchronous, **options)


def judged(kind, synchronous, data, monkeypatch):
    monkeypatch.setitem(READS, "after", after(kind, synchronous))
    make = functools.partial(torch.optim.AdamW, lr=0.01)
    k = KINDS[kind][1]
    return oracle(kitchen_sink(), POINTS[4], data, F.cross_entropy, make, k=k, reads="after")


@pytest.mark.thinned(3)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("synchronous", [1, 4, 20])
def test_the_first_updates_read_the_newest_weights(kind, synchronous, monkeypatch):
    data = batches(12, samples=8)
    expected, losses = judged(kind, synchronous, data, monkeypatch)
    with piped(kind, synchronous) as pipe:
        found = [loss for r in pipe.train_epoch(data) for loss in r.losses]
        assert found == losses
        assert_same(pipe.state_dict(), expected)


@pytest.mark.parametrize("workers", WORKERS)
def test_on_all_workers_and_with_flushes_between(workers, monkeypatch):
    data = batches(12, samples=8)
    expected, losses = judged("async, 2 per update", 5, data, monkeypatch)
    with piped("async, 2 per update", 5, workers=workers) as pipe:
        found = []
        for number, (x, y) in enumerate(data):
            pending = pipe.submit(x, y)
            if number in (2, 4, 7):
                pipe.flush()
            found += pending.result().losses
        assert found == losses
        assert_same(pipe.state_dict(), expected)


@pytest.mark.processes
@pytest.mark.parametrize("step", [4, 11])
def test_a_death_in_either_part_changes_nothing(step, tmp_path, monkeypatch):
    data = batches(24)
    expected, losses = judged("async", 7, data, monkeypatch)
    options = {"checkpoint": Checkpoints(tmp_path, every=3), "max_restarts": 1}
    with piped("async", 7, workers="local", **options) as pipe:
        assert losses_through_death(pipe, data, "worker-2", step) == losses
        assert len(pipe.restarts) == 1
        assert_same(pipe.state_dict(), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_the_checker_proves_it(kind):
    schedule, k = KINDS[kind]
    plan = plan_for(schedule, num_stages=4, per_update=k, synchronous=3)
    check(plan, 12 * k)
    check(plan, 12 * k, flushes=(2 * k, 5 * k), credits=plan.credits())
    assert "synchronous" in plan.title
    assert type(plan).unpacked(plan.packed()) == plan


@pytest.mark.parametrize("kind", ["2bw", "vertical"])
def test_the_norm_of_the_model_is_exact_in_both_parts(kind):
    """As in a flush schedule while the updates are synchronous."""
    data = batches(10, samples=8)
    with piped(kind, 10, clip=Clip(norm=0.1)) as pipe:
        list(pipe.train_epoch(data))
        whole = pipe.state_dict()
    with opened("1f1b", KINDS[kind][1], clip=Clip(norm=0.1)) as pipe:
        list(pipe.train_epoch(data))
        assert_same(whole, pipe.state_dict())
    with piped(kind, 5, clip=Clip(norm=0.1)) as pipe:
        list(pipe.train_epoch(data))
        assert any(not torch.equal(value, whole[key]) for key, value in pipe.state_dict().items())


def test_another_number_is_another_run(tmp_path, caplog):
    with piped("async", 3) as pipe:
        list(pipe.train_epoch(batches(4)))
        pipe.save(tmp_path)
    with piped("async", 4) as pipe:
        pipe.load(tmp_path)
    assert "after 3 synchronous updates" in caplog.text


@pytest.mark.parametrize(
    ("schedule", "count", "words"),
    [
        ("1f1b", 3, "has no use for synchronous_updates"),
        ("async-1f1b", -1, "synchronous_updates must be an integer"),
        ("async-1f1b", True, "synchronous_updates must be an integer"),
    ],
)
def test_nonsense_is_refused(schedule, count, words):
    with pytest.raises(ConfigError, match=words):
        plan_for(schedule, num_stages=2, synchronous=count)
