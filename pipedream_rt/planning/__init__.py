"""How a model is cut into stages."""

from pipedream_rt.planning.split import Layers, layers_of, split_points

__all__ = ["Layers", "layers_of", "split_points"]
