"""One stage: forward, backward, step and apply, in this order in the file.

A stage does no I/O: its methods take tensors and return what is to be sent. The loop (`loop.py`)
calls them when the order says so, waits for the messages that they need, and sends what they
return.

The parts of a stage have files of their own: `runner.py` does the steps of a program, `weights.py`
and `parameters.py` keep the versions, `in_flight.py` what a forward leaves for its backward,
`rules/` is what features do to updates, `guards.py` what is refused, `inference.py` what trains
nothing, and `stage_state.py` what is saved and loaded.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from pipedream_rt.devices import HOST, DeferredScalar, Device
from pipedream_rt.errors import ConfigError, NonFiniteLoss, ScheduleError
from pipedream_rt.messages.head import PLAIN_LOSS, Head, LossTask, MiniBatch, OfLoss
from pipedream_rt.messages.tree import Value
from pipedream_rt.models.code import code_of, refuse_other_code
from pipedream_rt.models.shipping import loads
from pipedream_rt.schedules import EdgeKind, Kind
from pipedream_rt.schedules.edges import Address, Edge
from pipedream_rt.stage.evaluation import measured
from pipedream_rt.stage.first_micro_batch import FirstMicroBatch
from pipedream_rt.stage.guards import Guards, telling_changed_inputs
from pipedream_rt.stage.hyper import Hyper
from pipedream_rt.stage.in_flight import Flight
from pipedream_rt.stage.inference import KeptVersions, Passes
from pipedream_rt.stage.loss_check import LossCheck
from pipedream_rt.stage.optimizer import OptimizerSpec, StageOptimizer
from pipedream_rt.stage.parameters import Adjust
from pipedream_rt.stage.rules.order import rules_of
from pipedream_rt.stage.rules.rule import (
    Context,
    MicroBatchRule,
    Packed,
    Rule,
    Update,
    UpdateRule,
)
from pipedream_rt.stage.runner import Runner
from pipedream_rt.stage.script_values import GivenValues
from pipedream_rt.stage.spec import StageSpec
from pipedream_rt.stage.split_backward import SplitBackward
from pipedream_rt.stage.stepping import step
from pipedream_rt.stage.values import Gradients, Outgoing
from pipedream_rt.stage.weights import Weights, entered
from pipedream_rt.stage.whole_loss import LossOfUpdate, Met, WholeLoss, mean_of_said
from pipedream_rt.torch_private import run_backward

R = TypeVar("R", bound=Rule)


_NOTHING = nullcontext()


class Stage:
    """One stage of the pipeline, all of whose methods run on the thread of its worker.

    Attributes:
        index: Index of the stage, 0-based.
        address: The address of this replica of the stage.
        weights: The weights of the stage, those that other stages own among them.
        parameters: Those that the stage owns, in the versions that micro-batches in flight read.
        rules: What features do to updates and within micro-batches, in the order in which they act.
        optimizer: The optimizer of the stage; None until one is set.
        ended: The micro-batch whose backward is to end next.
        steps: How many updates have had their step; some may wait to be applied.
        skips: Whether the pending update is skipped, as the script has said.
    """

    def __init__(
        self, spec: StageSpec, address: Address | None = None, device: Device = HOST
    ) -> None:
        self.index, self.plan, self.spec, self.module = spec.stage, spec.plan, spec, spec.layers
        given = spec.plan.address_of(spec.stage) if address is None else address
        self.address: Address = spec.plan.addresses[given]
        self.runner = Runner(spec, device)
        self._loss_check = LossCheck(self.runner.loss_fn) if self.runner.loss_fn else None
        self._of_update = WholeLoss()
        self.weights = Weights(
            self.module, self.plan, self.index, self.address, spec.hooks, spec.names
        )
        self.parameters = self.weights.own
        self.given = GivenValues(self.index, spec.holders, spec.shared_holders)
        self.guards = Guards(spec, self.weights, self.given)
        self.passes = Passes(spec, self.runner, self.weights)
        self.kept = KeptVersions(self.module)
        self._first = FirstMicroBatch(self.module)
        # What is asked at each micro-batch: a feature that this stage does not have costs nothing.
        self._asks_first = self._first.asked
        self._has_buffers = self.runner.buffers.any
        self.optimizer: StageOptimizer | None = None
        self.steps, self.skips = 0, False
        # The name is the stage's own: two stages must not draw the same numbers in a backward.
        innermost = (name for name, each in self.module.named_modules() if not each._modules)
        self._backward_name = f"backward of {next(innermost, '')}"
        self.ended = self.plan.next_own(self.address, 0)
        self._in_flight: dict[int, Flight] = {}
        # Of the pending update: its hyper-parameters, and the versions that were read.
        self._hyper: list[Hyper] = []
        self._read: list[int] = []
        self._updates: deque[Update] = deque()
        self._applies_at_once = self.plan.applied_by(self.address) is Kind.STEP
        context = Context(
            plan=self.plan,
            stage=self.index,
            address=self.address,
            weights=self.weights,
            numbers=spec.numbers,
            norm_dtype=spec.norm_dtype,
        )
        self.rules = tuple(rules_of(spec.rules, context))
        self._rule_of = {kind: rule for rule in self.rules for kind in rule.channels}
        # The newest version of which all weights are here, where other replicas step some of them.
        self._whole = 0
        # By phase, the methods of the rules that have one, so that an absent rule costs nothing.
        self._losses = self._all(MicroBatchRule, "loss")
        self._roots = self._all(MicroBatchRule, "roots")
        self._adjusts = self._all(MicroBatchRule, "adjust")
        self._ends = self._all(MicroBatchRule, "ended")
        self._reduces = self._all(UpdateRule, "reduce")
        self._collects = self._all(UpdateRule, "collect")
        self._changes = self._all(UpdateRule, "change")
        self._arounds = self._all(UpdateRule, "around")
        self._afters = self._all(UpdateRule, "after")
        self._takes = self._all(UpdateRule, "take")

    def _all(self, protocol: type[Rule], method: str) -> list[Any]:
        """Return a method of all rules that define it, in the order of the rules."""
        nothing = getattr(protocol, method)
        return [
            getattr(rule, method)
            for rule in self.rules
            if getattr(type(rule), method, nothing) is not nothing
        ]

    def rule(self, kind: type[R]) -> R | None:
        """Return the rule of a class; None if the stage has none."""
        return next((rule for rule in self.rules if isinstance(rule, kind)), None)

    @property
    def next_forward(self) -> int:
        """Number of the next micro-batch to train on."""
        return self.weights.next_forward

    def receive(self, edge: Edge, number: int, packed: Packed) -> None:
        """Take a message of a rule, before the action that needs it."""
        rule = self._rule_of[edge.kind]
        rule.receive(edge.kind, edge.source, rule.open(edge, number, packed))

    def pack(self, edge: Edge, value: Any) -> Packed:
        """Return the message on an edge of what a rule has given for its kind."""
        return self._rule_of[edge.kind].pack(edge, value)

    # -- forward ------------------------------------------------------------------------------

    def forward(
        self,
        head: Head,
        inputs: Sequence[Value] | None,
        target: Value | None = None,
        task: LossTask = PLAIN_LOSS,
    ) -> list[Value] | float | DeferredScalar | LossOfUpdate | None:
        """Run the next forward with the version that the plan names; return outputs or the loss."""
        runner, micro_batch, program = self.runner, head.micro_batch, head.program
        self.weights.begin(micro_batch)
        flight = self._in_flight[micro_batch] = Flight(mini_batch=head.mini_batch)
        if inputs is None:  # a micro-batch without samples
            flight.empty = True
            return None
        self._see(head.mini_batch)
        values = flight.enter(runner, inputs, program, head.numbers)
        meets = target is not None and task.loss is not OfLoss.PARTS
        check = self._loss_check if task.together is not None and not meets else None
        with (
            self._around_forward(micro_batch, inputs),
            self.weights.reading(micro_batch),
            runner.casting(),
        ):
            made = runner.train(program, values, micro_batch)
            if meets:
                assert target is not None
                assert task.together is not None
                # First, since a loss may change the output in place.
                (value,) = flight.leave(made)
                of_all, samples = task.together
                share, metrics = task.share, task.metrics
                met = Met(micro_batch, samples, made[0], value, target, share, metrics)
                self._of_update.met.append(met)
                if len(self._of_update.met) < of_all:
                    return None
                return self._loss_of_update(task.loss)
            if target is not None:
                if check is not None:
                    assert task.together is not None
                    check.keep(made[0], target, task.share, *task.together)
                loss, parts = runner.loss(made[0], target)
                measures = measured(task.metrics, made[0], target) if task.metrics else {}
                flight.said = {**parts, **measures}
        if target is None:
            return flight.leave(made)
        if check is not None:
            with self.weights.reading(micro_batch), runner.casting():
                check.compare()
        return self._end_in(micro_batch, loss, task.share)

    def _end_in(self, micro_batch: int, loss: Tensor, share: float) -> float | DeferredScalar:
        """Let the backward of a micro-batch begin at its loss, and return that."""
        number = self.runner.device.number
        if not share:  # no backward: if all labels are ignored, their mean loss is NaN
            self._in_flight[micro_batch].outputs = []
            return number(loss)
        reported = number(loss, partial(self._check_finite, micro_batch))
        self._in_flight[micro_batch].end_in(self._differentiated(micro_batch, loss, share))
        return reported

    def _loss_of_update(self, of_loss: OfLoss) -> LossOfUpdate:
        """Compute the loss of an update of which all outputs have met."""
        runner, met, why = self.runner, self._of_update.met, "asked for"
        last, loss_fn = met[-1], runner.loss_fn
        assert loss_fn is not None
        if of_loss is OfLoss.DECIDE:
            found = self._of_update.verdict(loss_fn)
            why = found.why if found.is_of_all else ""
        flight = self._in_flight[last.number]
        try:
            if why:
                output, target = self._joined(of_loss)
                loss, parts = runner.loss(output, target)
                flight.said = {**parts, **measured(last.metrics, output, target)}
                self._of_update.begin(self._differentiated(last.number, loss, 1.0))
                check = partial(self._check_finite, last.number)
                return LossOfUpdate(runner.device.number(loss, check), (), why)
            losses, said = [], []
            for each in met:
                loss, parts = runner.loss(each.output, each.target)
                said.append({**parts, **measured(each.metrics, each.output, each.target)})
                self._end_in(each.number, loss, each.share)
                losses.append(loss.item())
            flight.said = mean_of_said(said, [each.share for each in met])
            return LossOfUpdate(None, losses)
        finally:
            self._of_update.met = []

    def _joined(self, of_loss: OfLoss) -> tuple[Any, Value]:
        """Return the outputs and targets of an update, joined."""
        try:
            return self._of_update.join()
        except ConfigError as error:
            if of_loss is OfLoss.WHOLE:
                raise
            raise ConfigError(
                f"{error}; or, if the loss is a mean over samples, name a schedule, as "
                'schedule="1f1b"'
            ) from None

    def _differentiated(self, micro_batch: int, loss: Tensor, share: float) -> Tensor:
        """Return the tensor that is differentiated for a loss; refuse one without a gradient."""
        if not loss.requires_grad:
            raise ConfigError(
                f"stage {self.index}: the loss of micro-batch {micro_batch} depends on no weight "
                "that is trained, so backward() would raise in plain PyTorch, and here no weight "
                "would ever change. Is it detached, made of argmax or item, computed under no_grad "
                "or by a reentrant checkpoint whose inputs need no gradient, or are all weights "
                "before it frozen?"
            )
        # What is differentiated has the share; what is returned has not.
        weighted = loss * share if share != 1.0 else loss
        for change in self._losses:
            weighted = change(micro_batch // self.plan.per_update, weighted)
        return weighted

    def _see(self, mini_batch: MiniBatch) -> None:
        """Give the module the values of the script that a mini-batch was fed with."""
        if mini_batch.given or self.given.differs:
            self.given.apply(mini_batch.given)

    def _around_forward(
        self, micro_batch: int, inputs: Sequence[Value]
    ) -> AbstractContextManager[object]:
        """Return the contexts that some stages, and some micro-batches, need around a forward."""
        looks = self.guards.always or not micro_batch & (micro_batch - 1)  # 0, 1, 2, 4, 8, ...
        if not (looks or self._has_buffers or self._asks_first):
            return _NOTHING
        entered = ExitStack()
        # Entered in this order, and left in the other.
        if looks:
            entered.enter_context(self.guards.watching(micro_batch))
        if micro_batch == 0:  # once is enough to warn of a mini-batch that is changed in place
            told = self.runner.of_mini_batch(inputs)
            entered.enter_context(telling_changed_inputs(told))
        if self._has_buffers:
            others = len(self._in_flight) > 1
            entered.enter_context(self.runner.buffers.kept_for_backward(others))
        if self._asks_first:
            entered.enter_context(self._first.forward(micro_batch, self._read_by))
        return entered

    def said_of(self, micro_batch: int) -> dict[str, float | str]:
        """Return the parts of the loss of a micro-batch in flight, and its metrics, by name."""
        return self._in_flight[micro_batch].said

    def _read_by(self, micro_batch: int) -> tuple[int, int, int]:
        """Return the mark of the mini-batch and the weights that a micro-batch reads."""
        leaves = self.parameters.leaves(micro_batch)
        return micro_batch // self.plan.per_update, self.version_of(micro_batch), id(leaves)

    def _check_finite(self, micro_batch: int, reported: float) -> None:
        """Refuse to train on a loss that is NaN or infinite, unless the pipeline ignores that."""
        if self.spec.on_nan == "raise" and not math.isfinite(reported):
            uncounted = ", or, if none of its labels count, say so by Training(weigh=...)"
            raise NonFiniteLoss(
                f"stage {self.index}: the loss of micro-batch {micro_batch} is {reported}; "
                'lower the learning rate, look at the data, pass Training(on_nan="ignore")'
                + (uncounted if math.isnan(reported) and self.plan.per_update > 1 else ""),
                stage=self.index,
                action=f"F{micro_batch}",
            )

    # -- backward -----------------------------------------------------------------------------

    def told(self, micro_batch: int, skips: bool, hyper: list[Hyper] | None) -> None:
        """Take the script's word on the update of a micro-batch, before its backward."""
        self.skips = self.skips or skips
        if hyper is not None:
            flight = self._flight_of(micro_batch)
            flight.mini_batch = flight.mini_batch._replace(hyper=hyper)

    def backward(self, micro_batch: int, gradients: Sequence[Gradients] = ()) -> list[Gradients]:
        """Run a backward, given gradients by consumer; return those by input. `end` follows."""
        # It reads the version of its forward. Gradients of weights go to the pending update.
        flight = self._flight_of(micro_batch)
        self._see(flight.mini_batch)
        with (
            self.weights.accumulating(micro_batch, self._adjust(micro_batch)),
            self._first.backward(micro_batch) if self._asks_first else _NOTHING,
        ):
            self.runner.seed(micro_batch, self._backward_name)
            if self._of_update.has_gradients:
                gradients = [self._of_update.gradients(micro_batch)]
            outputs, given = flight.begin(gradients)
            for roots in self._roots:
                for output, gradient in roots(micro_batch):
                    outputs.append(output)
                    given.append(gradient)
            if outputs:
                # What torch.autograd.backward calls after checks that always pass here, and take
                # a fifth of the time of a small backward.
                run_backward(
                    tuple(outputs), tuple(given), False, False, (),
                    allow_unreachable=True, accumulate_grad=True,
                )  # fmt: skip
        return flight.found()

    def backward_input(
        self, micro_batch: int, gradients: Sequence[Gradients] = ()
    ) -> list[Gradients]:
        """Run the half of a backward that gives the gradients of the inputs."""
        flight = self._flight_of(micro_batch)
        self._see(flight.mini_batch)
        outputs, given = flight.begin(gradients)
        with self.weights.reading(micro_batch), self._first.backward(micro_batch):
            if outputs:
                leaves = self.weights.leaves(micro_batch)
                flight.split = SplitBackward(outputs, given, flight.entrances, leaves)
                self.runner.seed(micro_batch, self._backward_name)
                flight.split.first_half()
        flight.outputs = []
        return flight.found()

    def backward_weight(self, micro_batch: int) -> None:
        """Run the other half: add the gradients of weights to the pending update. `end` follows."""
        flight = self._flight_of(micro_batch)
        self._see(flight.mini_batch)
        with self.weights.accumulating(micro_batch, self._adjust(micro_batch)):
            self.runner.seed(micro_batch, self._backward_name)
            if flight.split is not None:
                flight.split.second_half()

    def _adjust(self, micro_batch: int) -> Adjust | None:
        """Return how a rule changes the gradients of a micro-batch; None if none does."""
        for adjust in self._adjusts:
            if (found := adjust(micro_batch)) is not None:
                return found  # type: ignore[no-any-return]
        return None

    def end(self, micro_batch: int) -> Outgoing:
        """End the flight of a micro-batch whose gradients are in the pending update."""
        outgoing: dict[EdgeKind, Any] = {}
        for ended in self._ends:
            outgoing |= ended(micro_batch)
        flight = self._in_flight.pop(micro_batch)
        if self._asks_first:
            self._first.end(micro_batch)
        self._hyper = flight.mini_batch.hyper
        self.ended = self.plan.next_own(self.address, micro_batch + 1)
        version = self.weights.end(micro_batch)
        if not flight.empty:
            self._read.append(version)
        return outgoing

    def version_of(self, micro_batch: int) -> int:
        """Return the weight version that a micro-batch in flight reads."""
        return self.parameters.ledger.pinned(micro_batch)

    def require_in_flight(self, micro_batch: int) -> None:
        """Refuse the backward of a micro-batch that is not in flight."""
        self._flight_of(micro_batch)

    def _flight_of(self, micro_batch: int) -> Flight:
        """Return the flight of a micro-batch, which its forward has left for its backward."""
        flight = self._in_flight.get(micro_batch)
        if flight is None:
            raise ScheduleError(
                f"stage {self.index}: the order wants the backward of micro-batch {micro_batch}, "
                f"which is not in flight; the micro-batches in flight are {list(self._in_flight)}"
            )
        return flight

    # -- step and apply -------------------------------------------------------------------------

    def _pending(self, update: int) -> Update:
        """Take the pending gradients, as an update."""
        gradients, skipped = self.parameters.take_gradients(), self.skips
        if skipped:  # for an input, a backward may have computed some
            gradients = [None] * len(gradients)
        made = Update(update, gradients, self._hyper, self._read, skipped)
        self._read, self.skips = [], False
        return made

    def reduce(self, update: int) -> Outgoing:
        """Return the gradients that this replica has summed for an update, for the others."""
        made, outgoing = self._pending(update), dict[EdgeKind, Any]()
        for reduce in self._reduces:
            outgoing |= reduce(made)
        return outgoing

    def step(self, update: int) -> Outgoing:
        """Complete and measure the gradients of an update; apply it too unless it has to wait."""
        # On a replica, `reduce` has handed this update over; what is pending may be of a later one.
        made = Update(update, [], [], []) if self._reduces else self._pending(update)
        outgoing: dict[EdgeKind, Any] = {}
        for collect in self._collects:
            outgoing |= collect(made)
        self._updates.append(made)
        self.steps = update + 1
        return outgoing | self.apply(update) if self._applies_at_once else outgoing

    def apply(self, update: int) -> Outgoing:
        """Make version ``update + 1`` from the newest, by an update whose step is done."""
        made = self._updates.popleft()
        if self.optimizer is None:
            raise ConfigError("training needs an optimizer; give Pipeline one")
        self.runner.seed(update, f"step of {next(iter(self.optimizer.steps), '')}")
        with self.parameters.making(made.gradients, self.weights.next_read(update)):
            for change in self._changes:
                change(made)
            optimizer = None if made.skipped else self.optimizer.prepare(made.hyper)
            if optimizer is not None:
                with self._around(made, optimizer):
                    step(optimizer)
        outgoing: dict[EdgeKind, Any] = {}
        for after in self._afters:
            outgoing |= after(made, self.optimizer.torch_optimizer)
        return outgoing

    def _around(
        self, update: Update, optimizer: torch.optim.Optimizer
    ) -> AbstractContextManager[object]:
        """Return the context in which the torch optimizer steps."""
        contexts = [around(update, optimizer) for around in self._arounds]
        return entered(contexts) if contexts else nullcontext()

    def take(self, update: int) -> None:
        """Take the weights that other replicas have stepped: then the newest version is whole."""
        for take in self._takes:
            take(update)
        self._whole = update + 1

    @property
    def whole_version(self) -> int:
        """The newest version of which all weights are here."""
        return self._whole if self._takes else self.parameters.ledger.newest

    # -- the optimizer, and what is known ---------------------------------------------------------

    def set_optimizer(self, pickled: bytes) -> list[str]:
        """Build the optimizer from a pickled `OptimizerSpec`; return the names that it steps."""
        spec: OptimizerSpec = loads(pickled)
        if spec.code is not None:
            refuse_other_code(code_of([spec.optimizer_class]), spec.code)
        # The optimizer's own state is saved under this number, which no other may have.
        number = self.address if self.plan.shape.shard_optimizer else self.index
        mine = self.parameters.named
        for stepped in self._all(UpdateRule, "stepped"):
            mine = stepped(mine)
        self.optimizer = StageOptimizer(spec, mine, number)
        return self.optimizer.steps

    def restored(self, step: int) -> None:
        """Go on after `step` updates, whose weights are loaded."""
        self.steps = step
        self.ended = self.plan.next_own(self.address, step * self.plan.per_update)
        self.weights.next_forward = self.ended
        self._first.forget()
        self._whole = step

    def statistics(self) -> dict[str, Any]:
        """Return the counters of this stage for `Pipeline.statistics`."""
        ledger = self.parameters.ledger
        found: dict[str, Any] = {
            "stage": self.index,
            "updates": ledger.newest,
            "updates_skipped": 0,
            "versions_kept": len(ledger.kept),
            "versions_kept_most": ledger.kept_most,
            "buffers_allocated": self.parameters.allocated,
            "weight_bytes": self.parameters.nbytes,
            "correction_bytes": 0,
            "parameters": sum(p.numel() for p in self.module.parameters())
            - sum(p.numel() for w in self.weights.borrowed.values() for p in w.named.values()),
        }
        found |= self.runner.statistics()
        for rule in self.rules:
            found |= rule.statistics()
        return found
