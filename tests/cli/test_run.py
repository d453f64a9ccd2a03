"""The commands ``run`` and ``worker``, as a user types them: scripts, workers, signals."""

import os
import signal
import subprocess
import sys
import threading
from datetime import timedelta

import click
import pytest
import torch
from support import forked, pinned, script
from support.deadlines import LATEST_S
from support.family import family
from support.models import mlp, regression
from support.nodes import COMMAND, wait_for_end
from support.ports import free_port
from torch import nn

from pipedream_rt import Pipeline, Recovery, RendezvousTimeout
from pipedream_rt.cli.run import count_of
from pipedream_rt.cluster.environment import (
    MAX_RESTARTS,
    NPROC,
    RECORD,
    RESUME,
    THREADS,
    TRACE,
    VERIFY,
)

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("environment")]

SCRIPT = script.__file__


def output_of(command, code=0, timeout=LATEST_S, run=forked.run):
    done = run(list(map(str, command)), capture_output=True, text=True, timeout=timeout, cwd="/")
    assert done.returncode == code, (done.stdout, done.stderr)
    return done.stdout, done.stderr


def digest_of(output):
    return next(line for line in output.splitlines() if line.startswith("digest"))


@pytest.fixture(scope="module")
def digest():
    """What the script gives in this process; everything else must give the same."""
    return script.train()


@pytest.mark.thinned(6)
@pytest.mark.parametrize("workers", ["local", "serial"])
@pytest.mark.parametrize("ending", ["raise SystemExit(4)", "", "1 / 0"])
def test_a_script_that_never_closes_its_pipeline_ends_all_the_same(tmp_path, workers, ending):
    script = tmp_path / "forgetful.py"
    script.write_text(
        "import torch\n"
        "from torch import nn\n"
        "from pipedream_rt import Pipeline\n"
        f"pipe = Pipeline([nn.Linear(2, 2)], loss_fn=nn.functional.mse_loss, workers={workers!r},\n"
        "                optimizer=(torch.optim.SGD, {}))\n"
        "epoch = pipe.train_epoch((torch.ones(1, 2), torch.ones(1, 2)) for _ in range(100))\n"
        "print(next(epoch).step)\n"
        f"{ending}\n"
    )
    code = {"": 0, "1 / 0": 1}.get(ending, 4)
    out, err = output_of([sys.executable, script], code=code)
    assert out == "0\n"
    assert ("ZeroDivisionError" in err) == (code == 1)


def test_run_starts_workers_for_one_pipeline_after_another(digest):
    command = [*COMMAND, "run", "--nproc-per-node", 2, SCRIPT, "--pipelines", 2]
    out, err = output_of(command, run=subprocess.run)  # as a user types it
    assert out.count("ready worker-0 worker-1") == 2
    assert digest_of(out) == digest
    assert err == ""


def test_run_without_a_number_of_workers_leaves_them_to_the_script(digest, tmp_path):
    """They are those of the script alone, which is quiet."""
    out, err = output_of([*COMMAND, "run", "--trace", tmp_path / "trace", SCRIPT])
    assert "ready worker-0 worker-1" in out
    assert digest_of(out) == digest
    assert err == ""
    assert (tmp_path / "trace").stat().st_size


def test_run_gives_the_exit_code_of_the_script(tmp_path):
    script = tmp_path / "exits.py"
    script.write_text("import sys; sys.exit(5)")
    output_of([*COMMAND, "run", "--nproc-per-node", 1, script], code=5, run=subprocess.run)


@pytest.mark.thinned(2)
@pytest.mark.parametrize("ranks", [2, 3])
def test_under_torchrun_the_ranks_are_used(digest, ranks, monkeypatch):
    """With 2 ranks the first one starts a worker beside itself; with 3 it only coordinates.

    With 2 they agree on a secret by themselves.
    """
    if ranks == 2:
        monkeypatch.delenv("PIPEDREAM_RT_SECRET")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", ranks]
    command = [*torchrun, "--master-port", free_port(), SCRIPT]
    out, err = output_of(command, run=subprocess.run)  # torchrun starts interpreters
    assert "tensorpipe" not in err
    assert digest_of(out) == digest
    names = "worker-0 rank-1" if ranks == 2 else "rank-1 rank-2"
    assert set(names.split()) <= set(out.split())


