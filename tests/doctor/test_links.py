"""A link is measured from both of its ends."""

import socket
from contextlib import ExitStack

import pytest
from support.deadlines import LATEST_S
from support.encrypted import encrypted_pair, tcp_pair

from pipedream_rt.doctor.judgement import MeasuredLink
from pipedream_rt.doctor.links import Probe
from pipedream_rt.transport.link import Connection


@pytest.fixture
def probes():
    """Two machines of three with an encrypted link between them; the third was not reached."""
    ends = encrypted_pair(tcp_pair())
    problems = {2: "connection refused"}
    with ExitStack() as opened:
        made = [Probe({1 - rank: end}, problems) for rank, end in enumerate(ends)]
        for each in made:
            opened.callback(each.close)
        yield made


@pytest.mark.threads
def test_a_link_is_measured_from_both_ends(probes):
    for rank, probe in enumerate(probes):
        link = probe.measure(1 - rank)
        assert link.problem == ""
        assert link.bandwidth > 0
        assert 0 < link.latency_s < LATEST_S


@pytest.mark.threads
def test_a_link_that_is_not_there_or_ends_is_told_of(probes):
    first, other = probes
    assert first.measure(2) == MeasuredLink(None, 0.0, "connection refused")
    other.close()
    link = first.measure(1)
    assert link.latency_s is None
    assert link.problem
    assert first.measure(1).latency_s is None  # at each later time too


@pytest.mark.threads
def test_a_machine_that_does_not_answer_is_waited_for_until_the_deadline(monkeypatch):
    monkeypatch.setattr("pipedream_rt.doctor.links._TIMEOUT_S", 0.2)
    ours, theirs = socket.socketpair()
    probe = Probe({1: Connection(ours)}, {})
    with theirs:
        assert probe.measure(1).problem == "nothing was answered within 0.2 s"
        probe.close()
