"""A schedule of one's own: checked, simulated, then trained with.

1F1B waits for every gradient a whole way there and back. On a link with a high latency it helps to
send more forwards ahead: twice as many as there are stages after this one. That costs memory for
activations, and hides a latency as long as a forward and a backward.

    python examples/own_schedule.py
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipedream_rt import Pipeline
from pipedream_rt.observe import summarize
from pipedream_rt.schedules import Action, Kind, Shape, check, plan_for
from pipedream_rt.simulation import costs_of, simulate

STAGES, MICRO_BATCHES = 4, 16


class Eager1F1B:
    """1F1B with twice the warm-up.

    Flushed at every update: what is assumed of a class that has no ``versions`` of its own.
    """

    def order(self, worker: int, shape: Shape, start: int) -> Iterator[Action]:
        k = shape.per_update
        ahead = min(2 * (shape.workers - 1 - worker), k - 1)
        while True:
            for i in range(k + ahead):
                if i < k:
                    yield Action(Kind.FORWARD, start + i)
                if i >= ahead:
                    yield Action(Kind.BACKWARD, start + i - ahead)
            yield Action(Kind.STEP, start // k)
            start += k


def drawn() -> None:
    """What it looks like, and that it obeys the rules."""
    schedule = plan_for(Eager1F1B(), num_stages=STAGES, per_update=6)
    print(check(schedule, 6).render())


def simulated() -> None:
    """What it brings, before anything runs."""
    numbers = {"num_stages": STAGES, "per_update": MICRO_BATCHES}
    print("\nlatency  1f1b  eager  micro-batches/s")
    for latency in ("0ms", "5ms", "10ms", "20ms"):
        costs = costs_of({"forward": "10ms", "backward": "20ms", "latency": latency})
        rates = [
            summarize(simulate(plan_for(s, **numbers), costs, 8 * MICRO_BATCHES)).throughput
            for s in ("1f1b", Eager1F1B())
        ]
        print(f"{latency:<8} {rates[0]:.1f}  {rates[1]:.1f}")


def trained() -> None:
    """The same bits as with 1f1b: both flush, so both are plain gradient accumulation."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(STAGES)))
    data: list[tuple[Tensor, Tensor]] = [(torch.randn(64, 32), torch.randn(64, 32))] * 10
    states = []
    for schedule in ("1f1b", Eager1F1B()):
        with Pipeline(
            model,
            stages=STAGES,
            loss_fn=F.mse_loss,
            optimizer=(torch.optim.AdamW, {"lr": 1e-3}),
            schedule=schedule,
            micro_batches=MICRO_BATCHES,
        ) as pipe:
            losses = [result.loss for result in pipe.train_epoch(data)]
            states.append(pipe.state_dict())
        print(f"\n{pipe.plan.name}: loss {losses[0]:.4f} to {losses[-1]:.4f}", end="")
    same = all(torch.equal(states[0][key], states[1][key]) for key in states[0])
    print(f"\nthe same weights, bit for bit: {same}")


if __name__ == "__main__":
    drawn()
    simulated()
    trained()
