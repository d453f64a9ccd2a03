"""What a stranger can do who knows every address but not the secret; what he still can is listed.

See SECURITY.md, which these tests hold to its word.
"""

import os
import pickle
import random
import re
import socket
import subprocess
import sys
import threading
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from support.models import mlp, regression
from support.oracle import assert_same

from pipedream_rt import Pipeline, Timeouts
from pipedream_rt.cluster.control import Control
from pipedream_rt.cluster.keys import COORDINATOR_END, WORKER_END, session_key
from pipedream_rt.deadline import Deadline
from pipedream_rt.errors import PipelineError, TransportError
from pipedream_rt.transport.pickling import SignedPickler
from pipedream_rt.transport.rpc import _deliver
from pipedream_rt.transport.signing import Signer

KEY = b"k" * 32


class Bomb:
    """Runs code when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def udf(function, *arguments):
    from torch.distributed.rpc.internal import PythonUDF

    return PythonUDF(function, arguments, {})


def test_a_request_of_a_stranger_is_not_unpickled(tmp_path):
    """torch's own pickler would have run it."""
    bomb = tmp_path / "bomb"
    ours = SignedPickler(Signer(KEY, 1, 0))
    strangers = SignedPickler(Signer(b"x" * 32, 1, 1))
    for data in (pickle.dumps(Bomb(bomb)), strangers.serialize(udf(os.mkdir, str(bomb)))[0], b""):
        with pytest.raises(TransportError, match=r"not signed with the key|too few"):
            ours.deserialize(data, [])
    assert not bomb.exists()


def test_a_member_cannot_have_other_functions_called(tmp_path):
    """Defence in depth: the key alone is not enough."""
    ours, member = SignedPickler(Signer(KEY, 1, 0)), SignedPickler(Signer(KEY, 1, 1))
    with pytest.raises(TransportError, match=r"names posix\.getcwd, which is not allowed"):
        ours.deserialize(*member.serialize(udf(os.getcwd)))
    with pytest.raises(TransportError, match=r"posix\.mkdir, which is not allowed"):
        ours.deserialize(*member.serialize(udf(_deliver, Bomb(tmp_path / "bomb"))))
    request = ours.deserialize(*member.serialize(udf(_deliver, b"data", [torch.ones(2)])))
    assert request.func is _deliver
    assert torch.equal(request.args[1][0], torch.ones(2))


def test_other_tensors_than_those_signed_are_refused():
    ours, member = SignedPickler(Signer(KEY, 1, 0)), SignedPickler(Signer(KEY, 1, 1))
    data, _ = member.serialize(udf(_deliver, b"", [torch.ones(2)]))
    with pytest.raises(TransportError, match="are not those that were signed"):
        ours.deserialize(data, [torch.ones(3)])


def test_fuzz_of_the_unpickler():
    draw = random.Random(3)
    ours, member = SignedPickler(Signer(KEY, 1, 0)), SignedPickler(Signer(KEY, 1, 1))
    good = member.serialize(udf(_deliver, b"data", []))[0]
    ours.deserialize(good, [])
    for i in range(20_000):
        place = draw.randrange(len(good))
        junk = (draw.randbytes(place), good[:place], good, pickle.dumps(Bomb("/tmp/no")))[i % 4]
        with pytest.raises(TransportError):
            ours.deserialize(junk, [])


def drain(control):
    """Receive until it fails."""
    while True:
        control.receive(Deadline(timedelta(seconds=5)))


def test_fuzz_of_the_control_connection():
    """Junk, and what is signed with another key, ends the connection and nothing else."""
    draw = random.Random(4)
    key = session_key(b"secret", b"a", b"b")
    for i in range(2_000):
        left, right = socket.socketpair()
        with left:
            control = Control(right, "a stranger")
            stranger = Control(left.dup(), "a coordinator")
            if i % 2:
                control.secure(key, COORDINATOR_END, WORKER_END)
            if i % 4 == 3:
                stranger.secure(session_key(b"other", b"a", b"b"), WORKER_END, COORDINATOR_END)
                stranger.send({"type": "joined"})
            else:
                left.sendall(draw.randbytes(draw.randrange(1, 600)))
            stranger.close()
            left.close()
            with pytest.raises(TransportError):
                drain(control)
            assert len(control._buffer) < 1 << 13
            control.close()


