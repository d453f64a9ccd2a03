"""The split of a model into stages."""

from pipedream_rt.planning.split import (
    Layers,
    layers_of,
    refuse_shared_parameters,
    split_points,
)

__all__ = ["Layers", "layers_of", "refuse_shared_parameters", "split_points"]
