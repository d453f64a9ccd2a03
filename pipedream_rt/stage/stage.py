"""One stage: what it does with a micro-batch.

Read from top to bottom: `forward`, `backward`, `step`, in the order in which a micro-batch meets
them; evaluation and commands follow. `stage.loop` says when.
"""

from __future__ import annotations

import math
import resource
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import cloudpickle
import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from pipedream_rt.checkpoint import StageState, read_stage, write_stage
from pipedream_rt.errors import ConfigError, NonFiniteLoss, ScheduleError
from pipedream_rt.messages.message import (
    COORDINATOR,
    Command,
    CommandName,
    Gradient,
    Loss,
    Message,
    MicroBatch,
    Mode,
    Payload,
    Reply,
    Saved,
    Send,
    Target,
)
from pipedream_rt.messages.message import Job as JobMessage
from pipedream_rt.messages.tree import flat_copy, flatten, own, unflatten
from pipedream_rt.stage.optimizer import Hyper, OptimizerSpec, StageOptimizer
from pipedream_rt.stage.parameters import VersionedParameters
from pipedream_rt.stage.seeds import layer_seed
from pipedream_rt.stage.spec import StageJob
from pipedream_rt.stage.split_backward import SplitBackward

_CHANGED_IN_BACKWARD = (
    "a layer changes its buffers in its backward, as BatchNorm inside torch's checkpoint does, so "
    "they have no state between two micro-batches while others are in flight; call save() at the "
    "end of an epoch, or take the layer out of torch's checkpoint"
)
"""Why a stage cannot save without a flush."""


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
    """What backward needs of a forward.

    Attributes:
        position: Of its feed.
        caught: For each input tensor that wants a gradient, the list that it will come to.
        entrances: The autograd nodes at which they are caught.
        outputs: Output tensors that require a gradient; the weighted loss on the last stage.
        hyper: Hyper-parameters that travelled with the micro-batch.
        split: Its backward, when half of it is done; None where nothing is left to do.
    """

    position: int
    hyper: list[Hyper]
    caught: list[list[Tensor]] = field(default_factory=list)
    entrances: list[Node] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)
    split: SplitBackward | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Saving:
    """A checkpoint that waits for its update; see `Stage.save`."""

    folder: Path
    step: int
    position: int
    buffers: dict[str, Tensor]
    hidden: dict[str, Tensor]


