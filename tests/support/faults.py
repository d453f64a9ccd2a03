"""Faults with a place: a stage, a phase, how often that phase is reached before, and a kind.

The faults of a plan strike one after another. A folder, which all processes share, has a file for
each fault that has struck. A fault waits until the one before it has struck; from then on it counts
how often its phase is reached on its stage in the present process.
"""

import errno
import json
import os
import random
import signal
import threading
from collections import OrderedDict
from pathlib import Path

import torch
from torch import nn

from pipedream_rt.errors import CheckpointError
from pipedream_rt.serial.cluster import SerialCluster

from .inside import kill
from .models import POINTS, kitchen_sink

PHASES = ("forward", "backward", "step", "save", "start", "load")
KINDS = ("kill", "stop", "exit", "raise")


class Injected(RuntimeError):
    """The error that a fault of the kind "raise" raises."""


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
                    # A fault in a recovery can strike only when another fault has caused one.
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


def losses_through_death(pipe, data, victim, step):
    """Train on mini-batches; kill a worker, if one is named, at the result of a step."""
    # Else the worker may have done all that there is before anybody reads the result.
    assert not victim or len(data) > step + pipe.plan.credits() + 1
    losses = []
    for result in pipe.train_epoch(data):
        losses.append(result.loss)
        if victim and result.step == step:
            kill(pipe, victim)
    return losses


def reached(folder, stage, phase, counts):
    """Note that a stage has reached a phase, and let the fault strike whose turn it is."""
    if not folder:
        return
    folder = Path(folder)
    try:
        faults = json.loads((folder / "plan.json").read_text())
    except FileNotFoundError:
        return
    left = [i for i in range(len(faults)) if not (folder / f"struck-{i}").exists()]
    # A fault in a recovery or a checkpoint waits for one, which the next fault may cause.
    due = left[: 2 if left and faults[left[0]]["phase"] in PHASES[3:] else 1]
    here = [i for i in due if (faults[i]["stage"], faults[i]["phase"]) == (stage, phase)]
    if not here:
        return
    number = here[0]
    # A process reaches these phases once, so the fault strikes the first time.
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


_turn = threading.local()


class FaultySerial(SerialCluster):
    """One whose layers can tell the turn of a stage from the script, which share a thread."""

    def _go_on(self):
        _turn.of_a_stage = True
        try:
            return super()._go_on()
        finally:
            _turn.of_a_stage = False


def _on_a_stage():
    elsewhere = threading.current_thread() is not threading.main_thread()
    return elsewhere or getattr(_turn, "of_a_stage", False)


class Fault(nn.Module):
    """A layer that changes nothing, and in which faults strike."""

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
        if _on_a_stage():
            self.reached("start")

    def _save_to_state_dict(self, *arguments):
        if _on_a_stage():
            self.reached("save")
        super()._save_to_state_dict(*arguments)

    def _load_from_state_dict(self, *arguments):
        if _on_a_stage():
            self.reached("load")
        super()._load_from_state_dict(*arguments)


class FaultyAdamW(torch.optim.AdamW):
    """AdamW in whose step faults strike.

    Only on the stages: it finds out its stage from the number of its parameters, which is one of
    ``sizes`` there.
    """

    def __init__(self, params, folder="", sizes=(), **kwargs):
        super().__init__(params, **kwargs)
        self.folder, self.counts = folder, {}
        total = sum(p.numel() for g in self.param_groups for p in g["params"])
        self.stage = list(sizes).index(total) if total in sizes else -1

    def step(self, closure=None):
        reached(self.folder, self.stage, "step", self.counts)
        return super().step(closure)


def faulty_sink(stages, folder):
    """Return the kitchen sink with a `Fault` at the end of each stage.

    The other layers keep their names. The result is the model, the split points by name, and the
    argument ``optimizer``.
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


def of_system(cls=CheckpointError):
    """An error that comes from one of the system."""
    error = cls("it cannot be read")
    error.__cause__ = OSError(errno.EIO, "I/O error")
    return error
