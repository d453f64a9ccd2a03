"""Whether torch RPC is had, where a fence around it can stand and where it cannot."""

import logging

import pytest

from pipedream_rt.transport.rpc import fence

NOT_HERE = "the kernel allows no packet filter on a TCP socket here (Operation not permitted)"


@pytest.fixture
def refuses(monkeypatch):
    """A kernel that lets this process put no filter on a socket."""

    def accept_only(fd, ports):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(fence, "accept_only", accept_only)


def test_a_kernel_that_refuses_is_found_out(refuses):
    assert fence.no_filter() == fence.obstacle() == NOT_HERE


def test_an_obstacle_is_one_line_that_a_record_takes(refuses):
    assert fence.obstacle().isprintable()
    assert len(fence.obstacle()) < 255


@pytest.mark.rights
def test_nothing_is_in_the_way_of_root():
    assert fence.obstacle() == ""


@pytest.mark.parametrize(
    ("wish", "obstacles", "left_out", "in_words"),
    [
        ("auto", {"coordinator": "", "a": ""}, "", "the workers are endpoints of torch RPC"),
        ("on", {"coordinator": "", "a": ""}, "", "the workers are endpoints of torch RPC"),
        (
            *("off", {"coordinator": "", "a": ""}, "PIPEDREAM_RT_RPC=off leaves it out"),
            "the workers are no endpoints of torch RPC: PIPEDREAM_RT_RPC=off leaves it out",
        ),
        (
            *("auto", {"coordinator": "", "a": NOT_HERE}),
            f"nothing keeps strangers from it at a: {NOT_HERE}; {fence.REMEDY}",
            "the workers are no endpoints of torch RPC: nothing keeps strangers from it at a: ",
        ),
        (
            *("on", {"coordinator": NOT_HERE, "a": NOT_HERE}, ""),
            "the workers are endpoints of torch RPC, without a fence at every process: " + NOT_HERE,
        ),
    ],
)
def test_one_process_without_a_fence_decides_for_all(wish, obstacles, left_out, in_words):
    assert fence.why_left_out(wish, obstacles) == left_out
    assert fence.in_words(left_out, obstacles).startswith(in_words)


def test_of_many_processes_the_first_are_named():
    obstacles = {f"worker-{i}": NOT_HERE for i in range(9)} | {"coordinator": ""}
    said = fence.why_left_out("auto", obstacles)
    assert "at worker-0, worker-1, worker-2 and 6 more: the kernel" in said


def test_it_is_told_once(caplog):
    """At INFO where nothing is open, and as a warning where something is."""
    fence._log_once.cache_clear()
    obstacles = {"a": NOT_HERE, "b": ""}
    with caplog.at_level(logging.INFO):
        for _ in range(3):
            fence.tell(fence.why_left_out("auto", obstacles), obstacles)
            fence.tell("", obstacles)
            fence.tell("", {"a": "", "b": ""})
    assert [record.levelname for record in caplog.records] == ["INFO", "WARNING"]
    assert "has no fence at a" in caplog.text
    assert "some 30 ms" in caplog.text
