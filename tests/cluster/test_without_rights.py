"""A job without a capability, as an ordinary user has it, and a container.

Each way to start one is taken without any in test_hardened.py.
"""

import contextlib
import io
import json
import os
import secrets
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
from support import rights
from support.deadlines import LATEST_S
from support.ports import free_port
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


OTHER = """
import sys, torch, torch.nn.functional as F
from torch import nn
from pipedream_rt import Pipeline, PipelineError, Recovery

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
        try:
            first.stages[1].rref.to_here()
        except PipelineError as error:
            print("refused", " ".join(str(error).split()), flush=True)
        sys.stdin.readline()  # until a worker of the first is replaced by one with rights
        print([[r.loss for r in each.train_epoch(data)] for each in (first, second)])
        print(first._group.cluster.without_rpc)
"""


@pytest.mark.rights
def test_a_worker_without_rights_decides_for_a_script_with_all(tmp_path):
    """Its replacement has all rights, and there the agent is another pipeline's meanwhile."""
    (tmp_path / "script.py").write_text(OTHER)
    at = f"127.0.0.1:{free_port()}"
    both = {**os.environ, "PIPEDREAM_RT_SECRET": secrets.token_hex(32)}
    command = [sys.executable, *CLI, "worker", at, "--name"]
    with ExitStack() as ended:

        def start(*words, **options):
            process = ended.enter_context(subprocess.Popen(words, env=both, text=True, **options))
            ended.callback(process.kill)
            return process

        start(*command, "with", "--persist")
        without = start(*rights.without(), *command, "without")
        script = start(
            sys.executable, tmp_path / "script.py", at, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        assert script.stdout.readline() == "[False, True]\n"
        refused = script.stdout.readline()
        assert "nothing would keep strangers from it at without: " in refused
        without.kill()
        start(*command, "another", "--persist")
        out, err = script.communicate("go on\n", timeout=LATEST_S)
        assert script.returncode == 0, err
    losses, _, words = out.partition("\n")
    first, second = json.loads(losses)
    assert first == second
    words = " ".join(words.split())
    assert "another pipeline of the process has the one agent that torch allows" in words


def test_whoever_insists_has_torch_rpc_after_one_warning(script, losses):
    out, err = done(started(script, PIPEDREAM_RT_RPC="on"))
    assert line_of(out, "losses") == losses
    assert line_of(out, "fetched") == "fetched 2"
    assert err.count("torch RPC has no fence at every process") == 1


DOCTOR = """
import os
from click.testing import CliRunner
from pipedream_rt.cli import main

for words, wish in ([], ""), (["--rpc"], ""), ([], "on"), (["--rpc"], "off"):
    os.environ["PIPEDREAM_RT_RPC"] = wish
    done = CliRunner().invoke(main, ["doctor", *words])
    print(done.output, "ended with", done.exit_code)
"""


def test_the_doctor_says_so_to_who_asks():
    out, _ = done(started("-c", DOCTOR))
    plain, asked, insists, without, _ = out.split("ended with 0\n")
    assert "RPC" not in plain
    assert "CAP_NET_ADMIN" not in plain
    row = line_of(asked, "--  torch RPC")
    assert "left out, which only references to modules need: the kernel allows no packet" in row
    assert "CAP_NET_ADMIN for all processes gives it" in asked
    assert "!!  torch RPC" in insists
    assert "ok  torch RPC" in without


def test_marked_tests_are_skipped_with_the_reason():
    """As `make test` of an ordinary user does; see tests/conftest.py."""
    code = "from support.rights import why_lacking; print(why_lacking())"
    out, _ = done(started("-c", code, PYTHONPATH=str(Path(__file__).parents[1])))
    assert "it needs CAP_NET_ADMIN, CAP_SYS_ADMIN, CAP_SETUID and CAP_SETGID, which root has" in out
