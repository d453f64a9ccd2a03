"""A plan that is no chain goes through everything that reads plans."""

import functools

import pytest
import torch
import torch.nn.functional as F
from support import diamond
from support.costs import unit
from support.faults import losses_through_death
from support.models import OPTIMIZERS, regression
from support.oracle import assert_same
from support.pinned import Pipeline

from pipedream_rt import Checkpoints
from pipedream_rt.schedules import Kind, check
from pipedream_rt.serial.cluster import SerialCluster
from pipedream_rt.simulation import simulate
from pipedream_rt.simulation.predict import fit
from pipedream_rt.tracing import describe, timeline


@pytest.fixture
def pipeline(monkeypatch):
    """Opens pipelines over the diamond; everything but the plan is as users have it."""

    def opened(k=1, **kwargs):
        monkeypatch.setattr("pipedream_rt.job.decisions._plan_of", lambda *_: diamond.plan(k))
        defaults = {"loss_fn": F.mse_loss, "optimizer": OPTIMIZERS["adamw"], "micro_batches": k}
        return Pipeline(diamond.model(), **{**defaults, **kwargs})

    return opened


def expected(data, k):
    cls, kwargs = OPTIMIZERS["adamw"]
    return diamond.oracle(diamond.model(), data, F.mse_loss, lambda p: cls(p, **kwargs), k=k)


def test_it_is_checked_and_drawn():
    assert check(diamond.plan(), 5).render() == (
        "stage 0  F0 F1 F2 .  .  B0 F3 B1 F4 B2 .  B3 .  B4\n"
        "stage 1  .  F0 F1 .  B0 F2 B1 F3 B2 F4 B3 .  B4 .\n"
        "stage 2  .  F0 F1 .  B0 F2 B1 F3 B2 F4 B3 .  B4 .\n"
        "stage 3  .  .  F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 .  ."
    )


def test_it_is_simulated():
    """Stage 3 waits for both its producers, stage 0 for both its consumers."""
    trace = simulate(diamond.plan(), unit(latency=0.001), 8)
    plan = trace.plan
    for stage in range(4):
        spans = trace.of_stage(stage)
        for span in spans[spans["kind"] == ord("F")]:
            for producer in plan.producers(stage):
                before = trace.of_stage(producer)
                sent = before[(before["kind"] == ord("F")) & (before["index"] == span["index"])]
                assert span["start"] >= sent["end"][0] + 1_000_000
        for span in spans[spans["kind"] == ord("B")]:
            for consumer in plan.consumers(stage):
                after = trace.of_stage(consumer)
                sent = after[(after["kind"] == ord("B")) & (after["index"] == span["index"])]
                assert span["start"] >= sent["end"][0] + 1_000_000
    assert "waits for" in describe(trace)
    view = timeline.window(trace)
    assert timeline.text(trace, view).splitlines()[3].startswith("stage 3")
    assert "stage 3" in timeline.svg(trace, view)
    arrows = timeline.perfetto(trace)
    assert arrows.count('"ph": "s"') == arrows.count('"ph": "f"') == 8
    assert fit(trace).latency == pytest.approx(0.001)


def test_a_producer_in_the_middle_that_is_late_holds_everybody_back():
    slow = simulate(diamond.plan(), unit(forward=((0.001,), (0.001,), (0.005,), (0.001,))), 8)
    first = slow.of_stage(3)[0]
    assert first["waited_for"] == 2
    assert first["start"] == 6_000_000


@pytest.mark.threads
@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize("shuffle", [None, 1, 2, 3])
def test_it_equals_its_oracle_on_threads(pipeline, k, shuffle):
    """Whatever the order of delivery; with a flush, an evaluation and inference on the way."""
    data = regression(12)
    weights, losses = expected(data, k)
    workers = functools.partial(SerialCluster, shuffle_seed=shuffle)
    with pipeline(k, workers=workers, trace=True) as pipe:
        found = [loss for r in pipe.train_epoch(data[:5]) for loss in r.losses]
        pipe.evaluate(data[:2])
        model = pipe.train(False).module().eval()
        x = data[0][0]
        hidden = model[0](x)
        assert torch.equal(pipe(x), model[3]((model[1](hidden), model[2](hidden))))
        pipe.train()
        found += [loss for r in pipe.train_epoch(data[5:]) for loss in r.losses]
        assert_same(pipe.state_dict(), weights)
        trace, counters = pipe.trace(), pipe.statistics()
    assert found == losses
    kept = [diamond.plan(k).kept(stage) for stage in range(4)]
    assert [c["versions_kept_most"] for c in counters] == kept
    forwards = trace.of_stage(3)[trace.of_stage(3)["kind"] == ord("F")]
    assert set(forwards["waited_for"].tolist()) <= {1, 2}
    assert [a for a in trace.actions(3) if a.kind is Kind.STEP][-1].index == 11


@pytest.mark.processes
def test_it_equals_its_oracle_on_processes_through_the_death_of_a_worker(pipeline, tmp_path):
    data = regression(16)
    weights, losses = expected(data, 1)
    with pipeline(workers="local", checkpoint=Checkpoints(tmp_path, every=4)) as pipe:
        found = losses_through_death(pipe, data, "worker-2", step=9)
        assert_same(pipe.state_dict(), weights)
        assert len(pipe.restarts) == 1
    assert found == losses


@pytest.mark.threads
def test_it_goes_on_from_a_checkpoint(pipeline, tmp_path):
    data = regression(10)
    weights, losses = expected(data, 1)
    with pipeline(workers="serial") as pipe:
        found = [r.loss for r in pipe.train_epoch(data[:6])]
        pipe.save(tmp_path)
    with pipeline(workers="serial") as pipe:
        pipe.load(tmp_path)
        found += [r.loss for r in pipe.train_epoch(data[6:])]
        assert_same(pipe.state_dict(), weights)
    assert found == losses
