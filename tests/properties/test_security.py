"""What a stranger can do who knows every address but not the secret; what he still can is listed.

See SECURITY.md, which these tests hold to its word.
"""

import json
import os
import random
import re
import signal
import socket
import ssl
import subprocess
import sys
import threading
from contextlib import ExitStack, closing, contextmanager, suppress
from datetime import timedelta
from pathlib import Path

import pytest
from support import forked
from support.callers import OTHER as OTHER_JOB
from support.callers import SECRET as JOB
from support.callers import asked, calling, control_plane, framed, hello, in_loop, soon
from support.deadlines import LATEST_S
from support.encrypted import shaken
from support.inside import members, pids
from support.models import regression
from support.nodes import COMMAND, RUN, below, own_environment
from support.oracle import assert_same
from support.ports import free_port
from support.rogue import stranger_of
from support.small import small
from support.two_hosts import OTHER_SECRET, SECRET, Child

from pipedream_rt.cluster.control import Control
from pipedream_rt.cluster.environment import private_folder
from pipedream_rt.cluster.listener import Listener
from pipedream_rt.cluster.peer_links import PeerLinks
from pipedream_rt.cluster.peer_listeners import listening_for_peers
from pipedream_rt.deadline import Deadline
from pipedream_rt.errors import PipelineError, TransportError
from pipedream_rt.transport.group import Group
from pipedream_rt.transport.rpc.endpoint import RPCEndpoint
from pipedream_rt.transport.rpc.tunnel import Tunnel
from pipedream_rt.transport.sockets import SocketTransport

KEY = b"k" * 32
ROGUE = str(Path(__file__).parents[1] / "support" / "rogue.py")


def came_over(control):
    """The records that come until the connection fails."""
    records = []
    try:
        while True:
            records.append(control.receive(soon()))
    except TransportError:
        return records


def test_fuzz_of_the_control_connection():
    """Junk ends the connection and nothing else."""
    draw = random.Random(4)
    for _ in range(1_000):
        left, right = socket.socketpair()
        control = Control(right, "a stranger")
        with left:
            left.sendall(draw.randbytes(draw.randrange(1, 600)))
        assert came_over(control) == []
        assert len(control._framing._came) < 1 << 13
        control.close()


JOINED = {"type": "joined", "nearby": []}


def changed(sealed, draw):
    """Change one bit behind the head of the encrypted bytes of a record."""
    place = draw.randrange(5, len(sealed))
    return sealed[:place] + bytes([sealed[place] ^ 1 << draw.randrange(8)]) + sealed[place + 1 :]


@pytest.mark.parametrize(
    ("attack", "most"),
    [
        (lambda sealed, draw: draw.randbytes(600), 0),
        (changed, 0),
        (lambda sealed, draw: sealed + sealed, 1),
        (lambda sealed, draw: sealed[: draw.randrange(1, len(sealed))], 0),
        (lambda sealed, draw: framed(JOINED), 0),
        (lambda sealed, draw: sealed_elsewhere(), 0),
    ],
    ids=["junk", "changed", "repeated", "cut", "plain", "of another connection"],
)
def test_fuzz_of_an_encrypted_control_connection(attack, most):
    """What anybody changes, repeats or adds on the way ends the connection."""
    draw = random.Random(5)
    for _ in range(50):
        left, right = socket.socketpair()
        control = Control(right, "a coordinator")
        control._framing.engine, other = shaken()
        other.write(framed(JOINED))
        with left:
            left.sendall(attack(other.sealed(), draw))
        assert len(came_over(control)) <= most
        control.close()


def sealed_elsewhere():
    """A record as it passes over another connection of the same job."""
    _, called = shaken()
    called.write(framed(JOINED))
    return called.sealed()


@contextmanager
def control_port():
    """The port of a coordinator, at which a worker joins in the end."""
    with control_plane() as control, socket.create_server(("127.0.0.1", 0)) as bound:
        listener = in_loop(control, Listener, JOB, bound)
        listener.roster.most = 1
        in_loop(control, listener.open)
        yield bound.getsockname()
        worker = calling(bound.getsockname())
        assert asked(worker, hello())["type"] == "admitted"
        worker.close()
        control.run(listener.close())


