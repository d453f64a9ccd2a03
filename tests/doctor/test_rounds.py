"""How the first machine asks the others, which are processes here, or namespaces."""

import json
import re
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
from support import forked
from support.callers import asked, calling, hello, soon
from support.deadlines import LATEST_S
from support.nodes import COMMAND, own_environment
from support.ports import free_port
from support.slurm import until
from support.two_hosts import OTHER_SECRET, SECRET, A, Child, two_hosts, why_not

from pipedream_rt.cluster.engines import Node
from pipedream_rt.cluster.identity import Secret
from pipedream_rt.doctor import rounds
from pipedream_rt.doctor.judgement import judge
from pipedream_rt.doctor.rounds import _link_of, examine_self, look_at_all
from pipedream_rt.errors import ConfigError

DOCTOR = [*COMMAND, "doctor"]


def listens_at(port):
    """Whether anybody listens at a port of loopback."""
    place = f"0100007F:{port:04X} 00000000:0000 0A"
    return place in Path("/proc/net/tcp").read_text()


def found_by(doctor):
    """The JSON that a doctor has printed; what is logged comes on its other stream, before it."""
    _, brace, rest = ("\n" + doctor.text).partition("\n{")
    return json.JSONDecoder().raw_decode(brace.strip() + rest)[0]


@pytest.fixture
def port():
    return free_port()


@pytest.fixture
def started(port):
    with ExitStack() as children:

        def start(rank, *options, secret=SECRET, size=3):
            command = [
                *DOCTOR, "--nnodes", str(size), "--node-rank", str(rank),
                "--rdzv-endpoint", f"127.0.0.1:{port}", *options,
            ]  # fmt: skip
            child = Child(command, own_environment(PIPEDREAM_RT_SECRET=secret), forked.Popen)
            children.callback(child.close)
            return child

        yield start


@pytest.mark.processes
def test_machines_that_fit_train_together(started):
    first, *others = (started(rank, "--json", "--train", size=2) for rank in range(2))
    assert [each.ended() for each in (first, *others)] == [0, 0], first.text
    found = {each["check"]: each for each in found_by(first)["findings"]}
    assert [found[check]["grade"] for check in ("training", "recovery", "bits")] == ["ok"] * 3
    assert "10 steps of a small model in 2 stages" in found["training"]["text"]


@pytest.mark.processes
def test_machines_of_which_one_does_not_fit_train_not_at_all(started, tmp_path):
    options = ("--json", "--train", "--source")
    (tmp_path / "own.py").write_text("x = 1")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "own.py").write_text("x = 2")
    first = started(0, *options, str(tmp_path), size=2)
    other = started(1, *options, str(tmp_path / "other"), size=2)
    assert [each.ended() for each in (first, other)] == [1, 1], first.text
    (found,) = [each for each in found_by(first)["findings"] if each["check"] == "training"]
    assert found["text"] == "left out, as a job would not run"


@pytest.mark.processes
def test_three_machines_that_fit(started, tmp_path):
    options = ("--json", "--folder", str(tmp_path), "--source", str(Path(__file__).parent))
    first, *others = (started(rank, *options) for rank in range(3))
    assert [each.ended() for each in (first, *others)] == [0, 0, 0], first.text
    said = found_by(first)
    assert sorted(said["machines"]) == ["first", "node-1", "node-2"]
    assert len(said["links"]) == 6
    assert all(link["bandwidth"] > 1e6 and link["latency_s"] > 0 for link in said["links"])
    # How fast a link is beside the others depends on what else runs here.
    grades = {each["grade"] for each in said["findings"] if each["check"] != "link"}
    assert grades <= {"ok", "note"}
    announced = [each for each in said["findings"] if each["check"] == "address"]
    assert [each["where"] for each in announced] == ["node-1", "node-2"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.processes
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


@pytest.mark.threads
@pytest.mark.parametrize("question", ["examine", "clock", "welcome"])
def test_a_machine_that_is_lost_meanwhile_is_not_waited_for(port, monkeypatch, question):
    """The end of its connection shows it at once: no minute passes for each question to it."""
    assert timedelta(seconds=15) >= rounds._MEETING
    monkeypatch.setattr(rounds, "_MEETING", timedelta(seconds=1))
    secret = Secret(SECRET)
    node = Node(rank=0, size=2, host="127.0.0.1", port=port)
    job = SimpleNamespace(node=node, secret=lambda deadline: secret)
    with ThreadPoolExecutor(1) as pool:
        looking = pool.submit(look_at_all, job, "", "", timedelta(seconds=LATEST_S))
        until(lambda: listens_at(port), "the first machine")
        control = calling(("127.0.0.1", port), secret)
        assert asked(control, hello("node-1", job=secret.job))["type"] == "admitted"
        while (said := control.receive(soon()))["type"] != question:
            answer = {"text": "no JSON"} if said["type"] == "examine" else {"ns": 0}
            control.send({"type": "findings" if "text" in answer else "clock", **answer})
        control.close()
        found = looking.result(45)
    assert found.machines.get("node-1", {}) == {}
    findings = judge(found.machines, found.links, found.clocks, 2, found.addresses)
    assert "fail" in [each.grade for each in findings if each.check == "link"]


def test_a_folder_that_is_not_there_is_refused_before_anybody_is_asked(tmp_path):
    with pytest.raises(ConfigError, match=r"folder cannot be written to: .*No such file"):
        examine_self(str(tmp_path / "none"), "")


def test_one_machine_leaves_nothing_in_the_folder(tmp_path):
    """Also where it cannot look at itself."""
    ((host, found),) = examine_self(str(tmp_path), "").machines.items()
    assert (host, found["folder"]) == (socket.gethostname(), "ok")
    with pytest.raises(TypeError):
        examine_self(str(tmp_path), source=3)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.rights
@pytest.mark.processes
def test_a_slow_cable_between_two_machines():
    if reason := why_not():
        pytest.skip(reason)
    with two_hosts() as hosts:
        hosts.slow("100mbit")
        command = ["-c", DOCTOR[2], "doctor", "--nnodes", "2", "--rdzv-endpoint", f"{A}:29500"]
        first = hosts.start("a", *command, "--json")
        other = hosts.start("b", *command)
        assert [first.ended(), other.ended()] == [0, 0], first.text + other.text
        said = found_by(first)
    assert len(said["links"]) == 2
    for link in said["links"]:
        assert 0.7 * 100e6 / 8 < link["bandwidth"] < 1.3 * 100e6 / 8


@pytest.mark.parametrize(
    ("said", "problem"),
    [
        (None, "no answer within 60 s"),
        ("{", r"malformed answer 'findings': JSONDecodeError.*; is it pipedream-rt of the same"),
        ("{}", r"malformed answer 'findings': KeyError\('latency_s'\); is it"),
        ("null", "malformed answer 'findings': TypeError"),
        ("[" * 100_000, "malformed answer 'findings': RecursionError"),
        ('{"latency_s": "x", "bandwidth": 0, "problem": ""}', "malformed answer .* ValueError"),
    ],
)
def test_why_a_machine_says_nothing_of_a_link_is_told(said, problem):
    record = None if said is None else {"type": "findings", "text": said}
    assert re.match(problem, _link_of(record).problem)
