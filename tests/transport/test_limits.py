"""What torch's agent needs is tried before it: it would end the process."""

import os
import resource
import shutil
import subprocess
import sys
import threading

import pytest
from support import forked
from support.deadlines import LATEST_S

from pipedream_rt.errors import ConfigError
from pipedream_rt.transport import limits

PROGRAM = """
import os, resource, sys
import torch
from torch import nn
from pipedream_rt import Pipeline
limits = [int(each) for each in sys.argv[1:]]
if limits:
    resource.setrlimit(resource.RLIMIT_NOFILE, tuple(limits))
model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(4)))
data = [(torch.ones(4, 2), torch.ones(4, 2))] * 3
optimizer = (torch.optim.SGD, {"lr": 0.1})
with Pipeline(model, stages=4, loss_fn=nn.MSELoss(), optimizer=optimizer) as pipe:
    print(len(list(pipe.train_epoch(data))))
"""


@pytest.fixture
def limit():
    """The limit of open files, which is as it was afterwards."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield before
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def there():
    return len(os.listdir("/proc/self/fd"))


def test_the_soft_limit_is_raised_to_what_is_needed_and_no_further(limit):
    soft = there() + 20
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, limit[1]))
    limits.ensure_descriptors(3)
    raised = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    assert soft < raised < soft + 200
    limits.ensure_descriptors(2)
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == raised


@pytest.mark.processes
@pytest.mark.parametrize("hard", [24, 64])
def test_too_few_descriptors_are_refused_with_the_numbers(hard):
    """Whatever the limit is, the process is not aborted."""
    done = run([hard, hard])
    assert done.returncode == 1
    assert "ConfigError: a process of this job may need 104 descriptors" in done.stderr
    assert f"it may have {hard}" in done.stderr


@pytest.mark.processes
def test_a_low_soft_limit_does_not_matter():
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    assert run([40, hard]).stdout == "3\n"


NO_LOOPBACK = {
    "none": ("unshare", "-n"),
    "another address": (
        *("unshare", "-n", "sh", "-c"),
        'ip link set lo up && ip addr del 127.0.0.1/8 dev lo && exec "$@"',
        "sh",
    ),
}


@pytest.mark.processes
@pytest.mark.rights
@pytest.mark.parametrize("how", NO_LOOPBACK)
def test_without_loopback_a_run_goes_on_without_torch_rpc(how, monkeypatch):
    """The agent needs it, and nothing else of workers that the script has started."""
    if shutil.which("ip") is None:
        pytest.skip("the command ip (package iproute2) is missing here")
    assert run([], *NO_LOOPBACK[how]).stdout == "3\n"
    monkeypatch.setenv("PIPEDREAM_RT_RPC", "on")
    done = run([], *NO_LOOPBACK[how])
    assert done.returncode == 1
    assert "ConfigError: the process cannot connect to itself at 127.0.0.1" in done.stderr
    assert "PIPEDREAM_RT_RPC=off does without" in done.stderr


def run(arguments, *before):
    """Run the program; `before` is a command in front of it."""
    command = [*before, sys.executable, "-c", PROGRAM, *map(str, arguments)]
    start = subprocess.run if before else forked.run
    return start(command, capture_output=True, text=True, timeout=LATEST_S, check=False)


def test_too_few_threads_are_told_of(monkeypatch):
    start, left = threading.Thread.start, [5]

    def limited(self):
        left[0] -= 1
        if left[0] < 0:
            raise RuntimeError("can't start new thread")
        start(self)

    monkeypatch.setattr(threading.Thread, "start", limited)
    with pytest.raises(ConfigError, match="can start 5 more threads, and 16 are needed"):
        limits.make_room_for_agent()
