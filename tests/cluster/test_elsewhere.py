"""Workers that somebody else starts: where they are awaited, and what is said of missing ones."""

import os
import socket
from datetime import timedelta

import pytest

from pipedream_rt.cluster import elsewhere
from pipedream_rt.cluster.elsewhere import AtAddress, OnNodes
from pipedream_rt.cluster.environment import secret_pipe
from pipedream_rt.cluster.identity import Secret
from pipedream_rt.deadline import Deadline
from pipedream_rt.errors import ConfigError
from pipedream_rt.job.process_assignment import ProcessAssignment

SECRET = Secret("5a" * 32)


@pytest.fixture
def nodes(monkeypatch):
    """A job of nodes with 5 workers, 2 of them on the node of the script."""
    monkeypatch.setenv("PIPEDREAM_RT_NPROC", "5")
    monkeypatch.setenv("PIPEDREAM_RT_NPROC_HERE", "2")
    monkeypatch.setenv("PIPEDREAM_RT_ENGINE", "Slurm job 7")
    monkeypatch.setattr(elsewhere, "_secret_of_run", None)
    return OnNodes()


def test_what_is_no_address_is_refused():
    with pytest.raises(ConfigError):
        AtAddress("host:")


def test_the_command_for_an_address_is_told_with_the_port_that_was_found():
    at = AtAddress("127.0.0.1:0")
    assert at.missing() == "start them with `pipedream-rt worker HOST:PORT --name NAME`"
    with at.listening() as listener:
        host, port = listener.getsockname()
        at.start(2, f"{host}:{port}", SECRET, Deadline(timedelta(seconds=1)))
    assert f"`pipedream-rt worker 127.0.0.1:{port} --name NAME`" in at.missing()
    assert at.ending("w").startswith("it was started elsewhere: with --persist it comes back")
    assert f"again with `pipedream-rt worker 127.0.0.1:{port} --name NAME`" in at.ending("w")
    assert at.own(2) == []


def test_an_elastic_plan_takes_as_many_as_there_are_on_the_nodes(nodes):
    for most, found in ((8, 5), (5, 5), (4, 4)):
        assignment = nodes.within(ProcessAssignment(fewest=3, most=most), "the work")
        assert (assignment.fewest, assignment.most) == (3, found)
    assert nodes.within(ProcessAssignment(fewest=5, most=8), "the work").fewest == 5
    with pytest.raises(ConfigError, match=r"the work: Slurm job 7 has started 5; raise the number"):
        nodes.within(ProcessAssignment(fewest=6, most=8), "the work")


def test_those_that_have_not_come_are_looked_for_at_the_engine(nodes):
    assert nodes.missing() == "look at what the other processes of Slurm job 7 say"


def test_the_script_starts_the_workers_of_its_own_node_first(nodes):
    own = ["node-0-0", "node-0-1"]
    assert [nodes.own(count) for count in (5, 1, 0)] == [own, own[:1], []]


def test_a_later_pipeline_of_a_script_has_the_secret_too(nodes, monkeypatch):
    """The pipe with it can be read only once."""
    fd = secret_pipe(SECRET)
    monkeypatch.setenv("PIPEDREAM_RT_SECRET_FD", str(fd))
    assert nodes.secret() == SECRET
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    assert OnNodes().secret() == SECRET


def test_the_socket_of_run_stays_open_for_the_next_pipeline(nodes, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as of_run:
        fd = os.dup(of_run.fileno())
    kept = {}
    monkeypatch.setattr("pipedream_rt.cluster.environment._of_run", kept)
    monkeypatch.setenv("PIPEDREAM_RT_LISTEN_FD", str(fd))
    for _ in range(2):
        with nodes.listening() as listener:
            socket.create_connection(listener.getsockname()).close()
    kept[fd].close()
