"""The script of all engines, not changed by a byte, on one machine.

The other files here run it under engines that place it on several nodes, of which some are killed.
"""

import importlib.util
import subprocess
import sys

import pytest
from support.deadlines import LATEST_S
from support.nodes import SCRIPT, expected, own_environment
from support.ports import free_port

pytestmark = pytest.mark.processes

STEPS = 20
ACCELERATE = [
    sys.executable, "-m", "accelerate.commands.launch", "--num_machines", "1",
    "--mixed_precision", "no", "--dynamo_backend", "no",
]  # fmt: skip
WAYS = {
    "with ranks": ["--multi_gpu", "--num_processes", "3", "--main_process_port"],
    "with one process": ["--cpu", "--num_processes", "3"],
}


@pytest.mark.thinned(2)
@pytest.mark.parametrize("way", WAYS)
def test_the_same_bits_under_accelerate(way, tmp_path):
    """Under python, run and torchrun they are, with another script, in tests/cli/test_run.py."""
    if importlib.util.find_spec("accelerate") is None:
        pytest.skip("accelerate is not installed; make engines installs it")
    command = [*ACCELERATE, *WAYS[way]]
    if command[-1].endswith("port"):
        command.append(str(free_port()))
    done = subprocess.run(
        [*command, SCRIPT, str(tmp_path / "run"), "--steps", str(STEPS)], env=own_environment(),
        capture_output=True, text=True, timeout=LATEST_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == expected(STEPS)
