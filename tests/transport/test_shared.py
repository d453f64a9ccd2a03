"""Values in memory that two processes share: they come whole, slots come back, nothing is left."""

import fcntl
import gc
import os
import secrets
import signal
import subprocess
import threading
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from support import forked
from support.inside import kill, pids
from support.nodes import COMMAND
from support.oracle import assert_same
from support.pinned import Pipeline
from support.ports import free_port
from torch import nn

from pipedream_rt import Checkpoints, Recovery
from pipedream_rt.errors import TransportError
from pipedream_rt.messages.wire import bytes_of, described
from pipedream_rt.transport import shared
from pipedream_rt.transport.shared import SMALLEST, ReceiveBlock, SendBlock

COUNT = SMALLEST // 4  # numbers of the smallest tensor that is shared


def put(slots, tensor):
    at = slots.take(bytes_of(tensor).nbytes)
    if at is not None:
        slots.fill(at[0], bytes_of(tensor))
    return at and [*described(tensor), *at]


@pytest.fixture
def block():
    slots = SendBlock(room=1 << 20)
    yield slots, ReceiveBlock(os.dup(slots.fd))
    slots.close()


@pytest.mark.parametrize(
    "tensor",
    [
        torch.rand(COUNT), torch.rand(300, 400).T, torch.rand(3, 5, 7, 11).to(torch.bfloat16),
        torch.randint(99, (70_001,)), torch.rand(1000) > 0.5, torch.rand(40_000, 3)[:, 1],
        torch.tensor(3.0), torch.view_as_complex(torch.rand(999, 2)),
    ],
    ids=lambda t: f"{t.dtype}{tuple(t.shape)}",
)  # fmt: skip
def test_a_tensor_comes_as_it_was(block, tensor):
    slots, views = block
    found = views.tensor(put(slots, tensor))
    assert torch.equal(found, tensor)
    assert (found.dtype, found.stride()) == (tensor.dtype, tensor.stride())
    assert found.untyped_storage().nbytes() <= bytes_of(tensor).nbytes


def test_a_slot_comes_back_with_the_last_tensor_over_it(block):
    slots, views = block
    weight = torch.rand(1, requires_grad=True)
    first = put(slots, torch.rand(COUNT))
    x = views.tensor(first)
    loss = (x * weight).sum()  # which keeps x for its backward
    part = x.view(2, -1)[1]
    del x
    gc.collect()
    assert put(slots, torch.rand(COUNT))[3:] != first[3:]
    del part
    loss.backward()
    del loss
    gc.collect()
    assert put(slots, torch.rand(COUNT))[3:] == first[3:]


def test_what_the_receiver_changes_in_place_stays_its_own(block):
    slots, views = block
    one = views.tensor(put(slots, torch.zeros(COUNT)))
    other = views.tensor(put(slots, torch.zeros(COUNT)))
    one += 1
    assert not other.any()
    assert one.all()


def test_without_room_there_is_no_slot_and_with_room_again_there_is(block):
    slots, views = block
    kept = [
        views.tensor(put(slots, torch.full((COUNT,), float(i))))
        for i in range((1 << 20) // SMALLEST)
    ]
    assert put(slots, torch.rand(COUNT)) is None
    assert [int(t[0]) for t in kept] == list(range(len(kept)))
    del kept[3]
    gc.collect()
    kept.append(views.tensor(put(slots, torch.rand(COUNT))))
    kept.clear()
    gc.collect()
    # The slots were of another size, and all of them are free.
    views.tensor(put(slots, torch.rand(COUNT)))
    gc.collect()
    assert put(slots, torch.rand(5 * COUNT)) is not None


def test_a_forked_child_gives_nothing_back(block):
    slots, views = block
    about = put(slots, torch.rand(COUNT))
    tensor = views.tensor(about)
    child = os.fork()
    if not child:
        try:
            del tensor
            gc.collect()
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert put(slots, torch.rand(COUNT))[3:] != about[3:]
    assert tensor is not None


def test_a_block_that_could_be_made_shorter_is_refused():
    fd = os.memfd_create("short")
    os.ftruncate(fd, 1 << 20)
    with pytest.raises(TransportError, match="final size"):
        ReceiveBlock(fd)
    gc.collect()


@pytest.mark.parametrize("size", [0, 1, shared._FIRST, shared._FIRST + 4 * COUNT - 1])
def test_a_block_that_is_shorter_than_what_is_said_to_lie_in_it_is_refused(block, size):
    """A look behind its end would kill the process (SIGBUS)."""
    about = put(block[0], torch.rand(COUNT))
    fd = os.memfd_create("short", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    views = ReceiveBlock(fd)
    with pytest.raises(TransportError, match=r"no slot of .* at "):
        views.tensor(about)
    views.close()


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({3: "0"}, "plain integers, not str, int, int"),
        ({3: shared._MOST_SLOTS}, "no slot 4096"),
        ({4: 0}, "no slot of 131072 bytes at 0: slots lie between"),
        ({4: shared._FIRST + 1}, "slots begin at multiples of"),
        ({1: [0]}, "positive lengths"),
        ({1: [1, COUNT], 2: [-1, 1]}, "negative strides"),
        ({3: -1}, "no slot -1"),
        ({4: 1}, "at 1: slots lie between"),
        ({4: 1 << 40}, "slots lie between"),
        ({1: [1 << 20]}, "no slot of 4194304 bytes"),
        ({1: [-1]}, "no slot of -4 bytes"),
        ({2: [-1]}, "no slot of -131064 bytes"),
        ({0: "float3"}, "float3"),
        ({1: [2, 2]}, "zip"),
        ({1: [1.5]}, "plain integers, not int, int, float"),
    ],
    ids=str,
)
def test_a_slot_that_is_described_wrongly_is_refused(block, changed, words):
    sends, receives = block
    about = list(put(sends, torch.rand(COUNT)))
    for place, value in changed.items():
        about[place] = value
    with pytest.raises((TransportError, ValueError, KeyError), match=words):
        receives.tensor(about)


