"""Jobs whose workers are on two machines, which are two network namespaces."""

import functools
import json
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from support import elastic
from support.deadlines import LATEST_S
from support.nodes import RUN
from support.two_hosts import A6, CONT, KILL, OTHER_SECRET, STOP, A, two_hosts, why_not

pytestmark = [pytest.mark.processes, pytest.mark.rights, pytest.mark.timeout(300)]

SCRIPT = str(Path(__file__).parent.parent / "support" / "across.py")
ADDRESS = f"{A}:29500"


@functools.cache
def expected(stages, *more):
    """The digest of the same training on threads of one process."""
    done = subprocess.run(
        [sys.executable, SCRIPT, "--workers", "serial", "--stages", str(stages), *more],
        capture_output=True, text=True, timeout=LATEST_S, check=True,
    )  # fmt: skip
    return done.stdout.splitlines()[-1]


@pytest.fixture
def hosts():
    if reason := why_not():
        pytest.skip(reason)
    with two_hosts() as both:
        yield both


def script(hosts, *options, address=ADDRESS, **more):
    return hosts.start("a", SCRIPT, "--workers", address, *options, **more)


@pytest.mark.stress
def test_faults_of_the_network_and_of_persistent_workers(hosts):
    """A worker that joins late, a wrong secret, a cut cable, a stopped and a killed worker.

    Who has a wrong secret cannot know whether who listens is the coordinator, so it tries again.
    """
    rogue = hosts.worker("b", "b1", ADDRESS, "--persist", secret=OTHER_SECRET)
    workers = {
        name: hosts.worker(name[0], name, ADDRESS, "--persist") for name in ("a1", "a2", "b1")
    }
    run = script(hosts, "--heartbeat", "3", "--pause-at", "5", "10", "15")
    run.wait_for("one end does not know the secret that the other has")
    rogue.wait_for("one end does not know the secret that the other has")
    rogue.signal(signal.SIGKILL)
    assert rogue.ended() == -signal.SIGKILL
    workers["b2"] = hosts.worker("b", "b2", ADDRESS, "--persist")
    assert run.wait_for("workers").split()[1:] == ["a1", "a2", "b1", "b2"]

    run.wait_for("paused after 5")
    hosts.cut()
    run.go_on()
    run.wait_for("it has been silent for")
    threading.Event().wait(7)  # with the heartbeat, the cable is out for ten seconds
    hosts.heal()
    run.wait_for("recovered in")

    run.wait_for("paused after 10")
    workers["b1"].signal(STOP)
    run.go_on()
    line = run.wait_for("worker 'b1' (stage 2")
    assert "is gone" in line
    workers["b1"].signal(CONT)

    run.wait_for("paused after 15")
    workers["b2"].signal(KILL)
    run.go_on()
    line = run.wait_for("worker 'b2' (stage 3")
    assert f"start it there again with `pipedream-rt worker {ADDRESS} --name NAME`" in line
    again = hosts.worker("b", "b2", ADDRESS, "--persist")

    assert run.ended() == 0, run.text
    assert run.lines[-2] == expected(4)
    assert run.wait_for("restarts") == "restarts 3"
    for worker in (workers["a1"], workers["b1"], again):
        assert worker.process.poll() is None  # it waits for the next job


@pytest.mark.stress
def test_workers_that_do_not_persist_and_the_death_of_the_coordinator(hosts):
    """All of them end with the job or with its failure; others in their place go on with it."""
    first = [hosts.worker(name[0], name, ADDRESS) for name in ("a1", "b1")]
    run = script(hosts, "--stages", "2", "--heartbeat", "3", "--pause-at", "5", "15", "25")
    run.wait_for("paused after 5")
    first[1].signal(KILL)
    run.go_on()
    run.wait_for("worker 'b1' (stage 1")
    assert first[0].ended() == 3
    assert "the job goes on with a new generation; this process ends" in first[0].text
    second = [hosts.worker(name[0], name, ADDRESS) for name in ("a1", "b1")]
    run.wait_for("paused after 15")
    second[1].signal(STOP)
    run.go_on()
    run.wait_for("worker 'b1' (stage 1")
    assert second[0].ended() == 3
    second[1].signal(CONT)
    assert second[1].ended() == 3
    third = [hosts.worker(name[0], name, ADDRESS) for name in ("a1", "b1")]
    run.wait_for("paused after 25")
    run.signal(KILL)
    assert [worker.ended() for worker in third] == [3, 3]


