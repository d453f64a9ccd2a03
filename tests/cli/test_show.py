"""The commands ``report`` and ``watch``, and ``status --json``, as a user types them."""

import json
import os
import signal
import socket
import subprocess
import threading
import urllib.request
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from datetime import timedelta

import pytest
from support.deadlines import LATEST_S
from support.nodes import COMMAND
from support.recorded import begun, stepped, whole_run

from pipedream_rt.cli import show
from pipedream_rt.observers import Ended, Evaluated, Recovered
from pipedream_rt.observers.folder import Following, RunFolder
from pipedream_rt.observers.live import LivePage
from pipedream_rt.tracing.events import packed


def recorded(folder, events):
    run = RunFolder(folder)
    for event in events:
        run(event)
    run.close()
    return folder


def test_a_report_is_written(call, tmp_path):
    run = recorded(tmp_path / "run", whole_run())
    output = call("report", run, "-o", tmp_path / "r.html")
    assert "open it in a browser" in output
    assert (tmp_path / "r.html").read_text().startswith("<!doctype html>")
    assert "cannot be written" in call("report", run, "-o", tmp_path / "none" / "r.html", code=1)


def test_runs_stand_side_by_side(call, tmp_path):
    one = recorded(tmp_path / "one", whole_run())
    other = recorded(tmp_path / "other", [begun(stages=2), *(stepped(i) for i in range(20))])
    call("report", one, other, "-o", tmp_path / "r.html")
    page = (tmp_path / "r.html").read_text()
    assert "<title>2 runs" in page
    for text in ("Settings that differ", "Loss over time", "Evaluation: accuracy"):
        assert text in page
    assert page.count(f"</svg>{one} ") >= 3  # in the legends of the curves
    assert f"{other} " in page
    assert "too many" in call("report", *[one] * 9, code=2)
    assert "there is no such folder" in call("report", one, tmp_path / "none", code=1)


def test_what_is_no_run(call, tmp_path):
    assert "there is no events.jsonl" in call("report", tmp_path, code=1)
    assert "there is no such folder" in call("report", tmp_path / "none", code=1)
    (tmp_path / "file").touch()
    assert "is a file; a run is recorded in a folder" in call("report", tmp_path / "file", code=1)
    assert "is a file" in call("watch", tmp_path / "file", code=1)
    (tmp_path / "step-00000007").mkdir()
    assert "it has checkpoints" in call("report", tmp_path, code=1)
    (tmp_path / "events.jsonl").write_text('{"event": "begun"}\nnonsense\n')
    assert "the 2 lines of" in call("report", tmp_path, code=1)
    assert "neither the folder of a run" in call("watch", "a b:1", code=1)
    assert "has no token" in call("watch", "http://127.0.0.1:9/", code=1)
    assert "give --token" in call("watch", "localhost:80", code=1)
    assert "cannot be reached" in call("watch", "127.0.0.1:9", "--token", "x", code=1)
    assert "served already" in call("watch", "127.0.0.1:9", "--token", "x", "--web", code=2)


def test_a_run_that_has_not_begun_is_waited_for(call, tmp_path, monkeypatch):
    class Wait(threading.Event):
        def wait(self, seconds):
            recorded(tmp_path / "run", whole_run())

    monkeypatch.setattr(show.threading, "Event", Wait)
    shown = call("watch", tmp_path / "run")
    assert f"waiting for a run that is recorded in {tmp_path}" in shown.replace("\n", "")
    assert "async-1f1b, 3 stages" in shown


def test_a_run_that_has_ended_is_shown_once(call, tmp_path, golden):
    run = recorded(tmp_path / "run", whole_run(20))
    golden("watched", call("watch", run))


def test_a_record_does_not_write_to_the_terminal(call, tmp_path):
    """As one that somebody else has made could."""
    evil = "\x1b]0;mine\x07\x9b2J\u202e"
    events = whole_run(20)
    for i, event in enumerate(events):
        if isinstance(event, Evaluated):
            events[i] = replace(event, values={evil: 1e308, "loss": -1e308})
        if isinstance(event, (Ended, Recovered)):
            events[i] = replace(event, reason=evil)
    output = call("watch", recorded(tmp_path / "run", events))
    assert "failed: \\x1b]0;mine" in output
    assert not set(evil) & set(output) - set("]0;mine2J")


