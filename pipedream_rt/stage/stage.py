"""The stage loop: takes the next action from the order, waits for its message, computes, sends on.

Read from top to bottom: `run`, `forward`, `backward`, `step`, in the order in which a micro-batch
meets them; evaluation and commands follow.

One thread, named ``stage-<index>``, runs this and owns all that changes: weights, versions,
optimizer, what is in flight. Other threads only put messages into the inbox.
"""

from __future__ import annotations

import math
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import cloudpickle
import torch
from torch import Tensor, nn

from pipedream_rt.deadline import Deadline
from pipedream_rt.errors import ConfigError, NonFiniteLoss, ScheduleError
from pipedream_rt.schedules import Action, Kind
from pipedream_rt.schedules.actions import until
from pipedream_rt.stage.inbox import Inbox
from pipedream_rt.stage.job import StageJob
from pipedream_rt.stage.messages import (
    COORDINATOR,
    Channel,
    Command,
    CommandName,
    Gradient,
    Key,
    Loss,
    Message,
    MicroBatch,
    Mode,
    Payload,
    Reply,
    Target,
)
from pipedream_rt.stage.optimizer import Hyper, OptimizerSpec, StageOptimizer
from pipedream_rt.stage.parameters import VersionedParameters
from pipedream_rt.stage.random import layer_seed
from pipedream_rt.stage.tree import flatten, own, unflatten

