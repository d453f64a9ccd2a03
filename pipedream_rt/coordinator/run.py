"""A run: the workers of a job, and the objects in the script that use them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace

from pipedream_rt import extras
from pipedream_rt.batches.cutting import is_marked, needs_pairs, samples_of
from pipedream_rt.batches.items import Batch
from pipedream_rt.batches.micro_batches import CutBatch
from pipedream_rt.cluster.forked_workers import fork_server, installed_modules
from pipedream_rt.cluster.generations import (
    Generations,
    cores_for,
    starts_here,
    workers_of_run,
)
from pipedream_rt.cluster.interface import Cluster, ClusterSpec, Fail
from pipedream_rt.coordinator.checkpointing.checkpointer import Checkpointer
from pipedream_rt.coordinator.checkpointing.preemption import Preemption
from pipedream_rt.coordinator.distributed_optimizer import DistributedOptimizer
from pipedream_rt.coordinator.feed.epochs import Epochs
from pipedream_rt.coordinator.feed.feeder import Feeder, FeedHooks
from pipedream_rt.coordinator.feed.script_loss import ScriptLoss
from pipedream_rt.coordinator.parameters import Parameters
from pipedream_rt.coordinator.recovery.decision import Failures
from pipedream_rt.coordinator.recovery.group import WorkerGroup
from pipedream_rt.coordinator.recovery.recovery import Recovery
from pipedream_rt.coordinator.results import StepResult
from pipedream_rt.coordinator.run_state import RunState
from pipedream_rt.coordinator.script_environment import profile_option
from pipedream_rt.coordinator.script_settings import ScriptSettings
from pipedream_rt.coordinator.views.speed_notices import BalanceNotice, SizeNotice
from pipedream_rt.coordinator.views.trace_collection import TraceCollection
from pipedream_rt.job.identity import (
    Identity,
    name_of_class,
    name_of_loss,
    names_of,
    require_acceptable,
)
from pipedream_rt.job.job import Job
from pipedream_rt.job.notices import (
    about_cores,
    about_micro_batches,
    about_process_group,
    about_workers,
)
from pipedream_rt.job.options import SPANS_KEPT, Options
from pipedream_rt.job.specs import weights_of
from pipedream_rt.job.unsplit_model import UnsplitModel
from pipedream_rt.messages.head import OfLoss
from pipedream_rt.messages.state_keys import optimizer_state
from pipedream_rt.schedules.placement import LOSS_LAYER
from pipedream_rt.telling import log_of
from pipedream_rt.tracing.spans import Recorder
from pipedream_rt.transport.interface import Receive

_log = log_of(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The parts of a pipeline whose workers are there."""

    feeder: Feeder
    epochs: Epochs
    script_loss: ScriptLoss | None
    parameters: Parameters
    checkpointer: Checkpointer
    run_state: RunState
    trace: TraceCollection


def warm_up(model: UnsplitModel, options: Options) -> None:
    """Let the fork server import what workers will need, while a job is prepared."""
    if starts_here(options.workers):
        objects = [*model.whole.modules(), options.loss_fn]
        # To compute activations again, torch imports its compiler too.
        compiles = bool(options.training.compile) or options.training.recompute is not False
        fork_server().prepare(installed_modules(objects, compiles=compiles))


def start(job: Job, publisher: extras.EventPublisher | None) -> WorkerGroup:
    """Start the workers of a job."""
    most = job.options.recovery.max_restarts
    assert most is not None
    # Until the group is there, an error undoes this; afterwards, the end of the group does.
    with ExitStack() as undo:
        generations = Generations(job.options.workers)
        undo.callback(generations.close)
        if publisher is not None:
            undo.callback(publisher.end)
        recovery = Recovery(
            job.plan,
            functools.partial(_start_cluster, job=job.without_start_data, generations=generations),
            list(job.specs),
            job.reading.forwards,
            job.options.recovery.answer,
            Failures(most, job.plan),
        )
        recovery.begin()
        group = WorkerGroup(recovery)
        group.recovery.after_workers_end.append(undo.pop_all().close)
    return group


def _start_cluster(
    receive: Receive, fail: Fail, generation: int, *, job: Job, generations: Generations
) -> Cluster:
    """Start the workers of a generation."""
    recovery = job.options.recovery
    spec = ClusterSpec(
        plan=job.plan,
        assignment=job.decisions.assignment,
        receive=receive,
        fail=fail,
        generation=generation,
        timeout=recovery.answer,
        start_timeout=recovery.start,
        threads=job.options.layout.threads,
        heartbeat=recovery.heartbeat,
    )
    return generations.start(spec)


