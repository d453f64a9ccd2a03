"""A script whose workers are on other machines; it waits for a line where a test interferes."""

import argparse
import hashlib
import sys
from datetime import timedelta

import torch
import torch.nn.functional as F
from torch import nn

from pipedream_rt import Layout, Pipeline, PipelineError, Recovery


def train(arguments):
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.1)) for _ in range(4))
    )
    samples = arguments.samples
    data = [(torch.randn(samples, 8), torch.randn(samples, 8)) for _ in range(arguments.steps)]
    with Pipeline(
        model, stages=arguments.stages, loss_fn=F.mse_loss, optimizer=(torch.optim.AdamW, {}),
        workers=arguments.workers, micro_batches=1, corrections=(),
        layout=Layout(replicas=arguments.replicas),
        recovery=Recovery(
            max_restarts=arguments.max_restarts,
            heartbeat=timedelta(seconds=arguments.heartbeat),
            start=timedelta(seconds=arguments.start),
        ),
    ) as pipe:  # fmt: skip
        print("workers", *(stage.worker for stage in pipe.stages), flush=True)
        for result in pipe.train_epoch(data):
            if result.step in arguments.pause_at:
                print("paused after", result.step, flush=True)
                sys.stdin.readline()
        print(pipe.explain(), flush=True)
        state = pipe.state_dict()
        print("restarts", len(pipe.restarts), flush=True)
    digest = hashlib.sha256(b"".join(v.numpy().tobytes() for v in state.values())).hexdigest()
    print("digest", digest, flush=True)


def main(words=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers")
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--replicas", type=int, nargs="*", default=[])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--heartbeat", type=float, default=10)
    parser.add_argument("--start", type=float, default=60)
    parser.add_argument("--max-restarts", type=int, default=8)
    parser.add_argument("--pause-at", type=int, nargs="*", default=[])
    try:
        train(parser.parse_args(words))
    except PipelineError as error:
        print(f"{type(error).__name__}: {error}", flush=True)
        sys.exit(9)


if __name__ == "__main__":
    main()
