"""Prometheus: counters and gauges, which the script's process serves."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from pipedream_rt.errors import ConfigError
from pipedream_rt.observers.page_server import BoundedHandler, BoundedServer
from pipedream_rt.tracing.events import (
    Begun,
    Ended,
    Evaluated,
    Event,
    Recovered,
    Saved,
    Stepped,
    Warned,
)


class _Server(BoundedServer):
    """The server of the counters, to which few connect."""

    daemon_threads = True  # as its own thread
    most = 16


class _Handler(BoundedHandler):
    """Answers each request with the counters: they are for everybody who can connect."""

    def __init__(self, made: Callable[[], bytes], kind: str, *args: Any) -> None:
        self._made, self._kind = made, kind
        super().__init__(*args)

    def get(self) -> None:
        self.answer(HTTPStatus.OK, self._made(), self._kind)


class Prometheus:
    """Serves counters and gauges in the text of `prometheus_client`. An `Observer`.

    Whoever can connect to the port can read them. At most 16 connections are open at once, each of
    them for 15 seconds at most.

    Args:
        port: The port; 0 for a free one, which the attribute `port` then names.
        host: The address to listen at; by default only this machine can connect.

    Attributes:
        port: The port that it listens at.

    Raises:
        ConfigError: The package prometheus_client is missing, or the port is taken.
    """

    def __init__(self, port: int = 0, host: str = "127.0.0.1") -> None:
        try:
            # An extra that may not be installed.
            import prometheus_client as client
        except ImportError as error:
            raise ConfigError(
                "to serve Prometheus its package is needed: pip install prometheus_client"
            ) from error
        registry = client.CollectorRegistry()

        def counter(name: str, what: str, *labels: str) -> Any:
            return client.Counter(f"pipedream_rt_{name}", what, labels, registry=registry)

        def gauge(name: str, what: str, *labels: str) -> Any:
            return client.Gauge(f"pipedream_rt_{name}", what, labels, registry=registry)

        self._mini_batches = counter("mini_batches", "Mini-batches whose results have come")
        self._micro_batches = counter("micro_batches", "Micro-batches whose results have come")
        self._samples = counter("samples", "Samples trained on")
        self._recoveries = counter("recoveries", "Recoveries from failures")
        self._recovery_s = counter("recovery_seconds", "Seconds that recoveries took")
        self._checkpoints = counter("checkpoints", "Checkpoints that are whole")
        self._warnings = counter("warnings", "Warnings logged by the runtime")
        self._busy = counter("busy_seconds", "Seconds that a stage has computed", "stage")
        self._loss = gauge("loss", "Loss of the last mini-batch")
        self._rate = gauge("learning_rate", "Learning rate of a parameter group", "group")
        self._staleness = gauge("staleness", "Staleness of the last mini-batch, in updates")
        self._version = gauge("weight_version", "Weight version read last", "stage")
        self._value = gauge("evaluated", "Value of the last evaluation", "metric")
        self._step = gauge("step", "Number of the last mini-batch whose result has come")
        self._before: tuple[float, ...] = ()
        try:
            made = functools.partial(client.generate_latest, registry)
            handler = functools.partial(_Handler, made, client.CONTENT_TYPE_LATEST)
            self._server = _Server((host, port), handler)
        except OSError as error:
            raise ConfigError(
                f"Prometheus cannot be served at {host}:{port}: {error.strerror}"
            ) from error
        self.port: int = self._server.server_port
        # A daemon, as the end of a script that trains nothing is never told.
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="prometheus", daemon=True
        )
        self._thread.start()

    def __call__(self, event: Event) -> None:
        """Count an event."""
        match event:
            case Begun():
                self._before = ()  # new workers count their seconds from 0
            case Stepped():
                self._stepped(event)
            case Evaluated():
                for name, value in event.values.items():
                    self._value.labels(name).set(value)
            case Saved():
                self._checkpoints.inc()
            case Recovered():
                self._recoveries.inc()
                self._recovery_s.inc(event.seconds)
                self._before = ()
            case Warned():
                self._warnings.inc()
            case Ended():
                self._server.shutdown()
                self._server.server_close()
                self._thread.join()

    def _stepped(self, event: Stepped) -> None:
        """Count a mini-batch."""
        self._mini_batches.inc()
        self._micro_batches.inc(event.micro_batches)
        self._samples.inc(event.samples)
        self._loss.set(event.loss)
        self._step.set(event.step)
        self._staleness.set(event.staleness)
        for group, rate in enumerate(event.rates):
            self._rate.labels(str(group)).set(rate)
        before = self._before or (0.0,) * len(event.busy_s)
        for stage, version in enumerate(event.versions):
            self._version.labels(str(stage)).set(version)
            # A counter refuses to fall.
            self._busy.labels(str(stage)).inc(max(event.busy_s[stage] - before[stage], 0.0))
        self._before = event.busy_s
