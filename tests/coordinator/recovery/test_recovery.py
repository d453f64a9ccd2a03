"""What a failure may and may not do to a run: the parts by themselves, then on workers."""

import contextlib
import errno
import functools
import gc
import os
import pkgutil
import signal
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.nn.functional as F
from support.deadlines import LATEST_S
from support.faults import FaultySerial, Plan, faulty_sink, of_system
from support.inside import feed_log, finish_checkpoint, kill, local_workers, recovery
from support.late import Late, late_at
from support.models import OPTIMIZERS, POINTS, Raises, batches, kitchen_sink, mlp, regression
from support.oracle import assert_same
from support.pinned import Pipeline
from support.small import losses, small
from torch import nn

from pipedream_rt import Checkpoints, ConfigError, PipelineClosed, PoisonedMicroBatch, StageFailed
from pipedream_rt.lifecycle import Life
from pipedream_rt.messages.message import CommandName

DATA = batches(30, samples=8)


# -- serially -----------------------------------------------------------------------------------


def open_pipe(stages=3, folder=None, faults=(), **kwargs):
    if folder is None:
        model, points, optimizer = kitchen_sink(), POINTS[stages][1:], OPTIMIZERS["adamw"]
    else:
        Plan(folder / "plan", list(faults))
        model, points, optimizer = faulty_sink(stages, folder / "plan")
    defaults = {
        "stages": points or 1, "loss_fn": F.cross_entropy, "optimizer": optimizer,
        "workers": functools.partial(FaultySerial, shuffle_seed=1), "max_restarts": 100,
    }  # fmt: skip
    return Pipeline(model, **{**defaults, **kwargs})


@functools.cache
def calm(stages=3):
    """The losses and the weights of a run that nothing disturbs."""
    with open_pipe(stages) as pipe:
        return losses(pipe, DATA), pipe.state_dict()


def losses_with_checkpoints(pipe):
    """Train with two checkpoints before the 25th forward."""
    found = []
    for result in pipe.train_epoch(DATA):
        found.append(result.loss)
        if result.step in (10, 20):
            finish_checkpoint(pipe)
    return found


def disturbed(pipe, do, at=7):
    """The losses of an epoch in which something is done that one recovery makes up for."""
    found = []
    for result in pipe.train_epoch(DATA):
        found.append(result.loss)
        if result.step == at:
            do()
    assert len(pipe.restarts) == 1
    return found


def failing(monkeypatch, name, errors):
    """Let a function of the library raise errors as long as there are some."""
    there = pkgutil.resolve_name(f"pipedream_rt.{name}")

    def failing_first(*arguments, **options):
        if errors:
            raise errors.pop()
        return there(*arguments, **options)

    monkeypatch.setattr(f"pipedream_rt.{name}", failing_first)


def fault(stage, phase, after, kind="raise"):
    return {"stage": stage, "phase": phase, "after": after, "kind": kind}


@pytest.mark.threads
def test_a_damaged_checkpoint_gives_way_to_the_one_before(tmp_path, caplog):
    expected, weights = calm()
    with open_pipe(folder=tmp_path, checkpoint=Checkpoints(tmp_path / "run", every=3)) as pipe:
        found = []
        for result in pipe.train_epoch(DATA):
            found.append(result.loss)
            if result.step in (5, 10, 15):
                finish_checkpoint(pipe)
            if result.step == 15:
                before, newest = feed_log(pipe).restore_points
                assert before.folder.exists()
                pipe._run.checkpointer._every = None  # the last one, and it is damaged
                for path in newest.folder.glob("model-*"):
                    path.write_bytes(b"")
                Plan(tmp_path / "plan", [fault(1, "forward", 1)])
        assert_same(pipe.state_dict(), weights)
        assert len(pipe.restarts) == 1
    assert found == expected
    assert "the run goes back to the restore point before it" in caplog.text


@pytest.mark.threads
@pytest.mark.parametrize(
    ("of", "errors"),
    [
        ("checkpoint.reading.open_tensors", lambda: [of_system().__cause__]),
        ("coordinator.recovery.recovery.newest_good", lambda: [of_system(), of_system()]),
        ("stage.stage_state.load_module_state", lambda: [RuntimeError("out of memory")]),
    ],
    ids=["a file", "both restore points", "the model"],
)
def test_a_checkpoint_that_cannot_be_restored_for_a_moment_is_one_more_failure(
    tmp_path, monkeypatch, of, errors
):
    """It is out of reach for a stage or the coordinator, or the model raises, as without memory."""
    failing(monkeypatch, of, left := errors())
    with open_pipe(
        folder=tmp_path, faults=[fault(1, "forward", 25)],
        checkpoint=Checkpoints(tmp_path / "run", every=3),
    ) as pipe:  # fmt: skip
        assert losses_with_checkpoints(pipe) == calm()[0]
        assert not left
        assert len(pipe.restarts) == 1
        assert recovery(pipe)._failures.left == 98


