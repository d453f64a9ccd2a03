"""One stage: the forward, the backward and the step of a micro-batch, in this order in the file.

A stage does no I/O: its methods take tensors and return what is to be sent. The loop (`loop.py`)
calls them when the order says so, waits for the messages that they need, and sends what they
return.
"""

from __future__ import annotations

import functools
import math
import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import cloudpickle
import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, _engine_run_backward, get_gradient_edge
from torch.utils.checkpoint import checkpoint

from pipedream_rt.errors import ConfigError, NonFiniteLoss, ScheduleError
from pipedream_rt.messages.tree import Structure, Value, flatten, own, unflatten
from pipedream_rt.planning.code import code_of, refuse_other_code
from pipedream_rt.planning.cut import StageProgram
from pipedream_rt.planning.program import (
    NONE_CARRIED,
    SEQUENCE,
    Slot,
    Step,
    filled,
    held_by,
    put,
    slots_in,
)
from pipedream_rt.schedules import COORDINATOR, Edge, EdgeKind, Kind, Plan
from pipedream_rt.schedules.channels import Address
from pipedream_rt.schedules.plan import LOSS_LAYER, Tie
from pipedream_rt.stage.buffers import ForwardBuffers, buffer_slots, load_buffers, load_state
from pipedream_rt.stage.clipping import Clipper
from pipedream_rt.stage.corrections import StageCorrections
from pipedream_rt.stage.evaluation import (
    EvaluationBuffers,
    changes_modes,
    eval_mode,
    measured,
)
from pipedream_rt.stage.fingerprint import fingerprint, fingerprints_of
from pipedream_rt.stage.guards import telling_changed_inputs
from pipedream_rt.stage.kept import KeptVersions
from pipedream_rt.stage.loss_check import LossCheck
from pipedream_rt.stage.optimizer import (
    Around,
    Hyper,
    OptimizerSpec,
    StageOptimizer,
    packed_extra,
)
from pipedream_rt.stage.parameters import Adjust, VersionedParameters, same
from pipedream_rt.stage.seeds import layer_seed
from pipedream_rt.stage.spec import StageSpec
from pipedream_rt.stage.split_backward import SplitBackward
from pipedream_rt.stage.values import Gifts, Gradients, Part

_VIEW = "(view of "
"""The beginning of the keys, beside the optimizer's state of a parameter, of views of versions."""

_NO_SHARES: Mapping[str, Tensor] = {}
_NO_PARTS: Mapping[Address, Part] = {}
_NO_NORMS: Mapping[int, Tensor] = {}
_NO_TOTALS: Mapping[int, float] = {}
_NONE_BORROWED: Mapping[int, dict[int, dict[str, Tensor]]] = {}


class _Boundary(torch.autograd.Function):
    """The identity at the entrance of a stage, which catches the gradient of an input tensor.

    The module gets a tensor that is no leaf, as inside an unsplit model, so that a first layer may
    work in place (``ReLU(inplace=True)``). The gradient is caught here rather than read from the
    ``grad`` of the leaf, which has the strides of the leaf: kernels round differently for other
    strides.
    """

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, caught: list[Tensor]) -> Tensor:
        """Return a tensor over the leaf's storage that autograd does not know as a view of it."""
        ctx.caught = caught
        # Where no gradient comes, autograd would make one of zeros, which an optimizer takes for a
        # gradient: weights would decay that the unsplit model leaves alone.
        ctx.set_materialize_grads(False)
        alias = torch.empty(0, dtype=leaf.dtype, device=leaf.device)
        return alias.set_(leaf.untyped_storage(), leaf.storage_offset(), leaf.size(), leaf.stride())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, None]:
        """Keep the gradient, if one comes; it goes no further."""
        if gradients[0] is not None:
            ctx.caught.append(gradients[0])
        return None, None


@dataclass(slots=True, kw_only=True)
class _InFlight:
    """What the forward of a micro-batch leaves for its backward.

    Attributes:
        hyper: The hyper-parameters that travelled with the micro-batch.
        empty: Whether the micro-batch has no samples.
        caught: By input, and by tensor of it that asked for a gradient: a list to which autograd
            appends that gradient.
        entrances: The autograd nodes at which the gradients are caught.
        outputs: By consumer, where the backward begins for the tensors sent to it that require a
            gradient, without their values; on the stage that computes the loss, for the loss.
        unit: The gradient of the loss, which is one, on the stage that computes it.
        split: The backward whose first half is done; None before that, and if there is nothing to
            derive.
    """

    hyper: list[Hyper]
    empty: bool = False
    caught: list[list[list[Tensor]]] = field(default_factory=list)
    entrances: list[Node] = field(default_factory=list)
    outputs: list[list[GradientEdge]] = field(default_factory=list)
    unit: Tensor | None = None
    split: SplitBackward | None = None


class _Call(NamedTuple):
    """A step of a program, ready to be done.

    Attributes:
        step: The step.
        call: What it calls.
        only: The slot that is its only argument; -1 if it has others.
        held: The names of the parameters and buffers that it takes.
        unneeded: The slots that no later step needs.
    """

    step: Step
    call: Any
    only: int
    held: list[str]
    unneeded: tuple[int, ...]


@dataclass(slots=True)
class Update:
    """An update from its step until it is applied.

    Attributes:
        number: Number of the update, which makes version ``number + 1``.
        gradients: The gradients of the stage's own weights, in their order.
        hyper: The hyper-parameters, for each parameter group of the whole model.
        read: The versions that its micro-batches with samples have read.
    """

    number: int
    gradients: list[Tensor | None]
    hyper: list[Hyper]
    read: list[int]