def used(slots):
    """The bytes of memory that a block takes."""
    return os.fstat(slots.fd).st_blocks * 512


def test_sizes_that_are_wanted_no_more_give_their_memory_up():
    slots = SendBlock(room=1 << 26)
    views = ReceiveBlock(os.dup(slots.fd))
    kept = views.tensor(put(slots, torch.ones(COUNT)))
    for size in (1, 3, 7, 15):  # MiB, each for a while, several at a time
        several = [views.tensor(put(slots, torch.rand(size << 18))) for _ in range(3)]
        assert all(each is not None for each in several)
        del several
        gc.collect()
    last = views.tensor(put(slots, torch.rand(60 << 18)))  # there is room for nothing else
    assert used(slots) <= (61 << 20)
    assert kept.all()
    assert len(last) == 60 << 18
    slots.close()
    views.close()


# -- pipelines ----------------------------------------------------------------------------------

WIDTH, ROWS = 256, SMALLEST // 256 // 4 * 2


class Twice(nn.Module):
    """Changes its input in place, which lies in shared memory."""

    def forward(self, x):
        return x.mul_(2.0) if not x.requires_grad else x * 2.0


def model():
    torch.manual_seed(0)
    return nn.Sequential(
        Twice(), nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH),
        nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 4),
    )  # fmt: skip


def batches(count=12):
    draw = torch.Generator().manual_seed(1)
    for _ in range(count):
        yield torch.randn(ROWS, WIDTH, generator=draw), torch.randn(ROWS, 4, generator=draw)


def trained(disturb=lambda pipe: None, at=5, stages=4, **options):
    losses = []
    with Pipeline(
        model(), stages=stages, loss_fn=F.mse_loss, optimizer=(torch.optim.SGD, {"lr": 0.01}),
        micro_batches=1, **options,
    ) as pipe:  # fmt: skip
        for result in pipe.train_epoch(batches()):
            losses.append(result.loss)
            if result.step == at:
                disturb(pipe)
        return losses, pipe.state_dict()


def require_same(found, expected):
    assert found[0] == expected[0]
    assert_same(found[1], expected[1])


@pytest.fixture(scope="module")
def expected():
    return trained(workers="serial")


@pytest.mark.processes
def test_without_it_the_bits_are_those_of_one_process(expected, monkeypatch):
    monkeypatch.setenv("PIPEDREAM_RT_SHARED_MEMORY", "off")
    require_same(trained(), expected)


def maps(pid):
    """How many pieces of a block a process has in its memory."""
    return Path(f"/proc/{pid}/maps").read_text().count("/memfd:pipedream-rt")


@pytest.mark.thinned(2)
@pytest.mark.processes
@pytest.mark.parametrize("said", ["", "off"])
def test_workers_that_were_started_elsewhere_on_this_machine_share_too(monkeypatch, said):
    """They have met at their Unix sockets; one is killed and started again, and they meet anew."""
    expected = trained(stages=2, workers="serial")
    monkeypatch.setenv("PIPEDREAM_RT_SECRET", secrets.token_hex(32))
    monkeypatch.setenv("PIPEDREAM_RT_SHARED_MEMORY", said)
    address, environment = f"127.0.0.1:{free_port()}", dict(os.environ)  # a pipeline clears it

    with ExitStack() as opened:

        def start(name):
            command = [*COMMAND, "worker", address, "--name", name, "--persist"]
            worker = forked.Popen(command, stderr=subprocess.DEVNULL, env=environment)
            opened.callback(worker.wait)
            opened.callback(worker.kill)
            return worker

        workers = {name: start(name) for name in "ab"}
        told, before = [], []

        def disturb(pipe):
            told.append(pipe.explain())
            before.extend(maps(worker.pid) for worker in workers.values())
            workers["b"].kill()
            start("b")

        found = trained(disturb, stages=2, workers=address, recovery=Recovery(max_restarts=1))
    require_same(found, expected)
    assert ("in memory that both share" in told[0]) is not bool(said)
    assert all(before) is not bool(said)


@pytest.mark.processes
@pytest.mark.parametrize("victim", ["worker-0", "worker-1", "worker-3"])
def test_a_death_changes_no_bit_and_leaves_no_memory(expected, tmp_path, victim):
    found = trained(
        lambda pipe: kill(pipe, victim),
        checkpoint=Checkpoints(tmp_path, every=4),
        recovery=Recovery(max_restarts=1),
    )
    require_same(found, expected)
    named = [name for name in os.listdir("/dev/shm") if "pipedream" in name]
    assert named == []


@pytest.mark.processes
def test_a_reader_that_stands_still_for_a_while_loses_nothing(expected):
    timers = []

    def stop(pipe):
        worker = pids(pipe)["worker-2"]
        os.kill(worker, signal.SIGSTOP)
        timers.append(threading.Timer(1.0, os.kill, (worker, signal.SIGCONT)))
        timers[0].start()

    found = trained(stop)
    timers[0].join()
    require_same(found, expected)
