"""In-memory pipelines against the oracle, bit for bit."""

import functools
import itertools

import pytest
import torch
import torch.nn.functional as F
from support.models import OPTIMIZERS, POINTS, Transpose, batches, kitchen_sink
from support.oracle import assert_same, oracle

from pipedream_rt import Pipeline
from pipedream_rt.cluster import InProcessCluster

pytestmark = pytest.mark.threads


def make(optimizer):
    cls, kwargs = OPTIMIZERS[optimizer]
    return lambda parameters: cls(parameters, **kwargs)


def train(n, data, *, optimizer="adamw", shuffle=None, epochs=1, **kwargs):
    workers = functools.partial(InProcessCluster, shuffle_seed=shuffle)
    with Pipeline(
        kitchen_sink(),
        stages=POINTS[n][1:] or 1,
        loss_fn=F.cross_entropy,
        optimizer=OPTIMIZERS[optimizer],
        workers=workers,
        **kwargs,
    ) as pipe:
        results = [r for _ in range(epochs) for r in pipe.train_epoch(data)]
        return pipe.state_dict(), results, pipe.statistics()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("n", [1, 2, 3, 4, 5])
def test_async_equals_the_oracle(n, optimizer):
    """Two epochs in a row, without a drain between them, random delivery."""
    data = batches(9)
    expected, losses = oracle(
        kitchen_sink(), POINTS[n], data + data, F.cross_entropy, make(optimizer), seed=5
    )
    found, results, _ = train(n, data, optimizer=optimizer, shuffle=n, epochs=2, seed=5)
    assert_same(found, expected)
    assert [r.loss for r in results] == losses


@pytest.mark.timeout(300)
@pytest.mark.parametrize("n", [3, 5])
def test_sixty_delivery_timings_give_one_model(n):
    data = batches(10)
    expected, losses = oracle(kitchen_sink(), POINTS[n], data, F.cross_entropy, make("sgd"))
    for shuffle in range(60):
        found, results, _ = train(n, data, optimizer="sgd", shuffle=shuffle)
        assert_same(found, expected)
        assert [r.loss for r in results] == losses, f"delivery {shuffle}"


@pytest.mark.parametrize(("n", "k"), list(itertools.product([2, 4], [2, 3])))
def test_async_with_accumulation_equals_the_oracle(n, k):
    """k micro-batches per update; 7 samples make a short last micro-batch."""
    data = batches(8, samples=7)
    expected, losses = oracle(kitchen_sink(), POINTS[n], data, F.cross_entropy, make("adamw"), k=k)
    found, results, _ = train(n, data, micro_batches=k, shuffle=k)
    assert_same(found, expected)
    assert [loss for r in results for loss in r.losses] == losses


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize(("n", "k"), [(1, 1), (1, 4), (2, 4), (3, 2), (4, 4), (5, 3), (4, 1)])
def test_flushing_equals_plain_accumulation(schedule, n, k):
    """Whatever the number of stages, also with fewer micro-batches than stages."""
    data = batches(6, samples=10)
    expected, losses = oracle(
        kitchen_sink(), [0], data, F.cross_entropy, make("adam"), k=k, stashing=False
    )
    found, results, statistics = train(
        n, data, optimizer="adam", schedule=schedule, micro_batches=k, shuffle=n
    )
    assert_same(found, expected)
    assert [loss for r in results for loss in r.losses] == losses
    assert all(counters["versions_kept_most"] == 1 for counters in statistics)
    assert all(r.staleness == 0 for r in results)


def test_a_mini_batch_smaller_than_its_micro_batches_is_filled_up():
    """5 samples in 4 parts are 2, 2, 1 and an empty one, which changes nothing."""
    data = [*batches(3, samples=8), *batches(1, samples=5), *batches(2, samples=8)]
    for schedule, stashing in (("async-1f1b", True), ("1f1b", False)):
        expected, losses = oracle(
            kitchen_sink(), POINTS[3], data, F.cross_entropy, make("adamw"), k=4, stashing=stashing
        )
        found, results, _ = train(3, data, schedule=schedule, micro_batches=4)
        assert_same(found, expected)
        assert [loss for r in results for loss in r.losses] == losses
        assert [len(r.losses) for r in results] == [4, 4, 4, 3, 4, 4]


