"""In-memory pipelines against the oracle, bit for bit."""

import functools
import itertools

import pytest
import torch
import torch.nn.functional as F
from support.models import (
    OPTIMIZERS,
    POINTS,
    Blocked,
    Noisy,
    NoisyEverywhere,
    RunsBackwardInside,
    Transpose,
    batches,
    kitchen_sink,
    regression,
)
from support.oracle import assert_same, lags, oracle
from support.pinned import Pipeline
from support.written import LaterBackward
from torch.utils.checkpoint import checkpoint

from pipedream_rt import StageFailed
from pipedream_rt.serial.cluster import SerialCluster

pytestmark = pytest.mark.threads


def make(optimizer):
    cls, kwargs = OPTIMIZERS[optimizer]
    return lambda parameters: cls(parameters, **kwargs)


def train(n, data, *, optimizer="adamw", shuffle=None, epochs=1, **kwargs):
    workers = functools.partial(SerialCluster, shuffle_seed=shuffle)
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


@pytest.mark.thinned(2)
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


@functools.cache
def accumulated(k):
    """What every schedule that flushes must give, and its data."""
    data = batches(6, samples=10)
    return data, *oracle(
        kitchen_sink(), [0], data, F.cross_entropy, make("adam"), k=k, reads="flushed"
    )


