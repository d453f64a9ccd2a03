"""The page of a run as HTML: what stands in it, and that nothing in a run can write markup."""

import math
import re
from html.parser import HTMLParser

import pytest
from support.recorded import begun, record_of, stepped, whole_run

from pipedream_rt.observers import Warned
from pipedream_rt.observers.page.render import page_of, report_of, write_page

_VOID = {"meta", "link", "br", "line", "path", "polygon", "rect"}


class Parsed(HTMLParser):
    """Checks that tags are closed in their order; collects texts and tags."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.texts = [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in _VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if not {"script", "style"} & set(self.open):
            self.texts.append(data)


@pytest.mark.parametrize(
    "events",
    [
        [],
        [begun()],
        [begun(), stepped(0)],
        [begun(), stepped(0, loss=math.nan), stepped(1, loss=math.inf), stepped(2)],
        [begun(), *(stepped(i, loss=1.0, at=1000.0) for i in range(5))],
        [begun(), *(stepped(i, samples=0) for i in range(5))],
        [begun(stages=1), *(stepped(i, stages=1) for i in range(3000))],
        [begun(replicas=2), stepped(0)],
        [begun(), *(stepped(i, busy=(0.1 * i,) * (i % 7)) for i in range(7))],
        whole_run(),
        whole_run()[:-1],
    ],
    ids=lambda events: f"{len(events)} events",
)
def test_any_run_is_shown(events):
    page = Parsed(report_of(record_of(events)))
    assert any(tag == "main" for tag, _ in page.tags)
    assert "nan" not in [a.get("d", "") for _, a in page.tags]


def test_a_page_asks_the_network_for_nothing():
    text = report_of(record_of(whole_run()))
    page = Parsed(text)
    for tag, attributes in page.tags:
        assert tag not in {"img", "iframe", "object", "base", "form"}
        for name in ("src", "href", "action"):
            assert attributes.get(name, "data:,") == "data:,"
    assert "default-src 'none'" in text
    assert not re.search(r"https?://", text)
    assert len(text) < 2 << 20


def test_markup_in_names_and_texts_stays_text():
    evil = "</script><script>alert(1)</script>"
    event, warning = begun(), "a <b>bold</b> warning"
    event.plan["layers"] = [[evil], [evil], [evil]]
    text = report_of(record_of([event, stepped(0), Warned(time=1001.0, text=warning)]))
    assert evil not in text
    assert any(warning in said for said in Parsed(text).texts)


def test_a_live_page_may_ask_its_server_alone():
    assert "connect-src 'self'" in page_of("x", [], live=True)
    assert "connect-src 'none'" in page_of("x", [])


def test_a_name_that_is_no_text_is_written_as_a_page_can_have_it(tmp_path):
    path = write_page(tmp_path / "page.html", page_of("caf\udce9", []))
    assert "caf\\udce9" in path.read_text()
