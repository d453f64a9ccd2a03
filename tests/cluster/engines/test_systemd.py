"""The unit for systemd: checked by systemd itself, and its commands started by a played one."""

import configparser
import re
import shlex
import shutil
import signal
import subprocess
from contextlib import ExitStack
from pathlib import Path

import pytest
from support.deadlines import LATEST_S
from support.nodes import calls_to, command_in, own_environment
from support.ports import free_port
from support.slurm import until
from support.two_hosts import SECRET, Child

UNIT = Path(__file__).parents[3] / "workers" / "pipedream-rt@.service"


@pytest.mark.parametrize(
    "words",
    [
        ["verify"],
        ["security", "--offline=true", "--threshold=40"],  # below 4 of 10, which it calls OK
    ],
    ids=lambda words: words[0],
)
def test_systemd_itself_says_that_the_unit_is_one_and_what_it_gives_up(words, tmp_path):
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    place = tmp_path / "pipedream-rt@0.service"
    shutil.copy(UNIT, place)
    done = subprocess.run(
        ["systemd-analyze", *words, str(place)], capture_output=True, text=True, timeout=LATEST_S
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stdout


class Systemd:
    """Starts the commands of the unit, and again those that its rules start again."""

    def __init__(self, children, folder):
        unit = configparser.ConfigParser(strict=False, interpolation=None)
        unit.optionxform = str
        unit.read_string(UNIT.read_text().replace("\\\n", " "))
        self._service = unit["Service"]
        self._children = children
        self.port = free_port()
        (folder / "secret").touch(mode=0o600)
        (folder / "secret").write_text(SECRET)
        (folder / "script.py").write_text(
            "import os, sys; print('began', os.environ['PIPEDREAM_RT_MAX_RESTARTS'], flush=True)\n"
            "sys.stdin.readline()"
        )
        command_in(folder / "bin")
        name, _, value = self._service["Environment"].partition("=")
        self._job = {
            "NNODES": "2", "ENDPOINT": f"127.0.0.1:{self.port}",
            "SCRIPT": str(folder / "script.py"),
            name: value.replace("%d", str(folder)), "PATH": f"{folder / 'bin'}:/usr/bin:/bin",
        }  # fmt: skip
        self.nodes = {}

    def start(self, rank):
        text = self._service["ExecStart"].replace("%i", str(rank))
        words = [re.sub(r"\$\{(\w+)\}", lambda m: self._job[m[1]], w) for w in shlex.split(text)]
        child = self.nodes[rank] = Child(words, own_environment(**self._job))
        self._children.callback(child.close)
        return child

    def kill(self, rank):
        """Kill a node's command, and do what the unit says of its end."""
        self.nodes[rank].signal(signal.SIGKILL)
        code = self.nodes[rank].ended()
        assert self._service["Restart"] == "on-failure"
        assert str(code) not in self._service["RestartPreventExitStatus"].split()
        return self.start(rank)


@pytest.mark.processes
def test_nodes_that_the_unit_starts_and_starts_again(tmp_path):
    """What a job makes of that is in tests/cluster/test_nodes.py."""
    with ExitStack() as children:
        systemd = Systemd(children, tmp_path)
        systemd.start(0).wait_for("began")
        systemd.start(1)
        for rank in (1, 0):
            systemd.kill(rank)
        first = systemd.nodes[0]
        assert first.wait_for("began") == "began 1000"
        until(lambda: calls_to(systemd.port) == 1, "a worker of the other node")
        first.go_on()
        assert [systemd.nodes[rank].ended() for rank in range(2)] == [0, 0]
