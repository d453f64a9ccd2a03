"""All stages in the caller's thread, one after another."""

import functools
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.nn.functional as F
from support.late import Late, too_late
from support.models import POINTS, Raises, batches, kitchen_sink, regression
from support.oracle import assert_same, oracle
from support.small import small
from torch import nn

from pipedream_rt import (
    Checkpoints,
    Clip,
    ConfigError,
    PipelineClosed,
    PipelineError,
    StageFailed,
)
from pipedream_rt.models import preserving_state
from pipedream_rt.serial.cluster import SerialCluster

OPTIMIZER = (torch.optim.AdamW, {"lr": 0.01})
SHUFFLED = functools.partial(SerialCluster, shuffle_seed=5)


def open_pipe(model=None, **options):
    return small(model, **{"optimizer": OPTIMIZER, **options})


def assert_in_any_order(model, data, **options):
    """Of the messages, the trained weights are the same."""
    states = []
    for workers in ("serial", SHUFFLED):
        with open_pipe(model, workers=workers, **options) as pipe:
            list(pipe.train_epoch(data))
            states.append(pipe.state_dict())
    assert_same(*states)


def make_optimizer(parameters):
    return torch.optim.AdamW(parameters, lr=0.01)


@pytest.mark.thinned(2)
@pytest.mark.parametrize(
    ("schedule", "k", "reads"),
    [
        ("async-1f1b", 1, "async-1f1b"),
        ("async-1f1b", 2, "async-1f1b"),
        ("async-1f1b+vertical-sync", 1, "vertical-sync"),
        ("2bw", 5, "2bw"),
        ("1f1b", 2, "flushed"),
        ("gpipe", 3, "flushed"),
        ("zero-bubble", 2, "flushed"),
    ],
)
@pytest.mark.parametrize("stages", [1, 3, 5])
def test_it_computes_what_the_oracle_computes(stages, schedule, k, reads):
    data = batches(8, samples=10)
    expected, losses = oracle(
        kitchen_sink(), POINTS[stages], data, F.cross_entropy, make_optimizer, k=k, reads=reads
    )
    with open_pipe(
        kitchen_sink(),
        stages=POINTS[stages][1:] or 1,
        loss_fn=F.cross_entropy,
        schedule=schedule,
        micro_batches=k,
    ) as pipe:
        assert [loss for r in pipe.train_epoch(data) for loss in r.losses] == losses
        assert_same(pipe.state_dict(), expected)


def test_several_stages_on_a_worker():
    options = {"stages": 6, "schedule": "interleaved-1f1b", "micro_batches": 3}
    assert_in_any_order(None, regression(6, samples=4), clip=Clip(norm=0.1), **options)


def test_256_stages():
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(256)))
    data = regression(4, width=4)
    expected, losses = oracle(model, list(range(256)), data, F.mse_loss, make_optimizer)
    with open_pipe(model, stages=256) as pipe:
        assert [r.loss for r in pipe.train_epoch(data)] == losses
        assert_same(pipe.state_dict(), expected)


def test_no_thread_and_no_process_is_started(monkeypatch):
    def start(*_):
        raise AssertionError("started")

    monkeypatch.setattr(threading.Thread, "start", start)
    monkeypatch.setattr("subprocess.Popen.__init__", start)
    with open_pipe() as pipe:
        list(pipe.train_epoch(regression(5)))
        pipe.evaluate(regression(2))


