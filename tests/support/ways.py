"""The ways to start a job on one machine, and a script for all of them."""

SCRIPT = """
import sys
import torch
import torch.nn.functional as F
from torch import nn
from pipedream_rt import Pipeline

if __name__ == "__main__":
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    data = [(torch.randn(8, 8), torch.randint(4, (8,))) for _ in range(6)]
    with Pipeline(
        layers, stages=2, loss_fn=F.cross_entropy, optimizer=(torch.optim.SGD, {"lr": 0.1}),
        workers=sys.argv[1] if len(sys.argv) > 1 else None,
    ) as pipe:
        losses = [result.loss for result in pipe.train_epoch(data)]
        print("losses", losses)
        print("told", "RPC" in pipe.explain())
        print("parameters", [stage.rref.rpc_sync().num_parameters() for stage in pipe.stages])
        try:
            print("fetched", len(pipe.stages[1].rref.to_here().state_dict()))
        except Exception as error:
            print("refused", error)
"""
CLI = ["-c", "from pipedream_rt.cli import main; main()"]
RUN = [*CLI, "run", "--nproc-per-node", "2"]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def line_of(text, begins):
    return next(line for line in text.splitlines() if line.startswith(begins))