@pytest.mark.threads
@pytest.mark.parametrize("stages", [2, 4])
def test_a_failure_after_going_back(tmp_path, stages):
    """Also to a checkpoint that has not all versions that this split reads."""
    with open_pipe(stages=stages, folder=tmp_path / "first") as pipe:
        list(pipe.train_epoch(DATA[:6]))
        pipe.save(tmp_path / "run")

    def train(folder, faults):
        with open_pipe(stages=4, folder=folder, faults=faults) as pipe:
            list(pipe.train_epoch(DATA[:9]))
            pipe.load(tmp_path / "run")
            return losses(pipe, DATA[6:]), pipe.state_dict(), len(pipe.restarts)

    expected, weights, _ = train(tmp_path / "calm", [])
    faults = [fault(1, "forward", 15), fault(3, "backward", 5), fault(2, "step", 6)]
    found, found_weights, restarts = train(tmp_path / "stormy", faults)
    assert restarts == 3
    assert found == expected
    assert_same(found_weights, weights)


@pytest.mark.threads
def test_poison_is_named():
    """The same micro-batch fails again and again: its third time is the last."""
    layers = list(mlp())
    layers.insert(3, Raises(at=5))
    with (
        pytest.raises(PoisonedMicroBatch, match=r"micro-batch 5 .* 3 times, .* in 1:F5") as e,
        small(nn.Sequential(*layers), stages=[2, 5], max_restarts=100) as pipe,
    ):
        list(pipe.train_epoch(regression(20)))
    assert (e.value.micro_batch, e.value.stage) == (5, 1)
    assert isinstance(e.value.__cause__.__cause__, ZeroDivisionError)


@pytest.mark.threads
def test_when_no_restarts_are_left_the_failure_is_raised(tmp_path):
    with (
        pytest.raises(StageFailed, match="1, F"),
        open_pipe(
            folder=tmp_path, faults=[fault(1, "forward", n) for n in (2, 3, 4)], max_restarts=2
        ) as pipe,
    ):
        list(pipe.train_epoch(DATA))
    assert len(pipe.restarts) == 2


@pytest.mark.threads
def test_a_checkpoint_that_cannot_be_written_does_not_end_the_run(tmp_path, caplog):
    """As on a full disk: it is said, the run goes on, and can still be recovered."""
    expected, _ = calm()
    with open_pipe(
        folder=tmp_path, faults=[fault(0, "forward", 12)],
        checkpoint=Checkpoints(tmp_path / "run", every=5, attempts=None),
    ) as pipe:  # fmt: skip
        (tmp_path / "run").rmdir()
        (tmp_path / "run").write_text("in the way")
        assert losses(pipe, DATA) == expected
        assert len(pipe.restarts) == 1
    assert "the run goes on, and a recovery would go back to its start" in caplog.text


@pytest.mark.threads
def test_an_evaluation_is_not_fed_again(tmp_path):
    """Neither the log nor a recovery has what leaves no trace; what moves statistics it has."""
    with open_pipe(folder=tmp_path / "calm") as pipe:
        list(pipe.train_epoch(DATA[:6]))
        pipe(DATA[0][0], training=True)
        expected = losses(pipe, DATA[6:])
    with open_pipe(folder=tmp_path, faults=[fault(1, "forward", 9)]) as pipe:
        list(pipe.train_epoch(DATA[:6]))
        before = len(feed_log(pipe)._entries)
        for _ in range(3):
            pipe.evaluate(DATA)
            pipe.fingerprint()
            pipe.state_dict()
            pipe(DATA[0][0])
        flushes = 3 * 4
        assert len(feed_log(pipe)._entries) == before + flushes
        pipe(DATA[0][0], training=True)
        assert losses(pipe, DATA[6:]) == expected
        assert pipe.restarts[0].replayed < 20  # an evaluation has 30


@pytest.mark.threads
def test_the_feed_does_not_grow_with_the_run(tmp_path):
    with small(checkpoint=Checkpoints(tmp_path, every=5), max_restarts=1) as pipe:
        for _ in pipe.train_epoch(regression(300)):
            assert len(feed_log(pipe)._entries) < 150  # of 300


@pytest.mark.threads
def test_closing_while_the_workers_are_replaced(tmp_path):
    """A signal handler closes the pipeline in the middle of a recovery; nothing is left."""
    with open_pipe(folder=tmp_path, faults=[fault(1, "forward", 4)]) as pipe:
        begin = recovery(pipe)._begin

        def interrupted(*arguments):
            pipe.close()
            begin(*arguments)

        recovery(pipe)._begin = interrupted
        with pytest.raises(Exception, match="closed"):
            list(pipe.train_epoch(DATA))


