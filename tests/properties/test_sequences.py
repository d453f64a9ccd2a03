"""Whatever a script does one after another, the run is that of the oracle."""

import tempfile
from contextlib import suppress
from pathlib import Path

import pytest
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.inside import kill, lose, pids
from support.models import POINTS, kitchen_sink
from support.oracle import assert_same
from support.pinned import Pipeline
from support.sequences import DATA, RATE, OracleRun, make_optimizer
from torch import nn

from pipedream_rt import Checkpoints, ConfigError

pytestmark = pytest.mark.usefixtures("environment")

PLANS = {
    "async-1f1b": (3, 1, "async-1f1b"),
    "2bw": (2, 3, "2bw"),
    "1f1b": (3, 2, "flushed"),
}

LOOKS = ("flush", "evaluate", "infer", "state_dict", "fingerprint", "optimizer state", "kill")
"""What may be done anywhere, also in the middle of an epoch."""

looks = st.lists(st.tuples(st.integers(0, 4), st.sampled_from(LOOKS)), max_size=3)
steps = st.one_of(
    st.tuples(st.just("epoch"), looks),
    st.tuples(st.just("break"), st.integers(0, 3)),
    st.tuples(st.just("exception"), st.integers(0, 3)),
    st.tuples(st.just("wrong item"), st.integers(0, 3)),
    st.tuples(st.just("rate"), st.sampled_from([1e-3, 1e-2])),
    st.tuples(st.sampled_from(LOOKS), st.none()),
    st.tuples(st.just("save"), st.none()),
    st.tuples(st.just("load"), st.none()),
    st.tuples(st.just("load_state_dict"), st.none()),
    st.tuples(st.just("resume"), st.none()),
    st.tuples(st.just("nested epochs"), st.none()),
)
scripts = st.lists(steps, min_size=1, max_size=7)


