"""The split of a model into stages, and refusals of what cannot be split or shipped to workers."""

from pipedream_rt.models.cut import find_layers, first_layer
from pipedream_rt.models.layer_spec import LayerSpec
from pipedream_rt.models.refusals import (
    refuse_loss,
    refuse_unfit_layers,
    shared_buffers,
    tensors_of,
)
from pipedream_rt.models.shipping import alias, dumps, foreign, loads, range_of, why_unpicklable
from pipedream_rt.models.split import (
    Layers,
    elements_of,
    has_skips,
    is_sequence,
    layers_of,
    listed_points,
    split_points,
    ties_of,
)

__all__ = [
    "LayerSpec",
    "Layers",
    "alias",
    "dumps",
    "elements_of",
    "find_layers",
    "first_layer",
    "foreign",
    "has_skips",
    "is_sequence",
    "layers_of",
    "listed_points",
    "loads",
    "range_of",
    "refuse_loss",
    "refuse_unfit_layers",
    "shared_buffers",
    "split_points",
    "tensors_of",
    "ties_of",
    "why_unpicklable",
]
