"""The same on worker processes: the judge is the same oracle."""

import gc
import itertools
import logging.handlers
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from support.deadlines import LATEST_S
from support.inside import kill, pids
from support.models import (
    OPTIMIZERS,
    POINTS,
    MakePair,
    Raises,
    Stalls,
    UsePair,
    batches,
    kitchen_sink,
    mlp,
    regression,
)
from support.nodes import is_alive
from support.oracle import assert_same, oracle
from support.pinned import Pipeline
from torch import nn

from pipedream_rt import (
    Checkpoints,
    ConfigError,
    MessageTimeout,
    NonFiniteLoss,
    PeerLost,
    PipelineClosed,
    RendezvousTimeout,
    StageFailed,
    TransportError,
    WorkerLost,
)
from pipedream_rt.cluster import processes
from pipedream_rt.transport import fence
from pipedream_rt.transport.fence import NoEndpoint
from pipedream_rt.transport.rpc.endpoint import RPCEndpoint

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("environment")]


def open_pipe(model=None, **kwargs):
    defaults = {"stages": 3, "loss_fn": F.mse_loss, "optimizer": (torch.optim.SGD, {"lr": 0.1})}
    return Pipeline(model or mlp(), **{**defaults, **kwargs})


@pytest.mark.parametrize(
    ("n", "optimizer"), [(1, "sgd"), (2, "adam"), (3, "adamw-foreach"), (5, "adamw-fused")]
)
def test_async_equals_the_oracle(n, optimizer):
    """Two epochs without a drain between them, a flush and an evaluation on the way.

    Then the learning rate is another one in each mini-batch, with which it travels.
    """
    data = batches(12)
    cls, kwargs = OPTIMIZERS[optimizer]
    rates = [kwargs["lr"]] * 17 + [kwargs["lr"] / (1 + t) for t in range(7)]
    expected, losses = oracle(
        kitchen_sink(), POINTS[n], data + data, F.cross_entropy, lambda p: cls(p, **kwargs), seed=2,
        rates=rates,
    )  # fmt: skip
    with open_pipe(
        kitchen_sink(), stages=POINTS[n][1:] or 1, loss_fn=F.cross_entropy,
        optimizer=OPTIMIZERS[optimizer], seed=2,
    ) as pipe:  # fmt: skip
        found = [r.loss for r in pipe.train_epoch(data)]
        found += [r.loss for r in pipe.train_epoch(data[:5])]
        pipe.evaluate(data[:2])
        results = []
        for rate, (x, y) in zip(rates[17:], data[5:], strict=True):
            pipe.optimizer.param_groups[0]["lr"] = rate
            results.append(pipe.submit(x, y))
        found += [r.result().loss for r in results]
        assert_same(pipe.state_dict(), expected)
        counters = pipe.statistics()
    assert found == losses
    assert [c["versions_kept_most"] for c in counters] == list(range(n, 0, -1))
    assert [c["buffers_allocated"] for c in counters] == list(range(n, 0, -1))


@pytest.mark.parametrize(
    ("schedule", "n", "k", "reads", "options"),
    [
        ("1f1b", 3, 4, "flushed", {"slack": (1, 1)}),
        ("interleaved-1f1b", 4, 4, "flushed", {"stages_per_worker": 2}),
        # One worker with all stages, which sends to itself.
        ("interleaved-1f1b", 2, 2, "flushed", {"stages_per_worker": 2}),
        ("zero-bubble", 3, 5, "flushed", {}),
        ("async-1f1b", 3, 1, "async-1f1b", {"slack": (0, 2)}),
        ("async-1f1b+vertical-sync", 4, 1, "vertical-sync", {}),
        ("2bw", 3, 4, "2bw", {}),
    ],
)
def test_every_schedule_equals_the_oracle(schedule, n, k, reads, options):
    """Flushing ones equal plain accumulation, so the oracle has one stage and no slack for them."""
    data = batches(8, samples=7)
    cls, kwargs = OPTIMIZERS["adamw"]
    points, more = ([0], {}) if reads == "flushed" else (POINTS[n], options)
    expected, losses = oracle(
        kitchen_sink(), points, data, F.cross_entropy, lambda p: cls(p, **kwargs), k=k, reads=reads,
        **more,
    )  # fmt: skip
    with open_pipe(
        kitchen_sink(), stages=POINTS[n][1:], loss_fn=F.cross_entropy,
        optimizer=OPTIMIZERS["adamw"], schedule=schedule, micro_batches=k, **options,
    ) as pipe:  # fmt: skip
        found = [loss for r in pipe.train_epoch(data) for loss in r.losses]
        assert_same(pipe.state_dict(), expected)
    assert found == losses


