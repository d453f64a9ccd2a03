"""Counters and gauges that Prometheus scrapes."""

import socket
import threading
import time
import urllib.request
from contextlib import ExitStack, contextmanager

import pytest
from support.deadlines import LATEST_S
from support.recorded import begun, stepped, told, whole_run

from pipedream_rt import ConfigError
from pipedream_rt.observers import Prometheus, Recovered

pytest.importorskip("prometheus_client", reason="the extra prometheus is not installed")


@contextmanager
def serving(events=(), **options):
    """An observer that is told of some events, and in the end of the end of the run."""
    observer = Prometheus(**options)
    try:
        told(observer, events)
        yield observer
    finally:
        observer(whole_run(1)[-1])


def answer_of(observer, host="127.0.0.1", **headers):
    address = f"http://{host}:{observer.port}/metrics"
    return urllib.request.urlopen(urllib.request.Request(address, headers=headers), None, LATEST_S)


def scraped(observer):
    """The values that an observer serves, by name."""
    with answer_of(observer) as answer:
        lines = answer.read().decode().splitlines()
    return {name: float(v) for name, v in (li.rsplit(" ", 1) for li in lines if li[0] != "#")}


def test_prometheus_is_scraped():
    with serving(whole_run(5)[:-1]) as observer:
        values = scraped(observer)
    assert values["pipedream_rt_mini_batches_total"] == 5
    assert values["pipedream_rt_samples_total"] == 40
    assert values["pipedream_rt_recoveries_total"] == 1
    assert values['pipedream_rt_weight_version{stage="2"}'] == 4
    assert values['pipedream_rt_busy_seconds_total{stage="0"}'] == pytest.approx(0.25)
    with pytest.raises(OSError, match="refused"):
        scraped(observer)


def test_a_crowd_takes_few_threads_and_the_counters_are_served_beside_it():
    before = threading.active_count()
    with ExitStack() as crowd:
        with serving(whole_run(5)[:-1]) as observer:
            for read in [False] * 60 + [True] * 60:
                stranger = crowd.enter_context(
                    socket.create_connection(("127.0.0.1", observer.port), LATEST_S)
                )
                # Half a request, or a whole one whose answer is not read.
                stranger.sendall(b"GET /metrics HTTP/1.1\r\n" + b"\r\n" * read)
            assert scraped(observer)["pipedream_rt_mini_batches_total"] == 5
            assert threading.active_count() - before <= 2 + 16
            began = time.monotonic()
        assert time.monotonic() - began < 10, "the crowd has held the end of the run"


def test_whoever_connects_may_read_and_no_page_of_another_origin():
    elsewhere = {"Host": "there.example", "Origin": "http://there.example"}
    with serving() as observer, answer_of(observer, **elsewhere) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain; version=")
        assert "Access-Control-Allow-Origin" not in answer.headers


def test_it_listens_at_an_address_of_ipv6_too():
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("there is no IPv6 here")
    with serving(host="::1") as observer, answer_of(observer, "[::1]") as answer:
        assert answer.status == 200


def test_a_port_that_is_taken_is_refused():
    with serving() as first, pytest.raises(ConfigError, match="cannot be served"):
        Prometheus(first.port)


def test_the_work_of_a_stage_never_falls_where_new_workers_count_from_0():
    """Whether a recovery was told of, a script has begun again, or neither."""
    recovered = next(event for event in whole_run() if isinstance(event, Recovered))
    with serving() as observer:
        for between, seconds in (([], 2.0), ([recovered], 3.0), ([begun()], 1.0), ([], 0.5)):
            told(observer, [*between, stepped(0, busy=(seconds, 2 * seconds, 0.0))])
        values = scraped(observer)
    assert values['pipedream_rt_busy_seconds_total{stage="0"}'] == 2 + 3 + 1
    assert values['pipedream_rt_busy_seconds_total{stage="1"}'] == 2 * (2 + 3 + 1)
    assert values["pipedream_rt_recovery_seconds_total"] == recovered.seconds
