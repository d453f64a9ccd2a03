"""What an accelerator does: one case each, which prints what it has found so far as a JSON object.

``make gpu`` runs the first of them in less than ten minutes, where nothing is installed, and
``python -m benchmarks devices`` all in under 30; docs/guide/devices.md says what each line means.
They speak to whatever accelerator torch has, or to the device that BENCHMARK_DEVICE names. Where
there is none, or where a case needs several, it ends with exit code 3 and says why. What a case
cannot do on a device, as an error, is its result. On the host and on the stand-in of the tests all
is tiny: there the cases are tried, and nothing is measured.
"""

from __future__ import annotations

import copy
import cProfile
import hashlib
import json
import os
import pstats
import secrets
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

import click
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pipedream_rt
from pipedream_rt.devices import choice

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.grid import ROOT, said
from benchmarks.workload import Block

Found = Iterator[dict[str, Any]]
"""What a case finds, as it finds it."""

UNAVAILABLE = 3
MICRO_BATCHES = 8
SEED = 0


class Size:
    """How large a model and its mini-batches are."""

    def __init__(self, kind: str) -> None:
        self.name = kind
        self.width, self.heads, self.blocks, self.words, self.length = SIZES[kind][:5]
        self.samples, self.samples_at_most, self.count = SIZES[kind][5:]


SIZES = {
    "tiny": (32, 2, 4, 64, 16, 8, 16, 4),
    "small": (256, 4, 6, 8192, 128, 16, 256, 10),
    "gpt2": (768, 12, 12, 50304, 512, 32, 256, 10),
}
"""Width, heads, blocks, words, words of a sample, samples of a mini-batch, and at most, where it is
to fill the device; mini-batches."""


class Embedding(nn.Module):
    """Words and their places."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.words = nn.Embedding(size.words, size.width)
        self.places = nn.Embedding(size.length, size.width)

    def forward(self, ids: Tensor) -> Tensor:
        """Return (B, T, width) of ids (B, T)."""
        return self.words(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))


def model(size: Size) -> nn.Sequential:
    """GPT-2 small, or a tiny one."""
    torch.manual_seed(SEED)
    blocks = [Block(size.width, size.heads) for _ in range(size.blocks)]
    return nn.Sequential(Embedding(size), *blocks, nn.Linear(size.width, size.words))


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def data(size: Size, count: int) -> list[tuple[Tensor, Tensor]]:
    """Mini-batches of random words, on the host."""
    torch.manual_seed(SEED + 1)
    shape = size.samples, size.length
    return [
        (torch.randint(size.words, shape), torch.randint(size.words, shape)) for _ in range(count)
    ]


def unavailable(why: str) -> NoReturn:
    """End, since this cannot be measured here."""
    click.echo(json.dumps({"why": why}))
    sys.exit(UNAVAILABLE)


def devices_here(least: int = 1) -> list[str]:
    """The names of the accelerators, or the one that was asked for; ends if there are too few."""
    asked, there = os.environ.get("BENCHMARK_DEVICE"), choice.accelerators()
    if asked is not None:  # a kind is all of its kind
        there = [name for name in there if name.partition(":")[0] == asked] or [asked]
    if len(there) < least:
        unavailable(f"it needs {least} accelerators, and there are {len(there)}")
    return there


def accelerator(*kinds: str) -> str:
    """The first device, if it is no CPU, and of one of these kinds."""
    device = devices_here()[0]
    if (kind := torch.device(device).type) == "cpu" or (kinds and kind not in kinds):
        unavailable(f"it is for {' and '.join(kinds) or 'accelerators'} alone")
    return device


def kind_here() -> str:
    """The kind of the first device, as ``"cuda"``."""
    return torch.device(devices_here()[0]).type


def settle() -> None:
    """Wait for all that the devices have been given."""
    for name in devices_here():
        if torch.device(name).type != "cpu":
            torch.accelerator.synchronize(name)


def deterministically() -> None:
    """Let torch take kernels that give the same bits again, where it has such."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before CUDA is first used
    torch.use_deterministic_algorithms(True, warn_only=True)


# -- throughput -----------------------------------------------------------------------------------


def measured(size: Size, step: Callable[[int], object], end: Callable[[], object]) -> list[float]:
    """Measure so many mini-batches, after a few that do not count.

    Args:
        size: Says how many samples and mini-batches there are.
        step: Trains on a mini-batch, by its number.
        end: Waits until all that was given is done, but not for the device, for which this waits.

    Returns:
        Samples per second, and this process's seconds of a processor for a mini-batch. Torch waits
        for CUDA by looking again and again, so where the device is slower these have its time too.
    """

    def ended() -> float:
        # A pipeline is flushed when the last loss is known: the last backward still runs.
        end()
        settle()
        return time.perf_counter()

    for number in range(3):
        step(number)
    start, used = ended(), time.process_time()
    for number in range(size.count):
        step(number)
    wall = ended() - start
    return [size.samples * size.count / wall, (time.process_time() - used) / size.count]


