"""Stages with replicas: the bits of the oracle, whatever the timing, through kills and files."""

import functools

import pytest
import torch
import torch.nn.functional as F
from support import both
from support.inside import hosts, kill, pids
from support.models import tied as tied_layers
from support.oracle import assert_same, oracle
from support.pinned import Pipeline
from torch import nn

from pipedream_rt import Checkpoints, Clip, LossScale
from pipedream_rt.corrections import (
    DelayCompensation,
    ErrorFeedback,
    Extrapolation,
    StalenessRate,
    WeightPrediction,
)
from pipedream_rt.errors import CheckpointError, ConfigError, StageFailed
from pipedream_rt.serial.cluster import SerialCluster

pytestmark = pytest.mark.threads

ADAM = (torch.optim.Adam, {"lr": 0.01})


def network():
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.ReLU(),
        nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4),
    )  # fmt: skip


def batches(count=8, samples=48, last=38):
    """So that 16 micro-batches have two samples or more each, the last of the last but one too."""
    torch.manual_seed(2)
    return [(torch.randn(n, 8), torch.randn(n, 4)) for n in [samples] * count + [last]]


def opened(model, **options):
    given = {"loss_fn": F.mse_loss, "optimizer": ADAM, "workers": "serial", **options}
    return Pipeline(model, **given)


def open_pipe(points, replicas, k=1, **options):
    stages = list(points[1:]) or 1
    return opened(network(), stages=stages, replicas=replicas, micro_batches=k, **options)


def in_any_order(seed):
    """Workers whose messages come in the order of the stages, and in a random one."""
    return "serial", functools.partial(SerialCluster, shuffle_seed=seed)


def losses_of(results):
    return [loss for result in results for loss in result.losses]


def train(points, replicas, data, **options):
    with open_pipe(points, replicas, **options) as pipe:
        return losses_of(pipe.train_epoch(data)), pipe.state_dict()


def expected(points, replicas, data, k=1, reads="async-1f1b", **options):
    weights, losses = oracle(
        network(), points, data, F.mse_loss, lambda p: ADAM[0](p, **ADAM[1]), k=k, reads=reads,
        replicas=replicas, **options,
    )  # fmt: skip
    return losses, weights


SPLITS = [
    ((0,), (2,)),
    ((0,), (4,)),
    ((0, 4), (2, 1)),
    ((0, 4), (1, 3)),
    ((0, 4), (3, 2)),
    ((0, 4, 6), (4, 3, 1)),
    ((0, 4, 5, 6), (1, 4, 1, 2)),
]
"""The first layers of stages, and their replicas."""

SCHEDULES = [
    ("async-1f1b", "async-1f1b", 1),
    ("async-1f1b", "async-1f1b", 3),
    ("async-1f1b", "async-1f1b", 16),
    ("1f1b", "flushed", 1),
    ("1f1b", "flushed", 3),
    ("1f1b", "flushed", 4),
    ("gpipe", "flushed", 5),
    ("2bw", "2bw", 16),
]
"""Schedules, what the oracle reads, and micro-batches per update."""


@pytest.mark.thinned(5)
@pytest.mark.parametrize(("schedule", "reads", "k"), SCHEDULES)
@pytest.mark.parametrize(("points", "replicas"), SPLITS)
def test_they_are_the_oracle_bit_for_bit(points, replicas, schedule, reads, k):
    """With messages in random order; the last mini-batch is short, and buffers are of each."""
    data = batches(8 if k < 16 else 4)
    bits = expected(points, replicas, data, k, reads)
    for workers in in_any_order(k):
        found = train(points, replicas, data, schedule=schedule, k=k, workers=workers)
        both.assert_same(found, bits)


@pytest.mark.thinned(3)
@pytest.mark.parametrize(("schedule", "reads", "k"), SCHEDULES)
@pytest.mark.parametrize(("points", "replicas"), [SPLITS[1], SPLITS[4], SPLITS[5]])
def test_a_divided_optimizer_gives_the_same_bits(points, replicas, schedule, reads, k):
    data = batches(8 if k < 16 else 4)
    options = {"schedule": schedule, "k": k, "shard_optimizer": True}
    if schedule in ("1f1b", "gpipe") and k < max(replicas):
        with pytest.raises(ConfigError, match="as many micro-batches per update"):
            train(points, replicas, data, **options)
        return
    bits = expected(points, replicas, data, k, reads)
    for workers in in_any_order(k):
        both.assert_same(train(points, replicas, data, workers=workers, **options), bits)