def attach(job: Job, group: WorkerGroup, publisher: extras.EventPublisher | None) -> Run:
    """Build the parts of a run around its workers, and go on from a checkpoint if asked to."""
    options = job.options
    kept, traced = options.kept, bool(options.observe.trace)
    shown = options.observe.shown and options.observe.shown.open("script")
    recorder = Recorder(SPANS_KEPT, shown) if traced else None
    feeder = Feeder(
        group,
        RunHooks(job, publisher),
        forwards=job.reading.forwards,
        credits=job.credits,
        has_loss=job.reading.loss_fn is not None,
        settings=job.decisions.settings,
        weighing=job.reading.weighing,
        items=job.reading.items,
        weights=functools.partial(weights_of, job.model),
        pairs=functools.partial(needs_pairs, job.model.whole),
        of_loss=job.decisions.of_loss,
        check_loss=0 if job.plan.loss_in_script else options.training.check_loss,
        recorder=recorder,
        fingerprint_every=options.observe.fingerprint_every,
        script=job.script_values,
    )
    script_loss = None
    if job.plan.loss_in_script:
        script_loss = ScriptLoss(group, feeder, options.training.on_nan)
    epochs = Epochs(feeder)
    parameters = Parameters(group, feeder, job.model, list(job.names), script_loss)
    checkpointer = Checkpointer(group, kept)
    preemption = Preemption(kept.grace) if kept is not None and options.makes_checkpoints else None
    run_state = RunState(
        group,
        feeder,
        epochs,
        job.model,
        checkpointer,
        functools.partial(
            # The loss as it is now: its values may change, and a script that resumes begins again.
            _identity,
            job.without_start_data,
            feeder,
            name_of_loss(job.reading.loss_fn),
        ),
        preemption,
        ScriptSettings(group, feeder, job.script_values),
    )
    if preemption is not None:
        group.recovery.before_workers_end.append(preemption.close)
        preemption.watch()
    if job.reading.optimizer is not None:
        parameters.use(parameters.build_optimizer(*job.reading.optimizer))
        parameters.scatter_optimizer_state(optimizer_state(job.brought))
    if kept is not None and kept.resume:
        run_state.resume(require_acceptable(kept.accept))
    if publisher is not None:
        publisher.begin(group, options, feeder.step, feeder.credits, job.reading.forwards.how)
    return Run(
        feeder=feeder,
        epochs=epochs,
        script_loss=script_loss,
        parameters=parameters,
        checkpointer=checkpointer,
        run_state=run_state,
        trace=TraceCollection(group, feeder, recorder),
    )


class RunHooks(FeedHooks):
    """What a run does with its mini-batches: it refuses, publishes, and notices."""

    def __init__(self, job: Job, publisher: extras.EventPublisher | None) -> None:
        options, say = job.options, functools.partial(_log.warning, "%s")
        self._first, self._publisher = _first(job), publisher
        self._given = job.given if job.given.is_there else None
        self._balance = self._size = None
        if options.workers != "serial":  # there no two stages ever compute at once
            self._balance = BalanceNotice(job.plan, say)
        if options.workers != "serial" and not job.plan.replicated:
            # With replicas, which take turns, a result has the compute time of one of them alone.
            threads = options.layout.threads
            # Elsewhere, each has cores of its own.
            cores = cores_for(options.workers) or job.plan.workers * threads
            self._size = SizeNotice(job.plan, say, cores=cores, threads=threads)

    def first(self, batch: Batch, count: int) -> None:
        self._first(batch, count)

    def refuse_changes(self) -> None:
        if self._given is not None:
            self._given.refuse_changes()

    def injected(self, cut: CutBatch, optimizer: DistributedOptimizer) -> None:
        if self._publisher is not None:
            self._publisher.injected(cut, optimizer)

    def came(self, result: StepResult, waited_s: float) -> None:
        if self._balance is not None:
            self._balance(result)
        if self._publisher is not None:
            self._publisher.came(result)
        if self._size is not None:
            self._size(result, waited_s)


def notices_of(job: Job) -> list[str]:
    """Return the notices at the start of a run, about its schedule and this machine."""
    if profile_option() is not None:  # nothing will be trained
        return []
    options, said = job.options, list(job.notices)
    if (cores := cores_for(options.workers)) > 0:
        said += about_cores(job.decisions.assignment.most, options.layout.threads, cores)
    if options.workers != "serial":
        said += about_process_group(job.model, job.plan.layers, job.reading.loss_fn)
    said += about_workers(job.decisions.assignment.most, workers_of_run(options.workers))
    return said


def _first(job: Job) -> Callable[[Batch, int], object]:
    """Return a function of the first mini-batch and of the number of its micro-batches.

    Under `pipedream-rt profile` it is the profiler.
    """
    options = job.options
    if (path := profile_option()) is None:
        return functools.partial(_say_of_first, job=job.without_start_data)
    return lambda batch, count: extras.profile_and_end(
        batch,
        path=path,
        model=job.model.given,
        loss_fn=options.loss_fn,
        optimizer=options.optimizer,
        autocast=options.training.autocast,
        count=count,
        threads=options.layout.threads,
    )


def _say_of_first(batch: Batch, count: int, job: Job) -> None:
    """Warn of what the first mini-batch shows."""
    samples, modules = samples_of(batch), dict(job.model.modules)
    if job.decisions.of_loss is not OfLoss.PARTS:
        modules.pop(LOSS_LAYER, None)  # it may see the whole mini-batch
    if samples:
        for text in about_micro_batches(modules, samples, count, is_marked(batch)):
            _log.warning("%s", text)


def _identity(job: Job, feeder: Feeder, loss: str) -> Identity:
    """Return the identity of the script's options, with its present optimizer."""
    optimizer = feeder.optimizer
    identity = Identity(
        schedule=job.plan.title,
        seed=job.options.seed,
        threads=job.options.layout.threads,
        loss=loss,
        corrections=names_of(job.decisions.corrections),
        codecs=[
            f"{b} -> {e}: {text}" for (b, e), text in job.decisions.codecs.texts(names_of).items()
        ],
    )
    if optimizer is None:
        return identity
    return replace(
        identity,
        optimizer=name_of_class(optimizer.optimizer_class),
        groups=optimizer.names(),
        hyper_parameters=optimizer.given,
    )
