"""The profiler: measures what each layer of a model costs, on this machine, for `plan`.

The model is cut behind every layer, as the runtime would cut it. Each part is timed by itself on
its real input: its forward, its backward for its input, its backward for its weights, and an
update. Nothing of PyTorch is patched, and afterwards the model is as before.
"""

from __future__ import annotations

import gc
import inspect
import logging
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from pipedream_rt.errors import ConfigError
from pipedream_rt.job.batches import Batch, example_of
from pipedream_rt.job.cutting import cut_batch, micro_batch_sizes, samples_of
from pipedream_rt.job.forwards import RecordedForwards
from pipedream_rt.job.splitting import ForwardOptions, split_model
from pipedream_rt.job.unsplit_model import UnsplitModel
from pipedream_rt.messages.tree import flat_copy
from pipedream_rt.models.cut import StageProgram
from pipedream_rt.models.program import (
    Slot,
    Step,
    filled,
    found,
    held_by,
    on_device,
    put,
    replaced,
)
from pipedream_rt.models.tensors import home_of
from pipedream_rt.planning import files
from pipedream_rt.planning.profile import LayerCosts, Profile
from pipedream_rt.schedules import COORDINATOR
from pipedream_rt.software import processor
from pipedream_rt.stage.seeds import kept_generator_state
from pipedream_rt.stage.spec import LossFunction, has_own_loss, own_loss, total_of

_log = logging.getLogger(__name__)

Optimizer = tuple[type[torch.optim.Optimizer], Mapping[str, Any]]
"""The class of an optimizer, and its arguments."""

# A process with what a worker imports, without a stage.
_IMPORTS = "import pipedream_rt.transport.rpc.endpoint, pipedream_rt.stage.host"
_PRINTS = "from pipedream_rt.stage.memory import peak_memory_bytes; print(peak_memory_bytes())"
_START_S = 120.0


def profile(
    model: nn.Module | Iterable[nn.Module],
    batch: Any,
    *,
    loss_fn: LossFunction | None = None,
    optimizer: object = None,
    autocast: torch.dtype | None = None,
    repeats: int = 5,
    warm_up: int = 2,
) -> Profile:
    """Measure what each layer of a model costs for one micro-batch.

    Example::

        found = profile(model, next(iter(loader)), loss_fn=F.cross_entropy,
                        optimizer=(torch.optim.AdamW, {"lr": 3e-4}))

    Times are medians in this process: give it as many threads as a worker will have
    (`torch.set_num_threads`). A model on an accelerator is measured there, from the launch of a
    layer until the device has done it.

    Args:
        model: A model that a `Pipeline` takes.
        batch: One micro-batch, as the loader of the pipeline would yield it.
        loss_fn: The loss function; None if the model computes its loss itself, or for the sum of
            its output.
        optimizer: The optimizer, as a `Pipeline` takes it; all groups count as alike. None for
            updates that cost nothing.
        autocast: The dtype of autocast; None for none.
        repeats: How often everything is timed.
        warm_up: How often everything is done before that, untimed.

    Raises:
        ConfigError: The model cannot be cut, the batch is none, or a number is out of range.
    """
    if type(repeats) is not int or type(warm_up) is not int or repeats < 1 or warm_up < 0:
        raise ConfigError(
            f"repeats must be at least 1 and warm_up at least 0, not {repeats} and {warm_up}"
        )
    if torch.is_inference_mode_enabled():
        raise ConfigError("nothing can be measured in torch.inference_mode, as it has no backward")
    made = None if optimizer is None else optimizer_choice(optimizer)
    if optimizer is not None and made is None:
        raise ConfigError(
            "the optimizer must be a pair of a class and its arguments, or an optimizer of torch, "
            f"not {optimizer!r}"
        )
    unsplit, example = UnsplitModel(model, loss_fn, opens=True), example_of(batch)
    if any(t.is_meta for t in (*unsplit.whole.parameters(), *unsplit.whole.buffers())):
        raise ConfigError(
            "the model has layers without values here (LayerSpec, without_values), which cannot be "
            "measured; profile the model with values"
        )
    parts = _parts(unsplit, example, loss_fn is None, autocast)
    if unsplit.sequence is None:
        inputs = dict(enumerate(flat_copy((example.args, example.kwargs))[1]))
    else:
        inputs = {0: example.args[0]}
    home = home_of(unsplit.whole)
    parts, inputs, target = on_device((parts, inputs, example.target), home)
    meter = _Meter(unsplit.whole, loss_fn, made, repeats, warm_up)
    with _left_as_it_was(unsplit.whole, loss_fn):
        layers = list(meter.measure(parts, inputs, target, autocast))
    for text in about_unsettled(layers):
        _log.warning("%s", text)
    edges = {
        (source, number): size
        for number, taken in enumerate(meter.taken)
        for source, size in taken.items()
        if source != COORDINATOR
    }
    first = next(iter(found((example.args, example.kwargs), Tensor)), None)
    return Profile(
        layers=tuple(layers),
        edges=tuple(edges),
        edge_bytes=tuple(edges.values()),
        micro_batch=None if first is None or not first.dim() else len(first),
        process_bytes=_process_bytes(),
        facts={
            "hash": hash_of(unsplit.whole, example, made, loss_fn, autocast),
            "torch": torch.__version__,
            "threads": str(torch.get_num_threads()),
            "processor": processor(),
            "dtype": ", ".join(sorted({str(p.dtype) for p in unsplit.whole.parameters()})),
            "repeats": str(repeats),
        },
    )