def listening_ports(pid):
    """TCP ports that a process listens at."""
    inodes = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        try:
            inodes.update(re.findall(r"socket:\[(\d+)\]", os.readlink(fd)))
        except OSError:
            continue
    ports = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                ports.append(int(fields[1].rsplit(":", 1)[1], 16))
    return ports


@pytest.mark.processes
def test_nothing_of_a_running_job_listens():
    """TensorPipe's ports close when all have joined; the job goes on, and other bits do not come.

    So nobody can send a worker bytes of any kind, make TensorPipe die of junk, or call a built-in
    operator of it.
    """
    data = regression(40)

    def run(look, **kwargs):
        with Pipeline(
            mlp(), stages=3, loss_fn=F.mse_loss, optimizer=(torch.optim.SGD, {"lr": 0.1}), **kwargs
        ) as pipe:
            for number, _ in enumerate(pipe.train_epoch(data)):
                if number == 5:
                    look(pipe)
            return pipe.state_dict()

    def nobody_listens(pipe):
        before = listening_ports(os.getpid())
        assert before == []
        for process in pipe._group.cluster._local.processes.values():
            assert listening_ports(process.pid) == []

    expected = run(lambda pipe: None, workers="in-process")
    assert_same(run(nobody_listens, workers="local"), expected)


ROGUE = """
import sys, threading
import torch, torch.distributed as dist, torch.distributed.rpc as rpc
class Store(dist.Store):
    def __init__(self, address):
        super().__init__()
        self.known = {"names/0": b"coordinator", "names/1": b"rogue", "addrs/coordinator": address}
    def set(self, key, value): self.known[key] = bytes(value)
    def get(self, key): return self.known[key]
    def compare_set(self, key, expected, desired): return desired
import os
os.environ["TP_SOCKET_IFNAME"] = "lo"
import torch.distributed.autograd as autograd
autograd._init(1)
options = rpc.TensorPipeRpcBackendOptions(
    init_method="x://", _transports=["uv"], _channels=["basic"])
store = Store(sys.argv[1].encode())
agent = rpc.TensorPipeAgent(store, "rogue", 1, 2, options, {}, [])
rpc.api._init_rpc_states(agent)
def attempt(name, call):
    try:
        print(name, "->", call(), flush=True)
    except Exception as error:
        print(name, "refused:", str(error).splitlines()[0][:120], flush=True)
from pipedream_rt.transport.rpc import _part, _deliver
attempt("run", lambda: rpc.rpc_sync("coordinator", os.getpid, timeout=5))
attempt("read", lambda: rpc.rpc_sync("coordinator", _part, args=(0, "module"), timeout=5))
attempt("deliver", lambda: rpc.rpc_sync("coordinator", _deliver, args=(b"x", []), timeout=5))
attempt("rref", lambda: rpc.remote("coordinator", _part, (0, "module"), timeout=5).to_here(5))
attempt("operator", lambda: rpc.rpc_sync("coordinator", torch.add, (torch.ones(1), 1), timeout=5))
os._exit(0)
"""


