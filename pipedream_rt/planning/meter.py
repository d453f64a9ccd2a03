"""The meter of a profile: the processor time of layers, losses and optimizer steps."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pipedream_rt.errors import ConfigError
from pipedream_rt.models.cut import StageProgram
from pipedream_rt.models.program import (
    Step,
    filled,
    found,
    held_by,
    put,
    replaced,
)
from pipedream_rt.models.tensors import home_of
from pipedream_rt.planning.profile import LayerCosts
from pipedream_rt.stage.spec import LossFunction, has_own_loss, own_loss, total_of

Optimizer = tuple[type[torch.optim.Optimizer], Mapping[str, Any]]
"""The class of an optimizer, and its arguments."""


def _now(device: torch.device) -> float:
    """Return the time in seconds, once a device has done what it was given."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    elif torch.get_num_threads() == 1:
        # Time of the processor does not count other programs on the machine. It is that of this
        # thread, which is enough: on the CPU autograd computes in the thread that has called it.
        return time.thread_time()
    return time.perf_counter()


_ROUNDS = 6
"""The most rounds of timing a layer, while its times differ too much."""


_SETTLED, SETTLED_S = 0.25, 100e-6
"""The range that the middle half of some times may have: as a share of the median, in seconds."""


def spread_of(times: Sequence[float]) -> float:
    """Return the range of the middle half of some times; of less than four, that of all."""
    # The middle half, since a few outliers do not widen it.
    ordered, left_out = sorted(times), len(times) // 4
    return ordered[len(times) - 1 - left_out] - ordered[left_out]


