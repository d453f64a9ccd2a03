"""The unit for systemd: checked by systemd itself, and its commands started by a played one."""

import configparser
import re
import shlex
import shutil
import signal
import socket
import subprocess
from contextlib import ExitStack
from pathlib import Path

import pytest
from support.deadlines import LATEST_S
from support.nodes import SCRIPT, command_in, expected, own_environment
from support.two_hosts import SECRET, Child

UNIT = Path(__file__).parents[3] / "workers" / "pipedream-rt@.service"
STEPS = 400


def test_the_unit_is_one_of_systemd(tmp_path):
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    place = tmp_path / "pipedream-rt@0.service"
    shutil.copy(UNIT, place)
    done = subprocess.run(
        ["systemd-analyze", "verify", str(place)], capture_output=True, text=True, timeout=LATEST_S
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_what_the_unit_gives_up(tmp_path):
    """Below 4 of 10, which systemd calls OK."""
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    place = tmp_path / "pipedream-rt@0.service"
    shutil.copy(UNIT, place)
    command = ["systemd-analyze", "security", "--offline=true", "--threshold=40", str(place)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LATEST_S)
    assert done.returncode == 0, done.stdout + done.stderr


class Systemd:
    """Starts the commands of the unit, and again those that its rules start again."""

    def __init__(self, children, folder):
        unit = configparser.ConfigParser(strict=False, interpolation=None)
        unit.optionxform = str
        unit.read_string(UNIT.read_text().replace("\\\n", " "))
        self._service = unit["Service"]
        self._children = children
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
        (folder / "secret").touch(mode=0o600)
        (folder / "secret").write_text(SECRET)
        (folder / "script.py").write_text(
            "import runpy, sys\n"
            f"sys.argv[1:] = [{str(folder / 'run')!r}, '--steps', '{STEPS}']\n"
            f"runpy.run_path({SCRIPT!r}, run_name='__main__')\n"
        )
        command_in(folder / "bin")
        name, _, value = self._service["Environment"].partition("=")
        self._job = {
            "NNODES": "3", "ENDPOINT": f"127.0.0.1:{port}", "SCRIPT": str(folder / "script.py"),
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
    with ExitStack() as children:
        systemd = Systemd(children, tmp_path)
        first, *_ = map(systemd.start, range(3))
        first.wait_for("step 100")
        systemd.kill(1)
        first.wait_for("recovered in")
        first = systemd.kill(0)
        assert int(first.wait_for("began at").split()[2]) >= 100
        assert first.wait_for("digest") == expected(STEPS)
        assert [systemd.nodes[rank].ended() for rank in range(3)] == [0, 0, 0]