def test_watching_a_run_does_not_change_it():
    """Flush, evaluation, inference and state_dict in the middle leave the bits as they are."""
    data = batches(12)
    expected, losses = oracle(kitchen_sink(), POINTS[4], data, F.cross_entropy, make("adamw"))
    with Pipeline(
        kitchen_sink(),
        stages=POINTS[4][1:],
        loss_fn=F.cross_entropy,
        optimizer=OPTIMIZERS["adamw"],
        workers="in-process",
    ) as pipe:
        found_losses = []
        for part in (data[:2], data[2:7], data[7:8], data[8:]):
            found_losses += [r.loss for r in pipe.train_epoch(part)]
            pipe.flush()
            pipe.evaluate(batches(2, seed=9))
            pipe.eval()(data[0][0])
            pipe.train()
            pipe.state_dict()
            torch.rand(3)  # the user's own random numbers are the user's
        assert_same(pipe.state_dict(), expected)
    assert found_losses == losses


def test_staleness_and_versions_are_reported():
    """At stage s micro-batch m reads max(0, m - w(s)); the first stage is the stalest."""
    _, results, _ = train(4, batches(8))
    assert [r.versions for r in results] == [
        (max(0, m - 3), max(0, m - 2), max(0, m - 1), m) for m in range(8)
    ]
    assert [r.staleness for r in results] == [0, 1, 2, 3, 3, 3, 3, 3]
    assert [r.version for r in results] == [0, 0, 0, 0, 1, 2, 3, 4]
    assert [r.step for r in results] == list(range(8))


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("n", [1, 2, 3, 4, 5])
def test_versions_are_bounded_and_buffers_recycled(n, k):
    """At most w(s)+1 versions; after the pipe has filled no buffer is allocated any more."""
    for count in (2 * n, 40):
        *_, statistics = train(n, batches(count), micro_batches=k)
        for s, counters in enumerate(statistics):
            w = n - 1 - s
            assert counters["versions_kept_most"] == -(-w // k) + 1 <= w + 1
            assert counters["buffers_allocated"] == counters["versions_kept_most"]


def test_hyper_parameters_apply_to_the_mini_batch_they_were_set_for():
    """A rate set before a submit is used for that mini-batch, at every stage."""
    data = batches(10)
    rates = [0.05 / (1 + t) for t in range(10)]
    expected, _ = oracle(kitchen_sink(), POINTS[4], data, F.cross_entropy, make("sgd"), rates=rates)
    with Pipeline(
        kitchen_sink(),
        stages=POINTS[4][1:],
        loss_fn=F.cross_entropy,
        optimizer=OPTIMIZERS["sgd"],
        workers=functools.partial(InProcessCluster, shuffle_seed=1),
    ) as pipe:
        for rate, (x, y) in zip(rates, data):
            pipe.optimizer.param_groups[0]["lr"] = rate
            pipe.submit(x, y)
        assert_same(pipe.state_dict(), expected)


def test_in_a_flushing_schedule_a_scheduler_works_as_in_a_plain_loop():
    """The rate set after the result of mini-batch t applies to mini-batch t + 1."""
    data = batches(8)
    rates = [0.05 * 0.8**t for t in range(8)]
    expected, _ = oracle(
        kitchen_sink(), [0], data, F.cross_entropy, make("sgd"), k=2, stashing=False, rates=rates
    )
    with Pipeline(
        kitchen_sink(),
        stages=3,
        loss_fn=F.cross_entropy,
        optimizer=OPTIMIZERS["sgd"],
        schedule="1f1b",
        micro_batches=2,
        workers="in-process",
    ) as pipe:
        scheduler = torch.optim.lr_scheduler.LambdaLR(pipe.optimizer, lambda t: 0.8**t)
        for _ in pipe.train_epoch(data):
            scheduler.step()
        found = pipe.state_dict()
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value)  # the scheduler multiplies, 0.8**t rounds


class SumOverTime(torch.nn.Module):
    """Sums in the order in which the elements lie in memory, so it rounds by layout."""

    def forward(self, x):
        return x.sum(1)


def test_the_layout_of_a_tensor_survives_the_boundary():
    """Made contiguous on its way, the transposed tensor would be summed in another order."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(100, 64), Transpose(), SumOverTime(), torch.nn.Linear(100, 3)
    )
    data = [(torch.randn(8, 100, 100), torch.randn(8, 3)) for _ in range(3)]
    expected, _ = oracle(model, [0], data, F.mse_loss, make("sgd"), stashing=False)
    for stages in (1, [2], [1, 2, 3]):
        with Pipeline(
            model,
            stages=stages,
            loss_fn=F.mse_loss,
            optimizer=OPTIMIZERS["sgd"],
            schedule="1f1b",
            workers="in-process",
        ) as pipe:
            list(pipe.train_epoch(data))
            assert_same(pipe.state_dict(), expected)
