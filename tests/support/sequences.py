"""What a script may do one after another, and an oracle that does the same in one loop.

The oracle imports nothing of the project.
"""

import copy

import torch
import torch.nn.functional as F
from torch.func import functional_call

from .device.references import home
from .models import POINTS, batches, kitchen_sink
from .oracle import READS, add_gradients, lags, layer_seed

DATA = batches(5, samples=6)
"""The mini-batches of an epoch."""

RATE = 3e-3


def make_optimizer(parameters):
    return torch.optim.AdamW(parameters, lr=RATE, weight_decay=0.1, foreach=False)


class OracleRun:
    """A training that can be asked, saved, and set back, as a pipeline can."""

    def __init__(self, stages, k, reads):
        self.points, self.k, self.reads = POINTS[stages], k, READS[reads]
        self.lags = lags(stages)
        self.home = home()
        self.model = kitchen_sink().to(self.home)
        self.optimizer = make_optimizer(self.model.parameters())
        self.step = self.floor = 0
        self.versions = [self._weights()]

    def _weights(self):
        return {name: p.detach().clone() for name, p in self.model.named_parameters()}

    def train(self, x, y, rate):
        """Train on one mini-batch; return the losses of its micro-batches."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.zero_grad()
        x, y, losses = x.to(self.home), y.to(self.home), []
        for i, (xm, ym) in enumerate(zip(x.chunk(self.k), y.chunk(self.k), strict=True)):
            m, value, leaves = self.step * self.k + i, xm, {}
            for number, (layer_name, layer) in enumerate(self.model.named_children()):
                stage = sum(number >= point for point in self.points) - 1
                version = max(self.floor, self.reads(m, stage, self.lags, self.k))
                weights = {
                    name: self.versions[version][f"{layer_name}.{name}"].clone().requires_grad_()
                    for name, _ in layer.named_parameters()
                }
                torch.manual_seed(layer_seed(0, m, layer_name))
                value = functional_call(layer, weights, value)
                leaves.update({f"{layer_name}.{name}": w for name, w in weights.items()})
            loss = F.cross_entropy(value, ym)
            losses.append(loss.item())
            add_gradients(self.model, loss * (len(xm) / len(x)), leaves)
        self.optimizer.step()
        self.versions.append(self._weights())
        self.step += 1
        return losses

    def evaluate(self, data):
        self.model.eval()
        losses, sizes = [], []
        with torch.no_grad():
            for x, y in data:
                for xm, ym in zip(x.chunk(self.k), y.chunk(self.k), strict=True):
                    output = self.model(xm.to(self.home))
                    losses.append(F.cross_entropy(output, ym.to(self.home)).item())
                    sizes.append(len(xm))
        self.model.train()
        return sum(loss * size for loss, size in zip(losses, sizes, strict=True)) / sum(sizes)

    def infer(self, x):
        self.model.eval()
        with torch.no_grad():
            output = self.model(x.to(self.home))
        self.model.train()
        return output.cpu()

    def state_dict(self):
        return {key: value.cpu() for key, value in self.model.state_dict().items()}

    def load_weights(self, state):
        """From here on no older version is read."""
        self.model.load_state_dict(state)
        self.floor = self.step
        self.versions[self.step] = self._weights()

    def snapshot(self):
        # Model and optimizer in one copy, so that they stay one.
        return copy.deepcopy((self.model, self.optimizer, self.versions, self.step, self.floor))

    def set_back(self, snapshot):
        self.model, self.optimizer, self.versions, self.step, self.floor = copy.deepcopy(snapshot)
