"""The page as people see it: in a headless Chromium, narrow and wide, dark, printed, and live."""

import json
import math
import threading
from contextlib import closing

import pytest
from support.browser import OVERLAPS, Browser, chromium
from support.inside import kill
from support.models import mlp, regression
from support.pinned import Pipeline
from support.recorded import begun, plan_of, stepped, whole_run
from torch.nn import functional as F
from torch.optim import SGD

from pipedream_rt import Checkpoints, Observe, Recovery
from pipedream_rt.cli.show import workers_now
from pipedream_rt.observers.folder import Following, RunFolder
from pipedream_rt.observers.live import LivePage
from pipedream_rt.observers.page.render import write_report
from pipedream_rt.observers.run_record import RunRecord


@pytest.fixture(scope="module")
def browser():
    chromium()
    with closing(Browser()) as found:
        yield found


@pytest.fixture(autouse=True)
def nothing_said(request):
    """No test leaves an error in the console."""
    yield
    if "browser" in request.fixturenames:
        found = request.getfixturevalue("browser")
        errors, found.errors = found.errors, []
        assert errors == []


def written(path, events):
    record = RunRecord()
    for event in events:
        record(event)
    return write_report(path, record).as_uri()


def long_run():
    """A long run of many stages with long names and odd losses."""
    plan = plan_of(12).packed()
    name = "model.decoder.layers.very_long_name_of_a_block.self_attention.out_projection"
    plan["layers"] = [[f"{name}.{i}", f"{name}.{i}b"] for i in range(12)]
    first = begun(stages=12)
    first.plan.update(plan)
    yield first
    for i in range(5000):
        loss = math.nan if i % 97 == 3 else 1e-5 + 1e4 / (1 + i)
        yield stepped(i, loss=loss, stages=12, at=1000.0 + 3.7 * i)


RUNS = {
    "whole": lambda: whole_run(60),
    "long": lambda: list(long_run()),
    "young": lambda: [begun(), stepped(0)],
    "one stage": lambda: whole_run(20, stages=1),
}


@pytest.mark.parametrize("width", [1280, 800, 400])
@pytest.mark.parametrize("run", list(RUNS))
def test_no_text_lies_over_another(browser, tmp_path, run, width):
    address = written(tmp_path / "report.html", RUNS[run]())
    browser.open(address, width=width)
    assert browser.evaluate(OVERLAPS) == []


def test_a_page_in_the_dark_is_dark(browser, tmp_path):
    address = written(tmp_path / "report.html", whole_run())
    brightness = """(() => { const c = getComputedStyle(document.body);
        return [c.backgroundColor, c.color].map((t) => t.match(/\\d+/g).map(Number)[1]); })()"""
    browser.open(address)
    paper, ink = browser.evaluate(brightness)
    assert paper > ink + 100
    browser.open(address, dark=True)
    paper, ink = browser.evaluate(brightness)
    assert ink > paper + 100


def test_the_timeline_is_zoomed(browser, tmp_path):
    browser.open(written(tmp_path / "report.html", whole_run()))
    width = "document.querySelector('.zoomed').getBoundingClientRect().width"
    before = browser.evaluate(width)
    browser.evaluate("document.querySelector('[data-zoom=\"2\"]').click()")
    browser.evaluate("document.querySelector('[data-zoom=\"2\"]').click()")
    assert browser.evaluate(width) == pytest.approx(4 * before, rel=0.01)
    browser.evaluate("document.querySelector('[data-zoom=\"0\"]').click()")
    assert browser.evaluate(width) == pytest.approx(before, rel=0.01)


def test_the_axis_of_a_chart_is_switched(browser, tmp_path):
    browser.open(written(tmp_path / "report.html", whole_run()))
    shown = """['usual', 'other'].map((kind) =>
        document.querySelector('#loss .chart.' + kind).getBoundingClientRect().height > 0)"""
    click = "document.querySelector('#loss button.axis').click()"
    assert browser.evaluate(shown) == [True, False]
    browser.evaluate(click)
    assert browser.evaluate(shown) == [False, True]
    browser.evaluate(click)
    assert browser.evaluate(shown) == [True, False]


