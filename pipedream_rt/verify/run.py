"""Asking whether a run computes what plain PyTorch does: when somebody asks, and at its start.

Stages in this process show *where* they part, since all that they compute can be seen. The workers
themselves are compared by what they return: losses and weights.
"""

from __future__ import annotations

import functools
import itertools
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor

from pipedream_rt.batches.cutting import keeps_state, unmarked
from pipedream_rt.batches.items import Batch, Prepare, require_loader
from pipedream_rt.batches.looking import looking
from pipedream_rt.batches.micro_batches import CutBatch
from pipedream_rt.coordinator.results import PendingStep, StepResult
from pipedream_rt.coordinator.run import Run
from pipedream_rt.errors import ConfigError, PipelineError
from pipedream_rt.job.job import Job
from pipedream_rt.job.rules import scale_of
from pipedream_rt.lifecycle import is_of_a_handler
from pipedream_rt.messages.tree import Value, flat_copy
from pipedream_rt.models.communication import communicates
from pipedream_rt.models.mark import mark_of_draws_outside
from pipedream_rt.schedules import Plan
from pipedream_rt.stage.hyper import Hyper
from pipedream_rt.telling import log_of, note, say
from pipedream_rt.verify.compare import (
    Parted,
    Place,
    Seen,
    Verification,
    cause_of,
    compared,
    difference,
    lacking,
    sampled,
)
from pipedream_rt.verify.cutting import MANY, Cutting, noise_of, whole_and_parts
from pipedream_rt.verify.isolation import Shared
from pipedream_rt.verify.plain import Copies, PlainTraining, copies_of, rounding_in
from pipedream_rt.verify.stand_in import NOTE, MeanOfOutputs, with_stand_in
from pipedream_rt.verify.twin import Twin, names_by_stage, steps_that_draw

_RESULTS = ("loss", "result")
"""The kinds of values that the workers return for a micro-batch."""

_NOT_COMPARED = "the first mini-batch was not compared with plain PyTorch"

T = TypeVar("T")

_LITTLE = 4 << 20
"""Bytes of weights that are all stepped; of a larger model some are, a sixteenth of it."""

_TIMES, _SHORT_S = 2, 0.5
"""How many mini-batches the comparison of the first may take beside it, each at least so long."""

_LEFT_OUT = {
    "backward": "random numbers are drawn in a backward, on each stage others, so gradients and "
    "weights were not compared",
    "step": "the optimizer draws random numbers, on each stage others, so weights were not "
    "compared",
    "whole": "two micro-batches cannot be computed as one, so they were not compared with each",
}

_WORKERS = (
    "a global or a class attribute that the script has changed in a module which they import by "
    "themselves, another environment, other software, or a file that they read"
)

_log = log_of(__name__)


# -- whenever one asks --------------------------------------------------------------------------


def verified(
    job: Job, run: Run, loader: Iterable[Any], steps: int, prepare_item: Prepare | None
) -> Verification:
    """Compare stages with plain PyTorch on the first mini-batches of a loader."""
    require_loader(loader, "verify")
    optimizer, job = run.feeder.optimizer, with_stand_in(_decided(job, run))
    if job.reading.loss_fn is None or optimizer is None:
        raise ConfigError("verify trains copies, so Pipeline needs loss_fn and optimizer")
    items = looking(loader, steps)
    batches = [job.reading.items.batch(item, prepare_item) for item in items]
    if not batches:
        raise ConfigError("the loader given to verify yielded nothing")
    state = run.run_state.gathered()  # flushes, so not in the block, which puts back
    with Shared(job).apart():
        copies = copies_of(job, state)
    del state  # as large as the model
    hyper = [optimizer.groups()] * steps
    return beside(job, copies, batches, hyper, run.feeder.training, run)


