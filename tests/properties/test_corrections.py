"""Corrections for staleness: against the oracle, on every kind of workers, through kills."""

import functools
import threading

import pytest
import torch
import torch.nn.functional as F
from support import both
from support.both import learned
from support.corrected import corrected
from support.faults import losses_through_death
from support.models import POINTS, batches, kitchen_sink, mlp, regression
from support.oracle import assert_same
from support.pinned import Pipeline
from support.small import small

from pipedream_rt import (
    Checkpoints,
    Clip,
    ConfigError,
    LossScale,
)
from pipedream_rt.corrections import (
    Correction,
    DelayCompensation,
    ErrorFeedback,
    Extrapolation,
    StalenessDamping,
    StalenessMomentum,
    StalenessNesterov,
    StalenessRate,
    StalenessRefresh,
    WeightPrediction,
)
from pipedream_rt.optimizers import Muon, RotatedAdamW, hidden_matrices

MADE = {
    "rate": lambda: StalenessRate(updates=8),
    "damping": lambda: StalenessDamping(),
    "momentum": lambda: StalenessMomentum(),
    "nesterov": lambda: StalenessNesterov(),
    "prediction": lambda: WeightPrediction(),
    "extrapolation": lambda: Extrapolation(),
    "averaged": lambda: Extrapolation(decay=0.6),
    "compensation": lambda: DelayCompensation(strength=0.3),
    "adaptive": lambda: DelayCompensation(strength=0.3, adaptive=True),
    "feedback": lambda: ErrorFeedback(),
    "stronger": lambda: ErrorFeedback(limit=2.0),
}
ALONE = [(name,) for name in MADE]
TOGETHER = [
    ("feedback", "prediction"),
    ("adaptive", "rate", "prediction", "feedback"),
    ("stronger", "averaged", "damping"),
    ("nesterov", "prediction"),
]

OPTIMIZERS = {
    "sgd": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}),
    "nesterov": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True}),
    "adam": (torch.optim.Adam, {"lr": 0.01}),
    "adamw": (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    "nadam": (torch.optim.NAdam, {"lr": 0.01, "betas": (0.99, 0.999)}),
}

SCHEDULES = {
    "async": ({}, "async-1f1b"),
    "async, 2 per update": ({"micro_batches": 2}, "async-1f1b"),
    "vertical": ({"schedule": "async-1f1b+vertical-sync"}, "vertical-sync"),
    "2bw": ({"schedule": "2bw", "micro_batches": 4}, "2bw"),
    "1f1b": ({"schedule": "1f1b", "micro_batches": 2}, "flushed"),
}


def open_pipe(names=(), optimizer="adamw", stages=4, **options):
    return Pipeline(
        kitchen_sink(),
        **{
            "stages": POINTS[stages][1:],
            "loss_fn": F.cross_entropy,
            "optimizer": OPTIMIZERS[optimizer],
            "corrections": [MADE[name]() for name in names],
            "workers": "serial",
            **options,
        },
    )


def trained(data, *args, **options):
    with open_pipe(*args, **options) as pipe:
        return learned(pipe, data)


def judged(data, names, optimizer="adamw", stages=4, **options):
    kind, arguments = OPTIMIZERS[optimizer]
    make = functools.partial(kind, **arguments)
    weights, losses = corrected(
        kitchen_sink(), POINTS[stages], data, F.cross_entropy, make, names=names, **options
    )
    return losses, weights


@functools.cache
def uncorrected(reads, k):
    return judged(batches(10, samples=8), (), reads=reads, k=k)


