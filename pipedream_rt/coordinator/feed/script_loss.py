"""The script's place in the plan, where it computes the loss: one more place behind the last stage.

Outputs come to it, and the gradients that it computes go back to the exit. There are two ways to
use it. `Epochs.outputs` hands out the output of one whole mini-batch after another, with others on
their way meanwhile. And `forward` is one call of the model, in the graph of autograd, of which
`step` makes an update: each call is a micro-batch of it.

Nothing waits for the script by a clock. Whoever needs the stages meanwhile, as a flush does, calls
`settle` first: it gives the gradients that are there, or refuses if the script owes others.
"""

from __future__ import annotations

import math
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from pipedream_rt.batches.cutting import unmarked
from pipedream_rt.batches.items import Batch
from pipedream_rt.batches.micro_batches import EMPTY, CutBatch, MicroBatch
from pipedream_rt.coordinator.feed.feeder import Feeder
from pipedream_rt.coordinator.feed.graph import Call, Fed, in_graph
from pipedream_rt.coordinator.recovery.group import WorkerGroup
from pipedream_rt.errors import ConfigError, NonFiniteLoss
from pipedream_rt.messages.head import MiniBatch
from pipedream_rt.messages.message import Gradient, Key, Loss, Message
from pipedream_rt.messages.tree import Value, flatten, own, unflatten
from pipedream_rt.schedules import COORDINATOR, Edge, EdgeKind
from pipedream_rt.stage.hyper import Hyper
from pipedream_rt.stage.joining import Part, dense_of, joined, slices, summed
from pipedream_rt.stage.values import dense, gradients_of
from pipedream_rt.telling import log_of
from pipedream_rt.tracing.spans import NOBODY
from pipedream_rt.tracing.trace import GAVE

_log = log_of(__name__)

Given: TypeAlias = Sequence["Tensor | None"]
"""The gradients of those tensors of an output that ask for one; None where there is none."""

Watch: TypeAlias = Callable[[CutBatch | None, Sequence[Value], Sequence[Given]], object]


class _Handed:
    """The output of a mini-batch in the hands of the script.

    Attributes:
        parts: Its micro-batches with samples.
        is_given: Whether its gradients went to the stages, so that none may come any more.
        value: The output, joined.
    """

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts, self.is_given = parts, False
        structure, tensors, self._asks = joined(parts)
        self._leaves = [t for t, asked in zip(tensors, self._asks, strict=True) if asked]
        self._caught: list[Tensor | None] = [None] * len(self._leaves)
        for i, leaf in enumerate(self._leaves):
            leaf.requires_grad_()
            leaf.register_hook(lambda gradient, i=i: self._note(i, gradient))
        self.value = unflatten(structure, tensors)

    def _note(self, i: int, gradient: Tensor) -> None:
        if self.is_given:
            raise ConfigError(
                "a backward reaches an output whose update has ended: the loop has gone on, or a "
                "flush, an evaluation or a look at the weights came between the output and "
                "loss.backward(). Call backward before these; and detach what is kept of an output "
                "for later mini-batches"
            )
        self._caught[i] = summed(self._caught[i], dense_of(gradient))

    def end(self) -> None:
        """Refuse further gradients, and forget all values: the hooks of the leaves stay."""
        self.is_given, self.value = True, None
        self._leaves, self._caught, self._asks, self.parts = [], [], [], ()

    def by_part(self, gradients: Given) -> list[Given]:
        """Return the gradients of each micro-batch."""
        return [*slices(self.parts, self._asks, gradients)]

    def gradients(self) -> list[Tensor | None]:
        """Return the gradients on the leaves: sums of all backwards, or those that the script put.

        It has the strides with which it came. `leaf.grad` may have others, those of the leaf, and
        kernels round differently for other strides.
        """
        pairs = ((leaf.grad, total) for leaf, total in zip(self._leaves, self._caught, strict=True))
        return [
            total if total is not None and lies is not None and torch.equal(total, dense_of(lies))
            else lies if lies is None else dense_of(lies)
            for lies, total in pairs
        ]  # fmt: skip


