"""A loss that the script computes: plain PyTorch, and the loops of a script over a pipeline.

The plain part imports nothing of the project, on purpose.
"""

import torch
from torch.nn import functional as F

from .oracle import layer_seed


def no_loss(step):
    """A loop that never leaves a mini-batch out."""
    return False


def train_joined(model, data, loss_fn, make_optimizer, *, k=1, leaves_out=no_loss):
    """Train a model, whose micro-batches' outputs are joined before the loss; return the losses.

    leaves_out: of the number of a mini-batch, whether the script computes no loss of it.
    """
    optimizer, losses = make_optimizer(model.parameters()), []
    for t, (x, y) in enumerate(data):
        optimizer.zero_grad()
        outputs = []
        for i, value in enumerate(x.split(-(-len(x) // k))):
            for name, layer in model.named_children():
                torch.manual_seed(layer_seed(0, t * k + i, name))
                value = layer(value)
            outputs.append(value)
        whole = torch.cat([output.detach() for output in outputs]).requires_grad_()
        if leaves_out(t):
            continue
        losses.append(loss_fn(whole, y))
        losses[-1].backward()
        for output, gradient in zip(outputs, whole.grad.split([len(o) for o in outputs])):
            output.backward(gradient)
        torch.manual_seed(layer_seed(0, t, "step"))
        optimizer.step()
    return [loss.item() for loss in losses]


def train_outputs(pipe, data, loss_fn=F.cross_entropy, *, leaves_out=no_loss, at=lambda step: None):
    """Train on outputs; return the losses. ``at`` is called between an output and its backward."""
    losses = []
    for step, (output, (_, y)) in enumerate(pipe.outputs(data)):
        at(step)
        if leaves_out(step):
            continue
        losses.append(loss_fn(output, y))
        losses[-1].backward()
    return [loss.item() for loss in losses]


def train_by_hand(pipe, data, loss_fn=F.cross_entropy, *, at=lambda step, where: None):
    """Train by forward and step; return the losses. ``at`` is called before each of the three."""
    losses = []
    for step, (x, y) in enumerate(data):
        at(step, "forward")
        output = pipe.forward(x)
        at(step, "backward")
        losses.append(loss_fn(output, y))
        losses[-1].backward()
        at(step, "step")
        pipe.step()
    return [loss.item() for loss in losses]


class Plain:
    """A model in plain PyTorch, with the calls of a pipeline whose loss the script computes."""

    def __init__(self, model):
        self.forward, self.state_dict = model, model.state_dict
        self._optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(self, update=True):
        if update:
            self._optimizer.step()
        self._optimizer.zero_grad()

    def outputs(self, data):
        for item in data:
            yield self.forward(*item[0]), item
            self.step()
