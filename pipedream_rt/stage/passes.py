"""Passes of evaluation and inference: forwards that train nothing, on the newest weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from pipedream_rt.devices import Late
from pipedream_rt.messages.tree import Value, flatten
from pipedream_rt.models.program import NONE_CARRIED
from pipedream_rt.stage.evaluation import EvaluationBuffers, eval_mode, measured
from pipedream_rt.stage.flight import outgoing
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
    ) -> tuple[list[Value] | float | Late, dict[str, float | str]]:
        """Run a forward for `Pipeline.evaluate`: newest weights, eval mode, no gradient."""
        # `buffers` is the number of the evaluation whose buffers this pass changes; 0 for none.
        # With `keep_buffers` it changes the stage's own; else the stage stays as it was.
        of_buffers = self.evaluations.of(buffers, keep_buffers)
        mode = eval_mode(self._module, self._weights.own, self.modes, of_buffers)
        with torch.no_grad(), mode, self._runner.casting():
            made = self._pass(f"evaluate {number}", inputs, program)
            if target is None:
                return [outgoing(*flatten(value)) for value in made], {}
            loss, parts = self._runner.loss(made[0], target)
            said = {**parts, **measured(metrics, made[0], target)}
            return self._runner.device.number(loss), said

    def infer(
        self,
        number: int,
        inputs: Sequence[Value],
        *,
        training: bool = False,
        program: int = 0,
        cache: int = 0,
    ) -> list[Value]:
        """Run a forward for inference: newest weights, no gradient; `cache` is 0 for none."""
        # With `training`, modules keep the modes of training, in which buffers may change.
        own = self._weights.own
        mode = nullcontext() if training else eval_mode(self._module, own, self.modes)
        carried = self._runner.cache(cache, program)
        with torch.no_grad(), mode, self._runner.casting():
            made = self._pass(f"infer {number}", inputs, program, carried)
            return [outgoing(*flatten(value)) for value in made]

    def _pass(
        self,
        number: str,
        inputs: Sequence[Value],
        program: int,
        carried: Mapping[str, Any] = NONE_CARRIED,
    ) -> list[Any]:
        """Do the steps of a program without gradient."""
        return self._runner.run(program, self._runner.entered(inputs, program), number, carried)
