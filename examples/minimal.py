"""The ten lines of the README, with a toy task: tell whether more inputs are positive."""

import torch
import torch.nn.functional as F
from torch import nn

from pipedream_rt import Pipeline

if __name__ == "__main__":
    torch.manual_seed(0)
    x = torch.randn(4096, 32)
    y = (x.sign().sum(1) > 0).long()
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), 64, shuffle=True)
    model = nn.Sequential(
        nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2)
    )

    with Pipeline(
        model, stages=2, loss_fn=F.cross_entropy, optimizer=(torch.optim.AdamW, {"lr": 1e-3})
    ) as pipe:
        for epoch in range(3):
            losses = [result.loss for result in pipe.train_epoch(loader)]
            print(f"epoch {epoch}: loss {sum(losses) / len(losses):.3f}")
        print(f"evaluation: loss {pipe.evaluate(loader):.3f}")
        model.load_state_dict(pipe.state_dict())
