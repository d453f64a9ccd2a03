"""The folder of a run: written as it goes on, read whole, cut or from another process."""

import json
import os
import subprocess
import sys
from contextlib import closing

import pytest
from support.deadlines import LATEST_S
from support.recorded import begun, stepped, traced, whole_run

from pipedream_rt import ConfigError, TraceError
from pipedream_rt.observers.folder import (
    EVENTS,
    TRACE,
    Following,
    RunFolder,
    newest_trace_in,
    read_run,
)
from pipedream_rt.tracing.events import packed
from pipedream_rt.tracing.spans import Recorder, SpanFolder

ORDER = (
    "kind", "stage", "index", "version", "kept", "in_flight", "waited_for", "ready", "arrived",
    "start", "end", "bytes",
)  # fmt: skip
"""The fields of a span in the order in which a recorder takes them."""


def written(folder, events):
    observer = RunFolder(folder)
    for event in events:
        observer(event)
    return observer


def test_a_run_is_read_as_it_was_told(tmp_path):
    written(tmp_path / "a" / "run", whole_run(12))
    record = read_run(tmp_path / "a" / "run")
    assert [b.last for b in record.steps] == [stepped(i) for i in range(12)]
    assert record.trace is not None
    assert record.ended is not None


def shown(folder, plan, spans):
    """Write the spans of a trace as its workers show them."""
    place = SpanFolder.in_folder(folder)
    for stage, name in enumerate(["script", *(f"worker-{w}" for w in range(plan.workers))], -1):
        recorder = Recorder(1, place.open(name))
        for span in spans[spans["stage"] == stage]:
            recorder.record(*(int(span[field]) for field in ORDER))


def test_the_last_moments_of_a_run_that_goes_on_are_read(tmp_path):
    trace = traced(micro_batches=2000)
    observer = written(tmp_path, [first := begun()])
    assert newest_trace_in(tmp_path, first) is None
    shown(tmp_path, trace.plan, trace.spans)
    found = newest_trace_in(tmp_path, first)
    assert found.dropped
    since = found.spans["start"].min()
    last, those = (spans[spans["start"] > since] for spans in (trace.spans, found.spans))
    assert sorted(those.tolist()) == sorted(last.tolist())
    assert len(found.spans) > 3 * 1000
    observer.close()
    assert len(read_run(tmp_path).trace.spans) == len(found.spans)  # its script was killed


def test_what_was_shown_goes_when_there_is_a_trace(tmp_path):
    observer = written(tmp_path, whole_run()[:-1])
    trace = traced()
    shown(tmp_path, trace.plan, trace.spans)
    observer(whole_run()[-1])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["events.jsonl", "trace"]


def test_a_folder_of_that_name_that_is_the_users_keeps_what_is_in_it(tmp_path):
    (tmp_path / "spans").mkdir()
    (tmp_path / "spans" / "mine").touch()
    written(tmp_path, whole_run())
    assert [path.name for path in (tmp_path / "spans").iterdir()] == ["mine"]


def test_what_comes_is_followed_and_a_line_in_two_pieces_read_once_it_is_whole(tmp_path):
    observer = written(tmp_path, [begun()])
    following = Following(tmp_path)
    assert [type(event).__name__ for event in following.new()] == ["Begun"]
    assert list(following.new()) == []
    observer(stepped(0))
    assert list(following.new()) == [stepped(0)]
    observer(stepped(1))
    observer.close()
    data = (tmp_path / EVENTS).read_bytes()
    (tmp_path / EVENTS).write_bytes(data[:-10])
    assert list(following.new()) == []
    with (tmp_path / EVENTS).open("ab") as file:
        file.write(data[-10:])
    assert list(following.new()) == [stepped(1)]
    following.close()


def test_the_cut_line_of_a_killed_script_hides_none_after_it(tmp_path):
    written(tmp_path, [begun(), stepped(0)]).close()
    path = tmp_path / EVENTS
    path.write_bytes(path.read_bytes()[:-5])
    written(tmp_path, [begun(step=1), stepped(1)]).close()
    record = read_run(tmp_path)
    assert [b.last.step for b in record.steps] == [1]
    assert record.scripts == 1 + 1


def test_lines_that_are_no_events_are_counted_and_passed_over(tmp_path):
    written(tmp_path, [begun()]).close()
    with (tmp_path / EVENTS).open("ab") as file:
        file.write(b'not json\n[]\n{"event": "stepped"}\n\xff\xfe\n' + b"[" * 100_000 + b"\n\n")
    following = Following(tmp_path)
    assert len(list(following.new())) == 1
    assert following.unreadable == 5
    following.close()


