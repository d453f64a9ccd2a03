"""The stand-in for an accelerator finds what is not ordered, and computes what the CPU computes."""

import contextlib
import copy
import io
import pickle
import re
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from support import forked
from support.deadlines import LATEST_S
from support.device import aside, standin
from support.device.families import FAMILIES
from torch import accelerator, nn
from torch.utils.checkpoint import checkpoint

pytestmark = pytest.mark.standin

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
    synchronize()


def synchronize():
    for each in range(accelerator.device_count()):
        accelerator.synchronize(each)


@contextlib.contextmanager
def found(pattern):
    """A block that raises a violation, with a message that matches, and leaves it to be told."""
    with pytest.raises(RuntimeError, match=f"standin: .*(?:{pattern})"):
        yield
    assert any(re.search(pattern, each) for each in standin.violations())


def child(body):
    """Run Python in a process that another one with the stand-in, which has not used it, forks."""
    return forked.run(
        [sys.executable, "-c", body], capture_output=True, text=True, timeout=LATEST_S
    )


# ---------------------------------------------------------------- missing waits
TRIED = """
a stream waits for another
    theirs: x.add_(1)
    ? ours.wait_stream(theirs)
    ours: y = x * 1
    ! aten::mul on stream .* reads what aten::add_ on .* writes

the default stream waits too
    theirs: x = torch.ones(8, device=D)
    ? accelerator.current_stream().wait_stream(theirs)
    y = x * 2
    ! aten::mul on stream .* reads what aten::fill_ on .* writes

a stream waits for what another has waited for
    ours: x.add_(1)
    ? theirs.wait_stream(ours)
    ? third.wait_stream(theirs)
    third: y = x * 1
    ! aten::mul on stream .* reads what aten::add_ on .* writes

an event is recorded after the work
    event.record(theirs)
    theirs: x.add_(1)
    ? event.record(theirs)
    ? ours.wait_event(event)
    ours: y = x + 0
    ! aten::add on .* reads what aten::add_ on .* writes

a write waits for a read
    theirs: y = x * 2
    ? ours.wait_stream(theirs)
    ours: x.fill_(5.0)
    ! aten::fill_ on stream .* writes what aten::mul on .* reads

a write waits for every reader, and not only the last
    ours: x.sum()
    theirs: x.sum()
    ? third.wait_stream(ours)
    ? third.wait_stream(theirs)
    third: y = x.fill_(2.0)
    ! aten::fill_ on .* writes what aten::sum on .* reads

a write waits for a write
    theirs: x.mul_(2)
    ? ours.wait_stream(theirs)
    ours: y = x.mul_(1)
    ! aten::mul_ on .* writes what aten::mul_ on .* writes

statistics of normalisation are written in training alone
    norm = nn.BatchNorm1d(8).to(D).eval()
    rows = torch.ones(2, 8, device=D)
    synchronize()
    ours: norm(rows)
    theirs: norm(rows)
    synchronize()
    norm.train().requires_grad_(False)
    norm.num_batches_tracked = None
    theirs: norm(rows)
    ? ours.wait_stream(theirs)
    ours: y = norm(rows)[0] + 2
    ! native_batch_norm on .* writes what aten::native_batch_norm on .* writes

backward runs on the streams of forward
    x = torch.ones(8, device=D, requires_grad=True)
    ? ours.wait_stream(accelerator.current_stream())
    ours: loss = (x * x).sum()
    loss.backward()
    y = x.grad
    ! aten::mul on .* reads what aten::fill_ on .* writes

the host waits for what it reads
    h.copy_(x, non_blocking=True)
    ? accelerator.current_stream().synchronize()
    y = h * 2  # this one is not stopped, as it would not be with a real device
    ! host has touched pinned memory that copy to .* writes

the host waits before it overwrites
    h.fill_(2.0)
    y = h.to(D, non_blocking=True)
    event.record()
    ? event.synchronize()
    h.fill_(7.0)
    ! host has touched pinned memory that copy from .* reads

the allocator knows the other stream
    theirs: y = x * 2
    ? x.record_stream(theirs)
    del x
    torch.full((8,), 9.0, device=D)
    ! freed while aten::mul .* reads it: a record_stream

a device waits for another
    h.copy_(x, non_blocking=True)
    event.record()
    ? there.wait_event(event)
    there: y = h.to("standin:1", non_blocking=True) * 2
    ! copy from the host on stream .* of device 1 reads what copy to

# Two devices, each with a stream that computes and one that copies, and all that they need.
a pipeline
    ours: x = torch.ones(8, device=D)
    ? theirs.wait_stream(ours)
    theirs: h.copy_(x, non_blocking=True)
    ? event.record(theirs)
    ? x.record_stream(theirs)
    del x
    ours: torch.zeros(8, device=D)
    ? there.wait_event(event)
    there: received = h.to("standin:1", non_blocking=True)
    ? beside_it.wait_stream(there)
    beside_it: y = received * 2
    event = torch.Event("standin:1")
    ? event.record(beside_it)
    ? received.record_stream(beside_it)
    del received
    there: torch.zeros(8, device="standin:1")
    ? event.synchronize()
    h.fill_(7.0)
    ! reads|writes

# What needs no wait, so that nothing is to be reported.
reads of several streams, and writes beside each other
    ours: x[:3].add_(1)
    theirs: x[3:6].add_(1)
    third: x[6:].add_(1)
    synchronize()
    ours: assert x.sum().item() == 16
    theirs: assert x.sum().item() == 16
    third: y = x * 1

an empty slice
    x.add_(1)
    ours: (x[4:4] + 1).mul_(2)
    y = x * 1

a copy between devices
    z = (x * 2).to("standin:1")
    x.fill_(7.0)
    z = z + 1
    assert z.tolist() == [3.0] * 8
    y = z.to("standin:0") + x - 8

pages of pinned memory are closed singly
    h = torch.zeros(2048, pin_memory=True)  # two pages
    h[:1024].copy_(torch.ones(1024, device=D), non_blocking=True)
    h[1024:].fill_(2.0)
    z = h[1024:].to(D, non_blocking=True)
    assert h[1024:].sum() == 2048.0  # what a copy reads may be read
    synchronize()
    assert h.tolist() == [1.0] * 1024 + [2.0] * 1024
    y = z[:8]

# The allocator keeps it until its copies are done, so this is no mistake of the caller's.
pinned memory in flight is not given away
    h.fill_(2.0)
    y = h.to(D, non_blocking=True)
    del h
    fresh = torch.full((8,), 3.0).pin_memory()
    synchronize()
    assert fresh.tolist() == [3.0] * 8
"""
"""Programs, and what is to be reported of each where one of its waits is dropped.

A line may begin with the stream that it runs on. The waits are marked with ``?``. ``y`` is to be 2.
"""
KINDS = {
    "wait_stream": ("record_event", "wait_event"),
    "wait_event": ("wait_event",),
    "record": ("record_event",),
    "record_stream": ("record_stream",),
    "event.synchronize": ("event",),
    "current_stream().synchronize": ("stream",),
}
"""What each wait is for the stand-in, which can ignore one."""