@pytest.mark.stress
def test_the_replicas_of_a_stage_are_on_two_machines(hosts):
    """One of them is killed, and another takes its place."""
    workers = [hosts.worker(name[0], name, ADDRESS, "--persist") for name in ("a1", "b1", "b2")]
    replicas = ("--replicas", "2", "1")
    run = script(hosts, "--stages", "2", *replicas, "--heartbeat", "3", "--pause-at", "7")
    run.wait_for("paused after 7")
    workers[1].signal(KILL)
    run.go_on()
    run.wait_for("worker 'b1' (stage 0, replica 1")
    hosts.worker("b", "b1", ADDRESS, "--persist")
    assert run.ended() == 0, run.text
    assert run.lines[-2] == expected(2, *replicas)
    assert run.wait_for("restarts") == "restarts 1"


@pytest.mark.stress
def test_memory_is_shared_within_each_machine(hosts):
    """One of the workers is killed meanwhile, and those of its machine meet again."""
    names = ("a1", "a2", "b1", "b2")
    workers = {name: hosts.worker(name[0], name, ADDRESS, "--persist") for name in names}
    large = ("--samples", "5000", "--steps", "12")
    run = script(hosts, *large, "--pause-at", "5")
    run.wait_for("paused after 5")
    workers["a2"].signal(KILL)
    hosts.worker("a", "a2", ADDRESS, "--persist")
    run.go_on()
    run.wait_for("in memory that both share,")
    run.wait_for("among a1, a2 and among b1, b2; smaller ones")
    assert run.ended() == 0, run.text
    assert run.lines[-2] == expected(4, *large)
    assert run.wait_for("restarts") == "restarts 1"


def test_the_bandwidth_of_a_cable_is_measured(hosts):
    if shutil.which("tc") is None:
        pytest.skip("to slow a cable down needs the command tc (package iproute2)")
    hosts.slow("100mbit")
    workers = [hosts.worker(name[0], name, ADDRESS) for name in ("a1", "b1")]
    call = f"measure_links({ADDRESS!r}, count=2, size=1 << 21, repeats=3).bandwidth"
    run = hosts.start("a", "-c", f"from pipedream_rt import measure_links; print({call})")
    assert run.ended() == 0, run.text
    assert float(run.lines[-2]) == pytest.approx(12.5e6, rel=0.2)
    assert [worker.ended() for worker in workers] == [0, 0]


@pytest.mark.stress
def test_addresses_of_ipv6(hosts):
    hosts.forget("a", A, 24)
    hosts.forget("b", "10.77.0.2", 24)
    address = f"[{A6}]:29500"
    workers = [hosts.worker(name[0], name, address) for name in ("a1", "b1")]
    run = script(hosts, "--stages", "2", address=address)
    assert run.ended() == 0, run.text
    assert run.lines[-2] == expected(2)
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


