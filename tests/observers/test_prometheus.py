"""Counters and gauges that Prometheus scrapes."""

import urllib.request

import pytest
from support.recorded import whole_run

from pipedream_rt import ConfigError
from pipedream_rt.observers import Prometheus


def told(observer, events):
    for event in events:
        observer(event)


def test_prometheus_is_scraped(tmp_path):
    pytest.importorskip("prometheus_client", reason="the extra prometheus is not installed")
    *events, ended = whole_run(5)
    observer = Prometheus()
    try:
        told(observer, events)
        address = f"http://127.0.0.1:{observer.port}/metrics"
        with urllib.request.urlopen(address, timeout=30) as answer:
            lines = answer.read().decode().splitlines()
    finally:
        observer(ended)
    values = {name: float(v) for name, v in (li.rsplit(" ", 1) for li in lines if li[0] != "#")}
    assert values["pipedream_rt_mini_batches_total"] == 5
    assert values["pipedream_rt_samples_total"] == 40
    assert values["pipedream_rt_recoveries_total"] == 1
    assert values['pipedream_rt_weight_version{stage="2"}'] == 4
    assert values['pipedream_rt_busy_seconds_total{stage="0"}'] == pytest.approx(0.25)
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(address, timeout=30)


def test_a_port_that_is_taken_is_refused():
    pytest.importorskip("prometheus_client", reason="the extra prometheus is not installed")
    *_, ended = whole_run(1)
    first = Prometheus()
    try:
        with pytest.raises(ConfigError, match="cannot be served"):
            Prometheus(first.port)
    finally:
        first(ended)
