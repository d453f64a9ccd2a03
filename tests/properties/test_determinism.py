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
from support.small import small
from support.written import LaterBackward
from torch.utils.checkpoint import checkpoint

from pipedream_rt import StageFailed
from pipedream_rt.serial.cluster import SerialCluster

pytestmark = pytest.mark.threads


def make(optimizer):
    cls, kwargs = OPTIMIZERS[optimizer]
    return lambda parameters: cls(parameters, **kwargs)


def opened(n, optimizer="adamw", shuffle=None, **options):
    return Pipeline(
        kitchen_sink(), stages=POINTS[n][1:] or 1, loss_fn=F.cross_entropy,
        optimizer=OPTIMIZERS[optimizer],
        workers=functools.partial(SerialCluster, shuffle_seed=shuffle), **options,
    )  # fmt: skip


def train(n, data, *, epochs=1, **options):
    with opened(n, **options) as pipe:
        results = [r for _ in range(epochs) for r in pipe.train_epoch(data)]
        return pipe.state_dict(), results, pipe.statistics()


def expected(n, data, optimizer="adamw", **options):
    """The weights and the losses of the oracle."""
    return oracle(kitchen_sink(), POINTS[n], data, F.cross_entropy, make(optimizer), **options)


def flat(results):
    """The losses of all micro-batches."""
    return [loss for r in results for loss in r.losses]


def as_the_oracle(n, data, reads="async-1f1b", k=1, optimizer="adamw", epochs=1, **options):
    """Train to the bits of the oracle; return the results, and what the stages have counted."""
    for_both = {name: options[name] for name in ("seed", "slack") if name in options}
    weights, losses = expected(n, data * epochs, optimizer, k=k, reads=reads, **for_both)
    options = {"shuffle": n, "micro_batches": k, **options}
    found, results, statistics = train(n, data, optimizer=optimizer, epochs=epochs, **options)
    assert_same(found, weights)
    assert flat(results) == losses
    return results, statistics


@pytest.mark.thinned(2)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("n", [1, 2, 3, 4, 5])
def test_async_equals_the_oracle(n, optimizer):
    """Two epochs in a row, without a drain between them, random delivery."""
    results, _ = as_the_oracle(n, batches(9), optimizer=optimizer, epochs=2, seed=5)
    assert all(r.losses == (r.loss,) for r in results)


@functools.cache
def accumulated(k):
    """What every schedule that flushes must give, and its data."""
    data = batches(6, samples=10)
    return data, *expected(1, data, "adam", k=k, reads="flushed")


@pytest.mark.timeout(300)
@pytest.mark.parametrize("n", [pytest.param(3, marks=pytest.mark.stress), 5])
def test_sixty_delivery_timings_give_one_model(n):
    data = batches(7)
    weights, losses = expected(n, data, "sgd")
    for shuffle in range(60):
        found, results, _ = train(n, data, optimizer="sgd", shuffle=shuffle)
        assert_same(found, weights)
        assert flat(results) == losses, f"delivery {shuffle}"


@pytest.mark.parametrize(("n", "k"), list(itertools.product([2, 4], [2, 3])))
def test_async_with_accumulation_equals_the_oracle(n, k):
    """k micro-batches per update; 7 samples make a short last micro-batch."""
    as_the_oracle(n, batches(8, samples=7), k=k)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize(("n", "k"), [(1, 1), (2, 1), (3, 2), (4, 1), (5, 1), (5, 3)])
