"""Observers of a run: what they are told, and that they change nothing of it."""

import gc
import logging
import math
from collections import Counter
from contextlib import suppress
from datetime import timedelta

import pytest
import torch
from support.inside import kill
from support.models import regression
from support.oracle import assert_same
from support.small import losses, small
from torch.nn import functional as F

from pipedream_rt import Checkpoints, ConfigError, NonFiniteLoss, Observe, Recovery, Training
from pipedream_rt.coordinator.views.event_publisher import settings_of
from pipedream_rt.job.options import Options
from pipedream_rt.observers import Begun, Ended, Evaluated, Recovered, Saved, Stepped, Warned
from pipedream_rt.observers.folder import read_run

DATA = regression(12, samples=8)


def pipeline(workers="serial", **options):
    sgd = (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9})
    return small(optimizer=sgd, micro_batches=2, workers=workers, **options)


def of(kind, events):
    return [event for event in events if isinstance(event, kind)]


def test_an_observer_is_told_of_everything():
    events = []
    with pipeline(to=[events.append]) as pipe:
        schedule = torch.optim.lr_scheduler.StepLR(pipe.optimizer, 1, gamma=0.5)
        results = []
        for x, y in DATA:
            results.append(pipe.submit(x, y).result())
            schedule.step()
        loss = pipe.evaluate(DATA[:2])
    pipe.close()  # once more
    begun, *_, ended = events
    assert (of(Begun, events), of(Ended, events)) == ([begun], [ended])
    steps = of(Stepped, events)
    assert [(e.step, e.loss, e.versions, e.staleness) for e in steps] == [
        (r.step, r.loss, r.versions, r.staleness) for r in results
    ]
    assert [e.rates for e in steps] == [(0.1 * 0.5**i,) for i in range(12)]
    assert {(e.samples, e.micro_batches) for e in steps} == {(8, 2)}
    (evaluated,) = of(Evaluated, events)
    assert evaluated.values == {"loss": loss}
    assert evaluated.step == 12
    assert begun.plan == pipe.plan.packed()
    assert begun.settings["stages"] == "3"
    assert begun.settings["optimizer"].startswith("(SGD, ")
    assert len(begun.stages) == len(ended.stages) == 3
    assert ended.step == 12
    assert ended.reason == ""
    assert ended.trace is None


def test_settings_are_in_words_and_what_was_left_out_or_is_none_is_not_there():
    kept = Checkpoints("run", every=None, keep=2, accept=["seed"], grace=timedelta(seconds=3))
    options = Options(loss_fn=F.mse_loss, checkpoint=kept, training=Training(ema=0.5))
    words = "Checkpoints(folder='run', keep=2, accept=['seed'], attempts=3, grace=3 s)"
    expected = {"loss_fn": "mse_loss", "checkpoint": words, "training.ema": "0.5"}
    assert settings_of(options) == expected


def test_rates_are_those_of_the_injection():
    """The pipe is some mini-batches ahead of the results."""
    events = []
    with pipeline(to=[events.append]) as pipe:
        schedule = torch.optim.lr_scheduler.StepLR(pipe.optimizer, 1, gamma=0.5)
        pending = []
        for x, y in DATA[:2]:
            pending.append(pipe.submit(x, y))
            schedule.step()
        for each in pending:
            each.result()
    assert [e.rates for e in of(Stepped, events)] == [(0.1,), (0.05,)]


@pytest.mark.parametrize("workers", ["serial", pytest.param("local", marks=pytest.mark.processes)])
def test_a_run_that_is_watched_has_the_same_bits(tmp_path, workers):
    ends = []
    for options in (
        {},
        {"report": tmp_path / "r.html", "observe": Observe(record=tmp_path / "run", to=[print])},
    ):
        with pipeline(workers, **options) as pipe:
            ends.append((losses(pipe, DATA), pipe.state_dict()))
    assert ends[0][0] == ends[1][0]
    assert_same(ends[0][1], ends[1][1])
    record = read_run(tmp_path / "run")
    assert [b.loss for b in record.steps] == ends[0][0]
    assert record.trace is not None
    assert (tmp_path / "r.html").read_text().startswith("<!doctype html>")


