"""Asking whether a run computes what plain PyTorch does: when somebody asks, and at its start.

Stages in this process show *where* they part, since all that they compute can be seen. The workers
themselves are compared by what they return: losses and weights.
"""

from __future__ import annotations

import itertools
import logging
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from torch import Tensor, nn

from pipedream_rt.batches.cutting import unmarked
from pipedream_rt.batches.forwards import Forwards
from pipedream_rt.batches.items import Batch, Prepare, batch_of, require_loader
from pipedream_rt.batches.looking import looking
from pipedream_rt.batches.micro_batches import CutBatch
from pipedream_rt.batches.recorded_forwards import RecordedForwards
from pipedream_rt.coordinator.results import PendingStep
from pipedream_rt.coordinator.run import Run, attach, start
from pipedream_rt.errors import ConfigError, PipelineError
from pipedream_rt.job.given_optimizer import GivenOptimizer, OptimizerParts
from pipedream_rt.job.job import Job, prepare
from pipedream_rt.job.options import Layout, Observe, Options, Recovery
from pipedream_rt.job.rules import scale_of
from pipedream_rt.models.communication import communicates
from pipedream_rt.models.preserving_state import drawn_outside
from pipedream_rt.schedules import Plan
from pipedream_rt.stage.hyper import Hyper, set_hyper
from pipedream_rt.stage.loss_check import rounding_of
from pipedream_rt.stage.stage import Stage
from pipedream_rt.verify.compare import (
    Parted,
    Place,
    Seen,
    Verification,
    cause_of,
    compared,
    lacking,
)
from pipedream_rt.verify.isolation import LIMIT, apart
from pipedream_rt.verify.plain import (
    Copies,
    PlainTraining,
    Tap,
    copies_of,
    inputs_of,
)

T = TypeVar("T")

_DRAWS = {
    "backward": "random numbers are drawn in a backward, on each stage others, so gradients and "
    "weights were not compared",
    "step": "the optimizer draws random numbers, on each stage others, so weights were not "
    "compared",
}

_WORKERS = (
    "a global or a class attribute that the script has changed in a module which they import by "
    "themselves, another environment, other software, or a file that they read"
)


_log = logging.getLogger(__name__)


# -- whenever one asks --------------------------------------------------------------------------


def verified(
    job: Job, run: Run, loader: Iterable[Any], steps: int, prepare_item: Prepare | None
) -> Verification:
    """Compare stages with plain PyTorch on the first mini-batches of a loader."""
    require_loader(loader, "verify")
    optimizer = run.feeder.optimizer
    if job.loss_fn is None or optimizer is None:
        raise ConfigError("verify trains copies, so Pipeline needs loss_fn and optimizer")
    state = run.run_state.gathered()
    items = looking(loader, steps)
    batches = [batch_of(item, prepare_item) for item in items]
    if not batches:
        raise ConfigError("the loader given to verify yielded nothing")
    found = beside(job, state, batches, [optimizer.groups()] * steps, run.feeder.training)
    return _with_workers(found, job, run, state, batches[0])


def beside(
    job: Job,
    state: Mapping[str, Any] | None,
    batches: Sequence[Batch],
    hyper: Sequence[Sequence[Hyper]],
    training: bool | None,
) -> Verification:
    """Train stages in this process beside plain PyTorch, and compare all that they compute.

    ``state`` has the weights and buffers at the start, None for those of the script; ``hyper`` has,
    for each mini-batch, the hyper-parameters of each group.
    """
    count, rounded = 0, None
    with apart(job), _Twin(job, copies_of(job, state), batches[0]) as twin:
        plain = PlainTraining(job, copies_of(job, state), twin.parts, names_by_stage(job))
        plain.set_mode(training)
        twin.set_mode(training)
        notes = [*twin.left_out, *_staleness(job.plan)]
        for step, (batch, of_step) in enumerate(zip(batches, hyper)):
            theirs = twin.step(step, batch, of_step)
            # After `step`: only the first cut of a new program has its definition, for the stages.
            cut = twin.cut(batch)
            if text := _parts_differ(job, copies_of(job, plain.state()), cut):
                return Verification(False, count, step + 1, *text, tuple(notes))
            own = plain.step(step, cut, steps_that_draw(twin.forwards), of_step)
            number, parted = compared(own, theirs)
            count += number
            lacks = lacking(own, theirs, ("gradient",)) if "backward" not in plain.notes else None
            if lacks is not None and (parted is None or parted.rounds):
                parted = Parted(lacks, math.inf, number, rounds=False)
            if parted is not None and not parted.rounds:
                words = str(parted.place), parted.difference, cause_of(parted.place)
                return Verification(False, count, step + 1, *words, tuple(notes))
            rounded = rounded or parted
        if rounded is not None:
            notes.insert(0, f"{rounded.place} and what follows it differ by rounding alone")
        notes += [_DRAWS[each] for each in plain.notes]
    return Verification(True, count, len(batches), notes=tuple(notes))


