"""SIGTERM and Ctrl-C while a run makes checkpoints: it writes one more, and ends."""

import os
import signal
import subprocess
import sys
import threading
from datetime import timedelta

import pytest
import torch
from support import forked
from support.deadlines import LATEST_S
from support.models import regression
from support.small import losses, small
from torch import nn

from pipedream_rt import Checkpoints
from pipedream_rt.coordinator.checkpointing.preemption import Preemption

pytestmark = [pytest.mark.threads, pytest.mark.usefixtures("environment")]


@pytest.fixture
def preemption():
    made = Preemption(timedelta(seconds=LATEST_S))
    yield made
    made.close()


@pytest.fixture
def writing():
    """A socket that signals may wake, as asyncio has one; in the end they wake none."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    yield writing
    signal.set_wakeup_fd(-1)
    os.close(reading)
    os.close(writing)


def test_the_signal_is_noted_and_afterwards_handled_as_before(preemption, caplog):
    preemption.watch()
    assert not preemption.noted
    signal.raise_signal(signal.SIGTERM)
    assert preemption.noted
    assert "a checkpoint is made after the next mini-batch" in caplog.text
    preemption.close()
    preemption.close()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert signal.set_wakeup_fd(-1) == -1


def on_a_thread(call):
    thread = threading.Thread(target=call)
    thread.start()
    thread.join(LATEST_S)
    assert not thread.is_alive()


def wakes():
    """The socket that signals wake, by its number; -1 for none."""
    signal.set_wakeup_fd(found := signal.set_wakeup_fd(-1))
    return found


def test_a_close_on_another_thread_gives_the_signal_back_and_keeps_nothing(preemption):
    preemption.watch()
    on_a_thread(preemption.close)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert wakes() == -1
    assert not preemption.noted
    assert "preemption" not in {thread.name for thread in threading.enumerate()}


CLOSED_ELSEWHERE = """
import os, signal, threading
from datetime import timedelta
from pipedream_rt.coordinator.checkpointing.preemption import Preemption
preemption = Preemption(timedelta(hours=1))
preemption.watch()
def end():
    preemption.close()
    os.kill(os.getpid(), signal.SIGTERM)
thread = threading.Thread(target=end)
thread.start()
thread.join()
print("it goes on")
"""


def test_sigterm_right_after_a_close_on_another_thread_ends_the_script():
    """Also where both come to the main thread as one."""
    ended = forked.run(
        [sys.executable, "-c", CLOSED_ELSEWHERE], capture_output=True, text=True, timeout=LATEST_S
    )
    assert (ended.returncode, ended.stdout) == (-signal.SIGTERM, ""), ended.stderr


def own_handler():
    """Set a handler of the script's own; return a list of its calls, and the handler."""
    came = []
    signal.signal(signal.SIGTERM, handler := lambda *_: came.append(True))
    return came, handler


def test_what_a_close_on_another_thread_could_not_restore_the_next_restores(preemption):
    preemption.watch()
    came, _ = own_handler()
    on_a_thread(preemption.close)
    assert not came
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    later = Preemption(timedelta(seconds=LATEST_S))
    try:
        later.watch()
        signal.raise_signal(signal.SIGTERM)
        assert later.noted
    finally:
        later.close()
    assert wakes() == -1


def test_a_pipeline_that_another_thread_makes_leaves_the_signal_alone(preemption):
    on_a_thread(preemption.watch)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert wakes() == -1


def test_a_socket_that_was_set_meanwhile_stays(preemption, writing):
    preemption.watch()
    signal.set_wakeup_fd(writing)
    preemption.close()
    assert wakes() == writing


def test_a_script_that_handles_the_signal_keeps_its_handler(preemption):
    came, _ = own_handler()
    preemption.watch()
    signal.raise_signal(signal.SIGTERM)
    preemption.close()
    signal.raise_signal(signal.SIGTERM)
    assert (came, preemption.noted) == ([True, True], False)


def test_a_handler_that_was_set_meanwhile_stays(preemption):
    preemption.watch()
    _, handler = own_handler()
    preemption.close()
    assert signal.getsignal(signal.SIGTERM) is handler