def test_a_page_is_printed(browser, tmp_path):
    browser.open(written(tmp_path / "report.html", whole_run()))
    assert browser.printed().startswith(b"%PDF")


def test_a_picture_is_taken(browser, tmp_path):
    browser.open(written(tmp_path / "report.html", whole_run()))
    browser.picture(tmp_path / "report.png")
    assert (tmp_path / "report.png").stat().st_size > 20_000


@pytest.mark.threads
def test_a_live_page_shows_what_comes(browser, tmp_path):
    run = RunFolder(tmp_path)
    events = iter(whole_run(20))
    run(next(events))
    stop = threading.Event()
    with closing(LivePage(Following(tmp_path))) as page:
        follower = threading.Thread(target=page.run, args=(stop,))
        follower.start()
        try:
            browser.open(page.address)
            browser.wait_for("document.getElementById('connection').textContent === 'live'")
            browser.wait_for("document.querySelector('#head').textContent.includes('none yet')")
            for event in events:
                run(event)
            browser.wait_for("document.querySelector('#timeline') !== null")
            assert browser.evaluate(OVERLAPS) == []
            order = browser.evaluate("[...document.querySelectorAll('section')].map((s) => s.id)")
            assert order.index("warnings") < order.index("loss") < order.index("timeline")
            browser.open("about:blank")
        finally:
            stop.set()
            follower.join()


@pytest.mark.processes
def test_a_worker_is_killed_while_somebody_looks(browser, tmp_path):
    stop = threading.Event()
    with Pipeline(
        mlp(),
        stages=3,
        loss_fn=F.mse_loss,
        optimizer=(SGD, {"lr": 0.01}),
        checkpoint=Checkpoints(tmp_path / "saved", every=10),
        recovery=Recovery(max_restarts=1),
        observe=Observe(record=tmp_path / "run"),
    ) as pipe:
        page = LivePage(Following(tmp_path / "run"), workers=workers_now)
        follower = threading.Thread(target=page.run, args=(stop,))
        follower.start()
        try:
            browser.open(page.address)
            browser.wait_for("document.querySelector('#workers') !== null")
            data = regression(10)
            for _ in pipe.train_epoch(data):
                pass
            browser.wait_for("document.querySelector('#timeline') !== null")
            drawn = "document.querySelector('#timeline').textContent"
            assert "The last moments" in browser.evaluate(drawn)
            browser.evaluate("document.querySelector('[data-zoom=\"2\"]').click()")
            zoomed = browser.evaluate(drawn)
            kill(pipe, "worker-1")
            for _ in pipe.train_epoch(data[:9]):
                pass
            # The worker may have died in the middle of a checkpoint, and nobody waits for the next.
            pipe.save()
            browser.wait_for("document.querySelector('#recoveries') !== null")
            text = browser.evaluate("document.querySelector('#recoveries').textContent")
            assert "worker-1" in text
            browser.wait_for("document.querySelector('.mark.recovered') !== null")
            browser.wait_for("document.querySelector('#checkpoints') !== null")
            assert browser.evaluate(drawn) == zoomed  # it stays while somebody looks closer
            browser.evaluate("document.querySelector('[data-zoom=\"0\"]').click()")
            browser.wait_for(f"{drawn} !== {json.dumps(zoomed)}")
            assert browser.evaluate(OVERLAPS) == []
            browser.open("about:blank")
        finally:
            stop.set()
            follower.join()
            page.close()


def test_the_picture_of_what_is_wrong_is_found(browser, tmp_path):
    """The check for overlaps finds one, and a page that is too wide."""
    page = tmp_path / "bad.html"
    page.write_text(
        "<body style='margin:0'><p style='position:absolute;top:0'>one</p>"
        "<p style='position:absolute;top:5px'>two</p><div style='width:3000px'>wide</div></body>"
    )
    browser.open(page.as_uri())
    found = json.dumps(browser.evaluate(OVERLAPS))
    assert '["one", "two"]' in found or '["two", "one"]' in found
    assert "wider" in found
