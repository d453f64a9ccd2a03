"""The live page of a run: what it answers, and what is sent anew."""

import json
import threading
import urllib.error
import urllib.request
from contextlib import ExitStack, closing

import pytest
from support.deadlines import LATEST_S
from support.recorded import stepped, whole_run

from pipedream_rt import ConfigError
from pipedream_rt.observers import live
from pipedream_rt.observers.folder import Following, RunFolder
from pipedream_rt.observers.live import LivePage
from pipedream_rt.tracing.events import unpacked

pytestmark = pytest.mark.threads


@pytest.fixture
def run(tmp_path):
    """A run that goes on."""
    observer = RunFolder(tmp_path)
    for event in whole_run(10)[:-1]:
        observer(event)
    with closing(observer):
        yield observer


@pytest.fixture
def page(run):
    stop = threading.Event()
    with closing(LivePage(Following(run.folder))) as found:
        follower = threading.Thread(target=found.run, args=(stop,))
        follower.start()
        try:
            yield found
        finally:
            stop.set()
            follower.join()


def asked(page, path=""):
    return urllib.request.urlopen(page.address.replace("/?", f"/{path}?"), timeout=LATEST_S)


def test_the_page_is_whole(page):
    with asked(page) as answer:
        text = answer.read().decode()
    assert text.startswith("<!doctype html>")
    assert 'id="loss"' in text
    assert "EventSource" in text


def test_only_what_has_changed_is_sent(page, run):
    with asked(page, "events") as stream:

        def news():
            while not (line := stream.readline()).startswith(b"data: "):
                assert line
            return json.loads(line[len(b"data: ") :])

        first = news()
        assert list(first["changed"]) == first["names"]
        run(stepped(10))
        second = news()
        assert second["names"] == first["names"]
        assert {"head", "loss"} <= second["changed"].keys()
        assert not {"plan", "software", "warnings"} & second["changed"].keys()


def test_nothing_is_made_while_nobody_looks(page, run, monkeypatch):
    monkeypatch.setattr(live, "panels", lambda *arguments, **options: pytest.fail("made"))
    run(stepped(10))
    stop = threading.Event()
    stop.wait = lambda seconds: next(looks)
    looks = iter([False, False, True])
    page.run(stop)


def test_the_record_is_sent_from_its_beginning(page, run):
    told = whole_run(10)[:-1]
    with asked(page, "record") as stream:
        found = [unpacked(json.loads(stream.readline())) for _ in told]
        assert [type(event) for event in found] == [type(event) for event in told]
        run(stepped(10))
        while not (line := stream.readline()).strip():
            pass
        assert unpacked(json.loads(line)) == stepped(10)


def test_not_too_many_look_at_once(page):
    with ExitStack() as streams:
        for _ in range(32):
            streams.enter_context(asked(page, "events"))
        with pytest.raises(urllib.error.HTTPError) as caught:
            asked(page, "events")
        with closing(caught.value) as error:
            assert error.code == 503
        asked(page).close()  # what stands is seen all the same


def test_a_port_that_is_taken_is_refused(page, run):
    port = int(page.address.rsplit(":", 1)[1].partition("/")[0])
    with closing(Following(run.folder)) as following, pytest.raises(ConfigError, match="cannot be"):
        LivePage(following, port=port)


def test_a_token_of_ones_own(run):
    with closing(LivePage(Following(run.folder), token="of-mine")) as page:
        assert page.address.endswith("?token=of-mine")
        asked(page).close()


def test_a_client_that_reads_nothing_does_not_keep_the_page_open(run):
    with closing(LivePage(Following(run.folder))) as page:
        stream = asked(page, "events")
    stream.close()
