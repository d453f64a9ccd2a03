"""Runs the programs of a stage, with the seeds and casts of the pipeline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from hashlib import blake2b
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from pipedream_rt.devices import HOST, Device
from pipedream_rt.errors import ConfigError
from pipedream_rt.messages.tree import Value, flatten, unflatten
from pipedream_rt.models.cut import StageProgram
from pipedream_rt.models.program import (
    NONE_CARRIED,
    SEQUENCE,
    Slot,
    Step,
    filled,
    held_by,
    numbered,
    put,
    slots_in,
)
from pipedream_rt.models.shipping import loads
from pipedream_rt.schedules import COORDINATOR, Plan
from pipedream_rt.schedules.placement import LOSS_LAYER
from pipedream_rt.stage.buffers import ForwardBuffers
from pipedream_rt.stage.coded_values import GraphCoding
from pipedream_rt.stage.spec import LossFunction, StageSpec, total_of


def layer_seed(seed: int, micro_batch: int | str, layer: str) -> int:
    """Return the seed of a layer for a micro-batch, as ``"evaluate 3"`` if it is not trained on.

    It depends on nothing else: neither on time nor on the place where the layer is.
    """
    digest = blake2b(f"{seed}/{micro_batch}/{layer}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big")


class _Call(NamedTuple):
    """A step of a program, ready to be done.

    Attributes:
        only: The slot that is its only argument; -1 if it has others.
        held: The names of the parameters and buffers that it takes as arguments.
        unneeded: The slots that no later step needs.
    """

    step: Step
    call: Any
    only: int
    held: list[str]
    unneeded: tuple[int, ...]


class _Ready(NamedTuple):
    """A program, ready to be run.

    Attributes:
        held: The names of the parameters and buffers in its result.
    """

    whole: StageProgram
    calls: list[_Call]
    held: list[str]


class Runner:
    """Runs programs: which values come from each producer, the steps, what goes to each consumer.

    Attributes:
        loss_fn: The loss function; None where no loss is computed.
        sources: The stages from which values come; the coordinator is the first, if it gives some.
        programs: By the number that micro-batches name.
        caches: By number of the cache, what layers keep for the next micro-batch, by name.
        at: The step that is done now, with its input, for reports of errors; None if none is.
    """

    def __init__(self, spec: StageSpec, device: Device = HOST) -> None:
        self.device = device
        self._brings_back = device.brings_back()
        self._module = spec.layers
        self._seed, self._autocast = spec.seed, spec.autocast
        self._recomputes = spec.recompute
        self.sources, self._targets = _neighbours(spec.plan, spec.stage)
        autocast = device.name.partition(":")[0] if spec.autocast is not None else None
        self._coding = GraphCoding(spec.codecs, spec.stage, autocast) if spec.codecs else None
        self.programs: dict[int, _Ready] = {}
        for number, program in enumerate(spec.programs or [_sequence(spec)]):
            self.define(number, program)
        # A loss that is a module is a layer, so that its weights and mode are the stage's.
        loss_layer = self._module._modules.get(LOSS_LAYER)
        self.loss_fn = spec.loss_fn if loss_layer is None else loss_layer
        self.buffers = ForwardBuffers(self._module)
        self.caches: dict[int, dict[str, Any]] = {}
        self.at: tuple[Step, Any] | None = None

    def define(self, number: int, program: StageProgram) -> None:
        """Add a program, which micro-batches name by its number."""
        program = self.device.placed(program)
        needed = {
            *slots_in(program.output),
            *(s for slots in program.gives.values() for s in slots),
        }
        calls = []
        # From the end, where it is known which slots later steps need.
        for step in reversed(program.steps):
            layer = step.layer
            call = step.target if layer is None else self._module.get_submodule(layer)
            taken = step.taken
            last = [slot for slot in (*taken, *step.filled) if slot not in needed]
            needed.update(taken)
            alone = len(step.args) == 1 and not step.kwargs and isinstance(step.args[0], Slot)
            plain = alone and step.around == SEQUENCE
            only = taken[0] if plain else -1
            calls.append(_Call(step, call, only, step.held, tuple(dict.fromkeys(last))))
        self.programs[number] = _Ready(program, calls[::-1], program.held)

    def forget(self, number: int) -> None:
        """Forget a program, which no later micro-batch names."""
        self.programs.pop(number, None)  # one that recovers may not have been told of it

    def entered(
        self, inputs: Sequence[Value], program: int, numbers: Sequence[int] = ()
    ) -> dict[int, Any]:
        """Return the input values by slot."""
        values = numbered(numbers)
        for source, (structure, tensors, _) in zip(self.sources, inputs, strict=True):
            self.put_in(program, source, unflatten(structure, tensors), values)
        return values

    def put_in(self, program: int, source: int, value: Any, values: dict[int, Any]) -> None:
        """Put a value from a source into the slots that a program has for it."""
        if self._coding is not None:
            value = self._coding.decoded(source, value)
        slots = self.programs[program].whole.takes.get(source, ())
        values.update(zip(slots, (value,) if len(slots) == 1 else value))

    def of_mini_batch(self, inputs: Sequence[Value]) -> Value | None:
        """Return the input that came from the mini-batch itself; None if none did."""
        pairs = zip(self.sources, inputs, strict=True)
        return next((value for source, value in pairs if source == COORDINATOR), None)

    def run(
        self,
        program: int,
        values: dict[int, Any],
        number: int | str,
        carried: Mapping[str, Any] = NONE_CARRIED,
    ) -> list[Any]:
        """Do the steps of a program; random ones are seeded by the micro-batch's `number`."""
        return self._run(self.programs[program], values, number, carried)

    def _run(
        self,
        program: _Ready,
        values: dict[int, Any],
        number: int | str,
        carried: Mapping[str, Any] = NONE_CARRIED,
    ) -> list[Any]:
        for step, call, only, names, unneeded in program.calls:
            if step.random:
                self.seed(number, step.name)
            if only >= 0:
                self.at = step, values[only]
                result = call(values[only])
            else:
                held = {name: held_by(self._module, name) for name in names}
                args, kwargs = filled((step.args, step.kwargs), values, held, carried)
                self.at = step, args[0] if len(args) == 1 and not kwargs else (*args, kwargs)
                with step.around.entered():
                    result = call(*args, **kwargs)
            put(step, result, values)
            # Kept longer than in a plain forward, a value would take memory.
            for slot in unneeded:
                del values[slot]
        self.at = None
        if not self._targets:
            held = {name: held_by(self._module, name) for name in program.held}
            made = [filled(program.whole.output, values, held)]
        else:
            gives = program.whole.gives
            made = [_pack(gives.get(target, ()), values) for target in self._targets]
        if self._brings_back:
            made = [self.device.brought_back(each) for each in made]
        if self._coding is None or not self._targets:
            return made
        pairs = zip(self._targets, made, strict=True)
        return [self._coding.encoded(target, value) for target, value in pairs]

    def train(self, program: int, values: dict[int, Any], number: int) -> list[Any]:
        """Do the steps of a program for a backward to follow, which may do them once more."""
        if not self._recomputes:
            return self.run(program, values, number)
        # Until the backward, autograd keeps the inputs of the stage alone. The second time has the
        # same result: the backward reads the weights of its forward, each step is seeded, so that
        # no random state need be preserved, and `again` puts the buffers back meanwhile.
        again = _Again(self.buffers, self.buffers.copies())
        ready = self.programs[program]  # the stage may have forgotten it by then

        def run(*inputs: Any) -> list[Any]:
            # Copies, since a step may change an input in place that the second time needs too.
            copies = map(_copy_of, inputs)
            return self._run(ready, dict(zip(values, copies, strict=True)), number)

        try:
            made: list[Any] = checkpoint(
                run,
                *values.values(),
                use_reentrant=False,
                preserve_rng_state=False,
                context_fn=lambda: (nullcontext(), again),
            )
        except RuntimeError as error:
            if "saved tensor hooks" not in str(error):
                raise
            raise ConfigError(
                "torch.func (grad, vjp, jacrev, hessian) cannot be used in a layer whose "
                "activations are computed again: torch keeps what such a transform saves by itself "
                "alone. Leave its stage out: Training(recompute=[...]) takes a list of stages"
            ) from error
        return made

    def casting(self) -> Any:
        """Return the context of autocast, in which forwards and losses run."""
        dtype = self._autocast
        return nullcontext() if dtype is None else self.device.autocast(dtype)

    def seed(self, number: int | str, name: str) -> None:
        """Seed torch's generators for what a layer, a backward or an optimizer may draw."""
        self.device.seed(layer_seed(self._seed, number, name))

    def loss(
        self, output: Any, target: Value, other: LossFunction | None = None
    ) -> tuple[Tensor, dict[str, float]]:
        """Compute the loss to train on, and its named parts, only to be reported.

        ``other`` is the loss of an evaluation.
        """
        loss_fn = other or self.loss_fn
        assert loss_fn is not None
        found = loss_fn(output, unflatten(target.structure, target.tensors))
        loss, parts = (found, {}) if isinstance(found, Tensor) else total_of(found)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            shape = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            under = ' under "loss"' if parts else ""
            raise ConfigError(
                f"loss_fn must return a tensor with one element{under}, it returned {shape}; "
                "reduce it, for instance with .mean()"
            )
        try:
            return loss, {str(n): float(torch.as_tensor(p).detach()) for n, p in parts.items()}
        except (TypeError, ValueError, RuntimeError) as error:
            raise ConfigError(
                f'the parts of a loss beside "loss" must be numbers: {error}'
            ) from error

    def statistics(self) -> dict[str, Any]:
        """Return the counts of the codecs of the graph."""
        return {} if self._coding is None else self._coding.statistics()

    def cache(self, number: int, program: int) -> Mapping[str, Any]:
        """Return the objects of a cache, 0 for none; a program that carries some begins it."""
        if not number:
            return NONE_CARRIED
        if carries := self.programs[program].whole.carries:
            self.caches[number] = {name: loads(data) for name, data in carries.items()}
        return self.caches[number]