def test_workers_elsewhere_join_by_address_also_before_the_coordinator(digest):
    address = f"127.0.0.1:{free_port()}"
    workers = [
        forked.Popen([*COMMAND, "worker", address, "--name", name], stderr=subprocess.PIPE)
        for name in ("w10", "w9")
    ]
    out, _ = output_of([sys.executable, SCRIPT, "--workers", address])
    assert "ready w9 w10" in out, "stages go to the names in natural order"
    assert digest_of(out) == digest
    for worker in workers:
        worker.communicate(timeout=LATEST_S)
        assert worker.returncode == 0


def test_a_worker_with_another_torch_is_refused_before_it_imports_it(tmp_path):
    package = tmp_path / "torch"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('it was imported')")
    (package / "version.py").write_text("__version__ = '1.13.0'")
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    address = f"127.0.0.1:{free_port()}"
    worker = subprocess.Popen(
        [*COMMAND, "worker", address, "--name", "old"], env={**os.environ, "PYTHONPATH": path},
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    layers = [nn.Linear(1, 1), nn.Linear(1, 1)]
    with pytest.raises(RendezvousTimeout, match=r"'old' was refused: it has torch 1\.13"):
        Pipeline(layers, workers=address, recovery=Recovery(start=timedelta(seconds=8)))
    said = worker.communicate(timeout=LATEST_S)[1]
    assert worker.returncode == 1
    assert "the coordinator refused this worker: it has torch 1.13.0, Python" in said


def started(command, **kwargs):
    """A running script, after its pipeline is ready."""
    process = forked.Popen(
        list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **kwargs
    )
    timer = threading.Timer(LATEST_S, process.kill)
    timer.start()
    assert process.stdout.readline().startswith("ready")
    timer.cancel()
    timer.join()
    return process


LONG = [SCRIPT, "--steps", 80_000_000]


def test_ctrl_c_ends_everything():
    process = started([sys.executable, *LONG])
    _, *workers = family(process.pid)
    assert len(workers) == 3  # two, and what has forked them
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=LATEST_S)
    assert "KeyboardInterrupt" in err
    assert process.returncode in (-signal.SIGINT, 130)
    wait_for_end(workers)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_signal_to_run_ends_script_and_workers(number):
    """Also one that nobody can catch: then the workers end by themselves."""
    process = started([*COMMAND, "run", "--nproc-per-node", 2, *LONG], start_new_session=True)
    _, *workers = family(process.pid)
    # The command has become the script. Its children are what forks the workers, and those two.
    assert len(workers) == 3
    process.send_signal(number)
    process.communicate(timeout=LATEST_S)
    assert process.returncode == -number
    wait_for_end(workers)


def test_a_worker_whose_coordinator_never_listens_gives_up():
    address = f"127.0.0.1:{free_port()}"
    _, err = output_of([*COMMAND, "worker", address, "--timeout", 0.5], code=3)
    assert f"no coordinator listened at {address} within 0.5 s" in err


@pytest.mark.thinned(2)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_run_replaces_workers_that_fail(digest, number):
    """The script sees nothing of it; run has killed the workers that were left."""
    out, err = output_of([
        *COMMAND, "run", "--nproc-per-node", 2, "--max-restarts", 2, SCRIPT, "--lose", int(number),
    ])  # fmt: skip
    assert digest_of(out) == digest
    assert "1 restarts" in out
    assert "recovered in" in err