class Script:
    """A script on a pipeline, beside the oracle that does the same."""

    def __init__(self, schedule, workers, folder):
        self.schedule, self.workers, self.folder = schedule, workers, folder
        self.stages, self.k, reads = PLANS[schedule]
        self.oracle = OracleRun(self.stages, self.k, reads)
        self.rate, self.saved, self.pipe = RATE, None, self.opened()

    def opened(self):
        model = kitchen_sink()
        return Pipeline(
            model, stages=POINTS[self.stages][1:], loss_fn=F.cross_entropy, schedule=self.schedule,
            optimizer=make_optimizer(model.parameters()), micro_batches=self.k,
            workers=self.workers, max_restarts=100,
            checkpoint=Checkpoints(self.folder / "run", every=4, attempts=None),
        )  # fmt: skip

    def run(self, script):
        try:
            for what, argument in script:
                self.do(what, argument)
            assert_same(self.pipe.state_dict(), self.oracle.state_dict())
            assert self.pipe.step == self.oracle.step
        finally:
            self.pipe.close()

    def do(self, what, argument):
        pipe, oracle = self.pipe, self.oracle
        match what:
            case "epoch":
                self.epoch(DATA, looks=argument)
            case "break" | "exception":
                self.epoch(DATA, leave=(argument, what))
            case "wrong item":
                items = [*DATA[:argument], (1, 2, 3), *DATA[argument:]]
                with pytest.raises(ConfigError, match="must yield pairs"):
                    self.epoch(items)
            case "rate":
                self.rate = argument
                for group in pipe.optimizer.param_groups:
                    group["lr"] = argument
            case "save":
                pipe.save(self.folder / "saved")
                self.saved = (oracle.snapshot(), self.rate)
            case "load":
                if self.saved is not None:
                    pipe.load(self.folder / "saved")
                    self.go_back()
            case "resume":
                if self.saved is not None:
                    pipe.close()
                    self.pipe = self.opened()
                    self.pipe.load(self.folder / "saved")
                    self.go_back()
            case "load_state_dict":
                state = {k: v * 0.5 if v.is_floating_point() else v
                         for k, v in pipe.state_dict().items()}  # fmt: skip
                pipe.load_state_dict(state)
                oracle.load_weights(state)
            case "nested epochs":
                with pytest.raises(ConfigError, match="is under way"):
                    list(zip(pipe.train_epoch(DATA), pipe.train_epoch(DATA), strict=True))
                self.catch_up(DATA)
            case _:
                self.look(what)

    def go_back(self):
        snapshot, self.rate = self.saved
        self.oracle.set_back(snapshot)

    def catch_up(self, items):
        """Let the oracle train on what the pipeline has injected."""
        for x, y in items[: self.pipe.step - self.oracle.step]:
            self.oracle.train(x, y, self.rate)

    def epoch(self, items, looks=(), leave=(None, "")):
        begun, found, (last, how) = self.oracle.step, {}, leave
        try:
            for number, result in enumerate(self.pipe.train_epoch(items)):
                found[result.step] = result.losses
                for when, what in looks:
                    if when == number and what != "kill":
                        # The pipeline has injected more than was handed out.
                        self.quietly(what)
                    elif when == number:
                        self.look(what)
                if number == last:
                    if how == "break":
                        break
                    raise ArithmeticError("the body's own")
        except ArithmeticError:
            pass
        finally:
            good = [item for item in items if len(item) == 2]
            losses = {}
            for x, y in good[: self.pipe.step - begun]:
                step = self.oracle.step
                losses[step] = tuple(self.oracle.train(x, y, self.rate))
        assert found.items() <= losses.items()

    def quietly(self, what):
        """Look in the middle of an epoch, where the oracle is not."""
        {
            "flush": self.pipe.flush,
            "evaluate": lambda: self.pipe.evaluate(DATA[:2]),
            "infer": lambda: self.pipe(DATA[0][0]),
            "state_dict": self.pipe.state_dict,
            "fingerprint": self.pipe.fingerprint,
            "optimizer state": self.pipe.optimizer.state_dict,
        }[what]()

    def look(self, what):
        pipe, oracle = self.pipe, self.oracle
        match what:
            case "flush":
                pipe.flush()
            case "evaluate":
                assert abs(pipe.evaluate(DATA[:2]) - oracle.evaluate(DATA[:2])) < 1e-6
            case "infer":
                difference = pipe(DATA[0][0]) - oracle.infer(DATA[0][0])
                assert difference.abs().max() < 1e-5
            case "state_dict":
                assert_same(pipe.state_dict(), oracle.state_dict())
            case "fingerprint":
                assert pipe.fingerprint() == pipe.fingerprint()
            case "optimizer state":
                state = pipe.optimizer.state_dict()["state"]
                assert state.keys() == oracle.optimizer.state_dict()["state"].keys()
            case "kill":
                self.kill()

    def kill(self):
        """Kill a worker process; or say that a worker that is a thread is gone."""
        if self.workers == "local":
            with suppress(ProcessLookupError):  # killed before, and not yet replaced
                kill(self.pipe, max(pids(self.pipe)))
        else:
            lose(self.pipe)


def check(schedule, workers, script):
    with tempfile.TemporaryDirectory() as folder:
        Script(schedule, workers, Path(folder)).run(script)


def settings_for(examples):
    return settings(
        max_examples=examples, print_blob=True,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip


def check_many(examples, workers, schedules):
    @settings_for(examples)
    @given(st.sampled_from(schedules), scripts)
    def run(schedule, script):
        check(schedule, workers, script)

    run()


@pytest.mark.thinned(3)
@pytest.mark.threads
@pytest.mark.timeout(300)
@pytest.mark.parametrize("schedule", PLANS)
def test_on_threads(schedule):
    check_many(15, "serial", [schedule])


@pytest.mark.processes
@pytest.mark.timeout(300)
def test_on_processes():
    check_many(6, "local", sorted(PLANS))


@pytest.mark.stress
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("schedule", PLANS)
def test_many_on_threads(schedule):
    """600 scripts in all."""
    check_many(200, "serial", [schedule])


@pytest.mark.stress
@pytest.mark.timeout(3600)
def test_many_on_processes():
    check_many(100, "local", sorted(PLANS))


def test_the_oracle_of_this_file_is_that_of_the_others():
    """It goes on where the other one begins."""
    from support.oracle import oracle

    for stages, k, reads in PLANS.values():
        run = OracleRun(stages, k, reads)
        found = [loss for x, y in DATA for loss in run.train(x, y, RATE)]
        weights, losses = oracle(
            kitchen_sink(), POINTS[stages], DATA, nn.functional.cross_entropy, make_optimizer,
            k=k, reads=reads,
        )  # fmt: skip
        assert found == losses
        assert_same(run.state_dict(), weights)