class ScriptLoss:
    """The outputs that the script has, and those that it has yet to get."""

    def __init__(self, group: WorkerGroup, feeder: Feeder, on_nan: str) -> None:
        self._group, self._feeder, self._on_nan = group, feeder, on_nan
        self._plan = group.plan
        self._handed: _Handed | None = None
        self._last = -1
        self._calls: list[Call] = []  # those of the open update, and its micro-batches so far
        self._fed: list[Fed] = []
        self._applied: list[Hyper] | None = None  # with what the stages have stepped it already
        self._has_closed = False
        # Messages that nobody will wait for; those of an edge must be taken in order.
        self._rest: deque[Key] = deque()
        self._told_of_no_grad = False
        self._watch: Watch | None = None
        # No strong reference: workers of a dropped pipeline would never end.
        settle = weakref.WeakMethod(self.settle)
        group.settle = lambda: (still := settle()) and still()

    def watch(self, look: Watch) -> None:
        """Call a function once with the first update that the script computes from now on.

        It is given the micro-batches where they were forwards by hand, else None; the outputs; and
        their gradients.
        """
        self._watch = look

    # -- whole mini-batches -----------------------------------------------------------------------

    def take(self) -> Any:
        """Wait for the outputs of the oldest mini-batch on its way; return them joined."""
        self._take_rest()
        pending = self._feeder.pending[0]
        first, messages = pending.step * self._plan.per_update, self._feeder.messages_of(pending)
        parts = [
            Part(first + i, samples, _value_of(messages[i]))
            for i, samples in enumerate(pending.samples)
            if samples
        ]
        self._handed, self._last = _Handed(parts), pending.step
        return self._handed.value

    def answer(self) -> int:
        """Give the gradients of the output in the hands of the script, if there is one.

        Return the number of the last mini-batch whose output the script has had.
        """
        if (handed := self._handed) is None or self._group.life.is_over:
            return self._last
        gradients, parts = handed.gradients(), handed.parts
        self._require_finite(gradients, self._feeder.pending[0].step)
        of_parts, skips = handed.by_part(gradients), all(g is None for g in gradients)
        self._handed = None
        handed.end()
        self._give_all(of_parts, skips)
        if not skips:
            self._look(None, [part.value for part in parts], of_parts)
        return self._last

    def _look(
        self, cut: CutBatch | None, values: Sequence[Value], gradients: Sequence[Given]
    ) -> None:
        """Let the first update that the script has computed be looked at."""
        if (watch := self._watch) is not None:
            self._watch = None  # not once more, if it raises
            watch(cut, values, gradients)

    def _give_all(self, gradients: Sequence[Given], skips: bool) -> None:
        """Give the gradients of the oldest mini-batch, by micro-batch with samples."""
        pending, left = self._feeder.pending.popleft(), iter(gradients)
        # A mini-batch that is given in part must end the pipeline.
        with self._group.life.guard("the gradients of a mini-batch were sent"):
            for i, (key, number) in enumerate(self._feeder.keys_of(pending)):
                fed = Fed(number, pending.first + i, pending.samples[i], key)
                self._give(fed, next(left, ()) if fed.samples else (), skips)

    def leave(self) -> None:
        """Skip the updates of all mini-batches whose loss the script will not compute."""
        if self._group.life.is_over:
            return
        if self._handed is not None:
            self._handed.end()
            self._handed = None
        skipped = 0
        while self._feeder.pending:
            pending, skipped = self._feeder.pending[0], skipped + 1
            self._give_all((), skips=True)
            if pending.outcome is None:
                self._feeder.messages_of(pending)
        if skipped:
            _log.warning(
                "the loop over outputs was left with %d mini-batches on their way, up to %d: the "
                "script has computed no loss of them, so they change no weight",
                skipped, self._feeder.step - 1,
            )  # fmt: skip

    def abandon(self) -> None:
        """Drop all that the script owes, so that the stages can be asked once more."""
        self.leave()
        if self._calls and not self._group.life.is_over:
            self._close(update=False)

    # -- one call after another -------------------------------------------------------------------

    def forward(self, batch: Batch, count: int = 1) -> Any:
        """Run one forward of the open update, in ``count`` micro-batches: `Pipeline.forward`."""
        if not torch.is_grad_enabled():
            return self._inferred(unmarked(batch))
        feeder = self._feeder
        if feeder.pending:
            raise ConfigError(
                "forward cannot be called in a loop over outputs(), whose mini-batches are on "
                "their way: compute with the output that the loop gives, or use forward alone"
            )
        optimizer = feeder.ready()
        inputs = flatten(feeder.forwards.inputs(unmarked(batch)))[1]
        asked = [tensor for tensor in inputs if tensor.requires_grad]
        self._refuse_forward(count, bool(asked))
        self._take_rest()
        if not self._fed and not feeder.step:
            feeder.hooks.first(batch, count)
        parts = feeder.parts(batch, count)
        if asked:
            flags = tuple(tensor.requires_grad for tensor in inputs)
            parts = [p._replace(inputs=p.inputs._replace(requires_grad=flags)) for p in parts]
        self._group.feed.define()
        mini_batch = MiniBatch(optimizer.hyper(), feeder.script.now())
        call = Call(self, parts, [self._feed(part, mini_batch) for part in parts], asked)
        with self._group.life.guard("forward waited for its output"):
            call.messages = [feeder.take(fed.key, fed.number) for fed in call.fed]
        self._calls.append(call)
        call.outputs = [
            Part(fed.number, fed.samples, _value_of(message))
            for fed, message in zip(call.fed, call.messages, strict=True)
        ]
        structure, tensors, asks = joined(call.outputs)
        return unflatten(structure, in_graph(call, tensors, asks))

    def _feed(self, part: MicroBatch, mini_batch: MiniBatch) -> Fed:
        """Feed the next micro-batch of the open update."""
        feeder = self._feeder
        number = feeder.step * self._plan.per_update + len(self._fed)
        position = feeder.feed(part, number, mini_batch)
        fed = Fed(number, position, part.samples, feeder.key_of(number, position))
        self._fed.append(fed)
        return fed

    def has_closed(self) -> bool:
        """Whether an update was closed since this was asked last."""
        closed, self._has_closed = self._has_closed, False
        return closed

    def _refuse_forward(self, count: int, asks: bool) -> None:
        """Refuse a forward that the open update has no place for."""
        plan, k = self._plan, self._plan.per_update
        if any(call.is_reached for call in self._calls):
            raise ConfigError(
                "the gradient of an input was computed, for which the stages have ended the "
                "forwards of this update: call all forwards of an update before such a backward, "
                "or step() in between"
            )
        if len(self._fed) + count > k:
            raise ConfigError(
                f"an update is of at most {k} forwards, as micro_batches={k} says, and all were "
                "called: call step(), which closes the update, or step(update=False), which drops "
                "what an error has left; or give more micro_batches"
            )
        if asks and count > 1:
            raise ConfigError(
                "an input requires a gradient, and is cut into micro-batches: give "
                "micro_batches=1, or the input detached"
            )
        if asks and (not plan.flushes or plan.replicated):
            what = f"with {plan.title}" if not plan.flushes else "with replicas"
            raise ConfigError(
                f"an input requires a gradient, which {what} comes too late, or not at all: use "
                'schedule="gpipe" without replicas, or give forward(x.detach())'
            )

    def step(self, update: bool) -> None:
        """Close the open update; see `Pipeline.step`."""
        if not self._calls:
            raise ConfigError("step() closes an update of forward() calls, and there was none")
        if update:
            self._refuse_mixture()
        elif self._applied is not None:
            raise ConfigError(
                "the gradient of the input of the last micro-batch was computed, and with it this "
                f"update was applied: to drop an update after such a backward, {self._one_more}"
            )
        for call in self._calls if update else ():
            self._require_finite(call.gradients, self._feeder.step)
        applied, optimizer = self._applied, self._feeder.optimizer
        self._close(update)
        if applied is not None and optimizer is not None and optimizer.hyper() != applied:
            raise ConfigError(
                "the gradient of the input of the last micro-batch was computed, and with it this "
                "update was applied, before the script has set other hyper-parameters: set them "
                f"before the backward; or {self._one_more}"
            )

    @property
    def _one_more(self) -> str:
        """The advice where the last of the micro-batches has applied its update."""
        count = self._plan.per_update + 1
        return f"give micro_batches={count} or more, one more than its forwards"

    def _refuse_mixture(self) -> None:
        """Refuse an update that mixes forwards for weights with forwards for inputs alone."""
        alone = [call for call in self._calls if call.is_reached and not call.trains]
        if alone and any(call.trains for call in self._calls):
            raise ConfigError(
                f"of the forwards of this update, {len(alone)} had the gradient of their input "
                "computed alone, as by autograd.grad, and others had a backward: let step() come "
                "between them; step(update=False) drops this update"
            )

    def zero(self) -> None:
        """Drop the gradients so far of the open update, as `Optimizer.zero_grad` does."""
        if any(call.is_given and call.trains for call in self._calls):
            raise ConfigError(
                "zero_grad() comes after a backward that has gone to the stages, for the gradient "
                "of an input: pipe.step(update=False) drops the update"
            )
        for call in self._calls:
            call.gradients, call.trains = [None] * len(call.gradients), False

    def _close(self, update: bool) -> None:
        """End the forwards and the backwards of the open update."""
        calls, feeder, optimizer = self._calls, self._feeder, self._feeder.optimizer
        assert optimizer is not None
        skips, hyper = not (update and any(call.trains for call in calls)), optimizer.hyper()
        gradients = [each for call in calls for each in self._by_part(call)]
        # An update that is given in part must end the pipeline.
        with self._group.life.guard("the gradients of an update were sent"):
            self._fill(hyper)
            of_fed = dict(zip((fed for call in calls for fed in call.fed), gradients, strict=True))
            already = {fed for call in calls if call.is_given for fed in call.fed}
            for fed in self._fed:
                if fed not in already:
                    self._give(fed, () if skips else of_fed.get(fed, ()), skips, hyper)
            for call in calls:
                if not call.is_answered:
                    self._rest.extend(key for key, _ in self._keys_of_inputs(call))
        self._calls, self._fed = [], []
        self._applied, self._has_closed = None, True
        cut = CutBatch(Batch((), {}, None), [part for call in calls for part in call.parts])
        messages = [message for call in calls for message in call.messages]
        feeder.closed(cut, messages)
        values = [part.value for call in calls for part in call.outputs]
        for call in calls:  # the graph refers to them, for as long as the script keeps an output
            call.end()
        if not skips:
            self._look(cut, values, gradients)

    def _fill(self, hyper: list[Hyper]) -> None:
        """Fill the open update up with micro-batches without samples."""
        missing = self._plan.per_update - len(self._fed)
        mini_batch = MiniBatch(hyper, self._feeder.script.now() if missing else [])
        for _ in range(missing):
            self._rest.append(self._feed(EMPTY, mini_batch).key)

    @torch.enable_grad()  # a backward turns it off, and stages may compute in this thread
    def input_gradients(self, call: Call) -> list[Tensor | None]:
        """Return the gradients of a call's inputs, which ends the forwards of its update."""
        if call not in self._calls or call.is_reached:
            raise ConfigError(
                "a second backward goes to the input of a forward, whose activations the stages "
                "have freed: add the losses up and call backward once, or call forward again"
            )
        optimizer = self._feeder.optimizer
        assert optimizer is not None
        hyper = optimizer.hyper()
        call.is_reached = True
        # The stages do the backwards in the order of the calls, so those before come too.
        until = self._calls[: self._calls.index(call) + 1]
        trains = any(each.trains for each in self._calls)
        last = call.fed[-1].number % self._plan.per_update == self._plan.per_update - 1
        if last and trains:  # with it, the stages step
            self._refuse_mixture()
        for each in until:
            if not each.is_given:
                self._require_finite(each.gradients, self._feeder.step)
        with self._group.life.guard("the gradients of an update were sent"):
            self._fill(hyper)
            for each in until:
                if not each.is_given:
                    ends = last and each is call
                    self._give_call(each, ends and not trains, hyper if ends else None)
        self._applied = hyper if last and trains else None
        for each in until:
            if each.asked and not each.is_answered:
                each.is_answered = True
                for key, places in self._keys_of_inputs(each):
                    each.found.append((places, self._group.take(key)))
        total: list[Tensor | None] = [None] * len(call.asked)
        for places, message in call.found:  # an input may go to several stages
            for i, gradient in zip(places, gradients_of(message, message.tensors), strict=True):
                total[i] = summed(total[i], gradient)
        return total

    def _inferred(self, batch: Batch) -> Any:
        """Run a forward without a gradient: an inference in training mode."""
        if not self._told_of_no_grad:
            self._told_of_no_grad = True
            _log.warning(
                "forward under no_grad is an inference in training mode: dropout drops, and "
                "statistics of BatchNorm move. pipe(x) runs the model in eval mode"
            )
        if not self._calls:
            return self._feeder.infer(batch, training=True)
        waits = len(self._fed) == self._plan.per_update
        if not self._plan.flushes or self._plan.replicated or waits:
            raise ConfigError(
                "a forward under no_grad needs the stages, which wait for the gradients of the "
                "open update: call it before the forwards of an update, or after step()"
            )
        self._take_rest()
        return self._feeder.infer(batch, training=True, flushes=False)

    # -- what goes and comes ----------------------------------------------------------------------

    def _give_call(self, call: Call, skips: bool, hyper: list[Hyper] | None) -> None:
        """Give the gradients of the output of a call before its update is closed."""
        call.is_given = True
        for fed, gradients in zip(call.fed, self._by_part(call), strict=True):
            self._give(fed, gradients, skips, hyper)

    @staticmethod
    def _by_part(call: Call) -> list[Given]:
        """Return the gradients of the output of a call, by micro-batch."""
        gradients = call.gradients if call.trains or not call.is_reached else call.of_inputs
        return [*slices(call.outputs, call.asks, gradients)]

    def _give(
        self, fed: Fed, gradients: Given, skips: bool, hyper: list[Hyper] | None = None
    ) -> None:
        """Send the gradients of the output of a micro-batch."""
        # Copies: the script may set its gradients to zero before they are sent.
        sent = [None if gradient is None else own(gradient, copy=True) for gradient in gradients]
        present, tensors = dense(sent)
        payload = Gradient(present=present, skips=skips, hyper=hyper)
        self._group.feed.gradient(fed.number, fed.position, payload, tensors)
        now = time.monotonic_ns()
        self._feeder.record(GAVE, fed.number, NOBODY, now, now)

    def _keys_of_inputs(self, call: Call) -> list[tuple[Key, list[int]]]:
        """Return the keys of the gradients of a call's inputs, with the places of these inputs."""
        number, position = call.fed[0].number, call.fed[0].position
        pairs = self._feeder.places_of_inputs(call.parts[0]) if call.asked else ()
        edges = [
            (Edge(EdgeKind.GRADIENT, self._plan.address_of(stage, number), COORDINATOR), places)
            for stage, places in pairs
            if places
        ]
        return [(Key(edge, position), places) for edge, places in edges]

    def _take_rest(self) -> None:
        """Take the messages that nobody waits for."""
        while self._rest:
            self._group.take(self._rest.popleft())

    def settle(self) -> None:
        """Give the gradients that the script has, before something needs the stages; or refuse."""
        self.require_closed("this")
        if later := len(self._feeder.pending) - (self._handed is not None):
            raise ConfigError(
                f"this needs the stages, and mini-batches ({later}) whose loss the script has not "
                "computed are on their way. Do it after a loop over "
                "a part of the loader: items = iter(loader), and pipe.outputs(itertools.islice("
                'items, 100)); or use schedule="gpipe" or Layout(credits=1), with which nothing '
                "else is on its way"
            )
        if self._handed is not None and all(g is None for g in self._handed.gradients()):
            raise ConfigError(
                "this needs the stages, which wait for the gradient of the output that the script "
                "has: do it after loss.backward(), or after the loop"
            )
        self.answer()
        self._take_rest()

    @property
    def is_settled(self) -> bool:
        """Whether the script owes no gradient."""
        return not self._feeder.pending and not self._calls

    def require_closed(self, what: str) -> None:
        """Refuse something that needs the stages while an update of forwards is open."""
        if self._calls:
            raise ConfigError(
                f"{what} needs the stages, which wait for the gradients of {len(self._calls)} "
                "forwards: call step() first, or step(update=False), which drops them"
            )

    def _require_finite(self, gradients: Given, step: int) -> None:
        """Refuse to train on gradients that are NaN or infinite, unless that is to be ignored."""
        there = [] if self._on_nan != "raise" else [g for g in gradients if g is not None]
        if any(not math.isfinite(g.sum()) and not g.isfinite().all() for g in there):
            raise NonFiniteLoss(
                f"the gradient that the script computes for the output of mini-batch {step} is NaN "
                "or infinite, and was not sent: lower the learning rate, look at the data and the "
                'loss, or pass Training(on_nan="ignore")',
                stage=self._plan.exits[0],
                action=f"G{step * self._plan.per_update}",
            )


def _value_of(message: Message) -> Value:
    """Return the output in a message."""
    payload = message.payload
    assert isinstance(payload, Loss)
    return Value(payload.structure, message.tensors, tuple(payload.requires_grad))
