import os
from pathlib import Path

import pytest

from pipedream_rt.tracing.spans import SPAN, Recorder, SpanFolder, newest_spans


def write(recorder, number):
    recorder.record(70, 1, number, 2, 3, 4, -2, 10**18, 10**18 + 1, 10**18 + 2, 10**18 + 3, 5)


def test_what_is_written_is_read():
    recorder = Recorder(4)
    write(recorder, 7)
    (span,) = recorder.spans()
    assert {name: int(span[name]) for name in SPAN.names} == {
        "kind": 70, "stage": 1, "index": 7, "version": 2, "kept": 3, "in_flight": 4,
        "waited_for": -2, "ready": 10**18, "arrived": 10**18 + 1, "start": 10**18 + 2,
        "end": 10**18 + 3, "bytes": 5,
    }  # fmt: skip


@pytest.mark.parametrize("count", [0, 3, 4, 5, 8, 11])
def test_the_oldest_are_overwritten(count):
    recorder = Recorder(4)
    for number in range(count):
        write(recorder, number)
    assert recorder.spans()["index"].tolist() == list(range(max(0, count - 4), count))
    assert recorder.dropped == max(0, count - 4)


def test_the_newest_are_shown_in_a_file(tmp_path):
    shown = SpanFolder.in_folder(tmp_path)
    Path(shown.folder).mkdir()
    recorder = Recorder(5000, shown.open("worker-0"))
    assert newest_spans(Path(shown.folder, "worker-0")).tolist() == []
    for number in range(3000):
        recorder.record(70, 1, number, 2, 3, 4, -2, 9, 0, 10 + number, 11 + number, 5)
    found = newest_spans(Path(shown.folder, "worker-0"))
    assert found["index"].tolist() == list(range(3000 - 2048, 3000))
    assert len(recorder.spans()) == 3000


@pytest.mark.parametrize(
    "change", [{"host": "another machine"}, {"folder": "/nowhere/at/all"}], ids=str
)
def test_nothing_is_shown_elsewhere(tmp_path, change):
    assert SpanFolder.in_folder(tmp_path)._replace(**change).open("worker-0") is None


def test_a_file_that_cannot_be_written_is_given_up():
    """As on a full disk, which the device full stands for."""
    recorder = Recorder(4, os.open("/dev/full", os.O_WRONLY))
    for number in range(6):
        write(recorder, number)
    assert recorder.spans()["index"].tolist() == [2, 3, 4, 5]