def test_each_replica_holds_a_part_of_a_divided_optimizer():
    with open_pipe((0, 4), (2, 1), shard_optimizer=True) as pipe:
        list(pipe.train_epoch(batches()))
        held = [len(h.part(n, "optimizer").state) for n, h in enumerate(hosts(pipe))]
        whole = pipe.optimizer.state_dict()["state"]
    assert held == [1, 3, 4]  # a matrix, three vectors, and all of a stage with one replica
    assert len(whole) == 8


@pytest.mark.parametrize("slack", [(1, 0), (0, 4), (3, 2)])
def test_slack_is_a_number_of_micro_batches_of_the_hop(slack):
    data, points, replicas = batches(), (0, 4, 6), (3, 2, 1)
    found = train(points, replicas, data, k=2, slack=slack)
    both.assert_same(found, expected(points, replicas, data, 2, slack=slack))


def test_vertical_sync_reads_what_the_stage_with_the_longest_lag_reads():
    data, points, replicas = batches(), (0, 4), (1, 3)
    found = train(points, replicas, data, schedule="async-1f1b+vertical-sync")
    both.assert_same(found, expected(points, replicas, data, 1, "vertical-sync"))


def test_one_stage_with_replicas_and_a_flush_is_data_parallelism():
    """Against torch: the mean of the replicas' gradients, without batch norm and dropout."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    data = batches(last=48)
    options = {"optimizer": (torch.optim.SGD, {"lr": 0.1}), "schedule": "1f1b"}
    with opened(model, replicas=[4], micro_batches=4, **options) as pipe:
        list(pipe.train_epoch(data))
        found = pipe.state_dict()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in data:
        optimizer.zero_grad()
        for xm, ym in zip(x.chunk(4), y.chunk(4)):
            (F.mse_loss(model(xm), ym) * 0.25).backward()
        optimizer.step()
    assert_same(found, model.state_dict())


def test_a_flush_in_the_middle_changes_nothing():
    data, points, replicas = batches(), (0, 4), (3, 2)
    losses, _ = expected(points, replicas, data, 2)
    with open_pipe(points, replicas, k=2) as pipe:
        found = []
        for number, item in enumerate(data):
            found += pipe.submit(*item).result().losses
            if number % 3 == 1:
                pipe.flush()
    assert found == losses


def test_evaluation_and_inference_read_the_weights_and_buffers_of_state_dict():
    data, points, replicas = batches(), (0, 4), (3, 2)
    with open_pipe(points, replicas) as pipe:
        list(pipe.train_epoch(data))
        module = pipe.module().eval()
        x, y = data[0]
        assert torch.equal(pipe(x), module(x))
        assert torch.equal(next(pipe.predict([x])), module(x))
        assert pipe.evaluate([data[0]]) == F.mse_loss(module(x), y).item()
        before = pipe.state_dict()
        list(pipe.train_epoch(data[:2]))
        with pytest.raises(AssertionError):
            assert_same(pipe.state_dict(), before)


# -- checkpoints ------------------------------------------------------------------------------


@pytest.mark.thinned(5)
@pytest.mark.parametrize("divided", [False, True])
@pytest.mark.parametrize("stop", [4, 7])
@pytest.mark.parametrize(
    ("schedule", "reads", "k"),
    [("async-1f1b", "async-1f1b", 1), ("async-1f1b", "async-1f1b", 3), ("1f1b", "flushed", 4),
     ("2bw", "2bw", 16)],
)  # fmt: skip
@pytest.mark.parametrize(
    ("points", "replicas"), [((0,), (3,)), ((0, 4), (2, 1)), ((0, 4), (1, 3)), ((0, 4), (2, 2))]
)
def test_a_run_goes_on_from_a_checkpoint(
    tmp_path, points, replicas, schedule, reads, k, stop, divided
):
    """From one that did not stop the pipe, as a recovery does too."""
    data = batches(10)
    losses, weights = expected(points, replicas, data, k, reads)
    options = {"schedule": schedule, "k": k, "shard_optimizer": divided}
    with open_pipe(points, replicas, checkpoint=Checkpoints(tmp_path, every=2), **options) as pipe:
        for number, _ in enumerate(pipe.train_epoch(data)):
            if number == stop:
                break
    resume = Checkpoints(tmp_path, resume=True)
    with open_pipe(points, replicas, checkpoint=resume, **options) as pipe:
        assert pipe.resumed.step >= 2
        found = losses_of(pipe.train_epoch(data))
        assert found == losses[-len(found) :]
        assert_same(pipe.state_dict(), weights)


def test_weights_are_in_a_checkpoint_once_and_buffers_of_each_replica(tmp_path):
    from safetensors import safe_open

    with open_pipe((0, 4), (2, 1)) as pipe:
        list(pipe.train_epoch(batches()))
        folder = pipe.save(tmp_path)
        state = pipe.state_dict()
    keys = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            keys[path.name] = sorted(file.keys())
    models = [key for name, of in keys.items() if name.startswith("model-") for key in of]
    assert sorted(models) == sorted(state)
    assert keys["replica-00002-of-00003.safetensors"] == [
        "1 of 2/1.num_batches_tracked", "1 of 2/1.running_mean", "1 of 2/1.running_var"
    ]  # fmt: skip
    assert not [name for name in keys if name.startswith("replica-") and "00002-of" not in name]


@pytest.mark.parametrize(
    ("points", "replicas"), [((0, 4), (3, 1)), ((0, 4), (1, 2)), ((0,), (1,)), ((0, 6), (2, 2))]
)
def test_a_run_goes_on_with_other_replicas(tmp_path, points, replicas):
    """In a schedule that flushes; without buffers, which each replica has of its own."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(8, 16), nn.Tanh(), nn.Dropout(0.1), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(),
        nn.Linear(16, 4),
    )  # fmt: skip
    data = batches(last=48)
    options = {"schedule": "1f1b", "micro_batches": 2}
    with opened(model, stages=[4], replicas=[2, 2], **options) as pipe:
        list(pipe.train_epoch(data[:4]))
        pipe.save(tmp_path)
    options |= {"stages": list(points[1:]) or 1, "shard_optimizer": max(replicas) == 2}
    with opened(model, replicas=replicas, **options) as pipe:
        pipe.load(tmp_path)
        assert pipe.step == 4
        for item in data[4:]:
            pipe.submit(*item)
        found = pipe.state_dict()
    make = functools.partial(ADAM[0], **ADAM[1])
    # Two micro-batches make a sum of two terms, which is the same in either order.
    weights, _ = oracle(model, (0,), data, F.mse_loss, make, k=2, reads="flushed")
    assert_same(found, weights)