def test_another_worker_takes_the_place_of_one_that_was_started_elsewhere():
    """One with --persist joins again by itself, and a new one may have another name."""
    address = f"127.0.0.1:{free_port()}"
    workers, before = [], dict(os.environ)  # the secret is in it no more when it was read

    def start(name):
        command = [*COMMAND, "worker", address, "--persist", "--name", name]
        workers.append(forked.Popen(command, stderr=subprocess.DEVNULL, env=before))

    def train(where):
        losses = []
        with pinned.Pipeline(
            mlp(), stages=2, loss_fn=nn.functional.mse_loss, optimizer=(torch.optim.Adam, {}),
            workers=where, max_restarts=1,
        ) as pipe:  # fmt: skip
            for result in pipe.train_epoch(regression(12)):
                losses.append(result.loss)
                if result.step == 5 and workers:
                    workers[1].kill()
                    start("later")
            return losses, [stage.worker for stage in pipe.stages]

    expected, _ = train("serial")
    try:
        start("early")
        start("lost")
        losses, names = train(address)
    finally:
        for worker in workers:
            worker.terminate()
            worker.wait(LATEST_S)
    assert losses == expected
    assert names == ["early", "later"]


@pytest.mark.parametrize(
    ("text", "count"),
    [(None, None), ("", None), ("1", 1), ("12", 12), ("auto", 3), ("cpu", 3)],
)
def test_a_number_of_workers_is_read_as_torchrun_reads_it(monkeypatch, text, count):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 2, 5})
    assert count_of(text) == count


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "gpu", "²", "1_0", "\x1b[2J"], ids=ascii)
def test_what_is_no_number_of_workers_is_refused(text):
    with pytest.raises(click.BadParameter, match="is no number of at least 1, nor auto") as found:
        count_of(text)
    assert found.value.message.isprintable()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere.py"], "there is no file 'nowhere.py'"),
        (["--threads", "2", "nowhere.py"], "give --nproc-per-node too"),
        (["--nproc-per-node", "none", "nowhere.py"], "'none' is no number of at least 1"),
        (["--log-dir", "{file}/logs", "nowhere.py"], "logs: Not a directory"),
        (["--ray", "2", "--nnodes", "2", "nowhere.py"], "it is Ray that says which node is which"),
        (["--nproc", "2", "x.py"], "no option --nproc: here it is --nproc-per-node"),
        (["--num_processes=2", "x.py"], "no option --num_processes: here it is --nproc-per-node"),
        (["--standalone", "x.py"], "no option --standalone, and needs none in its place"),
        (["--bogus", "x.py"], "No such option"),
        (["--compare-schedules", "--resume", "x.py"], "leave out --nnodes, --ray, --record"),
        (["--compare-schedules", "--ray", "2", "x.py"], "leave out --nnodes, --ray, --record"),
    ],
    ids=[
        "script",
        "threads",
        "workers",
        "logs",
        "ray",
        "nproc",
        "accelerate",
        "needless",
        "other",
        "comparison",
        "comparison on ray",
    ],
)
def test_wrong_words_are_refused_before_anything_is_started(call, tmp_path, words, message):
    (tmp_path / "file").touch()
    words = [word.replace("{file}", str(tmp_path / "file")) for word in words]
    assert message in " ".join(call("run", *words, code=2).split())


def test_what_the_script_is_to_do_is_told_to_it_in_its_environment(call, tmp_path, monkeypatch):
    """Paths are made absolute, for the script may go elsewhere; its arguments are its own."""
    told = {}

    def execve(path, command, environment):
        told.update(command=command, environment=environment)
        raise SystemExit(0)

    monkeypatch.setattr(os, "execve", execve)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    call("run", "--nproc-per-node", 2, "--threads", 3, "--trace", "t", "--record", "r",
         "--max-restarts", 4, "--resume", "--verify", "train.py", "--verify", "x")  # fmt: skip
    assert told["command"] == [sys.executable, "train.py", "--verify", "x"]
    own = {name: told["environment"].get(name) for name in
           (NPROC, THREADS, TRACE, RECORD, MAX_RESTARTS, RESUME, VERIFY)}  # fmt: skip
    assert own == {
        NPROC: "2", THREADS: "3", TRACE: str(tmp_path / "t"), RECORD: str(tmp_path / "r"),
        MAX_RESTARTS: "4", RESUME: "1", VERIFY: "3",
    }  # fmt: skip
    call("run", "-m", "package.train", "--resume")
    assert told["command"] == [sys.executable, "-m", "package.train", "--resume"]
    assert not {NPROC, THREADS, TRACE, RECORD, MAX_RESTARTS, RESUME, VERIFY} & {
        *told["environment"]
    }
