"""The doctor on machines that are processes here, or namespaces."""

import json
import socket
import subprocess
from contextlib import ExitStack
from pathlib import Path

import pytest
from support.deadlines import LATEST_S
from support.nodes import COMMAND, own_environment
from support.two_hosts import SECRET, A, Child, two_hosts, why_not

from pipedream_rt.doctor.facts import digest_of
from pipedream_rt.doctor.links import Echo, measure

pytestmark = pytest.mark.processes

DOCTOR = [*COMMAND, "doctor"]


@pytest.fixture
def started():
    with ExitStack() as children:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]

        def start(rank, *options, secret=SECRET, size=3):
            command = [
                *DOCTOR, "--nnodes", str(size), "--node-rank", str(rank),
                "--rdzv-endpoint", f"127.0.0.1:{port}", *options,
            ]  # fmt: skip
            child = Child(command, own_environment(PIPEDREAM_RT_SECRET=secret))
            children.callback(child.close)
            return child

        yield start


def test_three_machines_that_fit(started, tmp_path):
    options = ("--json", "--folder", str(tmp_path), "--source", str(Path(__file__).parent))
    first, *others = (started(rank, *options) for rank in range(3))
    assert [each.ended() for each in (first, *others)] == [0, 0, 0], first.text
    said = json.loads(first.text.removesuffix("(end)"))
    assert sorted(said["machines"]) == ["first", "node-1", "node-2"]
    assert len(said["links"]) == 6
    assert all(link["bandwidth"] > 1e6 and link["latency_s"] > 0 for link in said["links"])
    assert {each["grade"] for each in said["findings"]} <= {"ok", "note"}
    announced = [each for each in said["findings"] if each["check"] == "address"]
    assert [each["where"] for each in announced] == ["node-1", "node-2"]
    assert list(tmp_path.iterdir()) == []


def test_what_is_wrong_is_told_and_is_the_exit_code(started, tmp_path):
    """Other source files on one machine, and one that has a wrong secret and so does not count."""
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "layers.py").write_text("x = 1")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "layers.py").write_text("x = 2")
    first = started(0, "--patience", "8", "--source", str(tmp_path / "a"))
    started(1, "--source", str(tmp_path / "b"))
    started(2, secret="another-token-which-is-the-wrong-one-92e7")
    assert first.ended() == 1
    assert "2 of 3 have come" in first.text
    assert "copy the same source files to all machines" in first.text
    assert "it does not know the job's secret" in first.text


def test_one_machine_and_a_folder_that_is_not_there(tmp_path):
    done = subprocess.run(
        [*DOCTOR, "--folder", str(tmp_path / "none")], env=own_environment(),
        capture_output=True, text=True, timeout=LATEST_S,
    )  # fmt: skip
    assert done.returncode == 1
    assert "the shared folder cannot be written to" in done.stderr


def test_a_digest_of_source_files(tmp_path):
    assert digest_of(tmp_path) == ""
    (tmp_path / "a.py").write_text("x = 1")
    before = digest_of(tmp_path)
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / "b.py").write_text("x = 1")
    assert digest_of(tmp_path) == before
    (tmp_path / "a.py").write_text("x = 2")
    assert digest_of(tmp_path) != before


def test_a_link_is_measured_by_whoever_shows_the_nonce():
    echo = Echo("127.0.0.1")
    try:
        link = measure("127.0.0.1", echo.port, echo.nonce)
        assert link.problem == ""
        assert link.bandwidth > 1e6
        stranger = measure("127.0.0.1", echo.port, bytes(32))
        assert stranger.latency_s is None
    finally:
        echo.close()
    assert "cannot be reached" in measure("127.0.0.1", echo.port, echo.nonce).problem


@pytest.mark.rights
def test_a_slow_cable_between_two_machines():
    if reason := why_not():
        pytest.skip(reason)
    with two_hosts() as hosts:
        hosts.slow("100mbit")
        command = ["-c", DOCTOR[2], "doctor", "--nnodes", "2", "--rdzv-endpoint", f"{A}:29500"]
        first = hosts.start("a", *command, "--json")
        other = hosts.start("b", *command)
        assert [first.ended(), other.ended()] == [0, 0], first.text + other.text
        said = json.loads(first.text.removesuffix("(end)"))
    assert len(said["links"]) == 2
    for link in said["links"]:
        assert 0.7 * 100e6 / 8 < link["bandwidth"] < 1.3 * 100e6 / 8
