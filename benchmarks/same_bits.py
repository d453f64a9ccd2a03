"""An older checkout against this one: the same runs, bit for bit.

Random settings are drawn from a seed: the model (a chain with buffers and random numbers, one with
a tied weight, one with skips, one with several programs), the schedule, stages, micro-batches,
slack, replicas, clipping, scaling, averages, corrections, recompute, autocast. Each is trained in
one thread in both checkouts, with a flush and an evaluation on the way. Some are also trained on
worker processes of which one is killed, and some are resumed with another number of stages. The
losses, the weights with the buffers, and the state of the optimizer must be the same bits; what one
checkout refuses, the other must refuse too.

The older checkout needs an environment of its own in ``.venv`` (``make .venv/installed`` there)::

    git clone . ../old && (cd ../old && git checkout COMMIT && make .venv/installed)
    python benchmarks/same_bits.py ../old

Prints one line for each difference, and the numbers; the exit status is 1 if there is a difference.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
from dataclasses import fields
from pathlib import Path
from typing import Any

import click
import torch
import torch.nn.functional as F
from torch import Tensor, nn

HERE = Path(__file__).resolve().parent
WORDS, LENGTH, WIDTH = 13, 5, 8

# -- models ---------------------------------------------------------------------------------------


class Turn(nn.Module):
    """A layer whose output is not contiguous."""

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, D) to (B, D, T) and back."""
        return x.transpose(1, 2)


def chain() -> nn.Module:
    """Layers one after another, with buffers, random numbers and a step in place."""
    return nn.Sequential(
        nn.Embedding(WORDS, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), Turn(),
        nn.BatchNorm1d(WIDTH), nn.ReLU(inplace=True), nn.Dropout(0.2), Turn(),
        nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WORDS), Turn(),
    )  # fmt: skip


class Tied(nn.Module):
    """A head with the weight of the embedding, and a weight that is used in the middle too."""

    def __init__(self) -> None:
        """Make the layers."""
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.middle = nn.Linear(WIDTH, WORDS, bias=False)
        self.back = nn.Linear(WORDS, WIDTH)
        self.drop = nn.Dropout(0.1)
        self.last = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.middle.weight = self.embed.weight

    def forward(self, words: Tensor) -> Tensor:
        """Return the scores, (B, words, T)."""
        x = self.first(self.embed(words)).tanh()
        x = self.back(self.middle(x).tanh())
        return self.head(self.last(self.drop(x))).transpose(1, 2)


class Skips(nn.Module):
    """What the first layers make is needed by the last ones too."""

    def __init__(self) -> None:
        """Make the layers."""
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(5))
        self.norm = nn.BatchNorm1d(LENGTH)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, words: Tensor, scale: Tensor | None = None) -> Tensor:
        """Return the scores, (B, words, T)."""
        first = x = self.embed(words)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        if scale is not None:
            x = x * scale
        return self.head(self.norm(x) + first).transpose(1, 2)


MODELS = {"chain": chain, "tied": Tied, "skips": Skips, "programs": Skips}


def data_of(setting: dict[str, Any], count: int) -> list[Any]:
    """Mini-batches; a setting may have a short one, and some with another structure."""
    generator = torch.Generator().manual_seed(setting["seed"])
    found: list[Any] = []
    for number in range(count):
        size = setting["samples"] if number != 2 or not setting["short"] else 1
        words = torch.randint(WORDS, (size, LENGTH), generator=generator)
        target = torch.randint(WORDS, (size, LENGTH), generator=generator)
        if setting["model"] == "programs" and number % 2:
            scale = torch.rand(size, 1, 1, generator=generator)
            found.append(((words,), {"scale": scale}, target))
        else:
            found.append((words, target))
    return found


# -- settings -------------------------------------------------------------------------------------

SCHEDULES = (
    "async-1f1b", "async-1f1b", "async-1f1b", "async-1f1b+vertical-sync",
    "async-1f1b+vertical-sync", "2bw", "1f1b", "gpipe", "interleaved-1f1b", "zero-bubble",
)  # fmt: skip