def test_a_run_elsewhere_is_watched_over_its_page(call, tmp_path):
    run = recorded(tmp_path / "run", whole_run(20))
    with closing(LivePage(Following(run))) as page:
        assert "ended" in call("watch", page.address)
        where, _, token = page.address.removeprefix("http://").partition("/?token=")
        assert "ended" in call("watch", where, "--token", token)
        assert "its token is another one" in call("watch", where, "--token", "x", code=1)


HEAD = b"HTTP/1.0 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
EVENT = json.dumps(packed(whole_run()[0])).encode() + b"\n"


@pytest.fixture
def other(monkeypatch):
    """Another program than a page, which answers what it is given, and its last part for ever."""
    monkeypatch.setattr(show, "_PATIENCE", timedelta(seconds=0.5))
    with ExitStack() as stack:

        def serve(listener, first, then, stop):
            connection, _ = listener.accept()
            with connection, suppress(OSError):
                connection.settimeout(60)
                connection.sendall(first)
                while not stop.wait(0.01) and then is not None:
                    connection.sendall(then)

        def begin(first, then=None):
            listener, stop = socket.create_server(("127.0.0.1", 0)), threading.Event()
            thread = threading.Thread(target=serve, args=(listener, first, then, stop))
            thread.start()
            for end in (thread.join, listener.close, stop.set):
                stack.callback(end)
            return f"127.0.0.1:{listener.getsockname()[1]}"

        yield begin


@pytest.mark.threads
@pytest.mark.parametrize(
    ("first", "then", "words"),
    [
        (b"SSH-2.0-OpenSSH\r\n", None, "cannot be reached: SSH-2.0-OpenSSH"),
        (b"HTTP/1.0 200 OK\r\n" + b"a: b\r\n" * 999, None, "cannot be reached: got more than"),
        (b"HTTP/1.0 200 OK\r\na: ", b"b", "page"),
        (b"HTTP/1.0 500 \x1b[31mred\r\n\r\n", None, r"refuses: \x1b[31mred"),
        (b"HTTP/1.0 302 -\r\nLocation: http://127.0.0.1:9/\r\n\r\n", b"x", "refuses: -"),
        (b"HTTP/1.0 200 OK\r\n\r\n<html>\n", b"x\n", "is no page"),
        (HEAD, b"x\n", "is no page"),
        (HEAD, b"x" * (1 << 20), "is no page"),
        (HEAD, b"x", "is no page"),
        (HEAD + b"[" * 100_000, b"\n", "is no page"),
        (HEAD + b"3\n", None, "is no page"),
        (HEAD + EVENT, b"x\n", "is no page"),
        (HEAD.replace(b"\r\n\r\n", b"\r\nTransfer-Encoding: chunked\r\n\r\nx"), b"\n",
         "cannot be reached: IncompleteRead"),
    ],
)  # fmt: skip
def test_another_program_is_told_from_a_page(call, other, first, then, words):
    assert words in call("watch", other(first, then), "--token", "x", code=1)


@pytest.mark.threads
def test_a_program_that_says_nothing_is_not_waited_for(call, other):
    assert "cannot be reached: " in call("watch", other(b""), "--token", "x", code=1)


@pytest.mark.parametrize(
    "address", ["http://[::1/?token=x", "http://127.0.0.1:x/?token=x", "a..b:80", "a" * 70 + ":80"]
)
def test_an_address_that_is_none(call, address):
    assert "Error: " in call("watch", address, "--token", "x", code=1)


@pytest.mark.parametrize("token", ["a b", "\u00fc", "a\r\nX: b"])
def test_a_token_that_no_address_has(call, token):
    assert "cannot be reached" in call("watch", "127.0.0.1:9", "--token", token, code=1)


@pytest.mark.processes
def test_a_page_is_served_until_ctrl_c(tmp_path):
    run = recorded(tmp_path / "run", [*whole_run(5)[:-1], stepped(5)])
    process = subprocess.Popen(
        [*COMMAND, "watch", str(run), "--web"], stdout=subprocess.PIPE, text=True
    )
    watchdog = threading.Timer(LATEST_S, process.kill)
    watchdog.start()
    try:
        address = process.stdout.readline().strip()
        # The page has idle priority, so beside busy processes it answers late.
        with urllib.request.urlopen(address, timeout=LATEST_S) as answer:
            assert answer.status == 200
        os.kill(process.pid, signal.SIGINT)
        assert process.wait(LATEST_S) == 0
    finally:
        watchdog.cancel()
        watchdog.join()
        process.kill()
        process.wait()
        process.stdout.close()