@pytest.mark.processes
def test_a_death_and_a_checkpoint_are_told(tmp_path):
    events = []
    with pipeline(
        "local",
        checkpoint=Checkpoints(tmp_path / "saved", every=4),
        recovery=Recovery(max_restarts=1),
        to=[events.append],
        report=tmp_path / "report.html",
    ) as pipe:
        for result in pipe.train_epoch(DATA):
            if result.step == 6:
                kill(pipe, "worker-1")
    (recovered,) = of(Recovered, events)
    assert "worker-1" in recovered.reason
    assert recovered.replayed == pipe.restarts[0].replayed
    saved = [event.step for event in of(Saved, events)]
    assert saved[0] == 4
    assert set(saved) <= {4, 8, 12}  # one that is due while another is written is left out
    assert any("recovered in" in event.text for event in of(Warned, events))
    assert [event.step for event in of(Stepped, events)] == list(range(12))
    text = (tmp_path / "report.html").read_text()
    assert "Recoveries" in text
    assert "step-00000004" in text


def test_a_checkpoint_of_the_script_is_told_at_once(tmp_path):
    events = []
    with pipeline(to=[events.append]) as pipe:
        list(pipe.train_epoch(DATA[:3]))
        pipe.save(tmp_path / "saved")
        assert [event.step for event in of(Saved, events)] == [3]
    assert len(of(Saved, events)) == 1


def test_a_script_that_goes_on_adds_to_its_record(tmp_path):
    def run(data):
        kept = Checkpoints(tmp_path / "saved", every=4, resume=True)
        with pipeline(checkpoint=kept, record=tmp_path / "run") as pipe:
            list(pipe.train_epoch(data))

    run(DATA[:10])
    assert len(list(read_run(tmp_path / "run").steps)) == 10
    run(DATA)
    record = read_run(tmp_path / "run")
    assert record.scripts == 2
    assert [b.last.step for b in record.steps] == sorted(b.last.step for b in record.steps)
    assert [*record.steps][-1].last.step == 11 or record.begun.step >= 10


@pytest.mark.parametrize("error", [OSError("the disk is full"), SystemExit("the disk is full")])
def test_an_observer_that_raises_is_told_no_more(caplog, error):
    told, others = [], []

    def broken(event):
        told.append(event)
        if isinstance(event, Stepped):
            raise error

    with pipeline(to=[broken, others.append]) as pipe:
        list(pipe.train_epoch(DATA[:4]))
    assert len(of(Stepped, told)) == 1
    assert len(of(Stepped, others)) == 4
    assert f"{type(error).__name__}: the disk is full; it is told no more" in caplog.text
    assert any("disk is full" in event.text for event in of(Warned, others))


def test_an_interrupt_in_an_observer_is_one_of_the_script():
    def interrupts(event):
        if isinstance(event, Stepped):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), pipeline(to=[interrupts]) as pipe:
        list(pipe.train_epoch(DATA))


def test_a_run_that_fails_says_why(tmp_path):
    events = []
    x, y = DATA[0]
    said = {"to": [events.append], "report": tmp_path / "r.html"}
    with pytest.raises(NonFiniteLoss), pipeline(**said) as pipe:
        list(pipe.train_epoch([*DATA[:2], (x * math.nan, y)]))
    assert events[-1].reason.startswith("NonFiniteLoss: ")
    assert events[-1].stages == ()
    assert "failed: NonFiniteLoss" in (tmp_path / "r.html").read_text()


@pytest.mark.processes
def test_a_pipeline_that_nobody_closes_tells_its_end():
    events = []
    pipe = pipeline("local", to=[events.append])
    pipe.submit(*DATA[0]).result()
    del pipe
    gc.collect()
    assert isinstance(events[-1], Ended)