def test_replicas_that_differ_are_told(tmp_path):
    """As on machines that round differently."""
    with open_pipe((0,), (2,), schedule="1f1b", k=2) as pipe:
        list(pipe.train_epoch(batches()))
        with torch.no_grad():
            hosts(pipe)[1].part(1, "module")[0].weight.add_(1e-6)
        with pytest.raises(CheckpointError, match=r"stage 0, replica 1 has other weights .*0"):
            pipe.save(tmp_path)


# -- processes --------------------------------------------------------------------------------


@pytest.mark.processes
@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("points", "replicas", "schedule", "reads", "k", "divided"),
    [
        ((0, 4), (2, 1), "async-1f1b", "async-1f1b", 1, False),
        ((0,), (3,), "async-1f1b", "async-1f1b", 3, True),
        ((0, 4), (1, 2), "1f1b", "flushed", 3, False),
    ],
)
def test_killed_workers_leave_no_trace(tmp_path, points, replicas, schedule, reads, k, divided):
    data = batches(12)
    losses, weights = expected(points, replicas, data, k, reads)
    checkpoint = Checkpoints(tmp_path, every=3)
    with open_pipe(
        points, replicas, k=k, schedule=schedule, workers="local", checkpoint=checkpoint,
        max_restarts=5, shard_optimizer=divided,
    ) as pipe:  # fmt: skip
        found = []
        for number, result in enumerate(pipe.train_epoch(data)):
            found += result.losses
            if number in (2, 8):
                workers = list(pids(pipe))
                kill(pipe, workers[number % len(workers)])
        assert len(pipe.restarts) >= 1
        assert found == losses
        assert_same(pipe.state_dict(), weights)


