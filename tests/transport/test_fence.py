"""Whether torch RPC is had, where a fence around it can stand and where it cannot."""

import errno
import logging

import pytest

from pipedream_rt.cluster.records import FIELDS
from pipedream_rt.errors import ConfigError
from pipedream_rt.transport import fence

NOBODY = {"coordinator": "", "a": ""}
ONE = {"coordinator": "", "a": "filter"}
ALL = {"coordinator": "filter", "a": "filter"}


@pytest.fixture
def refuses(monkeypatch):
    """Have the kernel let this process put no filter on a socket, for a reason."""

    def make(code):
        def accept_only(fd, ports):
            raise OSError(code, "no")

        monkeypatch.setattr(fence, "accept_only", accept_only)

    return make


def test_a_kernel_that_refuses_is_found_out(refuses):
    refuses(errno.EPERM)
    assert not fence.can_filter()
    assert fence.obstacle() == "filter"


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS])
def test_a_process_that_has_nothing_left_does_not_count_as_one_that_may_not(code, refuses):
    """Else a group would go without torch RPC, or without a fence, because a file was open."""
    refuses(code)
    with pytest.raises(ConfigError, match="can open no more sockets: no"):
        fence.obstacle()


@pytest.mark.rights
def test_nothing_is_in_the_way_of_root():
    assert fence.obstacle() == ""


def test_a_record_takes_every_obstacle():
    assert all(map(FIELDS["ready"]["obstacle"], ["", *fence.OBSTACLES]))
    assert not FIELDS["ready"]["obstacle"]("another")


@pytest.mark.parametrize(
    ("wish", "obstacles", "mode", "left_out"),
    [
        ("auto", NOBODY, "fenced", ""),
        ("on", NOBODY, "fenced", ""),
        ("off", NOBODY, "off", "PIPEDREAM_RT_RPC=off leaves it out"),
        ("off", ALL, "off", "PIPEDREAM_RT_RPC=off leaves it out"),
        (
            *("auto", ONE, "off"),
            "nothing would keep strangers from it at a: the kernel allows no packet filter",
        ),
        ("on", ALL, "open", ""),
        ("on", ONE, "open", ""),
    ],
)
def test_one_process_without_a_fence_decides_for_all(wish, obstacles, mode, left_out):
    assert fence.decided(wish, obstacles) == mode
    assert fence.why_left_out(wish, obstacles).startswith(left_out)
    assert bool(fence.why_left_out(wish, obstacles)) == (mode == "off")


@pytest.mark.parametrize(
    ("obstacle", "remedy"),
    [("filter", "CAP_NET_ADMIN"), ("loopback", "ip link set lo up"), ("taken", "close that one")],
)
def test_what_is_in_the_way_is_said_with_what_helps(obstacle, remedy):
    said = fence.why_left_out("auto", {"coordinator": obstacle, "a": ""})
    assert remedy in said
    assert ("strangers" in said) == (obstacle != "taken")
    assert "CAP_NET_ADMIN" not in fence.why_left_out("auto", {"a": obstacle}) or (
        obstacle == "filter"
    )


def test_of_many_processes_the_first_are_named():
    obstacles = {f"worker-{i}": "filter" for i in range(9)} | {"coordinator": ""}
    said = fence.why_left_out("auto", obstacles)
    assert "at worker-0, worker-1, worker-2 and 6 more: the kernel" in said


def test_it_is_told_once(caplog, monkeypatch):
    """As a warning where something is open. That agents are left out is told to who needs them."""
    monkeypatch.setattr(fence, "_has_warned", False)
    with caplog.at_level(logging.INFO):
        for name in ("a", "b"):  # workers of another generation have other names
            obstacles = {name: "filter", "coordinator": ""}
            for wish in ("auto", "on", "off"):
                fence.warn_once(wish, obstacles)
            fence.warn_once("auto", NOBODY)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "has no fence at a" in caplog.text
    assert "some 30 ms" in caplog.text