def test_references_and_values_of_every_kind(monkeypatch):
    """RRefs of sub-modules, parameters and optimizers; a dataclass between two processes."""
    monkeypatch.setenv("PIPEDREAM_RT_RPC", "on")
    torch.manual_seed(0)
    model = nn.Sequential(MakePair(8), UsePair(8))
    with open_pipe(model, stages=2) as pipe:
        assert len(list(pipe.train_epoch(regression(4)))) == 4
        state = pipe.state_dict()
        module = pipe.stages[1].rref.to_here()
        assert torch.equal(module[0].linear.weight, state["1.linear.weight"])
        references = pipe.parameter_rrefs()
        assert isinstance(references[0], torch.distributed.rpc.PyRRef)
        assert [r.owner_name() for r in references] == ["worker-0"] * 2 + ["worker-1"] * 2
        assert torch.equal(references[3].to_here(), state["1.linear.bias"])
        assert len(pipe.optimizer.remote_optimizers) == 2
        assert pipe.optimizer.remote_optimizers[0].owner_name() == "worker-0"
        assert pipe.optimizer.state_dict()["param_groups"][0]["lr"] == 0.1
        assert "worker-1" in pipe.explain()
        with pytest.raises(ValueError, match="has an open pipeline on worker processes already"):
            open_pipe(stages=1)
        # ... and that refusal has not harmed the open one.
        assert len(list(pipe.train_epoch(regression(2)))) == 2


DATA = batches(24), regression(24)


def two_pipes(**options):
    """Return how to open one pipeline, and another with a model and an optimizer of its own."""
    torch.manual_seed(0)
    images = {"stages": POINTS[2][1:], "loss_fn": F.cross_entropy, "optimizer": OPTIMIZERS["adam"]}
    return (
        partial(open_pipe, kitchen_sink(), **images, **options),
        partial(open_pipe, mlp(), stages=2, seed=3, **options),
    )


@pytest.fixture(scope="module")
def alone():
    """The losses and the weights of each where no other is open."""
    found = []
    for opened, data in zip(two_pipes(), DATA, strict=True):
        with opened() as pipe:
            found.append(([r.loss for r in pipe.train_epoch(data)], pipe.state_dict()))
    return found