Send = Callable[[int, int, Payload, tuple[Tensor, ...]], None]
"""``send(to, index, payload, tensors)``: hands a message to the transport; never blocks."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class _InFlight:
    """What backward needs of a forward.

    Attributes:
        caught: For each input tensor that wants a gradient, the list that it will come to.
        outputs: Output tensors that require a gradient; the weighted loss on the last stage.
        hyper: Hyper-parameters that travelled with the micro-batch.
        empty: Nothing to compute.
    """

    hyper: list[Hyper]
    caught: list[list[Tensor]] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)
    empty: bool = False


class Stage:
    """One stage of the pipeline, driven by its order and its inbox alone.

    Args:
        job: What to run.
        inbox: Where its messages arrive.
        send: Hands messages to the transport.
        timeout: For messages that are sure to come, gradients and targets.
        computing: Entered around every computation; keeps stages of one process apart.
    """

    def __init__(
        self,
        job: StageJob,
        inbox: Inbox,
        send: Send,
        timeout: timedelta,
        computing: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """Nothing runs yet."""
        self.index = job.stage
        self.module: nn.Sequential = job.layers
        self.action = "start"
        self._job = job
        self._schedule = job.schedule
        self._inbox = inbox
        self._send = send
        self._timeout = timeout
        self._computing = computing
        self.parameters = VersionedParameters(self.module, self.index)
        self.optimizer: StageOptimizer | None = None
        self._position = 0
        self._next_forward = 0
        self._in_flight: dict[int, _InFlight] = {}
        self._hyper: list[Hyper] = []
        self._busy_ns = 0

    # -- the loop -----------------------------------------------------------------------------

    def run(self) -> None:
        """Do what the order says until the inbox is closed; never returns otherwise.

        Raises:
            BaseException: The reason with which the inbox was closed, or an error of an action.
        """
        while True:
            flush = self._run_until_flush()
            self._reply(flush.index, None)

    def _run_until_flush(self) -> Message:
        """Follow the order from where nothing is in flight to where nothing is again.

        Returns:
            The flush command that ended it.
        """
        per_update = self._schedule.per_update
        order = self._schedule.order(self.index, self._next_forward)
        for action in order:
            if action.kind is not Kind.FORWARD:
                self._do(action)
                continue
            item = self._next_micro_batch()
            if isinstance(item.payload, Command):
                break
            self._do(action, item)
        stop, done = self._next_forward, self._next_forward - len(self._in_flight)
        steps_done = self.parameters.ledger.newest
        for action in until(order, stop, per_update, done, steps_done):
            self._do(action)
        return item

    def _next_micro_batch(self) -> Message:
        """Take position after position of the feed: serve what is no training, return what is.

        Returns:
            The next micro-batch to train on, or the command to flush.
        """
        while True:
            # No deadline: a script may pause between two mini-batches for as long as it likes.
            # The control connection notices a dead coordinator and closes the inbox.
            item = self._inbox.take(Key(Channel.FEED, self._position), Deadline(None))
            self._position += 1
            match item.payload:
                case MicroBatch(mode=Mode.TRAIN) | Command(name=CommandName.FLUSH):
                    return item
                case MicroBatch():
                    self._pass_through(item, item.payload)
                case Command():
                    self._obey(item, item.payload)
                case other:
                    raise ScheduleError(f"stage {self.index}: {other!r} in the feed")

    def _do(self, action: Action, item: Message | None = None) -> None:
        """Do one action and note it."""
        self.action = str(action)
        self._inbox.recent.append(self.action)
        match action.kind:
            case Kind.FORWARD:
                assert item is not None, "a forward has its input"
                self.forward(action.index, item)
            case Kind.BACKWARD:
                self.backward(action.index)
            case Kind.STEP:
                self.step(action.index)

    # -- forward ------------------------------------------------------------------------------

    def forward(self, micro_batch: int, item: Message) -> None:
        """Run forward of one micro-batch with the version that the schedule names; send it on.

        Args:
            micro_batch: As the order says.
            item: Its input.

        Raises:
            ScheduleError: The feed brought another micro-batch.
        """
        feed = item.payload
        if not isinstance(feed, MicroBatch) or feed.micro_batch != micro_batch:
            raise ScheduleError(f"stage {self.index}: the order says F{micro_batch}, got {item}")
        version = self._reads(micro_batch)
        self.parameters.release(version)
        self.parameters.ledger.pin(micro_batch, version)
        self._next_forward = micro_batch + 1
        if feed.empty:
            self._in_flight[micro_batch] = _InFlight(hyper=feed.hyper or [], empty=True)
            self._send_forward(item, feed, version, None)
            return
        target = self._take_target(item.index) if self._job.is_last else None
        with self._busy():
            value, caught = self._enter(item, feed)
            with self.parameters.reading(micro_batch):
                output = self._layers(value, micro_batch)
            if target is not None:
                loss, reported = self._loss(output, target)
                self._check_finite(reported, micro_batch)
                outputs = [loss]
            else:
                outputs = [t for t in flatten(output)[1] if t.requires_grad]
        self._in_flight[micro_batch] = _InFlight(
            hyper=feed.hyper or [], caught=caught, outputs=outputs
        )
        self._send_forward(item, feed, version, reported if target is not None else output)

    def _reads(self, micro_batch: int) -> int:
        """The version that a forward reads: what the schedule says, but never loaded-over ones."""
        return max(self.parameters.ledger.floor, self._schedule.reads(self.index, micro_batch))

    def _enter(self, item: Message, feed: MicroBatch) -> tuple[Any, list[list[Tensor]]]:
        """The input value, and for its tensors that want a gradient, where that will be caught."""
        tensors = list(item.tensors)
        caught: list[list[Tensor]] = []
        for i, wanted in enumerate(feed.requires_grad):
            if wanted:
                caught.append([])
                leaf = tensors[i].requires_grad_()
                tensors[i] = _Boundary.apply(leaf, caught[-1])  # type: ignore[no-untyped-call]
        return unflatten(feed.structure, tensors), caught

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
        torch.default_generator.manual_seed(layer_seed(self._job.seed, number, name))

    def _take_target(self, position: int) -> Message:
        """The target of a position; sent by the coordinator together with the input."""
        return self._inbox.take(Key(Channel.TARGET, position), Deadline(self._timeout))

    def _loss(self, output: Any, message: Message) -> tuple[Tensor, float]:
        """Compute the loss.

        Returns:
            The loss weighted by the micro-batch's share of its mini-batch, and the plain one.

        Raises:
            ConfigError: It is not a scalar tensor.
        """
        target = message.payload
        assert isinstance(target, Target)
        assert self._job.loss_fn is not None
        loss = self._job.loss_fn(output, unflatten(target.structure, message.tensors))
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            found = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise ConfigError(
                f"loss_fn must return a tensor with one element, it returned {found}; "
                "reduce it, for instance with .mean()"
            )
        return loss * target.share if target.share != 1.0 else loss, float(loss.item())

    def _check_finite(self, reported: float, micro_batch: int) -> None:
        """Refuse to train on a loss that is NaN or infinite, unless told to."""
        if self._job.on_nan == "raise" and not math.isfinite(reported):
            raise NonFiniteLoss(
                f"stage {self.index}: the loss of micro-batch {micro_batch} is {reported}; "
                'lower the learning rate, look at the data, or pass on_nan="ignore"',
                stage=self.index,
                action=self.action,
            )

    def _send_forward(self, item: Message, feed: MicroBatch, version: int, output: Any) -> None:
        """Send the output to the next stage, or the loss to the coordinator."""
        trail = [*feed.trail, [version, self._busy_ns]]
        if self._job.is_last:
            self._send(COORDINATOR, item.index, Loss(loss=output, trail=trail), ())
            return
        structure, tensors = flatten(output)
        onward = MicroBatch(
            micro_batch=feed.micro_batch,
            mode=feed.mode,
            empty=feed.empty,
            hyper=feed.hyper,
            structure=structure,
            requires_grad=[t.requires_grad for t in tensors],
            trail=trail,
        )
        self._send(self.index + 1, item.index, onward, tuple(map(_outgoing, tensors)))

    # -- backward -----------------------------------------------------------------------------

    def backward(self, micro_batch: int) -> None:
        """Run backward of one micro-batch with the version its forward read; send it back.

        Gradients are added to the pending update; weights do not change here.

        Args:
            micro_batch: In flight on this stage.
        """
        flight = self._in_flight.pop(micro_batch)
        gradients = self._take_gradients(micro_batch, flight)
        with self._busy(), self.parameters.accumulating(micro_batch):
            self._seed(micro_batch, "backward")
            pairs = [(o, g) for o, g in zip(flight.outputs, gradients) if g is not None]
            if self._job.is_last and not flight.empty:
                flight.outputs[0].backward()
            elif pairs:
                torch.autograd.backward([o for o, _ in pairs], [g for _, g in pairs])
        self._hyper = flight.hyper
        self.parameters.ledger.unpin(micro_batch)
        if self.index > 0:
            self._send(
                self.index - 1,
                micro_batch,
                Gradient(present=[bool(c) for c in flight.caught]),
                tuple(own(gradient) for c in flight.caught for gradient in c),
            )

    def _take_gradients(self, micro_batch: int, flight: _InFlight) -> list[Tensor | None]:
        """Gradients of the outputs, from the next stage; the last stage needs none."""
        if self._job.is_last:
            return []
        message = self._inbox.take(Key(Channel.GRADIENT, micro_batch), Deadline(self._timeout))
        assert isinstance(message.payload, Gradient)
        tensors = iter(message.tensors)
        return [next(tensors) if there else None for there in message.payload.present]

    # -- step ---------------------------------------------------------------------------------

    def step(self, update: int) -> None:
        """Apply the gradients of an update to the newest version.

        Args:
            update: Its number; makes version ``update + 1``.

        Raises:
            ConfigError: There is no optimizer.
        """
        if self.optimizer is None:
            raise ConfigError("training needs an optimizer; give Pipeline one")
        apply, hyper = self.optimizer.step, self._hyper
        with self._busy():
            self._seed(update, "step")
            self.parameters.step(self._reads(self._next_forward), lambda: apply(hyper))

    # -- what is no training ------------------------------------------------------------------

    def _pass_through(self, item: Message, feed: MicroBatch) -> None:
        """Forward without gradient, with the newest weights: evaluation and inference."""
        self.action = f"{feed.mode.value} {item.index}"
        self._inbox.recent.append(self.action)
        evaluates = feed.mode is Mode.EVALUATE
        target = self._take_target(item.index) if evaluates and self._job.is_last else None
        with self._busy(), torch.no_grad(), self._eval_mode(evaluates):
            value = unflatten(feed.structure, item.tensors)
            output = self._layers(value, f"{feed.mode.value} {item.index}")
            reported = self._loss(output, target)[1] if target is not None else None
        version = self.parameters.ledger.newest
        if feed.mode is Mode.INFER and self._job.is_last:
            structure, tensors = flatten(output)
            trail = [*feed.trail, [version, self._busy_ns]]
            payload = Loss(loss=None, trail=trail, structure=structure)
            self._send(COORDINATOR, item.index, payload, tuple(map(_outgoing, tensors)))
            return
        self._send_forward(item, feed, version, reported if self._job.is_last else output)

    @contextmanager
    def _eval_mode(self, active: bool) -> Iterator[None]:
        """Switch every module to eval mode, and back to what each one was."""
        if not active:
            yield
            return
        modes = [(module, module.training) for module in self.module.modules()]
        self.module.eval()
        try:
            yield
        finally:
            for module, mode in modes:
                module.training = mode

    def _obey(self, item: Message, command: Command) -> None:
        """Carry out a command and reply."""
        self.action = command.name.value
        self._inbox.recent.append(self.action)
        argument = unflatten(command.structure, item.tensors) if command.structure else None
        with self._busy(), torch.no_grad():
            result = self._result_of(command.name, argument)
        self._reply(item.index, result)

    def _result_of(self, name: CommandName, argument: Any) -> object:
        """Do what a command says."""
        match name:
            case CommandName.STATE:
                return dict(self.module.state_dict())
            case CommandName.LOAD_STATE:
                self._load_state(argument)
            case CommandName.OPTIMIZER:
                self.set_optimizer(argument)
            case CommandName.OPTIMIZER_STATE:
                return self.optimizer.state() if self.optimizer else {}
            case CommandName.LOAD_OPTIMIZER_STATE:
                if self.optimizer:
                    self.optimizer.load_state(argument)
            case CommandName.TRAINING:
                self.module.train(argument)
            case CommandName.STATISTICS:
                return self.statistics()
            case CommandName.FLUSH:
                raise ScheduleError(f"stage {self.index}: a flush is no command to obey here")
        return None

    def _load_state(self, state: dict[str, Tensor]) -> None:
        """Load weights and buffers; versions before the newest are forgotten."""
        self.parameters.reset(lambda: _load(self.module, state))

    def set_optimizer(self, pickled: bytes) -> None:
        """Build the optimizer from a pickled `OptimizerSpec`; its state starts empty."""
        spec: OptimizerSpec = cloudpickle.loads(pickled)
        self.optimizer = StageOptimizer(spec, self.parameters.named)

    def statistics(self) -> dict[str, int]:
        """Counters of this stage, for `Pipeline.explain` and the benchmarks."""
        return {
            "stage": self.index,
            "busy_ns": self._busy_ns,
            "updates": self.parameters.ledger.newest,
            "versions_kept": len(self.parameters.ledger.kept),
            "versions_kept_most": self.parameters.ledger.kept_most,
            "buffers_allocated": self.parameters.allocated,
            "parameters": sum(p.numel() for p in self.module.parameters()),
            "peak_memory_bytes": peak_memory_bytes(),
        }

    def _reply(self, position: int, result: object) -> None:
        """Send the result of a command to the coordinator."""
        structure, tensors = flatten(result)
        # Copies: what was asked for must not change under the reader with the next update.
        copies = tuple(own(t, copy=True) for t in tensors)
        self._send(COORDINATOR, position, Reply(structure=structure), copies)

    @contextmanager
    def _busy(self) -> Iterator[None]:
        """Count the time of a computation, and keep other stages of this process out."""
        with self._computing():
            start = time.perf_counter_ns()
            try:
                yield
            finally:
                self._busy_ns += time.perf_counter_ns() - start


def _outgoing(tensor: Tensor) -> Tensor:
    """An output as it is sent: not to be changed until it has left.

    What requires a gradient is kept by autograd and changed by nobody; anything else may be a
    buffer or a workspace of the module, which its next forward overwrites.
    """
    return own(tensor, copy=not tensor.requires_grad)


def peak_memory_bytes() -> int:
    """Largest resident memory that this process has had.

    From Linux's own count: ``getrusage`` starts a process with the peak of the one that started it.
    """
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _load(module: nn.Module, state: dict[str, Tensor]) -> None:
    """Load a state dict, with the keys of this module alone."""
    module.load_state_dict({name: state[name] for name in module.state_dict()})
