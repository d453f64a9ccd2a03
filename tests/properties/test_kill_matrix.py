"""A worker is killed in any phase of a pipeline's life; the run has the bits of a calm one.

The phases: it opens, trains, evaluates, infers, verifies, saves, loads, gives its weights, closes.
The short version strikes once in each step of each phase; ``make chaos`` strikes at random steps,
several times in one life, also while the workers of a recovery open.
"""

import itertools
import random
import time

import pytest
import torch
import torch.nn.functional as F
from support.models import mlp, regression
from support.oracle import assert_same
from support.pinned import Pipeline
from support.strikes import CLOSING, FEEDING, OPENING, Strikes

from pipedream_rt import Checkpoints

DATA = regression(12)
MODEL = mlp(layers=4)
PHASES = {
    "train": lambda pipe, _: [r.loss for r in pipe.train_epoch(DATA[:6])],
    "evaluate": lambda pipe, _: pipe.evaluate(DATA[:4]),
    "infer": lambda pipe, _: pipe(DATA[0][0]).tolist(),
    "verify": lambda pipe, _: bool(pipe.verify(DATA[:2])),
    "save": lambda pipe, folder: bool(pipe.save(folder / "saved")),
    "train on": lambda pipe, _: [r.loss for r in pipe.train_epoch(DATA[6:9])],
    "load": lambda pipe, folder: bool(pipe.load(folder / "saved")),
    "train again": lambda pipe, _: [r.loss for r in pipe.train_epoch(DATA[6:])],
    "weights": lambda pipe, _: pipe.state_dict(),
}


@pytest.fixture
def strikes(monkeypatch):
    return Strikes(monkeypatch, [*OPENING, *CLOSING, FEEDING])


def life(folder, strikes, phase="", after=0, worker=0):
    """The whole life of a pipeline; in the named phase a worker is killed. Returns what it gave."""
    folder.mkdir()
    gave, path = {}, folder / "run"
    with Pipeline(
        MODEL, stages=2, loss_fn=F.mse_loss, optimizer=(torch.optim.AdamW, {"lr": 0.01}),
        workers="local", max_restarts=100, trace=folder / "trace.json",
        checkpoint=Checkpoints(path, every=5),
    ) as pipe:  # fmt: skip
        for name, does in PHASES.items():
            if name == phase:
                strikes.at(FEEDING, worker, after)
            gave[name] = does(pipe, folder)
        if phase in CLOSING:
            strikes.at(phase, worker)
    gave["kept"] = sorted(each.name for each in path.iterdir())
    return gave, pipe.restarts


@pytest.fixture(scope="module")
def calm(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patched:
        return life(tmp_path_factory.mktemp("calm") / "life", Strikes(patched, []))[0]


def assert_alike(gave, calm):
    gave, expected = dict(gave), dict(calm)
    assert_same(gave.pop("weights"), expected.pop("weights"))
    assert gave == expected


@pytest.mark.thinned(2)
@pytest.mark.processes
@pytest.mark.parametrize("worker", [0, 1])
@pytest.mark.parametrize("place", OPENING)
def test_while_it_opens(tmp_path, strikes, calm, place, worker):
    strikes.at(place, worker)
    gave, restarts = life(tmp_path / "life", strikes)
    assert strikes.struck == [place]
    assert len(restarts) == 1
    assert_alike(gave, calm)


@pytest.mark.thinned(2)
@pytest.mark.processes
@pytest.mark.parametrize(("after", "worker"), [(0, 0), (1, 1)])
@pytest.mark.parametrize("phase", PHASES)
def test_in_the_middle(tmp_path, strikes, calm, phase, after, worker):
    commands = phase in ("save", "load", "weights")  # one item alone
    gave, restarts = life(tmp_path / "life", strikes, phase, 0 if commands else after, worker)
    assert strikes.struck == [FEEDING]
    assert len(restarts) == 1
    assert_alike(gave, calm)


@pytest.mark.thinned(2)
@pytest.mark.processes
@pytest.mark.parametrize("worker", [0, 1])
@pytest.mark.parametrize("place", CLOSING)
def test_while_it_closes(tmp_path, strikes, calm, place, worker):
    gave, _ = life(tmp_path / "life", strikes, place, worker=worker)
    assert not strikes.left
    assert_alike(gave, calm)


@pytest.mark.stress
@pytest.mark.processes
@pytest.mark.timeout(3600)
def test_at_random_steps(tmp_path, monkeypatch, calm):
    """Thirty minutes of lives, each with up to eight kills, in any step of any phase."""
    monkeypatch.setattr("pipedream_rt.coordinator.recovery.decision._MOST_OF_ONE", 1000)
    end, kills, recoveries = time.monotonic() + 1800, 0, 0
    for seed in itertools.count():
        draw = random.Random(seed)
        with pytest.MonkeyPatch.context() as patched:
            strikes = Strikes(patched, [*OPENING, *CLOSING, FEEDING])
            for _ in range(draw.randrange(1, 8)):
                place = draw.choice([*OPENING, FEEDING, FEEDING])
                strikes.at(place, draw.randrange(2), draw.randrange(4))
            strikes.at(draw.choice(CLOSING), draw.randrange(2))
            gave, restarts = life(tmp_path / str(seed), strikes)
        assert_alike(gave, calm)
        kills, recoveries = kills + len(strikes.struck), recoveries + len(restarts)
        print(f"seed {seed}: {strikes.struck}; {kills} kills, {recoveries} recoveries so far")
        if time.monotonic() > end:
            return
