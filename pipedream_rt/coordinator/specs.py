"""The stages as bytes, made before anything starts."""

from __future__ import annotations

import itertools

import cloudpickle
import torch
from torch import Tensor, nn

from pipedream_rt.errors import ConfigError
from pipedream_rt.planning import Layers
from pipedream_rt.schedules import Schedule
from pipedream_rt.stage.spec import LossFunction, StageJob


def pickled_jobs(
    layers: Layers,
    points: list[int],
    schedule: Schedule,
    loss_fn: LossFunction | None,
    seed: int,
    on_nan: str,
    trace_spans: int,
) -> list[Tensor]:
    """Pickle every stage, before anything starts.

    Raises:
        ConfigError: A layer or the loss does not pickle; the message says which.
    """
    names = list(layers)
    jobs = []
    for stage, (first, end) in enumerate(itertools.pairwise([*points, len(names)])):
        part = nn.Sequential()
        for name in names[first:end]:
            part.add_module(name, layers[name])
        is_last = end == len(names)
        job = StageJob(
            stage=stage,
            layers=part,
            loss_fn=loss_fn if is_last else None,
            schedule=schedule,
            seed=seed,
            on_nan=on_nan,
            trace_spans=trace_spans,
        )
        try:
            data = cloudpickle.dumps(job)
        except Exception as error:  # a foreign class may raise anything when pickled
            raise ConfigError(_unpicklable(layers, names[first:end], loss_fn, error)) from error
        jobs.append(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    return jobs


def _unpicklable(
    layers: Layers, names: list[str], loss_fn: LossFunction | None, error: Exception
) -> str:
    """Find what does not pickle, and say so."""
    for what, value in (*((f"layer {n}", layers[n]) for n in names), ("loss_fn", loss_fn)):
        try:
            cloudpickle.dumps(value)
        except Exception as reason:  # as above
            return (
                f"{what} ({type(value).__name__}) cannot be pickled, so it cannot reach a worker: "
                f"{reason}; keep files, locks, connections and lambdas over them out of the model"
            )
    return f"the stage cannot be pickled: {error}"
