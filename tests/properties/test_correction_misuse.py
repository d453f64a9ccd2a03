"""What corrections may not do, and what they may, at the edges of their rules."""

import contextlib
import runpy
import signal
from pathlib import Path

import pytest
import torch
from support.models import mlp, regression
from support.oracle import assert_same
from support.small import small
from torch import nn

from pipedream_rt import (
    Checkpoints,
    ConfigError,
    LossScale,
    StageFailed,
)
from pipedream_rt.corrections import (
    Correction,
    DelayCompensation,
    ErrorFeedback,
    Extrapolation,
)


def open_pipe(corrections=(), model=None, **options):
    options = {"optimizer": (torch.optim.AdamW, {"lr": 0.01}), **options}
    return small(model, corrections=[*corrections], **options)


def trained(pipe, data):
    with pipe:
        list(pipe.train_epoch(data))
        return pipe.state_dict()


# -- state --------------------------------------------------------------------------------------


def test_a_parameter_may_have_a_slash_in_its_name(tmp_path):
    class Slashed(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_parameter("a/b", nn.Parameter(torch.eye(8)))

        def forward(self, x):
            return x @ getattr(self, "a/b")

    def pipe(**options):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), Slashed(), nn.Linear(8, 8))
        return open_pipe([ErrorFeedback()], model, **options)

    torch.manual_seed(1)
    data = [(torch.randn(4, 8), torch.randn(4, 8)) for _ in range(10)]
    expected = trained(pipe(), data)
    with pipe() as first:
        for x, y in data[:6]:
            first.submit(x, y)
        first.save(tmp_path)
    assert_same(trained(pipe(checkpoint=Checkpoints(tmp_path, resume=True)), data[6:]), expected)


# -- hooks --------------------------------------------------------------------------------------


def test_an_error_in_a_hook_says_where():
    class Wrong(Correction):
        def before_step(self, at, optimizer):
            raise ValueError("boom")

    with pytest.raises(StageFailed, match=r"S0: ValueError: boom, in Wrong\.before_step"):
        trained(open_pipe([Wrong()]), regression(4))


# -- moments ------------------------------------------------------------------------------------

RECORDS: list[tuple[float, int]] = []
"""What `Recording` was told on stage 0; stages in the thread of the script share it."""


class Recording(Correction):
    def before_forward(self, at, weights, optimizer):
        if at.stage == 0:
            RECORDS.append((at.read, at.update))


class RecordingSteps(Correction):
    def before_step(self, at, optimizer):
        if at.stage == 0:
            RECORDS.append((at.read, at.update))


@pytest.fixture(autouse=True)
def nothing_recorded():
    RECORDS.clear()


def test_micro_batches_without_samples_do_not_count():
    data = [(x[:1], y[:1]) for x, y in regression(8)]
    trained(open_pipe([RecordingSteps()], micro_batches=3), data)
    assert [update - read for read, update in RECORDS] == [0, 1, 1, 1, 1, 1, 1, 1]


def test_an_update_that_was_skipped_has_a_prediction_too():
    data = regression(10)
    data[5] = tuple(1e30 * part for part in data[5])
    options = {"stages": 2, "schedule": "2bw", "micro_batches": 2, "on_nan": "ignore"}
    with open_pipe([Recording()], loss_scale=LossScale(init_scale=1024.0), **options) as pipe:
        list(pipe.train_epoch(data))
    assert [read for read, _ in RECORDS] == list(range(1, len(RECORDS) + 1))
    assert len(RECORDS) >= 9


class Stuck:
    """A policy that stays at a version for ever."""

    def reads(self, stage, shape, micro_batch):
        return min(max(0, (micro_batch - shape.warm_up(stage)) // shape.per_update), 4)

    def kept(self, stage, shape):
        return 10**6

    def require(self, shape):
        pass


def test_a_policy_that_stays_at_a_version_is_refused_where_it_would_need_views_for_ever():
    example = Path(__file__).parents[2] / "examples" / "own_schedule.py"
    schedule = runpy.run_path(str(example))["Rounds"](10**6)
    schedule.versions = Stuck()
    trained(open_pipe([ErrorFeedback()], schedule=schedule), regression(8))
    with pytest.raises(StageFailed, match="would read version"):
        trained(open_pipe([Extrapolation()], schedule=schedule), regression(8))


# -- hooks on gradients -------------------------------------------------------------------------


def clamp(parameter):
    parameter.grad.clamp_(-0.01, 0.01)


def test_hooks_on_accumulated_gradients_and_corrections_of_gradients():
    def hooked():
        model = mlp()
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(clamp)
        return model

    with pytest.raises(ConfigError, match="has a hook on its accumulated gradient"):
        open_pipe([DelayCompensation()], hooked(), micro_batches=2)
    plain = trained(open_pipe([], hooked()), regression(6))
    assert_same(
        trained(open_pipe([DelayCompensation(strength=0.0)], hooked()), regression(6)), plain
    )


def test_sparse_gradients():
    def embedding(sparse):
        torch.manual_seed(0)
        table = nn.Embedding(9, 8, sparse=sparse)
        return nn.Sequential(table, nn.Flatten(), nn.Linear(16, 8), nn.Linear(8, 8))

    generator = torch.Generator().manual_seed(0)
    data = [
        (torch.randint(9, (4, 2), generator=generator), torch.randn(4, 8, generator=generator))
        for _ in range(8)
    ]

    def run(sparse, *corrections):
        optimizer = (torch.optim.SGD, {"lr": 0.1})
        return trained(open_pipe(corrections, embedding(sparse), optimizer=optimizer), data)

    both = DelayCompensation(), ErrorFeedback()
    for key, dense in run(False, *both).items():
        torch.testing.assert_close(run(True, *both)[key], dense)
    with pytest.raises(StageFailed, match="needs dense gradients"):
        run(True, DelayCompensation(adaptive=True))


# -- the thread of the script -------------------------------------------------------------------


class Deadline(Exception):
    """Raised by a handler of the script."""


def handler(number, frame):
    raise Deadline


class Alarming(nn.Module):
    """Sends its process a signal in its fourth forward."""

    calls = 0

    def forward(self, x):
        type(self).calls += 1
        if type(self).calls == 4:
            signal.raise_signal(signal.SIGUSR1)
        return x


def test_what_a_signal_handler_raises_reaches_the_script():
    signal.signal(signal.SIGUSR1, handler)
    Alarming.calls = 0
    model = nn.Sequential(nn.Linear(8, 8), Alarming(), nn.Linear(8, 8))
    torch.manual_seed(0)
    data = [(torch.randn(4, 8), torch.randn(4, 8)) for _ in range(8)]
    with pytest.raises(Deadline), open_pipe([], model, max_restarts=2) as pipe:
        list(pipe.train_epoch(data))
    assert not pipe.restarts


@contextlib.contextmanager
def hooked_everywhere():
    hook = nn.modules.module.register_module_forward_hook(lambda *given: None)
    try:
        yield
    finally:
        hook.remove()


@pytest.mark.parametrize(
    ("around", "words"),
    [
        (hooked_everywhere, "on all modules"),
        (lambda: torch.device("meta"), "get_default_device"),
    ],
)
def test_what_workers_would_not_have_does_not_reach_the_stages(around, words):
    with open_pipe() as pipe:
        for x, y in regression(6):
            pipe.submit(x, y)
        with around(), pytest.raises(ConfigError, match=words):
            pipe.flush()