class Raises(nn.Module):
    def forward(self, x):
        if x.abs().max() > 1e6:
            raise RuntimeError("too large")
        return x


@pytest.mark.processes
def test_what_people_see_names_the_replica():
    data = batches(3, 8, 8)
    data[2][0][0, 0] = 1e9
    model = nn.Sequential(Raises(), nn.Linear(8, 4))
    with opened(model, replicas=[2], workers="local", trace=True) as pipe:
        list(pipe.train_epoch(data[:2]))
        text = pipe.explain()
        assert "async-1f1b with 2 replicas" in text
        assert "0.0" in text
        assert "0.1" in text
        assert "1 stages with 2 replicas on 2 workers" in repr(pipe)
        trace = pipe.trace()
        kinds = {chr(kind) for kind in set(trace.spans["kind"].tolist())}
        assert {"F", "B", "R", "S"} <= kinds
        with pytest.raises(StageFailed, match=r"stage 0.*too large"):
            pipe.submit(*data[2]).result()


# -- clipping, scaling, corrections -----------------------------------------------------------


@pytest.mark.parametrize("k", [2, 4, 6])
@pytest.mark.parametrize(("points", "replicas"), [((0, 4), (2, 1)), ((0, 4, 6), (1, 4, 2))])
def test_gradients_are_clipped_by_the_norm_of_the_whole_model(points, replicas, k):
    data = batches()
    bits = expected(
        points, replicas, data, k, "flushed",
        before_step=lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.1),
    )  # fmt: skip
    options = {"k": k, "schedule": "1f1b", "clip": Clip(norm=0.1)}
    for workers in in_any_order(k):
        both.assert_same(train(points, replicas, data, workers=workers, **options), bits)


def test_gradients_are_clipped_by_value():
    data, points, replicas = batches(), (0, 4), (3, 2)
    bits = expected(
        points, replicas, data, 2,
        before_step=lambda model: nn.utils.clip_grad_value_(model.parameters(), 0.01),
    )  # fmt: skip
    both.assert_same(train(points, replicas, data, k=2, clip=Clip(value=0.01)), bits)


def test_losses_are_scaled_where_the_pipe_is_flushed():
    run = functools.partial(train, (0, 4), (2, 1), batches(), k=4, schedule="1f1b")
    scaled = run(loss_scale=LossScale(init_scale=1024.0))
    both.assert_same(scaled, run())  # a power of two changes no bit


@pytest.mark.parametrize(
    "corrections",
    [[StalenessRate(100)], [Extrapolation()], [WeightPrediction()], [ErrorFeedback(2.0)]],
    ids=lambda each: type(each[0]).__name__,
)
def test_corrections_do_the_same_on_all_replicas(tmp_path, corrections):
    """`save` refuses replicas that have parted."""
    data = batches()
    found = []
    for workers in in_any_order(3):
        with open_pipe((0, 4), (3, 2), k=2, corrections=corrections, workers=workers) as pipe:
            losses = losses_of(pipe.train_epoch(data))
            pipe.save(tmp_path / str(len(found)))
            found.append((losses, pipe.state_dict()))
    both.assert_same(*found)
    plain, _ = train((0, 4), (3, 2), data, k=2)
    assert plain[-1] != losses[-1]


# -- what is refused --------------------------------------------------------------------------