def _parts_differ(job: Job, copies: Copies, cut: CutBatch) -> tuple[str, float, str] | None:
    """Return what differs, by how much and why, if micro-batches change the loss; else None."""
    assert job.optimizer is not None
    plain = PlainTraining(job, copies, job.optimizer, names_by_stage(job))
    found = plain.losses_of(cut) if len(cut.filled) > 1 else None
    if found is None:
        return None
    whole, parts = found
    size = max(abs(whole), abs(parts), 1e-30)
    if abs(whole - parts) <= _rounding(job) * size:
        return None
    return (
        f"the loss of a whole mini-batch in eval mode, {whole:.6g}, of which its "
        f"{len(cut.filled)} micro-batches make {parts:.6g},",
        abs(whole - parts) / size,
        "The mini-batch is cut into something else: a value is cut that belongs to every "
        "micro-batch, or along another dimension (pipedream_rt.Whole and Along say how), a layer "
        "lets samples depend on each other, or the loss is no mean over samples "
        "(Training(weigh=...))",
    )


def _rounding(job: Job) -> float:
    """Return the share of a loss that may be rounding."""
    dtypes = {p.dtype for p in job.model.parameters.values()} | {job.forwards.dtype}
    if job.options.training.autocast is not None:
        dtypes.add(job.options.training.autocast)
    return max(map(rounding_of, dtypes))


class _Twin:
    """The stages of a job on a plan without staleness, in the thread of the script.

    Attributes:
        parts: The optimizer, taken apart.
        left_out: What of the job is left out, in sentences.
        forwards: What the forwards of the copy do.
    """

    def __init__(self, job: Job, copies: Copies, batch: Batch) -> None:
        assert job.optimizer is not None
        self.parts: OptimizerParts = job.optimizer
        options, self.left_out = _plain_options(job, copies, batch)
        made = prepare(copies.model, options)
        # Its notices are left out: those of the job itself were given.
        made = replace(
            made,
            optimizer=job.optimizer,
            given=GivenOptimizer(None),
            brought={},
            chosen="",
            notices=[],
        )
        self.forwards = made.forwards
        self._plan, self._group = made.plan, start(made, None)
        with self._group.life.guard():
            self._run = attach(made, self._group, None)
            cluster = self._group.cluster
            self._stages: list[Stage] = [
                cluster.reference(address, "stage").local_value() for address in made.plan.addresses
            ]
        self._seen: Seen = {}
        self._step = 0
        for stage in self._stages:
            self._watch(stage)

    def __enter__(self) -> _Twin:
        return self

    def __exit__(self, *error: object) -> None:
        self._group.life.close()

    def set_mode(self, training: bool | None) -> None:
        """Set the mode of all modules; None leaves them as they are."""
        if training is not None:
            self._run.feeder.set_training(training)

    def cut(self, batch: Batch) -> CutBatch:
        """Return a mini-batch in micro-batches."""
        return self._run.feeder.cut(batch)

    def step(self, step: int, batch: Batch, hyper: Sequence[Hyper]) -> Seen:
        """Train on a mini-batch, and return what was computed."""
        feeder, self._step = self._run.feeder, step
        self._seen.clear()
        assert feeder.optimizer is not None
        for group, packed in zip(feeder.optimizer.param_groups, hyper, strict=True):
            set_hyper(group, packed)
        result, cut = feeder.inject(batch).result(), self.cut(batch)
        weighed = [i for i, part in cut.filled.items() if part.share]
        for i, loss in zip(weighed, result.losses, strict=True):
            self._seen[Place(step, step * len(cut.parts) + i, "loss")] = loss
        for name, value in self._run.run_state.gathered().items():
            if isinstance(value, Tensor):
                self._seen[Place(step, -1, "state", name)] = value
        return dict(self._seen)

    def _watch(self, stage: Stage) -> None:
        """Note what the layers of a stage compute, and with which gradients it steps."""
        layers = {}
        for name in self._plan.layers[stage.index]:
            try:
                layers[name] = stage.module.get_submodule(name)
            except AttributeError:  # a parameter or a buffer beside the layers
                continue
        tap, train = Tap(layers, self._seen), stage.runner.train

        def watched(program: int, values: dict[int, Any], number: int) -> list[Any]:
            tap.begin(self._step, number)
            try:
                return train(program, values, number)
            finally:
                tap.at = None  # what is computed again in the backward was seen

        stage.runner.train = watched  # type: ignore[method-assign]
        if stage.optimizer is not None and stage.optimizer.torch_optimizer is not None:
            # Just before the step, so after clipping: as plain training notes them.
            named = stage.parameters.named
            stage.optimizer.torch_optimizer.register_step_pre_hook(
                lambda *_: self._note_gradients(named)
            )

    def _note_gradients(self, named: Mapping[str, nn.Parameter]) -> None:
        """Note the gradients with which a stage steps."""
        for name, parameter in named.items():
            if parameter.grad is not None:
                place = Place(self._step, -1, "gradient", name)
                self._seen[place] = parameter.grad.detach().clone()