@contextmanager
def port_of_a_member():
    """The port of a member whose group forms, which meets the other member in the end."""

    def meeting(rank, listeners, addresses):
        group = Group(generation=1, rank=rank, names=("a", "b"), hosts=(), key=KEY)
        return PeerLinks(group, JOB, listeners, addresses, soon()).meet()

    with control_plane() as control, ExitStack() as opened:
        first, second = (opened.enter_context(listening_for_peers("127.0.0.1")) for _ in range(2))
        met = []
        waits = threading.Thread(target=lambda: met.append(control.run(meeting(0, first, {}))))
        waits.start()
        try:
            yield (first.address.host, first.address.port)
        finally:
            by_tcp = first.address._replace(path="")
            met.append(control.run(meeting(1, second, {0: by_tcp})))
            waits.join()
        assert [set(each) for each in sorted(met, key=list)] == [{0}, {1}]
        for each in met:
            for connection in each.values():
                connection.socket.close()


def got_by(context, address, said):
    """What a stranger gets who shakes hands and says something, as far as it can be decrypted."""
    with (
        socket.create_connection(address, timeout=LATEST_S) as connection,
        context.wrap_socket(connection) as encrypted,
        suppress(ssl.SSLError, ConnectionError),
    ):
        encrypted.sendall(said)
        return encrypted.recv(1 << 12)
    return b""


LINK = {"type": "link", "job": JOB.job, "generation": 1, "sender": 1, "recipient": 0}


@pytest.mark.threads
@pytest.mark.parametrize("port", [control_port, port_of_a_member])
@pytest.mark.parametrize("secret", [None, OTHER_JOB], ids=["no certificate", "of another job"])
def test_a_port_answers_nobody_without_the_certificate_of_the_job(port, secret):
    """The handshake is right, and so is the first record, which nobody reads."""
    with port() as address:
        for said in (b"", framed(hello()), framed(LINK), b"\0" * 5000):
            assert got_by(stranger_of(secret), address, said) == b""


@pytest.mark.threads
@pytest.mark.parametrize("port", [control_port, port_of_a_member])
def test_a_port_answers_nobody_who_does_not_encrypt(port):
    """It says what TLS calls an alert, and closes the connection."""
    older = stranger_of(None)
    older.minimum_version = older.maximum_version = ssl.TLSVersion.TLSv1_2
    junk = [b"", b"GET / HTTP/1.1\r\n\r\n", b"\0" * 5000, b"\x16\x03\x01", bytes(range(256))]
    with port() as address:
        for said in (*junk, framed(hello()), framed(LINK)):
            assert is_nothing(answer_to(said, address))
        with pytest.raises(ssl.SSLError, match="PROTOCOL_VERSION"):
            got_by(older, address, framed(hello()))


def answer_to(said, address):
    """What comes back to somebody who says something and no more, until the end."""
    got = b""
    with socket.create_connection(address, timeout=LATEST_S) as connection, suppress(OSError):
        connection.sendall(said)
        connection.shutdown(socket.SHUT_WR)
        while part := connection.recv(1 << 12):
            got += part
    return got


def is_nothing(answer):
    """Whether an answer tells nothing: an alert of TLS, which is 7 bytes, or not even that."""
    return not answer or (answer[0] == 0x15 and len(answer) == 7)


def assert_not_answered(said, address):
    led = calling(address)
    with pytest.raises(TransportError, match="closed the connection"):
        asked(led, said)
    led.close()


@pytest.mark.threads
def test_a_member_that_is_led_to_another_port_than_it_called_meets_nobody():
    """All members have one certificate, so somebody in between may lead one to another's port.

    The first record tells them apart: a link is nothing at the control port, nor a hello at the
    port of a member.
    """
    for port, said in ((control_port, LINK), (port_of_a_member, hello())):
        with port() as address:
            assert_not_answered(said, address)


@pytest.mark.threads
@pytest.mark.parametrize(
    "change", [{"job": OTHER_JOB.job}, {"generation": 0}, {"sender": 0}, {"recipient": 1}],
    ids=lambda change: next(iter(change)),
)  # fmt: skip
def test_a_link_to_another_member_or_of_another_time_is_not_answered(change):
    with port_of_a_member() as address:
        assert_not_answered({**LINK, **change}, address)


