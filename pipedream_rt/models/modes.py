"""Which modules are in another mode than the model, where it overrides ``train`` or ``eval``.

These methods may keep BatchNorm in eval mode in training, or dropout on in evaluation. No stage has
the whole of a model that is taken apart into layers, so no stage can call them. They are called
once in the script, and the stages are told which modules deviate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from torch import nn

from pipedream_rt.errors import ConfigError
from pipedream_rt.models.mark import mark_of_modules

_METHODS = ("train", "eval")


class Modes(NamedTuple):
    """The names of modules that do not follow the mode of the model.

    Attributes:
        in_training: Those that are in eval mode while the model is in training mode.
        in_eval: Those that are in training mode while the model is in eval mode.
    """

    in_training: tuple[str, ...] = ()
    in_eval: tuple[str, ...] = ()

    def set(self, module: nn.Module, training: bool) -> None:
        """Set the mode of a part of the model, in which modules have the names of the model."""
        module.train(training)
        for name in self.in_training if training else self.in_eval:
            part = module
            for key in name.split(".") if name else ():
                inner = part._modules.get(key)
                if inner is None:  # it is on another stage
                    break
                part = inner
            else:
                part.training = not training


def own_methods(module: nn.Module, kind: type[nn.Module], names: Iterable[str]) -> list[str]:
    """Return the methods that a module, or its class, has in the place of those of ``kind``."""
    return [
        name
        for name in names
        if name in vars(module) or getattr(type(module), name) is not getattr(kind, name)
    ]


def modes_of(model: nn.Module, layers: Iterable[nn.Module]) -> Modes:
    """Return which modules of a model do not follow its mode; the model is left as it was.

    Refuse a module that is taken apart and does more when its mode is set: no stage would do it.
    """
    whole = [each for layer in layers for each in layer.modules()]
    inside = {id(module) for module in whole}
    apart = [(n, m) for n, m in model.named_modules() if id(m) not in inside]
    own = [(n, m) for n, m in apart if own_methods(m, nn.Module, _METHODS)]
    if not own:
        return Modes()
    with _as_they_were(model), _setting_flags(whole):
        before = mark_of_modules(apart)
        model.train()
        in_training = tuple(n for n, m in model.named_modules() if not m.training)
        model.eval()
        in_eval = tuple(n for n, m in model.named_modules() if m.training)
        model.train()
        after = mark_of_modules(apart)
    if parted := {key for key, _ in before.items() ^ after.items()}:
        first = next(key for key in {**before, **after} if key in parted)
        name, module = own[0]
        raise ConfigError(
            f"{name or 'the model'}, a {type(module).__name__}, has a method "
            f"{own_methods(module, nn.Module, _METHODS)[0]}() of its own that changes "
            f"{first!r}, and it is taken apart into layers, so that no stage would call it; "
            "put it on a layer, which stays whole"
        )
    return Modes(in_training, in_eval)


@contextmanager
def _as_they_were(model: nn.Module) -> Iterator[None]:
    """Put the mode of every module back at the end."""
    before = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, training in before:
            module.training = training


@contextmanager
def _setting_flags(modules: Iterable[nn.Module]) -> Iterator[None]:
    """In the body, let train() of modules set the flag alone; that of adapters merges weights."""

    def noting(module: nn.Module) -> Callable[..., nn.Module]:
        def train(mode: bool = True) -> nn.Module:
            for each in module.modules():
                each.training = mode
            return module

        return train

    changed = [module for module in modules if "train" not in vars(module)]
    for module in changed:
        vars(module)["train"] = noting(module)
    try:
        yield
    finally:
        for module in changed:
            del vars(module)["train"]
