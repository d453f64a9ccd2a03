"""What an accelerator does: one case each, whose result is one JSON object on the last line.

``python -m benchmarks devices`` runs all of them in under 25 minutes and shows a table. They speak
to whatever accelerator torch has. Where there is none, or where a case needs several, it ends with
exit code 3 and says why. What a case cannot do on a device, as an error, is its result.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import secrets
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any, NoReturn

import click
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pipedream_rt
from pipedream_rt.devices import choice
from pipedream_rt.models.tensors import accelerator_here

UNAVAILABLE = 3
MICRO_BATCHES = 8
SEED = 0


class Size:
    """How large a model and its mini-batches are."""

    def __init__(self, kind: str) -> None:
        self.width, self.heads, self.blocks, self.words, self.length, self.samples, self.count = (
            SIZES[kind]
        )


SIZES = {
    "tiny": (32, 2, 4, 64, 16, 8, 4),
    "small": (256, 4, 6, 8192, 128, 16, 10),
    "gpt2": (768, 12, 12, 50304, 512, 32, 10),
}
"""Width, heads, blocks, words, words of a sample, samples of a mini-batch, mini-batches."""


class Embedding(nn.Module):
    """Words and their places."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.words = nn.Embedding(size.words, size.width)
        self.places = nn.Embedding(size.length, size.width)

    def forward(self, ids: Tensor) -> Tensor:
        """Return (B, T, width) of ids (B, T)."""
        return self.words(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))


class Block(nn.Module):
    """A block of GPT-2."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.before, self.between = nn.LayerNorm(size.width), nn.LayerNorm(size.width)
        self.all, self.out = (
            nn.Linear(size.width, 3 * size.width),
            nn.Linear(size.width, size.width),
        )
        self.up, self.down = (
            nn.Linear(size.width, 4 * size.width),
            nn.Linear(4 * size.width, size.width),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return (B, T, width)."""
        b, t, c = x.shape
        q, k, v = (
            part.view(b, t, self.heads, c // self.heads).transpose(1, 2)
            for part in self.all(self.before(x)).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(b, t, c))
        return x + self.down(F.gelu(self.up(self.between(x))))


def model(size: Size) -> nn.Sequential:
    """GPT-2 small, or a tiny one."""
    torch.manual_seed(SEED)
    blocks = [Block(size) for _ in range(size.blocks)]
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


def accelerators(least: int = 1) -> list[str]:
    """The names of the accelerators; ends if there are too few."""
    there = choice.accelerators()
    if len(there) < least:
        unavailable(f"it needs {least} accelerators, and there are {len(there)}")
    return there


# -- throughput -----------------------------------------------------------------------------------


def measured(
    size: Size, step: Callable[[int], object], settle: Callable[[], object]
) -> list[float]:
    """Measure so many mini-batches, after a few that do not count.

    Returns:
        Samples per second, and this process's seconds of a processor for a mini-batch.
    """
    for number in range(3):
        step(number)
    settle()
    start, used = time.perf_counter(), time.process_time()
    for number in range(size.count):
        step(number)
    settle()
    wall = time.perf_counter() - start
    return [size.samples * size.count / wall, (time.process_time() - used) / size.count]


def plainly(size: Size, net: nn.Module, deterministic: bool = False) -> tuple[list[float], str]:
    """One process, one device, no stages: micro-batches whose gradients are added up."""
    device = accelerators()[0]
    torch.use_deterministic_algorithms(deterministic, warn_only=True)
    net, batches = copy.deepcopy(net).to(device), data(size, size.count)
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-4)

    def step(number: int) -> None:
        x, y = (t.to(device, non_blocking=True) for t in batches[number % len(batches)])
        for of_x, of_y in zip(x.chunk(MICRO_BATCHES), y.chunk(MICRO_BATCHES), strict=True):
            (loss_fn(net(of_x), of_y) / MICRO_BATCHES).backward()
        optimizer.step()
        optimizer.zero_grad()

    found = measured(size, step, torch.accelerator.synchronize)
    digest = hashlib.sha256()
    for tensor in net.state_dict().values():
        digest.update(tensor.cpu().numpy().tobytes())
    return found, digest.hexdigest()


def wide(size: Size) -> nn.Sequential:
    """An MLP of wide layers, over the words that `data` draws."""
    torch.manual_seed(SEED)
    width = 8 * size.width
    inner = [layer for _ in range(4) for layer in (nn.Linear(width, width), nn.GELU())]
    return nn.Sequential(
        nn.Embedding(size.words, size.width), nn.Linear(size.width, width), *inner,
        nn.Linear(width, size.width), nn.Linear(size.width, size.words),
    )  # fmt: skip