# -- on processes -------------------------------------------------------------------------------


def after_interruptions(pipe, after):
    """Do all that waits, each time with an error of a signal handler; return how many came."""
    came, first = 0, DATA[0]

    def epoch():
        list(pipe.train_epoch(DATA[:8]))

    def step():
        pending = pipe.submit(first)
        try:
            pending.result()
        except Late:
            pending.result()  # once more
            raise

    for use in (
        epoch, step, pipe.flush, pipe.state_dict, pipe.statistics, lambda: pipe(first[0]),
        lambda: pipe.evaluate(DATA[:8]), lambda: list(pipe.predict(DATA[:8])), epoch,
    ):  # fmt: skip
        begun = pipe.step
        with late_at(pipe, "_find", after) as times, contextlib.suppress(Late):
            use()
        came += len(times)
        assert pipe.state is Life.OPEN
        if use is epoch:  # what was not fed
            list(pipe.train_epoch(DATA[pipe.step - begun : 8]))
    assert not pipe.restarts
    return came, pipe.step, pipe.fingerprint().digest, pipe.evaluate(DATA[:8])


@pytest.mark.processes
@pytest.mark.parametrize("schedule", ["async-1f1b", "gpipe"])
def test_what_a_signal_handler_raises_in_a_wait_leaves_the_pipeline_open(schedule, caplog):
    """What was waited for can be waited for again, and the bits are those of a calm run."""
    calm_run = []
    for after in (10**6, 0, 2, 7):
        with open_pipe(workers="local", schedule=schedule) as pipe:
            came, *found = after_interruptions(pipe, after)
        calm_run = calm_run or found
        assert found == calm_run
        assert came == 0 if after == 10**6 else came >= 4
        words = "epoch 0 was ended by Late after result"
        assert (words in caplog.text) is (came > 0)
        caplog.clear()


@pytest.mark.processes
@pytest.mark.parametrize(
    ("step", "use"),
    [
        ("_remove", lambda pipe: list(pipe.train_epoch(DATA[:8]))),
        ("_remove", lambda pipe: pipe(DATA[0][0])),
        ("_find", lambda pipe: pipe._group.command(CommandName.TRAINING, (None, False))),
    ],
    ids=["a result was taken", "an output was taken", "a command that changes stages"],
)
def test_where_a_signal_handler_may_have_lost_something_the_pipeline_says_so(step, use):
    with open_pipe(workers="local") as pipe:
        pipe.flush()
        with late_at(pipe, step), pytest.raises(Late) as e:
            use(pipe)
        with pytest.raises(PipelineClosed) as later:
            pipe.flush()
    assert later.value.__cause__ is e.value
    assert str(later.value) == (
        "the pipeline has failed: Late, which came while the script waited for the stages"
    )


def script(folder, faults, workers):
    """Evaluation, inference, weights loaded, another optimizer, a rate."""
    seen = []
    kept = Checkpoints(folder / "run", every=4)
    with open_pipe(folder=folder, faults=faults, workers=workers, checkpoint=kept) as pipe:
        scheduler = torch.optim.lr_scheduler.ExponentialLR(pipe.optimizer, 0.9)
        for result in pipe.train_epoch(DATA[:10]):
            scheduler.step()
            seen.append(result.loss)
            if result.step % 4 == 2:
                seen.append(pipe.evaluate(DATA[:3]))
        seen.append(pipe(DATA[0][0]).sum().item())  # in training mode: draws, changes buffers
        pipe.load_state_dict({k: v * 0.5 for k, v in pipe.state_dict().items()})
        seen += losses(pipe, DATA[10:16])
        pipe.train(False)
        seen += losses(pipe, DATA[16:18])
        pipe.train()
        state = pipe.optimizer.state_dict()
        pipe.optimizer.load_state_dict(state)
        seen += losses(pipe, DATA[18:])
        return seen, pipe.state_dict(), len(pipe.restarts)


SERIAL = functools.partial(FaultySerial, shuffle_seed=1)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    return script(tmp_path_factory.mktemp("calm"), [], SERIAL)


@pytest.mark.processes
@pytest.mark.parametrize("workers", ["local", SERIAL])
def test_everything_a_script_does_survives(workers, tmp_path, undisturbed):
    """Faults between all that a script does."""
    seen, weights, restarts = undisturbed
    assert restarts == 0
    places = ((2, "forward"), (0, "step"), (1, "backward"), (1, "start"), (0, "save"))
    faults = [fault(*place, after) for after in (1, 3, 5, 6) for place in places]
    found, found_weights, restarts = script(tmp_path, faults, workers)
    assert found == seen
    assert_same(found_weights, weights)
    assert restarts > 8