def profile_and_end(
    batch: Batch,
    *,
    path: Path,
    model: nn.Module | Iterable[nn.Module],
    loss_fn: LossFunction | None,
    optimizer: object,
    autocast: torch.dtype | None,
    count: int,
    threads: int,
) -> NoReturn:
    """Write the profile of a script's pipeline, cut into ``count`` micro-batches, and exit."""
    torch.set_num_threads(threads)
    made = optimizer_choice(optimizer)
    first = first_micro_batch(batch, count)
    item = (first.args, first.kwargs, first.target)
    wanted = hash_of(UnsplitModel(model, loss_fn).whole, first, made, loss_fn, autocast)
    with suppress(ConfigError):
        if files.load(path).facts.get("hash") == wanted:
            os.utime(path)  # a new time tells the command that the file is about this script
            print(f"{path} has the profile of this model already", file=sys.stderr)
            raise SystemExit(0)
    found = profile(model, item, loss_fn=loss_fn, optimizer=made, autocast=autocast)
    files.save(found, path)
    print(f"the profile is in {path}", file=sys.stderr)
    raise SystemExit(0)


def first_micro_batch(batch: Batch, count: int) -> Batch:
    """Return the first of ``count`` micro-batches of a mini-batch."""
    samples = samples_of(batch)
    if count == 1 or not samples:
        return batch
    return cut_batch(batch, micro_batch_sizes(samples, count))[0]


def optimizer_choice(optimizer: object) -> Optimizer | None:
    """Return the class and the arguments of an optimizer; None if they are unknown."""
    match optimizer:
        case (type() as cls, Mapping() as options, *_) if issubclass(cls, torch.optim.Optimizer):
            return cls, options
        case torch.optim.Optimizer():
            known = inspect.signature(type(optimizer)).parameters
            # A profile has one optimizer: that of the group with the most parameters.
            largest = max(optimizer.param_groups, key=lambda group: len(group["params"]))
            given = {**optimizer.defaults, **largest}
            return type(optimizer), {k: v for k, v in given.items() if k in known and k != "params"}
    return None