def pinned(size: Size, count: int) -> list[tuple[Tensor, ...]]:
    """Mini-batches as a loader with ``pin_memory=True`` gives them: a copy lets nobody wait."""
    if kind_here() == "cpu":
        return list(data(size, count))
    return [tuple(t.pin_memory() for t in batch) for batch in data(size, count)]


def casting(function: Any, dtype: torch.dtype | None) -> Any:
    """A function within torch's autocast to a dtype; the function itself if there is none."""
    return function if dtype is None else torch.autocast(kind_here(), dtype=dtype)(function)


def plain_step(
    net: nn.Module, batches: list[tuple[Tensor, ...]], dtype: torch.dtype | None = None
) -> Callable[[int], None]:
    """A step of training without stages: micro-batches whose gradients are added up."""
    device = devices_here()[0]
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-4)
    forward, of_loss = casting(net, dtype), casting(loss_fn, dtype)

    def step(number: int) -> None:
        x, y = (t.to(device, non_blocking=True) for t in batches[number % len(batches)])
        for of_x, of_y in zip(x.chunk(MICRO_BATCHES), y.chunk(MICRO_BATCHES), strict=True):
            (of_loss(forward(of_x), of_y) / MICRO_BATCHES).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def plainly(
    size: Size, net: nn.Module, dtype: torch.dtype | None = None, one_thread: bool = False
) -> tuple[list[float], str]:
    """What `measured` says of one process without stages, and a digest of its weights.

    Torch has a thread for the backwards of a device, which the script wakes and waits for. Stages
    run them on their own thread; with ``one_thread`` this loop does, too.
    """
    net = copy.deepcopy(net).to(devices_here()[0])
    step = plain_step(net, pinned(size, size.count), dtype)
    with torch.autograd.set_multithreading_enabled(not one_thread):
        found = measured(size, step, settle)
    digest = hashlib.sha256()
    for tensor in net.state_dict().values():
        digest.update(tensor.cpu().numpy().tobytes())
    return found, digest.hexdigest()


def filled(size: Size, rate: Callable[[], float]) -> Found:
    """Double the samples of a mini-batch until a plain loop gains less than a twentieth by it.

    With less, the device waits for the host, whose speed says nothing of stages.
    """
    before, now = 0.0, rate()
    while True:
        yield {f"plain, {size.samples // MICRO_BATCHES} samples of a micro-batch": now}
        if now < 1.05 * before or size.samples >= size.samples_at_most:
            return
        size.samples *= 2
        before, now = now, rate()


def throughput(size: Size, precision: str) -> Found:
    """Samples per second of one process: without stages, with ours, and with those of torch.

    A ratio to the plain loop is beside each. The plain loop runs first and last, so that the ratio
    of the two says how far the machine has changed meanwhile.
    """
    torch.set_float32_matmul_precision("high")  # TF32
    dtype = torch.bfloat16 if precision == "bf16" else None
    net, size.count = model(size), 4

    def plain(one_thread: bool = False) -> float:
        return plainly(size, net, dtype, one_thread)[0][0]

    def of_ours(stages: int, schedule: str) -> float:
        training = pipedream_rt.Training(check_loss=0, verify=False, autocast=dtype)
        with opened(net, stages, schedule, training=training) as pipe:
            return rates(size, pipe)[0]

    yield from filled(size, plain)
    ways: dict[str, Callable[[], float]] = {
        "plain": plain,
        "1 1f1b": partial(of_ours, 1, "1f1b"),
        "2 torch": partial(of_torch, size, net, 2, dtype), "2 1f1b": partial(of_ours, 2, "1f1b"),
        "4 torch": partial(of_torch, size, net, 4, dtype), "4 1f1b": partial(of_ours, 4, "1f1b"),
        "4 async-1f1b": partial(of_ours, 4, "async-1f1b"),
        "plain, backward on its thread": partial(plain, one_thread=True),
        "plain again": plain,
    }  # fmt: skip
    found: dict[str, float] = {}
    for name, rate in ways.items():
        try:
            found[name] = rate()
        except Exception as error:  # whether torch's schedules run so is asked here, too
            yield {name: f"{type(error).__name__}: {str(error)[:200]}"}
            continue
        yield {name: found[name], f"{name} / plain": found[name] / found["plain"]}
        stages = name.partition(" ")[0]
        if name.endswith(" 1f1b") and (of_its := found.get(f"{stages} torch")):
            yield {f"{name} / torch": found[name] / of_its}
    # Of a word: two for each weight but those of the embedding, thrice; and causal attention.
    weights = sum(p.numel() for p in net[1:].parameters())
    flops = 6 * size.length * (weights + size.blocks * size.width * size.length)
    yield {"plain TFLOP/s": found["plain"] * flops / 1e12}


