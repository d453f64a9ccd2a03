"""Training a copy of the unsplit model in plain PyTorch, as a pipeline without staleness would."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

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
from pipedream_rt.messages.tree import Value, own, unflatten
from pipedream_rt.models import dumps, loads
from pipedream_rt.models.program import found, replaced
from pipedream_rt.models.tensors import gradient_hooks, home_of, own_buffers
from pipedream_rt.schedules.placement import LOSS_LAYER
from pipedream_rt.stage.hyper import Hyper, set_hyper
from pipedream_rt.stage.rules.clipping import Clip
from pipedream_rt.stage.seeds import layer_seed
from pipedream_rt.stage.spec import LossFunction, own_loss, total_of
from pipedream_rt.verify.compare import Place, Seen
from pipedream_rt.verify.isolation import drawn


@dataclass(frozen=True, slots=True)
class Copies:
    """A copy of the script's model and loss.

    Attributes:
        loss_fn: The loss function; None if the model computes its loss itself.
    """

    model: UnsplitModel
    loss_fn: LossFunction | None


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
    given, loss, hooks = loads(dumps((given, loss, hooks))[0])
    model = UnsplitModel(given, loss, opens=job.model.sequence is None)
    for each in model.modules.values():
        own_buffers(each)
    for name, (before, after) in hooks.items():  # a pickled parameter has lost them
        for hook in before:
            model.parameters[name].register_hook(hook)
        for hook in after:
            model.parameters[name].register_post_accumulate_grad_hook(hook)
    if state is not None:
        prefix = f"{LOSS_LAYER}."
        try:
            model.whole.load_state_dict(
                {k: v for k, v in state.items() if not k.startswith(prefix)}
            )
            if isinstance(loss, nn.Module):
                own = {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}
                loss.load_state_dict(own)
        except RuntimeError as error:  # a buffer may have another size by now
            raise ConfigError(
                f"the weights of now do not go into a copy of the model: {error}"
            ) from error
    return Copies(model, loss)


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

    def begin(self, step: int, number: int) -> None:
        """Note, from now on, what is computed of a micro-batch."""
        self.at = step, number
        self._calls.clear()

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
            self._seen.setdefault(place, tensor.detach().clone())

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
    """A plain loop over a copy of the model: forward, backward, clipping, step."""

    def __init__(
        self, job: Job, copies: Copies, parts: OptimizerParts, names: Sequence[Sequence[str]]
    ) -> None:
        self._job, self._model = job, copies.model
        self._loss = own_loss if job.forwards.own_loss else copies.loss_fn
        self._by_stage = names
        trained = {
            copies.model.names[id(p)]: p
            for p in copies.model.parameters.values()
            if p.requires_grad
        }
        self._trained = trained
        groups = [
            {"params": [trained[name] for name in of_group], **copy.deepcopy(options)}
            for of_group, options in parts.groups
        ]
        build: Any = parts.optimizer_class
        self._optimizer: torch.optim.Optimizer = build(groups, **parts.kwargs)
        # What the script has set on its optimizer.
        vars(self._optimizer).update(copy.deepcopy(parts.attributes))
        whole = self._model.whole
        self._layers = self._model.sequence or {
            name: whole.get_submodule(name) for name in job.forwards.layers
        }
        self._given = {} if self._model.sequence is not None else without_cache(self._model.whole)
        self.notes: dict[str, None] = {}

    def set_mode(self, training: bool | None) -> None:
        """Set the mode of all modules; None leaves them as they are."""
        if training is not None:
            for each in (self._model.whole, self._loss):
                if isinstance(each, nn.Module):
                    each.train(training)

    def step(
        self, step: int, cut: CutBatch, drawing: Mapping[int, Sequence[str]], hyper: Sequence[Hyper]
    ) -> Seen:
        """Train on mini-batch ``step``; ``drawing`` has, by program, the steps that draw."""
        seen: Seen = {}
        for group, packed in zip(self._optimizer.param_groups, hyper, strict=True):
            set_hyper(group, packed)
        tap = Tap(self._layers, seen, self._seed)
        try:
            for i, part in cut.filled.items():
                number, share = step * len(cut.parts) + i, part.share
                tap.begin(step, number)
                given, target = copy_of(part.inputs), copy_of(part.target)
                seed = functools.partial(self._seed, number)
                draws = _Seeding(drawing.get(part.program, ()), tap.inside, seed)
                with self._casting(), draws:
                    output = self._forward(given)
                with self._casting():
                    assert self._loss is not None
                    loss = total_of(self._loss(output, target))[0]
                tap.at = None
                seen[Place(step, number, "loss")] = loss.item()
                if share:
                    # In a backward each stage draws for itself: what is drawn cannot be compared.
                    self._seed(number, "backward")
                    before = torch.get_rng_state()
                    (loss * share if share != 1.0 else loss).backward()
                    if not torch.equal(before, torch.get_rng_state()):
                        self._leave_out("backward")
        finally:
            tap.remove()
        self._clip()
        for name, parameter in self._trained.items():
            if parameter.grad is not None:
                seen[Place(step, -1, "gradient", name)] = parameter.grad.detach().clone()
        before = torch.get_rng_state()
        step_spared(self._optimizer)  # does not import the compiler into the script's process
        if not torch.equal(before, torch.get_rng_state()):
            self._leave_out("step")
        self._optimizer.zero_grad()
        for name, value in self.state().items():
            if isinstance(value, Tensor):
                seen[Place(step, -1, "state", name)] = value.detach().clone()
        return {place: value for place, value in seen.items() if place.kind not in self.left_out}

    def loss_of(self, given: Any, target: Any) -> float | None:
        """Return the loss of inputs in eval mode; None if computing it draws random numbers."""
        self.set_mode(False)
        self._seed(0, "eval mode")
        before = drawn()
        with torch.no_grad(), self._casting():
            assert self._loss is not None
            loss: float = total_of(self._loss(self._forward(given), target))[0].item()
        return loss if drawn() == before else None

    def losses_of(self, cut: CutBatch) -> tuple[float, float] | None:
        """Return the loss of a mini-batch in eval mode, and the weighed sum of its micro-batches.

        None where they need not be the same: random numbers, or losses that are not finite.
        """
        filled = cut.filled.values()
        found = [self.loss_of(*inputs_of(self._job, cut.batch))]
        found += [self.loss_of(copy_of(part.inputs), copy_of(part.target)) for part in filled]
        whole, *parts = [math.nan if each is None else each for each in found]
        shares = [part.share for part in filled]
        weighed = [loss * share for loss, share in zip(parts, shares, strict=True) if share]
        known = all(map(math.isfinite, (whole, *weighed)))
        return (whole, sum(weighed)) if known else None

    @property
    def left_out(self) -> set[str]:
        """The kinds of values that are not compared."""
        kinds = {"gradient", "state"} if "backward" in self.notes else set[str]()
        return kinds | ({"state"} if "step" in self.notes else set())

    def _leave_out(self, what: str) -> None:
        """Note that something draws random numbers, which are others on each stage."""
        self.notes[what] = None

    def state(self) -> dict[str, Any]:
        """Return the current weights and buffers, by the names that stages give them."""
        state = dict(self._model.whole.state_dict())
        if isinstance(self._loss, nn.Module):
            state |= self._loss.state_dict(prefix=f"{LOSS_LAYER}.")
        return state

    def _forward(self, given: Any) -> Any:
        """Call the model, or its layers one after another."""
        if self._model.sequence is None:
            args, kwargs = given
            return self._model.whole(*args, **{**self._given, **kwargs})
        for layer in self._model.sequence.values():
            given = layer(given)
        return given

    def _casting(self) -> AbstractContextManager[Any]:
        """Return the context in which forwards and losses run."""
        dtype = self._job.options.training.autocast
        kind = home_of(self._model.whole).type
        return nullcontext() if dtype is None else torch.autocast(kind, dtype=dtype)

    def _seed(self, number: int, name: str) -> None:
        """Seed the random numbers of a layer as its stage does."""
        torch.manual_seed(layer_seed(self._job.options.seed, number, name))

    def _clip(self) -> None:
        """Clip the gradients."""
        clip: Clip | None = self._job.options.training.clip
        if clip is None:
            return
        if clip.value is not None:
            nn.utils.clip_grad_value_(self._trained.values(), clip.value)
            return
        assert clip.norm is not None
        everything = [list(self._trained)]
        for names in self._by_stage if clip.over == "stage" else everything:
            mine = [self._trained[name] for name in names]
            nn.utils.clip_grad_norm_(mine, clip.norm, clip.norm_type)


def copy_of(value: Value) -> Any:
    """Return what was flattened, with copies of its tensors."""
    return unflatten(value.structure, [tensor.clone() for tensor in value.tensors])


def inputs_of(job: Job, batch: Batch) -> tuple[Any, Any]:
    """Return copies of what the model, or its first layer, takes of a mini-batch, and the target.

    A forward or a loss may change them in place, and the mini-batch is the script's own.
    """
    batch = unmarked(batch)
    given = batch.args[0] if job.model.sequence is not None else (batch.args, batch.kwargs)
    copies: tuple[Any, Any] = replaced(
        (given, batch.target), (Tensor,), functools.partial(own, copy=True)
    )
    return copies