def _plain_options(job: Job, copies: Copies, batch: Batch) -> tuple[Options, list[str]]:
    """Return the options of a job without what plain PyTorch lacks, and a note of what that is."""
    options, training, layout, plan = (
        job.options,
        job.options.training,
        job.options.layout,
        job.plan,
    )
    assert job.optimizer is not None
    # The names are bound by a default: a closure would see those of the last group.
    rules: Any = [
        (lambda name, parameter, mine=frozenset(names): name in mine, of_group)
        for names, of_group in job.optimizer.groups
    ]
    left_out = [
        text
        for text, there in (
            ("corrections for staleness", bool(job.corrections)),
            ("codecs", layout.codecs is not None),
            ("replicas", plan.replicated),
            ("the average of weights", training.ema is not None),
            ("scaling of losses", scale_of(training) is not None),
            ("torch.compile", bool(training.compile)),
            (f"the schedule, {plan.title}, for 1f1b", not plan.flushes),
        )
        if there
    ]
    example = None if job.model.sequence is not None else unmarked(batch)
    return replace(
        options,
        loss_fn=copies.loss_fn,
        example=example and (example.args, example.kwargs, example.target),
        optimizer=(job.optimizer.optimizer_class, job.optimizer.kwargs, rules),
        schedule=options.schedule if plan.flushes else "1f1b",
        micro_batches=plan.per_update,
        corrections=(),
        workers="serial",
        checkpoint=None,
        devices=None,
        training=replace(
            training, ema=None, loss_scale=None, autocast=training.autocast, compile=False
        ),
        layout=Layout(
            stages_per_worker=layout.stages_per_worker if plan.flushes else None,
            threads=layout.threads,
        ),
        recovery=Recovery(max_restarts=0),
        observe=Observe(),
    ), ([f"left out: {', '.join(left_out)}"] if left_out else [])


def names_by_stage(job: Job) -> list[list[str]]:
    """Return, by stage, the names of the parameters that it steps."""
    seen: set[str] = set()
    found = []
    for layers in job.plan.layers:
        part = job.model.part(layers)
        mine = [job.model.names[id(p)] for p in part.parameters() if id(p) in job.model.names]
        found.append([name for name in mine if name not in seen])
        seen.update(mine)
    # What no stage has belongs to the loss, which is on the last one.
    found[-1] += [name for name in job.model.names.values() if name not in seen]
    return found