def hash_of(
    model: nn.Module,
    batch: Any,
    optimizer: Optimizer | None,
    loss_fn: object = None,
    autocast: torch.dtype | None = None,
) -> str:
    """Return a hash of all that the profile of a micro-batch depends on."""
    classes = {type(module) for module in model.modules()}
    code = sorted(
        (cls.__qualname__, getattr(getattr(cls.forward, "__code__", None), "co_code", b""))
        for cls in classes
    )
    loss = str(loss_fn) if isinstance(loss_fn, nn.Module) else getattr(loss_fn, "__qualname__", "")
    kinds = [
        (name, tuple(t.shape), str(t.dtype), t.requires_grad)
        for name, t in (*model.named_parameters(), *model.named_buffers())
    ]
    shapes = [(tuple(t.shape), str(t.dtype)) for t in found(batch, Tensor)]
    made = (
        "" if optimizer is None else f"{optimizer[0].__qualname__} {sorted(optimizer[1].items())}"
    )
    here = (torch.__version__, torch.get_num_threads(), processor())
    text = repr((str(model), kinds, code, shapes, made, loss, autocast, here))
    return blake2b(text.encode(), digest_size=16).hexdigest()


# -- the parts ------------------------------------------------------------------------------------


def _now(device: torch.device) -> float:
    """Return the time in seconds, once a device has done what it was given."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    elif torch.get_num_threads() == 1:
        # Time of the processor does not count other programs on the machine. It is that of this
        # thread, which is enough: on the CPU autograd computes in the thread that has called it.
        return time.thread_time()
    return time.perf_counter()


def _parts(
    model: UnsplitModel, example: Batch, owns_loss: bool, autocast: torch.dtype | None
) -> list[tuple[str, StageProgram]]:
    """Return, by its name, a program for each layer with what is between it and the next one."""
    if model.sequence is not None:
        if len(example.args) != 1 or example.kwargs:
            raise ConfigError("a sequence of layers takes a pair (x, y), of which x is its input")
        return _parts_of_sequence(list(model.sequence))
    has_loss = owns_loss and example.target is not None and bool(example.kwargs)
    options = ForwardOptions(own_loss=has_loss, trains=True, autocast=autocast)
    whole = split_model(model, 1, example, options).forwards
    assert isinstance(whole, RecordedForwards)
    names = list(whole.cuts[0].layers[0])
    if not names:
        raise ConfigError("the forward of the model calls no layers, so it cannot be cut")
    split = split_model(model, names[1:], example, options)
    return [(name, split.programs(number)[0]) for number, name in enumerate(names)]


def _parts_of_sequence(names: list[str]) -> list[tuple[str, StageProgram]]:
    """Return a program for each layer of a sequence: each takes what the one before returns."""
    last = len(names) - 1
    return [
        (
            name,
            StageProgram(
                takes={i - 1 if i else COORDINATOR: (i,)},
                steps=(Step(name=name, target=name, args=(Slot(i),), slots=i + 1),),
                gives={i + 1: (i + 1,)} if i < last else {},
                output=Slot(i + 1) if i == last else None,
            ),
        )
        for i, name in enumerate(names)
    ]


@contextmanager
def _left_as_it_was(model: nn.Module, loss_fn: object) -> Iterator[None]:
    """Put buffers, gradients and the random generator back at the end."""
    whole = [model, *([loss_fn] if isinstance(loss_fn, nn.Module) else [])]
    modules = [module for each in whole for module in each.modules()]
    buffers = [
        (module, name, buffer, None if buffer is None else buffer.detach().clone())
        for module in modules
        for name, buffer in module._buffers.items()
    ]
    gradients = [(parameter, parameter.grad) for m in whole for parameter in m.parameters()]
    with kept_generator_state():
        try:
            yield
        finally:
            with torch.no_grad():
                for module, name, buffer, value in buffers:
                    # A forward may have put another tensor there, or changed this one in place.
                    module._buffers[name] = buffer
                    if buffer is not None and value is not None:
                        buffer.resize_(value.shape).copy_(value)
            for parameter, gradient in gradients:
                parameter.grad = gradient


# -- measuring ------------------------------------------------------------------------------------

_ROUNDS = 6
"""Rounds of times of a layer at most, while they differ too much from each other."""

_SETTLED, _SETTLED_S = 0.25, 100e-6
"""The range that the middle half of some times may have: as a share of the median, in seconds."""

_UNKNOWN = 0.2
"""The share of all time up to which times may be uncertain without a warning."""


def spread_of(times: Sequence[float]) -> float:
    """Return the range of the middle half of some times; of less than four, that of all."""
    # The middle half, since a few outliers do not widen it.
    ordered, left_out = sorted(times), len(times) // 4
    return ordered[len(times) - 1 - left_out] - ordered[left_out]


def timed_until_settled(
    timed: Callable[[], tuple[float, float, float]], repeats: int
) -> list[tuple[float, float, float]]:
    """Return so many times of a layer, as `_Part.timed` takes them, that they agree.

    ``repeats`` times are one round.
    """
    times: list[tuple[float, float, float]] = []
    for _ in range(_ROUNDS):
        times += [timed() for _ in range(repeats)]
        totals = [forward + both for forward, _, both in times]
        if spread_of(totals) <= max(_SETTLED * statistics.median(totals), _SETTLED_S):
            return times
    # Other processes make times longer, never shorter: the shorter half is the best guess.
    return sorted(times, key=lambda each: each[0] + each[2])[: len(times) // 2]


def about_unsettled(layers: Sequence[LayerCosts]) -> list[str]:
    """Return the warning about times that are too uncertain; none if they are not."""
    whole = sum(each.forward + each.backward_input + each.backward_weight for each in layers)
    unknown = sum(layer.spread for layer in layers)
    if unknown <= max(_UNKNOWN * whole, _SETTLED_S * len(layers)):
        return []
    worst = max(layers, key=lambda layer: layer.spread)
    return [
        f"the layers take about {1e3 * whole:.3g} ms, and their times differ by "
        f"{1e3 * unknown:.3g} ms from measurement to measurement, most of all those of "
        f"{worst.name}, by {1e3 * worst.spread:.3g} ms: others use the machine, or the layer "
        "itself takes unequal times. The shortest times were taken; to be sure, measure again "
        "when the machine is quiet"
    ]


class _Meter:
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
            part = _Part(self._model, name, program, values, autocast)
            if last:
                part.loss = lambda output: self._loss(output, target)
            made = part.outcome()
            yield self._costs(part, float(sum(t.nbytes for t in _tensors(made))))
            passed.update(made)

    def _loss(self, output: Any, target: Any) -> Any:
        """Return the loss, or the output if there is none."""
        if self._loss_fn is not None:
            return total_of(self._loss_fn(output, target))[0]
        return own_loss(output, target) if has_own_loss(output) else output

    def _costs(self, part: _Part, output_bytes: float) -> LayerCosts:
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


class _Part:
    """A layer, with what is between it and the next one, and what came in.

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
        self.loss: Callable[[Any], Any] = lambda output: output
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

        # Copies, as a layer may change its input in place.
        made = {slot: replaced(v, (Tensor,), fresh) for slot, v in self._values.items()}
        return made, leaves

    def _forward(self, values: dict[int, Any]) -> dict[int, Any]:
        """Do the steps; return what goes out, by slot, and the loss as -1."""
        kind, casts = self._home.type, self._autocast is not None
        cast = torch.autocast(kind, dtype=self._autocast, enabled=casts)
        with torch.enable_grad(), cast:
            for step, call in self._calls:
                args, kwargs = filled((step.args, step.kwargs), values, self._held)
                with step.around.entered():
                    put(step, call(*args, **kwargs), values)
            out = {s: values[s] for slots in self._program.gives.values() for s in slots}
            if self._program.output is not None:
                out[-1] = self.loss(filled(self._program.output, values, self._held))
        return out

    def outcome(self) -> dict[int, Any]:
        """Return what goes out, by slot, without the graph that made it."""

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
    """Return the tensors in a value."""
    tensors: list[Tensor] = found(value, Tensor)
    return tensors


def _process_bytes() -> float:
    """Return the peak memory of a process that could host a stage, in bytes."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", f"{_IMPORTS}; {_PRINTS}"],
            check=True,
            capture_output=True,
            text=True,
            timeout=_START_S,
            cwd=Path.cwd(),
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigError(f"the memory of a worker cannot be measured: {error}") from error
    return float(done.stdout)