class Stage:
    """One stage of the pipeline. Every method runs on the one thread of its worker.

    Args:
        job: What to run.
        send: Hands messages to the transport.
        computing: Entered around every computation; keeps stages of one process apart.

    Attributes:
        position: The next one of the feed.
        next_forward: The next micro-batch to train on.
        ended: Micro-batches whose gradients are in an update, pending or done.
        action: What it does or did last, for a report.
        held_up_ns: How long it has waited for ``computing``.
        sent_bytes: Of tensors; set back by whoever counts.
    """

    def __init__(
        self,
        job: StageJob,
        send: Send,
        computing: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """Nothing runs yet."""
        self.index = job.stage
        self.is_last = job.is_last
        self.module: nn.Sequential = job.layers
        self.action = "start"
        self._job = job
        self._schedule = job.schedule
        self._transport_send = send
        self._computing = computing
        self.parameters = VersionedParameters(self.module, self.index)
        self.optimizer: StageOptimizer | None = None
        self.position = self.next_forward = self.ended = 0
        self._in_flight: dict[int, _InFlight] = {}
        self._hyper: list[Hyper] = []
        self._busy_ns = self.held_up_ns = self.sent_bytes = 0
        self._saving: _Saving | None = None
        self._writer: ThreadPoolExecutor | None = None

    def begin(self, start: JobMessage) -> None:
        """Take up the state that a job describes, before anything else."""
        if start.optimizer:
            self.set_optimizer(start.optimizer)
        if start.training is not None:
            self.module.train(start.training)
        if start.restore is not None:
            with torch.no_grad():
                self.load(**start.restore)
        self.position = start.position

    def _send(self, to: int, index: int, payload: Payload, tensors: tuple[Tensor, ...]) -> None:
        """Hand a message to the transport, and count its bytes."""
        self.sent_bytes += sum(t.nbytes for t in tensors)
        self._transport_send(to, index, payload, tensors)

    # -- forward ------------------------------------------------------------------------------

    def forward(self, micro_batch: int, item: Message, target: Message | None) -> int:
        """Run forward of one micro-batch with the version that the schedule names; send it on.

        Args:
            micro_batch: As the order says.
            item: Its input.
            target: What the loss compares with, on the last stage.

        Returns:
            The weight version that it read.

        Raises:
            ScheduleError: The feed brought another micro-batch.
        """
        feed = item.payload
        if not isinstance(feed, MicroBatch) or feed.micro_batch != micro_batch:
            raise ScheduleError(f"stage {self.index}: the order says F{micro_batch}, got {item}")
        version = self._reads(micro_batch)
        self.parameters.release(version)
        self.parameters.ledger.pin(micro_batch, version)
        self.next_forward = micro_batch + 1
        flight = self._in_flight[micro_batch] = _InFlight(
            position=item.index, hyper=feed.hyper or []
        )
        if feed.empty:
            self._send_forward(item, feed, version, None)
            return version
        with self._busy():
            value = self._enter(item, feed, flight)
            with self.parameters.reading(micro_batch):
                output = self._layers(value, micro_batch)
            if target is not None:
                loss, reported = self._loss(output, target)
                self._check_finite(reported, micro_batch)
                flight.outputs = [loss]
            else:
                flight.outputs = [t for t in flatten(output)[1] if t.requires_grad]
        self._send_forward(item, feed, version, reported if target is not None else output)
        return version

    def _reads(self, micro_batch: int) -> int:
        """The version that a forward reads: what the schedule says, but never loaded-over ones."""
        return max(self.parameters.ledger.floor, self._schedule.reads(self.index, micro_batch))

    def _enter(self, item: Message, feed: MicroBatch, flight: _InFlight) -> Any:
        """The input value; for its tensors that want a gradient, it is noted where it will come."""
        tensors = list(item.tensors)
        for i, wanted in enumerate(feed.requires_grad):
            if wanted:
                flight.caught.append([])
                leaf = tensors[i].requires_grad_()
                inside: Tensor = _Boundary.apply(leaf, flight.caught[-1])  # type: ignore[no-untyped-call]
                assert inside.grad_fn is not None
                # Before a layer works on it in place and gives it another node.
                flight.entrances.append(inside.grad_fn)
                tensors[i] = inside
        return unflatten(feed.structure, tensors)

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
        if self.is_last:
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

    def backward(self, micro_batch: int, message: Message | None) -> int:
        """Run backward of one micro-batch with the version its forward read; send it back.

        Gradients are added to the pending update; weights do not change here.

        Args:
            micro_batch: In flight on this stage.
            message: The gradients of its outputs; None on the last stage.

        Returns:
            The weight version that it read.
        """
        flight = self._in_flight.pop(micro_batch)
        outputs, gradients = self._to_derive(flight, message)
        with self._busy(), self._watching_buffers(), self.parameters.accumulating(micro_batch):
            self._seed(micro_batch, "backward")
            if outputs:
                torch.autograd.backward(outputs, gradients)
        version = self._end(micro_batch, flight)
        self._send_back(flight)
        return version

    def backward_input(self, micro_batch: int, message: Message | None) -> int:
        """Run the half of a backward that the stage before waits for, and send it back.

        Args:
            micro_batch: In flight on this stage.
            message: The gradients of its outputs; None on the last stage.

        Returns:
            The weight version that it reads.
        """
        flight = self._in_flight[micro_batch]
        outputs, gradients = self._to_derive(flight, message)
        with self._busy(), self._watching_buffers(), self.parameters.reading(micro_batch):
            if outputs:
                leaves = self.parameters.leaves(micro_batch)
                flight.split = SplitBackward(outputs, gradients, flight.entrances, leaves)
                self._seed(micro_batch, "backward")
                flight.split.first_half()
        flight.outputs = []
        self._send_back(flight)
        return self.parameters.ledger.pinned(micro_batch)

    def backward_weight(self, micro_batch: int) -> int:
        """Run the other half: gradients are added to the pending update.

        Args:
            micro_batch: Whose `backward_input` is done.

        Returns:
            The weight version that it read.
        """
        flight = self._in_flight.pop(micro_batch)
        with self._busy(), self._watching_buffers(), self.parameters.accumulating(micro_batch):
            self._seed(micro_batch, "backward")
            if flight.split is not None:
                flight.split.second_half()
        return self._end(micro_batch, flight)

    def _to_derive(
        self, flight: _InFlight, message: Message | None
    ) -> tuple[list[Tensor], list[Tensor | None]]:
        """The outputs that a backward starts from, with their gradients.

        Nothing where the micro-batch is empty, or the stage after needs no gradient of anything.
        """
        if message is None:
            return flight.outputs, [None] * len(flight.outputs)
        assert isinstance(message.payload, Gradient)
        tensors = iter(message.tensors)
        gradients = [next(tensors) if there else None for there in message.payload.present]
        pairs = [(o, g) for o, g in zip(flight.outputs, gradients) if g is not None]
        return [o for o, _ in pairs], [g for _, g in pairs]

    def _end(self, micro_batch: int, flight: _InFlight) -> int:
        """Note that the gradients of a micro-batch are in the pending update.

        Returns:
            The weight version that it read.
        """
        self._hyper = flight.hyper
        self.ended = micro_batch + 1
        return self.parameters.ledger.unpin(micro_batch)

    def position_of(self, micro_batch: int) -> int:
        """Return the position of the feed at which a micro-batch in flight came.

        Raises:
            ScheduleError: It is not in flight.
        """
        flight = self._in_flight.get(micro_batch)
        if flight is None:
            raise ScheduleError(
                f"stage {self.index}: the order wants the backward of micro-batch {micro_batch}; "
                f"in flight are {list(self._in_flight)}"
            )
        return flight.position

    def _send_back(self, flight: _InFlight) -> None:
        """Send the gradients of the stage's input to the stage before."""
        if self.index > 0:
            self._send(
                self.index - 1,
                flight.position,
                Gradient(present=[bool(c) for c in flight.caught]),
                tuple(own(gradient) for c in flight.caught for gradient in c),
            )

    # -- step ---------------------------------------------------------------------------------

    def step(self, update: int) -> int:
        """Apply the gradients of an update to the newest version.

        Args:
            update: Its number; makes version ``update + 1``.

        Returns:
            The version made.

        Raises:
            ConfigError: There is no optimizer.
        """
        if self.optimizer is None:
            raise ConfigError("training needs an optimizer; give Pipeline one")
        apply, hyper = self.optimizer.step, self._hyper
        with self._busy():
            self._seed(update, "step")
            self.parameters.step(self._reads(self.next_forward), lambda: apply(hyper))
            with torch.no_grad():
                self._save_if_due()
        return self.parameters.ledger.newest

    # -- what is no training ------------------------------------------------------------------

    def pass_through(self, item: Message, feed: MicroBatch, target: Message | None) -> None:
        """Forward without gradient, with the newest weights: evaluation and inference."""
        with self._busy(), torch.no_grad(), self._eval_mode(feed.mode is Mode.EVALUATE):
            value = unflatten(feed.structure, item.tensors)
            output = self._layers(value, f"{feed.mode.value} {feed.micro_batch}")
            reported = self._loss(output, target)[1] if target is not None else None
        version = self.parameters.ledger.newest
        if feed.mode is Mode.INFER and self.is_last:
            structure, tensors = flatten(output)
            trail = [*feed.trail, [version, self._busy_ns]]
            payload = Loss(loss=None, trail=trail, structure=structure)
            self._send(COORDINATOR, item.index, payload, tuple(map(_outgoing, tensors)))
            return
        self._send_forward(item, feed, version, reported if self.is_last else output)

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

    def obey(self, item: Message, command: Command) -> None:
        """Carry out a command and reply."""
        argument: Any = unflatten(command.structure, item.tensors) if command.structure else None
        with self._busy(), torch.no_grad():
            if command.name is CommandName.SAVE:
                self.save(**argument, position=item.index)  # which replies when it is written
                return
            result = self._result_of(command.name, argument)
        self.reply(item.index, result)

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
            case CommandName.LOAD:
                return self.load(**argument)
            case CommandName.FLUSH | CommandName.TRACE | CommandName.SAVE:
                raise ScheduleError(f"stage {self.index}: {name.value} has no result of its own")
        return None

    def _load_state(self, state: dict[str, Tensor]) -> None:
        """Load weights and buffers; versions before the newest are forgotten."""
        self.parameters.reset(lambda: _load(self.module, state))

    def save(self, folder: str, step: int, position: int) -> None:
        """Write this stage's files of a checkpoint as of an update, without stopping for it.

        Called after the last forward before the update's next one, so buffers are copied now; the
        rest when the update is done. A thread writes the copies and replies with what `write_stage`
        returns, or with why it could not, which must not end the training.

        Args:
            folder: Of the checkpoint.
            step: Updates done.
            position: Of the command.
        """
        # By identity, for a weight that is shared has several names.
        trained = {id(parameter) for parameter in self.parameters.named.values()}
        state = self.module.state_dict(keep_vars=True)
        rest = {n: t for n, t in state.items() if id(t) not in trained}
        for name, value in rest.items():
            if not isinstance(value, Tensor):
                self._tell_saved(position, f"{name} is a {type(value).__name__}, not a tensor")
                return
        self._saving = _Saving(
            folder=Path(folder),
            step=step,
            position=position,
            buffers={name: _copy(tensor) for name, tensor in rest.items()},
            hidden={n: _copy(b) for n, b in self.module.named_buffers() if n not in state},
        )
        self._save_if_due()

    @contextmanager
    def _watching_buffers(self) -> Iterator[None]:
        """Give a checkpoint up whose buffers a backward changes, after they were copied for it."""
        saving = self._saving
        if saving is None:
            yield
            return
        before = [(name, b, b._version) for name, b in self.module.named_buffers()]
        yield
        after = [(name, b, b._version) for name, b in self.module.named_buffers()]
        same = [(n, id(b), v) for n, b, v in before] == [(n, id(b), v) for n, b, v in after]
        if not same:
            self._saving = None
            self._tell_saved(saving.position, _CHANGED_IN_BACKWARD)

    def _save_if_due(self) -> None:
        """Copy what a checkpoint needs, once its update is done."""
        saving = self._saving
        if saving is None or self.parameters.ledger.newest < saving.step:
            return
        self._saving = None
        optimizer = self.optimizer.state() if self.optimizer else {}
        state = StageState(
            weights={
                name: saving.buffers[name] if name in saving.buffers else _copy(tensor)
                for name, tensor in self.module.state_dict().items()
            },
            hidden=saving.hidden,
            optimizer={
                parameter: {k: _copy(v) if isinstance(v, Tensor) else v for k, v in values.items()}
                for parameter, values in optimizer.items()
            },
            versions={
                version: {name: _copy(tensor) for name, tensor in named.items()}
                for version, named in self.parameters.older().items()
            },
        )
        if self._writer is None:
            self._writer = ThreadPoolExecutor(1, thread_name_prefix=f"checkpoint-{self.index}")
        self._writer.submit(self._write, saving, state)

    def _write(self, saving: _Saving, state: StageState) -> None:
        """Write a checkpoint's files and reply; on a thread of its own, on copies alone."""
        result: object
        try:
            result = list(write_stage(saving.folder, self.index, self._schedule.num_stages, state))
        except Exception as error:  # the top of a thread; whatever it is, the training goes on
            result = str(error)
        self._tell_saved(saving.position, result)

    def _tell_saved(self, position: int, result: object) -> None:
        """Send the outcome of `save` to the coordinator."""
        payload = Saved(structure=flatten(result)[0])
        self._transport_send(COORDINATOR, position, payload, ())

    def close(self) -> None:
        """Wait for a checkpoint that is being written."""
        if self._writer is not None:
            self._writer.shutdown()

    def load(self, folder: str, step: int, plain: dict[str, Any], floor: int) -> bool:
        """Go on from a checkpoint that was verified. Nothing must be in flight.

        Args:
            folder: Of the checkpoint.
            step: Updates done.
            plain: What of the optimizer state is no tensor.
            floor: Oldest weight version that may be read.

        Returns:
            Whether every version is there that a micro-batch to come reads; else the newest is read
            in the place of those before it.
        """
        first = step * self._schedule.per_update
        read = max(floor, self._schedule.reads(self.index, first))
        names = list(self.parameters.named)
        slots = buffer_slots(self.module)
        keys = [key for key in self.module.state_dict() if key not in slots]
        state = read_stage(Path(folder), keys, names, list(slots), plain)
        needed = range(read, step) if names else range(0)
        whole = all(version in state.versions for version in needed)
        older = {version: state.versions[version] for version in needed} if whole else {}
        _load_buffers(self.module, state.hidden)
        self.parameters.restore(step, older, lambda: _load(self.module, state.weights))
        self.next_forward = self.ended = first
        if self.optimizer is not None:
            self.optimizer.load_state(state.optimizer)
        return whole

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

    def reply(self, position: int, result: object) -> None:
        """Send the result of a command to the coordinator."""
        # Copies: what was asked for must not change under the reader with the next update.
        structure, copies = flat_copy(result)
        self._send(COORDINATOR, position, Reply(structure=structure), copies)

    @contextmanager
    def _busy(self) -> Iterator[None]:
        """Count the time of a computation, and keep other stages of this process out."""
        asked = time.perf_counter_ns()
        with self._computing():
            start = time.perf_counter_ns()
            self.held_up_ns += start - asked
            try:
                yield
            finally:
                self._busy_ns += time.perf_counter_ns() - start


def _copy(tensor: Tensor) -> Tensor:
    """A copy for a file: contiguous, and in a storage of its own."""
    return tensor.detach().clone(memory_format=torch.contiguous_format)


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


def buffer_slots(module: nn.Module) -> dict[str, list[tuple[nn.Module, str]]]:
    """Where a module keeps its buffers, those included that are None: by name, all that share one.

    ``named_buffers`` leaves out those that are None, and all names of a buffer but the first.
    """
    found: dict[str, list[tuple[nn.Module, str]]] = {}
    by_tensor: dict[int, list[tuple[nn.Module, str]]] = {}
    for prefix, owner in module.named_modules():
        for short, buffer in owner._buffers.items():
            shared = [] if buffer is None else by_tensor.setdefault(id(buffer), [])
            shared.append((owner, short))
            found[f"{prefix}.{short}" if prefix else short] = shared
    return found


def _load_buffers(module: nn.Module, state: dict[str, Tensor]) -> None:
    """Load buffers, in place where they fit: others may hold them too."""
    for name, slots in buffer_slots(module).items():
        if name not in state:
            continue
        owner, short = slots[0]
        current, saved = owner._buffers[short], state[name]
        if current is not None and (current.shape, current.dtype) == (saved.shape, saved.dtype):
            current.copy_(saved)
            continue
        made = saved.clone()
        for holder, its_name in slots:
            holder._buffers[its_name] = made


def _load(module: nn.Module, state: dict[str, Tensor]) -> None:
    """Load a state dict, with the keys of this module alone; what is not there is not loaded."""
    keys = module.state_dict()
    module.load_state_dict({k: state[k] for k in keys if k in state}, strict=False)
