"""Training a copy of the unsplit model in plain PyTorch, as a pipeline without staleness would."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeAlias
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from pipedream_rt.batches.cutting import unmarked
from pipedream_rt.batches.forwards import without_cache
from pipedream_rt.batches.items import Batch
from pipedream_rt.batches.micro_batches import CutBatch
from pipedream_rt.dynamo import step_spared
from pipedream_rt.errors import ConfigError
from pipedream_rt.job.given_optimizer import OptimizerParts
from pipedream_rt.job.job import Job
from pipedream_rt.job.unsplit_model import UnsplitModel
from pipedream_rt.lifecycle import is_of_a_handler
from pipedream_rt.messages.tree import Value, flat_copy, own, unflatten
from pipedream_rt.models import dumps, loads
from pipedream_rt.models.mark import Mark, mark_of_draws
from pipedream_rt.models.parcel import Parcel, weights_in
from pipedream_rt.models.program import found, replaced
from pipedream_rt.models.tensors import gradient_hooks, home_of, own_buffers
from pipedream_rt.schedules.placement import LOSS_LAYER
from pipedream_rt.stage.hyper import Hyper, set_hyper
from pipedream_rt.stage.loss_check import rounding_of
from pipedream_rt.stage.rules.clipping import Clip
from pipedream_rt.stage.runner import layer_seed
from pipedream_rt.stage.spec import LossFunction, own_loss, total_of
from pipedream_rt.stage.whole_loss import Met, WholeLoss
from pipedream_rt.verify.compare import Place, Seen, apart, sampled
from pipedream_rt.verify.isolation import Kept, generators_in, held_by
from pipedream_rt.verify.stand_in import GivenGradients


@dataclass(frozen=True, slots=True)
class Copies:
    """A copy of the script's model and loss.

    Attributes:
        loss_fn: The loss function; None if the model computes its loss itself.
    """

    model: UnsplitModel
    loss_fn: LossFunction | None


Gradients: TypeAlias = dict[str, Tensor]

Flat: TypeAlias = tuple[Value, Value, float]
"""The inputs of a mini-batch, its target, and the factor of its loss."""


def copies_of(job: Job, state: Mapping[str, Any] | None) -> Copies:
    """Return copies of the script's model and loss, as workers would get them.

    ``state`` has their weights and buffers; None for those of the script.
    """
    given, loss = job.model.given, job.options.loss_fn
    if job.model.blueprint.specs or any(p.is_meta for p in job.model.parameters.values()):
        raise ConfigError(
            "the script has no values of this model's weights (LayerSpec, Layout(weights=...)), so "
            "it cannot be computed in plain PyTorch here; verify a smaller one that has some"
        )
    hooks = {n: gradient_hooks(p) for n, p in job.model.parameters.items()}
    # The memory of tensors is copied once, and not into the pickle and out of it again.
    memory: list[Any] = []
    data = dumps((given, loss, hooks), memory.append)[0]
    given, loss, hooks = loads(data, map(bytearray, memory))
    model = UnsplitModel(given, loss, opens=job.model.sequence is None)
    for each in model.modules.values():
        own_buffers(each)
    for name, (before, after) in hooks.items():  # a pickled parameter has lost them
        for hook in before:
            model.parameters[name].register_hook(hook)
        for hook in after:
            model.parameters[name].register_post_accumulate_grad_hook(hook)
    copies = Copies(model, loss)
    if state is not None:
        load(copies, state)
    return copies


def load(copies: Copies, state: Mapping[str, Any]) -> None:
    """Give copies the weights and buffers of a state."""
    prefix, loss = f"{LOSS_LAYER}.", copies.loss_fn
    own = {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}
    try:
        copies.model.whole.load_state_dict(
            {k: v for k, v in state.items() if not k.startswith(prefix)}
        )
        if isinstance(loss, nn.Module):
            loss.load_state_dict(own)
    except RuntimeError as error:  # a buffer may have another size by now
        raise ConfigError(
            f"the weights of now do not go into a copy of the model: {error}"
        ) from error


class Tap:
    """Notes what goes into layers and comes out of them, by hooks.

    Attributes:
        at: The step and the micro-batch that is computed; None to note nothing.
        inside: The names of the layers that are being called, outermost first.
    """

    def __init__(
        self,
        layers: Mapping[str, nn.Module],
        seen: Seen,
        seed: Callable[[int, str], object] = lambda number, name: None,
    ) -> None:
        self.at: tuple[int, int] | None = None
        self._seen, self._seed = seen, seed
        self._names: dict[int, list[str]] = {}
        self._calls: dict[int, int] = {}
        self.inside: list[str] = []
        # One layer may stand under several names, in the order of its calls.
        for name, layer in layers.items():
            self._names.setdefault(id(layer), []).append(name)
        once = {id(layer): layer for layer in layers.values()}.values()
        # First of the pre-hooks and last of the hooks: the user's hooks are part of the layer. Also
        # called where the layer raises, so that it leaves `inside`.
        self._handles = [
            handle
            for layer in once
            for handle in (
                layer.register_forward_pre_hook(self._entered, with_kwargs=True, prepend=True),
                layer.register_forward_hook(self._left, always_call=True),
            )
        ]

    def begin(self, step: int, number: int, names: Mapping[int, list[str]] | None = None) -> None:
        """Note, from now on, what is computed of a micro-batch.

        ``names`` has, by ``id`` of a layer, how its calls are named, if it is not all of them.
        """
        self.at = step, number
        self._calls.clear()
        self._names = self._names if names is None else dict(names)

    def _entered(self, layer: nn.Module, args: Any, kwargs: Any) -> None:
        """Note the input of a layer, and seed its random numbers."""
        if self.at is None:
            return
        names, call = self._names[id(layer)], self._calls.get(id(layer), 0)
        self._calls[id(layer)] = call + 1
        name = names[call] if len(names) > 1 else names[0] + (f"#{call + 1}" if call else "")
        self.inside.append(name)
        self._note("input", name, (args, kwargs))
        self._seed(self.at[1], name)

    def _left(self, layer: nn.Module, args: Any, output: Any) -> None:
        """Note the output of a layer."""
        if self.at is not None and self.inside:
            self._note("output", self.inside.pop(), output)

    def _note(self, kind: str, name: str, value: Any) -> None:
        assert self.at is not None
        for number, tensor in enumerate(found(value, Tensor)):
            place = Place(*self.at, kind, name, number)
            # A copy: a later layer may change the tensor in place.
            self._seen.setdefault(place, sampled(tensor))

    def remove(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()


class _Seeding(TorchFunctionMode):
    """Seeds the functions that draw random numbers between the layers of a forward.

    Inside of a layer it seeds nothing: each layer has a seed of its own.
    """

    def __init__(
        self, names: Sequence[str], inside: Sequence[str], seed: Callable[[str], object]
    ) -> None:
        super().__init__()
        # A recorded forward draws in one order, so a function is compared with the next name only.
        self._left, self._inside, self._seed = list(names), inside, seed

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        # Recorded steps are named as ``(dropout 7)``, after the function and a number.
        name = f"({getattr(func, '__name__', '')} "
        if self._left and self._left[0].startswith(name) and not self._inside:
            self._seed(self._left.pop(0))
        return func(*args, **(kwargs or {}))


class PlainTraining:
    """A plain loop over a copy of the model: forward, backward, clipping, step.

    It steps parameters of up to ``budget`` bytes, and with None all.

    Attributes:
        job: The job whose model it is.
        stepped: The names of the parameters that its optimizer steps: of a large model, some.
        stores: Whether forwards have changed a value of their own, beside buffers.
        notes: What is left out: "backward" and "step", which draw, and "whole", which raises.
    """

    def __init__(
        self,
        job: Job,
        copies: Copies,
        parts: OptimizerParts,
        names: Sequence[Sequence[str]],
        budget: int | None = None,
    ) -> None:
        self.job, self._copies, self._model = job, copies, copies.model
        self._loss = copies.loss_fn
        if self._loss is None:  # the model's, or the script's, of which the gradients are known
            self._loss = own_loss if job.reading.forwards.own_loss else GivenGradients()
        self._by_stage = names
        self._trained = {
            copies.model.names[id(p)]: p
            for p in copies.model.parameters.values()
            if p.requires_grad
        }
        self.stepped = self._some(budget)
        self._optimizer = self._built(parts)
        whole = self._model.whole
        self._layers = self._model.sequence or {
            name: whole.get_submodule(name) for name in job.reading.forwards.layers
        }
        self._without_cache = (
            {} if self._model.sequence is not None else without_cache(self._model.whole)
        )
        spared = weights_in(copies.model.modules.values())
        roots = ([("model", whole), ("the loss", copies.loss_fn)], [("", self._optimizer)])
        holders, of_optimizer = (list(Parcel(each, spared).found.values()) for each in roots)
        self._generators = generators_in([*holders, *of_optimizer])
        self._holders = holders
        self.stores, self._updates = False, True
        self.notes: dict[str, None] = {}

    def _some(self, budget: int | None) -> set[str]:
        """Return parameters of up to so many bytes, of all parts of the model."""
        sizes = {name: p.nbytes for name, p in self._trained.items()}
        if budget is None or sum(sizes.values()) <= budget:
            return set(sizes)
        found, left = {min(sizes, key=lambda name: sizes[name])}, budget
        # By a checksum: in the order of the model, all would be of its first layers. And none takes
        # more than half of what is left, so that biases and norms are among them.
        for name in sorted(sizes, key=lambda name: crc32(name.encode())):
            if sizes[name] <= left // 2:
                found.add(name)
                left -= sizes[name]
        return found

    def _built(self, parts: OptimizerParts) -> torch.optim.Optimizer:
        """Build the optimizer of the parameters that are stepped."""
        groups = [
            {
                "params": [self._trained[name] for name in of_group if name in self.stepped],
                **copy.deepcopy(options),
            }
            for of_group, options in parts.groups
        ]
        build: Any = parts.optimizer_class
        made: torch.optim.Optimizer = build(groups, **parts.kwargs)
        # What the script has set on its optimizer.
        vars(made).update(copy.deepcopy(parts.attributes))
        return made

    def drop_gradients(self) -> None:
        """From now on keep no gradient of a parameter that is not stepped."""
        left = [p for name, p in self._trained.items() if name not in self.stepped]
        for parameter in left:
            parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
        clip = self.job.options.training.clip
        # The norm of all of them is not known any more.
        self._updates = not (left and clip is not None and clip.norm is not None)

    def set_mode(self, training: bool | None) -> None:
        """Set the mode of all modules; None leaves them as they are."""
        if training is not None:
            for each in (self._model.whole, self._loss):
                if isinstance(each, nn.Module):
                    each.train(training)

    def take(self, state: Mapping[str, Any]) -> None:
        """Take the weights and buffers of another training."""
        load(self._copies, state)

    # -- a step ---------------------------------------------------------------------------------

    def step(
        self,
        step: int,
        cut: CutBatch,
        drawing: Mapping[int, Sequence[str]],
        hyper: Sequence[Hyper],
        gradients: Mapping[str, Tensor] | None = None,
        late: Callable[[], bool] = lambda: False,
    ) -> Seen:
        """Train on mini-batch ``step``; ``drawing`` has, by program, the steps that draw.

        The optimizer steps with ``gradients``, None for its own. Once it is ``late`` nothing more
        is computed.
        """
        seen: Seen = {}
        for group, packed in zip(self._optimizer.param_groups, hyper, strict=True):
            set_hyper(group, packed)
        before = held_by(self._holders)
        if self._accumulate(step, cut, drawing, seen, late):
            self.stores = self.stores or bool(apart(before, held_by(self._holders), exact=True))
            if self._updates:
                self._update(step, seen, gradients)
        self._optimizer.zero_grad()
        return {place: value for place, value in seen.items() if place.kind not in self.left_out}

    def _accumulate(
        self,
        step: int,
        cut: CutBatch,
        drawing: Mapping[int, Sequence[str]],
        seen: Seen,
        late: Callable[[], bool],
    ) -> bool:
        """Compute the gradients of all micro-batches; return whether there was the time."""
        tap, whole = Tap(self._layers, seen, self.seed), WholeLoss()
        try:
            # One by one, as stages do: `cutting.py` asks whether the mini-batch as one is the same.
            for i, part in cut.filled.items():
                if i and late():
                    return False
                number, share = step * len(cut.parts) + i, part.share
                tap.begin(step, number)
                seed = functools.partial(self.seed, number)
                draws = _Seeding(drawing.get(part.program, ()), tap.inside, seed)
                output = self._output(copy_of(part.inputs), draws)
                if cut.is_whole:
                    whole.met.append(Met.of(number, part.samples, output, part.target))
                    continue
                loss = self._loss_of(output, copy_of(part.target))
                tap.at = None  # else a checkpoint, which calls layers again, would be noted
                if isinstance(self._loss, GivenGradients):
                    seen[Place(step, number, "result")] = self._loss.outputs
                else:
                    seen[Place(step, number, "loss")] = loss.item()
                if share:  # without a share the loss may be NaN, and stages do no backward either
                    # In a backward each stage draws for itself: what is drawn cannot be compared.
                    self.seed(number, "backward")
                    before = self.drawn()
                    # No product by 1.0: the graph is to be the one that the stage has.
                    (loss * share if share != 1.0 else loss).backward()
                    if self.drawn() != before:
                        self.notes["backward"] = None
            if whole.met:
                tap.at = None
                self._end_whole(step, whole, seen)
        finally:
            tap.remove()
        return True

    def _end_whole(self, step: int, whole: WholeLoss, seen: Seen) -> None:
        """Compute the loss of micro-batches together, and their gradients one after another."""
        output, target = whole.join()
        loss = self._loss_of(output, unflatten(target.structure, target.tensors))
        seen[Place(step, whole.met[-1].number, "loss")] = loss.item()
        whole.begin(loss)
        for each in whole.met:
            self.seed(each.number, "backward")
            before = self.drawn()
            asked = [t for t, asks in zip(each.value.tensors, each.value.requires_grad) if asks]
            pairs = zip(asked, whole.gradients(each.number), strict=True)
            with_gradient = [
                (tensor, gradient) for tensor, gradient in pairs if gradient is not None
            ]
            torch.autograd.backward([t for t, _ in with_gradient], [g for _, g in with_gradient])
            if self.drawn() != before:
                self.notes["backward"] = None

    def _update(self, step: int, seen: Seen, gradients: Mapping[str, Tensor] | None) -> None:
        """Clip, and step; with other gradients than its own, if they are given."""
        clip = self.job.options.training.clip
        if clip is not None:
            self._clip(clip)
        for name, parameter in self._trained.items():
            if parameter.grad is not None:  # clipped: stages note those that they step with
                seen[Place(step, -1, "gradient", name)] = sampled(parameter.grad)
            # With those of the stages the step is compared by itself: else rounding in gradients
            # would be seen in the weights once more, and larger.
            if gradients is not None:
                parameter.grad = gradients.get(name)
        before = self.drawn()
        step_spared(self._optimizer)  # does not import the compiler into the script's process
        if self.drawn() != before:
            self.notes["step"] = None
        left = {id(p) for name, p in self._trained.items() if name not in self.stepped}
        for name, value in self.state().items():
            if isinstance(value, Tensor) and id(value) not in left:
                seen[Place(step, -1, "state", name)] = sampled(value)

    def nudge(self) -> None:
        """Round weights otherwise: a gradient that is noise then differs."""
        with torch.no_grad():
            for name in self.stepped:
                self._trained[name].mul_(1 + torch.finfo(self._trained[name].dtype).eps)

    @contextmanager
    def nudged(self) -> Iterator[None]:
        """Round weights otherwise for a while."""
        before = {name: self._trained[name].detach().clone() for name in self.stepped}
        self.nudge()
        try:
            yield
        finally:
            with torch.no_grad():
                for name, value in before.items():
                    self._trained[name].copy_(value)

    # -- without a step ---------------------------------------------------------------------------

    def loss_of(self, batch: Batch) -> float | None:
        """Return the loss of a mini-batch in eval mode.

        None where that raises, draws random numbers or changes a value: workers are not asked.
        """
        try:
            kept, held = self.kept(), self.held()
            self.seed(0, "eval mode")
            before = self.drawn()
            with self.in_eval_mode(nn.Module), torch.no_grad():
                loss: float = self._computed(*map(copy_of, self.flat(batch))).item()
            still = self.drawn() == before and not apart(held, self.held(), exact=True)
            kept.put_back()
        except Exception as error:  # the user's code, which was perhaps not written for it
            if is_of_a_handler(error):
                raise
            return None
        return loss if still else None

    def gradients(
        self, batches: Sequence[Flat], kept: Kept, anew: bool = True
    ) -> tuple[float, Gradients, dict[str, Any]]:
        """Return the loss of mini-batches, their gradients, and what the last one leaves.

        With ``anew`` each begins as it was kept, so what they change meanwhile does not count.
        """
        total = 0.0
        for inputs, target, share in batches:
            if anew:
                kept.put_back()
            loss = self._computed(copy_of(inputs), copy_of(target))
            (loss * share).backward()
            total += loss.item() * share
        left = self.held()
        made = {n: sampled(p.grad) for n, p in self._trained.items() if p.grad is not None}
        for parameter in self._trained.values():
            parameter.grad = None
        kept.put_back()
        return total, made, left

    def flat(self, batch: Batch) -> tuple[Value, Value]:
        """Return copies of what the model takes of a mini-batch, and of its target."""
        inputs, target = inputs_of(self.job, batch)
        return flat_copy(inputs), flat_copy(target)

    @contextmanager
    def in_eval_mode(self, kinds: type[nn.Module]) -> Iterator[None]:
        """Set modules of a class to eval mode."""
        roots = [each for each in (self._model.whole, self._loss) if isinstance(each, nn.Module)]
        training = [m for r in roots for m in r.modules() if m.training and isinstance(m, kinds)]
        for each in training:
            each.training = False
        try:
            yield
        finally:
            for each in training:
                each.training = True

    def kept(self) -> Kept:
        """Keep what forwards may change: buffers and attributes, as they are."""
        buffers = [m._buffers for each in self._model.modules.values() for m in each.modules()]
        return Kept(self._holders, buffers, self._model.parameters.values())

    def held(self) -> dict[str, Any]:
        """Return what forwards may change, in a form that can be compared."""
        buffers = [(n, b) for n, b in self.state().items() if not isinstance(b, nn.Parameter)]
        return held_by(self._holders) | {
            name: sampled(b) for name, b in buffers if isinstance(b, Tensor)
        }

    def drawn(self) -> Mark:
        """Return the mark of the random numbers that were drawn."""
        return mark_of_draws(self._generators)

    @property
    def left_out(self) -> set[str]:
        """The kinds of values that are not compared."""
        kinds = {"backward": "gradient", "step": "state"}
        return {kinds[each] for each in self.notes if each in kinds}

    def state(self) -> dict[str, Any]:
        """Return the current weights and buffers, by the names that stages give them."""
        state = dict(self._model.whole.state_dict(keep_vars=True))
        if isinstance(self._loss, nn.Module):
            state |= self._loss.state_dict(prefix=f"{LOSS_LAYER}.", keep_vars=True)
        return state

    def _computed(self, inputs: Any, target: Any) -> Tensor:
        """Return the loss of inputs."""
        return self._loss_of(self._output(inputs), target)

    def _output(self, inputs: Any, draws: Any = None) -> Any:
        """Return the output of inputs; ``draws`` is a context of the forward."""
        with self._casting(), draws or nullcontext():
            return self._forward(inputs)

    def _loss_of(self, output: Any, target: Any) -> Tensor:
        with self._casting():
            assert self._loss is not None
            loss: Tensor = total_of(self._loss(output, target))[0]
            return loss

    def _forward(self, inputs: Any) -> Any:
        """Call the model, or its layers one after another."""
        if self._model.sequence is None:
            args, kwargs = inputs
            return self._model.whole(*args, **{**self._without_cache, **kwargs})
        for layer in self._model.sequence.values():
            inputs = layer(inputs)
        return inputs

    def _casting(self) -> AbstractContextManager[Any]:
        """Return the context in which forwards and losses run."""
        dtype = self.job.options.training.autocast
        kind = home_of(self._model.whole).type
        return nullcontext() if dtype is None else torch.autocast(kind, dtype=dtype)

    def seed(self, number: int, name: str) -> None:
        """Seed the random numbers of a layer as its stage does."""
        torch.manual_seed(layer_seed(self.job.options.seed, number, name))

    def _clip(self, clip: Clip) -> None:
        if clip.value is not None:
            nn.utils.clip_grad_value_(self._trained.values(), clip.value)
            return
        assert clip.norm is not None
        everything = [list(self._trained)]
        for names in self._by_stage if clip.over == "stage" else everything:
            mine = [self._trained[name] for name in names]
            nn.utils.clip_grad_norm_(mine, clip.norm, clip.norm_type)


def rounding_in(job: Job) -> float:
    """Return the share of a loss or a gradient that may be rounding."""
    dtypes = {p.dtype for p in job.model.parameters.values()} | {job.reading.forwards.dtype}
    if job.options.training.autocast is not None:
        dtypes.add(job.options.training.autocast)
    return max(map(rounding_of, dtypes))


def copy_of(value: Value) -> Any:
    """Return a flattened value, with copies of its tensors."""
    return unflatten(value.structure, [tensor.clone() for tensor in value.tensors])


def inputs_of(job: Job, batch: Batch) -> tuple[Any, Any]:
    """Return copies of what the model, or its first layer, takes of a mini-batch, and the target.

    A forward or a loss may change them in place, and the mini-batch is the script's own.
    """
    batch = unmarked(batch)
    inputs = batch.args[0] if job.model.sequence is not None else (batch.args, batch.kwargs)
    copies: tuple[Any, Any] = replaced(
        (inputs, batch.target), (Tensor,), functools.partial(own, copy=True)
    )
    return copies
