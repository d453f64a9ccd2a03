"""Bars: they show how far something is, and change nothing of it."""

import io

import pytest
from rich.console import Console
from support.models import mlp, regression
from support.pinned import Pipeline
from torch.nn import functional as F
from torch.optim import SGD

from pipedream_rt import ConfigError
from pipedream_rt.observers import progress

DATA = regression(6)


@pytest.fixture
def seen(monkeypatch):
    """What is written to the terminal."""
    out = io.StringIO()
    terminal = Console(file=out, force_terminal=True, width=100)
    monkeypatch.setattr(progress, "Console", lambda stderr: terminal)
    return out


def test_all_items_come_and_are_counted(seen):
    assert list(progress.with_bar([1, 2, 3], "things", 3, str)) == [1, 2, 3]
    assert "things" in seen.getvalue()
    assert "3/3" in seen.getvalue()


def test_a_generator_that_is_left_is_closed(seen):
    closed = []

    def items():
        try:
            yield from range(10)
        finally:
            closed.append(True)

    for _ in progress.with_bar(items(), "things", None):
        break
    assert closed == [True]


def test_training_evaluating_and_predicting_with_a_bar(seen):
    ends = []
    for shown in (False, True):
        with Pipeline(
            mlp(), stages=2, loss_fn=F.mse_loss, optimizer=(SGD, {"lr": 0.1}), workers="serial"
        ) as pipe:
            losses = [result.loss for result in pipe.train_epoch(DATA, progress=shown)]
            loss = pipe.evaluate(iter(DATA), progress=shown)
            outputs = list(pipe.predict(DATA, progress=shown))
            ends.append((losses, loss, [output.tolist() for output in outputs]))
    assert ends[0] == ends[1]
    text = seen.getvalue()
    assert "epoch 0" in text
    assert "6/6" in text
    assert f"loss {progress.number_text(ends[0][0][-1])}" in text
    assert "evaluate" in text
    assert "predict" in text


def test_what_is_no_loader_is_refused_with_a_bar_too(seen):
    with Pipeline(
        mlp(), stages=2, loss_fn=F.mse_loss, optimizer=(SGD, {"lr": 0.1}), workers="serial"
    ) as pipe:
        with pytest.raises(ConfigError, match="evaluate takes a loader"):
            pipe.evaluate(5, progress=True)
        with pytest.raises(ConfigError, match="train_epoch takes a loader"):
            next(pipe.train_epoch(5, progress=True))
