"""The unsplit model: its layers, the names and shapes of its weights, and its state dicts."""

from __future__ import annotations

import copy
from collections.abc import Iterable

import cloudpickle
from torch import Tensor, nn

from pipedream_rt.errors import ConfigError
from pipedream_rt.planning import Layers, dumps, layers_of, refuse_unfit_layers
from pipedream_rt.schedules.plan import LOSS_LAYER
from pipedream_rt.schema import printable
from pipedream_rt.stage.buffers import buffer_slots


class UnsplitModel:
    """The model as the user gave it, which is read and never changed.

    Args:
        model: An ``nn.Sequential`` or a list of modules.
        loss_fn: The loss function, whose parameters are trained too if it is a module.

    Attributes:
        layers: The layers of the model, by name.
        names: The name of each trainable parameter by its ``id``, in the order of the model; those
            of the loss come last.

    Raises:
        ConfigError: The model is neither, or something of it would be another thing on stages.
    """

    def __init__(self, model: nn.Sequential | Iterable[nn.Module], loss_fn: object = None) -> None:
        """Name the layers and the parameters."""
        self._model = model
        self.layers: Layers = layers_of(model)
        self._whole = nn.Sequential()
        for name, layer in self.layers.items():
            self._whole.add_module(name, layer)
        self._loss = loss_fn if isinstance(loss_fn, nn.Module) else None
        with_loss = dict(self.layers) | ({LOSS_LAYER: self._loss} if self._loss else {})
        refuse_unfit_layers(with_loss)
        named = list(self._whole.named_parameters())
        if self._loss is not None:
            named += self._loss.named_parameters(prefix=LOSS_LAYER)
        self.names: dict[int, str] = {}
        for name, parameter in named:
            if parameter.requires_grad:
                self.names.setdefault(id(parameter), name)

    def in_order(self, state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return a state dict with its keys in the order of the model's state dict."""
        ordered = {key: state_dict[key] for key in self._whole.state_dict() if key in state_dict}
        # Buffers that had no value at the start come last.
        own = {k: v for k, v in state_dict.items() if not k.startswith(f"{LOSS_LAYER}.")}
        return {**ordered, **own}

    def require_fit(self, state_dict: dict[str, Tensor]) -> None:
        """Refuse a state dict of another model.

        Raises:
            ConfigError: A key is missing or unknown, or a shape differs.
        """
        expected = self._whole.state_dict()
        missing = [k for k in expected if k not in state_dict]
        extra = [k for k in state_dict if k not in expected]
        shapes = [
            f"{k} has the shape {_shape(state_dict[k])}, in the model {_shape(v)}"
            for k, v in expected.items()
            if k in state_dict and _shape(v) != _shape(state_dict[k])
        ]
        if missing or extra or shapes:
            raise ConfigError(
                "the state dict does not fit the model: "
                f"missing keys: {missing or 'none'}, unexpected keys: {extra or 'none'}"
                + "".join(f"; {text}" for text in shapes)
            )

    def first_misfit(self, shapes: dict[str, tuple[int, ...]]) -> str:
        """Describe the first saved weight that does not fit the model; return "" if all fit.

        Buffers are not compared, because a forward may make them or change their shape.

        Args:
            shapes: Shapes of the saved weights and buffers, by key.
        """
        flexible = buffer_slots(self._whole)
        state = self._whole.state_dict()
        if self._loss is not None:
            state |= self._loss.state_dict(prefix=f"{LOSS_LAYER}.")
            flexible |= {f"{LOSS_LAYER}.{name}": [] for name in buffer_slots(self._loss)}
        expected = {
            k: tuple(v.shape)
            for k, v in state.items()
            if k not in flexible and isinstance(v, Tensor)
        }
        there = {k: shape for k, shape in shapes.items() if k not in flexible}
        if not (differing := sorted(there.items() ^ expected.items())):
            return ""
        key = differing[0][0]
        return (
            f"{printable(key, 100)} has the shape {there.get(key)} in the checkpoint and "
            f"{expected.get(key)} in the model"
        )

    def copy_with(self, state_dict: dict[str, Tensor]) -> nn.Module:
        """Return a copy of the model with the weights and buffers of a state dict.

        Args:
            state_dict: A state dict with all of the model's keys.

        Returns:
            A copy of the ``nn.Sequential``; where a list was given, one made of its layers.
        """
        given = self._model
        whole = _copy_of(given if isinstance(given, nn.Sequential) else self._whole)
        whole.load_state_dict(state_dict)
        return whole

    def loss_with(self, state_dict: dict[str, Tensor]) -> nn.Module:
        """Return a copy of the loss with the weights and buffers of a stage's state dict.

        Raises:
            ConfigError: The loss is no module.
        """
        if self._loss is None:
            raise ConfigError("the loss function is no nn.Module, so it has no weights of its own")
        loss, prefix = _copy_of(self._loss), f"{LOSS_LAYER}."
        own = {k.removeprefix(prefix): v for k, v in state_dict.items() if k.startswith(prefix)}
        loss.load_state_dict(own)
        return loss


def _copy_of(module: nn.Module) -> nn.Module:
    """Return a copy of a module: by ``deepcopy``, or as it is sent to workers.

    Raises:
        ConfigError: It can be copied in neither way.
    """
    try:
        return copy.deepcopy(module)
    except Exception as error:  # a foreign class may raise anything when copied
        try:
            made: nn.Module = cloudpickle.loads(dumps(module)[0])
        except Exception:
            raise ConfigError(
                f"the model cannot be copied: {error}; read pipe.state_dict() and load it into a "
                "model that you build"
            ) from error
        return made


def _shape(value: object) -> tuple[int, ...] | None:
    """Return the shape of an entry of a state dict; None for extra state, which has none."""
    return tuple(value.shape) if isinstance(value, Tensor) else None