def drawn(seed: int) -> dict[str, Any]:
    """A random setting."""
    draw = random.Random(seed)
    stages, schedule = draw.randint(1, 4), draw.choice(SCHEDULES)
    model = draw.choice([*MODELS])
    k = draw.choice((1, 1, 2, 3, 4, 6))
    if schedule == "interleaved-1f1b":
        stages = draw.choice((2, 4))
        k = stages // 2 * draw.randint(1, 3)
    if schedule == "2bw":
        k = draw.choice((4, 5, 6))
    copies = schedule not in ("interleaved-1f1b", "zero-bubble") and model != "tied"
    several = draw.random() < 0.35 and copies
    replicas = [draw.choice((1, 1, 2, 3)) for _ in range(stages)] if several else []
    return {
        "seed": seed,
        "model": model,
        "stages": stages,
        "schedule": schedule,
        "micro_batches": k,
        "samples": max(4, 2 * k),
        "short": draw.random() < 0.4 and model in ("tied",),
        "slack": draw.choice((0, 0, 0, 1)) if stages > 1 and copies else 0,
        "replicas": replicas,
        "shard_optimizer": bool(replicas) and draw.random() < 0.5,
        "synchronous": draw.choice((0, 0, 0, 2)) if schedule.startswith("async") else 0,
        "optimizer": draw.choice(("SGD", "Adam", "AdamW")),
        "clip": draw.choice((None, None, "norm", "norm", "norm of a stage", "value")),
        "loss_scale": draw.random() < 0.15,
        "ema": draw.random() < 0.25,
        "corrections": draw.choice(("auto", "none", "none")),
        "recompute": draw.random() < 0.25 and schedule != "zero-bubble",
        "autocast": draw.random() < 0.25,
    }


def options_of(setting: dict[str, Any]) -> dict[str, Any]:
    """The arguments of `Pipeline` for a setting."""
    from pipedream_rt import Clip, LossScale

    made = {
        "SGD": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}),
        "Adam": (torch.optim.Adam, {"lr": 3e-3, "foreach": False}),
        "AdamW": (torch.optim.AdamW, {"lr": 3e-3, "weight_decay": 0.1}),
    }
    clips = {
        None: None,
        "norm": Clip(norm=0.1),
        "norm of a stage": Clip(norm=0.1, over="stage"),
        "value": Clip(value=0.01),
    }
    return {
        "stages": setting["stages"],
        "schedule": setting["schedule"],
        "micro_batches": setting["micro_batches"],
        "slack": setting["slack"],
        "replicas": setting["replicas"],
        "shard_optimizer": setting["shard_optimizer"],
        "synchronous_updates": setting["synchronous"],
        "optimizer": made[setting["optimizer"]],
        "clip": clips[setting["clip"]],
        "loss_scale": LossScale(init_scale=512.0) if setting["loss_scale"] else None,
        "ema": 0.9 if setting["ema"] else None,
        "corrections": "auto" if setting["corrections"] == "auto" else (),
        "recompute": setting["recompute"],
        "autocast": torch.bfloat16 if setting["autocast"] else None,
    }


def opened(model: Any, **options: Any) -> Any:
    """A pipeline, of this package or of one whose options do not stand in groups yet."""
    import pipedream_rt

    if hasattr(pipedream_rt, "Training"):
        for name in ("Training", "Layout", "Recovery", "Observe"):
            group = getattr(pipedream_rt, name)
            own = {f.name: options.pop(f.name) for f in fields(group) if f.name in options}
            options[name.lower()] = group(**own)
    else:
        synchronous = options.pop("synchronous_updates")
        options["schedule_options"] = pipedream_rt.ScheduleOptions(  # type: ignore[attr-defined]
            synchronous_updates=synchronous
        )
    return pipedream_rt.Pipeline(model, **options)


# -- one run ------------------------------------------------------------------------------------


