"""The split of a model into stages, and what of a model cannot be split or shipped."""

from pipedream_rt.planning.refusals import (
    refuse_loss,
    refuse_unfit_layers,
    refuse_unfit_plan,
    shared_buffers,
    tensors_of,
)
from pipedream_rt.planning.shipping import alias, dumps, foreign, range_of, why_unpicklable
from pipedream_rt.planning.split import (
    Layers,
    layers_of,
    refuse_shared_parameters,
    split_points,
)

__all__ = [
    "Layers",
    "alias",
    "dumps",
    "foreign",
    "layers_of",
    "range_of",
    "refuse_loss",
    "refuse_shared_parameters",
    "refuse_unfit_layers",
    "refuse_unfit_plan",
    "shared_buffers",
    "split_points",
    "tensors_of",
    "why_unpicklable",
]
