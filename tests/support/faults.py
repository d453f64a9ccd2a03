"""Faults with a place: which stage, in which phase, after how many times, of which kind.

A plan is a list of faults that strike one after another; a folder remembers across processes which
have struck. A fault waits until the one before has struck, then counts how often its phase is
reached on its stage in the process at hand.
"""

import json
import os
import random
import signal
import threading
from collections import OrderedDict
from pathlib import Path

import torch
from torch import nn

from .models import POINTS, kitchen_sink

PHASES = ("forward", "backward", "step", "save", "start", "load")
KINDS = ("kill", "stop", "exit", "raise")


class Injected(RuntimeError):
    """What a fault raises."""


class Plan:
    """The faults of a run."""

    def __init__(self, folder, faults):
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "plan.json").write_text(json.dumps(faults))
        self.faults = faults

    @classmethod
    def random(cls, folder, seed, count, stages, kinds, phases):
        draw = random.Random(seed)
        return cls(
            folder,
            [
                {
                    "stage": draw.randrange(stages),
                    # What strikes in a recovery needs one to be under way.
                    "phase": draw.choice(phases if number % 2 else phases[:3]),
                    "after": draw.randrange(1, 8),
                    "kind": draw.choice(kinds),
                }
                for number in range(count)
            ],
        )

    @property
    def struck(self):
        return len([p for p in self.folder.iterdir() if p.name.startswith("struck-")])


def reached(folder, stage, phase, counts):
    """A stage has come to a phase; strike if it is time."""
    if not folder:
        return
    folder = Path(folder)
    try:
        faults = json.loads((folder / "plan.json").read_text())
    except FileNotFoundError:
        return
    left = [i for i in range(len(faults)) if not (folder / f"struck-{i}").exists()]
    # What strikes in a recovery or a checkpoint waits for one; the next may bring it about.
    due = left[: 2 if left and faults[left[0]]["phase"] in PHASES[3:] else 1]
    here = [i for i in due if (faults[i]["stage"], faults[i]["phase"]) == (stage, phase)]
    if not here:
        return
    number = here[0]
    # What is reached once in the life of a process strikes at once.
    after = 1 if phase in ("start", "load") else faults[number]["after"]
    counts[number] = counts.get(number, 0) + 1
    if counts[number] < after:
        return
    try:
        os.close(os.open(folder / f"struck-{number}", os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return
    match faults[number]["kind"]:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "exit":
            os._exit(7)
        case "raise":
            raise Injected(f"fault {number}")


class _Through(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, layer):
        ctx.layer = layer
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        ctx.layer.reached("backward")
        return gradient, None


class Fault(nn.Module):
    """Changes nothing; faults strike in it."""

    def __init__(self, stage, folder):
        super().__init__()
        self.stage, self.folder, self.counts = stage, str(folder), {}

    def reached(self, phase):
        reached(self.folder, self.stage, phase, self.counts)

    def forward(self, x):
        if self.training and torch.is_grad_enabled():
            self.reached("forward")
            return _Through.apply(x, self)
        return x

    def __setstate__(self, state):
        super().__setstate__(state)
        if threading.current_thread() is not threading.main_thread():
            self.reached("start")

    def _save_to_state_dict(self, *arguments):
        if threading.current_thread() is not threading.main_thread():
            self.reached("save")
        super()._save_to_state_dict(*arguments)

    def _load_from_state_dict(self, *arguments):
        if threading.current_thread() is not threading.main_thread():
            self.reached("load")
        super()._load_from_state_dict(*arguments)


class FaultyAdamW(torch.optim.AdamW):
    """Faults strike in its step; on the stages alone, which it knows by their parameters."""

    def __init__(self, params, folder="", sizes=(), **kwargs):
        super().__init__(params, **kwargs)
        self.folder, self.counts = folder, {}
        total = sum(p.numel() for g in self.param_groups for p in g["params"])
        self.stage = list(sizes).index(total) if total in sizes else -1

    def step(self, closure=None):
        reached(self.folder, self.stage, "step", self.counts)
        return super().step(closure)


def faulty_sink(stages, folder):
    """The kitchen sink with a fault at the end of each stage: the layers keep their names.

    Returns the model, the split points by name, and an optimizer.
    """
    model, layers, points = kitchen_sink(), OrderedDict(), []
    sizes, bounds = [], [*POINTS[stages], 12]
    for stage in range(stages):
        points.append(str(bounds[stage]))
        for number in range(bounds[stage], bounds[stage + 1]):
            layers[str(number)] = model[number]
        sizes.append(
            sum(
                p.numel()
                for n in range(bounds[stage], bounds[stage + 1])
                for p in model[n].parameters()
            )
        )
        layers[f"fault{stage}"] = Fault(stage, folder)
    optimizer = (
        FaultyAdamW,
        {"lr": 3e-3, "weight_decay": 0.1, "foreach": False, "folder": str(folder), "sizes": sizes},
    )
    return nn.Sequential(layers), points[1:], optimizer
