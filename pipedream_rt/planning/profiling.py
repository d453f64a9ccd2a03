"""The profiler: measures what each layer of a model costs, on this machine, for `plan`.

The model is cut behind every layer, as the runtime would cut it. Each part is timed by itself on
its real input: its forward, its backward for its input, its backward for its weights, and an
update. Nothing of PyTorch is patched, and afterwards the model is as before.
"""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from pipedream_rt.batches.cutting import cut_batch, micro_batch_sizes, samples_of, unmarked
from pipedream_rt.batches.items import Batch, Items
from pipedream_rt.batches.recorded_forwards import RecordedForwards
from pipedream_rt.devices.randomness import kept_generator_state
from pipedream_rt.errors import ConfigError
from pipedream_rt.job.splitting import ForwardOptions, items_of, split_model
from pipedream_rt.job.unsplit_model import UnsplitModel
from pipedream_rt.messages.tree import flat_copy
from pipedream_rt.models.cut import StageProgram
from pipedream_rt.models.preserving_state import drawing_alone, kept_outside
from pipedream_rt.models.program import (
    Slot,
    Step,
    found,
    on_device,
)
from pipedream_rt.models.shipping import copying
from pipedream_rt.models.tensors import home_of
from pipedream_rt.planning import files
from pipedream_rt.planning.meter import SETTLED_S, Meter, Optimizer
from pipedream_rt.planning.profile import LayerCosts, Profile
from pipedream_rt.schedules import COORDINATOR
from pipedream_rt.software import processor
from pipedream_rt.stage.spec import LossFunction
from pipedream_rt.telling import log_of, say

_log = log_of(__name__)


# A process with what a worker imports, without a stage.
_IMPORTS = "import pipedream_rt.transport.rpc.endpoint, pipedream_rt.stage.host"
_PRINTS = (
    "from pipedream_rt.stage.process_memory import peak_memory_bytes; print(peak_memory_bytes())"
)
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
    unsplit = UnsplitModel(model, loss_fn, opens=True)
    example = unmarked(items_of(unsplit, loss_fn).example(batch))
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
    meter = Meter(unsplit.whole, _apart(loss_fn), made, repeats, warm_up)
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
            say(f"{path} has the profile of this model already")
            raise SystemExit(0)
    found = profile(model, item, loss_fn=loss_fn, optimizer=made, autocast=autocast)
    files.save(found, path)
    say(f"the profile is in {path}")
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
            values = {**optimizer.defaults, **largest}
            return type(optimizer), {
                k: v for k, v in values.items() if k in known and k != "params"
            }
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


def _parts(
    model: UnsplitModel, example: Batch, owns_loss: bool, autocast: torch.dtype | None
) -> list[tuple[str, StageProgram]]:
    """Return, by the name of its first layer, a program for each part that can be a stage."""
    if model.sequence is not None:
        if len(example.args) != 1 or example.kwargs:
            raise ConfigError("a sequence of layers takes a pair (x, y), of which x is its input")
        return _parts_of_sequence(list(model.sequence))
    has_loss = owns_loss and example.target is not None and bool(example.kwargs)
    options = ForwardOptions(trains=True, may_own_loss=has_loss, autocast=autocast)
    whole = split_model(model, 1, example, options, Items())
    assert isinstance(whole.forwards, RecordedForwards)
    names = [name for name in whole.forwards.cuts[0].layers[0] if name not in whole.inner]
    if not names:
        raise ConfigError("the forward of the model calls no layers, so it cannot be cut")
    split = split_model(model, names[1:], example, options, Items())
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


def _apart(loss_fn: LossFunction | None) -> LossFunction | None:
    """Return a copy of a loss function, which may keep a state; a module is put back instead."""
    if loss_fn is None or isinstance(loss_fn, nn.Module):
        return loss_fn
    with suppress(Exception):  # what cannot be copied is called itself
        return copying(loss_fn)()
    return loss_fn


@contextmanager
def _left_as_it_was(model: nn.Module, loss_fn: object) -> Iterator[None]:
    """Put buffers, gradients and the random generators back at the end."""
    whole = [model, *([loss_fn] if isinstance(loss_fn, nn.Module) else [])]
    modules = [module for each in whole for module in each.modules()]
    buffers = [
        (module, name, buffer, None if buffer is None else buffer.detach().clone())
        for module in modules
        for name, buffer in module._buffers.items()
    ]
    gradients = [(parameter, parameter.grad) for m in whole for parameter in m.parameters()]
    with drawing_alone(), kept_generator_state(), kept_outside():
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


_UNKNOWN = 0.2
"""The share of all time up to which times may be uncertain without a warning."""


def about_unsettled(layers: Sequence[LayerCosts]) -> list[str]:
    """Return the warning about times that are too uncertain; none if they are not."""
    whole = sum(each.forward + each.backward_input + each.backward_weight for each in layers)
    unknown = sum(layer.spread for layer in layers)
    if unknown <= max(_UNKNOWN * whole, SETTLED_S * len(layers)):
        return []
    worst = max(layers, key=lambda layer: layer.spread)
    return [
        f"the layers take about {1e3 * whole:.3g} ms, and their times differ by "
        f"{1e3 * unknown:.3g} ms from measurement to measurement, most of all those of "
        f"{worst.name}, by {1e3 * worst.spread:.3g} ms: others use the machine, or the layer "
        "itself takes unequal times. The shortest times were taken; to be sure, measure again "
        "when the machine is quiet"
    ]


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