def test_a_node_without_a_way_to_the_first(hosts):
    words = ["--nnodes", "2", "--node-rank", "1", "--rdzv-endpoint", "203.0.113.1:29500"]
    other = hosts.start("b", *RUN[1:], *words, "--patience", "1", SCRIPT)
    assert other.ended() == 3
    assert "203.0.113.1:29500 cannot be reached from here: [Errno 101] Network" in other.text


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
    """Loopback, a machine that the others do not reach, no secret, nobody there, no such card."""
    without = hosts.worker("b", "b1", ADDRESS, bind=False)
    right = hosts.worker("a", "a1", ADDRESS)
    run = script(hosts, "--stages", "2")
    assert without.ended() == 1
    assert "name its interface, as --bind ethB" in without.text
    assert run.ended() == 9
    assert "WorkerLost: worker 'b1' could not join: the coordinator is not on loopback" in run.text
    assert right.ended() == 3

    inside = [hosts.worker("b", "b1", ADDRESS, "--bind", "lo", bind=False),
              hosts.worker("a", "a1", ADDRESS)]  # fmt: skip
    run = script(hosts, "--stages", "2")
    assert run.ended() == 9
    assert "'b1' of the group cannot be reached from other machines" in run.text
    assert [worker.ended() for worker in inside] == [3, 3]

    hosts.add_card("b", "ethC", "10.99.0.2/24")
    # The second of two workers calls the first, which listens where nobody else comes.
    away = [hosts.worker("b", "1", ADDRESS, "--bind", "ethC", bind=False),
            hosts.worker("a", "2", ADDRESS)]  # fmt: skip
    run = script(hosts, "--stages", "2")
    assert run.ended() == 9
    assert "worker '2' could not join: '2' has not met '1' at 10.99.0.2:" in run.text
    assert "network is unreachable; all workers must reach each other" in run.text
    assert [worker.ended() for worker in away] == [3, 3]

    assert hosts.worker("b", "b1", ADDRESS, secret=None).ended(20) == 1
    nobody = hosts.worker("b", "b1", ADDRESS, "--timeout", "0.5")
    away = hosts.worker("b", "b1", "192.0.2.1:29500", "--timeout", "0.5")
    missing = hosts.worker("b", "b1", ADDRESS, "--bind", "eth7", bind=False)
    assert (nobody.ended(), away.ended(), missing.ended()) == (3, 3, 2)
    assert f"no coordinator listened at {ADDRESS} within 0.5 s: connection refused" in nobody.text
    assert "within 0.5 s: network is unreachable" in away.text
    assert "--bind 'eth7': this machine has the interfaces lo, ethB" in missing.text


@pytest.mark.stress
def test_a_stranger_on_the_other_machine_while_groups_form(hosts, tmp_path):
    """He tries every port that there is, all the time: no file, no answer, no other bit."""
    # His own machine keeps its many ports: thousands of his connections would use up a few of them.
    hosts.few_ports("a", 40000, 40060)
    rogue_at = str(Path(SCRIPT).parent / "rogue.py")
    (tmp_path / "rogue").mkdir()
    rogue = hosts.start("b", rogue_at, str(tmp_path / "rogue"), A, "40000", "40061")
    rogue.wait_for("ready")
    workers = [hosts.worker(name[0], name, ADDRESS, "--persist") for name in ("a1", "b1")]
    run = script(hosts, "--stages", "2", "--pause-at", "5", "15", "25", "--max-restarts", "8")
    for step in (5, 15, 25):
        run.wait_for(f"paused after {step}")
        workers[0].signal(KILL)
        workers[0] = hosts.worker("a", "a1", ADDRESS, "--persist")
        run.go_on()
    assert run.ended() == 0, run.text
    assert run.lines[-2] == expected(2)
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


def test_nothing_can_be_read_on_the_way(hosts):
    """Neither what workers say as they join nor what passes in training."""
    reader = hosts.start("a", "-c", READS, "torch", "hello", "worker-of-b", "10.77.0.2:")
    reader.wait_for("reading")
    workers = [hosts.worker(name[-1], name, ADDRESS) for name in ("worker-of-a", "worker-of-b")]
    run = script(hosts, "--stages", "2")
    assert run.ended() == 0, run.text
    assert run.lines[-2] == expected(2)
    reader.go_on()
    assert int(reader.wait_for("bytes").split()[1]) > 10_000
    assert reader.wait_for("found") == "found []"
    assert [worker.ended() for worker in workers] == [0, 0]
