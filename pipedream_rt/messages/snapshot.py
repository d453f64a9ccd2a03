"""The state of a stage as one value: what is written, read, restored and compared."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from pipedream_rt.errors import CheckpointError, PipelineError
from pipedream_rt.messages.state_keys import StepState
from pipedream_rt.schema import shown


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The state of a stage after an update, as if nothing were in flight.

    Attributes:
        weights: Entries of the state dict that are no buffers, newest version, under the keys of
            the unsplit model.
        steps: The state that its optimizer and its rules keep for the next steps.
        versions: Older versions of the trainable weights that later micro-batches read, by version
            and name.
        buffers: Buffers that are in the state dict, by key.
        hidden: Buffers that are in no state dict, by name.
        extra: The plain values that modules give by ``get_extra_state``, packed by `pack_hyper`, by
            key of the state dict.
    """

    weights: dict[str, Tensor] = field(default_factory=dict)
    steps: StepState = field(default_factory=dict)
    versions: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    hidden: dict[str, Tensor] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)


class Wanted(NamedTuple):
    """The part of a checkpoint that a stage takes; the stages that wrote it may have other bounds.

    Attributes:
        weights: Keys of its state dict, all of which must be there.
        parameters: Names of the parameters that it owns.
        versions: Names of the parameters that it reads older versions of.
        buffers: Names of its buffers.
        replica: The name of the replica; empty for replica 0, whose state is that of the stage.
        others: Names under which its rules keep something.
    """

    weights: list[str]
    parameters: list[str]
    versions: list[str]
    buffers: list[str]
    replica: str = ""
    others: list[str] = []  # noqa: RUF012 - nobody changes it


def replica_name(replica: int, count: int) -> str:
    """Name of a replica of a stage, ``1 of 2``: its state is of use only with as many replicas."""
    return f"{replica} of {count}"


UNFIT = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""The errors that follow from a checkpoint of another model or version."""


@contextmanager
def fitting(source: object) -> Iterator[None]:
    """Turn such an error of the body, which uses what was read, into one that names the source."""
    try:
        yield
    except PipelineError:
        raise
    except UNFIT as error:
        raise CheckpointError(
            f"{source} does not fit this pipeline: to load it raised {shown(error)}; was "
            "it written by another version, or by another model?"
        ) from error