def digest(value: Any) -> str:
    """A digest of a tree of tensors and plain values."""
    hashed = hashlib.sha256()

    def add(each: Any) -> None:
        if isinstance(each, Tensor):
            hashed.update(f"{each.dtype}{tuple(each.shape)}".encode())
            hashed.update(each.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        elif isinstance(each, dict):
            for key in sorted(each, key=str):
                hashed.update(str(key).encode())
                add(each[key])
        elif isinstance(each, list | tuple):
            for item in each:
                add(item)
        else:
            hashed.update(repr(each).encode())

    add(value)
    return hashed.hexdigest()[:16]


def kill(pipe: Any, stage: int) -> None:
    """Kill the worker of a stage."""
    name = pipe.stages[stage].worker
    os.kill(pipe._group.cluster._local.processes[name].pid, signal.SIGKILL)


def trained(setting: dict[str, Any], how: str) -> dict[str, Any]:
    """Train with a setting; return digests, or why it is refused."""
    from pipedream_rt import Checkpoints, ConfigError

    torch.manual_seed(setting["seed"])
    model, options = MODELS[setting["model"]](), options_of(setting)
    data = data_of(setting, 9)
    common = {"example": data[0], "loss_fn": F.cross_entropy, "seed": setting["seed"]}
    losses: list[Any] = []
    with tempfile.TemporaryDirectory() as folder:
        if how == "processes":
            options |= {
                "workers": "local", "checkpoint": Checkpoints(folder, every=2), "max_restarts": 1
            }  # fmt: skip
        else:
            options["workers"] = "serial"
        try:
            pipe = opened(model, **common, **options)
        except ConfigError as error:
            return {"refused": str(error).splitlines()[0]}
        with pipe:
            victim = setting["seed"] % len(pipe.stages)
            for result in pipe.train_epoch(data[:5]):
                losses.append((result.loss, result.staleness))
                if how == "processes" and result.step == 2:
                    kill(pipe, victim)
            losses.append(pipe.evaluate(data[:1]))
            if how == "resumed":
                pipe.save(Path(folder) / "saved")
                options["stages"] = 1 + setting["stages"] % 4
                if setting["replicas"]:
                    options["replicas"] = [2] + [1] * (options["stages"] - 1)
            else:
                losses += [(r.loss, r.staleness) for r in pipe.train_epoch(data[5:])]
                state, steps = pipe.state_dict(), pipe.optimizer.state_dict()["state"]
        if how == "resumed":
            torch.manual_seed(setting["seed"])
            try:
                pipe = opened(MODELS[setting["model"]](), **common, **options)
                with pipe:
                    pipe.load(Path(folder) / "saved")
                    losses += [(r.loss, r.staleness) for r in pipe.train_epoch(data[5:])]
                    state, steps = pipe.state_dict(), pipe.optimizer.state_dict()["state"]
            except ConfigError as error:
                return {"refused": str(error).splitlines()[0]}
    return {"losses": digest(losses), "weights": digest(state), "optimizer": digest(steps)}


# -- both ---------------------------------------------------------------------------------------


def runs_of(serial: int, processes: int, resumed: int, seed: int) -> list[tuple[int, str]]:
    """The seeds and ways to run of all runs; those that are refused count for nothing."""
    return [
        (seed + number, how)
        for how, count in (("serial", serial), ("processes", processes), ("resumed", resumed))
        for number in range(count)
    ]


@click.command()
@click.argument(
    "old", type=click.Path(exists=True, file_okay=False, path_type=Path), required=False
)
@click.option("--serial", default=150, show_default=True, help="Settings to train in one thread.")
@click.option("--processes", default=16, show_default=True, help="On processes, with a kill.")
@click.option("--resumed", default=16, show_default=True, help="With other stages afterwards.")
@click.option("--seed", default=0, show_default=True, help="Of the first setting.")
@click.option("--child", is_flag=True, hidden=True)
def main(
    old: Path | None, serial: int, processes: int, resumed: int, seed: int, child: bool
) -> None:
    """Compare the bits of the checkout OLD with those of this one."""
    runs = runs_of(serial, processes, resumed, seed)
    if child:
        torch.set_num_threads(1)
        for number, how in runs:
            try:
                line = trained(drawn(number), how)
            except Exception as error:  # an error is a result, which both must have
                line = {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
            print("RUN", json.dumps(line), flush=True)
        return
    if old is None:
        raise click.UsageError("give the older checkout")
    arguments = [f"--serial={serial}", f"--processes={processes}", f"--resumed={resumed}"]
    started = [
        subprocess.Popen(
            [checkout / ".venv/bin/python", __file__, "--child", f"--seed={seed}", *arguments],
            cwd=checkout,
            stdout=subprocess.PIPE,
            text=True,
        )
        for checkout in (old.resolve(), HERE.parent)
    ]
    found = [
        [
            json.loads(line[4:])
            for line in process.communicate()[0].splitlines()
            if line[:4] == "RUN "
        ]
        for process in started
    ]
    assert len(found[0]) == len(found[1]) == len(runs), "a checkout did not do all runs"
    different = 0
    for (number, how), before, after in zip(runs, *found, strict=True):
        if before != after and not ("refused" in before and "refused" in after):
            different += 1
            print(f"seed {number}, {how}: {before} -> {after}\n  {drawn(number)}")
    done = [how for (_, how), line in zip(runs, found[1], strict=True) if "losses" in line]
    errors = sum("error" in line for line in found[1])
    counted = ", ".join(f"{done.count(how)} {how}" for how in ("serial", "processes", "resumed"))
    print(f"{different} differences; trained: {counted}; {errors} with an error in both or one")
    sys.exit(bool(different))


if __name__ == "__main__":
    main()