def beside(
    job: Job,
    copies: Copies,
    batches: Sequence[Batch],
    hyper: Sequence[Sequence[Hyper]],
    training: bool | None,
    run: Run | None = None,
) -> Verification:
    """Train stages in this process beside plain PyTorch, and compare all that they compute.

    Both begin as ``copies``. ``hyper`` has the hyper-parameters of each group, by mini-batch.
    ``run`` is asked for a loss too.
    """
    say_memory(job, len(batches))
    shared, count, rounded = Shared(job), 0, None
    with shared.apart(), Twin(job, copies, batches[0]) as twin:
        plain = PlainTraining(job, copies, twin.parts, names_by_stage(job), budget_of(job))
        loss = plain.loss_of(batches[0]) if run is not None else None
        plain.set_mode(training)
        twin.set_mode(training)
        notes = [*twin.left_out, *_staleness(job.plan), *[NOTE] * job.plan.loss_in_script]
        for step, (batch, of_step) in enumerate(zip(batches, hyper)):
            began = time.monotonic()
            cut, own, theirs, cutting = _both(shared, twin, plain, step, batch, of_step)
            if text := _said_of(cutting, notes):
                return Verification(False, count, step + 1, *text, tuple(notes))
            number, parted = _parted(plain, cut, own, theirs)
            count += number
            if parted is not None and not parted.rounds:
                words = str(parted.place), parted.difference, cause_of(parted.place)
                return Verification(False, count, step + 1, *words, tuple(notes))
            rounded = rounded or parted
            # What is rounded otherwise would grow from step to step, most of all in AdamW.
            plain.take(twin.state())
            took = time.monotonic() - began
            done, left = step + 1, (len(batches) - step - 1) * took
            _log.info("verify: mini-batch %d of %d, %.1f s left", done, len(batches), left)
    if rounded is not None:
        notes.insert(0, f"{rounded.place} and what follows it differ by rounding alone")
    notes += [_LEFT_OUT[each] for each in plain.notes]
    found = Verification(True, count, len(batches), notes=tuple(notes))
    # Where forwards change values of their own, an evaluation would change those of the workers.
    if run is None or loss is None or plain.stores or job.script_values.forwards_store:
        return found
    return _with_workers(found, job, run, batches[0], loss)


def _decided(job: Job, run: Run) -> Job:
    """Return a job as the mini-batches so far have decided it."""
    decisions = replace(job.decisions, of_loss=run.feeder.decision.of_loss)
    return replace(job, decisions=decisions)


def _both(
    shared: Shared,
    twin: Twin,
    plain: PlainTraining,
    step: int,
    batch: Batch,
    hyper: Sequence[Hyper],
) -> tuple[CutBatch, Seen, Seen, Cutting | None]:
    """Train both sides on a mini-batch; return what each has computed."""
    before = shared.keep()
    theirs = twin.step(step, batch, hyper, plain.stepped)
    after = shared.keep()
    before.put_back()  # so that both begin with the same of what they share
    # After `step`: only the first cut of a new program has its definition, for the stages.
    cut = twin.cut(batch)
    cutting = whole_and_parts(plain, cut)
    own = plain.step(step, cut, steps_that_draw(twin.forwards), hyper, twin.gradients)
    after.put_back()
    return cut, own, theirs, cutting


def _parted(
    plain: PlainTraining, cut: CutBatch, own: Seen, theirs: Seen
) -> tuple[int, Parted | None]:
    """Return the number of values that were compared, and the first that differs, if any."""
    noise = functools.cache(lambda: noise_of(plain, cut))

    def excused(place: Place, by: float) -> bool:
        return place.kind == "gradient" and by <= MANY * noise().get(place.name, 0.0)

    number, parted = compared(own, theirs, excused)
    lacks = lacking(own, theirs, ("gradient",)) if "backward" not in plain.notes else None
    if lacks is not None and (parted is None or parted.rounds):
        parted = Parted(lacks, math.inf, number, rounds=False)
    return number, parted