PROGRAMS, REPORTED = {}, {}
for paragraph in re.sub("(?m)^#.*\n", "", TRIED).strip().split("\n\n"):
    title, *lines = [each.strip() for each in paragraph.splitlines()]
    if lines[-1].startswith("! "):
        REPORTED[title] = lines.pop()[2:]
    PROGRAMS[title] = lines


def drops():
    """Each wait of each program, with each way to drop it: it is left out, or ignored."""
    for name, lines in PROGRAMS.items():
        for number, line in enumerate(lines):
            if line.startswith("? "):
                call = next(each for each in KINDS if f"{each}(" in line)
                for kind in ("left out", *KINDS[call]):
                    yield pytest.param(name, number, kind, id=f"{name}-{line[2:]}-{kind}")


def begun():
    """What a program has at its beginning."""
    ours, theirs, third = (torch.Stream(D) for _ in range(3))
    there, beside_it = (torch.Stream("standin:1") for _ in range(2))
    x, h = torch.ones(8, device=D), torch.zeros(8, pin_memory=True)
    event = torch.Event(D)
    synchronize()
    return {**globals(), **locals()}


def run(name, dropped=None, kind="left out"):
    """Run a program, one of whose waits may be dropped; return its ``y``."""
    it = begun()
    for number, line in enumerate(PROGRAMS[name]):
        stream, statement = re.fullmatch(r"(?:\? |(\w+): )?(.*)", line).groups()
        if number == dropped and kind == "left out":
            continue
        if number == dropped:
            standin.ignore_next(kind)
        with it[stream] if stream else contextlib.nullcontext():
            exec(statement, it)
    synchronize()
    return it["y"].tolist()


