"""Modules that hand values to later ones past what they return, as ``@skippable`` of torchgpipe."""

import threading

import torch
import torch.nn.functional as F
from torch import nn

_here = threading.local()


class Skippable(nn.Module):
    """Runs the generator that its module returns; what that stashes lies in the thread."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def stashable(self):
        """What it stashes; torchgpipe has such a method, and the next one."""
        return [self.module.name] * isinstance(self.module, Down)

    def poppable(self):
        return [self.module.name] * isinstance(self.module, Up)

    def forward(self, x):
        there, made = vars(_here), self.module(x)
        answer = None
        try:
            while True:
                what, name, *value = made.send(answer)
                if what == "stash":
                    there[name], answer = value[0], None
                else:
                    answer = there.pop(name)
        except StopIteration as stop:
            return stop.value


class Down(nn.Module):
    def __init__(self, name, width):
        super().__init__()
        self.name, self.conv = name, nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x):
        x = self.conv(x).relu()
        yield "stash", self.name, x
        return F.avg_pool2d(x, 2)


class Up(nn.Module):
    def __init__(self, name, width):
        super().__init__()
        self.name, self.conv = name, nn.Conv2d(2 * width, width, 3, padding=1)

    def forward(self, x):
        skip = yield "pop", self.name
        return self.conv(torch.cat([F.interpolate(x, scale_factor=2), skip], 1)).relu()


def unet(width=4):
    """Two skips, one inside of the other."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1),
        Skippable(Down("outer", width)),
        Skippable(Down("inner", width)),
        nn.Conv2d(width, width, 3, padding=1),
        Skippable(Up("inner", width)),
        Skippable(Up("outer", width)),
        nn.Flatten(),
        nn.Linear(width * 64, 4),
    )