@pytest.mark.processes
def test_what_a_stranger_can_do_while_a_group_forms():
    """Before the ports close: no function of Python, no weight; but torch's built-in operators."""
    from pipedream_rt.transport.rpc import Directory, RpcGroup, RpcTransport

    group = RpcGroup(
        generation=1, rank=0, names=("coordinator",), hosts=(), interface="lo",
        timeout=timedelta(seconds=20), key=KEY,
    )  # fmt: skip
    found = {}
    transport = RpcTransport(group)
    try:
        directory = Directory(
            group.names, lambda address: found.update(coordinator=address), lambda: found
        )
        transport.join(directory, Deadline(timedelta(seconds=20)))
        done = subprocess.run(
            [sys.executable, "-c", ROGUE, found["coordinator"]],
            capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        lines = dict(line.split(" ", 1) for line in done.stdout.splitlines())
        assert lines["rref"].startswith("refused"), (lines, done.stderr)
        for name in ("run", "read", "deliver"):
            assert "not signed with the key of this job" in lines[name], (lines, done.stderr)
        # What stays open until then: SECURITY.md says so.
        assert lines["operator"].startswith("-> tensor([2.])")
        transport.shield()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", directory.port), timeout=5)
    finally:
        transport.close()


@pytest.mark.processes
def test_a_rogue_cannot_join(environment):
    """He knows the address, not the secret; junk and silence beside him do not disturb either."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "pipedream_rt.workers", f"127.0.0.1:{port}", "--timeout", "60"]
    rogue = subprocess.Popen(
        [*command, "--name", "rogue"], stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PIPEDREAM_RT_SECRET": "not the secret of these tests"},
    )  # fmt: skip
    errors = []

    def then_the_right_one():
        """First the rogue and some junk; the true worker when the rogue has been told."""
        errors.append(rogue.communicate(timeout=60)[1])
        for junk in (b"", b"GET / HTTP/1.1\r\n\r\n", b"\0" * 5000, b"\0\0\0\5ab"):
            with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
                connection.sendall(junk)
        workers.append(subprocess.Popen([*command, "--name", "right"], stderr=subprocess.DEVNULL))

    workers = []
    thread = threading.Thread(target=then_the_right_one)
    thread.start()
    try:
        with Pipeline(
            mlp(), stages=1, loss_fn=F.mse_loss, optimizer=(torch.optim.SGD, {"lr": 0.1}),
            workers=f"127.0.0.1:{port}", timeouts=Timeouts(start=timedelta(seconds=60)),
        ) as pipe:  # fmt: skip
            assert [stage.worker for stage in pipe.stages] == ["right"]
            assert len(list(pipe.train_epoch(regression(4)))) == 4
    finally:
        thread.join()
        for worker in workers:
            worker.wait(timeout=30)
    assert rogue.returncode == 1
    assert "does not know the job's secret" in errors[0]


@pytest.mark.processes
def test_the_secret_is_nowhere_to_be_read(environment, tmp_path):
    """Not in an argument, in the environment of a local worker, or in a file that it has open."""
    script = tmp_path / "looks.py"
    script.write_text(
        "import os, torch\n"
        "from torch import nn\n"
        "from pathlib import Path\n"
        "from pipedream_rt import Pipeline\n"
        "if __name__ == '__main__':\n"
        "    with Pipeline([nn.Linear(2, 2)], loss_fn=nn.functional.mse_loss) as pipe:\n"
        "        cluster = pipe._group.cluster\n"
        "        secret = cluster._secret\n"
        "        pid = int(cluster._members[0].description.split()[1])\n"
        "        for place in ('cmdline', 'environ'):\n"
        "            for process in (pid, os.getpid(), os.getppid()):\n"
        "                found = Path(f'/proc/{process}/{place}').read_bytes()\n"
        "                assert secret not in found and secret.hex().encode() not in found\n"
        "        for fd in Path(f'/proc/{pid}/fd').iterdir():\n"
        "            assert 'memfd' not in os.readlink(fd), fd\n"
        "        print('looked')\n"
    )
    command = ["-c", "from pipedream_rt.cli import main; main()", "run", "--nproc-per-node", "1"]
    for arguments in ([str(script)], [*command, str(script)]):
        done = subprocess.run(
            [sys.executable, *arguments], capture_output=True, text=True, timeout=60
        )
        assert done.stdout == "looked\n", done.stderr
        assert done.stderr == ""


def test_a_short_secret_is_refused(monkeypatch, environment):
    monkeypatch.setenv("PIPEDREAM_RT_SECRET", "1234")
    with pytest.raises(PipelineError, match="has 4 characters, at least 16 are needed"):
        Pipeline(mlp(), workers="127.0.0.1:0")
    monkeypatch.delenv("PIPEDREAM_RT_SECRET")
    with pytest.raises(PipelineError, match="must know the job's secret: set PIPEDREAM_RT_SECRET"):
        Pipeline(mlp(), workers="127.0.0.1:0")
