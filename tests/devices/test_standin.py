"""The stand-in for an accelerator finds what is not ordered, and computes what the CPU computes.

The marked tests run together in a process whose accelerator it is. The others start processes that
die, fork, or have other variables.
"""

import contextlib
import copy
import io
import pickle
import re
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from support.deadlines import LATEST_S
from support.device import aside, standin
from support.device.families import FAMILIES
from torch import accelerator, nn
from torch.utils.checkpoint import checkpoint

D = "standin"


@pytest.fixture(autouse=True)
def nothing_remembered():
    """Each test begins with no violation, no count, the first device and the default streams."""
    if not aside.is_aside():
        yield
        return
    torch.manual_seed(0)
    standin.configure()
    standin.violations()
    streams = [accelerator.current_stream(each) for each in range(accelerator.device_count())]
    for stream in reversed(streams):
        accelerator.set_stream(stream)
    yield
    for stream in reversed(streams):
        accelerator.set_stream(stream)
    for each in range(accelerator.device_count()):
        accelerator.synchronize(each)
    assert standin.violations() == []


def found(pattern):
    """A block that raises a violation, with a message that matches, and leaves it to be told."""

    @contextlib.contextmanager
    def block():
        with pytest.raises(RuntimeError, match=pattern):
            yield
        assert any(re.search(pattern, each) for each in standin.violations())

    return block()


def script(body, **variables):
    """Run Python in a process that has the stand-in."""
    if reason := standin.why_not():
        pytest.skip(reason)
    aside.build()
    return subprocess.run(
        [sys.executable, "-c", body],
        env={**standin.environment(), **variables},
        capture_output=True,
        text=True,
        timeout=LATEST_S,
    )


# ---------------------------------------------------------------- missing waits
def a_stream_waits_for_another(wait):
    ours, theirs = torch.Stream(D), torch.Stream(D)
    x = torch.zeros(8, device=D)
    accelerator.synchronize()
    with theirs:
        x.add_(1)
    if wait:
        ours.wait_stream(theirs)
    with ours:
        y = x * 2
    accelerator.synchronize()
    return y


def the_host_waits_for_what_it_reads(wait):
    x = torch.ones(8, device=D)
    h = torch.zeros(8, pin_memory=True)
    h.copy_(x, non_blocking=True)
    if wait:
        accelerator.current_stream().synchronize()
    y = h * 2  # this one is not stopped, as it would not be with a real device
    accelerator.synchronize()
    return y


def the_host_waits_before_it_overwrites(wait):
    h = torch.full((8,), 2.0).pin_memory()
    x = h.to(D, non_blocking=True)
    event = torch.Event(D)
    event.record()
    if wait:
        event.synchronize()
    h.fill_(7.0)
    accelerator.synchronize()
    return x


def the_allocator_knows_the_other_stream(wait):
    other = torch.Stream(D)
    x = torch.ones(8, device=D)
    other.wait_stream(accelerator.current_stream())
    with other:
        y = x * 2
    if wait:
        x.record_stream(other)
    del x
    torch.full((8,), 9.0, device=D)
    accelerator.synchronize()
    return y


def the_default_stream_waits_too(wait):
    other = torch.Stream(D)
    with other:
        x = torch.ones(8, device=D)
    if wait:
        accelerator.current_stream().wait_stream(other)
    return x * 2


def an_event_is_recorded_after_the_work(wait):
    ours, theirs = torch.Stream(D), torch.Stream(D)
    event = torch.Event(D)
    x = torch.zeros(8, device=D)
    accelerator.synchronize()
    if not wait:
        event.record(theirs)
    with theirs:
        x.add_(2)
    if wait:
        event.record(theirs)
    ours.wait_event(event)
    with ours:
        y = x + 0
    accelerator.synchronize()
    return y


def a_write_waits_for_reads(wait):
    ours, theirs = torch.Stream(D), torch.Stream(D)
    x = torch.ones(8, device=D)
    accelerator.synchronize()
    with theirs:
        y = x * 2
    if wait:
        ours.wait_stream(theirs)
    with ours:
        x.fill_(5.0)
    accelerator.synchronize()
    return y


def a_device_waits_for_another(wait):
    x = torch.ones(8, device="standin:0")
    h = torch.zeros(8, pin_memory=True)
    h.copy_(x, non_blocking=True)
    event = torch.Event(D)
    event.record(accelerator.current_stream(0))
    there = torch.Stream("standin:1")
    if wait:
        there.wait_event(event)
    with there:
        y = h.to("standin:1", non_blocking=True) * 2
    accelerator.synchronize(0)
    accelerator.synchronize(1)
    return y


