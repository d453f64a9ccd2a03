"""The codecs of the edges of a plan, from the option ``codecs`` of `Layout`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from torch import nn

from pipedream_rt.errors import ConfigError
from pipedream_rt.schedules import Plan
from pipedream_rt.stage.codec import (
    ByteCodec,
    Codec,
    GraphCodec,
    OutsideGraph,
    require_direction,
    try_out,
)
from pipedream_rt.stage.rules.coding import EdgeCodecs

_LONGEST = 1000
"""Characters that a manifest keeps of the codecs of an edge."""

OfEdge: TypeAlias = Codec | Sequence[Codec]
"""A codec, or one of each kind; that of the graph acts first."""

CodecOption: TypeAlias = OfEdge | Mapping[tuple[int, int], OfEdge] | None
"""The codec of all edges, or codecs by edge, as ``{(0, 1): Int8()}``."""


def _printed(codecs: list[Codec]) -> list[str]:
    return list(map(repr, codecs))


class Codecs(NamedTuple):
    """The codecs of a run, by the stages at both ends of an edge.

    Attributes:
        of_graph: Those that autograd differentiates through.
        of_bytes: Those outside of autograd.
    """

    of_graph: dict[tuple[int, int], GraphCodec]
    of_bytes: dict[tuple[int, int], ByteCodec]

    @property
    def rules(self) -> tuple[EdgeCodecs, ...]:
        """The option from which stages make the rule of byte codecs; empty without any."""
        return (EdgeCodecs(self.of_bytes),) if self.of_bytes else ()

    def of(self, edge: tuple[int, int]) -> list[Codec]:
        """Return the codecs of an edge, in the order in which they act."""
        found = (self.of_graph.get(edge), self.of_bytes.get(edge))
        return [codec for codec in found if codec is not None]

    def texts(
        self, names: Callable[[list[Codec]], list[str]] = _printed
    ) -> dict[tuple[int, int], str]:
        """Return, by edge, the codecs of each edge that has some, as one text."""
        edges = sorted(self.of_graph.keys() | self.of_bytes.keys())
        return {edge: ", ".join(names(self._given(edge)))[:_LONGEST] for edge in edges}

    def _given(self, edge: tuple[int, int]) -> list[Codec]:
        """Return the codecs of an edge as the script gave them, without `OutsideGraph`."""
        return [c.codec if isinstance(c, OutsideGraph) else c for c in self.of(edge)]

    @property
    def feeds_gradients_back(self) -> bool:
        """Whether a codec adds what it lost of one gradient to a later one (error feedback)."""
        codecs = self.of_bytes.values()
        return any(codec.feedback and codec.direction != "forward" for codec in codecs)


def codecs_of(option: Any, plan: Plan) -> Codecs:
    """Return the codecs of the edges of a plan."""
    found = Codecs({}, {})
    if option is None:
        return found
    links = list(plan.links or ())
    if not isinstance(option, Mapping) and not links:
        # With one stage nothing crosses; what was given is checked all the same.
        nowhere = Codecs({}, {})
        for codec in _each(option):
            _take(nowhere, (0, 0), codec)
        return found
    by_edge = option if isinstance(option, Mapping) else dict.fromkeys(links, option)
    for edge, given in by_edge.items():
        if edge not in links:
            edges = ", ".join(map(str, links)) or "none, as there is one stage"
            raise ConfigError(
                f"codecs has the edge {edge!r}, and the edges between stages are {edges}; those "
                "from and to the script have no codec"
            )
        for codec in _each(given):
            _take(found, edge, codec)
    tried: set[int] = set()  # a codec of all edges is tried out once
    for edge in by_edge:
        for codec in found.of(edge):
            if id(codec) not in tried:
                tried.add(id(codec))
                try_out(codec, "codecs")
    return found


def _each(given: Any) -> Sequence[Any]:
    """Return the codecs of an edge; a single one needs no list."""
    return given if isinstance(given, list | tuple) else (given,)


def _take(found: Codecs, edge: tuple[int, int], codec: object) -> None:
    """Check a codec of an edge, and add it to those of its kind."""
    if isinstance(codec, Codec):
        require_direction(codec.direction)
    if isinstance(codec, nn.Module) and next(codec.parameters(), None) is not None:
        raise ConfigError(
            f"the codec {type(codec).__name__} has parameters, which no optimizer would step; what "
            "is learned is a layer of the model, as those of learned_projection"
        )
    if isinstance(codec, GraphCodec) and codec.direction == "both":
        taken: dict[tuple[int, int], Any] = found.of_graph
    elif isinstance(codec, GraphCodec):
        # Autograd would apply it both ways, so one that is used one way alone stays outside.
        taken, codec = found.of_bytes, OutsideGraph(codec)
    elif isinstance(codec, ByteCodec):
        taken = found.of_bytes
    else:
        made = f"; call it: {codec.__name__}()" if isinstance(codec, type) else ""
        if codec == "auto":
            made = (
                "; which links are slow is not known here: give Machines(codec=measure_codec(...)) "
                "to the planner, and Partition.codecs(...) to Layout"
            )
        raise ConfigError(
            f"codecs must be codecs of pipedream_rt.codecs, by edge or for all, not {codec!r}{made}"
        )
    if edge in taken:
        raise ConfigError(
            f"codecs has two of one kind for the edge {edge}: {taken[edge]!r} and {codec!r}; an "
            "edge has one that autograd derives through, one that packs bytes, or both"
        )
    taken[edge] = codec
