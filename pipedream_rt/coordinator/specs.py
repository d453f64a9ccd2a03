"""What the stages are made of, as bytes, made before anything starts."""

from __future__ import annotations

import cloudpickle
import torch
from torch import Tensor, nn

from pipedream_rt.errors import ConfigError
from pipedream_rt.planning import Layers
from pipedream_rt.schedules import Plan
from pipedream_rt.stage.spec import LossFunction, OnNan, StageSpec


def pickled_specs(
    layers: Layers,
    plan: Plan,
    *,
    loss_fn: LossFunction | None,
    seed: int,
    on_nan: OnNan,
    trace_spans: int,
) -> list[Tensor]:
    """Pickle what every stage is made of, before anything starts.

    Args:
        layers: Of the unsplit model, by name.
        plan: Says which layers each stage has.
        loss_fn: For the stage that computes the loss.
        seed: See `StageSpec`.
        on_nan: The same.
        trace_spans: The same.

    Returns:
        Bytes, by stage.

    Raises:
        ConfigError: A layer or the loss does not pickle; the message says which.
    """
    pickled = []
    for stage, names in enumerate(plan.layers):
        part = nn.Sequential()
        for name in names:
            part.add_module(name, layers[name])
        spec = StageSpec(
            stage=stage,
            layers=part,
            loss_fn=loss_fn if stage in plan.exits else None,
            plan=plan,
            seed=seed,
            on_nan=on_nan,
            trace_spans=trace_spans,
        )
        try:
            data = cloudpickle.dumps(spec)
        except Exception as error:  # a foreign class may raise anything when pickled
            raise ConfigError(_unpicklable(layers, names, loss_fn, error)) from error
        pickled.append(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    return pickled


def _unpicklable(
    layers: Layers, names: tuple[str, ...], loss_fn: LossFunction | None, error: Exception
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
