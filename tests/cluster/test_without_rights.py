"""A job without a capability, as an ordinary user has it, and a container.

Each way to start one is taken without any in test_hardened.py.
"""

import contextlib
import io
import os
import secrets
import shutil
import signal
import subprocess
import sys
from contextlib import ExitStack

import pytest
from support import rights
from support.deadlines import LATEST_S
from support.slurm import free_ports
from support.ways import CLI, RUN, SCRIPT, line_of

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module", autouse=True)
def _can_drop_rights():
    try:
        rights.without()
    except FileNotFoundError as error:
        pytest.skip(f"rights cannot be given up here: {error} is missing")


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


@pytest.fixture(scope="module")
def losses():
    """What one thread gives, which has no rights to lack."""
    said = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(said):
        patch.setattr(sys, "argv", ["script.py", "serial"])
        exec(SCRIPT, {"__name__": "__main__"})
    return line_of(said.getvalue(), "losses")


def started(*words, **variables):
    """Start Python without a capability, and return the process."""
    return subprocess.Popen(
        [*rights.without(), sys.executable, *map(str, words)], env={**os.environ, **variables},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def done(process):
    try:
        out, err = process.communicate(timeout=LATEST_S)
    finally:
        process.kill()
    assert process.returncode == 0, err
    return out, err


def test_it_starts_and_gives_the_same_bits(script, losses):
    out, _ = done(started(*RUN, script))
    assert line_of(out, "losses") == losses
    assert "told False" in out
    assert line_of(out, "parameters") == "parameters [72, 36]"
    assert "PIPEDREAM_RT_RPC=on has it without a fence" in line_of(out, "refused")


@pytest.mark.rights
def test_a_worker_without_rights_decides_for_a_script_with_all(script, losses):
    secret = {"PIPEDREAM_RT_SECRET": secrets.token_hex(32)}
    at = f"127.0.0.1:{free_ports(1)}"
    command = [sys.executable, *CLI, "worker", at, "--name"]
    both = {**os.environ, **secret}
    with (
        subprocess.Popen([*command, "with"], env=both) as one,
        subprocess.Popen([*rights.without(), *command, "without"], env=both) as other,
    ):
        try:
            out = subprocess.run(
                [sys.executable, script, at], env=both, capture_output=True, text=True,
                timeout=LATEST_S, check=True,
            ).stdout  # fmt: skip
        finally:
            one.send_signal(signal.SIGTERM)
            other.send_signal(signal.SIGTERM)
    assert line_of(out, "losses") == losses
    assert "nothing would keep strangers from it at without: " in out


OTHER = """
import sys, torch, torch.nn.functional as F
from torch import nn
from pipedream_rt import Pipeline, Recovery

def opened(workers):
    torch.manual_seed(0)
    return Pipeline(
        nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)), stages=2, loss_fn=F.mse_loss,
        optimizer=(torch.optim.SGD, {"lr": 0.1}), workers=workers,
        recovery=Recovery(max_restarts=1),
    )

if __name__ == "__main__":
    data = [(torch.randn(8, 8), torch.randn(8, 4)) for _ in range(4)]
    with opened(sys.argv[1]) as first, opened("local") as second:
        print([not each._group.cluster.without_rpc for each in (first, second)])
        print("ready", flush=True)
        sys.stdin.readline()  # until a worker of the first is replaced by one with rights
        print(len(list(first.train_epoch(data))), len(list(second.train_epoch(data))))
        print(first._group.cluster.without_rpc)
"""


@pytest.mark.rights
def test_a_recovery_goes_on_without_the_agent_that_another_pipeline_has(tmp_path):
    """One pipeline had none, for a worker that lacks rights; its replacement has them all."""
    (tmp_path / "script.py").write_text(OTHER)
    at = f"127.0.0.1:{free_ports(1)}"
    both = {**os.environ, "PIPEDREAM_RT_SECRET": secrets.token_hex(32)}
    command = [sys.executable, *CLI, "worker", at, "--name"]
    with ExitStack() as ended:

        def start(*words, **options):
            process = subprocess.Popen(words, env=both, text=True, **options)
            ended.callback(process.wait)
            ended.callback(process.kill)
            return process

        start(*command, "with", "--persist")
        without = start(*rights.without(), *command, "without")
        script = start(
            sys.executable, tmp_path / "script.py", at, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        assert script.stdout.readline() == "[False, True]\n"
        assert script.stdout.readline() == "ready\n"
        without.kill()
        start(*command, "another", "--persist")
        out, err = script.communicate("go on\n", timeout=LATEST_S)
        assert script.returncode == 0, err
    assert "4 4\n" in out
    words = " ".join(out.split())
    assert "another pipeline of the process has the one agent that torch allows" in words


def test_whoever_insists_has_torch_rpc_after_one_warning(script, losses):
    out, err = done(started(script, PIPEDREAM_RT_RPC="on"))
    assert line_of(out, "losses") == losses
    assert line_of(out, "fetched") == "fetched 2"
    assert err.count("torch RPC has no fence at every process") == 1


def test_the_doctor_says_so_to_who_asks(tmp_path):
    out, _ = done(started(*CLI, "doctor"))
    assert "RPC" not in out
    assert "CAP_NET_ADMIN" not in out
    out, _ = done(started(*CLI, "doctor", "--rpc"))
    row = line_of(out, "--  torch RPC")
    assert "left out, which only references to modules need: the kernel allows no packet" in row
    assert "CAP_NET_ADMIN for all processes gives it" in out
    assert "!!  torch RPC" in done(started(*CLI, "doctor", PIPEDREAM_RT_RPC="on"))[0]
    assert "ok  torch RPC" in done(started(*CLI, "doctor", "--rpc", PIPEDREAM_RT_RPC="off"))[0]


@pytest.mark.skipif(shutil.which("make") is None, reason="the command make is missing")
def test_marked_tests_are_skipped_with_the_reason(tmp_path):
    """As `make test` of an ordinary user does."""
    test = "tests/transport/test_fence.py::test_nothing_is_in_the_way_of_root"
    out, _ = done(started("-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", test))
    assert "it needs CAP_NET_ADMIN, CAP_SYS_ADMIN, CAP_SETUID and CAP_SETGID, which root has" in out
