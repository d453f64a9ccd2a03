import dataclasses
import os

import msgpack
import numpy as np
import pytest
from support.costs import asynchronous as run
from support.wrong import NESTED, WRONG

from pipedream_rt import Trace
from pipedream_rt.errors import ConfigError, TraceError
from pipedream_rt.simulation.costs import Costs
from pipedream_rt.tracing import trace as module
from pipedream_rt.tracing.trace import WorkerFacts


def same(a, b):
    assert a.spans.tobytes() == b.spans.tobytes()
    assert dataclasses.replace(a, spans=None) == dataclasses.replace(b, spans=None)


def test_a_file_gives_the_same_trace(tmp_path):
    trace = dataclasses.replace(
        run("interleaved-1f1b", 4, 2),
        workers=(WorkerFacts(name="a", dropped=3, clock_error_ns=5), WorkerFacts(name="b")),
    )
    trace.save(tmp_path / "run.trace")
    same(Trace.load(tmp_path / "run.trace"), trace)
    assert os.listdir(tmp_path) == ["run.trace"]


def test_a_cut_or_changed_file_is_refused(tmp_path):
    """Cut at every length, and changed at every byte."""
    run(updates=1).save(tmp_path / "whole")
    data, path = (tmp_path / "whole").read_bytes(), tmp_path / "another"
    for place in range(len(data)):
        path.write_bytes(data[:place])
        with pytest.raises(TraceError, match="cut"):
            Trace.load(path)
        path.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        with pytest.raises(TraceError):
            Trace.load(path)
    path.write_bytes(data + b"more")
    with pytest.raises(TraceError, match="cut or changed"):
        Trace.load(path)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "is no trace"),
        (b"\x89PNG\r\n\x1a\n" + bytes(100), "is no trace"),
        (b"{}", "is no trace"),
        (msgpack.packb(["another format", 1, b"", b""]), "is no trace"),
        (msgpack.packb(["pipedream-rt trace", 99, b"", b""]), "of format 99, this version reads 2"),
        (msgpack.packb(["pipedream-rt trace", 2, 7, b""]), "cut or changed"),
        (bytes(range(256)) * 16, "is no trace"),
    ],
)
def test_a_foreign_file_is_refused(tmp_path, data, words):
    path = tmp_path / "foreign"
    path.write_bytes(data)
    with pytest.raises(TraceError, match=words.replace("reads 2", "reads format 2")):
        Trace.load(path)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(TraceError, match="No such file"):
        Trace.load(tmp_path / "none")
    with pytest.raises(TraceError, match="cannot be written"):
        run().save(tmp_path / "no" / "folder")


def test_spans_by_stage():
    trace = run("1f1b", 4, 4)
    for stage, spans in enumerate(trace.by_stage()):
        assert (spans == trace.of_stage(stage)).all()
        assert (np.diff(spans["start"]) >= 0).all()


def test_a_whole_file_with_a_header_that_makes_no_sense(tmp_path):
    for header in ({}, [], {"plan": 1}, {"plan": {"name": 1}}, {"plan": {"workers": 0}}):
        (tmp_path / "odd").write_bytes(file_of(header))
        with pytest.raises(TraceError, match="makes no sense"):
            Trace.load(tmp_path / "odd")
    with pytest.raises(TraceError, match="cannot be read"):
        Trace.load("a\0b")
    with pytest.raises(TraceError, match=r"cannot be read: .* an address"):
        Trace.load("s3://bucket/trace")


def file_of(header, spans=b""):
    """The bytes of a trace with any header, whose checksum is right."""
    packed = msgpack.packb(header)
    head = ["pipedream-rt trace", 2, packed, module._digest(packed, memoryview(spans))]
    return msgpack.packb(head) + spans


def headers(tmp_path):
    """The header of a trace with one value replaced, at every place and by every kind of value."""
    trace = dataclasses.replace(run(), workers=(WorkerFacts(name="a"),), stage_bytes=(1, 2, 3))
    trace.save(tmp_path / "right")
    unpacker = msgpack.Unpacker()
    unpacker.feed((tmp_path / "right").read_bytes())
    right = msgpack.unpackb(unpacker.unpack()[2])
    for name in right:
        for wrong in WRONG:
            yield {**right, name: wrong}
        yield {key: value for key, value in right.items() if key != name}
    for name in right["plan"]:
        for wrong in WRONG:
            yield {**right, "plan": {**right["plan"], name: wrong}}
    for name in right["workers"][0]:
        for wrong in WRONG:
            yield {**right, "workers": [{**right["workers"][0], name: wrong}]}
    yield from (None, [], 3, "text", NESTED)


def test_a_header_that_somebody_has_prepared(tmp_path):
    """Its checksum is right; each is refused with the name of a field, or makes sense."""
    path, refusals = tmp_path / "t", []
    for header in headers(tmp_path):
        path.write_bytes(file_of(header))
        try:
            Trace.load(path)
        except TraceError as error:
            refusals.append(str(error))
    assert all("makes no sense: " in text and text.isprintable() for text in refusals)
    assert len(refusals) > 150


@pytest.mark.parametrize("cause", [-3, 99])
def test_a_span_that_waited_for_no_stage_is_refused(tmp_path, cause):
    trace = run()
    trace.spans["waited_for"][0] = cause
    trace.save(tmp_path / "t")
    with pytest.raises(TraceError, match="waited for no stage of it"):
        Trace.load(tmp_path / "t")


@pytest.mark.timeout(20)
@pytest.mark.parametrize("kind", ["pipe", "device", "folder", "large"])
def test_what_is_no_ordinary_file_is_refused(tmp_path, kind):
    path = tmp_path / "trace"
    match kind:
        case "pipe":
            os.mkfifo(path)
        case "device":
            path = "/dev/zero"
        case "folder":
            path.mkdir()
        case "large":
            with path.open("wb") as file:
                file.truncate(1 << 40)
    with pytest.raises(TraceError, match="cannot be read: "):
        Trace.load(path)
    with pytest.raises(ConfigError, match="cannot be read from "):
        Costs.load(path)
