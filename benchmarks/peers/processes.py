"""Processes that run a peer's stages, a clock that they share, and the line that they print.

A script in this folder calls ``main``, or ``measure`` with a function that is run once in each
process. All waits have a deadline, and when one process fails the others are ended.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NoReturn

# Before torch is imported, here and in the processes that inherit them.
os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"
if sys.platform == "linux":
    interface = os.environ.get("PEERS_INTERFACE", "lo")
    os.environ["GLOO_SOCKET_IFNAME"] = os.environ["TP_SOCKET_IFNAME"] = interface
# Every script imports this module before workload, which is in the folder above.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import Tensor
from workload import WARM_UP, Workload

DEADLINE_S = 600.0
UNAVAILABLE = 3


class Clock:
    """Times the mini-batches after the warm-up.

    Args:
        barrier: Where all processes that take the time wait for each other when they are warm.
    """

    def __init__(self, barrier: Any = None) -> None:
        self._barrier = barrier
        self.start_s = self.end_s = 0.0

    def over(self, items: list[Any]) -> Iterator[Any]:
        """Yield the items, warm-up first; each must be done when the next is asked for."""
        for i, item in enumerate(items):
            if i == WARM_UP:
                if self._barrier is not None:
                    self._barrier.wait(DEADLINE_S)
                # Monotonic time is one and the same for all processes of a machine.
                self.start_s = time.monotonic()
            yield item
        self.end_s = time.monotonic()


class Worker:
    """One of the processes.

    Args:
        rank: Its number.
        count: Of all processes.
        barrier: Of all processes.
        folder: One that is removed at the end.
    """

    def __init__(self, rank: int, count: int, barrier: Any, folder: str) -> None:
        self.rank, self.count, self.barrier = rank, count, barrier
        self.rendezvous = f"file://{folder}/rendezvous"
        self.timeout = timedelta(seconds=DEADLINE_S)

    def join_group(self) -> None:
        """Make the process group, gloo over loopback."""
        torch.distributed.init_process_group(
            "gloo",
            init_method=self.rendezvous,
            rank=self.rank,
            world_size=self.count,
            timeout=self.timeout,
        )

    def leave_group(self) -> None:
        """Leave it when all are done."""
        self.barrier.wait(DEADLINE_S)
        torch.distributed.destroy_process_group()


# What is run in each process: it returns its clock, if it has one, and the last mini-batch's loss.
Work = Callable[..., tuple["Clock | None", "float | None"]]


def micro_batches(w: Workload, batch: tuple[Tensor, Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Split a mini-batch into those of one size that every peer uses."""
    x, y = batch
    return list(zip(x.chunk(w.micro_batches), y.chunk(w.micro_batches), strict=True))


def measure(work: Work, count: int, w: Workload, *rest: Any) -> dict[str, float]:
    """Run the work in so many processes; return the time of all and the mean of their losses."""
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(count)
    running: dict[Any, Any] = {}
    results: list[tuple[float, float, float | None]] = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            for rank in range(count):
                ours, theirs = context.Pipe(duplex=False)
                arguments = (work, (rank, count, barrier, folder), theirs, w, *rest)
                process = context.Process(target=_child, args=arguments, daemon=True)
                process.start()
                theirs.close()
                running[ours] = process
            results = _collect(running)
        finally:
            for process in running.values():
                process.kill()
                process.join()
    timed = [(start, end) for start, end, _ in results if end]
    losses = [loss for _, _, loss in results if loss is not None]
    seconds = max(end for _, end in timed) - min(start for start, _ in timed)
    return {"seconds": seconds, **({"loss": statistics.fmean(losses)} if losses else {})}


def _collect(running: dict[Any, Any]) -> list[tuple[float, float, float | None]]:
    """Wait for a result and a clean end of every process."""
    until = time.monotonic() + DEADLINE_S
    results, waiting = [], set(running)
    while waiting:
        ready = wait(list(waiting), timeout=max(0.0, until - time.monotonic()))
        if not ready:
            raise SystemExit(f"{len(waiting)} processes gave no result within {DEADLINE_S:g} s")
        for pipe in ready:
            try:
                results.append(pipe.recv())
            except EOFError:
                raise SystemExit("a process failed before its result; its error is above") from None
            waiting.discard(pipe)
    for process in running.values():
        process.join(max(0.0, until - time.monotonic()))
        if process.exitcode != 0:
            raise SystemExit(f"a process ended with {process.exitcode} after its result")
    return results


def _child(
    work: Work, place: tuple[int, int, Any, str], pipe: Connection, w: Workload, *rest: Any
) -> None:
    """Run the work here and send what it measured."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if machines := os.environ.get("PEERS_MACHINES"):  # network namespaces, by rank
        from chain import move_to

        move_to(machines.split(",")[place[0]])
    # Standard output has the result alone; some peers write their log to it.
    os.dup2(2, 1)
    torch.set_num_threads(1)
    clock, loss = work(Worker(*place), w, *rest)
    pipe.send((clock.start_s, clock.end_s, loss) if clock else (0.0, 0.0, loss))
    pipe.close()


def _end_with_parent() -> None:
    """End this process when the one that started it is gone."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


def unavailable(reason: str) -> NoReturn:
    """Say why this peer cannot run here."""
    print(json.dumps({"unavailable": reason}))
    raise SystemExit(UNAVAILABLE)


def main(run: Callable[..., dict[str, float]], *schedules: str) -> None:
    """Read the command line, run, and print the line of the result.

    Args:
        run: Takes a workload, and the schedule where there are any.
        schedules: The names of all.
    """
    usage = f"usage: {sys.argv[0]} WORKLOAD_JSON" + (f" {'|'.join(schedules)}" * bool(schedules))
    # So that what is to be cleaned up is, when a deadline outside ends this script.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    given = sys.argv[1:]
    if len(given) != 1 + bool(schedules) or (schedules and given[1] not in schedules):
        raise SystemExit(usage)
    outcome = run(Workload.from_json(given[0]), *given[1:])
    print(json.dumps(outcome), flush=True)
