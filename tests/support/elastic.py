"""A script whose worker processes come and go.

    python elastic.py FOLDER WORKERS FEWEST MOST [STEP...]

WORKERS is that argument of `Pipeline`, or ``-`` for what the environment says. At each STEP it
prints who hosts the stages, and waits for a line. At one such as ``35+`` it waits for a worker that
comes, and makes a checkpoint, behind which it is taken: to write those of every tenth step may take
longer than the steps that are left. At ``35~`` it waits three seconds for newcomers.
"""

import sys
import tempfile
import threading
from datetime import timedelta

import torch
from torch import nn

from pipedream_rt import Checkpoints, Pipeline, Recovery
from pipedream_rt.deadline import Deadline

STAGES, STEPS, EVERY = 3, 60, 10


def trained(workers, folder, recovery, at_step=lambda pipe, step: None):
    """Train, and return the digest of the state."""
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.1)) for _ in range(STAGES))
    )
    data = [(torch.randn(8, 8), torch.randn(8, 8)) for _ in range(STEPS)]
    with Pipeline(
        model, stages=STAGES, loss_fn=nn.functional.mse_loss, optimizer=(torch.optim.AdamW, {}),
        micro_batches=1, corrections=(), workers=workers, recovery=recovery,
        checkpoint=Checkpoints(folder, every=EVERY),
    ) as pipe:  # fmt: skip
        for result in pipe.train_epoch(data):
            at_step(pipe, result.step)
        for restart in pipe.restarts:
            print(f"restart {restart.seconds:.3f} {restart.replayed} {restart.reason}", flush=True)
        return pipe.fingerprint().digest


def expected():
    """The digest of the same training in one process."""
    with tempfile.TemporaryDirectory() as folder:
        return trained("serial", folder, Recovery(max_restarts=1))


def main():
    folder, workers, fewest, most, *stops = sys.argv[1:]

    def at_step(pipe, step):
        if f"{step}+" in stops or f"{step}~" in stops:
            seconds = 120 if f"{step}+" in stops else 3
            deadline, pause = Deadline(timedelta(seconds=seconds)), threading.Event()
            while not pipe._group.cluster.newcomers() and not deadline.expired():
                pause.wait(0.1)
            if f"{step}+" in stops:
                pipe.save()
        elif str(step) in stops:
            names = [stage.worker for stage in pipe.stages]
            print(f"at {step}: {' '.join(names)}", flush=True)
            sys.stdin.readline()

    recovery = Recovery(
        max_restarts=20, start=timedelta(seconds=60), elastic=(int(fewest), int(most)),
        elastic_wait=timedelta(seconds=6),
    )  # fmt: skip
    workers = None if workers == "-" else workers
    print("digest", trained(workers, folder, recovery, at_step), flush=True)


if __name__ == "__main__":
    main()
