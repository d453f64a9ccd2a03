"""Jobs whose workers are on two machines, which are two network namespaces."""

import contextlib
import functools
import io
import json
import shutil
import signal
import threading
from pathlib import Path

import pytest
from support import across, elastic
from support.nodes import RUN
from support.two_hosts import (
    A6,
    B6,
    CONT,
    KILL,
    OTHER_SECRET,
    STOP,
    A,
    B,
    two_hosts,
    why_not,
)

pytestmark = [pytest.mark.processes, pytest.mark.rights, pytest.mark.timeout(300)]

SCRIPT = across.__file__
ADDRESS = f"{A}:29500"


@functools.cache
def expected(stages, *more):
    """The digest of the same training in this process."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        across.main(["--workers", "serial", "--stages", str(stages), *more])
    return said.getvalue().splitlines()[-1]


@pytest.fixture
def hosts():
    if reason := why_not():
        pytest.skip(reason)
    with two_hosts() as both:
        yield both


def script(hosts, *options, address=ADDRESS):
    return hosts.start("a", SCRIPT, "--workers", address, *options)


def workers_of(hosts, names, *options, address=ADDRESS):
    """Start workers, each on the machine with which its name begins."""
    return [hosts.worker(name[0], name, address, *options) for name in names.split()]


def is_right(run, digest, restarts=None):
    """Check the end of a script, and its digest, which is that of one process."""
    assert run.ended() == 0, run.text
    assert run.lines[-2] == digest
    if restarts is not None:
        assert run.wait_for("restarts") == f"restarts {restarts}"


@pytest.mark.stress
def test_faults_of_the_network_and_of_persistent_workers(hosts):
    """A worker that joins late, a wrong secret, a cut cable, a stopped and a killed worker.

    Who has a wrong secret cannot know whether who listens is the coordinator, so it tries again.
    """
    rogue = hosts.worker("b", "b1", ADDRESS, "--persist", secret=OTHER_SECRET)
    a1, _, b1 = workers_of(hosts, "a1 a2 b1", "--persist")
    run = script(hosts, "--heartbeat", "3", "--pause-at", "5", "10", "15")
    run.wait_for("one end does not know the secret that the other has")
    rogue.wait_for("one end does not know the secret that the other has")
    rogue.signal(signal.SIGKILL)
    assert rogue.ended() == -signal.SIGKILL
    (b2,) = workers_of(hosts, "b2", "--persist")
    assert run.wait_for("workers").split()[1:] == ["a1", "a2", "b1", "b2"]

    run.wait_for("paused after 5")
    hosts.cut()
    run.go_on()
    run.wait_for("it has been silent for")
    threading.Event().wait(7)  # with the heartbeat, the cable is out for ten seconds
    hosts.heal()
    run.wait_for("recovered in")

    run.wait_for("paused after 10")
    b1.signal(STOP)
    run.go_on()
    line = run.wait_for("worker 'b1' (stage 2")
    assert "is gone" in line
    b1.signal(CONT)

    run.wait_for("paused after 15")
    b2.signal(KILL)
    run.go_on()
    line = run.wait_for("worker 'b2' (stage 3")
    assert f"start it there again with `pipedream-rt worker {ADDRESS} --name NAME`" in line
    (again,) = workers_of(hosts, "b2", "--persist")

    is_right(run, expected(4), 3)
    for worker in (a1, b1, again):
        assert worker.process.poll() is None  # it waits for the next job


@pytest.mark.stress
def test_workers_that_do_not_persist_and_the_death_of_the_coordinator(hosts):
    """All of them end with the job or with its failure; others in their place go on with it."""
    first = workers_of(hosts, "a1 b1")
    run = script(hosts, "--stages", "2", "--heartbeat", "3", "--pause-at", "5", "15", "25")
    run.wait_for("paused after 5")
    first[1].signal(KILL)
    run.go_on()
    run.wait_for("worker 'b1' (stage 1")
    assert first[0].ended() == 3
    assert "the job goes on with a new generation; this process ends" in first[0].text
    second = workers_of(hosts, "a1 b1")
    run.wait_for("paused after 15")
    second[1].signal(STOP)
    run.go_on()
    run.wait_for("worker 'b1' (stage 1")
    assert second[0].ended() == 3
    second[1].signal(CONT)
    assert second[1].ended() == 3
    third = workers_of(hosts, "a1 b1")
    run.wait_for("paused after 25")
    run.signal(KILL)
    assert [worker.ended() for worker in third] == [3, 3]


@pytest.mark.stress
def test_memory_is_shared_within_each_machine_also_by_replicas_of_a_stage(hosts):
    """One of the workers is killed meanwhile, and those of its machine meet again."""
    _, a2, *_ = workers_of(hosts, "a1 a2 b1 b2", "--persist")
    large = ("--samples", "5000", "--steps", "12", "--replicas", "2", "2")
    run = script(hosts, "--stages", "2", *large, "--pause-at", "5")
    run.wait_for("paused after 5")
    a2.signal(KILL)
    workers_of(hosts, "a2", "--persist")
    run.go_on()
    run.wait_for("worker 'a2' (stage 0, replica 1")
    run.wait_for("in memory that both share,")
    run.wait_for("among a1, a2 and among b1, b2; smaller ones")
    is_right(run, expected(2, *large), 1)


def test_the_bandwidth_of_a_cable_is_measured(hosts):
    if shutil.which("tc") is None:
        pytest.skip("to slow a cable down needs the command tc (package iproute2)")
    hosts.slow("100mbit")
    workers = workers_of(hosts, "a1 b1")
    call = f"measure_links({ADDRESS!r}, count=2, size=1 << 21, repeats=3).bandwidth"
    run = hosts.start("a", "-c", f"from pipedream_rt import measure_links; print({call})")
    assert run.ended() == 0, run.text
    assert float(run.lines[-2]) == pytest.approx(12.5e6, rel=0.2)
    assert [worker.ended() for worker in workers] == [0, 0]


@pytest.mark.stress
def test_an_elastic_job_on_two_machines(hosts, tmp_path):
    """What a worker says at the control port while a generation runs is encrypted too."""
    words = [elastic.__file__, str(tmp_path / "run"), ADDRESS, "2", "3", "15", "25", "35+", "55"]
    job = hosts.start("a", *words)
    workers = [hosts.worker("b", name, ADDRESS, "--persist") for name in "xyz"]
    assert job.wait_for("at 15") == "at 15: x y z"
    workers[0].signal(KILL)
    workers[0].ended()
    job.go_on()
    assert job.wait_for("at 25") == "at 25: y y z"
    hosts.worker("a", "w", ADDRESS, "--persist")
    job.go_on()
    assert job.wait_for("at 55") == "at 55: w y z"
    job.go_on()
    assert job.wait_for("digest") == f"digest {elastic.expected()}"
    assert job.ended() == 0


@pytest.mark.stress
def test_torchrun_on_two_nodes(hosts):
    """Two ranks on each; rank 0 starts a worker beside itself."""
    nodes = [
        hosts.start(
            host, "-m", "torch.distributed.run", "--nnodes", "2", "--node-rank", str(rank),
            "--nproc-per-node", "2", "--master-addr", A, "--master-port", "29600", SCRIPT,
            GLOO_SOCKET_IFNAME=f"eth{host.upper()}",
        )
        for rank, host in enumerate("ab")
    ]  # fmt: skip
    assert [node.ended() for node in nodes] == [0, 0], nodes[0].text + nodes[1].text
    assert nodes[0].wait_for("workers").split()[1:] == ["rank-1", "rank-2", "rank-3", "worker-0"]
    assert nodes[0].wait_for("digest") == expected(4)


def test_what_keeps_a_worker_out_is_said_by_both_sides(hosts):
    """No interface, one that others do not reach, no secret, nobody or no way there, no card."""
    without = hosts.worker("b", "b1", ADDRESS, bind=False)
    right = hosts.worker("a", "a1", ADDRESS)
    run = script(hosts, "--stages", "2")
    assert without.ended() == 1
    assert "name its interface, as --bind ethB" in without.text
    assert run.ended() == 9
    assert "WorkerLost: worker 'b1' could not join: the coordinator is not on loopback" in run.text
    assert right.ended() == 3

    hosts.add_card("b", "ethC", "10.99.0.2/24")
    # The second of two workers calls the first, which listens where nobody else comes.
    away = [hosts.worker("b", "1", ADDRESS, "--bind", "ethC", bind=False),
            hosts.worker("a", "2", ADDRESS)]  # fmt: skip
    run = script(hosts, "--stages", "2")
    assert run.ended() == 9
    assert "worker '2' could not join: '2' has not met '1' at 10.99.0.2:" in run.text
    assert "network is unreachable; all workers must reach each other" in run.text
    assert [worker.ended() for worker in away] == [3, 3]

    node = ["--nnodes", "2", "--node-rank", "1", "--rdzv-endpoint", "203.0.113.1:29500"]
    ends = [
        (hosts.worker("b", "b1", ADDRESS, secret=None), 1, "set PIPEDREAM_RT_SECRET to"),
        (hosts.worker("b", "b1", ADDRESS, "--timeout", "0.5"), 3,
         f"no coordinator listened at {ADDRESS} within 0.5 s: connection refused"),
        (hosts.worker("b", "b1", "192.0.2.1:29500", "--timeout", "0.5"), 3,
         "within 0.5 s: network is unreachable"),
        (hosts.worker("b", "b1", ADDRESS, "--bind", "eth7", bind=False), 2,
         "--bind 'eth7': this machine has the interfaces lo, ethB"),
        (hosts.start("b", *RUN[1:], *node, "--patience", "1", SCRIPT), 3,
         "203.0.113.1:29500 cannot be reached from here: [Errno 101] Network"),
    ]  # fmt: skip
    for each, code, words in ends:
        assert each.ended() == code
        assert words in each.text


@pytest.mark.stress
def test_a_stranger_on_the_other_machine_while_groups_form(hosts, tmp_path):
    """He tries every port that there is, all the time: no file, no answer, no other bit."""
    # His own machine keeps its many ports: thousands of his connections would use up a few of them.
    hosts.few_ports("a", 40000, 40060)
    rogue_at = str(Path(SCRIPT).parent / "rogue.py")
    (tmp_path / "rogue").mkdir()
    rogue = hosts.start("b", rogue_at, str(tmp_path / "rogue"), A, "40000", "40061")
    rogue.wait_for("ready")
    workers = workers_of(hosts, "a1 b1", "--persist")
    run = script(hosts, "--stages", "2", "--pause-at", "5", "15", "25", "--max-restarts", "8")
    for step in (5, 15, 25):
        run.wait_for(f"paused after {step}")
        workers[0].signal(KILL)
        workers[0] = hosts.worker("a", "a1", ADDRESS, "--persist")
        run.go_on()
    is_right(run, expected(2))
    rogue.process.stdin.close()
    said = json.loads(rogue.wait_for("connected"))
    print(said)
    assert said["connected"] > 0
    assert said["answered"] == said["still_open"] == 0
    assert list((tmp_path / "rogue").iterdir()) == []


READS = """
import select, socket, sys
packets = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
packets.bind(("ethA", 0))
print("reading", flush=True)
seen = bytearray()
while sys.stdin not in (ready := select.select([packets, sys.stdin], [], [])[0]):
    seen += packets.recv(1 << 17)
print("bytes", len(seen))
print("found", [word for word in sys.argv[1:] if word.encode() in seen])
"""


@pytest.mark.parametrize(
    "address", [ADDRESS, pytest.param(f"[{A6}]:29500", marks=pytest.mark.stress)]
)
def test_nothing_can_be_read_on_the_way(hosts, address):
    """Neither what workers say as they join nor what passes in training; by IPv6 too."""
    if address != ADDRESS:
        hosts.forget("a", A, 24)
        hosts.forget("b", B, 24)
    reader = hosts.start("a", "-c", READS, "torch", "hello", "worker-of-b", f"{B}:", f"{B6}")
    reader.wait_for("reading")
    workers = [hosts.worker(name[-1], name, address) for name in ("worker-of-a", "worker-of-b")]
    run = script(hosts, "--stages", "2", address=address)
    is_right(run, expected(2))
    reader.go_on()
    assert int(reader.wait_for("bytes").split()[1]) > 10_000
    assert reader.wait_for("found") == "found []"
    assert [worker.ended() for worker in workers] == [0, 0]