def timed_until_settled(
    timed: Callable[[], tuple[float, float, float]], repeats: int
) -> list[tuple[float, float, float]]:
    """Time a layer (`_ProfiledLayer.timed`) until the times agree; return them all.

    ``repeats`` times are one round.
    """
    times: list[tuple[float, float, float]] = []
    for _ in range(_ROUNDS):
        times += [timed() for _ in range(repeats)]
        totals = [forward + both for forward, _, both in times]
        if spread_of(totals) <= max(_SETTLED * statistics.median(totals), SETTLED_S):
            return times
    # Other processes make times longer, never shorter: the shorter half is the best guess.
    return sorted(times, key=lambda each: each[0] + each[2])[: len(times) // 2]


class Meter:
    """Measures parts of a model, one after another.

    Attributes:
        taken: By part, the bytes that it takes from each other part, by index.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFunction | None,
        optimizer: Optimizer | None,
        repeats: int,
        warm_up: int,
    ) -> None:
        self._model, self._loss_fn, self._optimizer = model, loss_fn, optimizer
        self._repeats, self._warm_up = repeats, warm_up
        self.taken: list[dict[int, float]] = []

    def measure(
        self,
        parts: Sequence[tuple[str, StageProgram]],
        inputs: Mapping[int, Any],
        target: Any,
        autocast: torch.dtype | None,
    ) -> Iterator[LayerCosts]:
        """Yield the costs of each part."""
        passed = dict(inputs)
        for number, (name, program) in enumerate(parts):
            last = number + 1 == len(parts)
            values = {slot: passed[slot] for slots in program.takes.values() for slot in slots}
            self.taken.append(
                {
                    source: float(sum(t.nbytes for s in slots for t in _tensors(passed[s])))
                    for source, slots in program.takes.items()
                }
            )
            if last:
                values[_TARGET] = target
            part = _ProfiledLayer(self._model, name, program, values, autocast)
            if last:
                part.loss = self._loss
            made = part.outcome()
            yield self._costs(part, float(sum(t.nbytes for t in _tensors(made))))
            passed.update(made)

    def _loss(self, output: Any, target: Any) -> Any:
        """Return the loss, or the output if there is none."""
        if self._loss_fn is not None:
            return total_of(self._loss_fn(output, target))[0]
        return own_loss(output, target) if has_own_loss(output) else output

    def _costs(self, part: _ProfiledLayer, output_bytes: float) -> LayerCosts:
        """Return the costs of a part; the size of its output is known already."""
        for _ in range(self._warm_up):
            part.timed()
        times = timed_until_settled(part.timed, self._repeats)
        forwards, inputs, both = zip(*times, strict=True)
        forward, for_input = statistics.median(forwards), statistics.median(inputs)
        # Medians of two series may cross; the backward for the weights would then be negative.
        backward = max(statistics.median(both), for_input)
        totals = [a + b for a, b in zip(forwards, both, strict=True)]
        step, state = self._update(part.weights)
        return LayerCosts(
            name=part.name,
            forward=forward,
            backward_input=for_input,
            backward_weight=backward - for_input,
            step=step,
            output_bytes=output_bytes,
            parameter_bytes=float(sum(p.nbytes for p in part.weights)),
            frozen_bytes=float(part.frozen_bytes),
            saved_bytes=float(part.saved_bytes()),
            optimizer_bytes=float(state),
            spread=spread_of(totals),
        )

    def _update(self, weights: Sequence[Tensor]) -> tuple[float, int]:
        """Return the seconds of an update, and the bytes of the optimizer's state."""
        if self._optimizer is None or not weights:
            return 0.0, 0
        # Copies: the weights of the model are to stay.
        copies = [nn.Parameter(weight.detach().clone()) for weight in weights]
        cls, options = self._optimizer
        times = []
        try:
            optimizer = cls(copies, **options)
            for number in range(self._warm_up + self._repeats):
                for copy in copies:
                    copy.grad = torch.full_like(copy, 1e-3)
                start = _now(copies[0].device)
                optimizer.step()
                end = _now(copies[0].device)
                if number >= self._warm_up:
                    times.append(end - start)
        except Exception as error:  # an optimizer may raise anything
            raise ConfigError(f"{cls.__name__} cannot step this model: {error}") from error
        state = sum(t.nbytes for each in optimizer.state.values() for t in _tensors(each))
        return statistics.median(times), state


_TARGET = -1
"""The slot of the target among the values of the last part; those of programs count from 0."""


class _ProfiledLayer:
    """A layer with its inputs, and with the steps between it and the next layer.

    Attributes:
        loss: Makes the loss of the output, on the last part.
        weights: The weights that it trains.
        frozen_bytes: The bytes of other weights and of buffers.
    """

    def __init__(
        self,
        model: nn.Module,
        name: str,
        program: StageProgram,
        values: dict[int, Any],
        autocast: torch.dtype | None,
    ) -> None:
        self.name = name
        self.loss: Callable[[Any, Any], Any] = lambda output, target: output
        self._program, self._values, self._autocast = program, values, autocast
        self._calls: list[tuple[Step, Any]] = [
            (step, step.target if step.layer is None else model.get_submodule(step.layer))
            for step in program.steps
        ]
        names = {n for step in program.steps for n in step.held} | {*program.held}
        self._held = {n: held_by(model, n) for n in names}
        layers = [call for step, call in self._calls if step.layer is not None]
        layers += [each for each in self._held.values() if isinstance(each, nn.Module)]
        own = [t for layer in layers for t in (*layer.parameters(), *layer.buffers())]
        used = [each for each in self._held.values() if isinstance(each, Tensor)]
        tensors = {id(t): t for t in (*own, *used)}.values()  # a shared one once
        self.weights = [t for t in tensors if t.requires_grad and t.is_leaf]
        self.frozen_bytes = sum(t.nbytes for t in tensors if not t.requires_grad)
        self._fixed = {t.untyped_storage().data_ptr() for t in tensors}
        self._home = home_of(model)

    def _inputs(self) -> tuple[dict[int, Any], list[Tensor]]:
        """Return fresh inputs, and those of their tensors that need a gradient."""
        leaves: list[Tensor] = []

        def fresh(tensor: Tensor) -> Tensor:
            if not tensor.requires_grad:
                return tensor.clone()
            leaves.append(tensor.detach().requires_grad_())
            return leaves[-1].clone()  # autograd refuses a change in place of a leaf

        # Copies, as a layer may change its input in place, and the loss its target.
        made = {slot: replaced(v, (Tensor,), fresh) for slot, v in self._values.items()}
        return made, leaves

    def _forward(self, values: dict[int, Any]) -> dict[int, Any]:
        """Do the steps; return the outputs by slot, and the loss as -1."""
        kind, casts = self._home.type, self._autocast is not None
        cast = torch.autocast(kind, dtype=self._autocast, enabled=casts)
        with torch.enable_grad(), cast:
            for step, call in self._calls:
                args, kwargs = filled((step.args, step.kwargs), values, self._held)
                with step.around.entered():
                    put(step, call(*args, **kwargs), values)
            out = {s: values[s] for slots in self._program.gives.values() for s in slots}
            if self._program.output is not None:
                output = filled(self._program.output, values, self._held)
                out[-1] = self.loss(output, values.get(_TARGET))
        return out

    def outcome(self) -> dict[int, Any]:
        """Return the outputs by slot, without the graph that made them."""

        def alone(tensor: Tensor) -> Tensor:
            return tensor.detach().requires_grad_(tensor.requires_grad)

        values, _ = self._inputs()
        made = self._forward(values)
        made.pop(-1, None)
        return {slot: replaced(value, (Tensor,), alone) for slot, value in made.items()}

    def timed(self) -> tuple[float, float, float]:
        """Return the seconds of a forward, of its backward for the input, and of the whole one."""
        gc.collect(0)  # now, rather than while the clock runs
        values, leaves = self._inputs()
        start = _now(self._home)
        made = self._forward(values)
        forward = _now(self._home) - start
        both = self._backward(made, [*leaves, *self.weights])
        del made
        for_input = 0.0
        # A backward frees its graph, so that for the input alone needs a forward of its own.
        if leaves and self.weights:
            values, leaves = self._inputs()
            for_input = self._backward(self._forward(values), leaves)
        elif leaves:
            for_input = both
        return forward, min(for_input, both), both  # a stray time may be longer than the whole

    def _backward(self, made: dict[int, Any], wanted: Sequence[Tensor]) -> float:
        """Return the seconds of a backward for some tensors."""
        roots = [t for t in _tensors(made) if t.requires_grad]
        if not roots or not wanted:
            return 0.0
        ones = [torch.ones_like(root) for root in roots]
        start = _now(self._home)
        torch.autograd.grad(roots, wanted, ones, allow_unused=True)
        return _now(self._home) - start

    def saved_bytes(self) -> int:
        """Return the bytes that autograd keeps between a forward and its backward."""
        kept: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()  # views of one storage keep it once
            if storage.data_ptr() not in self._fixed:
                kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            values, _ = self._inputs()
            made = self._forward(values)
        del made
        return sum(kept.values())


def _tensors(value: Any) -> list[Tensor]:
    tensors: list[Tensor] = found(value, Tensor)
    return tensors