RACES = {
    a_stream_waits_for_another: "aten::mul on stream .* reads what aten::add_ on .* writes",
    the_host_waits_for_what_it_reads: "host has touched pinned memory that copy to .* writes",
    the_host_waits_before_it_overwrites: "host has touched pinned memory that copy from .* reads",
    the_allocator_knows_the_other_stream: "freed while aten::mul .* reads it: a record_stream",
    the_default_stream_waits_too: "aten::mul on stream .* reads what aten::fill_ on .* writes",
    an_event_is_recorded_after_the_work: "aten::add on .* reads what aten::add_ on .* writes",
    a_write_waits_for_reads: "aten::fill_ on stream .* writes what aten::mul on .* reads",
    a_device_waits_for_another: "copy from the host on stream .* of device 1 reads what copy to",
}


@pytest.mark.standin
@pytest.mark.parametrize("race", RACES, ids=lambda race: race.__name__)
def test_a_missing_wait_is_found_whatever_the_seed(race):
    for seed in range(3):
        standin.configure(seed=seed)
        assert race(wait=True).tolist() == [2.0] * 8
        assert standin.violations() == []
        with found(RACES[race]):
            race(wait=False)
        accelerator.synchronize()
        assert standin.violations() == []


@pytest.mark.standin
def test_pinned_memory_in_flight_is_not_given_away():
    """The allocator keeps it until its copies are done, so this is no mistake of the caller's."""
    for seed in range(8):
        standin.configure(seed=seed)
        h = torch.full((8,), 2.0).pin_memory()
        x = h.to(D, non_blocking=True)
        del h
        fresh = torch.full((8,), 3.0).pin_memory()
        accelerator.synchronize()
        assert x.tolist() == [2.0] * 8
        assert fresh.tolist() == [3.0] * 8


@pytest.mark.standin
def test_a_violation_can_be_noted_alone_and_the_check_turned_off():
    standin.configure(raises=False)
    a_stream_waits_for_another(wait=False)
    assert len(standin.violations()) == 1
    standin.configure(check=False)
    a_stream_waits_for_another(wait=False)
    assert standin.violations() == []


@pytest.mark.standin
def test_what_raises_has_not_run():
    ours, theirs = torch.Stream(D), torch.Stream(D)
    x = torch.ones(8, device=D)
    accelerator.synchronize()
    with theirs:
        x.mul_(2)
    with found("aten::mul_ on .* writes what aten::mul_ on .* writes"), ours:
        x.mul_(2)
    accelerator.synchronize()
    assert x.tolist() == [2.0] * 8


@pytest.mark.standin
def test_reads_of_several_streams_and_writes_beside_each_other_need_no_wait():
    streams = [torch.Stream(D) for _ in range(3)]
    x = torch.ones(9, device=D)
    accelerator.synchronize()
    for i, stream in enumerate(streams):
        with stream:
            x[3 * i : 3 * i + 3].add_(i)
    accelerator.synchronize()
    for stream in streams:
        with stream:
            assert x.sum().item() == 18


@pytest.mark.standin
def test_an_empty_slice_meets_nothing():
    stream = torch.Stream(D)
    x = torch.ones(8, device=D)
    with stream:
        (x[4:4] + 1).mul_(2)
    accelerator.synchronize()


@pytest.mark.standin
def test_every_reader_is_waited_for_and_not_only_the_last():
    first, second, writer = (torch.Stream(D) for _ in range(3))
    x = torch.ones(8, device=D)
    accelerator.synchronize()
    for reader in (first, second):
        with reader:
            x.sum()
    writer.wait_stream(second)
    with found("aten::fill_ on .* writes what aten::sum on .* reads"), writer:
        x.fill_(2.0)
    writer.wait_stream(first)
    with writer:
        x.fill_(2.0)


@pytest.mark.standin
def test_statistics_of_normalisation_are_written_in_training_alone():
    norm = nn.BatchNorm1d(3).to(D)
    ours, theirs = torch.Stream(D), torch.Stream(D)
    x, y = torch.ones(2, 3, device=D), torch.ones(2, 3, device=D)
    norm.eval()
    accelerator.synchronize()
    for stream in (ours, theirs):
        with stream:
            norm(x)
    accelerator.synchronize()
    norm.train().requires_grad_(False)
    norm.num_batches_tracked = None
    with theirs:
        norm(x)
    with found("native_batch_norm on .* writes what aten::native_batch_norm on .* writes"), ours:
        norm(y)