def of_torch(
    size: Size, net: nn.Sequential, stages: int, dtype: torch.dtype | None = None
) -> float:
    """Samples per second of torch.distributed.pipelining, all stages on one device in one process.

    Its plain 1F1B has a process for each stage, and NCCL a device for each process; interleaved,
    one process may have all stages.
    """
    import torch.distributed as dist
    from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B

    device, net = torch.device(devices_here()[0]), copy.deepcopy(net)
    # Before torch 2.12 stages that meet send to their own process: NCCL does so, Gloo does not.
    backend = "nccl" if device.type == "cuda" else "gloo"
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group(backend, f"file://{folder}/meet", rank=0, world_size=1)
        try:
            parts = [each.to(device) for each in cut(net, stages)]
            for part in parts:  # around it all weights would be cast once for all micro-batches
                part.forward = casting(part.forward, dtype)
            schedule = ScheduleInterleaved1F1B(
                [PipelineStage(part, n, stages, device) for n, part in enumerate(parts)],
                MICRO_BATCHES, loss_fn=casting(loss_fn, dtype),
            )  # fmt: skip
            optimizer = torch.optim.AdamW(net.parameters(), lr=3e-4)
            batches = pinned(size, size.count)

            def step(number: int) -> None:
                x, y = (t.to(device, non_blocking=True) for t in batches[number % len(batches)])
                schedule.step(x, target=y, return_outputs=False)
                optimizer.step()
                optimizer.zero_grad()

            return measured(size, step, settle)[0]
        finally:
            dist.destroy_process_group()