def _said_of(
    cutting: Cutting | None, notes: list[str], in_script: bool = False
) -> tuple[str, float, str] | None:
    """Return which value micro-batches change, by how much and why; None for state alone."""
    if cutting is None:
        return None
    if cutting.kept:
        first, *more = cutting.kept
        names = f"{first} and {len(more)} more" if more else first
        note = (
            f"what the forward leaves in {names} differs in micro-batches, as it changes once for "
            'each of them; micro_batches=1, schedule="gpipe" makes it as in plain PyTorch'
        )
        if note not in notes:
            notes.append(note)
    if cutting.loss and in_script:
        return (
            "the output of two micro-batches as one and one by one",
            cutting.loss,
            "A value is cut that belongs to every micro-batch, or along another dimension "
            "(pipedream_rt.Whole and Along say how), or a layer lets samples depend on each other; "
            'micro_batches=1, schedule="gpipe" makes it as in plain PyTorch',
        )
    if cutting.loss:
        whole, parts = cutting.losses
        return (
            f"the loss of two micro-batches as one, {whole:.6g}, of which they make {parts:.6g} "
            "one by one,",
            cutting.loss,
            "The mini-batch is cut into something else: a value is cut that belongs to every "
            "micro-batch, or along another dimension (pipedream_rt.Whole and Along say how), a "
            "layer lets samples depend on each other, or the loss is no mean over samples "
            "(Training(weigh=...))",
        )
    if cutting.gradient:
        return (
            f"the gradient of {cutting.gradient} of two micro-batches as one and one by one",
            cutting.difference,
            "The loss is the same, so it is in the backward: a gradient that is put in and not "
            "derived from the loss, or a hook that clamps or norms; micro_batches=1, "
            'schedule="gpipe" makes it as in plain PyTorch',
        )
    return None