def test_the_generator_and_the_threads_of_the_script_stay_its_own():
    """What the stages draw and set is not seen by the script, nor the other way round."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8))
    before = torch.get_num_threads()
    states = []
    try:
        torch.set_num_threads(2)
        for draws in (0, 3):
            torch.manual_seed(1)
            expected = [torch.rand(1).item() for _ in range(4)]
            torch.manual_seed(1)
            found = []
            with open_pipe(model, stages=2) as pipe:
                for result in pipe.train_epoch(regression(4)):
                    found.append(torch.rand(1).item())
                    assert torch.get_num_threads() == 2
                    assert result.step < 4
                states.append(pipe.state_dict())
                torch.rand(draws)
            assert found == expected
        assert_same(*states)
    finally:
        torch.set_num_threads(before)


def test_stages_wait_until_no_other_thread_draws(monkeypatch):
    """It would draw from the one generator that they seed for themselves."""
    monkeypatch.setattr(preserving_state, "_LONGEST", timedelta())
    with open_pipe() as pipe, ThreadPoolExecutor(1) as pool, preserving_state.drawing_alone():
        error = pool.submit(pipe, torch.ones(2, 8)).exception()
    assert isinstance(error, PipelineError)
    assert "another thread of this process has computed stages" in str(error)


def test_stages_learn_where_the_script_computes_without_gradients():
    """A flush inside no_grad does the backwards that are left."""
    with open_pipe() as pipe:
        for x, y in regression(6):
            pipe.submit(x, y)
        with torch.no_grad():
            pipe.flush()
        first = pipe.state_dict()
    with open_pipe() as pipe:
        list(pipe.train_epoch(regression(6)))
        with torch.inference_mode():
            assert_same(pipe.state_dict(), first)


def test_a_context_that_would_reach_the_stages_is_refused():
    with open_pipe() as pipe:
        pipe.submit(*regression(1)[0])
        with (
            torch.autocast("cpu", dtype=torch.bfloat16),
            pytest.raises(ConfigError, match="autocast is on around the pipeline"),
        ):
            pipe.flush()


def test_an_error_of_a_layer_has_its_place():
    model = nn.Sequential(nn.Linear(8, 8), Raises(at=3), nn.Linear(8, 8))
    with pytest.raises(StageFailed, match="stage 1"), open_pipe(model) as pipe:
        list(pipe.train_epoch(regression(6)))
    assert pipe.state.value == "failed"


def test_a_run_goes_on_after_an_error(tmp_path):
    """With other stages, from the last checkpoint."""

    class Once(nn.Module):
        def forward(self, x):
            marker = tmp_path / "raised"
            if self.training and (tmp_path / "armed").exists() and not marker.exists():
                marker.touch()
                raise RuntimeError("once")
            return x

    model = nn.Sequential(nn.Linear(8, 8), Once(), nn.Linear(8, 8))
    data, states = regression(12), []
    for armed in (False, True):
        folder = tmp_path / str(armed)
        with open_pipe(model, checkpoint=Checkpoints(folder, every=4), max_restarts=1) as pipe:
            for result in pipe.train_epoch(data):
                if armed and result.step == 5:
                    (tmp_path / "armed").touch()
            assert len(pipe.restarts) == armed
            states.append(pipe.state_dict())
    assert_same(*states)


class Interrupts(nn.Module):
    """In one of its modes."""

    def __init__(self, training=True):
        super().__init__()
        self.at = training

    def forward(self, x):
        if self.training is self.at:
            signal.raise_signal(signal.SIGINT)
        return x


def test_ctrl_c_in_a_stage_reaches_the_script():
    model = nn.Sequential(nn.Linear(8, 8), Interrupts(), nn.Linear(8, 8))
    with pytest.raises(KeyboardInterrupt), open_pipe(model, max_restarts=3) as pipe:
        list(pipe.train_epoch(regression(6)))
    assert not pipe.restarts
    with pytest.raises(PipelineClosed, match="is closed: KeyboardInterrupt, which came while"):
        pipe.flush()


def test_a_signal_handler_may_close_the_pipeline_while_a_stage_computes():
    model = nn.Sequential(nn.Linear(8, 8), Interrupts(), nn.Linear(8, 8))
    with open_pipe(model) as pipe:
        signal.signal(signal.SIGINT, lambda *_: pipe.close())
        with pytest.raises(PipelineClosed):
            list(pipe.train_epoch(regression(6)))


@pytest.mark.parametrize("training", [True, False])
def test_an_error_of_a_signal_handler_in_a_stage_ends_the_pipeline_which_says_so(training):
    """Stages compute in the thread of the script, so that one was left in the middle."""
    model = nn.Sequential(nn.Linear(8, 8), Interrupts(training), nn.Linear(8, 8))
    data = regression(6)
    signal.signal(signal.SIGINT, too_late)
    with open_pipe(model, max_restarts=3) as pipe:
        with pytest.raises(Late) as e:
            list(pipe.train_epoch(data)) if training else pipe.evaluate(data)
        assert not pipe.restarts
        with pytest.raises(PipelineClosed, match="has failed: Late, which came") as f:
            pipe.flush()
        assert f.value.__cause__ is e.value


def test_layers_that_work_in_place_do_not_change_what_other_stages_hold():
    """As on workers of their own: what a stage is sent is its own."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 8), nn.Sigmoid())
    assert_in_any_order(model, regression(8), stages=[1, 2, 3])