def test_a_report_of_a_run_that_goes_on(tmp_path):
    with pipeline(report=tmp_path / "end.html") as pipe:
        list(pipe.train_epoch(DATA[:4]))
        path = pipe.report(tmp_path / "now.html")
        assert "Timeline" in path.read_text()
        assert not (tmp_path / "end.html").exists()
        list(pipe.train_epoch(DATA[4:]))
    assert (tmp_path / "end.html").exists()
    assert "Timeline" in pipe.report(tmp_path / "after.html").read_text()


def test_without_a_record_there_is_no_report(tmp_path):
    with pipeline() as pipe, pytest.raises(ConfigError, match="nothing of this run was kept"):
        pipe.report(tmp_path / "now.html")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (lambda: {"report": "missing/report.html"}, "there is no folder "),
        (lambda: {"report": 5}, "report must be a file"),
        (lambda: {"observe": Observe(record=5)}, "record must be a folder"),
        (lambda: {"observe": Observe(to=print)}, "to must be a list of observers"),
        (lambda: {"observe": Observe(to=["run.csv"])}, "to must be a list of observers"),
        (lambda: {"observe": Observe(record="/dev/null/run")}, "cannot be recorded"),
    ],
    ids=lambda value: value if isinstance(value, str) else "given",
)
def test_bad_observers_are_refused_before_anything_starts(options, message):
    with pytest.raises(ConfigError, match=message):
        pipeline(**options())


def test_the_environment_may_ask_for_a_record(tmp_path, monkeypatch):
    monkeypatch.setattr("pipedream_rt.coordinator.script_environment._taken", Counter())
    monkeypatch.setenv("PIPEDREAM_RT_RECORD", str(tmp_path / "run"))
    for _ in range(2):
        with pipeline() as pipe:
            list(pipe.train_epoch(DATA[:2]))
    for name in ("run", "run-2"):
        assert len(list(read_run(tmp_path / name).steps)) == 2


class Lines(logging.Handler):
    """Stands for what Python prints where there is no handler."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


def printed(monkeypatch, handler=None):
    """What is printed while two pipelines are told of a warning and an information."""
    last, ours = Lines(), logging.getLogger("pipedream_rt")
    monkeypatch.setattr(logging, "lastResort", last)
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    if handler is not None:
        monkeypatch.setattr(ours, "handlers", [handler])
    events = []
    with (
        pipeline(to=[events.append], training=Training(on_nan="ignore")),
        pipeline(to=[events.append]),
    ):
        logging.getLogger("pipedream_rt.coordinator.feed.feeder").warning("it is late")
        logging.getLogger("pipedream_rt.coordinator.feed.feeder").info("never mind")
    assert [e.text for e in of(Warned, events)].count("it is late") == 2
    return [line for line in last.lines if line in ("it is late", "never mind")]


def test_warnings_are_printed_as_without_observers(monkeypatch):
    """Once, though Python finds the handlers of two pipelines that listen."""
    assert printed(monkeypatch) == ["it is late"]


def test_warnings_that_the_user_handles_are_not_printed_besides(monkeypatch):
    own = Lines()
    assert printed(monkeypatch, own) == []
    assert own.lines.count("it is late") == 1


def test_after_ctrl_c_it_is_said_what_is_left(tmp_path, caplog):
    kept = Checkpoints(tmp_path, every=100)
    with suppress(KeyboardInterrupt), pipeline(checkpoint=kept) as pipe:
        list(pipe.train_epoch(DATA))
        raise KeyboardInterrupt
    assert "interrupted after 12 mini-batches, before the first checkpoint" in caplog.text


def test_the_folder_of_an_earlier_run_is_told_of(tmp_path, caplog):
    for _ in range(2):
        assert "has the record of an earlier run" not in caplog.text
        with pipeline(record=tmp_path) as pipe:
            pipe.submit(*DATA[0]).result()
    assert "has the record of an earlier run" in caplog.text
    assert [b.last.step for b in read_run(tmp_path).steps] == [0]


def test_the_report_says_where_it_is(tmp_path, caplog):
    with pipeline(report=tmp_path / "r.html"):
        pass
    assert f"the report of the run is in {tmp_path / 'r.html'}" in caplog.text