def throughput(size: Size) -> dict[str, Any]:
    """Samples per second, and microseconds of the processor for an action, of one process.

    With TF32, so that the device waits for nobody's arithmetic. An action is a forward or a
    backward of a micro-batch on one stage. Each result is told as it comes.
    """
    torch.set_float32_matmul_precision("high")
    device = accelerators()[0]
    found: dict[str, Any] = {}

    def tell(key: str, rates: list[float], actions: int) -> None:
        found[f"{key} samples/s"] = rates[0]
        found[f"{key} cpu us/action"] = 1e6 * rates[1] / actions
        click.echo(f"{key}: {rates[0]:.1f} samples/s, {1e6 * rates[1] / actions:.0f} us", err=True)

    for name, net in (("gpt2", model(size)), ("mlp", wide(size))):
        tell(f"{name} plain", plainly(size, net)[0], 2 * MICRO_BATCHES)
        for stages, schedule in ((1, "1f1b"), *product((2, 4), ("1f1b", "async-1f1b"))):
            options = options_of(stages, schedule, devices=device, workers="serial")
            with pipedream_rt.Pipeline(copy.deepcopy(net), **options) as pipe:
                batches = data(size, size.count)
                rates = measured(size, lambda n: pipe.submit(*batches[n]), pipe.flush)  # noqa: B023
            tell(f"{name} {stages} {schedule}", rates, 2 * stages * MICRO_BATCHES)
    return found


def options_of(stages: int, schedule: str, **others: Any) -> dict[str, Any]:
    """The arguments of a pipeline."""
    return {
        "stages": stages, "loss_fn": loss_fn, "optimizer": (torch.optim.AdamW, {"lr": 3e-4}),
        "schedule": schedule, "micro_batches": MICRO_BATCHES, "corrections": (), "seed": SEED,
        "training": pipedream_rt.Training(check_loss=0, verify=False), **others,
    }  # fmt: skip


def of_pipeline(size: Size, **options: Any) -> dict[str, Any]:
    """Samples per second of a pipeline, and how long it took to start."""
    start = time.perf_counter()
    with pipedream_rt.Pipeline(model(size), **options) as pipe:
        batches = data(size, size.count)
        pipe.submit(*batches[0]).result()
        started_s = time.perf_counter() - start
        rates = measured(
            size, lambda number: pipe.submit(*batches[number % len(batches)]), pipe.flush
        )
        counters = pipe.statistics()
    return {
        "samples_per_s": rates[0], "start_s": started_s,
        "devices": sorted({each["device"] for each in counters}),
    }  # fmt: skip


def ours(size: Size, stages: int, schedule: str) -> dict[str, Any]:
    """Stages that are dealt to several devices."""
    devices = torch.device(accelerators(2)[0]).type
    return of_pipeline(size, **options_of(stages, schedule, devices=devices, workers="local"))


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


def processes(size: Size, stages: int, schedule: str) -> dict[str, Any]:
    """Stages on one device, in a process each."""
    with workers_on(accelerators()[0], stages) as address:
        return of_pipeline(size, **options_of(stages, schedule, workers=address))


def pipelining(size: Size, stages: int) -> dict[str, Any]:
    """torch.distributed.pipelining with 1F1B, a process and a device for each stage."""
    accelerators(stages)
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "pipelining-rank", folder, str(stages)]
        tiny = ["--size", "tiny"] if size.width == SIZES["tiny"][0] else []
        ranks = [
            subprocess.Popen([*command, str(rank), *tiny], stdout=subprocess.PIPE, text=True)
            for rank in range(stages)
        ]
        said = [rank.communicate(timeout=600)[0].splitlines() for rank in ranks]
    if not said[0]:
        raise RuntimeError(f"rank 0 ended with {ranks[0].returncode}")
    result: dict[str, Any] = json.loads(said[0][-1])
    return result