@pytest.mark.thinned(2)
@pytest.mark.parametrize(
    ("names", "schedule"),
    [
        *((names, "async") for names in [*ALONE, *TOGETHER]),
        *((names, "async, 2 per update") for names in ALONE),
        *((TOGETHER[1], schedule) for schedule in ("vertical", "2bw", "1f1b")),
        (("extrapolation",), "2bw"),
        (("feedback",), "1f1b"),
    ],
    ids=str,
)
def test_a_correction_computes_what_its_equation_says(names, schedule):
    options, reads = SCHEDULES[schedule]
    data = batches(10, samples=8)
    expected = judged(data, names, reads=reads, k=options.get("micro_batches", 1))
    both.assert_same(trained(data, names, **options), expected)
    # With a mean staleness of 1 at most, a rate divided by it is the rate.
    if reads != "flushed" and (names, reads) != (("rate",), "2bw"):
        plain = uncorrected(reads, options.get("micro_batches", 1))
        assert plain[0] != expected[0], "the correction corrects nothing"


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_rule_of_a_prediction_is_that_of_the_optimizer(optimizer):
    data = batches(9)
    found = trained(data, ("prediction", "momentum"), optimizer)
    both.assert_same(found, judged(data, ("prediction", "momentum"), optimizer))


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw"])
def test_nesterovs_form_is_that_of_the_momentum_of_the_optimizer(optimizer):
    data = batches(9, samples=8)
    options, reads = SCHEDULES["async, 2 per update"]
    found = trained(data, ("nesterov",), optimizer, **options)
    both.assert_same(found, judged(data, ("nesterov",), optimizer, reads=reads, k=2))


@pytest.mark.processes
@pytest.mark.parametrize(
    ("names", "victim"),
    [
        (TOGETHER[0], "worker-1"),
        (TOGETHER[1], "worker-0"),
        (TOGETHER[2], "worker-1"),
        (TOGETHER[3], "worker-0"),
    ],
    ids=str,
)
def test_so_do_processes_and_the_death_of_one(names, victim, tmp_path):
    """After a checkpoint that did not stop the pipe."""
    data = batches(24)
    expected = judged(data, names)
    with open_pipe(
        names, workers="local", checkpoint=Checkpoints(tmp_path, every=7), max_restarts=1
    ) as pipe:
        losses = losses_through_death(pipe, data, victim, 16)
        assert len(pipe.restarts) == 1
        both.assert_same((losses, pipe.state_dict()), expected)


APART = [(name,) for name in MADE if not any(name in names for names in TOGETHER)]


@pytest.mark.parametrize(
    ("names", "schedule"),
    [
        *((names, "async") for names in [*APART, *TOGETHER]),
        *((TOGETHER[1], schedule) for schedule in ("async, 2 per update", "vertical", "2bw")),
    ],
    ids=str,
)
def test_a_resumed_run_goes_on_with_the_same_bits(names, schedule, tmp_path):
    options, _ = SCHEDULES[schedule]
    data = batches(12, samples=8)
    expected = trained(data, names, **options)
    with open_pipe(names, **options) as pipe:
        for x, y in data[:7]:
            pipe.submit(x, y)
        pipe.save(tmp_path)
    with open_pipe(names, **options, checkpoint=Checkpoints(tmp_path, resume=True)) as pipe:
        assert pipe.step == 7
        for x, y in data[7:]:
            pipe.submit(x, y)
        assert_same(pipe.state_dict(), expected[1])


@pytest.mark.parametrize("names", [("feedback",), ("momentum", "prediction")], ids="+".join)
def test_in_a_schedule_that_flushes_a_run_goes_on_with_another_number_of_stages(names, tmp_path):
    options, _ = SCHEDULES["1f1b"]
    data = batches(12, samples=8)
    expected = trained(data, names, **options)
    with open_pipe(names, **options) as pipe:
        list(pipe.train_epoch(data[:6]))
        pipe.save(tmp_path)
    again = Checkpoints(tmp_path, resume=True)
    with open_pipe(names, stages=3, **options, checkpoint=again) as pipe:
        for x, y in data[6:]:
            pipe.submit(x, y)
        assert_same(pipe.state_dict(), expected[1])


def test_no_corrections_are_the_bits_of_before():
    data = batches(9)
    both.assert_same(trained(data), judged(data, ()))


def test_a_flush_changes_nothing():
    data = batches(12)
    with open_pipe(("prediction", "feedback")) as pipe:
        losses = []
        for x, y in data:
            losses.append(pipe.submit(x, y).result().loss)
            pipe.flush()
        both.assert_same((losses, pipe.state_dict()), judged(data, ("prediction", "feedback")))


