"""The host of a worker's stages: it builds them, runs them on one thread, and reports errors."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import cloudpickle
import torch
from torch import Tensor, nn

from pipedream_rt.containers import opened
from pipedream_rt.deadline import Deadline
from pipedream_rt.devices import HOST, Device, OwnDevice, device_for
from pipedream_rt.errors import (
    CheckpointError,
    NonFiniteLoss,
    PipelineClosed,
    PipelineError,
    TransportError,
)
from pipedream_rt.lifecycle import name_this_thread
from pipedream_rt.messages.inbox import Inbox, Steps, Waiter, Wanted
from pipedream_rt.messages.message import (
    Failed,
    Key,
    Message,
    Ready,
    Sender,
    Start,
    digest_of,
)
from pipedream_rt.models.code import refuse_other_code
from pipedream_rt.models.program import Step
from pipedream_rt.models.settings import apply_settings
from pipedream_rt.models.shipping import loads
from pipedream_rt.schedules import COORDINATOR, Edge, EdgeKind
from pipedream_rt.stage.commands import define
from pipedream_rt.stage.loop import Doing, Loop, LoopOptions
from pipedream_rt.stage.process_memory import give_memory_back_at_once
from pipedream_rt.stage.rules.corrections import Corrections
from pipedream_rt.stage.saving import remove_part, restore_stage
from pipedream_rt.stage.spec import StageSpec
from pipedream_rt.stage.stage import Stage
from pipedream_rt.telling import log_of
from pipedream_rt.tracing.spans import Recorder

_log = log_of(__name__)


class StageHost:
    """The stages of one worker with their inbox.

    Attributes:
        name: The name for messages: ``"stage 2"``, or ``"worker 1"`` if it hosts several stages.
    """

    def __init__(
        self,
        worker: int,
        name: str,
        stages: Sequence[int],
        generation: int,
        send: Sender,
        timeout: timedelta,
        threads: int,
        announce: Callable[[str], None] = lambda action: None,
        own_process: bool = False,
        waiter: Waiter | None = None,
        device: OwnDevice = OwnDevice(),  # noqa: B008 - a tuple
    ) -> None:
        self.worker = worker
        self.name = name
        self.inbox = Inbox(self.name, generation, waiter)
        self._stages: dict[int, Stage] = {}  # by address
        self._loop: Loop | None = None
        self._parts: list[Path] = []
        self._doing = Doing(stages[0])
        self._indices = stages  # addresses, in the order of the model
        self._send = send
        self._timeout = timeout
        self._threads = threads
        self._announce = announce
        self._own_process = own_process  # whether nothing else runs in this process
        self._generation = generation
        self._own_device = device
        self._device: Device = HOST

    @property
    def plain_name(self) -> str:
        """The name without spaces and commas, for threads and lists of workers."""
        return self.name.replace(",", "").replace(" ", "-")

    def serve(self) -> None:
        """Build the stages; run them on this thread until the inbox is closed. Raises nothing."""
        name_this_thread(self.plain_name)
        torch.set_num_threads(self._threads)
        try:
            self.inbox.follow(self.run())
        except PipelineClosed:  # the reason of a normal end
            pass
        except BaseException as error:  # the top of a thread: errors become messages
            self.report(error)
        finally:
            self.end()

    def end(self) -> None:
        """Wait until no checkpoint is being written, and let go of the stages."""
        if self._loop is not None:
            self._loop.close()
            self._parts = self._loop.parts()  # for `remove_parts`, which may come later
        self._device.close()
        # A module may hold threads or files of its own, and its tensors are large.
        self._stages, self._loop = {}, None

    def part(self, index: int, part: str) -> Any:
        """Return the ``"module"``, trainable ``"parameters"``, ``"optimizer"`` or ``"stage"``."""
        stage = self._stages.get(index)
        if stage is None:
            raise PipelineClosed(f"{self.inbox.titles(index)} has ended")
        if part in ("module", "stage"):
            return stage.module if part == "module" else stage
        if part == "parameters":
            return list(stage.parameters.named.values())
        return stage.optimizer and stage.optimizer.torch_optimizer

    def remove_parts(self) -> None:
        """Remove the files of a checkpoint that nobody can finish. Any thread."""
        # The stages may have ended by now, which they do by themselves where their links break.
        loop = self._loop
        for part in self._parts if loop is None else loop.parts():
            remove_part(part)

    def run(self) -> Steps[None]:
        """Build each stage from its `Start` message, reply `Ready`, and run all of them."""
        yield from self._build()
        loop = self._loop
        assert loop is not None
        steps = loop.run()
        if self._device is HOST:
            yield from steps
        else:
            yield from _on(self._device, steps)

    def _build(self) -> Steps[None]:
        """Build each stage from its `Start` message, and reply `Ready`."""
        for index in self._indices:
            self._doing.stage = index
            key = Key(Edge(EdgeKind.START, COORDINATOR, index), 0)
            message = yield Wanted(key, Deadline(self._timeout))
            start, spec = _spec_of(message, self._own_process)
            self.inbox.titles = spec.plan.title_of
            apply_settings(spec.settings)
            if not self._stages:  # the stages of a worker share its device
                self._device = self._device_of(spec)
                if self._own_process:
                    self._device.settle_in()
                    # Else tensors would be made on the device that the script has as default.
                    if torch.get_default_device().type != "cpu":
                        torch.set_default_device(self._device.name)
            with self._device.entered():
                spec.build(self._device)
                if spec.recompute and self._own_process:  # it holds for the whole process
                    give_memory_back_at_once()
                self._stages[index] = _begun(Stage(spec, index, self._device), start)
            ready = Key(Edge(EdgeKind.READY, index, COORDINATOR), self._generation)
            self._send(ready, Ready(), ())
        shown = spec.trace_shown and spec.trace_shown.open(f"worker-{self.worker}")
        options = LoopOptions(
            timeout=self._timeout,
            recorder=Recorder(spec.trace_spans, shown) if spec.trace_spans else None,
            announce=self._announce,
            announced=start.announced,
            failed=self._failed,
        )
        stages = list(self._stages.values())
        send = self._device.sending(self._send, self.inbox.close)
        self._loop = Loop(stages, self.worker, self.inbox, send, options)
        self._doing = self._loop.doing

    def _device_of(self, spec: StageSpec) -> Device:
        plan = spec.plan
        return device_for(
            spec.devices,
            self.worker,
            self._own_device,
            [plan.stages_of(worker) for worker in range(plan.workers)],
            threaded=self._own_process,
            name=self.plain_name,
        )

    def _where(self, error: BaseException) -> str:
        """Return in words which layer raised an error, on what input, and what to do about it."""
        stage = self._stages.get(self._doing.stage)
        if isinstance(error, PipelineError) or stage is None:
            return ""
        corrections = stage.rule(Corrections)
        if corrections is not None and corrections.at:
            return f", in {corrections.at}"
        if stage.runner.at is None:
            return advice_on(error, None)
        step, value = stage.runner.at
        layer = None if step.layer is None else stage.module.get_submodule(step.layer)
        return f", {place_of(step, layer, value)}{advice_on(error, value)}"

    def report(self, error: BaseException) -> None:
        """Send an error to the coordinator, and close the inbox."""
        failed = self._failed(error)
        self._send(Key(Edge(EdgeKind.FAILED, failed.address, COORDINATOR), 0), failed, ())
        self.inbox.close(error)

    def _failed(self, error: BaseException) -> Failed:
        """Return an error of the present action as data, with its pickle if there can be one."""
        index, action = self._doing.stage, str(self._doing.action)
        if isinstance(error, NonFiniteLoss):  # of a forward that may be a while ago
            action = error.action
        name = type(error).__qualname__
        try:
            text, trace = str(error) + self._where(error), trace_of(error)
        except Exception as problem:  # the error's own __str__ may raise
            text = trace = f"(the error has no text: its __str__ raised {type(problem).__name__})"
        try:
            pickled = cloudpickle.dumps(error)
            loads(pickled)  # an error may pickle and yet not load
        except Exception:  # its pickling may raise too; the text is enough
            pickled = b""
        _log.debug("%s, %s: %s", self.name, action, error, exc_info=error)
        return Failed(
            address=index,
            action=action,
            type_name=name,
            text=text,
            trace=trace,
            pickled=pickled,
        )


def _on(device: Device, steps: Steps[None]) -> Steps[None]:
    """Run steps inside the context of a device, to which the tensors of messages are moved."""
    try:
        with device.entered():
            wanted = next(steps)
        while True:
            # The context is left before a yield, in which other hosts of this thread may run.
            message = yield wanted
            with device.entered():
                wanted = steps.send(device.taken(message))
    finally:
        steps.close()


def _spec_of(message: Message, own_process: bool) -> tuple[Start, StageSpec]:
    """Return the `Start` of a stage and its specification; refuse one of another digest."""
    start, (data, *buffers) = message.payload, message.tensors
    assert isinstance(start, Start)
    # Before it is loaded, since a pickle may run any code.
    if digest_of(message.tensors) != start.digest:
        raise TransportError(
            f"the specification for address {message.to} does not match the digest in its start "
            "message, so it was damaged or changed on its way; start again"
        )
    if not own_process:  # they are the coordinator's, which keeps them for recoveries
        buffers = [buffer.clone() for buffer in buffers]
    spec: StageSpec = loads(data.numpy().data, buffers=[buffer.numpy().data for buffer in buffers])
    if own_process and spec.code is not None:
        refuse_other_code(spec.own_code(), spec.code)
    return start, spec


def _begun(stage: Stage, start: Start) -> Stage:
    """Return a stage with the optimizer, the mode and the state that its `Start` describes."""
    if start.optimizer:
        stage.set_optimizer(start.optimizer)
    define(stage, start.definitions)
    if start.training is not None:
        stage.passes.modes.set(stage.module, start.training)
    if start.restore is not None and not restore_stage(stage, **start.restore):
        raise CheckpointError(
            f"{start.restore['folder']} lacks older weight versions that stage {stage.index} read "
            "before the recovery, so the run cannot go on with the same bits; begin a new run from "
            "it with resume=True, which reads the newest version in their place"
        )
    return stage


_NOT_THE_USERS = (
    str(Path(__file__).resolve().parent.parent),
    str(Path(torch.__file__).resolve().parent),
)


def place_of(step: Step, layer: nn.Module | None, value: Any) -> str:
    """Return in words where an error happened; without a layer, the step calls a function."""
    if layer is None:
        return f"in {step.name} at {step.where}, whose input was {described(value)}"
    kind = type(layer).__name__
    return f"in layer {step.layer!r} ({kind}), whose input was {described(value)}"


def described(value: Any) -> str:
    """Return the shapes and dtypes in a value, in words."""
    if isinstance(value, Tensor):
        return f"a {str(value.dtype).removeprefix('torch.')} tensor {tuple(value.shape)}"
    kind, held = f"a {type(value).__name__}", opened(value)
    if held is None:
        return kind
    keys, inside = held[0], list(map(described, held[1]))
    if isinstance(value, tuple | list):
        return f"{kind} of {len(value)}: {', '.join(inside)}"
    return f"{kind} of {', '.join(f'{k!r}: {part}' for k, part in zip(keys, inside))}"


def advice_on(error: BaseException, value: Any) -> str:
    """Return the advice about an error of a layer; empty where there is none."""
    counts = isinstance(error, TypeError) and "positional argument" in str(error)
    if counts and isinstance(value, tuple | list):
        return (
            f". A layer gets one value, here a {type(value).__name__} of {len(value)}: take it "
            "apart in forward, as forward(self, pair)"
        )
    if isinstance(error, RuntimeError) and "modified by an inplace operation" in str(error):
        return (
            ". Something that the backward needs was changed in place before it ran, because other "
            "micro-batches pass in between. If it is a buffer, let forward use a clone of it"
        )
    if isinstance(error, RuntimeError) and "tensors to be on the same device" in str(error):
        return (
            ". What a layer or the loss holds and is no parameter or buffer stays where it was "
            "made: register it as a buffer, or write .to(x.device) where it is used"
        )
    return ""


def trace_of(error: BaseException) -> str:
    """Return the traceback with the user's own lines alone, in causes too, if there are any."""
    shown = traceback.TracebackException.from_exception(error)
    found = False
    seen: set[int] = set()
    parts: list[traceback.TracebackException | None] = [shown]
    while parts:
        part = parts.pop()
        if part is None or id(part) in seen:
            continue
        seen.add(id(part))
        own = [frame for frame in part.stack if not frame.filename.startswith(_NOT_THE_USERS)]
        found = found or bool(own)
        part.stack = traceback.StackSummary.from_list(own)
        parts += [part.__cause__, part.__context__]
    if not found:  # the error is ours or torch's: all lines count
        return "".join(traceback.format_exception(error))
    return "".join(shown.format())