def pipelining_rank(size: Size, folder: str, stages: int, rank: int) -> dict[str, Any]:
    """One rank of it."""
    import torch.distributed as dist
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    device = torch.device(accelerators(stages)[rank])
    torch.accelerator.set_device_index(device.index)
    backend = dist.get_default_backend_for_device(device)
    dist.init_process_group(backend, f"file://{folder}/meet", rank=rank, world_size=stages)
    net = model(size)
    bounds = [len(net) * n // stages for n in range(stages + 1)]
    part = net[bounds[rank] : bounds[rank + 1]].to(device)
    stage = PipelineStage(part, rank, stages, device)
    schedule = Schedule1F1B(stage, MICRO_BATCHES, loss_fn=loss_fn)
    optimizer = torch.optim.AdamW(part.parameters(), lr=3e-4)
    batches = data(size, size.count)

    def step(number: int) -> None:
        x, y = batches[number % len(batches)]
        given = (x.to(device),) if rank == 0 else ()
        schedule.step(*given, target=y.to(device) if rank == stages - 1 else None)
        optimizer.step()
        optimizer.zero_grad()

    def settle() -> None:
        torch.accelerator.synchronize()
        dist.barrier()

    found = {"samples_per_s": measured(size, step, settle)[0]}
    dist.destroy_process_group()
    return found


# -- what decides the design ----------------------------------------------------------------------


def killed(size: Size) -> dict[str, Any]:
    """What the reader of shared memory of a device sees once its owner is killed."""
    device = accelerators()[0]
    if torch.device(device).type != "cuda":
        unavailable("torch shares memory of devices between processes on CUDA alone")
    import torch.multiprocessing as mp

    context = mp.get_context("spawn")
    given, done = context.Queue(), context.Event()
    owner = context.Process(target=_own, args=(device, given, done), daemon=True)
    owner.start()
    tensor, handle = given.get(timeout=120)
    event = torch.cuda.Event.from_ipc_handle(torch.device(device), handle)
    found: dict[str, Any] = {"before": float(tensor.sum()), "event_before": event.query()}
    os.kill(owner.pid or 0, signal.SIGKILL)
    owner.join(30)
    for name, look in (
        ("after", lambda: float(tensor.sum())),
        ("event_after", event.query),
        ("own_memory_after", lambda: float(torch.ones(8, device=device).sum())),
    ):
        try:
            found[name] = look()
        except RuntimeError as error:
            found[name] = str(error).partition("\n")[0]
    return found


def _own(device: str, given: Any, done: Any) -> None:
    """Own memory that another process reads, until killed."""
    tensor = torch.ones(1 << 20, device=device)
    event = torch.cuda.Event(interprocess=True)
    event.record()
    event.synchronize()
    given.put((tensor, event.ipc_handle()))
    done.wait(300)


def hop(size: Size) -> dict[str, Any]:
    """Time of the host, and in all, from one stream to another, and from there to the host."""
    device = accelerators()[0]
    one, other, out = (torch.Stream(device) for _ in range(3))
    found: dict[str, Any] = {}
    for count in (1 << 18, 1 << 22) if size.samples > 8 else (1 << 10,):
        with one:
            x = torch.ones(count, device=device)
        pinned = torch.empty(count, pin_memory=True)
        torch.accelerator.synchronize()
        times, there, down = [], [], []
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
        mib = f"{4 * count / 2**20:g} MiB"
        found[f"host us, {mib}"] = 1e6 * statistics.median(times)
        found[f"in all us, {mib}"] = 1e6 * statistics.median(there)
        found[f"to the host us, {mib}"] = 1e6 * statistics.median(down)
    return found


def memory(size: Size) -> dict[str, Any]:
    """What a process takes of a device before it computes, and a stage beside the formula."""
    device = accelerators()[0]
    torch.zeros(1, device=device)
    torch.accelerator.synchronize()
    free, total = torch.accelerator.get_memory_info(device)
    options = options_of(2, "async-1f1b", devices=device, workers="serial")
    with pipedream_rt.Pipeline(model(size), **options) as pipe:
        for batch in data(size, 4):
            pipe.submit(*batch)
        pipe.flush()
        counters = pipe.statistics()
    # Versions, the gradients of an update, and the two moments of AdamW.
    formula = sum(each["weight_bytes"] * (each["versions_kept_most"] + 3) for each in counters)
    return {
        "taken_mib": (total - free) / 2**20,
        "formula_mib": formula / 2**20,
        "peak_mib": counters[0]["peak_device_memory_bytes"] / 2**20,
    }


def addresses(size: Size) -> dict[str, Any]:
    """Whether a product has the same bits for operands that begin at other addresses."""
    device = accelerators()[0]
    torch.manual_seed(SEED)
    n = size.width
    a, b = torch.randn(n, n), torch.randn(n, n)
    expected = a.to(device) @ b.to(device)
    found = {}
    for offset in (512, 64, 16, 4):
        at = offset // 4
        moved = [torch.empty(n * n + at, device=device)[at:].view(n, n) for _ in (a, b)]
        for to, given in zip(moved, (a, b), strict=True):
            to.copy_(given)
        found[f"equal at {offset} bytes"] = bool(torch.equal(moved[0] @ moved[1], expected))
    return found


# -- what is promised -----------------------------------------------------------------------------


FLUSHING = ("gpipe", "1f1b", "interleaved-1f1b", "zero-bubble")
ASYNCHRONOUS = ("2bw", "async-1f1b", "async-1f1b+vertical-sync")


def digest_of(size: Size, stages: int, schedule: str) -> str:
    """The fingerprint after a few mini-batches."""
    options = options_of(stages, schedule, devices=accelerators()[0], workers="serial")
    with pipedream_rt.Pipeline(model(size), **options) as pipe:
        for batch in data(size, 4):
            pipe.submit(*batch)
        return pipe.fingerprint().digest


def bits(size: Size) -> dict[str, Any]:
    """Whether runs have the same bits, as torch is by default and with deterministic algorithms.

    A plain loop twice; then each schedule: those that flush against one stage, and the others
    twice. Each result is told as it comes.
    """
    found: dict[str, Any] = {}

    def tell(what: str, one: str, other: str) -> None:
        kind = "deterministic" if torch.are_deterministic_algorithms_enabled() else "by default"
        found[f"{what}, {kind}"] = one == other
        click.echo(f"{what}, {kind}: {one == other}", err=True)

    net = model(size)
    for deterministic in (False, True):
        tell("plain", *(plainly(size, net, deterministic)[1] for _ in range(2)))
        whole = digest_of(size, 1, "1f1b")
        for schedule in FLUSHING if deterministic else ("1f1b",):
            tell(schedule, digest_of(size, 4, schedule), whole)
        for schedule in ASYNCHRONOUS if deterministic else ("async-1f1b",):
            tell(schedule, *(digest_of(size, 4, schedule) for _ in range(2)))
    return found


def recovery(size: Size) -> dict[str, Any]:
    """Seconds to go on after SIGKILL, and whether the bits are those of a calm run."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    device = accelerators()[0]
    digests, seconds = [], 0.0
    for disturbed in (False, True):
        with tempfile.TemporaryDirectory() as folder:
            options = options_of(
                2, "async-1f1b", devices=device, workers="local",
                checkpoint=pipedream_rt.Checkpoints(folder, every=2),
                recovery=pipedream_rt.Recovery(max_restarts=1),
            )  # fmt: skip
            with pipedream_rt.Pipeline(model(size), **options) as pipe:
                for result in pipe.train_epoch(data(size, 6)):
                    if disturbed and result.step == 2:
                        cluster: Any = pipe._group.cluster
                        (process,) = cluster._local.processes.values()
                        os.kill(process.pid, signal.SIGKILL)
                digests.append(pipe.fingerprint().digest)
                seconds = sum(each.seconds for each in pipe.restarts)
    return {"seconds": seconds, "bits equal": digests[0] == digests[1]}


def sanitizer(size: Size) -> dict[str, Any]:
    """Whether torch's own check of the order of streams finds anything."""
    if torch.device(accelerators()[0]).type != "cuda":
        unavailable("TORCH_CUDA_SANITIZER is for CUDA alone")
    environment = {**os.environ, "TORCH_CUDA_SANITIZER": "1"}
    command = [sys.executable, __file__, "bits", "--size", "tiny"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    lines = done.stdout.splitlines()
    told: dict[str, Any] = json.loads(lines[-1]) if lines else {"error": done.stderr[-2000:]}
    return {"found": told.get("error", "")}


CASES: dict[str, Callable[..., dict[str, Any]]] = {
    "throughput": throughput, "ours": ours, "processes": processes, "pipelining": pipelining,
    "pipelining-rank": pipelining_rank, "killed": killed, "hop": hop, "memory": memory,
    "addresses": addresses, "bits": bits, "recovery": recovery, "sanitizer": sanitizer,
}  # fmt: skip


@click.command()
@click.argument("case", type=click.Choice(list(CASES)))
@click.argument("arguments", nargs=-1)
@click.option("--size", type=click.Choice(list(SIZES)), default="gpt2", help="Of the model.")
def main(case: str, arguments: tuple[str, ...], size: str) -> None:
    """Measure a case, and print one JSON object."""
    given = [int(each) if each.isdecimal() else each for each in arguments]
    try:
        found = CASES[case](Size(size), *given)
    except Exception as error:  # an error on a device that nobody has tried is what it has found
        found = {"error": f"{type(error).__name__}: {str(error)[:500]}"}
    name = accelerator_here()
    module = torch.get_device_module(name) if name is not None else None
    device = getattr(module, "get_device_name", lambda: str(name))()
    click.echo(json.dumps({**found, "device": device}))


if __name__ == "__main__":
    main()