@pytest.mark.parametrize("name", PROGRAMS)
def test_what_waits_is_right_whatever_the_seed(name):
    for seed in range(8):
        standin.configure(seed=seed)
        assert run(name) == [2.0] * 8
        assert standin.violations() == []


@pytest.mark.parametrize(("name", "number", "kind"), [*drops()])
def test_a_missing_wait_is_found_whatever_the_seed(name, number, kind):
    for seed in range(3):
        standin.configure(seed=seed)
        with found(REPORTED[name]):
            run(name, number, kind)
        synchronize()
        assert standin.violations() == []
        assert run(name) == [2.0] * 8  # only that one was


def test_a_violation_can_be_noted_alone_and_the_check_turned_off():
    standin.configure(raises=False)
    run("a stream waits for another", 1)
    assert len(standin.violations()) == 1
    standin.configure(check=False)
    run("a stream waits for another", 1)
    assert standin.violations() == []


def test_what_raises_has_not_run():
    it = begun()
    with it["theirs"]:
        it["x"].mul_(2)
    with found("aten::mul_ on .* writes what aten::mul_ on .* writes"), it["ours"]:
        it["x"].mul_(2)
    synchronize()
    assert it["x"].tolist() == [2.0] * 8


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


def test_a_wait_is_dropped_for_one_thread_alone_and_behind_others():
    name = "a stream waits for another"
    standin.ignore_next("wait_event", after=1)
    with ThreadPoolExecutor(1) as other:
        for _ in range(2):
            other.submit(run, name).result(LATEST_S)
    run(name)
    with found("reads what"):
        run(name)
    with pytest.raises(RuntimeError, match="no kind of wait called nap"):
        standin.ignore_next("nap")


WAITS = {
    "event.synchronize()": "event",
    "accelerator.current_stream().synchronize()": "stream",
    "accelerator.synchronize()": "device",
    "x.sum().item()": "item",
    "x[0].item()": "item",
    "float(x[0])": "item",
    "x[x > 2]": "item",
    "x.nonzero()": "item",
    "torch.equal(x, x)": "item",
    "x.to('cpu')": "copy",
    "x.tolist()": "copy",
    "torch.ones(8).to(D)": "copy",
    "x[torch.tensor([1, 2], device=D)]": "copy",  # of its numbers
    "torch.ones(8).to(D, non_blocking=True)": None,
    "x.to('standin:1')": None,
    "h.copy_(x, non_blocking=True)": None,
    "theirs.wait_stream(accelerator.current_stream())": None,
    "event.query()": None,
    "torch.histc(x, 4, 0, 1)": None,
    "accelerator.empty_cache()": None,
}
"""What each statement waits for in the host."""


@pytest.mark.parametrize(("statement", "kind"), WAITS.items())
def test_a_wait_of_the_host_is_counted_and_orders_it(statement, kind):
    def touch(drops=False):
        it = begun()
        it["h"].copy_(it["x"], non_blocking=True)
        it["event"].record()
        standin.forget_waits()
        assert standin.waits() == dict.fromkeys(("event", "stream", "device", "item", "copy"), 0)
        if drops:
            standin.ignore_next(kind)
        exec(statement, it)
        counted = {each: count for each, count in standin.waits().items() if count}
        assert counted == ({kind: 1} if kind else {})
        it["h"].add_(1)
        synchronize()

    with contextlib.nullcontext() if kind else found("touched pinned memory"):
        touch()
    if kind:
        with found("touched pinned memory"):
            touch(drops=True)
        synchronize()
        touch()  # only the next one was


