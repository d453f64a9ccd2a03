"""A schedule of one's own, with its own rule for weight versions: checked, simulated, trained with.

An asynchronous pipeline never drains and is always stale; one that flushes at every update is never
stale and always drains. In between: run asynchronously for a round of several updates, then drain.
Every round begins with fresh weights, and the bubble of one drain is shared by all its updates.

    python examples/own_schedule.py
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipedream_rt import Action, Kind, Pipeline, Shape, check, plan_for, simulate
from pipedream_rt.observe import summarize
from pipedream_rt.simulation import costs_of

STAGES, MICRO_BATCHES = 4, 2


class RoundVersions:
    """Within a round, the newest version that the stage has made; never one of an earlier round.

    Args:
        updates: Of a round.
    """

    def __init__(self, updates: int) -> None:
        self.updates = updates

    def reads(self, stage: int, shape: Shape, micro_batch: int) -> int:
        """Depends on the number of the micro-batch alone, so that a flush changes nothing."""
        k = shape.per_update
        fresh = micro_batch // (k * self.updates) * self.updates
        return max(fresh, (micro_batch - shape.warm_up(stage)) // k)

    def kept(self, stage: int, shape: Shape) -> int:
        return -(-shape.warm_up(stage) // shape.per_update) + 1

    def require(self, shape: Shape) -> None:
        """Any shape will do."""


class Rounds:
    """Asynchronous 1F1B that drains after every round of so many updates.

    Args:
        updates: Of a round.
    """

    takes_slack = True  # it goes by shape.warm_up, which has the slack in it

    def __init__(self, updates: int) -> None:
        self.name = f"rounds of {updates}"
        self.updates = updates
        self.versions = RoundVersions(updates)

    def order(self, worker: int, shape: Shape, start: int) -> Iterator[Action]:
        """After a flush in mid-round the first round is the rest of that one."""
        k, ahead = shape.per_update, shape.warm_up(worker)
        length = k * self.updates
        while True:
            end = (start // length + 1) * length
            for m in range(start, end + ahead):
                if m < end:
                    yield Action(Kind.FORWARD, m)
                done = m - ahead
                if done >= start:
                    yield Action(Kind.BACKWARD, done)
                    if (done + 1) % k == 0:
                        yield Action(Kind.STEP, done // k)
            start = end


def drawn() -> None:
    """What it looks like, and that it obeys the rules."""
    plan = plan_for(Rounds(3), num_stages=STAGES, per_update=MICRO_BATCHES)
    print(check(plan, 12).render())


def simulated() -> None:
    """What it brings, before anything runs."""
    costs = costs_of({"forward": "10ms", "backward": "20ms"})
    print("\nschedule      bubble  staleness, mean over micro-batches and stages")
    for schedule in ("1f1b", Rounds(2), Rounds(4), Rounds(8), "async-1f1b"):
        plan = plan_for(schedule, num_stages=STAGES, per_update=MICRO_BATCHES)
        summary = summarize(simulate(plan, costs, 64 * MICRO_BATCHES))
        stale = sum(n * count for n, count in summary.staleness.items())
        mean = stale / sum(summary.staleness.values())
        print(f"{plan.name:<13} {summary.bubble[0]:>5.1%}   {mean:.2f}")


def trained() -> None:
    """Rounds of one update are plain gradient accumulation, as 1f1b is, bit for bit."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(STAGES)))
    data: list[tuple[Tensor, Tensor]] = [(torch.randn(64, 32), torch.randn(64, 32))] * 10
    states = []
    for schedule in ("1f1b", Rounds(1), Rounds(5)):
        with Pipeline(
            model,
            stages=STAGES,
            loss_fn=F.mse_loss,
            optimizer=(torch.optim.AdamW, {"lr": 1e-3}),
            schedule=schedule,
            micro_batches=MICRO_BATCHES,
        ) as pipe:
            results = list(pipe.train_epoch(data))
            states.append(pipe.state_dict())
        staleness = " ".join(str(result.staleness) for result in results)
        print(f"\n{pipe.plan.name}: loss {results[-1].loss:.4f}, staleness {staleness}", end="")
    same = all(torch.equal(states[0][key], states[1][key]) for key in states[0])
    print(f"\n1f1b and rounds of 1 have the same weights, bit for bit: {same}")


if __name__ == "__main__":
    drawn()
    simulated()
    trained()
