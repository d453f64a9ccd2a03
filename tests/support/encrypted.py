"""Encrypted connections whose ends have shaken hands, with nothing between them but a socket."""

import socket

import torch

from pipedream_rt.cluster.identity import Secret
from pipedream_rt.transport.link import Connection, Link
from pipedream_rt.transport.tls import TlsEngine

SECRET, OTHER = Secret("5e" * 32), Secret("07" * 32)


def shaken(caller=SECRET, called=SECRET):
    """The engines of the end that calls, and of the one that is called."""
    ends = TlsEngine(caller.tls(called=False), False), TlsEngine(called.tls(called=True), True)
    shake_hands(*ends)
    return ends


def shake_hands(caller, called):
    """Carry what two engines say to each other until both are done."""
    done = [False, False]
    while not all(done):
        done[0] = caller.shake_hands()
        called.take(caller.sealed())
        done[1] = called.shake_hands()
        caller.take(called.sealed())


def encrypted_pair(ends=None):
    """The two ends of an encrypted connection, over a given pair of sockets."""
    ends = ends or socket.socketpair()
    return tuple(map(Connection, ends, shaken()))


def tcp_pair(buffer=None):
    """Two sockets that are connected by TCP, with buffers of so many bytes."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        caller = socket.create_connection(listener.getsockname())
        ends = caller, listener.accept()[0]
    if buffer is not None:
        for end in ends:
            for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
                end.setsockopt(socket.SOL_SOCKET, option, buffer)
    return ends


def sealed_frames(count):
    """The encrypted bytes of each of some frames, and the engine that can decrypt them."""
    caller, called = shaken()
    ends = socket.socketpair()
    link = Link(Connection(ends[0], caller))
    with ends[1]:
        sent = []
        for number in range(count):
            assert link.send(number, b"hello", [torch.full((2,), float(number))])
            sent.append(ends[1].recv(1 << 16))
        link.close()
    return sent, called
