"""The command of a worker; how it joins is in test_joining.py, whole lives are in tests/cluster."""

import os
import socket
import subprocess
import sys
from unittest.mock import Mock

import click
import pytest
from support.deadlines import LATEST_S

from pipedream_rt.cluster.dial import JobOver
from pipedream_rt.cluster.identity import Secret
from pipedream_rt.cluster.worker import command
from pipedream_rt.cluster.worker.joining import JoinAttempts, WorkerSettings
from pipedream_rt.cluster.worker_life import WorkerEnd
from pipedream_rt.errors import PeerLost, PipelineError

SECRET = Secret.generated()


def test_the_arguments_of_a_new_process_image(monkeypatch):
    given = ["w", "here:1", "--name", "w", "--secret-fd", "9", "--failures", "2", "--lost", "8",
             "--persist"]  # fmt: skip
    monkeypatch.setattr("sys.argv", given)
    again = command._again(None, JoinAttempts())
    assert again == ["here:1", "--name", "w", "--persist", "--failures", "0"]
    again = command._again(None, JoinAttempts(2, 1.5))
    assert again == [
        "here:1", "--name", "w", "--persist", "--failures", "2", "--lost", "1.5"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("raised", "end"),
    [
        (JobOver(0), WorkerEnd.OVER),
        (JobOver(5), WorkerEnd.FAILED),
        (PeerLost("nobody listens", peer="c"), WorkerEnd.UNREACHED),
        (PipelineError("it has another torch"), WorkerEnd.FAILED),
        (KeyError("a bug"), WorkerEnd.AGAIN),
    ],
)
def test_how_a_life_for_one_job_ends(monkeypatch, raised, end, capsys):
    monkeypatch.setattr(command, "serve_at", Mock(side_effect=raised))
    assert command._serve_once(None, None, JoinAttempts()) == end
    assert ("KeyError: 'a bug'" in capsys.readouterr().err) == (end == WorkerEnd.AGAIN)


@pytest.mark.parametrize("joins", [False, True])
def test_a_forked_worker_has_the_settings_that_were_asked_for(monkeypatch, joins):
    lives = {name: Mock(return_value=0) for name in ("serve", "_join_for_ever")}
    for name, life in lives.items():
        monkeypatch.setattr(command, name, life)
    for name in ("_set_up", "become_worker"):
        monkeypatch.setattr(command, name, Mock())
    monkeypatch.setattr(command.signal, "signal", Mock())
    monkeypatch.setattr(command.logging, "shutdown", Mock())
    monkeypatch.setattr(command, "read_secret", lambda fd: SECRET)
    join = {"bind": "lo", "address": "here:1", "timeout_s": 2.0} if joins else None
    here, there = socket.socketpair()
    with here, there:
        # Who serves the connection takes its descriptor; the secret is not read from one here.
        fd = there.fileno() if joins else there.detach()
        assert command._run_forked(fd, "w", 3, join) == 0
    if joins:
        (options, settings), _ = lives["_join_for_ever"].call_args
        assert (options.address, options.timeout_s, options.known) == ("here:1", 2.0, True)
        assert settings == WorkerSettings("w", 3, SECRET, "lo")
    else:
        (control, settings), _ = lives["serve"].call_args
        control.close()
        assert settings == WorkerSettings("w", 3)


@pytest.mark.parametrize("folder", ["s3://bucket/run", "$NOT_SET/run"])
def test_no_log_is_no_reason_to_end(folder, caplog):
    command._write_into(folder, "w.log")
    assert f"no log can be written to {folder}: " in caplog.text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "give the HOST:PORT"),
        (["127.0.0.1:1", "--name", "a b"], "use letters, digits"),
        (["127.0.0.1:1", "--threads", "0"], "0 is not in the range"),
        (["127.0.0.1:1", "--device", "cuda 1"], "give the name of a device, as cuda:1"),
        (["127.0.0.1:1", "--bind", "no-such"], "this machine has the interfaces "),
    ],
)
def test_wrong_arguments(monkeypatch, arguments, words):
    monkeypatch.setattr(command, "_set_up", lambda name, level: None)
    with pytest.raises(click.UsageError) as found:
        command.main(arguments, standalone_mode=False)
    assert words in found.value.format_message()


def test_a_level_of_the_log_that_is_none_does_no_harm():
    done = subprocess.run(
        [sys.executable, "-m", "pipedream_rt.workers", "127.0.0.1:1", "--timeout", "0.1"],
        env={**os.environ, "PIPEDREAM_RT_LOG": "loud", "PIPEDREAM_RT_SECRET": SECRET.text},
        capture_output=True, text=True, timeout=LATEST_S, check=False,
    )  # fmt: skip
    assert done.returncode == 3
    assert "PIPEDREAM_RT_LOG is 'LOUD', which is no level: DEBUG" in done.stderr
    assert "no coordinator listened at 127.0.0.1:1" in done.stderr
