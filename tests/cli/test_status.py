"""The command ``status``."""

import json
import os
import re

from click.testing import CliRunner

from pipedream_rt.cli import main


def test_status_shows_a_running_pipeline(digest):
    from support.pinned import Pipeline
    from torch import nn

    def shown():
        return CliRunner().invoke(main, ["status", "--interval", "0.1"]).output

    with Pipeline(
        [nn.Linear(2, 2)] * 1 + [nn.Linear(2, 2)], stages=2, loss_fn=nn.functional.mse_loss,
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
