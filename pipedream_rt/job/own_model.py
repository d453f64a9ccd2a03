"""The script's own model and loss: no stage reads them any more, so what the script does to them.

Their weights may be those of the start, or those that the pipeline has given the script, tensor by
tensor: plain PyTorch would train on any others, and the stages do not see them. Each tensor is
known by a fingerprint, which costs the same whatever its size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from typing import Any, NoReturn

from torch import Tensor, nn

from pipedream_rt.errors import ConfigError
from pipedream_rt.job.unsplit_model import UnsplitModel
from pipedream_rt.models.mark import mark_of_content, mark_of_memory
from pipedream_rt.models.preserving_state import modules_inside
from pipedream_rt.models.tensors import gradient_hooks, is_away, named_tensors
from pipedream_rt.telling import log_of
from pipedream_rt.torch_private import NormWithBuffers

_log = log_of(__name__)


class OwnModel:
    """The model and the loss of the script, and what they may be.

    Attributes:
        watches: Whether changes are looked for; not where somebody brings them to the stages.
        saved: Return the state dicts that were written or read, which the script may have loaded;
            they are asked for only where it has weights that nobody gave it.
    """

    def __init__(self, model: UnsplitModel) -> None:
        self.watches = True
        self.saved: Callable[[], Iterable[Mapping[str, Any]]] = list
        modules = model.modules
        self._tensors = [(n, t) for name, m in modules.items() for n, t in _named(name, m)]
        self._buffers = {n for name, m in modules.items() for n, _ in m.named_buffers(name)}
        self._trained = [
            (n, p, p.requires_grad)
            for name, m in modules.items()
            for n, p in m.named_parameters(name)
        ]
        # Forwards that the script runs by itself change the statistics of norms.
        self._free = {
            n
            for name, module in modules.items()
            for where, m in module.named_modules(prefix=name)
            if isinstance(m, NormWithBuffers)
            for n, _ in m.named_buffers(where, recurse=False)
        }
        self._at_first = {name: mark_of_content(tensor) for name, tensor in self._tensors}
        self._given = {name: {mark} for name, mark in self._at_first.items()}
        self._places = [place for name, m in modules.items() for place in _places(name, m)]
        self._hooks = [held for m in modules.values() for held in _hooks(m.modules())]
        if model.sequence is not None:
            given = model.given if isinstance(model.given, nn.Sequential) else model.whole
            self._watch_layers(given, modules_inside(model.sequence))
        self._count = self._hooks_now()
        self._has_told = False
        self._known = {name: mark_of_memory(t) for name, t in self._tensors if is_away(t)}

    def _watch_layers(self, sequence: nn.Module, inside: Set[int]) -> None:
        """Watch a sequence and those in it too; `inside` has the ``id`` of modules in a layer."""
        for where, each in sequence.named_modules():
            if id(each) not in inside:
                self._hooks += _hooks([each])
                layers = each._modules
                self._places += [
                    (f"{where}.{k}".strip("."), layers, k, m) for k, m in layers.items()
                ]

    def _hooks_now(self) -> int:
        """Return the number of all hooks, of modules and of weights."""
        of_weights = (hooks for _, p, _ in self._trained for hooks in gradient_hooks(p))
        return sum(map(len, (*self._hooks, *of_weights)))

    def gave(self, state: Mapping[str, Any]) -> None:
        """Note weights that the pipeline has given the script, which it may load into its model."""
        if not self.watches:
            return
        for name, value in state.items():
            if isinstance(value, Tensor) and name in self._given:
                self._given[name].add(mark_of_content(value))

    @property
    def has_moved(self) -> bool:
        """Whether the script has other weights than at the start."""
        return any(mark_of_content(t) != self._at_first[name] for name, t in self._tensors)

    @property
    def versioned(self) -> list[Tensor]:
        """Its tensors that count how often they were changed in place."""
        return [t for _, t in self._tensors if not t.is_inference()]

    def require_known(self) -> None:
        """Refuse a change that plain PyTorch would act on, and the stages do not see."""
        if not self.watches:
            return
        for name, held, key, value in self._places:
            if isinstance(value, nn.Module | None) and held.get(key) is not value:
                _refuse(f"{name!r} was replaced", "Replace it before the pipeline is made, ")
        if self._hooks_now() != self._count:
            what = "a hook of the model or of the loss was added or removed"
            _refuse(what, "Register hooks before the pipeline is made, ")
        if unknown := self._unknown():
            for state in self.saved():
                self.gave(state)
            if unknown := self._unknown():
                self._refuse_value(*unknown)
        self._refuse_freezing()
        self._tell_of_gradients()

    def _unknown(self) -> tuple[str, bool] | None:
        """Return a tensor that has values which nobody gave it, and whether it is a new one."""
        for name, held, key, value in self._places:
            now: Any = held.get(key)
            if not isinstance(value, Tensor) or name in self._free:
                continue
            # To read values of an accelerator would wait for it.
            away = isinstance(now, Tensor) and is_away(now)
            if away and self._known.get(name) == mark_of_memory(now):
                continue
            mark = mark_of_content(now) if isinstance(now, Tensor) else None
            if mark not in self._given[name] and not self._moves(name):
                return name, now is not value
            if away:
                self._known[name] = mark_of_memory(now)
        return None

    def _moves(self, name: str) -> bool:
        """Whether a forward changes a buffer, so that one of the script's own does too."""
        return name in self._buffers and len(self._given[name]) > 1

    def _refuse_value(self, name: str, replaced: bool) -> NoReturn:
        if replaced:
            _refuse(f"{name!r} was replaced", "Replace it before the pipeline is made, ")
        if name in self._buffers:
            instead = "Keep a number that changes in a plain attribute, which travels, "
            _refuse(f"the buffer {name!r} was changed", instead)
        _refuse(f"the weight {name!r} was changed", "Change it by pipe.load_state_dict(), ")

    def _refuse_freezing(self) -> None:
        changed = [name for name, p, before in self._trained if p.requires_grad != before]
        # It may freeze all of them to use the model by itself, once it has other weights.
        if changed and (any(p.requires_grad for _, p, _ in self._trained) or not self.has_moved):
            raise ConfigError(
                f"requires_grad of {changed[0]!r} was changed in the script, and the stages train "
                "what was trained at the start. To freeze or unfreeze in a run, save() it, and "
                "go on with load() in a new Pipeline; for a model of your own take "
                "pipe.module()"
            )

    def _tell_of_gradients(self) -> None:
        """Say once that gradients of the script's own model reach no stage."""
        name = next((n for n, p, _ in self._trained if p.grad is not None), None)
        if name is not None and not self._has_told:
            self._has_told = True
            _log.warning(
                "the script's own model has gradients, as of %r: the stages train copies, so these "
                "reach nobody, and norms, gradients and averages of the script's model are not "
                "those of the training. Take pipe.module(), Training(ema=...) or the results",
                name,
            )


def _named(name: str, module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for short, tensor in named_tensors(module):
        yield f"{name}.{short}".strip("."), tensor


def _places(name: str, module: nn.Module) -> Iterator[tuple[str, dict[str, Any], str, Any]]:
    """Yield each weight, buffer and module inside a module: its name, and where it stands."""
    for where, each in module.named_modules(prefix=name):
        for held in (each._parameters, each._buffers, each._modules):
            for key, value in held.items():
                yield f"{where}.{key}".strip("."), held, key, value


def _hooks(modules: Iterable[nn.Module]) -> list[dict[Any, Any]]:
    """Return what holds the hooks of modules."""
    return [
        held
        for each in modules
        for key, held in vars(each).items()
        if key.endswith("_hooks") and isinstance(held, dict)
    ]


def _refuse(what: str, instead: str) -> NoReturn:
    """Refuse a change of the script's own model or loss."""
    raise ConfigError(
        f"{what} in the script, and the stages have a copy of what was there at the start. "
        f"{instead}or change it on the stages by pipe.on_stages(function); for a model of your own "
        "take pipe.module()"
    )