@pytest.mark.standin
def test_pages_of_pinned_memory_are_closed_singly():
    """What a copy does not touch is not in flight, and what it reads may be read."""
    h = torch.zeros(2048, pin_memory=True)  # two pages
    h[:1024].copy_(torch.ones(1024, device=D), non_blocking=True)
    h[1024:].fill_(2.0)
    x = h[1024:].to(D, non_blocking=True)
    assert h[1024:].sum() == 2048.0
    accelerator.synchronize()
    assert h.tolist() == [1.0] * 1024 + [2.0] * 1024
    assert x[0].item() == 2.0


@pytest.mark.standin
def test_an_order_is_passed_on():
    """A stream that waits for one that has waited for a third comes after that one too."""
    first, second, third = (torch.Stream(D) for _ in range(3))
    with first:
        x = torch.ones(8, device=D)
    second.wait_stream(first)
    third.wait_stream(second)
    with third:
        assert (x + 1).tolist() == [2.0] * 8


@pytest.mark.standin
def test_a_copy_between_devices_is_ordered_with_both():
    x = torch.ones(8, device="standin:0")
    y = (x * 2).to("standin:1")
    x.fill_(7.0)
    assert (y + 1).tolist() == [3.0] * 8
    assert (y.to("standin:0") + x).tolist() == [9.0] * 8


@pytest.mark.standin
def test_backward_runs_on_the_streams_of_forward():
    stream = torch.Stream(D)
    x = torch.ones(8, device=D, requires_grad=True)
    stream.wait_stream(accelerator.current_stream())
    with stream:
        loss = (x * x).sum()
    loss.backward()
    assert x.grad.tolist() == [2.0] * 8


@pytest.mark.standin
def test_a_query_orders_the_host_once_it_says_yes():
    seen = set()
    for seed in range(8):
        standin.configure(seed=seed)
        h = torch.zeros(8, pin_memory=True)
        h.copy_(torch.ones(8, device=D), non_blocking=True)
        event = torch.Event(D)
        event.record()
        denials = 0
        while not event.query():
            denials += 1
        seen.add(denials)
        assert h.tolist() == [1.0] * 8
        assert event.query()
    assert len(seen) > 1  # the seed has decided
    assert max(seen) <= 3


# ---------------------------------------------------------------- waits, counted and dropped
@pytest.mark.standin
def test_waits_of_the_host_are_counted_by_kind():
    x = torch.ones(8, device=D)
    event = accelerator.current_stream().record_event()
    standin.forget_waits()
    assert standin.waits() == dict.fromkeys(("event", "stream", "device", "item", "copy"), 0)
    event.synchronize()
    accelerator.current_stream().synchronize()
    accelerator.synchronize()
    assert standin.waits() == dict.fromkeys(("event", "stream", "device"), 1) | {
        "item": 0,
        "copy": 0,
    }
    standin.forget_waits()
    x.sum().item()
    x[x > 2]
    torch.equal(x, x)
    x.nonzero()
    float(x[0])
    assert standin.waits()["item"] == 5
    x.to("cpu")
    x.tolist()
    torch.ones(8).to(D)
    assert standin.waits()["copy"] == 3


@pytest.mark.standin
def test_what_does_not_wait_is_not_counted():
    x = torch.ones(8, device=D)
    h = torch.zeros(8, pin_memory=True)
    standin.forget_waits()
    h.copy_(x, non_blocking=True)
    torch.ones(8).to(D, non_blocking=True)
    x.to("standin:1")
    x[torch.tensor([1, 2], device=D)]  # copies its numbers
    accelerator.current_stream().record_event().query()
    torch.Stream(D).wait_stream(accelerator.current_stream())
    torch.histc(x, 4, 0, 1)
    accelerator.empty_cache()
    assert standin.waits() == {"event": 0, "stream": 0, "device": 0, "item": 0, "copy": 1}


DROPPED = {
    "event": lambda event, x: event.synchronize(),
    "stream": lambda event, x: accelerator.current_stream().synchronize(),
    "device": lambda event, x: accelerator.synchronize(),
    "item": lambda event, x: x[0].item(),
    "copy": lambda event, x: x.cpu(),
}


@pytest.mark.standin
@pytest.mark.parametrize("kind", DROPPED)
def test_a_dropped_wait_of_the_host_orders_nothing(kind):
    def touch(dropped):
        x = torch.ones(8, device=D)
        h = torch.zeros(8, pin_memory=True)
        h.copy_(x, non_blocking=True)
        event = accelerator.current_stream().record_event()
        if dropped:
            standin.ignore_next(kind)
        DROPPED[kind](event, x)
        h.add_(1)
        accelerator.synchronize()

    touch(dropped=False)
    with found("touched pinned memory"):
        touch(dropped=True)
    accelerator.synchronize()
    touch(dropped=False)  # only the next one was


