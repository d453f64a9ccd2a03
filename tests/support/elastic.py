"""A script whose worker processes come and go; it waits for a line at the steps that it is given.

python elastic.py FOLDER PORT FEWEST MOST [STEP...]
"""

import sys
from datetime import timedelta

import torch
from torch import nn

from pipedream_rt import Checkpoints, Pipeline, Recovery

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


def main():
    folder, port, fewest, most, *stops = sys.argv[1:]

    def at_step(pipe, step):
        if str(step) in stops:
            workers = [stage.worker for stage in pipe.stages]
            print(f"at {step}: {' '.join(workers)}", flush=True)
            sys.stdin.readline()

    recovery = Recovery(
        max_restarts=20, start=timedelta(seconds=60), elastic=(int(fewest), int(most)),
        elastic_wait=timedelta(seconds=1),
    )  # fmt: skip
    print("digest", trained(f"127.0.0.1:{port}", folder, recovery, at_step), flush=True)


if __name__ == "__main__":
    main()
