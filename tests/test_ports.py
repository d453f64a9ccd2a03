"""A port that a test was given is nobody else's."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest
from support.ports import EACH, Ports, free_port, free_ports


def test_a_port_at_which_anybody_listens_is_passed_over():
    first = free_ports(5)
    ports = Ports(range(first, first + 5))
    with socket.create_server(("127.0.0.1", first + 1)):
        given = [ports.free(1) for _ in range(5)]
    assert [port - first for port in given] == [0, 2, 3, 4, 0]
    assert ports.free(1) == first + 1


def test_ports_in_a_row_are_given_once():
    first = free_ports(5)
    ports = Ports(range(first, first + 5))
    assert [ports.free(count) - first for count in (1, 2, 1)] == [0, 1, 3]
    assert ports.free(3) == first  # one was left at the end
    with pytest.raises(RuntimeError, match="no 6 free ports in a row"):
        ports.free(6)


def test_another_process_has_others():
    program = "from support.ports import free_port; print(free_port())"
    command = [sys.executable, "-c", program]
    said = subprocess.check_output(command, cwd=Path(__file__).parent, text=True)
    assert int(said) // EACH != free_port() // EACH
