"""The command ``status``, as a user types it."""

import json
import os
import re

import pytest
from support.pinned import Pipeline
from torch import nn


@pytest.mark.processes
@pytest.mark.usefixtures("environment")
def test_status_shows_a_running_pipeline(call):
    def shown():
        return call("status", "--interval", 0.1)

    with Pipeline(
        [nn.Linear(2, 2), nn.Linear(2, 2)], stages=2, loss_fn=nn.functional.mse_loss,
        workers="local",
    ):  # fmt: skip
        output = shown()
        assert f"pid {os.getpid()}: async-1f1b, generation" in output
        assert "0 restarts; micro-batch 0 done, 0 fed" in output
        assert re.search(r"worker-1 +stage 1 +pid \d+ on", output)
    assert f"pid {os.getpid()}:" not in shown()


def test_status_as_json(call, monkeypatch):
    record = {"pid": 1, "workers": []}
    monkeypatch.setattr("pipedream_rt.cli.status.running", lambda: iter([("path", record)] * 2))
    output = call("status", "--json")
    assert [json.loads(line) for line in output.splitlines()] == [record] * 2


def test_where_records_cannot_be_read_it_says_so(call, monkeypatch):
    def denied():
        raise PermissionError(13, "Permission denied", "/run/somewhere")

    monkeypatch.setattr("pipedream_rt.cli.status.running", denied)
    said = " ".join(call("status", code=1).split())
    assert "the pipelines of this user cannot be found: [Errno 13] Permission denied" in said


def test_where_nothing_runs_it_says_so(call, monkeypatch):
    monkeypatch.setattr("pipedream_rt.cli.status.running", lambda: iter([]))
    assert call("status").startswith("no pipeline is running on this machine")