# ---------------------------------------------------------------- memory
def test_memory_of_a_device_is_closed_to_the_host():
    done = child(
        "import ctypes, torch; x = torch.ones(8, device='standin'); ctypes.string_at(x.data_ptr())"
    )
    assert done.returncode == -signal.SIGSEGV, done.stderr
    assert "the host has touched memory of a device" in done.stderr


def test_memory_that_is_not_written_is_poisoned():
    assert torch.empty(8, device=D).isnan().all()
    x = torch.ones(1000, device=D)
    address = x.data_ptr()
    del x
    again = torch.empty(1000, device=D)
    assert again.data_ptr() == address
    assert again.isnan().all()


def test_the_allocator_reuses_in_the_order_of_streams():
    """Memory that one stream has freed is not given to another."""
    x = torch.ones(1000, device=D)
    address = x.data_ptr()
    del x
    with torch.Stream(D):
        assert torch.empty(1000, device=D).data_ptr() != address
    assert torch.empty(1000, device=D).data_ptr() == address


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


def test_every_process_has_it_and_none_is_initialised_by_that():
    done = child(
        """
import torch
assert torch.accelerator.current_accelerator() == torch.device("standin")
assert torch.accelerator.device_count() == torch.standin.device_count() == 2
assert torch.standin.is_available() and torch.accelerator.is_available()
torch.manual_seed(3)
assert torch.accelerator.memory_allocated() == 0
torch.accelerator.empty_cache()
assert not torch.standin.is_initialized()
assert torch.accelerator.current_device_index() == 0  # which is a first use, as with CUDA
assert torch.standin.is_initialized()
print("told")
"""
    )
    assert done.stdout == "told\n", done.stderr


def test_a_process_that_has_not_used_a_device_may_fork():
    done = child(
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
    done = child(
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


# ---------------------------------------------------------------- the faces
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


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_is_computed_again_draws_the_same_numbers(reentrant):
    x = torch.ones(100, device=D, requires_grad=True)
    y = checkpoint(F.dropout, x, 0.5, use_reentrant=reentrant)
    y.sum().backward()
    assert torch.equal(x.grad, y.detach())


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


def test_a_module_moves_with_its_ties_and_its_gradients():
    """As with CUDA its parameters stay the same objects, so an optimizer still has them."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    weight = model[1].weight = model[0].weight
    for device in (D, "cpu", "standin:1"):
        model.to(device)
        assert model[0].weight is model[1].weight is weight
        model(torch.ones(1, 3, device=device)).sum().backward()
        assert weight.device.type == weight.grad.device.type == torch.device(device).type


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
    "random_numbers": lambda d: torch.cat(
        [
            torch.rand(9, device=d),
            torch.randn(50, device=d),
            torch.randperm(9, device=d),
            F.dropout(torch.ones(50, device=d), 0.1),
            F.dropout(torch.arange(50.0, device=d), 0.3, inplace=True),
            torch.multinomial(torch.ones(50, device=d), 3),
        ]
    ),
    "cast": lambda d: some(9).to(d).to(torch.bfloat16).float(),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_has_the_bits_of_the_cpu(name):
    torch.manual_seed(3)
    cpu = OPERATIONS[name]("cpu")
    torch.manual_seed(3)
    ours = OPERATIONS[name]("standin:1")
    assert ours.device == torch.device("standin:1")
    assert torch.equal(ours.cpu(), cpu)


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


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_trains_as_on_the_cpu(family):
    """Also where weights are tied, and where there is dropout."""
    assert_same_training(FAMILIES[family])


@pytest.mark.parametrize("how", ["foreach", "fused"])
@pytest.mark.parametrize("chosen", [True, False])
def test_every_kind_of_adamw_has_the_bits_of_the_cpu(how, chosen):
    assert_same_training(FAMILIES["llama"], **{how: chosen})


# ---------------------------------------------------------------- threads
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
