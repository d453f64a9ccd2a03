"""What tells of a run and fails: it is said, and the run goes on."""

import functools
import io
import logging
import signal
import sys
from types import SimpleNamespace
from unittest.mock import Mock, call

import pytest

from pipedream_rt.telling import harmless, log_of, note, say


@pytest.mark.parametrize("error", [OSError("the disk is full"), SystemExit(1), RuntimeError()])
def test_an_error_is_handed_over_and_goes_no_further(error):
    came = []
    with harmless(came.append):
        raise error
    assert came == [error]


@pytest.mark.parametrize("error", [KeyboardInterrupt, GeneratorExit])
def test_what_is_no_error_goes_on(error):
    with pytest.raises(error), harmless():
        raise error


def stops(number, frame):
    sys.exit(128 + number)


class Stops:
    def __call__(self, number, frame):
        sys.exit(128 + number)

    def method(self, number, frame):
        sys.exit(128 + number)


@pytest.mark.parametrize(
    "handler", [stops, Stops(), Stops().method, functools.partial(stops)],
    ids=["function", "object", "method", "partial"],
)  # fmt: skip
def test_a_signal_ends_a_script_wherever_it_comes(handler):
    """The handler runs in the middle of whatever the main thread does."""
    signal.signal(signal.SIGUSR1, handler)
    with pytest.raises(SystemExit) as ended, harmless():
        signal.raise_signal(signal.SIGUSR1)
    assert ended.value.code == 128 + signal.SIGUSR1


class Gone(io.StringIO):
    """A terminal that went away."""

    def write(self, text):
        raise BrokenPipeError(32, "Broken pipe")


def closed():
    stream = io.StringIO()
    stream.close()
    return stream


STREAMS = pytest.mark.parametrize("stream", [Gone(), closed(), None], ids=["gone", "closed", "no"])


@STREAMS
def test_what_is_said_to_nobody_is_lost(monkeypatch, capsys, stream):
    monkeypatch.setattr(sys, "stderr", stream)
    say("a word")
    assert capsys.readouterr().out == ""  # where `print` writes if it is given no file


def test_what_is_said_is_on_standard_error(capsys):
    say("a word")
    assert capsys.readouterr().err == "a word\n"


def test_a_line_is_one_write_so_that_lines_of_processes_stay_whole(monkeypatch):
    stream = Mock()
    monkeypatch.setattr(sys, "stderr", stream)
    say("a word")
    assert stream.mock_calls == [call.write("a word\n"), call.flush()]


@STREAMS
def test_a_log_line_that_nobody_can_read_ends_nothing(monkeypatch, stream):
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(logging.getLogger("pipedream_rt"), "propagate", False)
    log_of("pipedream_rt.test_telling").warning("there is %s", "a word")


# -- what nobody has asked for ------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def alone(monkeypatch):
    """Makes a logger of this package, for which nobody has installed a handler but who is given."""

    def make(*handlers):
        monkeypatch.setattr(logging.getLogger(), "handlers", [])
        monkeypatch.setattr(logging.getLogger("pipedream_rt"), "handlers", [*handlers])
        return log_of("pipedream_rt.test_telling")

    return make


def at_terminal(monkeypatch):
    monkeypatch.setattr(sys, "stderr", made := Terminal())
    return made


@pytest.fixture
def notebook(monkeypatch):
    shell = SimpleNamespace(kernel=object())
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))


def test_a_note_is_a_line_at_a_terminal_and_nothing_in_a_file(alone, capsys, monkeypatch):
    log = alone()
    note(log, "a word")
    assert capsys.readouterr() == ("", "")
    made = at_terminal(monkeypatch)
    note(log, "a word")
    assert made.getvalue() == "a word\n"


def test_a_note_goes_to_who_listens_at_info_alone(alone, monkeypatch, caplog):
    log, terminal = alone(caplog.handler), at_terminal(monkeypatch)
    with caplog.at_level(logging.INFO, "pipedream_rt"):
        note(log, "a word")
    (record,) = caplog.records
    assert (record.getMessage(), record.levelname) == ("a word", "INFO")
    assert record.funcName == "test_a_note_goes_to_who_listens_at_info_alone"
    assert terminal.getvalue() == ""
    note(log, "who listens to warnings alone looks on")
    assert "looks on" in terminal.getvalue()


@pytest.mark.parametrize(("name", "level"), [("pipedream_rt", "WARNING"), (None, "ERROR")])
def test_who_has_set_a_level_sees_no_notes(alone, monkeypatch, name, level):
    log, terminal = alone(), at_terminal(monkeypatch)
    logger = logging.getLogger(name)
    before = logger.level
    logger.setLevel(level)
    try:
        note(log, "a word")
    finally:
        logger.setLevel(before)
    assert terminal.getvalue() == ""
    note(log, "another")
    assert terminal.getvalue() == "another\n"


@STREAMS
def test_a_note_that_nobody_can_read_ends_nothing(alone, monkeypatch, stream):
    log = alone()
    monkeypatch.setattr(sys, "stderr", stream)
    note(log, "a word")


def test_in_a_notebook_advice_is_not_on_standard_error(alone, notebook, capsys):
    log = alone()
    note(log, "a note")
    log.warning("%s is advice", "this")
    say("a word")
    log.debug("nothing")
    assert capsys.readouterr() == ("a note\nthis is advice\na word\n", "")
    log.error("this went wrong")
    assert capsys.readouterr() == ("", "this went wrong\n")


def test_ipython_at_a_terminal_is_no_notebook(alone, monkeypatch, capsys):
    log = alone()
    here = SimpleNamespace(get_ipython=lambda: SimpleNamespace())
    monkeypatch.setitem(sys.modules, "IPython", here)
    log.warning("advice")
    assert capsys.readouterr() == ("", "advice\n")


def test_in_a_notebook_too_handlers_take_what_is_logged(alone, notebook, caplog, capsys):
    log = alone(caplog.handler)
    log.warning("advice")
    assert "advice" in caplog.text
    assert capsys.readouterr() == ("", "")


def test_a_log_line_comes_from_where_it_was_written(caplog):
    log_of("pipedream_rt.test_telling").warning("there is %s", "a word")
    (record,) = caplog.records
    assert (record.funcName, record.getMessage()) == (
        "test_a_log_line_comes_from_where_it_was_written", "there is a word",
    )  # fmt: skip