@pytest.mark.processes
def test_a_worker_without_a_sign_of_life_has_failed():
    """SIGSTOP: the process is there, its connections stand, it says nothing."""
    waits = {"heartbeat": timedelta(seconds=1), "answer": timedelta(seconds=50)}
    with open_pipe(stages=2, workers="local", **waits) as pipe:
        found = disturbed(pipe, lambda: kill(pipe, "worker-1", signal.SIGSTOP))
        assert "does not answer" in pipe.restarts[0].reason
    assert found == calm(stages=2)[0]


@pytest.mark.processes
@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_a_fork_server_that_does_not_answer_is_replaced(number):
    """It forks the workers of every recovery, so it is watched as they are."""

    def strike():
        os.kill(local_workers(pipe)._forks._process.pid, number)
        kill(pipe, "worker-1")

    expected, start = calm(stages=2)[0], time.monotonic()
    with open_pipe(stages=2, workers="local", heartbeat=timedelta(seconds=2)) as pipe:
        assert disturbed(pipe, strike) == expected
    assert time.monotonic() - start < LATEST_S


SHORTAGES = {
    "descriptors": ("cluster.local.socket.socketpair", OSError(errno.EMFILE, "none left")),
    "many descriptors": ("cluster.processes.ensure_descriptors", of_system(ConfigError)),
    "memory": ("cluster.processes.SocketTransport", MemoryError()),
    "processes": ("cluster.local.Local.start", OSError(errno.EAGAIN, "none left")),
    "threads": ("cluster.processes.ThreadPoolExecutor", RuntimeError("can't start new thread")),
}


@pytest.mark.processes
@pytest.mark.parametrize("what", SHORTAGES)
def test_a_shortage_in_the_script_passes(what, monkeypatch):
    """Of what workers are started with, when one has to be replaced."""
    (name, error), left = SHORTAGES[what], []

    def run_short():
        left.append(error)
        kill(pipe, "worker-1")

    failing(monkeypatch, name, left)
    with open_pipe(stages=2, workers="local") as pipe:
        assert disturbed(pipe, run_short) == calm(stages=2)[0]
        assert recovery(pipe)._failures.left == 98
    assert not left


@pytest.mark.processes
def test_a_stage_that_stalls_is_told_of_and_replaced(tmp_path, caplog):
    """A deadlock in a layer: its process lives and says so, but nothing comes of it."""

    class StallsOnce(nn.Module):
        def __init__(self, marker):
            super().__init__()
            self.marker = str(marker)

        def forward(self, x):
            try:
                os.close(os.open(self.marker, os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                return x
            threading.Event().wait()

    model = nn.Sequential(*mlp(), StallsOnce(tmp_path / "stalled"))
    options = {"workers": "local", "max_restarts": 1, "answer": timedelta(seconds=3)}
    with small(model, stages=2, **options) as pipe:
        assert len(list(pipe.train_epoch(regression(8)))) == 8
        assert len(pipe.restarts) == 1
    assert "stage 1 (worker 'worker-1'): computing; last actions: optimizer F0" in caplog.text


def open_after_recoveries(count, tmp_path):
    """Kill workers in turn; what the coordinator's process holds after each recovery."""
    held = []
    with open_pipe(
        stages=2, workers="local", checkpoint=Checkpoints(tmp_path, every=3), max_restarts=count
    ) as pipe:
        steps = []
        for result in pipe.train_epoch(batches(3 * count + 6, samples=8)):
            steps.append(result.step)
            if result.step % 3 == 2 and len(held) < count:
                victim = f"worker-{len(held) % 2}"
                kill(pipe, victim)
                pipe.flush()
                gc.collect()
                with open("/proc/self/statm") as file:
                    pages = int(file.read().split()[1])
                held.append(
                    (threading.active_count(), len(os.listdir("/proc/self/fd")), pages * 4096)
                )
        assert len(pipe.restarts) == count
        assert steps == list(range(3 * count + 6))
    return held


@pytest.mark.processes
def test_recoveries_leave_nothing_behind(tmp_path):
    threads, files, _ = zip(*open_after_recoveries(3, tmp_path), strict=True)
    assert len(set(threads)) == 1
    assert files[-1] <= files[0]


@pytest.mark.stress
@pytest.mark.timeout(1800)
def test_fifty_recoveries_leave_nothing_behind(tmp_path):
    held = open_after_recoveries(50, tmp_path)
    print("threads, files, bytes after 5 and after 50:", held[4], held[-1])
    assert held[-1][0] == held[4][0]
    assert held[-1][1] <= held[4][1]
    assert held[-1][2] - held[4][2] < 16 << 20
