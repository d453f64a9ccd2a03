"""The doctor on machines that are processes here, or namespaces."""

import json
import socket
import subprocess
from contextlib import ExitStack
from pathlib import Path

import pytest
from support.callers import asked, calling, hello, soon
from support.deadlines import LATEST_S
from support.encrypted import encrypted_pair, tcp_pair
from support.nodes import COMMAND, own_environment
from support.slurm import until
from support.two_hosts import OTHER_SECRET, SECRET, A, Child, two_hosts, why_not

from pipedream_rt.cluster.identity import Secret
from pipedream_rt.doctor.facts import digest_of
from pipedream_rt.doctor.judgement import MeasuredLink
from pipedream_rt.doctor.links import Probe
from pipedream_rt.transport.link import Connection

pytestmark = pytest.mark.processes

DOCTOR = [*COMMAND, "doctor"]


def listens_at(port):
    """Whether anybody listens at a port of loopback."""
    place = f"0100007F:{port:04X} 00000000:0000 0A"
    return place in Path("/proc/net/tcp").read_text()


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

        start.port = port
        yield start


def test_three_machines_that_fit(started, tmp_path):
    options = ("--json", "--folder", str(tmp_path), "--source", str(Path(__file__).parent))
    first, *others = (started(rank, *options) for rank in range(3))
    assert [each.ended() for each in (first, *others)] == [0, 0, 0], first.text
    said = json.loads(first.text.removesuffix("(end)"))
    assert sorted(said["machines"]) == ["first", "node-1", "node-2"]
    assert len(said["links"]) == 6
    assert all(link["bandwidth"] > 1e6 and link["latency_s"] > 0 for link in said["links"])
    # How fast a link is beside the others depends on what else runs here.
    grades = {each["grade"] for each in said["findings"] if each["check"] != "link"}
    assert grades <= {"ok", "note"}
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
    started(2, secret=OTHER_SECRET)
    assert first.ended() == 1
    assert "2 of 3 have come" in first.text
    assert "copy the same source files to all machines" in first.text
    assert "one end does not know the secret that the other has" in first.text


@pytest.mark.parametrize("question", ["examine", "clock", "welcome"])
def test_a_machine_that_is_lost_meanwhile_is_not_waited_for(started, question):
    """The end of its connection shows it at once: no minute passes for each question to it."""
    first = started(0, size=2)
    secret = Secret(SECRET)
    until(lambda: listens_at(started.port), "the first machine")
    control = calling(("127.0.0.1", started.port), secret)
    assert asked(control, hello("node-1", job=secret.job))["type"] == "admitted"
    while (said := control.receive(soon()))["type"] != question:
        answer = {"text": "{}"} if said["type"] == "examine" else {"ns": 0}
        control.send({"type": "findings" if "text" in answer else "clock", **answer})
    control.close()
    assert first.ended(45) == 1
    assert "XX  link" in first.text


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


@pytest.fixture
def probes():
    """Two machines of three with an encrypted link between them; the third was not reached."""
    ends = encrypted_pair(tcp_pair())
    problems = {2: "connection refused"}
    with ExitStack() as opened:
        made = [Probe({1 - rank: end}, problems) for rank, end in enumerate(ends)]
        for each in made:
            opened.callback(each.close)
        yield made


@pytest.mark.threads
def test_a_link_is_measured_from_both_ends(probes):
    for rank, probe in enumerate(probes):
        link = probe.measure(1 - rank)
        assert link.problem == ""
        assert link.bandwidth > 1e6
        assert 0 < link.latency_s < 1


@pytest.mark.threads
def test_a_link_that_is_not_there_or_ends_is_told_of(probes):
    first, other = probes
    assert first.measure(2) == MeasuredLink(None, 0.0, "connection refused")
    other.close()
    link = first.measure(1)
    assert link.latency_s is None
    assert link.problem
    assert first.measure(1).latency_s is None  # at each later time too


@pytest.mark.threads
def test_a_machine_that_does_not_answer_is_waited_for_until_the_deadline(monkeypatch):
    monkeypatch.setattr("pipedream_rt.doctor.links._TIMEOUT_S", 0.2)
    ours, theirs = socket.socketpair()
    probe = Probe({1: Connection(ours)}, {})
    with theirs:
        assert probe.measure(1).problem == "nothing was answered within 0.2 s"
        probe.close()


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