def test_two_pipelines_have_the_bits_of_each_alone_if_a_worker_of_each_is_killed(alone):
    pipes = [opened(max_restarts=1) for opened in two_pipes()]
    with pipes[0], pipes[1]:
        found = [], []
        epochs = (pipe.train_epoch(data) for pipe, data in zip(pipes, DATA, strict=True))
        for results in zip(*epochs, strict=True):
            for losses, result in zip(found, results, strict=True):
                losses.append(result.loss)
            if (step := results[0].step) in (8, 16):
                kill(pipes[step // 8 - 1], "worker-1")
        assert [len(pipe.restarts) for pipe in pipes] == [1, 1]
        for pipe, losses, expected in zip(pipes, found, alone, strict=True):
            assert losses == expected[0]
            assert_same(pipe.state_dict(), expected[1])


def test_two_threads_open_a_pipeline_each(alone):
    """At once: then both are about to have the one agent that torch allows."""
    begin = threading.Barrier(2)

    def trained(opened, data):
        begin.wait(LATEST_S)
        with opened() as pipe:
            return [r.loss for r in pipe.train_epoch(data)]

    with ThreadPoolExecutor(2) as threads:
        losses = list(threads.map(trained, two_pipes(), DATA, timeout=LATEST_S))
    assert losses == [expected for expected, _ in alone]


def has_agent(pipe):
    return not pipe._group.cluster.without_rpc


@pytest.mark.rights
def test_one_of_the_open_pipelines_has_the_agent_of_torch(caplog, monkeypatch):
    """And the next one that is opened, once it is closed."""
    monkeypatch.setattr(fence, "_has_warned", False)
    with caplog.at_level("INFO"):
        pipes = [open_pipe(stages=1) for _ in range(3)]
    assert list(map(has_agent, pipes)) == [True, False, False]
    words = "another pipeline of the process has the one agent that torch allows"
    # Who fetches no modules hears nothing of it.
    assert "RPC" not in caplog.text + "".join(pipe.explain() for pipe in pipes)
    with pytest.raises(ConfigError, match=words):
        pipes[1].stages[0].rref.to_here()
    for closed, has in ((1, False), (0, True)):
        pipes.pop(closed).close()
        pipes.append(open_pipe(stages=1))
        assert has_agent(pipes[-1]) == has
        for pipe in pipes:
            assert len(list(pipe.train_epoch(regression(2)))) == 2
    for pipe in pipes:
        pipe.close()


@pytest.mark.parametrize(("victim", "idle"), [(0, True), (1, False), (2, False)])
def test_a_killed_worker_is_named_before_its_signs_of_life_are_missed(victim, idle):
    with open_pipe(heartbeat=timedelta(seconds=2 * LATEST_S)) as pipe:
        data = regression(20)
        results = pipe.train_epoch(data if idle else itertools.cycle(data))
        for _ in data:
            next(results)
        if idle:
            pipe.flush()
            results = pipe.train_epoch(data)
        victims = pids(pipe)
        os.kill(victims[f"worker-{victim}"], signal.SIGKILL)
        start = time.monotonic()
        with pytest.raises(
            WorkerLost, match=rf"worker 'worker-{victim}' \(stage {victim}.*SIGKILL"
        ) as e:
            list(results)
        assert time.monotonic() - start < LATEST_S
        assert (e.value.worker, e.value.stage) == (f"worker-{victim}", victim)
        with pytest.raises(PipelineClosed, match="has failed: worker"):
            pipe.flush()
    assert not any(map(is_alive, victims.values()))


@pytest.mark.parametrize(("stage", "where"), [(0, "backward"), (2, "forward")])
def test_an_error_on_a_stage_arrives_with_type_words_and_traceback(stage, where):
    layers = list(mlp())
    layers.insert(2 * stage + 1, Raises(at=3, where=where))
    points = [p + (p > 2 * stage) for p in (2, 4)]
    pipe = open_pipe(nn.Sequential(*layers), stages=points)
    victims = pids(pipe)
    with pytest.raises(
        StageFailed, match=f"stage {stage}, {where[0].upper()}3: ZeroDivisionError"
    ) as e:
        list(pipe.train_epoch(regression(50)))
    assert isinstance(e.value.__cause__, ZeroDivisionError)
    assert "the layer's own words" in str(e.value.__cause__)
    assert "Traceback" in e.value.trace
    assert not any(map(is_alive, victims.values()))


def test_an_error_while_a_stage_is_built():
    class Bomb(nn.Module):
        def __setstate__(self, state):
            raise MemoryError("too large for this worker")

    with pytest.raises(StageFailed, match=r"stage 1, start: MemoryError: too large"):
        open_pipe(nn.Sequential(nn.Linear(8, 8), Bomb()), stages=2)


def test_a_folder_a_path_and_a_variable_that_are_no_utf_8(tmp_path, monkeypatch):
    """As a folder has that was made under an older locale; checkpoints there are read too."""
    said, log = logging.handlers.BufferingHandler(1000), logging.getLogger("pipedream_rt")
    monkeypatch.setattr(log, "handlers", [said])
    monkeypatch.setattr(log, "propagate", False)  # pytest-xdist sends no text that is no UTF-8
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("PLACE", str(folder))
    data = regression(3)
    weights = []
    for _ in range(2):
        with open_pipe(checkpoint=Checkpoints("kept", every=1, resume=True)) as pipe:
            assert [result.step for result in pipe.train_epoch(data)] == [0, 1, 2]
            weights.append(pipe.state_dict())
    assert any("the run goes on after step" in each.getMessage() for each in said.buffer)
    assert_same(*weights)


def test_a_data_loader_with_workers_and_a_loss_that_is_not_finite():
    """Forked children of the loader do not disturb; the error names stage and micro-batch."""
    x, y = torch.randn(24, 8), torch.randn(24, 8)
    y[21] = float("nan")
    dataset = torch.utils.data.TensorDataset(x, y)
    loader = torch.utils.data.DataLoader(dataset, batch_size=4, num_workers=1)
    steps = []
    pipe = open_pipe(stages=2)
    with pytest.raises(NonFiniteLoss, match="stage 1: the loss of micro-batch 5 is nan"):
        steps.extend(r.step for r in pipe.train_epoch(loader))
    assert steps == list(range(len(steps)))


def test_local_workers_that_do_not_join_in_time_are_named_and_ended():
    with pytest.raises(RendezvousTimeout, match=r"[12] of 2 workers did not join .*worker-1"):
        open_pipe(stages=2, start=timedelta(milliseconds=5))


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (RuntimeError("no port"), TransportError, "joining the RPC group failed: no port"),
        (PeerLost("worker 'w' is gone", peer="w"), PeerLost, "worker 'w' is gone"),
    ],
)
def test_a_group_whose_torch_rpc_cannot_be_joined_ends(monkeypatch, error, kind, words):
    """The workers, which have joined theirs by then or wait for it, end too."""
    for each in (RPCEndpoint, NoEndpoint):  # whichever this process may have
        monkeypatch.setattr(each, "join", Mock(side_effect=error))
    with pytest.raises(kind, match=words):
        open_pipe(stages=1)


