"""Sockets that another library owns: who may connect, who is cut off, and how they are closed."""

import errno
import os
import select
import socket

import pytest
from support.deadlines import LATEST_S

from pipedream_rt.transport.fence import accept_only
from pipedream_rt.transport.rpc import descriptors


@pytest.fixture
def listener():
    with socket.create_server(("127.0.0.1", 0)) as made:
        made.settimeout(LATEST_S)
        yield made


def called(listener):
    """Both ends of a connection to a listener."""
    caller = socket.create_connection(listener.getsockname()[:2], timeout=LATEST_S)
    callee, _ = listener.accept()
    callee.settimeout(LATEST_S)
    return caller, callee


def test_tcp_sockets_of_this_process_are_found_and_stay_open(listener):
    caller, callee = called(listener)
    here, there = socket.socketpair()
    with caller, callee, here, there, socket.socket(type=socket.SOCK_DGRAM) as datagrams:
        found = {each.fd: each for each in descriptors.own_sockets()}
        assert not found.keys() & {here.fileno(), there.fileno(), datagrams.fileno()}
        assert found[listener.fileno()][1:] == (True, listener.getsockname(), None)
        assert found[caller.fileno()][1:] == (False, caller.getsockname(), listener.getsockname())
        caller.sendall(b"still open")
        assert callee.recv(100) == b"still open"


def test_addresses_of_ipv6_are_told_as_those_of_ipv4():
    try:
        listener = socket.create_server(("::1", 0), family=socket.AF_INET6)
    except OSError:
        pytest.skip("there is no IPv6 here")
    with listener:
        listener.settimeout(LATEST_S)
        caller, callee = called(listener)
        with caller, callee:
            found = {each.fd: each for each in descriptors.own_sockets()}
            one, other = caller.getsockname()[:2], listener.getsockname()[:2]
            assert found[listener.fileno()][1:] == (True, other, None)
            assert found[caller.fileno()][1:] == (False, one, other)


@pytest.mark.rights
def test_only_the_callers_of_a_port_reach_a_listener(listener):
    with socket.socket() as member, socket.socket() as stranger:
        member.bind(("127.0.0.1", 0))
        accept_only(listener.fileno(), [1, member.getsockname()[1]])
        stranger.setblocking(False)
        assert stranger.connect_ex(listener.getsockname()) == errno.EINPROGRESS
        member.settimeout(LATEST_S)
        member.connect(listener.getsockname())
        assert descriptors.waiting_at(listener.fileno()) == 1
        callee, address = listener.accept()
        callee.close()
        assert address == member.getsockname()


@pytest.mark.rights
def test_of_another_address_of_this_machine_nobody_is_accepted():
    """Only loopback's own address is that of this process's gates."""
    with socket.create_server(("0.0.0.0", 0)) as listener, socket.socket() as caller:
        caller.bind(("127.0.0.2", 0))
        address = "127.0.0.1", listener.getsockname()[1]
        accept_only(listener.fileno(), [caller.getsockname()[1]])
        caller.setblocking(False)
        assert caller.connect_ex(address) == errno.EINPROGRESS
        assert descriptors.waiting_at(listener.fileno()) == 0


def test_those_who_wait_to_be_accepted_are_counted(listener):
    callers = [socket.create_connection(listener.getsockname()) for _ in range(3)]
    assert descriptors.waiting_at(listener.fileno()) == 3
    listener.accept()[0].close()
    assert descriptors.waiting_at(listener.fileno()) == 2
    for each in callers:
        each.close()


def test_what_a_connection_that_is_cut_off_has_sent_is_read_by_nobody(listener):
    caller, callee = called(listener)
    with caller, callee:
        caller.sendall(b"junk")
        descriptors.cut_off(callee.fileno())
        with pytest.raises(ConnectionResetError):
            caller.recv(1)
        with pytest.raises(OSError, match=r"not connected|reset"):
            callee.recv(1)


def test_a_listener_that_is_stopped_leaves_a_descriptor_that_is_never_ready(listener):
    with select.epoll() as loop:
        loop.register(listener, select.EPOLLIN)
        descriptors.stop_listening(listener.fileno())
        assert loop.poll(0) == []
    assert os.readlink(f"/proc/self/fd/{listener.fileno()}") == os.devnull
    assert not os.get_inheritable(listener.fileno())


def test_nobody_reaches_a_port_at_which_was_stopped_to_listen(listener):
    address = listener.getsockname()
    descriptors.stop_listening(listener.fileno())
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(address, timeout=LATEST_S)
