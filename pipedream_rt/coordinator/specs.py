"""The specifications from which the workers build their stages, pickled before a worker starts."""

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
    """Pickle the `StageSpec` of every stage.

    Args:
        layers: The layers of the unsplit model, by name.
        plan: The plan, which says which layers each stage has.
        loss_fn: The loss function; None for a pipeline that only infers.
        seed: The seed of random numbers, as in `StageSpec`.
        on_nan: What to do about a loss that is not finite, as in `StageSpec`.
        trace_spans: The number of spans that each worker keeps, as in `StageSpec`.

    Returns:
        One tensor of bytes for each stage.

    Raises:
        ConfigError: A layer or the loss function does not pickle; the message says which.
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
    """Find the layer, or the loss function, that does not pickle, and return the error's text."""
    for what, value in (*((f"layer {n}", layers[n]) for n in names), ("loss_fn", loss_fn)):
        try:
            cloudpickle.dumps(value)
        except Exception as reason:  # as above
            return (
                f"{what} ({type(value).__name__}) cannot be pickled, so it cannot reach a worker: "
                f"{reason}; keep files, locks, connections and lambdas over them out of the model"
            )
    return f"the stage cannot be pickled: {error}"
