"""The server of the live page: how requests are answered, and strangers turned away."""

import json
import socket
import struct
import threading
import time
import urllib.error
import urllib.request
from contextlib import ExitStack, closing
from types import SimpleNamespace
from urllib.parse import urlsplit

import pytest
from support.deadlines import LATEST_S

from pipedream_rt.observers import page_server

pytestmark = pytest.mark.threads


class Fake:
    """A page of a few words, with news until it is closed."""

    def __init__(self):
        self.over, self.room, self.inside = threading.Event(), True, threading.Semaphore(0)

    def page(self):
        return "the loss: größer".encode()

    def news(self):
        yield {"changed": {"head": "a\nb"}}
        while not self.over.is_set():
            yield None

    def record(self):
        yield from ({"event": "begun"}, {"event": "stepped"}, None)

    def enter(self):
        return self.room

    def leave(self):
        self.inside.release()


@pytest.fixture
def page():
    fake = Fake()
    server = page_server.Server(("127.0.0.1", 0), "a-token", fake)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()

    def close():
        fake.over.set()
        server.shutdown()
        server.server_close()
        thread.join()

    address = f"http://127.0.0.1:{server.server_port}/?token=a-token"
    try:
        yield SimpleNamespace(address=address, close=close, answers=fake, server=server)
    finally:
        close()


def asked(page, path=""):
    return urllib.request.urlopen(page.address.replace("/?", f"/{path}?"), timeout=LATEST_S)


def refused(request):
    """The code with which a request is refused, and that tells nothing."""
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(request, timeout=LATEST_S)
    with closing(caught.value) as error:
        assert b"loss" not in error.read()
        return error.code


def test_the_page_is_for_its_reader_alone(page):
    """No cache keeps it, and no other server sees the token in the address."""
    with asked(page) as answer:
        assert answer.read().decode() == "the loss: größer"
        assert answer.headers["Content-Type"] == "text/html; charset=utf-8"
        assert answer.headers["Content-Length"] == "18"
        assert answer.headers["Cache-Control"] == "no-store"
        assert answer.headers["Referrer-Policy"] == "no-referrer"


def test_news_are_events_and_heartbeats(page):
    with asked(page, "events") as stream:
        assert stream.headers["Content-Type"] == "text/event-stream"
        lines = [stream.readline() for _ in range(5)]
    event, data, *rest = lines
    assert event == b"event: panels\n"
    assert json.loads(data.removeprefix(b"data: ")) == {"changed": {"head": "a\nb"}}
    assert rest == [b"\n", b": nothing new\n", b"\n"]
    assert page.answers.inside.acquire(timeout=LATEST_S), "who has left is counted out"


def test_the_record_is_lines_and_an_empty_one_at_the_end(page):
    with asked(page, "record") as answer:
        assert answer.read() == b'{"event": "begun"}\n{"event": "stepped"}\n\n'


@pytest.mark.parametrize("path", ["events", "record"])
def test_who_finds_no_room_is_not_counted_out(page, path):
    page.answers.room = False
    assert refused(page.address.replace("/?", f"/{path}?")) == 503
    page.close()
    assert not page.answers.inside.acquire(blocking=False)


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda address: address.partition("?")[0], 403),
        (lambda address: address[:-1], 403),
        (lambda address: address + "x", 403),
        (lambda address: address.replace("token=", "tok="), 403),
        (lambda address: address.replace("/?", "/events?")[:-1], 403),
        (lambda address: address.replace("/?", "/record?")[:-1], 403),
        (lambda address: address.partition("token=")[0] + "token=%00%ff", 403),
        (lambda address: address.replace("/?", "/../../etc/passwd?"), 404),
        (lambda address: urllib.request.Request(address, b"x", method="POST"), 501),
        (lambda address: urllib.request.Request(address, b"x", method="PUT"), 501),
        (lambda address: urllib.request.Request(address, b"x", method="DELETE"), 501),
    ],
)
def test_without_the_token_nothing_is_told_and_with_it_nothing_else_and_nothing_is_changed(
    page, change, code
):
    assert refused(change(page.address)) == code


def stranger_at(page):
    return socket.create_connection(("127.0.0.1", urlsplit(page.address).port), timeout=LATEST_S)


@pytest.mark.parametrize("said", [b"", b"GET / HTTP/1.1\r\nX: "])
def test_a_stranger_who_does_not_end_his_request_does_not_keep_the_page_open(page, said):
    with stranger_at(page) as stranger:
        stranger.sendall(said)
        asked(page).close()  # he was let in before
        began = time.monotonic()
        page.close()
        assert time.monotonic() - began < 10


def test_a_stranger_has_not_for_ever(page, monkeypatch):
    with asked(page, "events") as stream:
        assert stream.readline()
        monkeypatch.setattr(page_server, "PATIENCE_S", 0.0)
        with stranger_at(page) as stranger:
            stranger.sendall(b"GET")
            assert stranger.recv(1) == b""
        assert stream.readline()  # who has shown the token stays


def test_a_crowd_is_bounded_and_keeps_nobody_out(page, monkeypatch):
    """Each has a thread, so the oldest stranger goes for a new one; who has the token stays."""
    monkeypatch.setattr(page.server, "_room", threading.Semaphore(4))
    with asked(page, "events") as stream, ExitStack() as crowd:
        assert stream.readline()
        page.server._room.acquire(timeout=LATEST_S)  # that connection had a place of the others
        strangers = [crowd.enter_context(stranger_at(page)) for _ in range(20)]
        for stranger in strangers:
            stranger.sendall(b"GET / HTTP/1.1\r\nHo")
        asked(page).close()
        assert len(page.server.ends_at) <= 4
        assert strangers[0].recv(1) == b""
        assert stream.readline()


def test_where_all_may_stay_nobody_else_comes_in(page, monkeypatch):
    monkeypatch.setattr(page_server, "_ROOM_S", 0.0)
    monkeypatch.setattr(page.server, "_room", threading.Semaphore(1))
    with asked(page, "events") as stream:
        assert stream.readline()
        with stranger_at(page) as stranger:
            assert stranger.recv(1) == b""
        assert stream.readline()


def test_of_a_request_without_end_a_part_is_read(page):
    with stranger_at(page) as stranger:
        # No more than is read: what is left unread would reset the connection.
        line = b"X: " + b"a" * 1000 + b"\r\n"
        head = b"GET / HTTP/1.1\r\n"
        stranger.sendall(head + line * 80)
        assert stranger.recv(100).startswith(b"HTTP/1.0 403"), "it has waited for the end"


def test_a_stranger_fills_no_terminal(page, capsys):
    with stranger_at(page) as stranger:
        stranger.sendall(b"GET http://[ HTTP/1.1\r\n\r\n")
        assert stranger.recv(100).startswith(b"HTTP/1.0 403")
    with stranger_at(page) as stranger:
        stranger.sendall(b"GET")
        resets = struct.pack("ii", 1, 0)
        stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, resets)
    asked(page).close()
    page.close()
    assert capsys.readouterr().err == ""
