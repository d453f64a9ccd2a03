"""One stage: what it does with a micro-batch.

Read from top to bottom: `forward`, `backward`, `step`, in the order in which a micro-batch meets
them; what is no training follows. A stage does no I/O: it takes tensors and returns what is to be
sent. `stage.loop` says when it acts, waits for what it needs, and sends what it returns.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import cloudpickle
import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from pipedream_rt.errors import ConfigError, NonFiniteLoss, ScheduleError
from pipedream_rt.messages.tree import Value, flatten, own, unflatten
from pipedream_rt.stage.buffers import load_buffers, load_state
from pipedream_rt.stage.optimizer import Hyper, OptimizerSpec, StageOptimizer
from pipedream_rt.stage.parameters import VersionedParameters
from pipedream_rt.stage.seeds import layer_seed
from pipedream_rt.stage.spec import StageSpec
from pipedream_rt.stage.split_backward import SplitBackward

Gradients: TypeAlias = list[Tensor | None]
"""Of the tensors of one value that asked for a gradient, in order; None where there is none."""


class _Boundary(torch.autograd.Function):
    """Identity at the entrance of a stage, which catches the gradient.

    The module gets a tensor that is no leaf, as inside an unsplit model, so that a first layer may
    work in place (``ReLU(inplace=True)``). The gradient is taken here, not from the ``grad`` of a
    leaf: that one has the strides of the leaf, and kernels round differently for other strides.
    """

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, caught: list[Tensor]) -> Tensor:
        """Return a tensor over the same storage that autograd takes for no view of the leaf."""
        ctx.caught = caught
        alias = torch.empty(0, dtype=leaf.dtype, device=leaf.device)
        return alias.set_(leaf.untyped_storage(), leaf.storage_offset(), leaf.size(), leaf.stride())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None]:
        """Keep the gradient; it ends here."""
        ctx.caught.append(gradients[0])
        return None, None


@dataclass(slots=True, kw_only=True)
class _InFlight:
    """What the backward of a micro-batch needs of its forward.

    Attributes:
        hyper: Hyper-parameters that travelled with the micro-batch.
        caught: For each input, for each of its tensors that asked for a gradient, the list to which
            autograd adds that gradient.
        entrances: The autograd nodes at which the gradients are caught.
        outputs: Output tensors that require a gradient; the weighted loss on the last stage.
        split: The backward, when its first half is done; None where nothing is left to do.
    """

    hyper: list[Hyper]
    caught: list[list[list[Tensor]]] = field(default_factory=list)
    entrances: list[Node] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)
    split: SplitBackward | None = None


class Stage:
    """One stage of the pipeline. Every method runs on the one thread of its worker.

    A stage with several producers takes the tuple of their outputs. A stage with several consumers
    sends all of them the same output, and adds their gradients in the order of the consumers.

    Args:
        spec: What the stage is made of.

    Attributes:
        index: 0-based.
        plan: In which it has its place.
        module: Its layers.
        parameters: Its weights, in the versions that micro-batches in flight read.
        optimizer: Its optimizer; None until one is set.
        next_forward: The next micro-batch to train on.
        ended: Micro-batches whose gradients are in an update, pending or done.
    """

    def __init__(self, spec: StageSpec) -> None:
        """Do nothing yet."""
        self.index = spec.stage
        self.module: nn.Sequential = spec.layers
        self._spec = spec
        self.plan = spec.plan
        self.parameters = VersionedParameters(self.module, self.index)
        self.optimizer: StageOptimizer | None = None
        self.next_forward = self.ended = 0
        self._in_flight: dict[int, _InFlight] = {}
        self._hyper: list[Hyper] = []

    # -- forward ------------------------------------------------------------------------------

    def forward(
        self,
        micro_batch: int,
        inputs: Sequence[Value] | None,
        hyper: list[Hyper],
        target: Value | None = None,
        share: float = 1.0,
    ) -> Value | float | None:
        """Run the forward of one micro-batch with the weight version that the plan names.

        Args:
            micro_batch: The next one, 0-based.
            inputs: One value from each producer, or the model's input; None for a micro-batch
                without samples, which changes nothing.
            hyper: Hyper-parameters of each parameter group, for the update.
            target: What the loss compares with, on the stage that computes it.
            share: The micro-batch's samples as a share of its mini-batch's; the loss that is
                derived is weighted by it.

        Returns:
            The output for the consumers; the plain loss on the stage that computes it; None for a
            micro-batch without samples.

        Raises:
            NonFiniteLoss: The loss is NaN or infinite, unless the pipeline ignores that.
            ConfigError: The loss is no scalar.
            VersionError: The version is not kept.
        """
        self.parameters.begin(micro_batch, self.plan.reads(self.index, micro_batch))
        self.next_forward = micro_batch + 1
        flight = self._in_flight[micro_batch] = _InFlight(hyper=hyper)
        if inputs is None:
            return None
        value = self._enter(inputs, flight)
        with self.parameters.reading(micro_batch):
            output = self._layers(value, micro_batch)
        if target is None:
            outgoing = _outgoing(output)
            flight.outputs = [t for t in flatten(output)[1] if t.requires_grad]
            return outgoing
        loss = self._loss(output, target)
        reported = float(loss.item())
        self._check_finite(reported, micro_batch)
        flight.outputs = [loss * share if share != 1.0 else loss]
        return reported

    def _enter(self, inputs: Sequence[Value], flight: _InFlight) -> Any:
        """Return the input of the first layer, and note where its gradients will come."""
        entered = []
        for structure, received, requires_grad in inputs:
            tensors = list(received)
            caught: list[list[Tensor]] = []
            for i, wanted in enumerate(requires_grad):
                if wanted:
                    caught.append([])
                    leaf = tensors[i].requires_grad_()
                    inside: Tensor = _Boundary.apply(leaf, caught[-1])  # type: ignore[no-untyped-call]
                    assert inside.grad_fn is not None
                    # Before a layer works on it in place and gives it another node.
                    flight.entrances.append(inside.grad_fn)
                    tensors[i] = inside
            flight.caught.append(caught)
            entered.append(unflatten(structure, tensors))
        return entered[0] if len(entered) == 1 else tuple(entered)

    def _layers(self, value: Any, number: int | str) -> Any:
        """Run the layers one after another, each with its own seed."""
        # Not named_children, which leaves out a layer that stands there a second time.
        for name, layer in self.module._modules.items():
            assert layer is not None
            self._seed(number, name)
            value = layer(value)
        return value

    def _seed(self, number: int | str, name: str) -> None:
        """Seed torch's generator for what a layer, a backward or an optimizer may draw."""
        torch.default_generator.manual_seed(layer_seed(self._spec.seed, number, name))

    def _loss(self, output: Any, target: Value) -> Tensor:
        """Compute the loss.

        Raises:
            ConfigError: It is not a scalar tensor.
        """
        assert self._spec.loss_fn is not None
        loss = self._spec.loss_fn(output, unflatten(target.structure, target.tensors))
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            found = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise ConfigError(
                f"loss_fn must return a tensor with one element, it returned {found}; "
                "reduce it, for instance with .mean()"
            )
        return loss

    def _check_finite(self, reported: float, micro_batch: int) -> None:
        """Refuse to train on a loss that is NaN or infinite, unless told to."""
        if self._spec.on_nan == "raise" and not math.isfinite(reported):
            raise NonFiniteLoss(
                f"stage {self.index}: the loss of micro-batch {micro_batch} is {reported}; "
                'lower the learning rate, look at the data, or pass on_nan="ignore"',
                stage=self.index,
                action=f"F{micro_batch}",
            )

    # -- backward -----------------------------------------------------------------------------

    def backward(self, micro_batch: int, gradients: Sequence[Gradients] = ()) -> list[Gradients]:
        """Run the backward of one micro-batch with the weight version that its forward read.

        Gradients are added to the pending update; weights do not change here.

        Args:
            micro_batch: In flight on this stage.
            gradients: From each consumer, of the output that it was sent; none on the stage that
                computes the loss.

        Returns:
            For each input of the forward, the gradients of its tensors that asked for one.

        Raises:
            ScheduleError: The micro-batch is not in flight.
        """
        flight = self._flight_of(micro_batch)
        outputs, given = _to_derive(flight, gradients)
        with self.parameters.accumulating(micro_batch):
            self._seed(micro_batch, "backward")
            if outputs:
                torch.autograd.backward(outputs, given)
        self._end(micro_batch)
        return _found(flight)

    def backward_input(
        self, micro_batch: int, gradients: Sequence[Gradients] = ()
    ) -> list[Gradients]:
        """Run the half of a backward that the producers wait for; see `backward`."""
        flight = self._flight_of(micro_batch)
        outputs, given = _to_derive(flight, gradients)
        with self.parameters.reading(micro_batch):
            if outputs:
                leaves = self.parameters.leaves(micro_batch)
                flight.split = SplitBackward(outputs, given, flight.entrances, leaves)
                self._seed(micro_batch, "backward")
                flight.split.first_half()
        flight.outputs = []
        return _found(flight)

    def backward_weight(self, micro_batch: int) -> None:
        """Run the other half: gradients of the weights are added to the pending update.

        Args:
            micro_batch: Whose `backward_input` is done.

        Raises:
            ScheduleError: The micro-batch is not in flight.
        """
        flight = self._flight_of(micro_batch)
        with self.parameters.accumulating(micro_batch):
            self._seed(micro_batch, "backward")
            if flight.split is not None:
                flight.split.second_half()
        self._end(micro_batch)

    def version_of(self, micro_batch: int) -> int:
        """Return the weight version that a micro-batch in flight reads.

        Raises:
            VersionError: It is not in flight.
        """
        return self.parameters.ledger.pinned(micro_batch)

    def require_in_flight(self, micro_batch: int) -> None:
        """Refuse a micro-batch whose backward cannot come now.

        Raises:
            ScheduleError: It is not in flight.
        """
        if micro_batch not in self._in_flight:
            raise ScheduleError(
                f"stage {self.index}: the order wants the backward of micro-batch {micro_batch}; "
                f"in flight are {list(self._in_flight)}"
            )

    def _flight_of(self, micro_batch: int) -> _InFlight:
        """Return what the forward of a micro-batch in flight has left for its backward."""
        self.require_in_flight(micro_batch)
        return self._in_flight[micro_batch]

    def _end(self, micro_batch: int) -> None:
        """Note that the gradients of a micro-batch are in the pending update."""
        self._hyper = self._in_flight.pop(micro_batch).hyper
        self.ended = micro_batch + 1
        self.parameters.ledger.unpin(micro_batch)

    # -- step ---------------------------------------------------------------------------------

    def step(self, update: int) -> None:
        """Apply the gradients of an update to the newest weight version.

        Args:
            update: Its number; makes version ``update + 1``.

        Raises:
            ConfigError: There is no optimizer.
        """
        if self.optimizer is None:
            raise ConfigError("training needs an optimizer; give Pipeline one")
        apply, hyper = self.optimizer.step, self._hyper
        self._seed(update, "step")
        next_read = self.plan.reads(self.index, self.next_forward)
        self.parameters.step(next_read, lambda: apply(hyper))

    # -- what is no training ------------------------------------------------------------------

    def evaluate(self, number: int, inputs: Sequence[Value], target: Value | None) -> Value | float:
        """Run a forward for `Pipeline.evaluate`: newest weights, eval mode, no gradient.

        Args:
            number: Of the micro-batch, among those that are not trained on.
            inputs: As of `forward`.
            target: As of `forward`.

        Returns:
            The output for the consumers, or the loss.
        """
        with self._eval_mode():
            output = self._pass(f"evaluate {number}", inputs)
            if target is None:
                return _outgoing(output)
            with torch.no_grad():
                return float(self._loss(output, target).item())

    def infer(self, number: int, inputs: Sequence[Value]) -> Value:
        """Run a forward for inference: newest weights, the mode set last, no gradient.

        Args:
            number: Of the micro-batch, among those that are not trained on.
            inputs: As of `forward`.

        Returns:
            The output.
        """
        return _outgoing(self._pass(f"infer {number}", inputs))

    @torch.no_grad()
    def _pass(self, number: str, inputs: Sequence[Value]) -> Any:
        """Run the layers without gradient."""
        values = [unflatten(structure, tensors) for structure, tensors, _ in inputs]
        return self._layers(values[0] if len(values) == 1 else tuple(values), number)

    @contextmanager
    def _eval_mode(self) -> Iterator[None]:
        """Switch every module to eval mode, and back to what each one was."""
        modes = [(module, module.training) for module in self.module.modules()]
        self.module.eval()
        try:
            yield
        finally:
            for module, mode in modes:
                module.training = mode

    # -- state --------------------------------------------------------------------------------

    @torch.no_grad()
    def load_state(self, state: dict[str, Tensor]) -> None:
        """Load weights and buffers; versions before the newest are forgotten."""
        self.parameters.reset(lambda: load_state(self.module, state))

    @torch.no_grad()
    def restore(
        self,
        step: int,
        weights: dict[str, Tensor],
        older: dict[int, dict[str, Tensor]],
        buffers: dict[str, Tensor],
    ) -> None:
        """Go on as of an update. Nothing must be in flight.

        Args:
            step: Updates done.
            weights: The newest version, under the keys of the unsplit model.
            older: Versions before it, of every trainable parameter.
            buffers: By name.
        """
        load_buffers(self.module, buffers)
        self.parameters.restore(step, older, lambda: load_state(self.module, weights))
        self.next_forward = self.ended = step * self.plan.per_update

    def set_optimizer(self, pickled: bytes) -> None:
        """Build the optimizer from a pickled `OptimizerSpec`; its state starts empty."""
        spec: OptimizerSpec = cloudpickle.loads(pickled)
        self.optimizer = StageOptimizer(spec, self.parameters.named)

    def statistics(self) -> dict[str, int]:
        """Return counters of this stage, for `Pipeline.statistics`."""
        ledger = self.parameters.ledger
        return {
            "stage": self.index,
            "updates": ledger.newest,
            "versions_kept": len(ledger.kept),
            "versions_kept_most": ledger.kept_most,
            "buffers_allocated": self.parameters.allocated,
            "parameters": sum(p.numel() for p in self.module.parameters()),
        }


def _outgoing(output: Any) -> Value:
    """Return an output as it is sent: its tensors are not to change until they have left.

    What requires a gradient is kept by autograd and changed by nobody; anything else may be a
    buffer or a workspace of the module, which its next forward overwrites.
    """
    structure, tensors = flatten(output)
    return Value(
        structure,
        tuple(own(t, copy=not t.requires_grad) for t in tensors),
        tuple(t.requires_grad for t in tensors),
    )


def _to_derive(flight: _InFlight, gradients: Sequence[Gradients]) -> tuple[list[Tensor], Gradients]:
    """Return the tensors that a backward starts from, with their gradients.

    They are the outputs that a consumer sent a gradient of, once for each consumer, or the loss.
    """
    if not gradients:
        return flight.outputs, [None] * len(flight.outputs)
    pairs = [
        (output, gradient)
        for of_consumer in gradients
        for output, gradient in zip(flight.outputs, of_consumer)
        if gradient is not None
    ]
    return [output for output, _ in pairs], [gradient for _, gradient in pairs]


def _found(flight: _InFlight) -> list[Gradients]:
    """Return the gradients that were caught at the entrance of the stage, by input."""
    return [[own(c[0]) if c else None for c in caught] for caught in flight.caught]