class Stage:
    """One stage of the pipeline, all of whose methods run on the thread of its worker.

    What a forward does is said by a program (`StageProgram`): which values the messages of
    producers hold, which steps follow, and which values go to each consumer.

    Args:
        spec: The specification of the stage.
        address: The address of the replica; None for replica 0.

    Attributes:
        index: Index of the stage, 0-based.
        address: The address of this replica of the stage.
        plan: The plan of the pipeline.
        module: The layers of the stage.
        parameters: The weights of the stage, in the versions that micro-batches in flight read.
        borrowed: The weights that other stages own, by owner.
        optimizer: The optimizer of the stage; None until one is set.
        next_forward: Number of the next micro-batch to train on.
        ended: Number of the next micro-batch whose backward is to be done.
        steps: Number of updates whose step is done; some may wait to be applied.
        taken: Number of updates of which it has the weights that other replicas step.
        clipper: Clips the gradients; None if they are not clipped.
        programs: What a forward does, by the number that micro-batches name.
        corrections: The corrections for staleness; None if there are none.
        kept: The kept versions.
        caches: By number, the objects by name in which layers keep what the next micro-batch needs.
        evaluations: By number, the buffers as evaluations that are under way have them.
        modes: Which modules do not follow the mode of the model.
        at: The step that is done now, with its input, for reports of errors; None if none is.
    """

    def __init__(self, spec: StageSpec, address: Address | None = None) -> None:
        """Begin at micro-batch 0, with the weights of the specification as version 0."""
        self.index = spec.stage
        given = spec.plan.address_of(spec.stage) if address is None else address
        self.address: Address = spec.plan.addresses[given]
        self.module = spec.layers
        self._spec = spec
        self.plan = spec.plan
        self._is_replica = spec.plan.replicas[spec.stage] > 1
        self._sources, self._targets = _neighbours(spec.plan, spec.stage)
        self.programs: dict[int, StageProgram] = {}
        self._calls: dict[int, list[_Call]] = {}
        for number, program in enumerate(spec.programs or [_sequence(spec)]):
            self.define(number, program)
        # A loss that is a module has its weights and its mode among those of the stage.
        loss_layer = self.module._modules.get(LOSS_LAYER)
        self._loss_fn = spec.loss_fn if loss_layer is None else loss_layer
        self._loss_check = LossCheck(self._loss_fn) if self._loss_fn is not None else None
        # What each parameter is called elsewhere: in groups, messages and files.
        self._names = spec.names or {name: name for name, _ in self.module.named_parameters()}
        owners = {
            tie.name: edge.source
            for edge, ties in self.plan.borrows(self.index).items()
            for tie in ties
        }
        held: dict[int, dict[str, str]] = {self.index: {}}
        for here, name in self._names.items():
            held.setdefault(owners.get(name, self.index), {})[here] = name
        own = held.pop(self.index)
        self.parameters = VersionedParameters(self.module, self.index, spec.hooks, own)
        self.borrowed = {
            owner: VersionedParameters(self.module, self.index, (), names)
            for owner, names in sorted(held.items())
        }
        # The tied weights that other stages get of this one, and those whose gradients they get.
        self._lent = _names(self.plan.lends(self.index))
        self._shared = _names(self.plan.shares_of(self.index))
        # The weights of the stage by the stage that owns them, its own first.
        self._holders = self._dealt()
        self._by_owner = [(self.index, self.parameters), *self.borrowed.items()]
        self.kept = KeptVersions(self.module)
        self.caches: dict[int, dict[str, Any]] = {}
        self.evaluations = EvaluationBuffers(self.module)
        self._buffers = ForwardBuffers(self.module)
        self._filled = _names_of_buffers(self.module)
        self._kinds = _kinds(self.module)
        self.modes = spec.modes
        self.at: tuple[Step, Any] | None = None
        self.optimizer: StageOptimizer | None = None
        self.steps = self.taken = 0
        self.next_forward = self.ended = self._next_own(0)
        # By update, what this replica has handed over.
        self._parts: dict[int, Part] = {}
        self._updates: deque[Update] = deque()
        self._applies_at_once = spec.plan.applied_by(self.address) is Kind.STEP
        self.clipper: Clipper | None = None
        if spec.clip is not None or spec.scale is not None:
            self.clipper = Clipper(spec.clip, spec.scale, self.plan, self.index, spec.numbers)
        self.corrections: StageCorrections | None = None
        if spec.corrections:
            own_weights = self.parameters.named
            self.corrections = StageCorrections(
                spec.corrections, self.plan, self.index, own_weights, set(self._tied_here)
            )
        self._versions_read: list[int] = []  # by the micro-batches with samples, for the next step
        self._in_flight: dict[int, _InFlight] = {}
        self._hyper: list[Hyper] = []

    def define(self, number: int, program: StageProgram) -> None:
        """Add a program, which micro-batches name by its number."""
        needed = {
            *slots_in(program.output),
            *(s for given in program.gives.values() for s in given),
        }
        calls = []
        for step in reversed(program.steps):
            layer = step.layer
            call = step.target if layer is None else self.module.get_submodule(layer)
            taken = step.taken
            last = [slot for slot in (*taken, *step.filled) if slot not in needed]
            needed.update(taken)
            alone = len(step.args) == 1 and not step.kwargs and isinstance(step.args[0], Slot)
            plain = alone and step.around == SEQUENCE
            only = taken[0] if plain else -1
            calls.append(_Call(step, call, only, step.held, tuple(dict.fromkeys(last))))
        self.programs[number], self._calls[number] = program, calls[::-1]

    # -- forward ------------------------------------------------------------------------------

    def forward(
        self,
        micro_batch: int,
        inputs: Sequence[Value] | None,
        hyper: list[Hyper],
        target: Value | None = None,
        share: float = 1.0,
        program: int = 0,
        compared: Sequence[int] = (),
    ) -> list[Value] | float | None:
        """Run the forward of one micro-batch with the weight version that the plan names.

        Args:
            micro_batch: Number of the micro-batch, 0-based; it must be the next one.
            inputs: One value from each producer, or the model's input; None for a micro-batch
                without samples, which changes nothing.
            hyper: The hyper-parameters of each parameter group, for the update.
            target: The target, on the stage that computes the loss; None on others.
            share: The share that the micro-batch has in its mini-batch, by which the loss that
                backward derives is multiplied; with 0 there is nothing to derive.
            program: Number of the program to follow.
            compared: What is to be compared of losses; see `Target`.

        Returns:
            The value for each consumer; on the stage that computes the loss, the loss without the
            weight; None for a micro-batch without samples.

        Raises:
            NonFiniteLoss: The loss is NaN or infinite, unless the pipeline ignores that.
            ConfigError: The loss is no tensor with one element, or a layer does what versions do
                not allow.
            VersionError: The version is not kept, or the micro-batch is in flight already.
        """
        for owner, weights in self._by_owner:
            version = self.plan.reads(owner, micro_batch)
            weights.begin(micro_batch, version, micro_batch // self.plan.per_update)
        self.next_forward = self._next_own(micro_batch + 1)
        flight = self._in_flight[micro_batch] = _InFlight(hyper=hyper)
        if inputs is None:
            flight.empty = True
            return None
        values = self._enter(inputs, flight, self.programs[program])
        others = len(self._in_flight) > 1
        with (
            self._watching(micro_batch),
            telling_changed_inputs(self._given(inputs) if micro_batch == 0 else None),
            self._buffers.kept_for_backward(others),
            self._reading(micro_batch),
            self._casting(),
            self._saving_weights(micro_batch),
        ):
            if self._spec.recompute:
                made = self._run_twice(program, values, micro_batch)
            else:
                made = self._run(program, values, micro_batch)
            loss = None if target is None else self._loss(made[0], target)
        if loss is None:
            flat = list(map(flatten, made))
            flight.outputs = [
                [get_gradient_edge(t) for t in tensors if t.requires_grad] for _, tensors in flat
            ]
            return [_outgoing(structure, tensors) for structure, tensors in flat]
        reported = float(loss.item())
        if compared:
            assert self._loss_check is not None
            assert target is not None
            with self._reading(micro_batch), self._casting():
                self._loss_check.look(
                    made[0], unflatten(target.structure, target.tensors), share, *compared
                )
        if not share:  # as of labels that are all ignored, whose mean loss is NaN
            return reported
        self._check_finite(reported, micro_batch)
        weighted = loss * share if share != 1.0 else loss
        if self.clipper is not None and self.clipper.scaler is not None:
            update = micro_batch // self.plan.per_update
            weighted = self.clipper.scaler.scaled(weighted, update)
        if weighted.requires_grad:
            flight.outputs, flight.unit = [[get_gradient_edge(weighted)]], torch.ones_like(weighted)
        return reported

    def _enter(
        self, inputs: Sequence[Value], flight: _InFlight, program: StageProgram
    ) -> dict[int, Any]:
        """Return the values that came, by slot, behind the nodes that catch their gradients."""
        values: dict[int, Any] = {}
        for source, (structure, received, requires_grad) in zip(self._sources, inputs, strict=True):
            tensors = list(received)
            caught: list[list[Tensor]] = []
            for i, wanted in enumerate(requires_grad):
                if wanted:
                    caught.append([])
                    leaf = tensors[i].requires_grad_()
                    inside: Tensor = _Boundary.apply(leaf, caught[-1])  # type: ignore[no-untyped-call]
                    assert inside.grad_fn is not None
                    # Read now: a layer that works in place would give the tensor another node.
                    flight.entrances.append(inside.grad_fn)
                    tensors[i] = inside
            flight.caught.append(caught)
            _unpack(unflatten(structure, tensors), program.takes.get(source, ()), values)
        return values

    def _given(self, inputs: Sequence[Value]) -> Value | None:
        """Return what came of the mini-batch itself, among the inputs of a forward."""
        pairs = zip(self._sources, inputs, strict=True)
        return next((value for source, value in pairs if source == COORDINATOR), None)

    def _reading(self, micro_batch: int) -> AbstractContextManager[None]:
        """Let all weights be those that a micro-batch reads, while the body runs."""
        return _all(weights.reading(micro_batch) for _, weights in self._by_owner)

    def _saving_weights(self, micro_batch: int) -> AbstractContextManager[object]:
        """Return the context of a forward in which autograd saves weights."""
        if self.plan.backward_on_newest:
            return self.parameters.followed(micro_batch)
        return nullcontext()

    def _accumulating(self, micro_batch: int) -> AbstractContextManager[None]:
        """Run the body as `_reading` does, and add its gradients to those of the pending update."""
        return _all(
            weights.accumulating(
                micro_batch, self._adjust(micro_batch) if owner == self.index else None
            )
            for owner, weights in self._by_owner
        )

    def _adjust(self, micro_batch: int) -> Adjust | None:
        """Return what corrections do to the gradients of a micro-batch; None for nothing."""
        if self.corrections is None:
            return None
        update, read = micro_batch // self.plan.per_update, self.version_of(micro_batch)
        if not self.corrections.adjusts(update, read):
            return None
        return functools.partial(self.corrections.adjust, update, read)

    def _watching(self, micro_batch: int) -> AbstractContextManager[None]:
        """Refuse what a forward, the body, may not do to weights and to shared buffers.

        To compare all weights takes as long as to copy them, so it is done for the micro-batches 0,
        1, 2, 4, 8 and so on: a layer that changes its weights does so more than once.

        Raises:
            ConfigError: A weight or a shared buffer was changed.
        """
        looks = micro_batch & (micro_batch - 1) == 0
        return self._refusing(micro_batch, looks) if looks or self._spec.shared else nullcontext()

    @contextmanager
    def _refusing(self, micro_batch: int, looks: bool) -> Iterator[None]:
        """See `_watching`; weights are only looked at if ``looks``."""
        # Where a schedule flushes there is one version, and a change in place is one of it; but of
        # a weight that other stages use too, these have copies.
        every = not self.plan.flushes or self._is_replica
        compared = None if every else frozenset(self._tied_here)
        owners = [weights for _, weights in self._by_owner]
        before = [weights.copies(micro_batch, compared) if looks else [] for weights in owners]
        shared = self._shared_buffers()
        values = {name: self.module.get_buffer(name).clone() for name in shared if looks}
        yield
        if looks:
            for weights, copies in zip(owners, before, strict=True):
                weights.require_unchanged(micro_batch, copies)
            self._refuse_new_names()
        for name, now in self._shared_buffers().items():
            moved = name in values and not torch.equal(values[name], self.module.get_buffer(name))
            if now != shared[name] or moved:
                raise ConfigError(
                    f"stage {self.index}: a forward changed the buffer {name!r}, which layers of "
                    "other stages share; each stage has a copy of it, so they would part. Keep the "
                    "layers that share it in one stage"
                )

    def _refuse_new_names(self) -> None:
        """Refuse parameters and buffers that the layers did not have at the start.

        Raises:
            ConfigError: There is one, or a parameter that was frozen is so no more.
        """
        now = _kinds(self.module)
        for name, kind in now.items():
            if self._kinds.get(name) != kind:
                raise ConfigError(
                    f"stage {self.index}: a forward has made {name!r} a {kind}, which it was not "
                    "at the start, so it would be missing in state dicts and checkpoints, or never "
                    "be trained; make it in __init__, a buffer as None if it has no value yet"
                )

    def _shared_buffers(self) -> dict[str, tuple[int, int]]:
        """Return, for each buffer that other stages share, what differs once it was changed."""
        buffers = {name: self.module.get_buffer(name) for name in self._spec.shared}
        return {name: (id(buffer), buffer._version) for name, buffer in buffers.items()}

    def _run(
        self,
        program: int,
        values: dict[int, Any],
        number: int | str,
        carried: Mapping[str, Any] = NONE_CARRIED,
    ) -> list[Any]:
        """Do the steps of a program, each with its own seed.

        Args:
            program: Number of the program.
            values: The values that came, by slot.
            number: Number of the micro-batch, for the seeds.
            carried: The objects in which layers keep something, by name.

        Returns:
            What goes to each consumer; on the last stage the result of the forward.
        """
        for step, call, only, names, unneeded in self._calls[program]:
            if step.random:
                self._seed(number, step.name)
            if only >= 0:
                self.at = step, values[only]
                result = call(values[only])
            else:
                held = {name: self._held(name) for name in names}
                args, kwargs = filled((step.args, step.kwargs), values, held, carried)
                self.at = step, args[0] if len(args) == 1 and not kwargs else (*args, kwargs)
                with step.around.entered():
                    result = call(*args, **kwargs)
            put(step, result, values)
            # A value that is kept longer than in a plain forward would be memory.
            for slot in unneeded:
                del values[slot]
        self.at = None
        ours = self.programs[program]
        if not self.plan.consumers(self.index):
            return [filled(ours.output, values, {name: self._held(name) for name in ours.held})]
        return [_pack(ours.gives.get(target, ()), values) for target in self._targets]

    def _run_twice(self, program: int, values: dict[int, Any], number: int) -> list[Any]:
        """Do the steps of a program, and once more in the backward, with the same result.

        Between the two, autograd keeps the inputs of the stage alone. The second time reads the
        same weights, since the backward reads those of the forward, draws the same random numbers,
        since each step is seeded, finds the buffers as the first time found them, and leaves them
        as they are.
        """
        buffers = self._buffers.copies()

        def run(*given: Any) -> list[Any]:
            # Copies, since a step may change its input in place, which the second time needs too.
            copies = (g.clone() if isinstance(g, Tensor) else g for g in given)
            return self._run(program, dict(zip(values, copies, strict=True)), number)

        made: list[Any] = checkpoint(
            run,
            *values.values(),
            use_reentrant=False,
            preserve_rng_state=False,
            context_fn=lambda: (nullcontext(), self._buffers.put_back_for_a_while(buffers)),
        )
        return made

    def _casting(self) -> Any:
        """Return the context in which forwards and losses run."""
        dtype = self._spec.autocast
        return nullcontext() if dtype is None else torch.autocast("cpu", dtype=dtype)

    def _held(self, name: str) -> Any:
        """Return a parameter, in the version that is read now, a buffer, or a module."""
        return held_by(self.module, name)

    def _seed(self, number: int | str, name: str) -> None:
        """Seed torch's generator for the numbers that a layer, backward or optimizer may draw."""
        torch.default_generator.manual_seed(layer_seed(self._spec.seed, number, name))

    def _loss(self, output: Any, target: Value) -> Tensor:
        """Compute the loss.

        Raises:
            ConfigError: It is no tensor with one element.
        """
        assert self._loss_fn is not None
        loss = self._loss_fn(output, unflatten(target.structure, target.tensors))
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            found = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise ConfigError(
                f"loss_fn must return a tensor with one element, it returned {found}; "
                "reduce it, for instance with .mean()"
            )
        return loss

    def _check_finite(self, reported: float, micro_batch: int) -> None:
        """Refuse to train on a loss that is NaN or infinite, unless the pipeline ignores that.

        Raises:
            NonFiniteLoss: The loss is NaN or infinite.
        """
        if self._spec.on_nan == "raise" and not math.isfinite(reported):
            uncounted = ", or, if none of its labels count, say what it weighs by weigh="
            raise NonFiniteLoss(
                f"stage {self.index}: the loss of micro-batch {micro_batch} is {reported}; "
                'lower the learning rate, look at the data, pass on_nan="ignore"'
                + (uncounted if math.isnan(reported) and self.plan.per_update > 1 else ""),
                stage=self.index,
                action=f"F{micro_batch}",
            )

    # -- backward -----------------------------------------------------------------------------

    def backward(
        self,
        micro_batch: int,
        gradients: Sequence[Gradients] = (),
        shares: Mapping[str, Tensor] = _NO_SHARES,
    ) -> list[Gradients]:
        """Run the backward of one micro-batch with the weight version that its forward read.

        Gradients are added to the pending update; weights do not change here.

        Args:
            micro_batch: Number of the micro-batch, which is in flight on this stage.
            gradients: From each consumer, the gradients of the output that it was sent; empty on
                the stage that computes the loss.
            shares: At the end of an update, the shares of later stages in the gradients of tied
                weights, by name in the unsplit model.

        Returns:
            For each input of the forward, the gradients of its tensors that asked for one.

        Raises:
            ScheduleError: The micro-batch is not in flight.
        """
        flight = self._flight_of(micro_batch)
        outputs, given = _to_derive(flight, gradients)
        if self.plan.per_update == 1:
            # As roots, they are summed with the gradients of the uses on this stage one after
            # another, as in the unsplit model: from the last use to the first.
            for name, share in shares.items():
                leaf = self._holder(name).leaf(name, micro_batch)
                outputs.append(get_gradient_edge(leaf))
                given.append(share)
        with self._accumulating(micro_batch):
            self._seed(micro_batch, "backward")
            if outputs:
                # What torch.autograd.backward calls, which looks before at what is so by itself: a
                # fifth of the time of a small backward.
                _engine_run_backward(
                    tuple(outputs), tuple(given), False, False, (),
                    allow_unreachable=True, accumulate_grad=True,
                )  # fmt: skip
        if self.plan.per_update > 1:
            self._add_shares(shares)
        self._end(micro_batch)
        return _found(flight)

    @property
    def _tied_here(self) -> list[str]:
        """The names of the weights that this stage and others use."""
        return [tie.name for tie in self.plan.ties if self.index in tie.stages]

    def _holder(self, name: str) -> VersionedParameters:
        """Return those weights, of this stage or of another owner, among which a tied one is."""
        return next(weights for _, weights in self._by_owner if name in weights.named)

    def _add_shares(self, shares: Mapping[str, Tensor]) -> None:
        """Add the shares of later stages to the gradients of tied weights."""
        for name, share in shares.items():
            self._holder(name).add_gradient(name, share)

    def shares(self, micro_batch: int) -> Gifts:
        """Take the gradients of weights that other stages own, at the end of an update.

        Args:
            micro_batch: Number of the micro-batch whose backward has ended.
        """
        if not self._shared or (micro_batch + 1) % self.plan.per_update:
            return {}
        return {EdgeKind.SHARE: {n: self._holder(n).take_gradient(n) for n in self._shared}}

    def weight(self, name: str) -> Tensor:
        """Return a copy of the newest version of a tied weight that this stage owns."""
        return self._holder(name).named[name].detach().clone()

    def receive(self, owner: int, named: Mapping[str, Tensor]) -> None:
        """Take the next version of weights that another stage owns.

        Args:
            owner: The stage that owns them.
            named: The weights, by name in the unsplit model.
        """
        self.borrowed[owner].receive(self.plan.reads(owner, self.next_forward), dict(named))

    def backward_input(
        self, micro_batch: int, gradients: Sequence[Gradients] = ()
    ) -> list[Gradients]:
        """Run the half of a backward that gives the gradients of the inputs; see `backward`.

        Args:
            micro_batch: Number of the micro-batch, which is in flight on this stage.
            gradients: From each consumer, the gradients of the output that it was sent; empty on
                the stage that computes the loss.

        Returns:
            For each input of the forward, the gradients of its tensors that asked for one.

        Raises:
            ScheduleError: The micro-batch is not in flight.
        """
        flight = self._flight_of(micro_batch)
        outputs, given = _to_derive(flight, gradients)
        with self._reading(micro_batch):
            if outputs:
                leaves = [
                    leaf for _, weights in self._by_owner for leaf in weights.leaves(micro_batch)
                ]
                flight.split = SplitBackward(outputs, given, flight.entrances, leaves)
                self._seed(micro_batch, "backward")
                flight.split.first_half()
        flight.outputs = []
        return _found(flight)

    def backward_weight(self, micro_batch: int, shares: Mapping[str, Tensor] = _NO_SHARES) -> None:
        """Run the other half of a backward: add the gradients of the weights to the pending update.

        Args:
            micro_batch: Number of the micro-batch, whose `backward_input` is done.
            shares: As in `backward`.

        Raises:
            ScheduleError: The micro-batch is not in flight.
        """
        flight = self._flight_of(micro_batch)
        with self._accumulating(micro_batch):
            self._seed(micro_batch, "backward")
            if flight.split is not None:
                flight.split.second_half()
        self._add_shares(shares)
        self._end(micro_batch)

    def version_of(self, micro_batch: int) -> int:
        """Return the weight version that a micro-batch in flight reads.

        Raises:
            VersionError: The micro-batch is not in flight.
        """
        return self.parameters.ledger.pinned(micro_batch)

    def require_in_flight(self, micro_batch: int) -> None:
        """Refuse the backward of a micro-batch that is not in flight.

        Raises:
            ScheduleError: The micro-batch is not in flight.
        """
        if micro_batch not in self._in_flight:
            raise ScheduleError(
                f"stage {self.index}: the order wants the backward of micro-batch {micro_batch}, "
                f"which is not in flight; the micro-batches in flight are {list(self._in_flight)}"
            )

    def _flight_of(self, micro_batch: int) -> _InFlight:
        """Return what the forward of a micro-batch has left for its backward.

        Raises:
            ScheduleError: The micro-batch is not in flight.
        """
        self.require_in_flight(micro_batch)
        return self._in_flight[micro_batch]

    def _end(self, micro_batch: int) -> None:
        """End the flight of a micro-batch whose gradients are in the pending update."""
        flight = self._in_flight.pop(micro_batch)
        self._hyper = flight.hyper
        self.ended = self._next_own(micro_batch + 1)
        for owner, weights in self._by_owner:
            version = weights.end(micro_batch)
            if owner == self.index and not flight.empty:
                self._versions_read.append(version)

    # -- step ---------------------------------------------------------------------------------

    def _dealt(self) -> dict[Address, list[str]]:
        """Return the names of the weights that each replica steps.

        If the optimizer is divided, the largest weights are dealt first, each to the replica that
        has the least so far; else this replica steps all.
        """
        named = self.parameters.named
        if not self.plan.shape.shards(self.index):
            return {self.address: list(named)}
        held = dict.fromkeys(sorted((self.address, *self.plan.others(self.address))), 0)
        dealt: dict[Address, list[str]] = {address: [] for address in held}
        for name in sorted(named, key=lambda each: -named[each].nbytes):
            least = min(held, key=lambda address: held[address])
            held[least] += named[name].nbytes
            dealt[least].append(name)
        return dealt

    @property
    def stepped_here(self) -> dict[str, nn.Parameter]:
        """The parameters that this replica steps, by name, in the order of the module."""
        mine, named = {*self._holders[self.address]}, self.parameters.named
        return {name: parameter for name, parameter in named.items() if name in mine}

    @torch.no_grad()
    def stepped(self) -> tuple[Tensor, ...]:
        """Return copies of the newest weights that this replica steps, for the others."""
        named = self.parameters.named
        return tuple(named[name].detach().clone() for name in self._holders[self.address])

    @torch.no_grad()
    def take(self, update: int, others: Mapping[Address, Sequence[Tensor]]) -> None:
        """Take the weights that other replicas have stepped, which makes the newest version whole.

        Args:
            update: Number of the update.
            others: The weights, by the address of their replica.
        """
        named = self.parameters.named
        for address, tensors in others.items():
            for name, tensor in zip(self._holders[address], tensors, strict=True):
                named[name].data.copy_(tensor)
        self.taken = update + 1

    @property
    def whole_version(self) -> int:
        """The newest version of which all weights are there."""
        shards = self.plan.shape.shards(self.index)
        return self.taken if shards else self.parameters.ledger.newest

    def _next_own(self, micro_batch: int) -> int:
        """Return the first micro-batch from a number on that goes to this replica."""
        if not self._is_replica:
            return micro_batch
        return self.plan.next_own(self.address, micro_batch)

    def reduce(self, update: int) -> Part:
        """Take what this replica has summed for an update, to hand it over to the others.

        Raises:
            ConfigError: A gradient is sparse.
        """
        self._parts[update] = part = self._take_part()
        for name, gradient in zip(self.parameters.named, part.gradients, strict=True):
            if gradient is not None and gradient.layout is not torch.strided:
                raise ConfigError(
                    f"stage {self.index}: the gradient of {name!r} is sparse, and replicas add up "
                    "dense ones alone; make the layer with sparse=False"
                )
        return part

    def _take_part(self) -> Part:
        """Take the pending update."""
        part = Part(self.parameters.take_gradients(), self._hyper, self._versions_read)
        self._versions_read = []
        return part

    @torch.no_grad()
    def _added_up(self, update: int, others: Mapping[Address, Part]) -> Part:
        """Add up the gradients of all replicas in rank order."""
        parts = dict(others)
        if update in self._parts:
            parts[self.address] = self._parts.pop(update)
        ordered = [parts[address] for address in sorted(parts)]
        total: list[Tensor | None] = [None] * len(self.parameters.named)
        for part in ordered:
            for i, gradient in enumerate(part.gradients):
                before = total[i]
                if gradient is not None:
                    # The update may change it, and others still have what was handed over.
                    total[i] = gradient.clone() if before is None else before.add_(gradient)
        read = [version for part in ordered for version in part.read]
        return Part(total, ordered[0].hyper, read)

    def step(
        self,
        update: int,
        parts: Mapping[Address, Part] = _NO_PARTS,
        behind: Mapping[int, Tensor] = _NO_NORMS,
        totals: Mapping[int, float] = _NO_TOTALS,
    ) -> Gifts:
        """Sum and measure the gradients of an update, and apply it unless it has to wait.

        Args:
            update: Number of the update, 0-based, which makes version ``update + 1``.
            parts: What the other replicas of the stage have summed, by address.
            behind: The norms of the gradients of the stages behind this one, by the places of
                their parameters in the model.
            totals: Total norms of updates before this one that have come.

        Returns:
            What goes to other stages and replicas.

        Raises:
            ConfigError: The stage has no optimizer.
        """
        part = self._added_up(update, parts) if self._is_replica else self._take_part()
        made = Update(update, part.gradients, part.hyper, part.read)
        self._updates.append(made)
        self.steps = update + 1
        gifts: dict[EdgeKind, Any] = {}
        if self.clipper is not None and self.clipper.total:
            self.clipper.learn(totals)
            named = dict(zip(self.parameters.named, made.gradients, strict=True))
            gifts[EdgeKind.NORM] = norms = self.clipper.measure(update, named, behind)
            if self.clipper.is_first:
                gifts[EdgeKind.TOTAL] = update, self.clipper.add_up(update, norms)
        if self._applies_at_once:
            gifts |= self.apply(update)
        return gifts

    def learn(self, totals: Mapping[int, float]) -> None:
        """Note total norms, by update, which later updates are clipped by."""
        if self.clipper is not None:
            self.clipper.learn(totals)

    def apply(self, update: int, totals: Mapping[int, float] = _NO_TOTALS) -> Gifts:
        """Apply an update whose step is done to the newest weight version.

        Args:
            update: Number of the update.
            totals: Its total norm, if it has waited for that.

        Returns:
            What goes to other stages and replicas.

        Raises:
            ConfigError: The stage has no optimizer.
        """
        made = self._updates.popleft()
        assert made.number == update
        self.learn(totals)
        if self.optimizer is None:
            raise ConfigError("training needs an optimizer; give Pipeline one")
        optimizer = self.optimizer
        around: Around = nullcontext
        if self.corrections is not None:
            read = made.read or [update]
            around = functools.partial(self.corrections.stepping, update, sum(read) / len(read))
        self._seed(update, "step")

        def change() -> None:
            if self.clipper is not None:
                if self.clipper.skips(update):
                    return
                self.clipper.clip(update, list(self.parameters.named.values()))
            optimizer.step(made.hyper, around)

        following = self.plan.next_of_stage(self.address, self.next_forward, update)
        next_read = self.plan.reads(self.index, following)
        self.parameters.step_with(made.gradients, next_read, change)
        self._look_ahead(update + 1)  # after an update that was skipped too
        gifts: dict[EdgeKind, Any] = {}
        if self._lent:
            gifts[EdgeKind.WEIGHT] = {name: self.weight(name) for name in self._lent}
        if self.plan.shape.shards(self.index):
            gifts[EdgeKind.STEPPED] = self.stepped()
        return gifts

    @torch.no_grad()
    def _look_ahead(self, version: int) -> None:
        """Make the views of the version that a step has made."""
        assert self.optimizer is not None
        if self.corrections is None or self.optimizer.torch_optimizer is None:
            return
        for staleness in self.corrections.distances(version):
            view = self.parameters.add_view(staleness)
            self.corrections.look_ahead(version, staleness, view, self.optimizer.torch_optimizer)

    # -- evaluation and inference -------------------------------------------------------------

    def evaluate(
        self,
        number: int,
        inputs: Sequence[Value],
        target: Value | None,
        program: int = 0,
        *,
        metrics: bytes = b"",
        buffers: int = 0,
        keep_buffers: bool = False,
    ) -> tuple[list[Value] | float, list[float | str]]:
        """Run a forward for `Pipeline.evaluate`: newest weights, eval mode, no gradient.

        It leaves the stage as it was, but for buffers that are to be kept.

        Args:
            number: Number of the micro-batch among those that are not trained on.
            inputs: One value from each producer, or the model's input.
            target: The target, on the stage that computes the loss; None on others.
            program: Number of the program to follow.
            metrics: What is computed beside the loss, pickled.
            buffers: Number of the evaluation, whose buffers go on from pass to pass; 0 for none.
            keep_buffers: Whether the stage's own buffers go on.

        Returns:
            The value for each consumer; on the stage that computes the loss, the loss. And what the
            metrics say.

        Raises:
            ConfigError: The loss is no tensor with one element.
        """
        of_buffers = self.evaluations.of(buffers, keep_buffers)
        mode = eval_mode(self.module, self.parameters, self.modes, of_buffers)
        with torch.no_grad(), mode, self._casting():
            made = self._pass(f"evaluate {number}", inputs, program)
            if target is None:
                return [_outgoing(*flatten(value)) for value in made], []
            loss = float(self._loss(made[0], target).item())
            given = unflatten(target.structure, target.tensors) if metrics else None
            return loss, measured(metrics, made[0], given)

    def infer(
        self,
        number: int,
        inputs: Sequence[Value],
        *,
        training: bool = False,
        program: int = 0,
        cache: int = 0,
    ) -> list[Value]:
        """Run a forward for inference: newest weights, no gradient.

        Args:
            number: Number of the micro-batch among those that are not trained on.
            inputs: One value from each producer, or the model's input.
            training: Whether every module keeps the mode that it has in training, in which buffers
                may change; else eval mode, which leaves the stage as it was.
            program: Number of the program to follow.
            cache: Number of the cache that the layers use and fill; 0 for none.

        Returns:
            The value for each consumer; on the last stage the output alone.
        """
        mode = nullcontext() if training else eval_mode(self.module, self.parameters, self.modes)
        carried = self._cache(cache, program)
        with torch.no_grad(), mode, self._casting():
            made = self._pass(f"infer {number}", inputs, program, carried)
            return [_outgoing(*flatten(value)) for value in made]

    def _cache(self, number: int, program: int) -> Mapping[str, Any]:
        """Return the objects of a cache, which a program that carries some at first begins."""
        if not number:
            return NONE_CARRIED
        if carries := self.programs[program].carries:
            self.caches[number] = {name: cloudpickle.loads(data) for name, data in carries.items()}
        return self.caches[number]

    def _pass(
        self,
        number: str,
        inputs: Sequence[Value],
        program: int,
        carried: Mapping[str, Any] = NONE_CARRIED,
    ) -> list[Any]:
        """Do the steps of a program without gradient; see `_run`."""
        values: dict[int, Any] = {}
        for source, (structure, tensors, _) in zip(self._sources, inputs, strict=True):
            slots = self.programs[program].takes.get(source, ())
            _unpack(unflatten(structure, tensors), slots, values)
        return self._run(program, values, number, carried)

    def keep(self, number: int, average: bool, borrowed: Mapping[str, Tensor]) -> None:
        """Keep a copy of the newest weights and of the buffers, or of the average of the weights.

        Args:
            number: Number of the kept version.
            average: Whether to copy the average that the optimizer keeps in the place of weights.
            borrowed: Averages of tied weights, by name in the unsplit model, of which those that
                other stages own are taken.
        """
        values: dict[int, Tensor] = {}
        if average:
            assert self.optimizer is not None
            values = {id(self.parameters.named[n]): t for n, t in self.optimizer.average().items()}
            for weights in self.borrowed.values():
                values |= {id(p): borrowed[n] for n, p in weights.named.items() if n in borrowed}
        self.kept.keep(number, values)

    def set_mode(self, training: bool) -> None:
        """Set every module to training or eval mode, as `nn.Module.train`.

        Raises:
            ConfigError: That changes weights of which there are several versions.
        """
        if not changes_modes(self.module):
            self.modes.set(self.module, training)
            return
        with self._refusing_changes("to set the mode"):
            self.modes.set(self.module, training)

    def call(self, pickled: bytes) -> tuple[bool, Any]:
        """Call a function of the user's with the module of the stage.

        Args:
            pickled: The function and its further arguments, pickled.

        Returns:
            Whether it went well; and what it returned, or the text of its error.
        """
        function, args, kwargs = cloudpickle.loads(pickled)
        try:
            with self._refusing_changes("the function"), self._refusing_others():
                result = function(self.module, *args, **kwargs)
            flatten(result)  # what cannot be sent is an error of the function too
        except Exception as error:  # the function may raise anything
            return False, f"{type(error).__name__}: {error}"
        return True, result

    @contextmanager
    def _refusing_others(self) -> Iterator[None]:
        """Refuse that the body puts other modules or parameters, or other data, into the module.

        Raises:
            ConfigError: It has; the module is again as it was.
        """
        places: list[tuple[Any, dict[str, Any]]] = [
            (slots, dict(slots))
            for owner in self.module.modules()
            for slots in (owner._modules, owner._parameters)
        ]
        before = [(n, p, p.data, p.requires_grad) for n, p in self.module.named_parameters()]
        yield
        wrong = [
            name
            for slots, entries in places
            for name in {**slots, **entries}
            if slots.get(name) is not entries.get(name)
        ]
        for slots, entries in places:
            slots.clear()
            slots.update(entries)
        for name, parameter, data, trained in before:
            if parameter.data_ptr() != data.data_ptr() or parameter.requires_grad != trained:
                wrong.append(name)
                parameter.data = data
                parameter.requires_grad_(trained)
        if wrong:
            raise ConfigError(
                f"stage {self.index}: the function replaced {wrong[0]!r}, its data or its "
                "requires_grad, of which the stage would not know; change values in place"
            )

    @contextmanager
    def _refusing_changes(self, what: str) -> Iterator[None]:
        """Refuse that the body changes weights which others have in older versions, or copies of.

        Args:
            what: What the body does, for the message.

        Raises:
            ConfigError: It has; the weights are again as they were.
        """
        tied = self._tied_here
        own = {
            name: (parameter, parameter.detach().clone())
            for _, weights in self._by_owner
            for name, parameter in weights.named.items()
            if name in tied or not self.plan.flushes or self._is_replica
        }
        yield
        changed = [name for name, (p, before) in own.items() if not same(p, before)]
        for name in changed:
            parameter, before = own[name]
            parameter.data.copy_(before)
        if changed:
            raise ConfigError(
                f"stage {self.index}: {what} changed the parameter {changed[0]!r}, and the older "
                "versions of it, which micro-batches to come read, or its copies on other stages "
                "or replicas would not change with it. Use load_state_dict"
            )

    # -- state --------------------------------------------------------------------------------

    @torch.no_grad()
    def load_state(self, state: dict[str, Tensor]) -> None:
        """Load weights and buffers, and forget the versions before the newest.

        Args:
            state: A state dict with the keys of the unsplit model.

        Raises:
            VersionError: A micro-batch is in flight.
        """
        self.parameters.reset(lambda: load_state(self.module, state))
        for weights in self.borrowed.values():
            weights.reset(lambda: None)

    def state_dict(self, version: int = 0) -> dict[str, Any]:
        """Return the state dict of the stage, with the weights that it owns under all their keys.

        Weights that others own are left out.

        Args:
            version: Number of the kept version to return; 0 for the newest weights.
        """
        copies = self.kept.copies(version)
        foreign = {id(p) for weights in self.borrowed.values() for p in weights.named.values()}
        state = {
            key: copies.get(key, value).detach() if isinstance(value, Tensor) else value
            for key, value in self.module.state_dict(keep_vars=True).items()
            if id(value) not in foreign
        }
        for name, others in self._spec.aliases.items():
            state.update(dict.fromkeys(others, state[name]))
        return state

    def older(self) -> dict[int, dict[str, Tensor]]:
        """Return the versions of the stage's own weights but the newest."""
        return self.parameters.older()

    @torch.no_grad()
    def restore(
        self,
        step: int,
        weights: dict[str, Tensor],
        older: dict[int, dict[str, Tensor]],
        buffers: dict[str, Tensor],
        borrowed: Mapping[int, dict[int, dict[str, Tensor]]] = _NONE_BORROWED,
    ) -> None:
        """Go on with the state after an update, while nothing is in flight.

        Args:
            step: Number of updates done.
            weights: The newest version, under the keys of the unsplit model.
            older: The versions before it: by version, the tensor of every trainable parameter that
                the stage owns.
            buffers: The buffers of the stage, by name.
            borrowed: The same of weights that other stages own, by owner.

        Raises:
            VersionError: A micro-batch is in flight.
        """
        load_buffers(self.module, buffers)
        self.parameters.restore(step, older, lambda: load_state(self.module, weights))
        for owner, of_owner in self.borrowed.items():
            of_owner.restore(step, borrowed[owner], lambda: None)
        self.next_forward = self.ended = self._next_own(step * self.plan.per_update)
        self.steps = self.taken = step

    def owned(self, by_key: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the values of the parameters that the stage owns, frozen ones too, by their names.

        Args:
            by_key: Values by the keys of the stage's module, in which some may be missing.
        """
        foreign = {name for weights in self.borrowed.values() for name in weights.named}
        keys = ((key, self._names.get(key, key)) for key, _ in self.module.named_parameters())
        return {n: by_key[key] for key, n in keys if key in by_key and n not in foreign}

    def emptied(self) -> list[str]:
        """Return the names of the buffers in whose places a forward has put None."""
        return sorted(self._filled - _names_of_buffers(self.module))

    @torch.no_grad()
    def fingerprints(self) -> dict[str, Any]:
        """Return the fingerprints of the stage; see `fingerprints_of`."""
        parameters = self.parameters
        return fingerprints_of(
            self.owned(dict(self.module.named_parameters())),
            dict(self.module.named_buffers()),
            self.step_state(),
            parameters.older(),
            parameters.ledger.newest,
            packed_extra({**self.module.state_dict(), **dict.fromkeys(self.emptied())}),
        )

    @torch.no_grad()
    def fingerprint_of(self, micro_batch: int) -> str:
        """Return the fingerprint of the trainable weights that a micro-batch reads, and buffers.

        Neither depends on timing or on a flush: the plan says which version is read, and buffers
        advance in the order of the forwards.

        Args:
            micro_batch: Number of the micro-batch, which is in flight.
        """
        leaves = self.parameters.leaves(micro_batch)
        weights = dict(zip(self.parameters.named, leaves, strict=True))
        return fingerprint({**weights, **dict(self.module.named_buffers())})

    def set_optimizer(self, pickled: bytes) -> list[str]:
        """Build the optimizer from a pickled `OptimizerSpec`; its state starts empty.

        Returns:
            The names of the parameters that it steps.

        Raises:
            ConfigError: This process has other code of the optimizer than the script.
        """
        spec: OptimizerSpec = cloudpickle.loads(pickled)
        if spec.code is not None:
            refuse_other_code(code_of([spec.optimizer_class]), spec.code)
        before = self.optimizer
        # Own values of optimizers stand under this number, which no other one may have.
        number = self.address if self.plan.shape.shard_optimizer else self.index
        self.optimizer = StageOptimizer(spec, self.stepped_here, number)
        if before is not None:
            self.optimizer.go_on_averaging(before)
        return self.optimizer.steps

    def _correction_bytes(self) -> int:
        """Return the bytes that corrections take: what they remember, and the views of versions."""
        if self.corrections is None:
            return 0
        views = (t for named in self.parameters.views().values() for t in named.values())
        return self.corrections.nbytes() + sum(tensor.nbytes for tensor in views)

    def step_state(self) -> dict[str, dict[str, Any]]:
        """Return the state of the optimizer and of corrections; see `StageOptimizer.state`.

        Raises:
            ConfigError: It cannot be kept.
        """
        if self.optimizer is None:
            return {}
        state = self.optimizer.state()
        if self.corrections is not None:
            for name, values in self.corrections.state().items():
                state.setdefault(name, {}).update(values)
            for (version, staleness), named in self.parameters.views().items():
                for name, tensor in named.items():
                    state.setdefault(name, {})[f"{_VIEW}{version} at {staleness})"] = tensor
        return state

    def load_step_state(self, state: dict[str, dict[str, Any]]) -> None:
        """Go on with what `step_state` has returned, after `restore`."""
        if self.optimizer is not None:
            self.optimizer.load_state(state)
        if self.corrections is not None:
            self.corrections.load_state(state)
            self.parameters.restore_views(_views_in(state, self.parameters))

    def statistics(self) -> dict[str, int]:
        """Return the counters of this stage for `Pipeline.statistics`."""
        ledger = self.parameters.ledger
        return {
            "stage": self.index,
            "updates": ledger.newest,
            "updates_skipped": self.clipper.skipped if self.clipper else 0,
            "versions_kept": len(ledger.kept),
            "versions_kept_most": ledger.kept_most,
            "buffers_allocated": self.parameters.allocated,
            "weight_bytes": self.parameters.nbytes,
            "correction_bytes": self._correction_bytes(),
            "parameters": sum(p.numel() for p in self.module.parameters())
            - sum(p.numel() for w in self.borrowed.values() for p in w.named.values()),
        }


def _views_in(
    state: Mapping[str, Mapping[str, Any]], parameters: VersionedParameters
) -> dict[tuple[int, int], dict[str, Tensor]]:
    """Return those views in a state that are whole, and of versions that are kept."""
    found: dict[tuple[int, int], dict[str, Tensor]] = {}
    for name, parameter in parameters.named.items():
        for key, value in state.get(name, {}).items():
            named = re.fullmatch(re.escape(_VIEW) + r"(\d{1,18}) at (\d{1,18})\)", key)
            if named and isinstance(value, Tensor) and value.shape == parameter.shape:
                version, staleness = map(int, named.groups())
                found.setdefault((version, staleness), {})[name] = value
    return {
        (version, staleness): named
        for (version, staleness), named in found.items()
        if version in parameters.ledger.kept and len(named) == len(parameters.named)
    }


def _names(ties: Mapping[Edge, Sequence[Tie]]) -> list[str]:
    """Return the names of the weights of some ties, each once."""
    return list(dict.fromkeys(tie.name for of_edge in ties.values() for tie in of_edge))


def _kinds(module: nn.Module) -> dict[str, str]:
    """Return, by name, what is a parameter, a frozen parameter or a buffer of a module."""
    found = {
        name: "parameter" if p.requires_grad else "frozen parameter"
        for name, p in module.named_parameters()
    }
    return {**found, **dict.fromkeys(buffer_slots(module), "buffer")}


def _sequence(spec: StageSpec) -> StageProgram:
    """Return the program of a stage whose layers are called one after another.

    With several producers, the input of the first layer is the tuple of their outputs; all
    consumers get the same output.
    """
    sources, targets = _neighbours(spec.plan, spec.stage)
    count = len(sources)
    # named_children would leave out a layer that stands in the sequence a second time.
    layers = spec.layers._modules.items()
    names = [name for name, layer in layers if layer is not None and name != LOSS_LAYER]
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
    """Return the stages from which a stage takes values, and those to which it gives some.

    The coordinator is among the former if the stage takes inputs of the model.
    """
    inputs = [COORDINATOR] if stage in plan.entries else []
    return [*inputs, *plan.producers(stage)], list(plan.consumers(stage))


def _pack(slots: Sequence[int], values: dict[int, Any]) -> Any:
    """Return the values of slots as one value: itself if there is one, else their tuple."""
    return values[slots[0]] if len(slots) == 1 else tuple(values[slot] for slot in slots)


def _unpack(value: Any, slots: Sequence[int], values: dict[int, Any]) -> None:
    """Put a value that `_pack` has made into slots."""
    values.update(zip(slots, (value,) if len(slots) == 1 else value))


def _outgoing(structure: Structure, tensors: Sequence[Tensor]) -> Value:
    """Return a flattened output as a value whose tensors do not change until they are sent.

    Tensors that require a gradient belong to autograd, and nobody changes them. Other tensors are
    copied, because they may be a buffer or a workspace that the next forward overwrites.
    """
    wanted = [tensor.requires_grad for tensor in tensors]
    sent = [own(t, copy=not graded) for t, graded in zip(tensors, wanted, strict=True)]
    return Value(structure, tuple(sent), tuple(wanted))


def _all(contexts: Iterable[AbstractContextManager[None]]) -> AbstractContextManager[None]:
    """Return one context for several, which is itself if there is one."""
    first, *others = contexts
    return _entered([first, *others]) if others else first


@contextmanager
def _entered(contexts: Sequence[AbstractContextManager[None]]) -> Iterator[None]:
    """Enter all contexts, one after another."""
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield


def _to_derive(
    flight: _InFlight, gradients: Sequence[Gradients]
) -> tuple[list[GradientEdge], list[Tensor]]:
    """Return where a backward starts, and the gradients there.

    These are the outputs of which a consumer sent a gradient, once for each such consumer; or the
    loss.
    """
    if flight.unit is not None:
        return [*flight.outputs[0]], [flight.unit]
    pairs = [
        (output, gradient)
        for outputs, of_consumer in zip(flight.outputs, gradients)
        for output, gradient in zip(outputs, of_consumer)
        if gradient is not None
    ]
    return [output for output, _ in pairs], [gradient for _, gradient in pairs]


def _found(flight: _InFlight) -> list[Gradients]:
    """Return the gradients that were caught at the entrance of the stage, for each input."""
    return [[own(c[0]) if c else None for c in caught] for caught in flight.caught]


def _names_of_buffers(module: nn.Module) -> set[str]:
    """Return the names of all places of a module that hold a buffer which is not None."""
    return {name for name, _ in module.named_buffers(remove_duplicate=False)}
