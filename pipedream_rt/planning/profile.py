"""A profile: what each layer of a model costs, and which layers use the output of which.

A profile is a pure value. It is measured (`profiling.py`), or written by hand. The planner cuts the
model by it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from itertools import pairwise

from pipedream_rt.errors import ConfigError
from pipedream_rt.schema import printable, shown

_MOST = 1e15
"""The largest time in seconds, or size in bytes; a larger one is a mistake."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCosts:
    """What one layer costs for one micro-batch. Times are in seconds, sizes in bytes.

    Attributes:
        name: Its name in the model.
        forward: The time of a forward.
        backward_input: The time of the backward for its input.
        backward_weight: The time of the backward for its weights.
        step: The time of an update of its weights.
        output_bytes: The size of its output.
        parameter_bytes: The size of its weights that are trained.
        frozen_bytes: The size of its other weights and of its buffers, which have no versions.
        saved_bytes: The size of what its forward keeps for its backward, without weights.
        optimizer_bytes: The size of the optimizer's state for its weights.
        spread: The range of the middle half of the measured times of a forward and a backward
            together; 0 if they were not measured.

    Raises:
        ConfigError: A time or a size is no number of at least 0.
    """

    name: str
    forward: float
    backward_input: float = 0.0
    backward_weight: float = 0.0
    step: float = 0.0
    output_bytes: float = 0.0
    parameter_bytes: float = 0.0
    frozen_bytes: float = 0.0
    saved_bytes: float = 0.0
    optimizer_bytes: float = 0.0
    spread: float = 0.0

    def __post_init__(self) -> None:
        """Check the numbers."""
        for name in NUMBERS:
            value = getattr(self, name)
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not is_number or not 0 <= value <= _MOST:
                raise ConfigError(
                    f"profile: {name} of layer {printable(self.name, 60)!r} must be a number from "
                    f"0 to {_MOST:g}, not {shown(value, 40)}"
                )

    @property
    def compute(self) -> float:
        """The time of a forward and a backward."""
        return self.forward + self.backward_input + self.backward_weight


NUMBERS = tuple(each.name for each in fields(LayerCosts) if each.name != "name")
"""The numeric fields of `LayerCosts`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """The costs of the layers of a model, and the edges between the layers.

    Attributes:
        layers: The layers, each after those whose outputs it uses.
        edges: The pairs of a producer and a consumer, as indices of layers; if not given, each
            layer uses the output of the one before it.
        edge_bytes: By edge, the bytes that pass on it, if they are known. If not given, the output
            of a layer passes a cut once, however many layers behind the cut use it.
        micro_batch: The number of samples that the times are for; None if it is not known.
        process_bytes: The size of a worker process without a stage.
        facts: What else is known, as texts: the hash of the model, dtype, threads, processor.

    Raises:
        ConfigError: There is no layer, two have the same name, or an edge goes backwards.
    """

    layers: tuple[LayerCosts, ...]
    edges: tuple[tuple[int, int], ...] | None = None
    edge_bytes: tuple[float, ...] = ()
    micro_batch: int | None = None
    process_bytes: float = 0.0
    facts: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Fill in the edges of a chain, sort edges with their sizes, and check all."""
        count = len(self.layers)
        if not count:
            raise ConfigError("profile: there is no layer")
        names = [layer.name for layer in self.layers]
        if len(set(names)) < count:
            twice = next(name for name in names if names.count(name) > 1)
            raise ConfigError(f"profile: two layers are called {printable(twice, 60)!r}")
        edges = tuple(pairwise(range(count))) if self.edges is None else self.edges
        for producer, consumer in edges:
            if not 0 <= producer < consumer < count:
                raise ConfigError(
                    f"profile: an edge goes from a layer to a later one, not from {producer} to "
                    f"{consumer} of {count}"
                )
        if not self.edge_bytes:
            object.__setattr__(self, "edges", tuple(sorted(set(edges))))
            return
        sizes = dict(zip(edges, self.edge_bytes, strict=False))  # lengths are compared below
        if len(sizes) != len(self.edge_bytes) or len(edges) != len(self.edge_bytes):
            raise ConfigError("profile: edge_bytes must have a size for each of different edges")
        if not all(0 <= size <= _MOST for size in sizes.values()):
            raise ConfigError(f"profile: edge_bytes must be from 0 to {_MOST:g}")
        object.__setattr__(self, "edges", tuple(sorted(sizes)))
        object.__setattr__(self, "edge_bytes", tuple(sizes[edge] for edge in sorted(sizes)))

    @property
    def is_chain(self) -> bool:
        """Whether each layer uses the output of the one before it, and nothing else."""
        return self.edges == tuple(pairwise(range(len(self.layers))))

    @property
    def compute(self) -> float:
        """The seconds of a forward and a backward of all layers."""
        return math.fsum(layer.compute for layer in self.layers)
