"""Faults at random places; every run gives the bits of one that was never disturbed.

The short versions run with the other tests; ``make chaos`` runs the long ones and prints the seeds.
"""

import functools
import itertools
from datetime import timedelta

import pytest
import torch.nn.functional as F
from support.faults import KINDS, PHASES, FaultySerial, Plan, faulty_sink
from support.models import POINTS, batches, kitchen_sink
from support.oracle import assert_same, oracle
from support.pinned import Pipeline

from pipedream_rt import Checkpoints

PLANS = [
    (4, {"schedule": "async-1f1b"}, "async-1f1b"),
    (2, {"schedule": "async-1f1b", "micro_batches": 2}, "async-1f1b"),
    (3, {"schedule": "async-1f1b+vertical-sync"}, "vertical-sync"),
    (3, {"schedule": "2bw", "micro_batches": 4}, "2bw"),
    (3, {"schedule": "1f1b", "micro_batches": 3}, "flushed"),
    (2, {"schedule": "gpipe", "micro_batches": 2}, "flushed"),
    (4, {"schedule": "interleaved-1f1b", "micro_batches": 4}, "flushed"),
    (3, {"schedule": "zero-bubble", "micro_batches": 4}, "flushed"),
    (2, {"schedule": "async-1f1b", "replicas": (2, 1)}, "async-1f1b"),
    (2, {"schedule": "async-1f1b", "micro_batches": 3, "replicas": (2, 2)}, "async-1f1b"),
    (2, {"schedule": "1f1b", "micro_batches": 3, "replicas": (1, 2)}, "flushed"),
]
BATCHES = 40


@pytest.fixture(autouse=True)
def nothing_is_poison(monkeypatch):
    """Different faults may strike in the same action."""
    monkeypatch.setattr("pipedream_rt.coordinator.recovery.decision._MOST_OF_ONE", 1000)


@functools.cache
def expected(stages, k, reads, replicas):
    import torch

    points = [0] if reads == "flushed" and not replicas else POINTS[stages]
    return oracle(
        kitchen_sink(), points, batches(BATCHES, samples=8), F.cross_entropy,
        lambda p: torch.optim.AdamW(p, lr=3e-3, weight_decay=0.1, foreach=False), k=k, reads=reads,
        replicas=replicas,
    )  # fmt: skip


def disturbed(folder, plan_of, number, every, workers, heartbeat=timedelta(seconds=10)):
    """Train with faults; the losses, the weights and how many faults there were."""
    stages, schedule, reads = PLANS[number]
    model, points, optimizer = faulty_sink(stages, folder / "plan")
    plan = plan_of(folder / "plan", stages)
    replicas = schedule.get("replicas", ())
    weights, losses = expected(stages, schedule.get("micro_batches", 1), reads, replicas)
    with Pipeline(
        model, stages=points, loss_fn=F.cross_entropy, optimizer=optimizer, workers=workers,
        checkpoint=Checkpoints(folder / "run", every=every), max_restarts=1000,
        heartbeat=heartbeat, answer=timedelta(seconds=60), **schedule,
    ) as pipe:  # fmt: skip
        steps, found = [], []
        for result in pipe.train_epoch(batches(BATCHES, samples=8)):
            steps.append(result.step)
            found += result.losses
        assert steps == list(range(BATCHES))
        assert_same(pipe.state_dict(), weights)
        restarts = len(pipe.restarts)
    assert found == losses
    return plan.struck, restarts


def in_process(seed):
    return functools.partial(FaultySerial, shuffle_seed=seed)


@pytest.mark.thinned(6)
@pytest.mark.threads
@pytest.mark.parametrize("number", range(len(PLANS)))
def test_exceptions_at_random_places_in_process(tmp_path, number):
    plan = functools.partial(Plan.random, seed=number, count=12, kinds=["raise"], phases=PHASES)
    struck, restarts = disturbed(
        tmp_path, lambda folder, n: plan(folder, stages=n), number, 3, in_process(number)
    )
    assert struck >= 2
    assert restarts > 0


@pytest.mark.processes
def test_faults_of_every_kind_on_processes(tmp_path):
    """One of each kind, in the step, the backward, a checkpoint and the recovery itself."""
    faults = [
        {"stage": 0, "phase": "step", "after": 5, "kind": "kill"},
        {"stage": 1, "phase": "start", "after": 1, "kind": "exit"},
        {"stage": 1, "phase": "backward", "after": 4, "kind": "stop"},
        {"stage": 0, "phase": "save", "after": 2, "kind": "kill"},
        {"stage": 1, "phase": "forward", "after": 3, "kind": "raise"},
    ]
    struck, restarts = disturbed(
        tmp_path, lambda folder, _: Plan(folder, faults), 1, 4, "local",
        heartbeat=timedelta(seconds=2),
    )  # fmt: skip
    assert struck == len(faults)
    assert restarts >= 3  # faults in a recovery are part of it


@pytest.mark.stress
@pytest.mark.timeout(3600)
def test_chaos_on_processes(tmp_path):
    """At least 100 faults over all schedules, any worker, any phase, any kind."""
    total = 0
    for seed in itertools.count(100):
        number = seed % len(PLANS)
        plan = functools.partial(Plan.random, seed=seed, count=8, kinds=KINDS, phases=PHASES)
        struck, restarts = disturbed(
            tmp_path / str(seed), lambda folder, n, plan=plan: plan(folder, stages=n), number,
            1 + seed % 5, "local", heartbeat=timedelta(seconds=2),
        )  # fmt: skip
        total += struck
        print(f"seed {seed}, {PLANS[number]}: {struck} faults, {restarts} recoveries; {total}")
        if total >= 100:
            return


@pytest.mark.stress
@pytest.mark.timeout(3600)
def test_chaos_in_process(tmp_path):
    """Exceptions at random places, messages in random order."""
    total = 0
    for seed in range(64):
        number = seed % len(PLANS)
        plan = functools.partial(Plan.random, seed=seed, count=20, kinds=["raise"], phases=PHASES)
        struck, _ = disturbed(
            tmp_path / str(seed), lambda folder, n, plan=plan: plan(folder, stages=n), number,
            1 + seed % 7, in_process(seed),
        )  # fmt: skip
        total += struck
    print(f"{total} faults")
    assert total >= 500
