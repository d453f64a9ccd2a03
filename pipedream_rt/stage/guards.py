"""Refusals of changes that weight versions, other stages or checkpoints would not know of."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from pipedream_rt.errors import ConfigError
from pipedream_rt.messages.tree import Value, places
from pipedream_rt.models.mark import Mark, mark_of_tensors, mark_of_writes
from pipedream_rt.stage.buffers import buffer_slots, names_of_buffers
from pipedream_rt.stage.parameters import same
from pipedream_rt.stage.script_values import GivenValues
from pipedream_rt.stage.spec import StageSpec
from pipedream_rt.stage.weights import Weights
from pipedream_rt.telling import log_of

_log = log_of(__name__)


class Guards:
    """The guards of one stage.

    Attributes:
        filled: The names of the buffers that were not None at the start.
        always: Whether each forward is watched, as other stages have some of the buffers.
    """

    def __init__(self, spec: StageSpec, weights: Weights, values: GivenValues) -> None:
        self._values = values
        self._stage, self._module = spec.stage, spec.layers
        self._weights, self._shared = weights, spec.shared
        # A schedule with flushes has one version, so that a change in place is as in plain PyTorch;
        # but other stages and replicas have copies.
        self.always = bool(spec.shared)
        self._alone = spec.plan.flushes and spec.plan.replicas[spec.stage] == 1
        self._kinds = _kinds(self._module)
        self.filled = names_of_buffers(self._module)

    @contextmanager
    def watching(self, micro_batch: int) -> Iterator[None]:
        """Refuse a forward, the body, that changes weights or shared buffers."""
        # To compare all weights takes as long as to copy them, so only the micro-batches 0, 1, 2,
        # 4, 8 and so on are compared: a layer that changes its weights does so more than once.
        looks = micro_batch & (micro_batch - 1) == 0
        compared = frozenset(self._weights.tied) if self._alone else None
        owners = [weights for _, weights in self._weights.by_owner]
        before = [weights.copies(micro_batch, compared) if looks else [] for weights in owners]
        shared = self._marks_of_shared()
        # Values too, since a write through ``.data`` does not move the version counter.
        values = {name: self._module.get_buffer(name).clone() for name in shared if looks}
        yield
        if looks:
            for weights, copies in zip(owners, before, strict=True):
                weights.require_unchanged(micro_batch, copies)
            self._refuse_new_names()
            self._values.refuse_parted()
        for name, now in self._marks_of_shared().items():
            moved = name in values and not torch.equal(values[name], self._module.get_buffer(name))
            if now != shared[name] or moved:
                raise ConfigError(
                    f"stage {self._stage}: a forward changed the buffer {name!r}, which layers of "
                    "other stages share; each stage has a copy of it, so they would part. Keep the "
                    "layers that share it in one stage"
                )

    def _refuse_new_names(self) -> None:
        """Refuse parameters and buffers that the module did not have at the start."""
        now = _kinds(self._module)
        for name, kind in now.items():
            before = self._kinds.get(name)
            if before is None:
                raise ConfigError(
                    f"stage {self._stage}: a forward has made {name!r} a {kind}; it was not there "
                    "at the start, so it would be missing in state dicts and checkpoints, or never "
                    "be trained. Make it in __init__, a buffer as None if it has no value yet"
                )
            if before != kind:
                raise ConfigError(
                    f"stage {self._stage}: a forward has made {name!r} a {kind}; it was a {before} "
                    "at the start, and optimizer and checkpoints would go on with it as such. Make "
                    f"it a {kind} before the pipeline starts"
                )

    def _marks_of_shared(self) -> dict[str, Mark]:
        """Return by name the mark of each shared buffer."""
        return mark_of_tensors((name, self._module.get_buffer(name)) for name in self._shared)

    @contextmanager
    def refusing_changes(self, what: str) -> Iterator[None]:
        """Refuse, and undo, changes to weights that have older versions, or copies elsewhere."""
        own = {
            name: (parameter, parameter.detach().clone())
            for _, weights in self._weights.by_owner
            for name, parameter in weights.named.items()
            if name in self._weights.tied or not self._alone
        }
        yield
        changed = [name for name, (p, before) in own.items() if not same(p, before)]
        for name in changed:
            parameter, before = own[name]
            parameter.data.copy_(before)
        if changed:
            raise ConfigError(
                f"stage {self._stage}: {what} changed the parameter {changed[0]!r}, and the older "
                "versions of it, which micro-batches to come read, or its copies on other stages "
                "or replicas would not change with it. Use load_state_dict"
            )

    @contextmanager
    def refusing_others(self) -> Iterator[None]:
        """Undo and refuse replaced modules, parameters or ``data`` of parameters in the body."""
        slots_of: list[tuple[Any, dict[str, Any]]] = [
            (slots, dict(slots))
            for owner in self._module.modules()
            for slots in (owner._modules, owner._parameters)
        ]
        before = [(n, p, p.data, p.requires_grad) for n, p in self._module.named_parameters()]
        yield
        wrong = []
        for slots, entries in slots_of:
            for name in {**slots, **entries}:
                if slots.get(name) is not entries.get(name):
                    replaced = "replaced" if name in slots else "removed"
                    how = replaced if name in entries else "added"
                    wrong.append(f"{how} {name!r}")
        for slots, entries in slots_of:
            slots.clear()
            slots.update(entries)
        for name, parameter, data, trained in before:
            another = parameter.data_ptr() != data.data_ptr()
            if another or parameter.requires_grad != trained:
                how = "given another .data to" if another else "changed requires_grad of"
                wrong.append(f"{how} {name!r}")
                parameter.data = data
                parameter.requires_grad_(trained)
        if wrong:
            raise ConfigError(
                f"stage {self._stage}: the function has {wrong[0]}, of which the stage would not "
                "know; change values in place, or change the model before the pipeline starts"
            )


def _kinds(module: nn.Module) -> dict[str, str]:
    """Return the kind of each tensor by name: a parameter, a frozen parameter or a buffer."""
    found = {
        name: "parameter" if p.requires_grad else "frozen parameter"
        for name, p in module.named_parameters()
    }
    return {**found, **dict.fromkeys(buffer_slots(module), "buffer")}


@contextmanager
def telling_changed_inputs(inputs: Value | None) -> Iterator[None]:
    """Warn if a forward, the body, changes the tensors of the mini-batch in place."""
    if inputs is None:
        yield
        return
    before = mark_of_writes(inputs.tensors)
    yield
    names, after = places(inputs.structure), mark_of_writes(inputs.tensors)
    for number, (one, other) in enumerate(zip(before, after, strict=True)):
        if one != other:
            _log.warning(
                "the forward changes the tensor%s of the mini-batch in place. Here it is a copy, "
                "so the loader's own tensor stays as it is, also when the loader yields it again; "
                "in plain PyTorch it would be changed",
                f" {names[number]!r}" if names[number] else "",
            )
