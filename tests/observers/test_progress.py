"""Bars: they show how far something is, and change nothing of it."""

import io
import sys
from types import SimpleNamespace

import pytest
from rich.console import Console
from support.models import regression
from support.small import losses, small

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


class Shown:
    """What a notebook shows in one place, over time, as IPython shows it."""

    def __init__(self, bar):
        self.texts = []
        self.update(bar)

    def update(self, bar):
        assert "text/html" in bar._repr_mimebundle_((), ())
        self.texts.append(bar._repr_mimebundle_((), ())["text/plain"])


@pytest.fixture
def notebook(monkeypatch):
    """The bars that are shown in a notebook, where ipywidgets is not installed."""
    bars = []

    def display(bar, display_id):
        bars.append(Shown(bar))
        return bars[-1]

    here = SimpleNamespace(get_ipython=lambda: SimpleNamespace(kernel=object()))
    monkeypatch.setitem(sys.modules, "IPython", here)
    monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(display=display))
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    return bars


def test_a_notebook_shows_a_bar_without_ipywidgets(notebook, capsys):
    assert list(progress.with_bar([1, 2, 3], "things", 3, "item {}".format)) == [1, 2, 3]
    assert list(progress.with_bar([4], "others", None)) == [4]
    (first, *_, last), (_, *_, other) = (bar.texts for bar in notebook)
    assert "things" in first
    assert "0/3" in first
    assert "3/3 item 3" in " ".join(last.split())
    assert "1/?" in other
    assert capsys.readouterr() == ("", "")


def test_a_bar_that_a_notebook_refuses_ends_nothing(notebook, monkeypatch, caplog):
    monkeypatch.setattr(Shown, "update", Shown.__init__)  # endless
    assert list(progress.with_bar([1, 2], "things", 2)) == [1, 2]
    assert "the bar 'things' is drawn no more (RecursionError" in caplog.text


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


class Gone(io.StringIO):
    """A terminal that goes away after some words."""

    def __init__(self, error):
        super().__init__()
        self.error = error

    def isatty(self):
        return True

    def write(self, text):
        if self.tell() > 20:
            raise self.error
        return super().write(text)


@pytest.mark.parametrize(
    "error", [BrokenPipeError(32, "Broken pipe"), OSError(28, "No space"), ValueError("closed")]
)
def test_a_bar_whose_terminal_goes_away_is_drawn_no_more(monkeypatch, caplog, error):
    monkeypatch.setattr(sys, "stderr", Gone(error))
    monkeypatch.setattr(progress, "_EVERY_S", 0.0)
    own = sys.stdout
    came = []
    for item in progress.with_bar(range(4), "things", 4):
        came.append(item)
        assert sys.stdout is own or item == 0
    assert came == [0, 1, 2, 3]
    assert sys.stdout is own
    (said,) = [r.getMessage() for r in caplog.records if "drawn no more" in r.getMessage()]
    assert said.startswith(f"the bar 'things' is drawn no more ({type(error).__name__}: ")


@pytest.mark.parametrize("how", ["closed", "none"])
def test_without_standard_error_there_is_no_bar(monkeypatch, how):
    stream = None if how == "none" else Gone(OSError())
    if stream:
        stream.close()
    monkeypatch.setattr(sys, "stderr", stream)
    assert list(progress.with_bar(range(4), "things", 4)) == [0, 1, 2, 3]


def test_the_errors_of_the_loop_are_its_own(seen):
    def items():
        yield 1
        raise OSError("of the loader")

    with pytest.raises(OSError, match="of the loader"):
        list(progress.with_bar(items(), "things", 2))


def test_training_evaluating_and_predicting_with_a_bar(seen):
    ends = []
    for shown in (False, True):
        with small() as pipe:
            found = losses(pipe, DATA, progress=shown)
            loss = pipe.evaluate(iter(DATA), progress=shown)
            outputs = list(pipe.predict(DATA, progress=shown))
            ends.append((found, loss, [output.tolist() for output in outputs]))
    assert ends[0] == ends[1]
    text = seen.getvalue()
    assert "epoch 0" in text
    assert "6/6" in text
    assert f"loss {progress.number_text(ends[0][0][-1])}" in text
    assert "evaluate" in text
    assert "predict" in text


def test_a_bar_after_a_resume_begins_where_the_run_was(seen, tmp_path):
    came = 0
    for resume in (False, True):
        with small() as pipe:
            if resume:
                pipe.load(tmp_path)
            for result in pipe.train_epoch(DATA, progress=resume):
                came += resume
                if result.step == 3 and not resume:
                    pipe.save(tmp_path)  # the script has seen four results here, and no more
                    break
    assert came == 2
    assert "6/6" in seen.getvalue()
    assert f"{came}/6" not in seen.getvalue().splitlines()[-1]


def test_what_is_no_loader_is_refused_with_a_bar_too(seen):
    with small() as pipe:
        with pytest.raises(ConfigError, match="evaluate takes a loader"):
            pipe.evaluate(5, progress=True)
        with pytest.raises(ConfigError, match="train_epoch takes a loader"):
            next(pipe.train_epoch(5, progress=True))