def tied():
    torch.manual_seed(0)
    first, other = tied_layers(8)
    return nn.Sequential(first, nn.Tanh(), other, nn.Linear(8, 4))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"replicas": [2]}, "replicas has 1 numbers.*2 stages"),
        ({"replicas": [2, 0]}, "at least 1"),
        ({"replicas": [2, True]}, "at least 1"),
        ({"replicas": "21"}, "at least 1"),
        ({"replicas": [2, 1], "schedule": "zero-bubble"}, "zero-bubble has one replica"),
        (
            {"replicas": [2, 1], "schedule": "interleaved-1f1b", "micro_batches": 2},
            "one stage on each worker|one replica",
        ),
        ({"replicas": [2, 1], "schedule": "2bw", "micro_batches": 4}, "2-1 replicas .*at least 5"),
        ({"replicas": [2, 1], "clip": Clip(norm=1.0)}, '(?s)with 2-1 replicas.*over="stage"'),
        ({"replicas": [2, 1], "corrections": [DelayCompensation()]}, "DelayCompensation.*replicas"),
        ({"replicas": [2, 1], "shard_optimizer": 1}, "shard_optimizer must be True or False"),
        ({"replicas": [2, 1], "shard_optimizer": True, "ema": 0.9}, "ema needs all weights"),
        (
            {"replicas": [2, 1], "shard_optimizer": True, "corrections": [Extrapolation()]},
            "corrections need all weights",
        ),
        (
            {
                "replicas": [2, 1], "shard_optimizer": True, "clip": Clip(norm=1.0),
                "schedule": "1f1b", "micro_batches": 2,
            },
            "with shard_optimizer",
        ),
        (
            {
                "replicas": [1, 3], "schedule": "1f1b", "micro_batches": 2,
                "loss_scale": LossScale(),
            },
            "know its scale too late",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(options, words):
    with pytest.raises(ConfigError, match=words):
        open_pipe((0, 4), options.pop("replicas"), options.pop("micro_batches", 1), **options)


def test_tied_weights_and_hooks_on_sums_are_refused():
    with pytest.raises(ConfigError, match=r"0\.weight is used on several stages that have"):
        opened(tied(), stages=[1], replicas=[1, 2])
    model = network()
    model[0].weight.register_post_accumulate_grad_hook(lambda p: None)
    with pytest.raises(ConfigError, match="hook on its accumulated gradient"):
        opened(model, stages=[4], replicas=[1, 2])


def test_sparse_gradients_are_refused():
    """Before the start where a layer says that it makes some, else at the first sum."""

    class First(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(10, 4)

        def forward(self, x):
            return F.embedding(x, self.table.weight, sparse=True).mean(1)

    first = First()
    model = nn.Sequential(first, nn.Linear(4, 4))
    options = {"replicas": [2], "optimizer": (torch.optim.SGD, {"lr": 0.1})}
    with opened(model, **options) as pipe, pytest.raises(StageFailed, match=r"sparse.*dense"):
        list(pipe.train_epoch([(torch.arange(6).view(2, 3), torch.zeros(2, 4))] * 3))
    first.table.sparse = True
    with pytest.raises(ConfigError, match=r"gradients of 0\.table are sparse"):
        opened(model, **options)


# -- what a second reader has found -----------------------------------------------------------


class Skip(nn.Module):
    """No sequence: its forward is recorded, once for each shape of inputs."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x):
        h = torch.tanh(self.a(x))
        return self.c(torch.tanh(self.b(h)) + h + x)


@pytest.mark.parametrize("replicas", [(2, 1, 1), (1, 3, 2)])
def test_each_replica_learns_the_programs_that_it_follows(replicas):
    """A micro-batch has another shape than the example, and the last mini-batch others still."""
    torch.manual_seed(0)
    model, data = Skip(), batches(6, 48, 34)
    losses = []
    options = {"stages": ["b", "c"], "micro_batches": 4, "schedule": "1f1b"}
    for counts in ((1, 1, 1), replicas, replicas):
        with opened(model, example=data[0], replicas=counts, **options) as pipe:
            first = next(iter(pipe.train_epoch(data))).losses
            rest = losses_of(pipe.train_epoch(data))
            losses.append((first, rest, pipe.evaluate(data)))
    assert losses[1] == losses[2]
    assert losses[0][0] == losses[1][0]


def assert_goes_back(pipe, folder):
    data = batches(8)
    list(pipe.train_epoch(data[:3]))
    pipe.save(folder)
    first = losses_of(pipe.submit(*item).result() for item in data[3:])
    weights = pipe.state_dict()
    for _ in range(2):
        pipe.load(folder)
        assert losses_of(pipe.submit(*item).result() for item in data[3:]) == first
        assert_same(pipe.state_dict(), weights)


@pytest.mark.thinned(2)
@pytest.mark.parametrize(("schedule", "k"), [("async-1f1b", 1), ("async-1f1b", 2), ("1f1b", 2)])
@pytest.mark.parametrize(("points", "replicas"), [((0, 4), (2, 1)), ((0,), (3,)), ((0, 4), (1, 1))])
@pytest.mark.parametrize("options", [{}, {"shard_optimizer": True}, {"clip": Clip(norm=0.1)}])
def test_a_pipeline_goes_back_to_a_checkpoint(tmp_path, points, replicas, schedule, k, options):
    """Updates have numbers that they have had before."""
    replicated = max(replicas) > 1
    if replicated and schedule == "async-1f1b" and "clip" in options and len(points) > 1:
        return  # refused
    if options.get("shard_optimizer") and schedule == "1f1b" and k < max(replicas):
        return  # refused
    with open_pipe(points, replicas, k=k, schedule=schedule, **options) as pipe:
        assert_goes_back(pipe, tmp_path)


@pytest.mark.parametrize("k", [1, 2])
def test_a_pipeline_with_tied_weights_goes_back_to_a_checkpoint(tmp_path, k):
    """Versions of weights and shares of gradients, too, have numbers that they have had before."""
    with opened(tied(), stages=[1], micro_batches=k) as pipe:
        assert_goes_back(pipe, tmp_path)


class Counts(nn.Module):
    """What it computes depends on extra state, a tensor or a dict."""

    def __init__(self, as_tensor):
        super().__init__()
        self.as_tensor, self.count = as_tensor, 0

    def forward(self, x):
        self.count += self.training
        return x * (1 + 0.01 * (self.count % 7))

    def get_extra_state(self):
        return torch.tensor(self.count) if self.as_tensor else {"count": self.count}

    def set_extra_state(self, state):
        self.count = int(state) if self.as_tensor else state["count"]


@pytest.mark.parametrize("as_tensor", [True, False])
def test_each_replica_gets_its_own_extra_state_back(tmp_path, as_tensor):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), Counts(as_tensor), nn.Linear(8, 4))
    data = batches(9)
    options = {"stages": [1], "replicas": [1, 2]}
    with opened(model, **options) as pipe:
        losses = losses_of(pipe.train_epoch(data))
    with opened(model, **options) as pipe:
        assert losses_of(pipe.train_epoch(data[:5])) == losses[:5]
        pipe.save(tmp_path)
    with opened(model, **options) as pipe:
        pipe.load(tmp_path)
        assert losses_of(pipe.submit(*item).result() for item in data[5:]) == losses[5:]


class Shrinks(nn.Linear):
    def forward(self, x):
        with torch.no_grad():
            self.weight.mul_(0.99)
        return super().forward(x)


def test_weights_that_a_layer_or_a_function_changes_are_refused_also_where_the_pipe_is_flushed():
    model = nn.Sequential(Shrinks(8, 8), nn.Linear(8, 4))
    with (
        opened(model, stages=[1], replicas=[2, 1], schedule="1f1b") as pipe,
        pytest.raises(StageFailed, match=r"changed the parameter.*replicas"),
    ):
        list(pipe.train_epoch(batches(3)))

    def draw(module):
        for parameter in module.parameters():
            parameter.copy_(torch.randn_like(parameter))

    with open_pipe((0, 4), (2, 1), schedule="1f1b") as pipe:
        with pytest.raises(ConfigError, match="replicas would not change with it"):
            pipe.on_stages(draw)
        list(pipe.train_epoch(batches(2)))
    with open_pipe((0, 4), (1, 1), schedule="1f1b") as pipe:
        pipe.on_stages(draw)


@pytest.mark.parametrize(
    ("replicas", "where"), [([2, 1], "stage 0, replica 1"), ([1, 2], "stage 0")]
)
def test_an_error_names_the_stage_and_the_replica(replicas, where):
    data = batches(4)
    data[1][0][0, 0] = 1e9
    model = nn.Sequential(Raises(), nn.Linear(8, 8), nn.Linear(8, 4))
    pipe = opened(model, stages=[2], replicas=replicas)
    with pipe, pytest.raises(StageFailed, match=f"^{where}, F1: RuntimeError") as caught:
        list(pipe.train_epoch(data))
    assert caught.value.stage == 0
