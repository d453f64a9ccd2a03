"""Counters and gauges that Prometheus scrapes."""

import socket
import threading
import time
import urllib.request
from contextlib import ExitStack

import pytest
from support.deadlines import LATEST_S
from support.recorded import begun, stepped, told, whole_run

from pipedream_rt import ConfigError
from pipedream_rt.observers import Prometheus, Recovered


def scraped(observer):
    """The values that an observer serves, by name."""
    address = f"http://127.0.0.1:{observer.port}/metrics"
    with urllib.request.urlopen(address, timeout=LATEST_S) as answer:
        lines = answer.read().decode().splitlines()
    return {name: float(v) for name, v in (li.rsplit(" ", 1) for li in lines if li[0] != "#")}


def test_prometheus_is_scraped(tmp_path):
    pytest.importorskip("prometheus_client", reason="the extra prometheus is not installed")
    *events, ended = whole_run(5)
    observer = Prometheus()
    try:
        told(observer, events)
        values = scraped(observer)
    finally:
        observer(ended)
    assert values["pipedream_rt_mini_batches_total"] == 5
    assert values["pipedream_rt_samples_total"] == 40
    assert values["pipedream_rt_recoveries_total"] == 1
    assert values['pipedream_rt_weight_version{stage="2"}'] == 4
    assert values['pipedream_rt_busy_seconds_total{stage="0"}'] == pytest.approx(0.25)
    with pytest.raises(OSError, match="refused"):
        scraped(observer)


def test_a_crowd_takes_few_threads_and_the_counters_are_served_beside_it():
    pytest.importorskip("prometheus_client", reason="the extra prometheus is not installed")
    *events, ended = whole_run(5)
    before = threading.active_count()
    observer = Prometheus()
    with ExitStack() as crowd:
        try:
            told(observer, events)
            for read in [False] * 60 + [True] * 60:
                stranger = crowd.enter_context(
                    socket.create_connection(("127.0.0.1", observer.port), LATEST_S)
                )
                # Half a request, or a whole one whose answer is not read.
                stranger.sendall(b"GET /metrics HTTP/1.1\r\n" + b"\r\n" * read)
            assert scraped(observer)["pipedream_rt_mini_batches_total"] == 5
            assert threading.active_count() - before <= 2 + 16
        finally:
            began = time.monotonic()
            observer(ended)
    assert time.monotonic() - began < 10, "the crowd has held the end of the run"


def test_whoever_connects_may_read_and_no_page_of_another_origin():
    pytest.importorskip("prometheus_client", reason="the extra prometheus is not installed")
    *_, ended = whole_run(1)
    observer = Prometheus()
    try:
        request = urllib.request.Request(
            f"http://127.0.0.1:{observer.port}/metrics",
            headers={"Host": "there.example", "Origin": "http://there.example"},
        )
        with urllib.request.urlopen(request, timeout=LATEST_S) as answer:
            assert answer.headers["Content-Type"].startswith("text/plain; version=")
            assert "Access-Control-Allow-Origin" not in answer.headers
    finally:
        observer(ended)


def test_it_listens_at_an_address_of_ipv6_too():
    pytest.importorskip("prometheus_client", reason="the extra prometheus is not installed")
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("there is no IPv6 here")
    *_, ended = whole_run(1)
    observer = Prometheus(host="::1")
    try:
        address = f"http://[::1]:{observer.port}/metrics"
        with urllib.request.urlopen(address, timeout=LATEST_S) as answer:
            assert answer.status == 200
    finally:
        observer(ended)


def test_a_port_that_is_taken_is_refused():
    pytest.importorskip("prometheus_client", reason="the extra prometheus is not installed")
    *_, ended = whole_run(1)
    first = Prometheus()
    try:
        with pytest.raises(ConfigError, match="cannot be served"):
            Prometheus(first.port)
    finally:
        first(ended)


def test_the_work_of_a_stage_never_falls_where_new_workers_count_from_0():
    """Whether a recovery was told of, a script has begun again, or neither."""
    pytest.importorskip("prometheus_client", reason="the extra prometheus is not installed")
    recovered = next(event for event in whole_run() if isinstance(event, Recovered))
    observer = Prometheus()
    try:
        for between, seconds in (([], 2.0), ([recovered], 3.0), ([begun()], 1.0), ([], 0.5)):
            told(observer, [*between, stepped(0, busy=(seconds, 2 * seconds, 0.0))])
        values = scraped(observer)
    finally:
        observer(whole_run(1)[-1])
    assert values['pipedream_rt_busy_seconds_total{stage="0"}'] == 2 + 3 + 1
    assert values['pipedream_rt_busy_seconds_total{stage="1"}'] == 2 * (2 + 3 + 1)
    assert values["pipedream_rt_recovery_seconds_total"] == recovered.seconds
