"""A model whose newest weights are on the stages, and are fetched when somebody reads them.

Callbacks, metrics and overridden methods of a Trainer may read ``trainer.model`` at any time, and
most never do. So while its weights are old, its parameters and buffers have a class whose
``__torch_function__`` torch calls for whatever is done with them. Shape, dtype and device are
answered at once. Anything else first fetches all weights, and gives the tensors their classes back.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import new_class
from typing import Any

import torch
from torch import Tensor, nn

from pipedream_rt.errors import ConfigError
from pipedream_rt.stage.fingerprint import fingerprint, total
from pipedream_rt.telling import log_of
from pipedream_rt.torch_private import no_torch_function

_log = log_of(__name__)

_OF_NO_VALUES = frozenset(
    getattr(Tensor, name).__get__
    for name in (
        "device", "dtype", "grad_fn", "is_cpu", "is_cuda", "is_leaf", "is_meta", "is_quantized",
        "is_sparse", "itemsize", "layout", "nbytes", "ndim", "output_nr", "requires_grad",
        "retains_grad", "shape", "_backward_hooks", "_version",
    )
    if hasattr(Tensor, name)
) | {
    Tensor.dim, Tensor.element_size, Tensor.is_contiguous, Tensor.is_floating_point,
    Tensor.is_complex, Tensor.nelement, Tensor.numel, Tensor.size, Tensor.stride,
    torch.is_complex, torch.is_floating_point, torch.numel,
}  # fmt: skip
"""Functions of a tensor that do not read its values."""

_GRADIENT = getattr(Tensor, "grad").__get__  # noqa: B009 - a descriptor, which mypy takes for a value
_SET_GRADIENT = getattr(Tensor, "grad").__set__  # noqa: B009
_HOOKS = {Tensor.register_hook, Tensor.register_post_accumulate_grad_hook}


class LiveModel:
    """A model that is up to date when it is read.

    Attributes:
        is_stale: Whether the stages may have newer weights than the model.
        lock: Held while weights are fetched, and while the stages are given something.
    """

    def __init__(self, model: nn.Module, fetch: Callable[[], Mapping[str, Any] | None]) -> None:
        self.model, self._fetch = model, fetch  # `fetch` returns None if the weights are lost
        self.is_stale = self._gradients_wanted = False
        self._named = dict(_named(model))
        self._tensors = list({id(t): t for t in self._named.values()}.values())
        self._structure = self._walk()
        self._before: list[type] = []  # the tensors' own classes, while they are watched
        self._classes: dict[type, type] = {}
        self.lock, self._own = threading.RLock(), threading.local()
        self._known: dict[str, str] = {}  # digests of what the stages have; empty if not known

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy: up-to-date weights, and no locks or classes."""
        self.refresh()
        return {**vars(self), "lock": None, "_own": None, "_classes": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Give a copy locks of its own."""
        vars(self).update(state)
        self.lock, self._own = threading.RLock(), threading.local()

    def mark_stale(self) -> None:
        """Treat the weights as old from now on."""
        self.is_stale, self._known = True, {}
        self._watch()

    def refresh(self) -> None:
        """Fetch the current weights, if the model is old."""
        with self.lock:
            self._unwatch()
            if not self.is_stale:
                return
            try:
                found = self._fetch()
                if found is not None:
                    self._take(dict(found))
            except BaseException:
                self._watch()  # it is as old as before
                raise
            self.is_stale = False
            if found is None:
                _log.warning(
                    "the model of the Trainer has older weights than its run had at the end: the "
                    "workers had ended before anybody read it; a checkpoint has newer ones"
                )
            else:
                self._known = self._digests()

    def _take(self, found: dict[str, Any]) -> None:
        """Load weights and buffers, also into tensors that the model no longer has."""
        if self._walk() == self._structure:
            self.model.load_state_dict(found)
            return
        with torch.no_grad():
            for name, tensor in self._named.items():
                if name in found:
                    tensor.copy_(found[name])

    def changed(self) -> set[str]:
        """Return the names of values that the script has changed since model and stages agreed.

        Empty unless they have agreed, which `refresh` and `note` establish.
        """
        if not self._known:
            return set()
        now = self._digests()
        return {name for name, digest in now.items() if self._known.get(name) != digest}

    def note(self) -> None:
        """Note that the stages have the weights of the model, unless it is old."""
        if not self.is_stale:
            self._known = self._digests()

    def digest(self) -> str:
        """Return a fingerprint of all weights and buffers that the model has."""
        return total(self._digests().values())

    def has_other_layers(self) -> bool:
        """Whether the script has replaced layers, tensors or hooks of the model."""
        return self._walk() != self._structure

    def signature(self) -> list[Any]:
        """Return the properties of the tensors that stages are built for: dtype, trained, hooks."""
        with self.unread():
            return [
                (name, id(t), t.dtype, t.requires_grad, _ids(t._backward_hooks))
                for name, t in _named(self.model)
            ]

    def gradient(self) -> str:
        """Return the name of a parameter that has a gradient; empty for none."""
        if self.is_stale:  # then setting one was refused
            return ""
        found = (name for name, p in self.model.named_parameters() if p.grad is not None)
        return next(found, "")

    def _walk(self) -> list[Any]:
        """Return the layers, the tensors and the hooks of the layers, by ``id``."""
        return [
            (id(m), _ids(m._modules), _ids(m._parameters), _ids(m._buffers), *_hooks_of(m))
            for m in self.model.modules()
        ]

    @contextmanager
    def unread(self) -> Iterator[None]:
        """Let this thread read old weights, without a fetch, while the body runs."""
        before, self._own.reads = getattr(self._own, "reads", False), True
        try:
            yield
        finally:
            self._own.reads = before

    @contextmanager
    def with_gradients(self, before_step: str = "") -> Iterator[None]:
        """Refuse reading gradients while the body runs, and changing weights in ``before_step``."""
        before = self._digests() if before_step and not self.is_stale else {}
        self._gradients_wanted = True
        self._watch()
        try:
            yield
        finally:
            self._gradients_wanted = False
            if not self.is_stale:
                self._unwatch()
        if before_step and not self.is_stale and self._digests() != (before or self._known):
            raise ConfigError(
                f"a callback changed weights in {before_step}, between the gradients and the step "
                "that the stages make of them; do it in on_step_begin or on_step_end"
            )

    def _digests(self) -> dict[str, str]:
        """Return a fingerprint of each weight, buffer and extra state, by name."""
        with self.unread(), torch.no_grad():
            values = {name: t.detach() for name, t in _named(self.model)}
            extra = {
                f"{name}._extra_state": m.get_extra_state()
                for name, m in self.model.named_modules()
                if type(m).get_extra_state is not nn.Module.get_extra_state
            }
            return {n: fingerprint({n: value}) for n, value in {**values, **extra}.items()}

    def _watch(self) -> None:
        """Have `_called` called for whatever is done with the tensors."""
        if not self._before:
            self._before = [type(tensor) for tensor in self._tensors]
            for tensor in self._tensors:
                tensor.__class__ = self._class(type(tensor))

    def _unwatch(self) -> None:
        """Give the tensors their classes back."""
        for tensor, before in zip(self._tensors, self._before, strict=False):
            tensor.__class__ = before
        self._before = []

    def _class(self, base: type) -> type:
        """Return a subclass of ``base`` that has `_called` called for whatever is done with it."""

        def called(cls: type, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return self._called(func, args, kwargs or {})

        def copied(tensor: Tensor, memo: dict[int, Any]) -> Any:
            self.refresh()  # else Parameter.__deepcopy__ makes a copy of this class
            return copy.deepcopy(tensor, memo)

        if base not in self._classes:
            body = {
                "__torch_function__": classmethod(called),
                "__deepcopy__": copied,
                "__module__": __name__,
            }
            self._classes[base] = new_class(base.__name__, (base,), {}, lambda n: n.update(body))
        return self._classes[base]

    def _called(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Call a function of a tensor; fetch the weights first if it reads them."""
        if func == _GRADIENT and self._gradients_wanted:
            raise ConfigError(
                "the gradients of a pipeline are on its stages. Their norm is grad_norm in the "
                "logs, max_grad_norm clips it; a hook that a parameter has before training "
                "(register_hook) goes along, and trainer.pipe.on_stages(f) calls f there"
            )
        if func == _SET_GRADIENT and args[1] is not None:
            raise ConfigError(
                "a gradient that is set in the script does not reach the stages, which begin each "
                "update without; a hook that a parameter has before training (register_hook) does"
            )
        if func in _HOOKS:
            raise ConfigError(
                f"{func.__name__} of a parameter would be called in the script, where no gradient "
                "is computed; register hooks before training, they go along to the stages"
            )
        if func in _OF_NO_VALUES or func == _GRADIENT or getattr(self._own, "reads", False):
            with no_torch_function():
                return func(*args, **kwargs)
        self.refresh()
        return func(*args, **kwargs)


def _named(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield all parameters and buffers with their names."""
    yield from model.named_parameters()
    yield from model.named_buffers()


def _ids(values: Mapping[Any, Any] | None) -> tuple[int, ...]:
    return tuple(map(id, (values or {}).values()))


def _hooks_of(module: nn.Module) -> Iterator[tuple[int, ...]]:
    """Yield the ids of the hooks of a layer, for each kind of hooks."""
    for name, value in vars(module).items():
        if name.endswith("_hooks") and isinstance(value, Mapping) and value:
            yield _ids(value)
