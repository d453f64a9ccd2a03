"""Plain PyTorch: a loop over mini-batches, with the random numbers of the pipeline's layers.

It imports nothing of the project, on purpose.
"""

import torch

from .device.references import computed_on_the_device
from .oracle import layer_seed


@computed_on_the_device
def train_plainly(model, data, loss_fn, make_optimizer, *, script=lambda optimizer: None):
    """Train a model as a user of PyTorch would; return the losses.

    script: called with the optimizer; returns a function to call after each step with its loss.
    """
    parameters = list(model.parameters())
    if isinstance(loss_fn, torch.nn.Module):
        parameters += loss_fn.parameters()
    optimizer = make_optimizer(parameters)
    after_step = script(optimizer) or (lambda loss: None)
    losses = []
    for t, (x, y) in enumerate(data):
        optimizer.zero_grad()
        # Plain PyTorch refuses to save tensors of inference mode; a pipeline copies every input.
        value = x.clone() if isinstance(x, torch.Tensor) and x.is_inference() else x
        for name, layer in model._modules.items():
            torch.manual_seed(layer_seed(0, t, name))
            value = layer(value)
        loss = loss_fn(value, y)
        torch.manual_seed(layer_seed(0, t, "backward"))
        loss.backward()
        torch.manual_seed(layer_seed(0, t, "step"))
        optimizer.step()
        losses.append(loss.item())
        after_step(losses[-1])
    return losses