def _staleness(plan: Plan) -> list[str]:
    """Check the versions that an asynchronous plan reads by a formula, and say which they are."""
    k, n, shape = plan.per_update, plan.num_stages, plan.shape
    if plan.flushes or plan.replicated or plan.name not in ("async-1f1b", "2bw"):
        return []
    slack = list(shape.slack) or [0] * (n - 1)
    for stage, m in itertools.product(range(n), range(4 * k * (n + sum(slack)))):
        warm = n - 1 - stage + sum(slack[stage:])
        rule = max(0, m // k - 1) if plan.name == "2bw" else max(0, (m - warm) // k)
        if plan.reads(stage, m) != rule:
            raise PipelineError(
                f"stage {stage} reads version {plan.reads(stage, m)} for micro-batch {m}, and by "
                f"the rule of {plan.name} it is {rule}; this is an error of pipedream-rt"
            )
    most = max(plan.staleness(stage) for stage in range(n))
    formula = "max(0, m // k - 1)" if plan.name == "2bw" else "max(0, (m - w) // k)"
    return [f"{plan.name} reads the versions {formula}: up to {most} updates old, k being {k}"]


def _with_workers(
    found: Verification, job: Job, run: Run, batch: Batch, own: float
) -> Verification:
    """Compare the loss of a mini-batch in eval mode on the workers themselves, too."""
    feeder, passes = run.feeder, run.feeder.passes
    if job.plan.loss_in_script:
        output = feeder.infer(unmarked(batch), training=False)
        theirs = MeanOfOutputs()(output, None).item()
    else:
        theirs = feeder.evaluate([batch])["loss"]
    # Seeds count passes: layers that draw are to draw as if this one had not been.
    feeder.passes = passes
    apart_by = abs(own - theirs) / max(abs(own), abs(theirs), 1e-30)
    # Codecs on the workers change the loss; here there are none.
    if not math.isfinite(own) or apart_by <= rounding_in(job) or job.decisions.codecs.of_graph:
        return replace(found, values=found.values + math.isfinite(own))
    return replace(
        found,
        same=False,
        parted=f"the loss of the first mini-batch in eval mode on the workers, {theirs:.6g} and "
        f"not {own:.6g},",
        difference=apart_by,
        cause=f"Stages in this process gave the same, so it is the workers: {_WORKERS}.",
    )


# -- the first mini-batch, and `run --verify` ---------------------------------------------------


class Watching:
    """Verifies the first mini-batches of a run as they are injected.

    ``asked`` is how many somebody has asked for. With 0 it is the first one alone, by what the
    workers return for it.
    """

    def __init__(self, job: Job, run: Run, asked: int) -> None:
        self._job, self._run, self._asked = job, run, asked
        self._cut: CutBatch | None = None  # the first mini-batch, until the script answers it
        if run.script_loss is not None:
            run.script_loss.watch(self.answered)
        self._batches: list[Batch] = []
        self._hyper: list[list[Hyper]] = []
        # Stages in this process will have changed it when the first mini-batch is compared.
        self._shared = Shared(job)
        self._at_first = self._tried(self._shared.keep)

    def _as_at_first(self, step: int) -> bool:
        """Whether the stages began with what the script's model has, and have only trained.

        ``step`` is the number of the mini-batch that is looked at.
        """
        feeder, job = self._run.feeder, self._job
        evaluated = feeder.passes and (
            job.script_values.forwards_store
            or any(True for m in job.model.modules.values() for _ in m.buffers())
        )
        touched = feeder.was_touched or job.script_values.weights_moved
        return not (touched or evaluated or step != len(self._batches))

    def injected(self, cut: CutBatch, pending: PendingStep) -> bool:
        """Look at an injected mini-batch; return whether to look at the next one too."""
        optimizer = self._run.feeder.optimizer
        assert optimizer is not None
        if self._as_at_first(pending.step):
            self._batches.append(cut.batch)
            self._hyper.append(optimizer.groups())
        else:
            _log.info(
                "the first mini-batch was not compared with plain PyTorch: the stages do not have "
                "the weights that the script's model has"
            )
            return False
        if not self._asked:
            if self._job.plan.loss_in_script:
                self._cut = cut
            elif self._at_first is not None:
                began, result = time.monotonic(), pending.result()
                took, cut = time.monotonic() - began, self._run.feeder.decision.applied(cut)
                self._compare_first(cut, took, lambda own: self._of_workers(own, result, cut))
            self._batches.clear()
            return False
        if len(self._batches) == self._asked:
            self.end()
            return False
        return True

    def end(self) -> None:
        """Print what was found of the mini-batches that were asked for; raise where they part."""
        if self._asked and self._batches:
            found = self._beside()
            self._batches.clear()
            if not found:
                raise ConfigError(f"verified: {found}")
            say(f"verified: {found}")

    def answered(
        self, cut: CutBatch | None, values: Sequence[Value], gradients: Sequence[Any]
    ) -> None:
        """Look at the first update whose loss the script has computed.

        Of each micro-batch there is the output, and the gradients of those tensors that ask for
        one. ``cut`` is None for the mini-batch that was injected.
        """
        optimizer = self._run.feeder.optimizer
        assert optimizer is not None
        # Forwards by hand, of which each is a mini-batch of its own.
        if cut is not None and self._as_at_first(self._run.feeder.step - 1):
            self._cut, self._hyper = cut, [optimizer.groups()]
        if self._at_first is None or self._cut is None:
            return
        targets = [
            _spread(value, of_part) for value, of_part in zip(values, gradients, strict=True)
        ]
        answered = _with_targets(self._cut, targets)
        self._cut = None

        def theirs(own: Seen) -> Seen:
            places = [Place(0, i, "result") for i in answered.filled]
            outputs = [tuple(map(sampled, value.tensors)) for value in values]
            settled = self._run.script_loss is not None and self._run.script_loss.is_settled
            return dict(zip(places, outputs, strict=True)) | (self._states(own) if settled else {})

        count = self._compare_first(answered, 0.0, theirs)
        if self._asked and count:
            text = f"the first update by hand is that of plain PyTorch, in {count} values"
            say(f"verified: {text}")

    def _compare_first(self, cut: CutBatch, took: float, theirs_of: Callable[[Seen], Seen]) -> int:
        """Compare what the workers return for the first mini-batch with plain PyTorch.

        Return how many values were compared; 0 where that could not be.
        """
        until = time.monotonic() + _TIMES * max(took, _SHORT_S)
        late = functools.partial(_is_after, until)
        if (found := self._tried(lambda: self._plain(cut, late))) is None:
            return 0
        own, cutting = found
        self._say_of_cutting(cutting)
        theirs = theirs_of(own)
        number, parted = compared(own, theirs)
        if parted is not None and not parted.rounds:
            # Rounded otherwise: what then differs as much says nothing about the workers.
            if (again := self._tried(lambda: self._plain(cut, nudged=True))) is None:
                return 0
            noise = {at: difference(own[at], value) for at, value in again[0].items() if at in own}
            if not all(rounds for at, (_, rounds) in noise.items() if at.kind in _RESULTS):
                _log.info("%s: computed there twice, it differs", _NOT_COMPARED)
                return 0
            number, parted = compared(
                own, theirs, lambda at, by: at in noise and by <= MANY * noise[at][0]
            )
        if parted is not None and not parted.rounds:
            self._refuse(parted)
        how = "is" if parted is None else "is, but for rounding,"
        note(_log, f"the first mini-batch {how} what plain PyTorch computes, in {number} values")
        return number

    def _say_of_cutting(self, cutting: Cutting | None) -> None:
        """Say what micro-batches change; refuse another gradient where nobody asked for them."""
        notes: list[str] = []
        in_script = self._job.plan.loss_in_script
        text = _said_of(cutting, notes, in_script)
        # Of layers of the user's it was said before anything ran.
        if not any(map(keeps_state, self._job.model.modules.values())):
            for note in notes:
                _log.warning("%s", note)
        if text is None:
            return
        problem = "{} differs by {:.2g}. {}".format(*text)
        # A loss on the last stage is compared there.
        if (
            self._job.decisions.left_out.micro_batches
            and cutting is not None
            and (in_script or not cutting.loss)
        ):
            raise ConfigError(
                f"{problem}. To train on micro-batches all the same, as plain PyTorch does where "
                f"it accumulates gradients, give micro_batches={self._job.plan.per_update}"
            )
        _log.warning("%s", problem)

    def _refuse(self, parted: Parted) -> NoReturn:
        """Raise the error about a first mini-batch that is not as in plain PyTorch."""
        found = self._tried(self._beside) if self._batches else None
        where = (
            f"{parted.place} differs by {parted.difference:.2g} of its largest element. Stages "
            f"in this process give what plain PyTorch gives, so it is the workers: {_WORKERS}"
        )
        raise ConfigError(
            "the first mini-batch is not what plain PyTorch computes: "
            f"{where if found is None or found else found}. "
            "Training(verify=False) leaves this comparison out"
        )

    def _beside(self) -> Verification:
        """Compare all that stages in this process compute of the mini-batches so far."""
        job = with_stand_in(_decided(self._job, self._run))
        with self._shared.apart():
            copies = copies_of(job, None)
        training = self._run.feeder.training
        return beside(job, copies, self._batches, self._hyper, training)

    @staticmethod
    def _tried(call: Callable[[], T]) -> T | None:
        """Call the user's code, which was not written for this process; None if it raises."""
        try:
            return call()
        except Exception as error:
            if is_of_a_handler(error):
                raise
            _log.info("%s: %s", _NOT_COMPARED, error)
            return None

    def _of_workers(self, own: Seen, result: StepResult, cut: CutBatch) -> Seen:
        """Return what the workers have computed: losses, and where they are compared weights."""
        pairs = zip(cut.with_loss, result.losses, strict=True)
        return {Place(0, i, "loss"): loss for i, loss in pairs} | self._states(own)

    def _states(self, own: Seen) -> Seen:
        """Return the weights on the workers, where they are compared."""
        theirs: Seen = {}
        if _steps_plainly(self._job) and any(place.kind == "state" for place in own):
            for name, value in self._run.run_state.gathered().items():
                if (place := Place(0, -1, "state", name)) in own and isinstance(value, Tensor):
                    theirs[place] = sampled(value)
        return theirs

    def _plain(
        self, cut: CutBatch, late: Callable[[], bool] = bool, nudged: bool = False
    ) -> tuple[Seen, Cutting | None]:
        """Train on the first mini-batch in plain PyTorch, until it is late."""
        job = self._job
        assert job.reading.optimizer is not None
        assert self._at_first is not None
        with self._shared.apart():
            self._at_first.put_back()
            copies, names = copies_of(job, None), names_by_stage(job)
            plain = PlainTraining(job, copies, job.reading.optimizer, names, budget_of(job))
            if nudged:
                plain.nudge()
            plain.drop_gradients()
            plain.set_mode(self._run.feeder.training)
            before = mark_of_draws_outside()
            seen = plain.step(
                0, cut, steps_that_draw(job.reading.forwards), self._hyper[0], late=late
            )
            if mark_of_draws_outside() != before:
                raise ConfigError(
                    "the model, loss or optimizer draws random numbers of Python or NumPy, which "
                    "are not seeded per layer; draw them with torch, which is"
                )
            if late() or nudged or not (cut.batch.args or cut.batch.kwargs):
                return seen, None
            self._at_first.put_back()
            return seen, whole_and_parts(plain, cut.first_part or cut)


def _spread(value: Value, gradients: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    """Return the gradients of all tensors of an output; None for those that ask for none."""
    left = iter(gradients)
    return tuple(next(left, None) if asks else None for asks in value.requires_grad)


def _with_targets(cut: CutBatch, targets: Sequence[tuple[Tensor | None, ...]]) -> CutBatch:
    """Return a mini-batch with the gradients of its outputs as targets, by micro-batch."""
    pairs = zip(cut.filled.items(), targets, strict=True)
    parts = {i: part._replace(target=flat_copy(each), share=1.0) for (i, part), each in pairs}
    whole = tuple(
        None if any(each is None for each in of_all) else torch.cat([*of_all])
        for of_all in zip(*targets, strict=True)
        if len(targets) > 1 and (cut.batch.args or cut.batch.kwargs)
    )
    return CutBatch(
        batch=cut.batch._replace(target=whole),
        parts=[parts.get(i, part) for i, part in enumerate(cut.parts)],
        told=True,  # what the parts give adds up
    )


def _is_after(until: float) -> bool:
    return time.monotonic() > until


def say_memory(job: Job, steps: int) -> None:
    """Say how much memory a verification of mini-batches will take."""
    size = _size_of(job)
    # Twice the weights, gradients and an optimizer's state; and what of it is stepped once more.
    most = (5 * size + 4 * min(size, budget_of(job))) >> 20
    _log.info(
        "verify trains two copies of the model in this process on %d mini-batches, with up to %d "
        "MiB beside what these take",
        steps,
        most,
    )


def budget_of(job: Job) -> int:
    """Return the bytes of weights that are stepped in plain PyTorch too."""
    return max(_LITTLE, _size_of(job) // 16)


def _size_of(job: Job) -> int:
    """Return the bytes of all weights and buffers."""
    modules = job.model.modules.values()
    return sum(t.nbytes for m in modules for t in (*m.parameters(), *m.buffers()))


def _steps_plainly(job: Job) -> bool:
    """Whether the first update of a job must be that of plain PyTorch, so that it is compared."""
    training, plan = job.options.training, job.plan
    clip = training.clip
    estimates = clip is not None and clip.of_model and plan.norms == "estimated"
    scales = scale_of(training) is not None
    others = job.decisions.corrections or job.options.layout.codecs is not None or plan.replicated
    return not (estimates or scales or others)


def watching(job: Job, run: Run, asked: int) -> Watching | None:
    """Return the `Watching` of the first mini-batches of a run; None if nothing is verified."""
    trains = (
        job.reading.loss_fn is not None or job.plan.loss_in_script
    ) and job.reading.optimizer is not None
    if trains and (asked or not why_not(job)):
        return Watching(job, run, asked)
    return None


def why_not(job: Job) -> str:
    """Return why the first mini-batch of a job is not verified unasked; empty if it is."""
    training, model = job.options.training, job.model
    tensors = [t for m in model.modules.values() for t in (*m.parameters(), *m.buffers())]
    if not training.verify:
        return "as Training(verify=False) says"
    if model.blueprint.specs or any(t.is_meta for t in tensors):
        return "as the script has no values of its weights"
    if training.compile or job.options.devices is not None or any(not t.is_cpu for t in tensors):
        return "as it is compiled, or computed by another device"
    if job.options.layout.codecs is not None:
        return "as codecs change values"
    modules = (m for part in model.modules.values() for m in part.modules())
    if any(map(communicates, (*modules, job.reading.loss_fn))):
        return "as its layers communicate with other processes"
    return ""


def explained(job: Job) -> str:
    """Say whether the first mini-batch is verified, for `Pipeline.explain`."""
    if why := why_not(job):
        return (
            f"the first mini-batch is not computed in plain PyTorch too, {why}; pipe.verify() asks"
        )
    return (
        "the first mini-batch is computed in plain PyTorch too, and compared "
        "(Training(verify=False) leaves it out)"
    )