def cut(net: nn.Sequential, stages: int) -> list[nn.Sequential]:
    """Stages of about as many layers each."""
    return [net[a:b] for a, b in pairwise(len(net) * n // stages for n in range(stages + 1))]


def opened(net: nn.Module, stages: int, schedule: str, **others: Any) -> pipedream_rt.Pipeline:
    """A pipeline on the first device, in this process where nothing else is said."""
    options: dict[str, Any] = {
        "stages": stages, "loss_fn": loss_fn, "optimizer": (torch.optim.AdamW, {"lr": 3e-4}),
        "schedule": schedule, "micro_batches": MICRO_BATCHES, "corrections": (), "seed": SEED,
        "training": pipedream_rt.Training(check_loss=0, verify=False),
        "devices": devices_here()[0], "workers": "serial", **others,
    }  # fmt: skip
    return pipedream_rt.Pipeline(copy.deepcopy(net), **options)


def train(pipe: pipedream_rt.Pipeline, batches: list[Any]) -> None:
    """Train on mini-batches, and let the pipe be empty then."""
    for batch in batches:
        pipe.submit(*batch)
    pipe.flush()


def rates(size: Size, pipe: pipedream_rt.Pipeline) -> list[float]:
    """What `measured` says of a pipeline."""
    batches = pinned(size, size.count)
    return measured(size, lambda n: pipe.submit(*batches[n % len(batches)]), pipe.flush)


def host(size: Size) -> Found:
    """What the host takes for an action, a forward or backward of a micro-batch on a stage.

    The model is tiny, so that the device never keeps the host waiting. What a plain loop takes for
    the same micro-batches is torch's own; what is more, is that of the stages. By function it is in
    ``host.txt``, in $OUT or in build/.
    """
    net, size.count = model(size), 10
    (folder_of_logs() / "host.txt").unlink(missing_ok=True)
    per_batch = 2 * MICRO_BATCHES
    plain = min(size.samples / plainly(size, net)[0][0] for _ in range(2))
    alone = size.samples / plainly(size, net, one_thread=True)[0][0]
    yield {
        "plain us/action": 1e6 * plain / per_batch,
        "plain, backward on its thread us/action": 1e6 * alone / per_batch,
    }
    step = plain_step(copy.deepcopy(net).to(devices_here()[0]), pinned(size, 3))
    yield profiled("plain", per_batch, lambda: [step(n) for n in range(3)])
    for stages in (1, 4):
        name, actions, batches = f"{stages} stages", per_batch * stages, data(size, 3)
        with opened(net, stages, "1f1b") as pipe:
            rate, processor_s = rates(size, pipe)
            seen = profiled(name, actions, partial(train, pipe, batches))
        seconds = size.samples / rate
        yield {
            f"{name} us/action": 1e6 * seconds / actions,
            f"{name} processor us/action": 1e6 * processor_s / actions,
            f"{name} less plain us/action": 1e6 * (seconds - plain) / actions, **seen,
        }  # fmt: skip


def profiled(name: str, actions: int, run: Callable[[], object]) -> dict[str, float]:
    """What three mini-batches call of torch and of CUDA, for each action; by torch's profiler.

    Then, once more, by that of Python, whose slowest functions are added to ``host.txt``.
    """
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU]
    if kind_here() == "cuda":
        activities.append(ProfilerActivity.CUDA)
    run()  # what is new in a first call is no part of it
    with profile(activities=activities) as seen:
        run()
        settle()
    calls: Counter[str] = Counter()
    for event in seen.key_averages():
        own_us = int(event.self_cpu_time_total)
        if event.key.startswith("aten::"):
            calls["operators"] += event.count
            calls["us in operators"] += own_us
        kinds = ("Launch", "Memcpy", "Memset", "EventRecord", "StreamWaitEvent", "Synchronize")
        for kind in kinds if event.key.startswith("cuda") else ():
            if kind in event.key:
                calls[kind] += event.count
                calls["us in the runtime"] += own_us
                calls["us of waits"] += own_us if kind == "Synchronize" else 0
    with cProfile.Profile() as functions:
        run()
    with open(folder_of_logs() / "host.txt", "a") as file:
        print(f"{name}: three mini-batches of {actions} actions", file=file)
        pstats.Stats(functions, stream=file).sort_stats("tottime").print_stats(40)
    return {f"{name} {what}/action": count / 3 / actions for what, count in calls.items()}


def overlap(size: Size) -> Found:
    """How far streams of stages on one device overlap: the time of their spans by that of any."""
    net, batches = model(size), data(size, size.count)
    for stages in (2, 4):
        observe = pipedream_rt.Observe(trace=True)
        with opened(net, stages, "1f1b", observe=observe) as pipe:
            train(pipe, batches)
            spans = pipe.trace().device_spans
        if not len(spans):
            unavailable("only accelerators have spans of a device")
        spans = spans[spans["start"].argsort()]
        whole, end = 0, 0
        for start, until in zip(spans["start"].tolist(), spans["end"].tolist(), strict=True):
            whole += max(until - max(start, end), 0)
            end = max(end, until)
        yield {f"{stages} stages": float((spans["end"] - spans["start"]).sum()) / whole}


def of_pipeline(size: Size, stages: int, schedule: str, **others: Any) -> dict[str, Any]:
    """Samples per second of a pipeline, and how long it took to start."""
    start = time.perf_counter()
    with opened(model(size), stages, schedule, **others) as pipe:
        pipe.submit(*data(size, 1)[0]).result()
        started_s = time.perf_counter() - start
        found = rates(size, pipe)
        counters = pipe.statistics()
    return {
        "samples_per_s": found[0], "start_s": started_s,
        "devices": sorted({each["device"] for each in counters}),
    }  # fmt: skip


def ours(size: Size, stages: int, schedule: str) -> Found:
    """Stages that are dealt to several devices: in a process each, and in one, by peer copies."""
    devices_here(2)
    for workers in ("local", "serial"):
        found = of_pipeline(size, stages, schedule, devices=kind_here(), workers=workers)
        yield {f"{workers}, {what}": value for what, value in found.items()}


@contextmanager
def workers_on(device: str, count: int) -> Iterator[str]:
    """Worker processes that share a device; yields the address at which they join."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        address = f"127.0.0.1:{found.getsockname()[1]}"
    os.environ["PIPEDREAM_RT_SECRET"] = secrets.token_hex(32)
    command = [sys.executable, "-m", "pipedream_rt.workers", address, "--device", device]
    started = [subprocess.Popen([*command, "--name", f"w{n}"]) for n in range(count)]
    try:
        yield address
    finally:
        for each in started:
            try:
                each.wait(30)
            except subprocess.TimeoutExpired:
                each.kill()
                each.wait()


def processes(size: Size, stages: int, schedule: str) -> Found:
    """Stages on one device, in a process each."""
    with workers_on(devices_here()[0], stages) as address:
        yield of_pipeline(size, stages, schedule, workers=address)


def pipelining(size: Size, stages: int) -> Found:
    """torch.distributed.pipelining with 1F1B, a process and a device for each stage."""
    devices_here(stages)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(stages) as pool:
        words = ("pipelining-rank", folder, str(stages))
        ranks = [
            pool.submit(_case, *words, str(rank), "--size", size.name) for rank in range(stages)
        ]
        yield ranks[0].result()


def pipelining_rank(size: Size, folder: str, stages: int, rank: int) -> Found:
    """One rank of it."""
    import torch.distributed as dist
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    device = torch.device(devices_here(stages)[rank])
    torch.accelerator.set_device_index(device.index)
    backend = dist.get_default_backend_for_device(device)
    dist.init_process_group(backend, f"file://{folder}/meet", rank=rank, world_size=stages)
    part = cut(model(size), stages)[rank].to(device)
    stage = PipelineStage(part, rank, stages, device)
    schedule = Schedule1F1B(stage, MICRO_BATCHES, loss_fn=loss_fn)
    optimizer = torch.optim.AdamW(part.parameters(), lr=3e-4)
    batches = pinned(size, size.count)

    def step(number: int) -> None:
        x, y = (t.to(device, non_blocking=True) for t in batches[number % len(batches)])
        target = y if rank == stages - 1 else None
        schedule.step(*([x] if rank == 0 else []), target=target)
        optimizer.step()
        optimizer.zero_grad()

    def end() -> None:
        torch.accelerator.synchronize()
        dist.barrier()

    yield {"samples_per_s": measured(size, step, end)[0]}
    dist.destroy_process_group()


# -- what decides the design ----------------------------------------------------------------------


def killed(size: Size) -> Found:
    """What the reader of shared memory of a device sees once its owner is killed."""
    device = accelerator("cuda")  # torch shares memory of others between processes nowhere
    import torch.multiprocessing as mp

    context = mp.get_context("spawn")
    given, done = context.Queue(), context.Event()
    owner = context.Process(target=_own, args=(device, given, done), daemon=True)
    owner.start()
    tensor, handle = given.get(timeout=120)
    event = torch.cuda.Event.from_ipc_handle(torch.device(device), handle)
    yield {"before": float(tensor.sum()), "event_before": event.query()}
    os.kill(owner.pid or 0, signal.SIGKILL)
    owner.join(30)
    for name, look in (
        ("after", lambda: float(tensor.sum())),
        ("event_after", event.query),
        ("own_memory_after", lambda: float(torch.ones(8, device=device).sum())),
    ):
        try:
            yield {name: look()}
        except RuntimeError as error:
            yield {name: str(error).partition("\n")[0]}


def _own(device: str, given: Any, done: Any) -> None:
    """Own memory that another process reads, until killed."""
    tensor = torch.ones(1 << 20, device=device)
    event = torch.cuda.Event(interprocess=True)
    event.record()
    event.synchronize()
    given.put((tensor, event.ipc_handle()))
    done.wait(300)


def median_us(times: list[float]) -> float:
    return 1e6 * statistics.median(times)


def hop(size: Size) -> Found:
    """Time of the host, and in all, from one stream to another, and to the host and back."""
    device = accelerator()
    one, other, out = (torch.Stream(device) for _ in range(3))
    recorded, waited = [], []
    for _ in range(200):
        start = time.perf_counter()
        event = one.record_event()
        recorded.append(time.perf_counter() - start)
        other.wait_event(event)
        waited.append(time.perf_counter() - start - recorded[-1])
    yield {"record an event us": median_us(recorded), "let a stream wait us": median_us(waited)}
    for count in (1 << 18, 1 << 22) if size.samples > 8 else (1 << 10,):
        mib = f"{4 * count / 2**20:g} MiB"
        with one:
            x = torch.ones(count, device=device)
        pinned, pageable = torch.empty(count, pin_memory=True), torch.empty(count)
        torch.accelerator.synchronize()
        times, there, down, up, plain = [], [], [], [], []
        for _ in range(30):
            start = time.perf_counter()
            ready = one.record_event()
            other.wait_event(ready)
            with other:
                y = torch.empty_like(x).copy_(x, non_blocking=True)
            x.record_stream(other)
            times.append(time.perf_counter() - start)
            other.synchronize()
            there.append(time.perf_counter() - start)
            start = time.perf_counter()
            out.wait_stream(other)
            with out:
                pinned.copy_(y, non_blocking=True)
            out.record_event().synchronize()
            down.append(time.perf_counter() - start)
            for source, seconds in ((pinned, up), (pageable, plain)):
                start = time.perf_counter()
                with out:
                    y.copy_(source, non_blocking=True)
                out.synchronize()
                seconds.append(time.perf_counter() - start)
        for what, seconds in {
            "host": times, "in all": there, "to the host": down, "from pinned memory": up,
            "from other memory": plain,
        }.items():  # fmt: skip
            yield {f"{what} us, {mib}": median_us(seconds)}
        for there in devices_here()[1:2]:
            peer, to_peer = torch.empty(count, device=there), []
            for _ in range(30):
                settle()
                start = time.perf_counter()
                peer.copy_(x, non_blocking=True)
                settle()
                to_peer.append(time.perf_counter() - start)
            yield {f"to another device us, {mib}": median_us(to_peer)}


def memory(size: Size) -> Found:
    """What a process takes of a device before it computes, and stages beside the formula.

    The formula has the versions, the gradients of an update, and the two moments of AdamW. What the
    peak of a plain loop has above it are activations, of which stages keep several.
    """
    device = accelerator()
    of_device: Any = torch.get_device_module(device)
    torch.zeros(1, device=device)
    torch.accelerator.synchronize()
    free, total = torch.accelerator.get_memory_info(device)
    yield {"taken_mib": (total - free) / 2**20}
    net, size.count = model(size), 2
    weights = sum(p.nbytes for p in net.parameters())

    def beside(name: str, formula: int) -> dict[str, float]:
        peak = of_device.max_memory_allocated(device)
        of_device.reset_peak_memory_stats(device)
        return {f"{name} formula_mib": formula / 2**20, f"{name} peak_mib": peak / 2**20}

    plainly(size, net)
    yield beside("plain", 4 * weights)
    for stages, schedule in ((1, "1f1b"), (2, "async-1f1b"), (4, "1f1b"), (4, "async-1f1b")):
        with opened(net, stages, schedule) as pipe:
            train(pipe, data(size, 4))
            counters = pipe.statistics()
        formula = sum(each["weight_bytes"] * (each["versions_kept_most"] + 3) for each in counters)
        yield beside(f"{stages} {schedule}", formula)


def addresses(size: Size) -> Found:
    """Whether a product has the same bits for operands that begin at other addresses."""
    device = devices_here()[0]
    torch.manual_seed(SEED)
    n = size.width
    a, b = torch.randn(n, n), torch.randn(n, n)
    expected = a.to(device) @ b.to(device)
    for offset in (512, 64, 16, 4):
        at = offset // 4
        moved = [torch.empty(n * n + at, device=device)[at:].view(n, n) for _ in (a, b)]
        for to, given in zip(moved, (a, b), strict=True):
            to.copy_(given)
        yield {f"equal at {offset} bytes": bool(torch.equal(moved[0] @ moved[1], expected))}


# -- what is promised -----------------------------------------------------------------------------

FLUSHING = ("gpipe", "1f1b", "interleaved-1f1b", "zero-bubble")
ASYNCHRONOUS = ("2bw", "async-1f1b", "async-1f1b+vertical-sync")
SUITES = ROOT / "tests/support/device/suites.txt"
AT_ONCE = 14
"""Processes of the tests: each takes about half a GiB of the device, and more with its workers."""


def folder_of_logs() -> Path:
    """Where texts go that are too long for a line: $OUT, or build/."""
    folder = Path(os.environ.get("OUT") or ROOT / "build")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def suites(size: Size) -> Found:
    """The tests of exactness, any model, recovery and compatibility, with stages on the device.

    A test that takes a minute has failed. Each test's end is a line of ``gpu-tests.jsonl``, and
    what pytest writes is ``gpu-tests.log``, in $OUT or in build/.
    """
    device, folder = kind_here(), folder_of_logs()
    results = folder / "gpu-tests.jsonl"
    results.unlink(missing_ok=True)
    count = max(1, min(len(os.sched_getaffinity(0)) - 2, AT_ONCE))
    command = [
        sys.executable, "-m", "pytest", "-n", str(count), "--dist", "worksteal", "-q",
        "-p", "no:cacheprovider", "-m", "not stress", "--timeout", "60",
        "--timeout-method", "signal", "-o", "faulthandler_timeout=50", "--device", device,
        "--results", str(results), *SUITES.read_text().split(),
    ]  # fmt: skip
    deterministically()
    with (
        open(folder / "gpu-tests.log", "wb") as log,
        subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT) as tests,
    ):
        while tests.poll() is None:
            with suppress(subprocess.TimeoutExpired):
                tests.wait(10)
            yield of_tests(results)


def of_tests(results: Path) -> dict[str, Any]:
    """What has come of tests until now."""
    lines = []
    for text in results.read_text().splitlines() if results.exists() else ():
        with suppress(ValueError):  # a line that is being written
            lines.append(json.loads(text))
    ended = {line["test"]: line["outcome"] for line in lines if "outcome" in line}
    unfinished = sorted({line["test"] for line in lines} - ended.keys())
    return {
        **Counter(ended.values()),
        "not ended": len(unfinished),
        "names of the failed": [test for test, how in ended.items() if how == "failed"][:50],
        "names of those not ended": unfinished[:50],
        "reasons of the skipped": Counter(
            line["reason"] for line in lines if line.get("outcome") == "skipped"
        ),
    }


def digest_of(net: nn.Module, batches: list[Any], stages: int, schedule: str, **others: Any) -> str:
    """The fingerprint after mini-batches."""
    with opened(net, stages, schedule, **others) as pipe:
        train(pipe, batches)
        return pipe.fingerprint().digest


def through(net: nn.Module, batches: list[Any], schedule: str, host: bool) -> tuple[str, bool]:
    """Train half of them, save, perhaps go on on the host and save there, and train the others.

    Returns:
        The fingerprint at the end, and whether all the loads had that of the save before.
    """
    half, same = len(batches) // 2, True
    with tempfile.TemporaryDirectory() as folder:
        with opened(net, 4, schedule) as pipe:
            train(pipe, batches[:half])
            saved = pipe.save(Path(folder, "here"))
            digest = pipe.fingerprint().digest
        if host:
            with opened(net, 4, schedule, devices="cpu") as pipe:
                pipe.load(saved)
                same = pipe.fingerprint().digest == digest
                saved = pipe.save(Path(folder, "host"))
        with opened(net, 4, schedule) as pipe:
            pipe.load(saved)
            same = same and pipe.fingerprint().digest == digest
            train(pipe, batches[half:])
            return pipe.fingerprint().digest, same


def disturbed(
    net: nn.Module, batches: list[Any], schedule: str, **others: Any
) -> tuple[str, dict[str, float]]:
    """The fingerprint of a run whose worker is killed after the second, and what that takes."""
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        options = {
            "workers": "local", "checkpoint": pipedream_rt.Checkpoints(folder, every=1),
            "recovery": pipedream_rt.Recovery(max_restarts=1), **others,
        }  # fmt: skip
        with opened(net, 4, schedule, **options) as pipe:
            for result in pipe.train_epoch(batches):
                if result.step == 0:
                    started = time.monotonic() - begun
                if result.step == 2:
                    cluster: Any = pipe._group.cluster
                    process = next(iter(cluster._local.processes.values()))
                    os.kill(process.pid, signal.SIGKILL)
            if len(pipe.restarts) != 1:
                raise RuntimeError(f"one worker was killed, and {len(pipe.restarts)} recovered")
            digest = pipe.fingerprint().digest
            return digest, {"start s": started, "recovery s": pipe.restarts[0].seconds}


def bits(size: Size) -> Found:
    """Whether every schedule has the same bits, with the algorithms that torch has for that.

    Those that flush with four stages and with one; all in one process and in another that is
    killed; and through checkpoints that the host has loaded and written on the way. Four schedules
    at once, since most of the time is that of processes which begin to use the device. Where this
    is only tried, one of either kind.
    """
    tried = size.name == "tiny"
    words = ["--size", size.name]
    with ThreadPoolExecutor(4) as pool:
        runs = [
            pool.submit(_case, "bits-of", schedule, *words)
            for schedule in (("1f1b", "async-1f1b") if tried else (*FLUSHING, *ASYNCHRONOUS))
        ]
        for run in as_completed(runs):
            yield run.result()


def _case(*words: str, **variables: str) -> dict[str, Any]:
    """The last object that another process prints for a case.

    What it writes to standard error is added to ``CASE.log``, in $OUT or in build/; the end of it
    is the error of one that did not come to its end.
    """
    return _said([__file__, *words], words[0], variables)


def _said(command: list[str], name: str, variables: dict[str, str]) -> dict[str, Any]:
    """The last object that a process of Python prints; see `_case`."""
    ended = said([sys.executable, "-W", "ignore", *command], environment=variables)
    with open(folder_of_logs() / f"{name}.log", "a") as log:
        log.write(ended.errors)
    if ended.code:
        ended.found["error"] = f"{name}: exit code {ended.code}: {ended.errors[-1000:]}"
    return ended.found


def bits_of(size: Size, schedule: str) -> Found:
    """That of one schedule."""
    deterministically()
    net, batches = model(size), data(size, 4)
    calm = digest_of(net, batches, 4, schedule)
    if schedule in FLUSHING:
        yield {f"{schedule}, 1 stage": digest_of(net, batches, 1, "1f1b") == calm}
    if len(devices_here()) > 1:
        digest = digest_of(net, batches, 4, schedule, devices=kind_here())
        yield {f"{schedule}, several devices": digest == calm}
    digest, times = disturbed(net, batches, schedule)
    yield {f"{schedule}, killed": digest == calm}
    yield {f"{schedule}, {what}": seconds for what, seconds in times.items()}
    here, (there, same) = (through(net, batches, schedule, host) for host in (False, True))
    yield {f"{schedule}, by the host": same and here == (there, True)}


def defaults(size: Size) -> Found:
    """Whether two runs have the same bits as torch is by default."""
    net, batches = model(size), data(size, 4)
    yield {"plain": len({plainly(size, net)[1] for _ in range(2)}) == 1}
    yield {"1f1b": digest_of(net, batches, 4, "1f1b") == digest_of(net, batches, 1, "1f1b")}
    yield {"async-1f1b": len({digest_of(net, batches, 4, "async-1f1b") for _ in range(2)}) == 1}


def sanitizer(size: Size) -> Found:
    """Whether torch's own check of the order of streams finds anything in small runs.

    What it says of each place is in ``streams.log``, in $OUT or in build/.
    """
    accelerator("cuda", "standin")  # the check of the stand-in is always on
    (folder_of_logs() / "streams.log").unlink(missing_ok=True)
    watched = {"TORCH_CUDA_SANITIZER": "1"} if kind_here() == "cuda" else {}
    found = _case("streams", "--size", "tiny", **watched)
    yield {"found": found.get("error", ""), "runs": found.get("runs", 0)}


def pass_over_empty_tensors() -> None:
    """Let torch's sanitizer look at tensors that have bytes, alone.

    It knows a tensor by where its bytes are, and one without bytes by its Python id. That comes
    again for a later object: two empty tensors of two streams then are one place to it.
    """
    from torch.cuda._sanitizer import ArgumentHandler

    handle = ArgumentHandler._handle_argument

    def those_with_bytes(self: ArgumentHandler, value: Any, *given: Any, **named: Any) -> None:
        if not isinstance(value, Tensor) or value.numel():
            handle(self, value, *given, **named)

    ArgumentHandler._handle_argument = those_with_bytes  # type: ignore[method-assign]


def streams(size: Size) -> Found:
    """Run schedules some times, for whom watches."""
    pass_over_empty_tensors()
    net, batches = model(size), data(size, 2)
    for number, schedule in enumerate(3 * ("1f1b", "zero-bubble", "async-1f1b"), 1):
        digest_of(net, batches, 4, schedule)
        yield {"runs": number}


# -- how long it takes to begin -------------------------------------------------------------------

BARE = """
import json, sys, time
found, last = {}, time.perf_counter()
def done(what):
    global last
    now = time.perf_counter()
    found[what], last = now - last, now
import torch
done("import torch s")
x = torch.zeros(1, device=sys.argv[1]).item()
done("context s")
import pipedream_rt.pipeline
done("import ours s")
from benchmarks import devices
size = devices.Size(sys.argv[2])
step = devices.plain_step(devices.model(size).to(sys.argv[1]), devices.pinned(size, 1))
done("a model s")
for what in ("first mini-batch s", "second mini-batch s"):
    step(0)
    devices.settle()
    done(what)
print(json.dumps(found))
"""
"""A process without stages, which is timed from its first line on."""


def start(size: Size) -> Found:
    """What the time to the first loss, and to a worker in the place of a killed one, goes to.

    What nobody can avoid is timed in a process without stages: the import of torch, the context of
    the device, and what a first mini-batch takes longer, as kernels are loaded. The rest is ours,
    and so are start and recovery on the host but for that import. The first worker is forked from a
    process that has imported torch; its successor, too.
    """
    device = devices_here()[0]
    bare = _said(["-c", BARE, device, size.name], "bare", {})
    yield bare
    kernels = bare["first mini-batch s"] - bare["second mini-batch s"]
    for where in dict.fromkeys((device, "cpu")):
        told = _case("started", where, "--size", size.name)
        if "error" in told:
            yield told
            continue
        begins = bare["context s"] + kernels if where != "cpu" else 0.0
        yield {
            f"{where}: first loss s": told["start s"],
            f"{where}: first loss, ours s": told["start s"] - bare["import torch s"] - begins,
            f"{where}: recovery s": told["recovery s"],
            f"{where}: recovery, ours s": told["recovery s"] - begins,
        }


def started(size: Size, where: str) -> Found:
    """That of one process, which has used no device before."""
    yield disturbed(model(size), data(size, 4), "1f1b", devices=where)[1]


CASES: dict[str, Callable[..., Found]] = {
    case.__name__.replace("_", "-"): case
    for case in (
        throughput, host, overlap, memory, start, started, hop, sanitizer, streams, bits, bits_of,
        suites, defaults, addresses, killed, ours, processes, pipelining, pipelining_rank,
    )
}  # fmt: skip


def name_of_device() -> str:
    """What the device calls itself."""
    name = kind_here()
    module: Any = torch.get_device_module(name) if name != "cpu" else None
    told: str = getattr(module, "get_device_name", lambda: name)()
    return told


@click.command()
@click.argument("case", type=click.Choice(list(CASES)))
@click.argument("arguments", nargs=-1)
@click.option("--size", type=click.Choice(list(SIZES)), default="gpt2", help="Of the model.")
def main(case: str, arguments: tuple[str, ...], size: str) -> None:
    """Measure a case, and print a JSON object of all that is known whenever there is more."""
    given = [int(each) if each.isdecimal() else each for each in arguments]
    # A process that is asked how long a device takes to begin must not have used it.
    found: dict[str, Any] = {} if case == "started" else {"device": name_of_device()}
    if kind_here() in ("cpu", "standin"):
        found["size"] = size = "tiny"
    begun = time.monotonic()
    try:
        for more in CASES[case](Size(size), *given):
            found |= {**more, "took_s": round(time.monotonic() - begun, 1)}
            print(json.dumps(found), flush=True)
    except Exception as error:  # an error on a device that nobody has tried is what it has found
        found["error"] = f"{type(error).__name__}: {str(error)[:500]}"
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
