"""How an error is reported: in which layer, on what input, and in which lines of the user."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pipedream_rt.models.program import Step

_NOT_THE_USERS = (
    str(Path(__file__).resolve().parent.parent),
    str(Path(torch.__file__).resolve().parent),
)


def place_of(step: Step, layer: nn.Module | None, value: Any) -> str:
    """Return in words where an error happened; without a layer, the step calls a function."""
    if layer is None:
        return f"in {step.name} at {step.where}, whose input was {described(value)}"
    kind = type(layer).__name__
    return f"in layer {step.layer!r} ({kind}), whose input was {described(value)}"


def described(value: Any) -> str:
    """Return the shapes and dtypes in a value, in words."""
    if isinstance(value, Tensor):
        return f"a {str(value.dtype).removeprefix('torch.')} tensor {tuple(value.shape)}"
    if isinstance(value, tuple | list):
        inside = ", ".join(map(described, value))
        return f"a {type(value).__name__} of {len(value)}: {inside}"
    if isinstance(value, dict):
        inside = ", ".join(f"{key!r}: {described(v)}" for key, v in value.items())
        return f"a dict of {inside}"
    return f"a {type(value).__name__}"


def advice_on(error: BaseException, value: Any) -> str:
    """Return what to do about an error of a layer; empty where that is not known."""
    counts = isinstance(error, TypeError) and "positional argument" in str(error)
    if counts and isinstance(value, tuple | list):
        return (
            f". A layer gets one value, here a {type(value).__name__} of {len(value)}: take it "
            "apart in forward, as forward(self, pair)"
        )
    if isinstance(error, RuntimeError) and "modified by an inplace operation" in str(error):
        return (
            ". Something that the backward needs was changed in place before it ran, because other "
            "micro-batches pass in between. If it is a buffer, let forward use a clone of it"
        )
    if isinstance(error, RuntimeError) and "tensors to be on the same device" in str(error):
        return (
            ". What a layer or the loss holds and is no parameter or buffer stays where it was "
            "made: register it as a buffer, or write .to(x.device) where it is used"
        )
    return ""


def trace_of(error: BaseException) -> str:
    """Return the traceback with the user's own lines alone, in causes too, if there are any."""
    told = traceback.TracebackException.from_exception(error)
    found = False
    seen: set[int] = set()
    parts: list[traceback.TracebackException | None] = [told]
    while parts:
        part = parts.pop()
        if part is None or id(part) in seen:
            continue
        seen.add(id(part))
        own = [frame for frame in part.stack if not frame.filename.startswith(_NOT_THE_USERS)]
        found = found or bool(own)
        part.stack = traceback.StackSummary.from_list(own)
        parts += [part.__cause__, part.__context__]
    if not found:  # the error is ours or torch's: all lines count
        return "".join(traceback.format_exception(error))
    return "".join(told.format())