class Damped(Correction):
    """The example of the documentation."""

    def before_step(self, at, optimizer):
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] / (1 + at.staleness)


def test_a_correction_of_a_user(tmp_path):
    """It comes to the workers from the script, and its changes of options last for one step."""
    data = regression(8)
    with small(stages=2, corrections=[Damped()]) as pipe:
        list(pipe.train_epoch(data))
        pipe.flush()
        seen = [r.local_value().param_groups[0]["lr"] for r in pipe.optimizer.remote_optimizers]
        damped = pipe.state_dict()
    assert seen == [0.1, 0.1]
    with small(stages=2) as pipe:
        list(pipe.train_epoch(data))
        plain = pipe.state_dict()
    assert any(not torch.equal(damped[key], plain[key]) for key in plain)


def test_a_correction_that_does_not_pickle_is_named():
    class Locked(Correction):
        def __init__(self):
            self.lock = threading.Lock()

        def before_step(self, at, optimizer):
            pass

    with pytest.raises(ConfigError, match="the correction Locked"):
        open_pipe(corrections=[Locked()])


def test_other_corrections_than_those_of_the_checkpoint_are_told(tmp_path, caplog):
    with open_pipe(("feedback",)) as pipe:
        list(pipe.train_epoch(batches(3)))
        pipe.save(tmp_path)
    with open_pipe(("feedback",), checkpoint=Checkpoints(tmp_path, resume=True)):
        assert "with the corrections" not in caplog.text
    with open_pipe(("stronger",), checkpoint=Checkpoints(tmp_path, resume=True)):
        assert "with the corrections ['ErrorFeedback(limit=1.0)'], this script has" in caplog.text


def test_explain_tells_staleness_and_memory():
    with open_pipe(("feedback", "prediction")) as pipe:
        list(pipe.train_epoch(batches(12)))
        text, counters = pipe.explain(), pipe.statistics()
    assert "corrections: ErrorFeedback(limit=1.0), WeightPrediction(strength=1.0)" in text
    rows = [line.split() for line in text.splitlines() if line.startswith(("0 ", "3 "))]
    assert "3" in rows[0]  # the staleness of the first stage
    for stage, found in enumerate(counters):
        versions = 4 - stage
        copies = 1 + (versions if versions > 1 else 0)
        assert found["correction_bytes"] == copies * found["weight_bytes"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"corrections": ErrorFeedback()}, "or a list of Correction objects"),
        ({"corrections": ["feedback"]}, "must be Correction objects"),
        (
            {
                "corrections": [DelayCompensation()],
                "clip": Clip(norm=1.0),
                "schedule": "async-1f1b+vertical-sync",
            },
            "DelayCompensation needs the weights that a gradient is applied to",
        ),
        (
            {
                "corrections": [DelayCompensation()],
                "loss_scale": LossScale(),
                "schedule": "2bw",
                "micro_batches": 4,
            },
            "losses are scaled",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(options, words):
    with pytest.raises(ConfigError, match=words):
        open_pipe(**options)


# -- optimizers ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Muon, RotatedAdamW])
@pytest.mark.parametrize("corrections", [(), (ErrorFeedback, WeightPrediction, StalenessRefresh)])
def test_optimizers_of_matrices_go_on_after_a_resume(kind, corrections, tmp_path):
    data = regression(24)

    def piped(**options):
        matrices = [(hidden_matrices(mlp()), {"matrices": True})]
        return small(
            optimizer=(kind, {"lr": 0.01}, matrices), corrections=[c() for c in corrections],
            **options,
        )  # fmt: skip

    with piped() as pipe:
        list(pipe.train_epoch(data))
        expected = pipe.state_dict()
    with piped() as pipe:
        for x, y in data[:13]:
            pipe.submit(x, y)
        pipe.save(tmp_path)
    with piped(checkpoint=Checkpoints(tmp_path, resume=True)) as pipe:
        for x, y in data[13:]:
            pipe.submit(x, y)
        assert_same(pipe.state_dict(), expected)