def steps_that_draw(forwards: Forwards) -> dict[int, list[str]]:
    """Return, by number of a program, the steps between layers that draw random numbers."""
    if not isinstance(forwards, RecordedForwards):
        return {}
    return {
        number: [
            step.name
            for stage in made.stages
            for step in stage.steps
            if step.layer is None and step.random
        ]
        for number, made in enumerate(forwards.cuts)
    }


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
    found: Verification, job: Job, run: Run, state: Mapping[str, Any], batch: Batch
) -> Verification:
    """Compare the loss of a mini-batch in eval mode on the workers themselves, too."""
    # Where forwards store values, an evaluation would change them.
    if not found or job.script_values.forwards_store:
        return found
    feeder, passes = run.feeder, run.feeder.passes
    theirs = feeder.evaluate([batch], _as_it_is)["loss"]
    # Seeds count passes: layers that draw are to draw as if this one had not been.
    feeder.passes = passes
    with apart(job):
        assert job.optimizer is not None
        plain = PlainTraining(job, copies_of(job, state), job.optimizer, names_by_stage(job))
        own = plain.loss_of(*inputs_of(job, batch))
    if own is None or not math.isfinite(own):
        return found
    apart_by = abs(own - theirs) / max(abs(own), abs(theirs), 1e-30)
    # Codecs on the workers change the loss; here there are none.
    if apart_by <= _rounding(job) or job.codecs.of_graph:
        return replace(found, values=found.values + 1)
    return replace(
        found,
        same=False,
        parted=f"the loss of the first mini-batch in eval mode on the workers, {theirs:.6g} and "
        f"not {own:.6g},",
        difference=apart_by,
        cause=f"Stages in this process gave the same, so it is the workers: {_WORKERS}.",
    )


def _as_it_is(item: Any) -> Any:
    """Return a mini-batch in the parts that `batch_of` takes."""
    return item.args, item.kwargs, item.target


# -- the first mini-batch, and `run --verify` ---------------------------------------------------


class Watching:
    """Verifies the first mini-batches of a run as they are injected.

    ``asked`` is how many somebody has asked for. With 0 it is the first one alone, by what the
    workers return for it.
    """

    def __init__(self, job: Job, run: Run, asked: int) -> None:
        self._job, self._run, self._asked = job, run, asked
        self._batches: list[Batch] = []
        self._hyper: list[list[Hyper]] = []

    def _as_at_first(self, pending: PendingStep) -> bool:
        """Whether the stages began with what the script's model has, and have only trained."""
        feeder, job = self._run.feeder, self._job
        evaluated = feeder.passes and (
            job.script_values.forwards_store
            or any(True for m in job.model.modules.values() for _ in m.buffers())
        )
        touched = feeder.was_touched or job.script_values.weights_moved
        return not (touched or evaluated or pending.step != len(self._batches))

    def injected(self, cut: CutBatch, pending: PendingStep) -> bool:
        """Look at an injected mini-batch; return whether to look at the next one too."""
        optimizer = self._run.feeder.optimizer
        assert optimizer is not None
        if self._as_at_first(pending):
            self._batches.append(cut.batch)
            self._hyper.append(optimizer.groups())
        else:
            _log.info(
                "the first mini-batch was not compared with plain PyTorch: the stages do not have "
                "the weights that the script's model has"
            )
            return False
        if not self._asked:
            self._compare_first(cut, pending)
            self._batches.clear()
            return False
        if len(self._batches) == self._asked:
            self.end()
            return False
        return True

    def end(self) -> None:
        """Print what was found of the mini-batches that were asked for; raise where they part."""
        if self._asked and self._batches:
            batches, self._batches = self._batches, []
            found = beside(self._job, None, batches, self._hyper, self._run.feeder.training)
            if not found:
                raise ConfigError(f"verified: {found}")
            print(f"verified: {found}", file=sys.stderr, flush=True)

    def _compare_first(self, cut: CutBatch, pending: PendingStep) -> None:
        """Compare what the workers return for the first mini-batch with plain PyTorch."""
        job, result = self._job, pending.result()
        own, parts = self._tried(self._plain, cut), self._tried(self._parts, cut)
        if own is None:
            return
        if parts is not None:
            _log.warning("%s differs by %.2g. %s", *parts)
        theirs: Seen = {}
        weighed = [i for i, part in cut.filled.items() if part.share]
        for i, loss in zip(weighed, result.losses, strict=True):
            theirs[Place(0, i, "loss")] = loss
        if _steps_plainly(job):
            for name, value in self._run.run_state.gathered().items():
                theirs[Place(0, -1, "state", name)] = value
        number, parted = compared(own, theirs)
        if parted is None or parted.rounds:
            how = "is" if parted is None else "is, but for rounding,"
            _log.info(
                "the first mini-batch %s what plain PyTorch computes, in %d values", how, number
            )
            return
        # Code that differs from itself (a clock, a counter) says nothing about the workers.
        again = self._tried(self._plain, cut)
        if again is None or compared(own, again)[1] is not None:
            _log.info(
                "the first mini-batch was not compared with plain PyTorch: computed there twice, "
                "it differs"
            )
            return
        where = (
            f"{parted.place} differs by {parted.difference:.2g} of its largest element. Stages "
            f"in this process give what plain PyTorch gives, so it is the workers: {_WORKERS}"
        )
        training = self._run.feeder.training
        found = self._tried(lambda _: beside(job, None, self._batches, self._hyper, training), cut)
        raise ConfigError(
            "the first mini-batch is not what plain PyTorch computes: "
            f"{where if found is None or found else found}. "
            "Training(verify=False) leaves this comparison out"
        )

    @staticmethod
    def _tried(call: Callable[[CutBatch], T], cut: CutBatch) -> T | None:
        """Call the user's code, which was not written for this process; None if it raises."""
        try:
            return call(cut)
        except Exception as error:
            _log.info("the first mini-batch was not compared with plain PyTorch: %s", error)
            return None

    def _parts(self, cut: CutBatch) -> tuple[str, float, str] | None:
        """Return what `_parts_differ` says of the first mini-batch."""
        with apart(self._job):
            return _parts_differ(self._job, copies_of(self._job, None), cut.first_part or cut)

    def _plain(self, cut: CutBatch) -> Seen:
        """Train on the first mini-batch in plain PyTorch."""
        job = self._job
        assert job.optimizer is not None
        with apart(job):
            plain = PlainTraining(job, copies_of(job, None), job.optimizer, names_by_stage(job))
            plain.set_mode(self._run.feeder.training)
            before = drawn_outside()
            seen = plain.step(0, cut, steps_that_draw(job.forwards), self._hyper[0])
            if drawn_outside() != before:
                raise ConfigError(
                    "the model, loss or optimizer draws random numbers of Python or NumPy, which "
                    "are not seeded per layer; draw them with torch, which is"
                )
            return seen