def test_a_stall_tells_the_story_of_every_worker(monkeypatch):
    """A layer that never returns; close does not wait for it."""
    monkeypatch.setattr(processes, "_STOP_TIMEOUT", timedelta(seconds=0.5))
    start = time.monotonic()
    layers = nn.Sequential(nn.Linear(8, 8), Stalls())
    pipe = open_pipe(layers, stages=2, answer=timedelta(seconds=1.5))
    with pytest.raises((MessageTimeout, StageFailed), match=r"waited 1\.5 s for") as e:
        list(pipe.train_epoch(regression(9)))
    if isinstance(e.value, MessageTimeout):
        words = "stage 1 (worker 'worker-1'): computing; last actions: optimizer F0 B0 S0"
        assert words in str(e.value)
    assert time.monotonic() - start < LATEST_S


def test_pipelines_one_after_another_leave_no_file_open():
    """And a new group never meets the one before."""
    open_files = []
    for _ in range(4):
        with open_pipe(stages=1) as pipe:
            list(pipe.train_epoch(regression(2)))
        open_files.append(len(os.listdir("/proc/self/fd")))
    assert open_files[-1] <= open_files[1]


def test_a_pipeline_that_is_never_closed_ends_its_workers_when_it_is_dropped():
    pipe = open_pipe(stages=1)
    victims = pids(pipe)
    del pipe
    gc.collect()
    assert not any(map(is_alive, victims.values()))


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_does_not_end_its_parents_workers():
    """As a data loader's process, or any other that the user forks."""
    with open_pipe(stages=1) as pipe:
        list(pipe.train_epoch(regression(2)))
        pid = os.fork()
        if pid == 0:
            pipe.close()
            os._exit(0)
        os.waitpid(pid, 0)
        assert len(list(pipe.train_epoch(regression(2)))) == 2


def resident_bytes(pid):
    with open(f"/proc/{pid}/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize(
    ("count", "settle"), [(3000, 1000), pytest.param(20_000, 2000, marks=pytest.mark.stress)]
)
def test_memory_is_flat(count, settle):
    """That of every process, after a settling time."""
    x, y = regression(1)[0]
    with open_pipe() as pipe:
        watched = {"coordinator": os.getpid(), **pids(pipe)}
        for result in pipe.train_epoch((x, y) for _ in range(count)):
            if result.step == settle:
                before = {name: resident_bytes(pid) for name, pid in watched.items()}
        grown = {name: resident_bytes(pid) - before[name] for name, pid in watched.items()}
    assert all(g < 4 << 20 for g in grown.values()), grown
