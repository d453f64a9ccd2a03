"""Worker processes that come and go: the bits are those of a run that has all of them."""

import functools
import signal
import socket
import sys
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from support import elastic, forked
from support.models import batches, kitchen_sink
from support.nodes import calls_to, own_environment
from support.pinned import Flat as Pipeline
from support.ports import free_port
from support.slurm import until
from support.small import small
from support.two_hosts import SECRET, Child

from pipedream_rt import (
    Checkpoints,
    Clip,
    ConfigError,
    Layout,
    Recovery,
    StageFailed,
    Training,
)

SCRIPT = str(Path(elastic.__file__))
PLANS = {
    "async-1f1b": {},
    "several in an update": {"micro_batches": 2},
    "2bw": {"schedule": "2bw", "micro_batches": 4},
    "clipped by the norm of the model": {
        "schedule": "2bw",
        "training": Training(clip=Clip(norm=0.1)),
    },
    "1f1b": {"schedule": "1f1b", "micro_batches": 3},
    "interleaved": {"schedule": "interleaved-1f1b", "micro_batches": 6, "stages": 6},
    "zero-bubble": {"schedule": "zero-bubble", "micro_batches": 4},
    "replicas": {"stages": 2, "layout": Layout(replicas=(2, 1))},
}


def trained(plan, workers, folder=None, **more):
    """Train, evaluate, train on, and return the state and what was measured."""
    given = {"stages": 3, **PLANS[plan], **more}
    with Pipeline(
        kitchen_sink(), loss_fn=F.cross_entropy, workers=workers, corrections=(),
        optimizer=(torch.optim.AdamW, {"lr": 3e-3}),
        checkpoint=None if folder is None else Checkpoints(folder, resume=True), **given,
    ) as pipe:  # fmt: skip
        losses = [result.loss for result in pipe.train_epoch(batches(8, samples=12))]
        losses.append(pipe.evaluate(batches(2, samples=12)))
        losses += [result.loss for result in pipe.train_epoch(batches(8, samples=12))]
        if folder is not None:
            pipe.save()
        return pipe.fingerprint().digest, losses, len({stage.worker for stage in pipe.stages})


@functools.cache
def alone(plan):
    """The same in one process."""
    return trained(plan, "serial")[:2]


@pytest.mark.thinned(3)
@pytest.mark.processes
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("plan", PLANS)
def test_fewer_processes_give_the_same_bits(plan, count):
    *found, processes = trained(plan, "local", recovery=Recovery(elastic=(1, count)))
    assert tuple(found) == alone(plan)
    assert processes == count


@pytest.mark.processes
def test_a_checkpoint_of_fewer_processes_is_that_of_all(tmp_path):
    """It goes on with another number of them, and the result is that of two runs in one process."""
    for name, workers in {"a": ["serial"] * 2, "b": ["local"] * 2}.items():
        for count, kind in zip((1, 2), workers, strict=True):
            more = {} if kind == "serial" else {"recovery": Recovery(elastic=(1, count))}
            digest = trained("async-1f1b", kind, tmp_path / name, **more)[0]
            (tmp_path / f"{name}{count}").write_text(digest)
    for count in (1, 2):
        assert (tmp_path / f"a{count}").read_text() == (tmp_path / f"b{count}").read_text()


class Job:
    """A script, and workers that are started by hand."""

    def __init__(self, children, folder):
        self.port = free_port()
        self.address = f"127.0.0.1:{self.port}"
        self._folder = folder
        self._children = children

    def start(self, *words):
        child = Child(
            [sys.executable, *words], own_environment(PIPEDREAM_RT_SECRET=SECRET), forked.Popen
        )
        self._children.callback(child.close)
        return child

    def script(self, fewest, most, *stops):
        words = [self.address, *map(str, (fewest, most, *stops))]
        return self.start(SCRIPT, str(self._folder), *words)

    def worker(self, name, *options, persist=True):
        words = [self.address, "--name", name, *["--persist"] * persist, *options]
        return self.start("-m", "pipedream_rt.workers", *words)


@pytest.fixture
def job(tmp_path):
    with ExitStack() as children:
        yield Job(children, tmp_path / "run")


expected = functools.cache(elastic.expected)


def at(script, line):
    """Wait for a step at which a script tells who hosts its stages."""
    assert script.wait_for(line.partition(":")[0]) == line


def ends_alike(script):
    """Let a script go on to its end, with the bits of a run in one process."""
    script.go_on()
    assert script.wait_for("digest") == f"digest {expected()}"
    assert script.ended() == 0


def lose(script, worker):
    worker.signal(signal.SIGKILL)
    worker.ended()
    script.go_on()


