"""The script of all engines, not changed by a byte, on one machine under each way to start it.

The other files here run it under engines that place it on several nodes, of which some are killed.
"""

import importlib.util
import subprocess
import sys

import pytest
from support.deadlines import LATEST_S
from support.nodes import RUN, SCRIPT, expected, own_environment
from support.slurm import free_ports

pytestmark = pytest.mark.processes

STEPS = 100
ACCELERATE = [
    sys.executable, "-m", "accelerate.commands.launch", "--num_machines", "1",
    "--mixed_precision", "no", "--dynamo_backend", "no",
]  # fmt: skip
WAYS = {
    "accelerate with ranks": [
        *ACCELERATE, "--multi_gpu", "--num_processes", "3", "--main_process_port",
    ],
    "accelerate with one process": [*ACCELERATE, "--cpu", "--num_processes", "3"],
    "python": [sys.executable],
    "run": [*RUN, "--nproc-per-node", "3"],
    "torchrun": [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "3", "--master-port",
    ],
}  # fmt: skip
"""The first alone is always tried here: the last three are, with another script, in test_run.py."""


@pytest.mark.thinned(5)
@pytest.mark.parametrize("way", WAYS)
def test_the_same_bits_whoever_starts_it(way, tmp_path):
    command = list(WAYS[way])
    if way.startswith("accelerate") and importlib.util.find_spec("accelerate") is None:
        pytest.skip("accelerate is not installed; make engines installs it")
    if command[-1].endswith("port"):
        command.append(str(free_ports(1)))
    done = subprocess.run(
        [*command, SCRIPT, str(tmp_path / "run"), "--steps", str(STEPS)], env=own_environment(),
        capture_output=True, text=True, timeout=LATEST_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == expected(STEPS)