@pytest.mark.standin
@pytest.mark.parametrize("kind", ["wait_event", "record_event", "record_stream"])
def test_a_dropped_wait_of_a_stream_orders_nothing(kind):
    race = (
        the_allocator_knows_the_other_stream
        if kind == "record_stream"
        else a_stream_waits_for_another
    )
    standin.ignore_next(kind)
    with found(RACES[race]):
        race(wait=True)
    accelerator.synchronize()
    race(wait=True)


@pytest.mark.standin
def test_a_wait_is_dropped_for_one_thread_alone():
    standin.ignore_next("wait_event")
    with ThreadPoolExecutor(1) as other:
        other.submit(a_stream_waits_for_another, wait=True).result(LATEST_S)
    with found("reads what"):
        a_stream_waits_for_another(wait=True)
    with pytest.raises(RuntimeError, match="no kind of wait called nap"):
        standin.ignore_next("nap")


def pipeline():
    """Two devices, each with a stream that computes and one that copies, and all that they need."""
    computing, sending = torch.Stream("standin:0"), torch.Stream("standin:0")
    receiving, using = torch.Stream("standin:1"), torch.Stream("standin:1")
    host = torch.empty(8, pin_memory=True)
    with computing:
        x = torch.ones(8, device="standin:0")
    sending.wait_stream(computing)
    with sending:
        host.copy_(x, non_blocking=True)
    sent = sending.record_event()
    x.record_stream(sending)
    del x
    with computing:
        torch.zeros(8, device="standin:0")
    receiving.wait_event(sent)
    with receiving:
        y = host.to("standin:1", non_blocking=True)
    using.wait_stream(receiving)
    with using:
        z = y * 2
    done = using.record_event()
    y.record_stream(using)
    del y
    with receiving:
        torch.zeros(8, device="standin:1")
    done.synchronize()
    host.fill_(7.0)
    return z.tolist()


NEEDED = {"record_event": 4, "wait_event": 3, "record_stream": 2, "event": 1}


@pytest.mark.standin
@pytest.mark.parametrize(
    ("kind", "after"), [(kind, i) for kind, times in NEEDED.items() for i in range(times)]
)
def test_no_wait_of_a_pipeline_can_be_dropped(kind, after):
    assert pipeline() == [2.0] * 8
    assert standin.violations() == []
    standin.ignore_next(kind, after=after)
    with pytest.raises(RuntimeError, match="standin: "):
        pipeline()
    for each in range(2):
        accelerator.synchronize(each)
    assert standin.violations()


# ---------------------------------------------------------------- memory
def test_memory_of_a_device_is_closed_to_the_host():
    done = script(
        "import ctypes, torch; x = torch.ones(8, device='standin'); ctypes.string_at(x.data_ptr())"
    )
    assert done.returncode == -signal.SIGSEGV, done.stderr
    assert "the host has touched memory of a device" in done.stderr


@pytest.mark.standin
def test_memory_that_is_not_written_is_poisoned():
    assert torch.empty(8, device=D).isnan().all()
    x = torch.ones(1000, device=D)
    address = x.data_ptr()
    del x
    again = torch.empty(1000, device=D)
    assert again.data_ptr() == address
    assert again.isnan().all()


@pytest.mark.standin
def test_the_allocator_reuses_in_the_order_of_streams():
    """Memory that one stream has freed is not given to another."""
    x = torch.ones(1000, device=D)
    address = x.data_ptr()
    del x
    with torch.Stream(D):
        assert torch.empty(1000, device=D).data_ptr() != address
    assert torch.empty(1000, device=D).data_ptr() == address


@pytest.mark.standin
def test_memory_is_counted():
    accelerator.empty_cache()
    before = accelerator.memory_allocated()
    free, total = accelerator.get_memory_info()
    accelerator.reset_peak_memory_stats()
    x = torch.ones(1 << 18, device=D)
    assert accelerator.memory_allocated() == before + (1 << 20)
    assert accelerator.get_memory_info() == (free - (1 << 20), total)
    del x
    assert accelerator.memory_allocated() == before
    assert accelerator.max_memory_allocated() == before + (1 << 20)
    assert accelerator.memory_stats()["allocated_bytes.all.current"] == before
    accelerator.empty_cache()
    assert accelerator.get_memory_info() == (free, total)
    accelerator.reset_peak_memory_stats()
    assert accelerator.max_memory_allocated() == before