@pytest.mark.processes
def test_a_run_goes_on_without_a_worker_and_takes_another_at_a_checkpoint(job):
    script = job.script(2, 3, 15, 25, "35+", 55)
    workers = [job.worker(name) for name in "abc"]
    at(script, "at 15: a b c")
    lose(script, workers[1])
    at(script, "at 25: a a c")
    job.worker("d")
    script.go_on()
    at(script, "at 55: a c d")
    ends_alike(script)
    assert "worker processes: 2, for the work of 3" in script.text
    reasons = [line.split(None, 3)[3] for line in script.lines if line.startswith("restart")]
    assert "worker 'b'" in reasons[0]
    assert reasons[1] == "another worker process has come"
    assert len(reasons) == 2


@pytest.mark.stress
@pytest.mark.processes
def test_a_spare_worker_takes_the_place_of_one_that_is_lost(job):
    script = job.script(3, 3, 15, 35)
    workers = [job.worker(name) for name in "abc"]
    at(script, "at 15: a b c")
    job.worker("spare", "--spare").wait_for("joining the coordinator")
    lose(script, workers[0])
    at(script, "at 35: b c spare")
    ends_alike(script)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("persist", "newcomer"), [(False, ["c"]), (True, ["a", "--spare"])], ids=["c", "twin"]
)
def test_a_worker_that_cannot_be_taken_changes_nothing(job, persist, newcomer):
    """Since workers without --persist would not come back, or since it is a twin of one of them."""
    script = job.script(2, 3, 15, "25~", 55)
    for name in "ab":
        job.worker(name, persist=persist)
    at(script, "at 15: a a b")
    came = job.worker(*newcomer)
    until(lambda: calls_to(job.port) == 3, "another worker at the port")
    script.go_on()
    at(script, "at 55: a a b")
    ends_alike(script)
    if persist:
        came.wait_for("the name 'a' is taken by pid")


class Ends(torch.nn.Module):
    """A layer that ends the process, or tries to."""

    def forward(self, x):
        raise SystemExit(3)


@pytest.mark.processes
@pytest.mark.parametrize("count", [1, 3])
def test_an_exit_in_a_stage_of_a_shared_process_is_told(count):
    layers = [torch.nn.Linear(4, 4), torch.nn.Linear(4, 4), Ends()]
    recovery = Recovery(elastic=(1, count), max_restarts=0)
    with (
        small(layers, workers="local", recovery=recovery) as pipe,
        pytest.raises(StageFailed, match=r"stage 2, F0.*SystemExit: 3"),
    ):
        list(pipe.train_epoch([(torch.randn(4, 4), torch.randn(4, 4))]))


CLOSES = """
import os, signal, sys, time
from datetime import timedelta
import torch
from torch import nn
from pipedream_rt import Checkpoints, Pipeline, PipelineClosed, Recovery

closed = []
def close(*_):
    pipe.close()
    closed.append(time.monotonic())
signal.signal(signal.SIGALRM, close)

with Pipeline([nn.Linear(4, 4) for _ in range(3)], stages=3, loss_fn=nn.functional.mse_loss,
              optimizer=(torch.optim.SGD, {"lr": 0.1}), workers=sys.argv[2],
              checkpoint=Checkpoints(sys.argv[1], every=10),
              recovery=Recovery(max_restarts=3, start=timedelta(seconds=100))) as pipe:
    print("opened", flush=True)
    sys.stdin.readline()
    signal.setitimer(signal.ITIMER_REAL, 1)
    try:
        while True:
            pipe.submit(torch.randn(4, 4), torch.randn(4, 4)).result()
    except PipelineClosed:
        print("late" if time.monotonic() - closed[0] > 30 else "soon", flush=True)
"""


@pytest.mark.processes
def test_a_handler_that_closes_while_workers_are_awaited_waits_for_nobody(job, tmp_path):
    (tmp_path / "closes.py").write_text(CLOSES)
    script = job.start(str(tmp_path / "closes.py"), str(tmp_path / "run"), job.address)
    workers = [job.worker(name) for name in "abc"]
    script.wait_for("opened")
    lose(script, workers[0])
    script.wait_for("soon")
    assert script.ended() == 0
    with socket.create_server(("127.0.0.1", job.port)):
        pass  # nobody listens there any more


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"recovery": {"elastic": (0, 2)}}, r"elastic must be the fewest and the most.*\(0, 2\)"),
        ({"recovery": {"elastic": (3, 2)}}, r"elastic must be the fewest and the most.*\(3, 2\)"),
        ({"recovery": {"elastic": 2}}, "elastic must be the fewest and the most.*not 2"),
        ({"recovery": {"elastic": (1, True)}}, "elastic must be the fewest and the most"),
        ({"recovery": {"elastic": (1, 4)}}, "the plan has work for 3 worker processes at most"),
        ({"recovery": {"elastic_wait": 3}}, "elastic_wait must be a positive datetime.timedelta"),
        ({"recovery": {"elastic": (1, 2)}, "workers": "serial"}, 'workers="serial" has none'),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_starts(given, words):
    workers, start = given.get("workers", "local"), timedelta(seconds=5)
    with pytest.raises(ConfigError, match=words):
        small(workers=workers, recovery=Recovery(start=start, **given["recovery"]))
