"""The shared memory of a link: its descriptor comes along, and without it values go by socket."""

import gc
import os
import socket

import pytest
import torch

from pipedream_rt.errors import TransportError
from pipedream_rt.transport import shared
from pipedream_rt.transport.link import Link
from pipedream_rt.transport.shared import SMALLEST
from pipedream_rt.transport.sharing import SharedEnd

COUNT = SMALLEST // 4  # numbers of the smallest tensor that is shared


@pytest.fixture
def pair(linked):
    return linked(sharing=(SharedEnd(True), SharedEnd(True)))


def exchanged(left, right, tensors, passing=True):
    came = []
    left.send(0, b"x", tensors, passing)
    while not came:
        left.flush()
        right.receive(came.append)
    return came[0].tensors


def bytes_over_the_socket(monkeypatch):
    """Counts what is written to sockets."""
    counted = [0]
    plain = Link._write

    def write(link):
        counted[0] += sum(part.nbytes for part in link._queue)
        return plain(link)

    monkeypatch.setattr(Link, "_write", write)
    return counted


def test_large_tensors_go_beside_the_socket_and_small_ones_over_it(pair, monkeypatch):
    left, right = pair
    counted = bytes_over_the_socket(monkeypatch)
    sent = [torch.rand(7), torch.rand(COUNT), torch.rand(0), torch.rand(4 * COUNT)]
    for _ in range(3):
        for one, other in ((left, right), (right, left)):
            found = exchanged(one, other, sent)
            assert all(map(torch.equal, found, sent))
    assert counted[0] < SMALLEST
    exchanged(left, right, sent, passing=False)  # what stays with the receiver
    assert counted[0] > 5 * SMALLEST


def test_descriptors_are_gone_with_the_link(linked):
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    left, right = linked(sharing=(SharedEnd(True), SharedEnd(True)))
    (kept,) = exchanged(left, right, [torch.ones(COUNT)])
    exchanged(right, left, [torch.ones(COUNT)])
    left.close()
    right.close()
    assert kept.all()  # its memory is there as long as it is
    del kept
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


def test_descriptors_that_have_come_and_were_not_asked_for_are_gone_with_the_link():
    before = len(os.listdir("/proc/self/fd"))
    end, (here, there) = SharedEnd(True), socket.socketpair()
    with here, there:
        socket.send_fds(here, [b"x"], [here.fileno()] * 2)
        assert end.receive(there, memoryview(bytearray(9))) == 1
        assert len(os.listdir("/proc/self/fd")) == before + 4
        end.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_descriptor_in_the_middle_of_what_waits_comes_along(pair):
    left, right = pair
    tensors = [torch.rand(1 << 20) for _ in range(3)]
    came = []
    for number, tensor in enumerate(tensors):
        left.send(0, b"", [tensor], passing=number > 0)
    while len(came) < 3:
        left.flush()
        right.receive(came.append)
    assert all(torch.equal(frame.tensors[0], tensor) for frame, tensor in zip(came, tensors))


@pytest.mark.parametrize("name", ["memfd_create", "ftruncate", "posix_fallocate"])
def test_without_memory_to_share_values_go_over_the_socket(pair, monkeypatch, name):
    def fail(*arguments):
        raise OSError(24, "too many")

    monkeypatch.setattr(shared.os, name, fail)
    left, right = pair
    sent = [torch.rand(COUNT)]
    assert torch.equal(exchanged(left, right, sent)[0], sent[0])
    monkeypatch.undo()
    assert torch.equal(exchanged(right, left, sent)[0], sent[0])  # the other end may still


def test_a_peer_that_names_memory_that_it_has_not_given_is_refused(pair):
    left, right = pair
    left.send(254, b"", [])
    with pytest.raises(TransportError, match="has not come"):
        right.receive(print)


def test_memory_that_cannot_be_mapped_here_goes_over_the_socket(pair, monkeypatch):
    """As where the address space is limited."""
    plain = shared._mapped

    def mapped(fd, begin, length, *, forks):
        if begin:
            raise OSError(12, "no memory")
        return plain(fd, begin, length, forks=forks)

    left, right = pair
    monkeypatch.setattr(shared, "_mapped", mapped)
    sent = [torch.rand(COUNT)]
    assert torch.equal(exchanged(left, right, sent)[0], sent[0])


def test_an_end_that_gives_no_memory_takes_some(linked):
    left, right = linked(sharing=(SharedEnd(True), SharedEnd(False)))
    sent = [torch.rand(COUNT)]
    for one, other in ((left, right), (right, left)):
        assert torch.equal(exchanged(one, other, sent)[0], sent[0])


def test_a_default_device_is_not_that_of_what_comes(pair):
    left, right = pair
    sent = [torch.rand(COUNT)]
    with torch.device("meta"):
        (found,) = exchanged(left, right, sent)
    assert torch.equal(found, sent[0])
