"""The model as the user gave it: its layers, names, shapes and state dicts."""

from __future__ import annotations

import copy
from collections.abc import Iterable

from torch import Tensor, nn

from pipedream_rt.errors import ConfigError
from pipedream_rt.planning import Layers, layers_of
from pipedream_rt.stage.buffers import buffer_slots


class UnsplitModel:
    """The user's model, which is read and never changed.

    Args:
        model: ``nn.Sequential`` or list of modules.

    Attributes:
        layers: By name.
        names: Name of each trainable parameter by its ``id``, in the order of the model.

    Raises:
        ConfigError: It is something else.
    """

    def __init__(self, model: nn.Sequential | Iterable[nn.Module]) -> None:
        """Look at the layers."""
        self._model = model
        self.layers: Layers = layers_of(model)
        self._whole = nn.Sequential()
        for name, layer in self.layers.items():
            self._whole.add_module(name, layer)
        self.names = {id(p): n for n, p in self._whole.named_parameters() if p.requires_grad}

    def in_order(self, state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return a state dict with its keys in the order of the model's own."""
        return {key: state_dict[key] for key in self._whole.state_dict()}

    def require_fit(self, state_dict: dict[str, Tensor]) -> None:
        """Refuse a state dict of another model.

        Raises:
            ConfigError: Keys are missing or too many, or a shape differs.
        """
        expected = self._whole.state_dict()
        missing = [k for k in expected if k not in state_dict]
        extra = [k for k in state_dict if k not in expected]
        shapes = [
            f"{k} has {tuple(state_dict[k].shape)}, the model {tuple(v.shape)}"
            for k, v in expected.items()
            if k in state_dict and v.shape != state_dict[k].shape
        ]
        if missing or extra or shapes:
            raise ConfigError(
                "the state dict does not fit the model: "
                f"missing {missing or 'none'}, unexpected {extra or 'none'}"
                + "".join(f"; {text}" for text in shapes)
            )

    def first_misfit(self, shapes: dict[str, tuple[int, ...]]) -> str:
        """Say how the shapes of saved weights differ from the model's; empty if they do not.

        Buffers do not count: they may have been made, or have grown, in a forward.

        Args:
            shapes: Of the saved weights and buffers, by key.
        """
        flexible = buffer_slots(self._whole)
        state = self._whole.state_dict()
        expected = {k: tuple(v.shape) for k, v in state.items() if k not in flexible}
        there = {k: shape for k, shape in shapes.items() if k not in flexible}
        if not (differing := sorted(there.items() ^ expected.items())):
            return ""
        key = differing[0][0]
        return f"{key} has the shape {there.get(key)} there, {expected.get(key)} here"

    def copy_with(self, state_dict: dict[str, Tensor]) -> nn.Module:
        """Return a copy of the model with the weights and buffers of a state dict.

        Args:
            state_dict: With all of the model's keys.

        Returns:
            An ``nn.Sequential`` of the layers where a list was given.
        """
        given = self._model
        whole = copy.deepcopy(given if isinstance(given, nn.Sequential) else self._whole)
        whole.load_state_dict(state_dict)
        return whole