def test_vertical_sync_equals_the_oracle(n, k, optimizer):
    results, statistics = as_the_oracle(
        n, batches(12, samples=7), "vertical-sync", k, optimizer,
        schedule="async-1f1b+vertical-sync",
    )  # fmt: skip
    assert all(c["versions_kept_most"] == -(-(n - 1) // k) + 1 for c in statistics)
    assert all(len(set(r.versions)) == 1 for r in results)  # one model for each micro-batch


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize(("n", "k"), [(1, 1), (2, 2), (3, 3), (3, 5), (5, 6)])
def test_2bw_equals_the_oracle(n, k, optimizer):
    """Two epochs in a row; two versions, whatever the number of stages."""
    results, statistics = as_the_oracle(
        n, batches(5, samples=13), "2bw", k, optimizer, epochs=2, schedule="2bw"
    )
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
    _, statistics = as_the_oracle(n, data, reads, k, epochs=2, schedule=schedule, slack=slack)
    w = lags(n, slack)
    bounds = {
        "async-1f1b": [-(-w[s] // k) + 1 for s in range(n)],
        "vertical-sync": [-(-w[0] // k) + 1] * n,
        "2bw": [2] * n,
    }[reads]
    assert all(c["versions_kept_most"] <= b for c, b in zip(statistics, bounds, strict=True))
    assert all(c["buffers_allocated"] <= b for c, b in zip(statistics, bounds, strict=True))


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
    weights, losses = expected(1, data, k=k, reads="flushed")
    with opened(
        stages, schedule="interleaved-1f1b", stages_per_worker=v, micro_batches=k, shuffle=stages
    ) as pipe:
        assert len({stage.worker for stage in pipe.stages}) == stages // v
        results = list(pipe.train_epoch(data[:4]))
        pipe.evaluate(batches(3, seed=9))
        pipe.train(False)(data[0][0])
        pipe.train()
        pipe.submit(*data[4])
        assert [c["stage"] for c in pipe.statistics()] == list(range(stages))
        results += pipe.train_epoch(data[5:])
        assert_same(pipe.state_dict(), weights)
        assert "versions" in pipe.explain()
    assert flat(results) == losses[: 4 * k] + losses[5 * k :]


FLUSHING = [
    (schedule, n, k, 0)
    for schedule in ("1f1b", "gpipe", "zero-bubble")
    for n, k in [(1, 1), (1, 4), (2, 4), (3, 2), (4, 4), (5, 3), (4, 1)]
]
FLUSHING += [("1f1b", 2, 4, 1), ("1f1b", 3, 4, (0, 3)), ("1f1b", 4, 2, 2)]


@pytest.mark.parametrize(("schedule", "n", "k", "slack"), FLUSHING)
def test_flushing_equals_plain_accumulation(schedule, n, k, slack):
    """Whatever the number of stages and the slack, also with fewer micro-batches than stages."""
    data, weights, losses = accumulated(k)
    found, results, statistics = train(
        n, data, optimizer="adam", schedule=schedule, micro_batches=k, slack=slack, shuffle=n
    )
    assert_same(found, weights)
    assert flat(results) == losses
    assert all(counters["versions_kept_most"] == 1 for counters in statistics)
    assert all(r.staleness == 0 for r in results)


@pytest.mark.parametrize(
    ("schedule", "reads"),
    [
        ("async-1f1b", "async-1f1b"), ("1f1b", "flushed"), ("zero-bubble", "flushed"),
        ("2bw", "2bw"),
    ],
)  # fmt: skip
def test_a_mini_batch_smaller_than_its_micro_batches_is_filled_up(schedule, reads):
    """5 samples in 4 parts are 2, 2, 1 and an empty one, which changes nothing."""
    data = [*batches(3, samples=8), *batches(1, samples=5), *batches(2, samples=8)]
    results, _ = as_the_oracle(3, data, reads, 4, schedule=schedule, shuffle=None)
    assert [len(r.losses) for r in results] == [4, 4, 4, 3, 4, 4]


def test_watching_a_run_does_not_change_it():
    """Flush, evaluation, inference and state_dict in the middle leave the bits as they are."""
    data = batches(12)
    weights, losses = expected(4, data)
    with opened(4) as pipe:
        results = []
        for part in (data[:2], data[2:7], data[7:8], data[8:]):
            results += pipe.train_epoch(part)
            pipe.flush()
            pipe.evaluate(batches(2, seed=9))
            pipe.train(False)(data[0][0])
            pipe.train()
            pipe.state_dict()
            torch.rand(3)  # the user's own random numbers are the user's
        assert_same(pipe.state_dict(), weights)
    assert flat(results) == losses


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
    weights, _ = expected(4, data, "sgd", rates=rates)
    with opened(4, "sgd", shuffle=1) as pipe:
        for rate, (x, y) in zip(rates, data):
            pipe.optimizer.param_groups[0]["lr"] = rate
            pipe.submit(x, y)
        assert_same(pipe.state_dict(), weights)


def test_in_a_flushing_schedule_a_scheduler_works_as_in_a_plain_loop():
    """The rate set after the result of mini-batch t applies to mini-batch t + 1."""
    data = batches(8)
    rates = [0.05 * 0.8**t for t in range(8)]
    weights, _ = expected(1, data, "sgd", k=2, reads="flushed", rates=rates)
    with opened(3, "sgd", schedule="1f1b", micro_batches=2) as pipe:
        scheduler = torch.optim.lr_scheduler.LambdaLR(pipe.optimizer, lambda t: 0.8**t)
        for _ in pipe.train_epoch(data):
            scheduler.step()
        found = pipe.state_dict()
    assert found.keys() == weights.keys()
    for key, value in weights.items():
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
        with small(model, stages=stages, optimizer=OPTIMIZERS["sgd"], schedule="1f1b") as pipe:
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
        with small(
            model, stages=[2, 5], schedule=schedule, micro_batches=4, workers=workers
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
        with small(model, optimizer=OPTIMIZERS["adam"], schedule=schedule, micro_batches=2) as pipe:
            list(pipe.train_epoch(regression(4)))
            found.append(pipe.state_dict())
    assert_same(found[0], found[1])


def test_a_schedule_that_a_user_wrote():
    """Flushed, so it must equal plain accumulation."""
    as_the_oracle(3, batches(6, samples=8), "flushed", 4, schedule=LaterBackward())


class KeptElsewhere(torch.nn.Linear):
    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.kept = [self.weight]

    def forward(self, x):
        return F.linear(x, self.kept[0], self.bias)


@pytest.mark.parametrize(
    ("layer", "schedule", "words"),
    [
        # On the first stage all is one half; on the others the order of the draws would differ.
        (NoisyEverywhere, "zero-bubble", "draws random numbers both for its input and for its"),
        # Its versions could not be kept apart; it would never be trained.
        (KeptElsewhere, "1f1b", "through a reference kept elsewhere"),
        (KeptElsewhere, "zero-bubble", "through a reference kept elsewhere"),
    ],
)
def test_what_would_not_be_determined_is_an_error(layer, schedule, words):
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), layer(8, 8), torch.nn.Linear(8, 8))
    with small(model, schedule=schedule) as pipe, pytest.raises(StageFailed, match=words):
        list(pipe.train_epoch(regression(3)))


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
def test_weights_that_get_no_gradient_are_left_alone_wherever_the_cut_is(schedule):
    """AdamW decays a weight whose gradient is zero, not one that has none."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), Blocked(), torch.nn.Linear(8, 8))
    for stages in (1, [1], [2]):
        with small(model, stages=stages, optimizer=OPTIMIZERS["adamw"], schedule=schedule) as pipe:
            list(pipe.train_epoch(regression(3)))
            state = pipe.state_dict()
        assert torch.equal(state["0.weight"], model[0].weight)
        assert not torch.equal(state["2.weight"], model[2].weight)
