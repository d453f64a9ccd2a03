"""On an accelerator the bits of a pipeline are compared with those of the same device.

The kernels of a device give other bits than the host's, so what tests compare with, the oracle and
the plain loops, is computed there too, in one process and without stages. The stand-in computes as
the host does and needs none of this.
"""

import functools
import os

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

DEVICE = "PIPEDREAM_RT_TESTS_REFERENCE"
"""The variable that says where references compute; the host if there is none."""


def home():
    """The device on which references compute."""
    return os.environ.get(DEVICE, "cpu")


def computed_on_the_device(reference):
    """A reference whose arguments go to the device, and whose results and modules come back."""

    @functools.wraps(reference)
    def there(*args, **options):
        device = os.environ.get(DEVICE)
        if device is None:
            return reference(*args, **options)
        modules = [each for each in args if isinstance(each, nn.Module)]
        args = tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), args)
        for module in modules:
            module.to(device)
        try:
            found = reference(*args, **options)
        finally:
            for module in modules:
                module.to("cpu")
        return tree_map_only(torch.Tensor, lambda tensor: tensor.cpu(), found)

    return there
