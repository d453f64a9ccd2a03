import errno
import socket
import types
from contextlib import ExitStack

import pytest
from support.callers import soon
from support.ports import free_port

from pipedream_rt.cluster import addresses
from pipedream_rt.cluster.addresses import (
    PortTaken,
    boot_id,
    host_to_listen_at,
    interface_of,
    interface_towards,
    is_here,
    listening,
    listening_in_time,
    parse_address,
    resolved,
)
from pipedream_rt.errors import ConfigError

ELSEWHERE = "192.0.2.1"


def test_an_address_is_host_and_port():
    assert parse_address("127.0.0.1:29500") == ("127.0.0.1", 29500)
    assert parse_address("[::1]:80") == ("::1", 80)


@pytest.mark.parametrize(
    "text",
    ["", "host", "host:", ":80", "::1:80", "host:http", "host:99999", "host:" + "1" * 5000],
    ids=lambda text: text[:12],
)
def test_another_text_is_refused_with_the_form_that_is_wanted(text):
    with pytest.raises(ConfigError, match="write HOST:PORT"):
        parse_address(text)


@pytest.mark.parametrize("host", ["a..b", "a" * 70 + ".com", ".", "\u00e9..x"])
def test_what_can_be_the_name_of_no_host_is_refused(host):
    """Python raises an error of its own for these, where others are merely unknown."""
    with pytest.raises(ConfigError, match="can be the name of no host"):
        parse_address(f"{host}:80")
    with pytest.raises(OSError, match=r"idna|label|unknown|not known"):
        resolved(host, 80)
    with pytest.raises(ConfigError, match="cannot listen at"), listening(host, 0):
        pass
    assert not is_here(host)


def test_the_interface_of_an_address_and_the_one_by_which_it_is_reached():
    assert interface_of("127.0.0.1") == interface_towards("127.0.0.1:29500") == "lo"
    with pytest.raises(ConfigError, match="no network interface"):
        interface_of(ELSEWHERE)
    with pytest.raises(ConfigError, match=r"no such host\.invalid:1 cannot be reached from here"):
        interface_towards("no such host.invalid:1")


def test_a_listener_is_closed_at_the_end_of_its_block():
    with listening("127.0.0.1", 0) as listener:
        address = listener.getsockname()
        socket.create_connection(address, timeout=5).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(address, timeout=5)


def test_why_a_machine_cannot_listen_at_an_address(monkeypatch):
    def taken(*args, **kwargs):
        raise OSError(errno.EADDRINUSE, "Address already in use")

    def listen(host, port):
        with listening(host, port):
            pass

    with pytest.raises(ConfigError, match=r"cannot listen at 192\.0\.2\.1:0: "):
        listen(ELSEWHERE, 0)
    monkeypatch.setattr(socket, "create_server", taken)
    with pytest.raises(ConfigError, match=r"every port .* is taken .*ip_local_port_range"):
        listen("127.0.0.1", 0)
    with pytest.raises(ConfigError, match=r"already in use$"):
        listen("127.0.0.1", 29500)


def test_a_port_that_another_process_frees_in_time_is_waited_for(monkeypatch):
    port, waits = free_port(), []
    with ExitStack() as others:
        others.enter_context(socket.create_server(("127.0.0.1", port)))

        def wait(seconds):
            waits.append(seconds)
            if len(waits) == 3:
                others.close()

        event = types.SimpleNamespace(Event=lambda: types.SimpleNamespace(wait=wait))
        monkeypatch.setattr(addresses, "threading", event)
        with listening_in_time("127.0.0.1", port, soon()) as listener:
            assert listener.getsockname() == ("127.0.0.1", port)
            with (
                pytest.raises(PortTaken, match="already in use"),
                listening_in_time("127.0.0.1", port, soon(0)),
            ):
                pass
    assert len(waits) == 3


def test_where_a_machine_listens_that_others_know_by_a_name():
    assert host_to_listen_at("127.0.0.1", alone=False) == "127.0.0.1"  # the user says so
    assert host_to_listen_at("192.0.2.7", alone=False) == "192.0.2.7"
    assert host_to_listen_at("localhost", alone=False) in ("0.0.0.0", "::")
    assert host_to_listen_at("localhost", alone=True) in ("127.0.0.1", "::1")
    assert host_to_listen_at("no such host.invalid", alone=True) == "0.0.0.0"


def test_which_names_stand_for_this_machine():
    assert all(map(is_here, ("localhost", socket.gethostname(), "127.0.0.1")))
    assert not any(map(is_here, (ELSEWHERE, "no such host.invalid")))
    assert boot_id() == boot_id()