def listening(pid):
    """The addresses of TCP, and the names of Unix sockets, at which a process listens."""
    inodes = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        try:
            inodes.update(re.findall(r"socket:\[(\d+)\]", os.readlink(fd)))
        except OSError:
            continue
    ports, names = set(), set()
    for table in ("tcp", "tcp6", "unix"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if table == "unix" and int(fields[3], 16) & 1 << 16 and fields[6] in inodes:
                names.update(fields[7:])
            elif table != "unix" and fields[3] == "0A" and fields[9] in inodes:
                host, port = fields[1].split(":")
                here = host == "0100007F"
                ports.add(f"{'127.0.0.1' if here else host}:{int(port, 16)}")
    return ports, names


@pytest.mark.processes
def test_nothing_of_a_running_job_listens():
    """TensorPipe's ports close when all have joined; the job goes on, and other bits do not come.

    So nobody can send a worker bytes of any kind, make TensorPipe die of junk, or call a built-in
    operator of it.
    """
    data = regression(40)

    def run(look, **kwargs):
        with small(**kwargs) as pipe:
            for number, _ in enumerate(pipe.train_epoch(data)):
                if number == 5:
                    look(pipe)
            return pipe.state_dict()

    def nobody_listens(pipe):
        for pid in pids(pipe).values():
            assert listening(pid) == (set(), set())
        ports, (status,) = listening(os.getpid())
        assert not ports
        assert Path(status).parent == private_folder()

    expected = run(lambda pipe: None)
    assert_same(run(nobody_listens, workers="local"), expected)


TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone")

TRAINS = """
import sys, torch
from torch import nn
from pipedream_rt import Pipeline, Recovery

if __name__ == "__main__":
    workers, elastic = sys.argv[1:]
    with Pipeline(
        [nn.Linear(2, 2), nn.Linear(2, 2)], stages=2, loss_fn=nn.functional.mse_loss,
        optimizer=(torch.optim.SGD, {"lr": 0.1}), workers=None if workers == "-" else workers,
        recovery=Recovery(max_restarts=1, elastic=(1, 2)[: 2 * int(elastic)] or None),
    ) as pipe:
        for result in pipe.train_epoch([(torch.ones(2, 2), torch.ones(2, 2))] * 20):
            if result.step == 5:
                print("training", flush=True)
                sys.stdin.readline()
    print("trained", flush=True)
"""


@pytest.mark.processes
@pytest.mark.parametrize("way", ["by address", "elastic", "torchrun", "nodes"])
def test_what_listens_while_workers_that_join_by_themselves_train(tmp_path, way):
    """The control port, where they come back to it; who comes in between is told nothing."""
    (script := tmp_path / "script.py").write_text(TRAINS)
    address = f"127.0.0.1:{free_port()}"
    with ExitStack() as children:

        def start(*command):
            child = Child(command, own_environment(PIPEDREAM_RT_SECRET=SECRET), forked.Popen)
            children.callback(child.close)
            return child

        if way == "nodes":
            command = (*RUN, "--nnodes", "2", "--rdzv-endpoint", address, "--node-rank")
            job = [start(*command, rank, str(script), "-", "0") for rank in "01"]
        elif way == "torchrun":
            command = (*TORCHRUN, "--nproc-per-node", "2", str(script), "-", "0")
            job = [Child(command, own_environment())]  # without a secret
            children.callback(job[0].close)
        else:
            job = [start(sys.executable, str(script), address, str(int(way == "elastic")))]
            job += [start(*COMMAND, "worker", address, "--name", name) for name in "ab"]
        job[0].wait_for("training")
        processes = [pid for child in job for pid in (child.pid, *below(child.pid))]
        if way == "torchrun":
            processes.remove(job[0].pid)  # which has its store
        found = [listening(pid) for pid in processes]
        ports = set().union(*(ports for ports, _ in found))
        (status,) = set().union(*(names for _, names in found))
        assert Path(status).parent == private_folder()
        assert ports == ({address} if way in ("elastic", "nodes") else set())
        if way == "elastic":
            assert is_nothing(answer_to(b"\0" * 5000, address.split(":")))
            assert got_by(stranger_of(None), address.split(":"), framed(hello())) == b""
        elif way == "nodes":
            with socket.create_connection(address.split(":"), timeout=0.3) as stranger:
                stranger.sendall(b"\0" * 5000)
                with pytest.raises(TimeoutError):
                    stranger.recv(1)
        job[0].go_on()
        job[0].wait_for("trained")


class Rogue(Child):
    """The stranger of `support.rogue`, who writes into a folder, until `end`."""

    def __init__(self, folder):
        self.folder = folder
        folder.mkdir()
        super().__init__([sys.executable, ROGUE, str(folder)], None)
        self.wait_for("ready")

    def end(self):
        """What he has reached."""
        self.process.stdin.close()
        return json.loads(self.wait_for('"connected"'))


def formed_and_recovered(rogue, recoveries, workers, replace=lambda name: None):
    """Train through recoveries beside a stranger; the bits are those of a run without either."""
    data = regression(4 * recoveries + 4)
    with small() as pipe:
        list(pipe.train_epoch(data))
        expected = pipe.state_dict()
    with small(workers=workers, max_restarts=recoveries) as pipe:
        for number, _ in enumerate(pipe.train_epoch(data)):
            if number % 4 == 3 and number // 4 < recoveries:
                member = members(pipe)[number % 3]
                os.kill(int(member.description.split()[1]), signal.SIGKILL)
                replace(member.name)
        assert len(pipe.restarts) == recoveries
        for stage in pipe.stages:
            stage.rref.to_here()
        assert_same(pipe.state_dict(), expected)
        said = rogue.end()
        assert_same(pipe.state_dict(), expected)
    assert list(rogue.folder.iterdir()) == []
    return said


@pytest.mark.rights
@pytest.mark.processes
@pytest.mark.parametrize(
    "recoveries", [3, pytest.param(100, marks=[pytest.mark.stress, pytest.mark.timeout(600)])]
)
def test_a_stranger_on_this_machine_while_groups_form(tmp_path, monkeypatch, recoveries):
    """Nothing that listens lets him in: he is connected for a moment at most, and nothing runs."""
    shut = Tunnel.shut

    def shut_behind_him(tunnel):
        # The port of the coordinator; he may come too late for a worker's.
        rogue.wait_for(f"at {tunnel._port}.")
        shut(tunnel)

    monkeypatch.setattr(Tunnel, "shut", shut_behind_him)
    with closing(Rogue(tmp_path / "rogue")) as rogue:
        said = formed_and_recovered(rogue, recoveries, "local")
    print(said)
    assert said["tried"] > 0
    assert said["answered"] == said["still_open"] == 0


@pytest.mark.rights
@pytest.mark.processes
def test_a_stranger_on_this_machine_while_workers_join_at_a_port(tmp_path, environment):
    """The same where everything listens at a port: also with TLS he gets no answer."""
    address = f"127.0.0.1:{free_port()}"
    before = dict(os.environ)  # the secret is in it no more when it was read
    with ExitStack() as children:

        def start(name):
            command = [*COMMAND, "worker", address, "--persist", "--name", name]
            children.callback(Child(command, before, forked.Popen).close)

        children.callback((rogue := Rogue(tmp_path / "rogue")).close)
        for name in "abc":
            start(name)
        said = formed_and_recovered(rogue, 1, address, start)
    print(said)
    assert said["shook_hands"] > 0
    assert said["answered"] == said["still_open"] == 0


@pytest.mark.rights
@pytest.mark.processes
def test_a_stranger_who_connects_before_the_guard_stands_is_cut_off(tmp_path, monkeypatch):
    """Where the kernel does not hold torch up: in a millisecond there, and in a second here."""
    monkeypatch.setattr("platform.machine", lambda: "another")
    group = Group(generation=1, rank=0, names=("coordinator",), hosts=(), key=KEY)
    transport = SocketTransport(group)
    endpoint = RPCEndpoint(timedelta(seconds=20))
    endpoint.carry(group, transport)
    transport.connect({})
    tunnel = transport.streams
    guard = tunnel.guard

    def late(port):
        agent = subprocess.Popen(
            [sys.executable, ROGUE, "once", str(port), str(tmp_path / "written")],
            stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        agents.append(agent)
        assert agent.stdout.readline() == "called\n"
        threading.Event().wait(1)  # more than it takes to answer a call
        guard(port)

    agents = []
    tunnel.guard = late
    try:
        endpoint.join("fenced", Deadline(timedelta(seconds=20)))
        said, _ = agents[0].communicate(timeout=LATEST_S)
        assert said.startswith("refused"), said
        assert list(tmp_path.iterdir()) == []
        with pytest.raises(TimeoutError):
            socket.create_connection(("127.0.0.1", tunnel._port), timeout=0.3)
        endpoint.shut()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", tunnel._port), timeout=5)
    finally:
        endpoint.close()
        transport.close()


@pytest.mark.processes
def test_a_rogue_cannot_join(environment):
    """He knows the address, not the secret; junk and silence beside him do not disturb either."""
    port = free_port()
    command = [sys.executable, "-m", "pipedream_rt.workers", f"127.0.0.1:{port}", "--timeout", "60"]
    rogue = subprocess.Popen(
        [*command, "--name", "rogue"], stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PIPEDREAM_RT_SECRET": OTHER_SECRET},
    )  # fmt: skip
    errors, before = [], dict(os.environ)  # the secret is in it no more when it was read

    def then_the_right_one():
        """First the rogue and some junk; the true worker when the rogue has been told."""
        errors.append(rogue.communicate(timeout=LATEST_S)[1])
        for junk in (b"", b"GET / HTTP/1.1\r\n\r\n", b"\0" * 5000, b"\0\0\0\5ab"):
            strangers.append(socket.create_connection(("127.0.0.1", port), timeout=LATEST_S))
            strangers[-1].sendall(junk)
        strangers[1].close()  # the others stay
        right = [*command, "--name", "right"]
        workers.append(forked.Popen(right, stderr=subprocess.DEVNULL, env=before))

    workers, strangers = [], []
    thread = threading.Thread(target=then_the_right_one)
    thread.start()
    try:
        options = {"workers": f"127.0.0.1:{port}", "start": timedelta(seconds=60)}
        with small(stages=1, **options) as pipe:
            assert [stage.worker for stage in pipe.stages] == ["right"]
            assert len(list(pipe.train_epoch(regression(4)))) == 4
    finally:
        thread.join()
        for worker in workers:
            worker.wait(LATEST_S)
        for connection in strangers:
            connection.close()
    assert rogue.returncode == 1
    assert "one end does not know the secret that the other has" in errors[0]


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
        "    with Pipeline([nn.Linear(2, 2)], stages=1, loss_fn=nn.functional.mse_loss) as pipe:\n"
        "        cluster = pipe._group.cluster\n"
        "        secret = cluster._listener.secret\n"
        "        secrets = [secret.text.encode(), bytes.fromhex(secret.text)]\n"
        "        secrets.append(secret.derived(b'identity 1'))\n"
        "        pid = int(cluster._members[0].description.split()[1])\n"
        "        for place in ('cmdline', 'environ'):\n"
        "            for process in (pid, os.getpid(), os.getppid()):\n"
        "                found = Path(f'/proc/{process}/{place}').read_bytes()\n"
        "                assert not any(each in found for each in secrets)\n"
        "        for fd in Path(f'/proc/{pid}/fd').iterdir():\n"
        "            assert 'memfd' not in os.readlink(fd), fd\n"
        "        print('looked')\n"
    )
    command = [*RUN, "--nproc-per-node", "1", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LATEST_S)
    assert done.stdout == "looked\n", done.stderr
    assert done.stderr == ""


def test_a_short_secret_is_refused(monkeypatch, environment):
    monkeypatch.setenv("PIPEDREAM_RT_SECRET", "1234")
    with pytest.raises(PipelineError, match="must be 64 hexadecimal digits, found another text of"):
        small(workers="127.0.0.1:0")
    monkeypatch.delenv("PIPEDREAM_RT_SECRET")
    with pytest.raises(PipelineError, match="must know the job's secret: set PIPEDREAM_RT_SECRET"):
        small(workers="127.0.0.1:0")
