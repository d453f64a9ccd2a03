"""A model with matrices of every kind, and its training, for the optimizers of matrices."""

import torch
from torch import nn

from pipedream_rt.optimizers import hidden_matrices


class MatrixModel(nn.Module):
    def __init__(self, tied=False):
        super().__init__()
        self.embedding = nn.Embedding(7, 6)
        self.attention = nn.MultiheadAttention(6, 2)
        self.up = nn.Linear(6, 10)
        self.norm = nn.LayerNorm(10)
        self.down = nn.Linear(10, 6)
        self.head = nn.Linear(6, 7, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, x):
        hidden = self.embedding(x)
        hidden = hidden + self.attention(hidden, hidden, hidden)[0]
        return self.head(self.down(torch.relu(self.norm(self.up(hidden)))))


def model():
    torch.manual_seed(3)
    return MatrixModel()


def grouped(net):
    rule = hidden_matrices(net)
    named = list(net.named_parameters())
    inside = [p for name, p in named if rule(name, p)]
    others = [p for name, p in named if not rule(name, p)]
    return inside, others


def trained(net, step, updates=12):
    generator = torch.Generator().manual_seed(1)
    for _ in range(updates):
        x = torch.randint(7, (5, 3), generator=generator)
        net.zero_grad()
        nn.functional.cross_entropy(net(x).flatten(0, 1), x.flatten()).backward()
        step()
    return [p.detach().clone() for p in net.parameters()]
