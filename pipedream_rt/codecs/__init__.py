"""Codecs: what crosses the edge between two stages in fewer bytes.

A `GraphCodec` belongs to the model: autograd derives through it. A `ByteCodec` belongs to the edge,
outside of autograd, and may feed back what it has lost.
"""

from pipedream_rt.codecs.casts import BFloat16, Float16
from pipedream_rt.codecs.integers import Int8
from pipedream_rt.codecs.projection import Projection, learned_projection
from pipedream_rt.codecs.sparse import TopK
from pipedream_rt.stage.codec import ByteCodec, Codec, Direction, GraphCodec, OutsideGraph

__all__ = [
    "BFloat16",
    "ByteCodec",
    "Codec",
    "Direction",
    "Float16",
    "GraphCodec",
    "Int8",
    "OutsideGraph",
    "Projection",
    "TopK",
    "learned_projection",
]
