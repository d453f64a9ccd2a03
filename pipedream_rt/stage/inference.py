"""Evaluation and inference: forwards that train nothing, on the newest weights or on kept ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from pipedream_rt.devices import DeferredScalar
from pipedream_rt.errors import ConfigError
from pipedream_rt.messages.tree import Value, flatten
from pipedream_rt.models.program import NONE_CARRIED
from pipedream_rt.models.tensors import in_place_of, named_tensors
from pipedream_rt.stage.evaluation import EvaluationBuffers, eval_mode, measured, unpacked
from pipedream_rt.stage.in_flight import outgoing
from pipedream_rt.stage.runner import Runner
from pipedream_rt.stage.spec import StageSpec
from pipedream_rt.stage.weights import Weights


class Passes:
    """The passes of one stage; they number micro-batches apart from those in training."""

    def __init__(self, spec: StageSpec, runner: Runner, weights: Weights) -> None:
        self._module, self._runner, self._weights = spec.layers, runner, weights
        self.modes = spec.modes
        self.evaluations = EvaluationBuffers(self._module)

    def evaluate(
        self,
        number: int,
        inputs: Sequence[Value],
        target: Value | None,
        program: int = 0,
        *,
        metrics: bytes = b"",
        buffers: int = 0,
        keep_buffers: bool = False,
        numbers: Sequence[int] = (),
    ) -> tuple[list[Value] | float | DeferredScalar, dict[str, float | str]]:
        """Run a forward for `Pipeline.evaluate`: newest weights, eval mode, no gradient."""
        # `buffers` is the number of the evaluation whose buffers this pass changes; 0 for none.
        # With `keep_buffers` it changes the stage's own; else the stage stays as it was.
        of_buffers = self.evaluations.of(buffers, keep_buffers)
        mode = eval_mode(self._module, self._weights.own, self.modes, of_buffers)
        with torch.no_grad(), mode, self._runner.casting():
            made = self._pass(f"evaluate {number}", inputs, program, numbers)
            if target is None:
                return [outgoing(*flatten(value)) for value in made], {}
            other = unpacked(metrics).loss_fn if metrics else None
            if isinstance(other, nn.Module):
                self._runner.device.place(other)
            loss, parts = self._runner.loss(made[0], target, other)
            if other is not None and (changed := unpacked(metrics).changed_by("loss")):
                raise ConfigError(
                    f"the loss_fn of an evaluation changes {changed}, which the script would not "
                    "see, and which its next mini-batch might go by; give one that only computes"
                )
            reported = {**parts, **measured(metrics, made[0], target)}
            return self._runner.device.number(loss), reported

    def infer(
        self,
        number: int,
        inputs: Sequence[Value],
        *,
        training: bool = False,
        program: int = 0,
        cache: int = 0,
        numbers: Sequence[int] = (),
    ) -> list[Value]:
        """Run a forward for inference: newest weights, no gradient; `cache` is 0 for none."""
        # With `training`, modules keep the modes of training, in which buffers may change.
        own = self._weights.own
        mode = nullcontext() if training else eval_mode(self._module, own, self.modes)
        carried = self._runner.cache(cache, program)
        with torch.no_grad(), mode, self._runner.casting():
            made = self._pass(f"infer {number}", inputs, program, numbers, carried)
            return [outgoing(*flatten(value)) for value in made]

    def _pass(
        self,
        number: str,
        inputs: Sequence[Value],
        program: int,
        numbers: Sequence[int],
        carried: Mapping[str, Any] = NONE_CARRIED,
    ) -> list[Any]:
        """Do the steps of a program without gradient."""
        values = self._runner.entered(inputs, program, numbers)
        return self._runner.run(program, values, number, carried)


class KeptVersions:
    """The kept versions of one stage by number: copies, which nothing changes."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._versions: dict[int, dict[str, Tensor]] = {}

    @torch.no_grad()
    def keep(self, number: int, values: Mapping[int, Tensor]) -> None:
        """Copy all weights and buffers, or what `values` has for them by ``id``."""
        made: dict[int, Tensor] = {}
        copies = self._versions[number] = {}
        # By name, since a forward may put another buffer into the place of one.
        for name, tensor in named_tensors(self._module):
            if id(tensor) not in made:
                copy = torch.empty_like(tensor).copy_(values.get(id(tensor), tensor))
                made[id(tensor)] = in_place_of(tensor, copy, False)
            copies[name] = made[id(tensor)]

    def drop(self, number: int) -> None:
        self._versions.pop(number, None)

    def copies(self, number: int) -> Mapping[str, Tensor]:
        """Return the copies of a version, by name; none for number 0."""
        if number and number not in self._versions:
            there = ", ".join(map(str, self._versions))
            raise ConfigError(f"version {number} is not kept; those kept are {there or 'none'}")
        return self._versions.get(number, {})

    @contextmanager
    def read(self, number: int) -> Iterator[None]:
        """Put a kept version into the module while the body runs; number 0 changes nothing."""
        before = []
        for name, copy in self.copies(number).items():
            path, _, short = name.rpartition(".")
            owner = self._module.get_submodule(path)
            slots = owner._parameters if short in owner._parameters else owner._buffers
            before.append((slots, short, slots.get(short)))
            slots[short] = copy  # type: ignore[assignment]  # in the place of a Parameter
        try:
            yield
        finally:
            # Backwards: a module with two names has its slot here twice, first with what was there.
            for slots, short, tensor in reversed(before):
                slots[short] = tensor  # type: ignore[assignment]