class _Again(AbstractContextManager[None]):
    """The context of a forward that is computed again: buffers are as they were before it."""

    # It may be entered more than once, and within itself: a layer that calls
    # ``torch.autograd.grad`` has its forward computed again while the forward runs, and once more
    # in the backward.

    def __init__(self, buffers: ForwardBuffers, copies: dict[str, Tensor]) -> None:
        self._buffers, self._copies = buffers, copies
        self._entered: list[AbstractContextManager[None]] = []

    def __enter__(self) -> None:
        self._entered.append(self._buffers.put_back_for_a_while(self._copies))
        self._entered[-1].__enter__()

    def __exit__(self, *error: Any) -> None:
        self._entered.pop().__exit__(*error)


def _copy_of(value: Any) -> Any:
    """Return a value with clones of its tensors, through which gradients reach these."""
    if isinstance(value, Tensor):
        return value.clone()
    structure, tensors = flatten(value)
    return unflatten(structure, [tensor.clone() for tensor in tensors])


def _sequence(spec: StageSpec) -> StageProgram:
    """Return the program of a stage whose layers are called one after another."""
    # Several producers give the first layer a tuple of their outputs; all consumers get the same.
    sources, targets = _neighbours(spec.plan, spec.stage)
    count = len(sources)
    names = spec.plan.layers[spec.stage]
    entered = Slot(0) if count == 1 else tuple(map(Slot, range(count)))
    steps = tuple(
        Step(
            name=name,
            target=name,
            args=(entered if i == 0 else Slot(count + i - 1),),
            slots=count + i,
        )
        for i, name in enumerate(names)
    )
    last = count + len(names) - 1
    return StageProgram(
        takes={source: (slot,) for slot, source in enumerate(sources)},
        steps=steps,
        gives=dict.fromkeys(targets, (last,)),
        output=None if targets else Slot(last),
    )


def _neighbours(plan: Plan, stage: int) -> tuple[list[int], list[int]]:
    """Return the sources and targets of a stage's values; the coordinator is the first source."""
    inputs = [COORDINATOR] if stage in plan.entries else []
    return [*inputs, *plan.producers(stage)], list(plan.consumers(stage))


def _pack(slots: Sequence[int], values: dict[int, Any]) -> Any:
    """Return the values of slots as one value: itself if there is one, else their tuple."""
    return values[slots[0]] if len(slots) == 1 else tuple(values[slot] for slot in slots)