@pytest.mark.timeout(300)
@pytest.mark.parametrize("n", [pytest.param(3, marks=pytest.mark.stress), 5])
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


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize(("n", "k"), [(1, 1), (2, 1), (3, 2), (4, 1), (5, 1), (5, 3)])
def test_vertical_sync_equals_the_oracle(n, k, optimizer):
    data = batches(12, samples=7)
    expected, losses = oracle(
        kitchen_sink(), POINTS[n], data, F.cross_entropy, make(optimizer), k=k,
        reads="vertical-sync",
    )  # fmt: skip
    found, results, statistics = train(
        n,
        data,
        optimizer=optimizer,
        micro_batches=k,
        shuffle=n,
        schedule="async-1f1b+vertical-sync",
    )
    assert_same(found, expected)
    assert [loss for r in results for loss in r.losses] == losses
    assert all(c["versions_kept_most"] == -(-(n - 1) // k) + 1 for c in statistics)
    assert all(len(set(r.versions)) == 1 for r in results)  # one model for each micro-batch


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize(("n", "k"), [(1, 1), (2, 2), (3, 3), (3, 5), (5, 6)])
def test_2bw_equals_the_oracle(n, k, optimizer):
    """Two epochs in a row; two versions, whatever the number of stages."""
    data = batches(5, samples=13)
    expected, losses = oracle(
        kitchen_sink(), POINTS[n], data + data, F.cross_entropy, make(optimizer), k=k, reads="2bw"
    )
    found, results, statistics = train(
        n, data, optimizer=optimizer, schedule="2bw", micro_batches=k, shuffle=n, epochs=2
    )
    assert_same(found, expected)
    assert [loss for r in results for loss in r.losses] == losses
    assert all(c["versions_kept_most"] <= 2 for c in statistics)
    assert all(c["buffers_allocated"] <= 2 for c in statistics)
    assert [r.staleness for r in results] == [0] + [1] * 9


SLACK = [
    ("async-1f1b", "async-1f1b", 2, 1, (2,)),
    ("async-1f1b", "async-1f1b", 3, 1, (1, 0)),
    ("async-1f1b", "async-1f1b", 4, 1, (0, 2, 1)),
    ("async-1f1b", "async-1f1b", 5, 2, (1, 1, 1, 1)),
    ("async-1f1b+vertical-sync", "vertical-sync", 3, 1, (0, 2)),
    ("async-1f1b+vertical-sync", "vertical-sync", 4, 3, (1, 0, 1)),
    ("2bw", "2bw", 3, 5, (1, 1)),
    ("2bw", "2bw", 4, 6, (0, 2, 0)),
]


@pytest.mark.parametrize(("schedule", "reads", "n", "k", "slack"), SLACK)
def test_slack_equals_the_oracle(schedule, reads, n, k, slack):
    """With w(s) = (n-1-s) + the slack of the hops from stage s on; two epochs, random delivery."""
    data = batches(7, samples=2 * k + 1)
    expected, losses = oracle(
        kitchen_sink(), POINTS[n], data + data, F.cross_entropy, make("adamw"), k=k, reads=reads,
        slack=slack,
    )  # fmt: skip
    found, results, statistics = train(
        n, data, schedule=schedule, micro_batches=k, slack=slack, shuffle=n, epochs=2
    )
    assert_same(found, expected)
    assert [loss for r in results for loss in r.losses] == losses
    w = lags(n, slack)
    bounds = {
        "async-1f1b": [-(-w[s] // k) + 1 for s in range(n)],
        "vertical-sync": [-(-w[0] // k) + 1] * n,
        "2bw": [2] * n,
    }[reads]
    assert all(c["versions_kept_most"] <= b for c, b in zip(statistics, bounds, strict=True))
    assert all(c["buffers_allocated"] <= b for c, b in zip(statistics, bounds, strict=True))


@pytest.mark.parametrize(("n", "k", "slack"), [(2, 4, 1), (3, 4, (0, 3)), (4, 2, 2)])
def test_slack_in_a_flushing_schedule_changes_no_bit(n, k, slack):
    data, expected, losses = accumulated(k)
    found, results, statistics = train(
        n, data, optimizer="adam", schedule="1f1b", micro_batches=k, slack=slack, shuffle=n
    )
    assert_same(found, expected)
    assert [loss for r in results for loss in r.losses] == losses
    assert all(counters["versions_kept_most"] == 1 for counters in statistics)


def test_a_number_is_the_slack_of_every_hop():
    data = batches(8)
    states = [train(4, data, slack=slack)[0] for slack in (2, [2, 2, 2])]
    assert_same(states[1], states[0])


@pytest.mark.parametrize(
    ("stages", "v", "k"), [(2, 2, 1), (4, 2, 2), (4, 2, 6), (4, 4, 3), (3, 1, 3)]
)
def test_interleaved_equals_plain_accumulation(stages, v, k):
    """Several stages on each worker; a flush, an evaluation and inference on the way."""
    data = batches(6, samples=12)
    expected, losses = oracle(
        kitchen_sink(), [0], data, F.cross_entropy, make("adamw"), k=k, reads="flushed"
    )
    with Pipeline(
        kitchen_sink(),
        stages=POINTS[stages][1:],
        loss_fn=F.cross_entropy,
        optimizer=OPTIMIZERS["adamw"],
        schedule="interleaved-1f1b",
        stages_per_worker=v,
        micro_batches=k,
        workers=functools.partial(SerialCluster, shuffle_seed=stages),
    ) as pipe:
        assert len({stage.worker for stage in pipe.stages}) == stages // v
        results = list(pipe.train_epoch(data[:4]))
        pipe.evaluate(batches(3, seed=9))
        pipe.train(False)(data[0][0])
        pipe.train()
        pipe.submit(*data[4])
        assert [c["stage"] for c in pipe.statistics()] == list(range(stages))
        results += pipe.train_epoch(data[5:])
        assert_same(pipe.state_dict(), expected)
        assert "versions" in pipe.explain()
    flat = [loss for r in results for loss in r.losses]
    assert flat == losses[: 4 * k] + losses[5 * k :]


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zero-bubble"])
@pytest.mark.parametrize(("n", "k"), [(1, 1), (1, 4), (2, 4), (3, 2), (4, 4), (5, 3), (4, 1)])
def test_flushing_equals_plain_accumulation(schedule, n, k):
    """Whatever the number of stages, also with fewer micro-batches than stages."""
    data, expected, losses = accumulated(k)
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
    for schedule, reads in (
        ("async-1f1b", "async-1f1b"),
        ("1f1b", "flushed"),
        ("zero-bubble", "flushed"),
        ("2bw", "2bw"),
    ):
        expected, losses = oracle(
            kitchen_sink(), POINTS[3], data, F.cross_entropy, make("adamw"), k=4, reads=reads
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
        workers="serial",
    ) as pipe:
        found_losses = []
        for part in (data[:2], data[2:7], data[7:8], data[8:]):
            found_losses += [r.loss for r in pipe.train_epoch(part)]
            pipe.flush()
            pipe.evaluate(batches(2, seed=9))
            pipe.train(False)(data[0][0])
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
    *_, statistics = train(n, batches(4 * n), micro_batches=k)
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
        workers=functools.partial(SerialCluster, shuffle_seed=1),
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
        kitchen_sink(), [0], data, F.cross_entropy, make("sgd"), k=2, reads="flushed", rates=rates
    )
    with Pipeline(
        kitchen_sink(),
        stages=3,
        loss_fn=F.cross_entropy,
        optimizer=OPTIMIZERS["sgd"],
        schedule="1f1b",
        micro_batches=2,
        workers="serial",
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
    expected, _ = oracle(model, [0], data, F.mse_loss, make("sgd"), reads="flushed")
    for stages in (1, [2], [1, 2, 3]):
        with Pipeline(
            model,
            stages=stages,
            loss_fn=F.mse_loss,
            optimizer=OPTIMIZERS["sgd"],
            schedule="1f1b",
            workers="serial",
        ) as pipe:
            list(pipe.train_epoch(data))
            assert_same(pipe.state_dict(), expected)


class Tied(torch.nn.Module):
    """Uses a layer twice, a weight computed from another, and one past the input."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)
        self.w = torch.nn.Parameter(torch.randn(8, 8) / 8)
        self.past = torch.nn.Parameter(torch.randn(8))

    def forward(self, x):
        inside = torch.relu(self.linear(x)) @ torch.tanh(self.w @ self.w)
        return self.linear(inside) + F.linear(x, self.linear.weight) + self.past.exp()


class Checkpointed(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Sequential(
            torch.nn.Linear(8, 8), torch.nn.Dropout(0.3), torch.nn.Tanh(), torch.nn.LayerNorm(8)
        )

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=False)


class HalfFrozen(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
        self.layers[0].requires_grad_(False)

    def forward(self, x):
        return self.layers(x)


class Recurrent(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = torch.nn.LSTM(8, 8, 2)

    def forward(self, x):
        return self.lstm(x[None])[0][0]


class Draws(torch.autograd.Function):
    """Draws random numbers in its backward, for its input and for its weight."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx, gradient):
        x, w = ctx.saved_tensors
        noise = torch.randn_like(gradient) / 100
        return gradient * w + noise, (gradient * x + noise).sum(0)


class Drawing(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = (torch.nn.Parameter(torch.ones(8)) for _ in range(2))

    def forward(self, x):
        return Draws.apply(Draws.apply(x, self.a), self.b)


class Reentrant(Checkpointed):
    def __init__(self):
        super().__init__()
        self.before = torch.nn.Linear(8, 8)  # a reentrant one needs an input with a gradient

    def forward(self, x):
        return checkpoint(self.inner, self.before(x), use_reentrant=True)


class HookedWeight(torch.nn.Module):
    """A hook on a weight that is computed from another."""

    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.eye(8))

    def forward(self, x):
        w = self.w * 2
        w.register_hook(lambda gradient: gradient * 3)
        return x @ w


@pytest.mark.parametrize(
    "layer",
    [
        Tied,
        Checkpointed,
        Reentrant,
        HalfFrozen,
        Recurrent,
        Noisy,
        Drawing,
        HookedWeight,
        RunsBackwardInside,
        torch.nn.Identity,
    ],
)
def test_a_split_backward_gives_the_bits_of_a_whole_one(layer):
    """Layers whose graphs are no chain, in every place: first, middle and last stage."""
    torch.manual_seed(4)
    model = torch.nn.Sequential(
        layer(),
        torch.nn.Linear(8, 8),
        layer(),
        torch.nn.Linear(8, 8),
        torch.nn.ReLU(inplace=True),
        layer(),
        torch.nn.Linear(8, 8),
    )
    states = []
    for schedule, workers in (
        ("1f1b", "serial"),
        ("zero-bubble", "serial"),
        ("zero-bubble", functools.partial(SerialCluster, shuffle_seed=2)),
    ):
        with Pipeline(
            model,
            stages=[2, 5],
            loss_fn=F.mse_loss,
            optimizer=OPTIMIZERS["sgd"],
            schedule=schedule,
            micro_batches=4,
            workers=workers,
        ) as pipe:
            list(pipe.train_epoch(regression(5, samples=8)))
            states.append(pipe.state_dict())
    assert_same(states[1], states[0])
    assert_same(states[2], states[0])


def test_a_stage_without_weights_and_one_without_gradients():
    """Nothing to derive in one half, or in both."""
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(8, 8), torch.nn.Tanh())
    found = []
    for schedule in ("gpipe", "zero-bubble"):
        with Pipeline(
            model,
            stages=[1, 2],
            loss_fn=F.mse_loss,
            optimizer=OPTIMIZERS["adam"],
            schedule=schedule,
            micro_batches=2,
            workers="serial",
        ) as pipe:
            list(pipe.train_epoch(regression(4)))
            found.append(pipe.state_dict())
    assert_same(found[0], found[1])


def test_a_schedule_that_a_user_wrote():
    """Flushed, so it must equal plain accumulation."""
    data = batches(6, samples=8)
    expected, losses = oracle(
        kitchen_sink(), [0], data, F.cross_entropy, make("adamw"), k=4, reads="flushed"
    )
    found, results, _ = train(3, data, schedule=LaterBackward(), micro_batches=4, shuffle=1)
    assert_same(found, expected)
    assert [loss for r in results for loss in r.losses] == losses


def test_random_numbers_in_both_halves_are_refused():
    """On the first stage all is one half; on the others the order of the draws would differ."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), NoisyEverywhere(8, 8), torch.nn.Linear(8, 8))
    with (
        Pipeline(
            model,
            stages=3,
            loss_fn=F.mse_loss,
            optimizer=OPTIMIZERS["sgd"],
            schedule="zero-bubble",
            workers="serial",
        ) as pipe,
        pytest.raises(StageFailed, match="draws random numbers both for its input and for its"),
    ):
        list(pipe.train_epoch(regression(3)))


class KeptElsewhere(torch.nn.Linear):
    def __init__(self):
        super().__init__(8, 8)
        self.kept = [self.weight]

    def forward(self, x):
        return F.linear(x, self.kept[0], self.bias)


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
def test_a_weight_read_past_its_module_is_an_error(schedule):
    """Its versions could not be kept apart; it would never be trained."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), KeptElsewhere(), torch.nn.Linear(8, 8))
    with (
        Pipeline(
            model,
            stages=3,
            loss_fn=F.mse_loss,
            optimizer=OPTIMIZERS["sgd"],
            schedule=schedule,
            workers="serial",
        ) as pipe,
        pytest.raises(StageFailed, match="through a reference kept elsewhere"),
    ):
        list(pipe.train_epoch(regression(3)))


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
def test_weights_that_get_no_gradient_are_left_alone_wherever_the_cut_is(schedule):
    """AdamW decays a weight whose gradient is zero, not one that has none."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), Blocked(), torch.nn.Linear(8, 8))
    for stages in (1, [1], [2]):
        with Pipeline(
            model,
            stages=stages,
            loss_fn=F.mse_loss,
            optimizer=OPTIMIZERS["adamw"],
            schedule=schedule,
            workers="serial",
        ) as pipe:
            list(pipe.train_epoch(regression(3)))
            state = pipe.state_dict()
        assert torch.equal(state["0.weight"], model[0].weight)
        assert not torch.equal(state["2.weight"], model[2].weight)