def _steps_plainly(job: Job) -> bool:
    """Whether the first update of a job must be that of plain PyTorch, so that it is compared."""
    training, plan = job.options.training, job.plan
    clip = training.clip
    estimates = clip is not None and clip.of_model and plan.norms == "estimated"
    scales = scale_of(training) is not None
    others = job.corrections or job.options.layout.codecs is not None or plan.replicated
    return not (estimates or scales or others)


def watching(job: Job, run: Run, asked: int) -> Watching | None:
    """Return what verifies the first mini-batches of a run; None if nothing does."""
    trains = job.loss_fn is not None and job.optimizer is not None
    if trains and (asked or not why_not(job)):
        return Watching(job, run, asked)
    return None


def why_not(job: Job) -> str:
    """Return why the first mini-batch of a job is not verified unasked; empty if it is."""
    training, model = job.options.training, job.model
    tensors = [t for m in model.modules.values() for t in (*m.parameters(), *m.buffers())]
    size = sum(t.nbytes for t in tensors if t.layout is not None)
    if not training.verify:
        return "as Training(verify=False) says"
    if model.blueprint.specs or any(t.is_meta for t in tensors):
        return "as the script has no values of its weights"
    if size > LIMIT:
        return f"as its weights take {size >> 20} MiB, more than {LIMIT >> 20}"
    if training.compile or job.options.devices is not None or any(not t.is_cpu for t in tensors):
        return "as it is compiled, or computed by another device"
    if job.options.layout.codecs is not None:
        return "as codecs change values"
    modules = (m for part in model.modules.values() for m in part.modules())
    if any(map(communicates, (*modules, job.loss_fn))):
        return "as its layers communicate with other processes"
    return ""


def explained(job: Job) -> str:
    """Say whether the first mini-batch is verified, for `Pipeline.explain`."""
    if why := why_not(job):
        return (
            f"the first mini-batch is not computed in plain PyTorch too, {why}; pipe.verify() asks"
        )
    return (
        "the first mini-batch is computed in plain PyTorch too, and compared (weights of up to "
        f"{LIMIT >> 20} MiB; Training(verify=False) leaves it out)"
    )