def test_out_of_memory_is_the_error_of_torch_and_what_is_cached_is_given_back():
    done = script(
        """
import torch
assert torch.accelerator.device_count() == 3
with torch.Stream("standin"):
    x = torch.ones(8, device="standin")
assert (x + 1).tolist() == [2.0] * 8  # which is not checked
del x
torch.accelerator.synchronize()
take = lambda size, device: torch.empty(size, dtype=torch.uint8, device=device)
MB = 1 << 20
for device in ("standin:0", "standin:2"):
    for count in (6, 3):  # blocks of another size: what was freed is joined again
        kept = [take(6 * MB // count, device) for _ in range(count)]
        try:
            take(4 * MB, device)
        except torch.OutOfMemoryError as error:
            assert "Tried to allocate 4194304 bytes" in str(error)
        else:
            raise AssertionError
        del kept
    take(8 * MB, device)
try:
    torch.empty(1 << 60, dtype=torch.uint8, device="standin")
except torch.OutOfMemoryError:
    print("told")
""",
        STANDIN_DEVICES="3",
        STANDIN_MEMORY_MB="8",
        STANDIN_CHECK="0",
    )
    assert done.stdout == "told\n", done.stderr


@pytest.mark.standin
def test_storages_grow_shrink_and_move():
    x = torch.arange(6.0, device=D)
    x.resize_(8)
    assert x[:6].tolist() == list(range(6))
    x.untyped_storage().resize_(0)
    x.untyped_storage().resize_(32)
    x.data = torch.zeros(4, device=D)
    assert x.tolist() == [0.0] * 4
    out = torch.empty(0, device=D)
    assert torch.add(x, 1, out=out) is out
    assert out.tolist() == [1.0] * 4


# ---------------------------------------------------------------- processes
def test_every_process_has_it_and_none_is_initialised_by_that():
    done = script(
        """
import subprocess, sys, torch
assert torch.accelerator.current_accelerator() == torch.device("standin")
assert torch.accelerator.device_count() == torch.standin.device_count() == 2
assert torch.standin.is_available() and torch.accelerator.is_available()
torch.manual_seed(3)
assert torch.accelerator.memory_allocated() == 0
torch.accelerator.empty_cache()
assert not torch.standin.is_initialized()
assert torch.accelerator.current_device_index() == 0  # which is a first use, as with CUDA
assert torch.standin.is_initialized()
subprocess.run([sys.executable, "-c", "import torch; torch.ones(1, device='standin')"], check=True)
print("told")
"""
    )
    assert done.stdout == "told\n", done.stderr


def test_a_process_that_has_not_used_a_device_may_fork():
    done = script(
        """
import os, torch
child = os.fork()
if child == 0:
    x = torch.ones(8, device="standin:1", requires_grad=True)
    (x * 2).sum().backward()
    os._exit(int(x.grad.sum().item()))
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
torch.ones(1, device="standin")  # and may use it afterwards
"""
    )
    assert done.stdout == "16\n", done.stderr


def test_the_child_of_a_process_that_has_used_a_device_is_refused():
    done = script(
        """
import os, torch
x = torch.ones(8, device="standin")
read, write = os.pipe()
child = os.fork()
if child == 0:
    said = []
    for use in (
        lambda: torch.ones(1, device="standin"),
        lambda: x + 1,
        lambda: x.cpu(),
        lambda: torch.Stream("standin"),
        lambda: torch.ones(1).pin_memory(),
        lambda: torch.accelerator.current_stream().synchronize(),
    ):
        try:
            use()
            said.append("nothing")
        except RuntimeError as error:
            said.append(str(error).splitlines()[0])
    del x
    said.append(str(torch.standin._is_in_bad_fork()))
    torch.manual_seed(0)  # what does not need a device goes on
    os.write(write, "\\n".join(said).encode())
    os._exit(0)
os.waitpid(child, 0)
print(os.read(read, 10000).decode())
assert x.tolist() == [1.0] * 8
"""
    )
    *refused, bad = done.stdout.splitlines()
    assert bad == "True", done.stderr
    assert len(refused) == 6
    for each in refused:
        assert each.startswith("Cannot re-initialize standin in forked subprocess.")


def test_a_seed_replays():
    body = """
import torch
event = torch.Event("standin")
said = ""
for _ in range(20):
    torch.ones(1, device="standin")
    event.record()
    said += str([event.query() for _ in range(4)].index(True))
print(said)
"""
    first, again, other = (script(body, STANDIN_SEED=seed).stdout for seed in ("5", "5", "6"))
    assert len(first) == 21
    assert first == again != other


def test_processes_that_build_at_once_wait_for_one(tmp_path, monkeypatch):
    """Whoever comes second finds the library that the first has built."""
    from torch.utils import cpp_extension

    started, builds = threading.Event(), []

    def build(name, sources, build_directory, **options):
        builds.append(name)
        started.set()
        (standin.Path(build_directory) / f"{name}.so").write_text("built")

    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr(cpp_extension, "load", build)
    monkeypatch.setattr(standin, "why_not", lambda: None)
    built = standin.library()
    with ThreadPoolExecutor(3) as threads:
        for each in [threads.submit(standin._build, built) for _ in range(3)]:
            each.result(LATEST_S)
    assert builds == ["standin"]
    assert built.read_text() == "built"