def test_a_script_that_wakes_by_signals_itself_keeps_its_socket(preemption, writing):
    signal.set_wakeup_fd(writing)
    preemption.watch()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    preemption.close()
    assert wakes() == writing


SCRIPT = """
import sys, torch, torch.nn.functional as F
from datetime import timedelta
from pipedream_rt import Checkpoints, Pipeline
if __name__ == "__main__":
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(4)))
    data = [(torch.randn(4, 8), torch.randn(4, 8)) for _ in range(40)]
    options = Checkpoints(sys.argv[1], every=1000, grace=timedelta(seconds=float(sys.argv[2])))
    with Pipeline(model, stages=2, loss_fn=F.mse_loss, optimizer=(torch.optim.Adam, {}),
                  checkpoint=options, micro_batches=1, corrections=(), workers=sys.argv[3]) as pipe:
        for result in pipe.train_epoch(data):
            print(result.step, result.loss.hex(), flush=True)
            if result.step == 10:
                print("waiting", flush=True)
                sys.stdin.readline()
                if sys.argv[4:] == ["stuck"]:
                    sys.stdin.readline()
    print(pipe.state, flush=True)
"""


def run_script(tmp_path, *arguments):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return forked.Popen(
        [sys.executable, str(path), *map(str, arguments)], text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def read_until(process, words):
    lines = []
    for line in process.stdout:
        lines.append(line.strip())
        if words in line:
            return lines
    raise AssertionError(process.stderr.read())


@pytest.mark.processes
def test_sigterm_makes_a_checkpoint_and_ends(tmp_path):
    """As a cluster sends it before it takes a machine back; the next script goes on from there."""
    process = run_script(tmp_path, tmp_path / "run", 30, "local")
    read_until(process, "waiting")
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate("\n", timeout=LATEST_S)
    assert process.returncode == 143, errors
    assert "a checkpoint is made after the next mini-batch" in errors
    assert "is written; the script ends" in errors
    (folder,) = (tmp_path / "run").iterdir()
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    data = [(torch.randn(4, 8), torch.randn(4, 8)) for _ in range(40)]
    options = {"stages": 2, "optimizer": (torch.optim.Adam, {})}
    with small(model, **options) as pipe:
        whole = losses(pipe, data)
    with small(model, checkpoint=Checkpoints(tmp_path / "run", resume=True), **options) as pipe:
        rest = losses(pipe, data)
    assert rest == whole[-len(rest) :]
    assert 0 < len(rest) < 30
    assert folder.name.startswith("step-")


@pytest.mark.processes
def test_sigterm_does_not_wait_longer_than_its_grace_time(tmp_path):
    process = run_script(tmp_path, tmp_path / "run", 0.5, "serial", "stuck")
    read_until(process, "waiting")
    process.send_signal(signal.SIGTERM)
    assert process.wait(LATEST_S) == 143
    assert "no mini-batch came within" in process.stderr.read()
    assert not list((tmp_path / "run").iterdir())
    for stream in (process.stdin, process.stdout, process.stderr):
        stream.close()


def test_a_forked_child_of_a_watched_script_ends_by_sigterm_alone(tmp_path):
    """As a data loader's worker does; its parent takes no notice."""
    with small(checkpoint=Checkpoints(tmp_path, every=1000)) as pipe:
        assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.write(writing, b"x")
            signal.pause()
            os._exit(0)
        os.read(reading, 1)
        os.kill(pid, signal.SIGTERM)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGTERM
        assert len(list(pipe.train_epoch(regression(3)))) == 3
        os.close(reading)
        os.close(writing)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert signal.set_wakeup_fd(-1) == -1


@pytest.mark.processes
def test_ctrl_c_prints_six_lines_at_most(tmp_path):
    process = run_script(tmp_path, tmp_path / "run", 30, "local")
    read_until(process, "waiting")
    process.stdin.write("\n")
    process.stdin.flush()
    read_until(process, "12 ")
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=LATEST_S)
    if process.returncode:  # it may have come to its end before
        assert errors.strip().endswith("KeyboardInterrupt")
        assert len(errors.strip().splitlines()) <= 6, errors