def test_a_line_without_an_end_is_not_read_to_it(tmp_path):
    written(tmp_path, [begun()]).close()
    os.truncate(tmp_path / EVENTS, 1 << 40)
    with closing(Following(tmp_path)) as following:
        assert len(list(following.new())) == 1
        assert following.unreadable == 1
        with (tmp_path / EVENTS).open("ab") as file:
            file.write(b"\n" + json.dumps(packed(stepped(0))).encode() + b"\n")
        assert list(following.new()) == [stepped(0)]


@pytest.mark.parametrize("what", ["pipe", "large", "nothing of it", "causes"])
def test_spans_that_nobody_has_recorded_are_left_out(tmp_path, what):
    observer = written(tmp_path, [first := begun()])
    place, spans = tmp_path / "spans" / "worker-0", traced().spans[:100].copy()
    if what == "pipe":
        os.mkfifo(place)
    elif what == "large":
        place.touch()
        os.truncate(place, 1 << 40)
    else:
        spans["stage" if what == "nothing of it" else "waited_for"] = 99
        place.write_bytes(spans.tobytes())
    assert newest_trace_in(tmp_path, first) is None
    observer.close()


def test_two_runs_do_not_share_a_folder(tmp_path):
    first = RunFolder(tmp_path)
    with pytest.raises(ConfigError, match="another run is recorded"):
        RunFolder(tmp_path)
    first.close()
    RunFolder(tmp_path).close()


def test_the_lock_ends_with_a_killed_process(tmp_path):
    script = (
        "import os, sys; from pipedream_rt.observers.folder import RunFolder; "
        "RunFolder(sys.argv[1]); os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=False, timeout=LATEST_S)
    RunFolder(tmp_path).close()


def test_a_folder_that_cannot_be_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be recorded"):
        RunFolder(tmp_path / "file")
    if os.geteuid():
        tmp_path.chmod(0o500)
        with pytest.raises(ConfigError, match="cannot be recorded"):
            RunFolder(tmp_path / "new")


def text(path):
    path.write_text('{"event": "sold", "of": "another program"}')


def a_link(path):
    path.symlink_to(path.parent.parent / "of-another")


def a_link_to_a_folder(path):
    path.symlink_to(path.parent.parent)


def what_a_write_changes(path):
    """Return what is known of a file but for when it was read last."""
    found = path.lstat()
    return found.st_mode, found.st_ino, found.st_size, found.st_mtime_ns, found.st_uid


@pytest.mark.parametrize(
    ("name", "make"),
    [
        *((EVENTS, make) for make in (text, a_link, os.mkfifo, os.mkdir)),
        *((TRACE, make) for make in (text, a_link, os.mkdir)),
        ("spans", a_link_to_a_folder),
    ],
)
def test_what_no_run_has_written_is_left_as_it_is(tmp_path, name, make):
    run = tmp_path / "run"
    run.mkdir()
    make(run / name)
    before = what_a_write_changes(run / name)
    with pytest.raises(ConfigError, match=f"{name} .*, and has a name .* a folder of its own"):
        RunFolder(run)
    assert what_a_write_changes(run / name) == before
    assert [path.name for path in run.iterdir()] == [name]


def test_links_that_come_later_are_not_followed(tmp_path):
    run, precious = tmp_path / "run", tmp_path / "precious"
    observer = written(run, [begun()])
    precious.write_text("precious")
    (run / "trace").symlink_to(precious)
    (run / "spans" / "worker-0").symlink_to(precious)
    os.mkfifo(run / "spans" / "worker-1")  # and nothing is waited for
    shown(run, traced().plan, traced().spans)
    observer(whole_run()[-1])
    assert precious.read_text() == "precious"
    assert len(read_run(run).trace.spans) == len(traced().spans)
    assert sorted(path.name for path in run.iterdir()) == ["events.jsonl", "trace"]


@pytest.mark.parametrize("what", ["missing", "empty", "pipe", "not begun"])
def test_a_folder_without_a_run_is_refused(tmp_path, what):
    if what == "pipe":
        os.mkfifo(tmp_path / EVENTS)
    elif what == "not begun":
        RunFolder(tmp_path).close()
    folder = tmp_path / "nowhere" if what == "missing" else tmp_path
    said = "has not begun" if what == "not begun" else "no run was recorded"
    with pytest.raises(TraceError, match=said):
        read_run(folder)


def test_a_damaged_trace_is_left_out(tmp_path):
    written(tmp_path, whole_run(12))
    (tmp_path / "trace").write_bytes(b"\x00" * 100)
    assert read_run(tmp_path).trace is None