def test_it_says_why_it_cannot_be_built(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr(torch, "__version__", f"{standin.TORCH}.0")
    assert standin.why_not() == "there is no compiler called no-such-compiler"
    with pytest.raises(RuntimeError, match="cannot be built: there is no compiler"):
        standin._build(standin.library())
    monkeypatch.setattr(torch, "__version__", "2.14.1")
    assert "written for torch 2.13, and this is 2.14.1" in standin.why_not()
    assert "2.14.1" in str(standin.library())


# ---------------------------------------------------------------- the faces
@pytest.mark.standin
def test_devices_and_streams_are_chosen_for_a_thread():
    accelerator.set_device_index(1)
    assert torch.ones(1, device=D).device.index == accelerator.current_device_index() == 1
    with ThreadPoolExecutor(1) as other:
        assert other.submit(accelerator.current_device_index).result(LATEST_S) == 0
    with accelerator.device_index(0):
        assert torch.standin.current_device() == 0
    with torch.standin.device("standin:0"):
        assert torch.standin.current_device() == 0
    torch.standin.set_device(0)
    stream = torch.Stream("standin:1")
    accelerator.set_stream(stream)
    assert accelerator.current_stream(1) == stream
    assert accelerator.current_device_index() == 1
    assert accelerator.current_stream(0) != stream
    with pytest.raises(RuntimeError, match="invalid device ordinal 2"):
        torch.ones(1, device="standin:2")


@pytest.mark.standin
def test_events_have_times_once_the_host_has_waited():
    begin, end = (torch.Event(D, enable_timing=True) for _ in range(2))
    begin.record()
    torch.ones(8, device=D)
    end.record()
    with pytest.raises(RuntimeError, match="must be completed"):
        begin.elapsed_time(end)
    end.synchronize()
    assert 0 < begin.elapsed_time(end) < LATEST_S * 1000
    with pytest.raises(RuntimeError, match="cannot be recorded on device 1"):
        begin.record(torch.Stream("standin:1"))
    assert torch.Event(D).query()  # never recorded: nothing to wait for


@pytest.mark.standin
def test_random_numbers_are_those_of_the_cpu():
    def draw(device):
        torch.manual_seed(7)
        ones = torch.ones(50, device=device)
        return [
            torch.rand(9, device=device),
            torch.randn(50, device=device),
            torch.randperm(9, device=device),
            F.dropout(ones, 0.1),
            F.dropout(torch.arange(50.0, device=device), 0.3, inplace=True),
            torch.multinomial(ones, 3),
        ]

    for ours, cpu in zip(draw("standin:1"), draw("cpu"), strict=True):
        assert torch.equal(ours.cpu(), cpu)


@pytest.mark.standin
def test_states_of_generators_are_kept_and_set():
    module = torch.get_device_module(D)
    state = module.get_rng_state(1)
    x = torch.rand(9, device="standin:1")
    module.set_rng_state(state, "standin:1")
    assert torch.equal(torch.rand(9, device="standin:1"), x)
    module.manual_seed_all(4)
    assert module.initial_seed() == 4
    with torch.random.fork_rng([0, 1], device_type=D):
        y = torch.rand(9, device=D)
    assert torch.equal(torch.rand(9, device=D), y)
    generator = torch.Generator("standin:1").manual_seed(4)
    module.manual_seed(4)
    x = torch.rand(9, device="standin:1", generator=generator)
    assert torch.equal(x.cpu(), torch.rand(9, device=D).cpu())


@pytest.mark.standin
@pytest.mark.parametrize("reentrant", [False, True])
def test_what_is_computed_again_draws_the_same_numbers(reentrant):
    x = torch.ones(100, device=D, requires_grad=True)
    y = checkpoint(F.dropout, x, 0.5, use_reentrant=reentrant)
    y.sum().backward()
    assert torch.equal(x.grad, y.detach())


@pytest.mark.standin
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_lowers_and_keeps_as_cuda_does(dtype):
    x = torch.randn(4, 4, device=D)
    with torch.autocast(D, dtype):
        y = F.linear(x, x)
        assert y.dtype == (x @ x).dtype == dtype
        assert F.softmax(y, -1).dtype == F.layer_norm(y, (4,)).dtype == torch.float32
        assert torch.cat([x, y]).dtype == torch.float32
    with torch.autocast("cpu", dtype):
        assert (x @ x).dtype == torch.float32


@pytest.mark.standin
def test_a_scaler_of_gradients_skips_what_is_infinite():
    scaler = torch.amp.GradScaler(D, init_scale=8.0)
    weight = nn.Parameter(torch.ones(3, device=D))
    optimizer = torch.optim.SGD([weight], 0.5)
    scaler.scale((weight * 2).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert weight.tolist() == [0.0] * 3
    weight.grad.fill_(float("inf"))
    scaler.step(optimizer)
    scaler.update()
    assert weight.tolist() == [0.0] * 3
    assert scaler.get_scale() == 4.0


@pytest.mark.standin
def test_tensors_are_saved_and_pickled_with_their_device():
    x = torch.arange(6.0, device="standin:1")

    def load(**options):
        file = io.BytesIO()
        torch.save({"all": x, "part": x[2:]}, file)
        file.seek(0)
        return torch.load(file, **options)

    same = load()
    assert same["part"].untyped_storage().data_ptr() == same["all"].untyped_storage().data_ptr()
    assert same["part"].tolist() == [2.0, 3.0, 4.0, 5.0]
    for where, device in (("cpu", "cpu"), ("standin:0", "standin:0"), (None, "standin:1")):
        assert load(map_location=where)["all"].device == torch.device(device)
    weight = pickle.loads(pickle.dumps(nn.Parameter(x)))
    assert isinstance(weight, nn.Parameter)
    assert weight.device == copy.deepcopy(x).device == x.device
    assert weight.tolist() == x.tolist()


@pytest.mark.standin
def test_a_module_moves_with_its_ties_and_its_gradients():
    """As with CUDA its parameters stay the same objects, so an optimizer still has them."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    weight = model[1].weight = model[0].weight
    for device in (D, "cpu", "standin:1"):
        model.to(device)
        assert model[0].weight is model[1].weight is weight
        model(torch.ones(1, 3, device=device)).sum().backward()
        assert weight.device.type == weight.grad.device.type == torch.device(device).type


@pytest.mark.standin
def test_tensors_of_two_devices_do_not_meet():
    x = torch.ones(2, 2, device=D)
    for other in (torch.ones(2, 2), torch.ones(2, 2, device="standin:1")):
        for meet in (torch.matmul, torch.add, F.linear):
            with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
                meet(x, other)
            with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
                meet(other, x)
    assert (x + torch.tensor(2.0))[torch.tensor([0])].tolist() == [[3.0, 3.0]]  # as with CUDA


# ---------------------------------------------------------------- the bits of the CPU
def some(*shape):
    """Numbers that are the same everywhere."""
    return torch.arange(float(torch.Size(shape).numel())).mul(0.7).sin().reshape(shape)


def at(device, *tensors):
    return [each.to(device) for each in tensors]


INDEX = torch.tensor([2, 0, 1])

OPERATIONS = {
    "attention": lambda d: F.scaled_dot_product_attention(*at(d, *[some(2, 3, 5, 8)] * 3)),
    "attention_with_dropout": lambda d: F.scaled_dot_product_attention(
        *at(d, *[some(2, 3, 5, 8)] * 3), is_causal=True, dropout_p=0.2
    ),
    "convolution": lambda d: F.conv2d(*at(d, some(2, 3, 8, 8), some(4, 3, 3, 3), some(4))),
    "convolution_transposed": lambda d: F.conv_transpose1d(*at(d, some(2, 3, 8), some(3, 4, 3))),
    "batch_norm": lambda d: F.batch_norm(some(2, 3, 4).to(d), None, None, training=True),
    "layer_norm": lambda d: F.layer_norm(some(5, 4).to(d), (4,)),
    "embedding": lambda d: F.embedding(*at(d, INDEX, some(5, 4))),
    "cross_entropy": lambda d: F.cross_entropy(*at(d, some(3, 4), INDEX)),
    "index_put": lambda d: some(5, 5).to(d).index_put((INDEX.to(d),), torch.ones(5).to(d)),
    "mask": lambda d: some(9).to(d)[some(9).to(d) > 0],
    "scatter": lambda d: some(3, 3).to(d).scatter_add(0, *at(d, INDEX[None], some(1, 3))),
    "sort": lambda d: torch.stack([some(9).to(d).sort()[0], some(9).to(d).topk(9)[0]]),
    "histc": lambda d: torch.histc(some(9).to(d), 4) + torch.bincount(INDEX.to(d), minlength=4),
    "one_hot": lambda d: F.one_hot(INDEX.to(d)),
    "complex": lambda d: torch.view_as_complex(some(4, 2).to(d)).conj().imag + 1,
    "fft": lambda d: torch.fft.irfft(torch.fft.rfft(some(8).to(d)) * 2),
    "svd": lambda d: torch.linalg.svdvals(some(3, 3).to(d)),
    "pool": lambda d: F.max_pool2d(some(1, 2, 8, 8).to(d), 2),
    "cast": lambda d: some(9).to(d).to(torch.bfloat16).float(),
}


@pytest.mark.standin
@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_has_the_bits_of_the_cpu(name):
    torch.manual_seed(3)
    cpu = OPERATIONS[name]("cpu")
    torch.manual_seed(3)
    ours = OPERATIONS[name]("standin:1")
    assert ours.device == torch.device("standin:1")
    assert torch.equal(ours.cpu(), cpu)


@pytest.mark.standin
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_are_close(kind):
    """On the CPU torch computes the gates of all steps at once, so the last bits differ."""
    layer = kind(4, 6, 2, bidirectional=True)
    copied = copy.deepcopy(layer).to(D)
    layer(some(5, 2, 4))[0].sum().backward()
    copied(some(5, 2, 4).to(D))[0].sum().backward()
    for ours, cpu in zip(copied.parameters(), layer.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.cpu(), cpu.grad)


def trained(make, device, **options):
    """The losses and weights of three steps."""
    torch.manual_seed(0)
    model, batch = make()
    model.train().to(device)
    batch = {name: each.to(device) for name, each in batch.items()}
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, **options)
    torch.manual_seed(1)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses, {name: each.cpu() for name, each in model.state_dict().items()}


def assert_same_training(make, **options):
    losses, weights = trained(make, "standin:1", **options)
    losses_of_cpu, weights_of_cpu = trained(make, "cpu", **options)
    assert losses == losses_of_cpu
    for name, each in weights_of_cpu.items():
        assert torch.equal(weights[name], each), name


@pytest.mark.standin
@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_trains_as_on_the_cpu(family):
    """Also where weights are tied, and where there is dropout."""
    assert_same_training(FAMILIES[family])


@pytest.mark.standin
@pytest.mark.parametrize("how", ["foreach", "fused"])
@pytest.mark.parametrize("chosen", [True, False])
def test_every_kind_of_adamw_has_the_bits_of_the_cpu(how, chosen):
    assert_same_training(FAMILIES["llama"], **{how: chosen})


# ---------------------------------------------------------------- threads
@pytest.mark.standin
def test_a_kernel_runs_outside_the_lock_and_who_has_waited_for_it_comes_after_it():
    """A kernel that is held, by a gate, holds up whoever is ordered after it, and nobody else."""
    started, gate = threading.Event(), threading.Event()

    def held(x):
        started.set()
        assert gate.wait(LATEST_S)
        x.fill_(3.0)

    with torch.library._scoped_library("standin_test", "FRAGMENT") as library:
        library.define("held(Tensor(a!) x) -> ()")
        library.impl("held", held, "CPU")
        x = torch.zeros(8, device=D)
        accelerator.synchronize()
        with ThreadPoolExecutor(2) as threads:

            def write(stream):
                with stream:
                    torch.ops.standin_test.held(x)

            def read(stream):
                with stream:
                    return (x + 1).tolist()

            ours, theirs = torch.Stream(D), torch.Stream(D)
            try:
                writing = threads.submit(write, theirs)
                assert started.wait(LATEST_S)
                ours.wait_stream(theirs)
                event = theirs.record_event()
                reading = threads.submit(read, ours)
                with torch.Stream(D):
                    assert (torch.ones(8, device=D) + 1).tolist() == [2.0] * 8
                assert not any(event.query() or theirs.query() for _ in range(8))
                assert not reading.done()
            finally:
                gate.set()
            writing.result(LATEST_S)
            assert reading.result(LATEST_S) == [4.0] * 8


@pytest.mark.standin
def test_threads_on_two_devices_compute_what_one_computes():
    def work(number, device):
        stream = torch.Stream(device)
        x = some(16, 16)
        with stream:
            y = x.to(device, non_blocking=True)
            for _ in range(30):
                y = (y @ y).tanh() + number
                host = torch.empty(16, 16, pin_memory=True)
                host.copy_(y, non_blocking=True)
                stream.record_event().synchronize()
                y = host.to(device, non_blocking=True)
            stream.synchronize()
            return y.cpu()

    def expected(number):
        y = some(16, 16)
        for _ in range(30):
            y = (y @ y).tanh() + number
        return y

    with ThreadPoolExecutor(6) as threads:
        for number, result in enumerate(
            [threads.submit(work, number, f"standin:{number % 2}") for number in range(6)]
        ):
            assert torch.equal(result.result(LATEST_S), expected(number))
