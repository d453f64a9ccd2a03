"""What is decided of a run: the schedule with its plan, its workers, and what stages do to updates.

It is the third of the four steps of `prepare`, from values to a value. What cannot work together is
refused here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import nn

from pipedream_rt.errors import ConfigError
from pipedream_rt.job.codecs import Codecs, codecs_of
from pipedream_rt.job.conflicts import Facts, facts_of_model, refuse_conflicts
from pipedream_rt.job.defaults import ASYNCHRONOUS, FLUSHED, of_loss_by, with_schedule
from pipedream_rt.job.devices import devices_of, shared_seats
from pipedream_rt.job.notices import DisabledFeatures
from pipedream_rt.job.options import Options
from pipedream_rt.job.process_assignment import ProcessAssignment, assignment_for
from pipedream_rt.job.reading import Reading
from pipedream_rt.job.rules import correcting, recomputing
from pipedream_rt.job.splitting import Split
from pipedream_rt.job.unsplit_model import UnsplitModel
from pipedream_rt.messages.head import OfLoss
from pipedream_rt.models import ties_of
from pipedream_rt.models.settings import Settings, settings_now
from pipedream_rt.schedules import Plan, plan_for
from pipedream_rt.schedules.checker import prove
from pipedream_rt.stage.correction import Correction


@dataclass(frozen=True, slots=True, kw_only=True)
class Decisions:
    """What was decided of a run.

    Attributes:
        options: Those that were given, with the schedule and the number of micro-batches.
        left_out: Which of them the user had left out.
        facts: What is known of the run, with its plan, which was proved.
        devices: By worker of the plan, what it computes on; empty where all compute on the host.
        recompute: The stages that compute activations again.
        of_loss: Of what the last stage computes the loss.
        settings: The settings of torch in this process, which workers take over.
    """

    options: Options
    left_out: DisabledFeatures
    facts: Facts
    assignment: ProcessAssignment
    devices: tuple[str, ...]
    recompute: frozenset[int]
    codecs: Codecs
    of_loss: OfLoss
    settings: Settings

    @property
    def plan(self) -> Plan:
        """The plan of the stages, with ties and norms."""
        return self.facts.plan

    @property
    def corrections(self) -> tuple[Correction, ...]:
        """The corrections of stale gradients."""
        return self.facts.corrections


def decide(reading: Reading, options: Options, starts_here: bool = True) -> Decisions:
    """Decide what was left out, and refuse what does not go together.

    ``starts_here`` says whether the workers start on this machine.
    """
    training, forwards = options.training, reading.forwards
    kind, in_script = reading.optimizer_class, reading.loss_in_script
    if forwards.own_loss:
        _refuse_whole_own(options)
    of_loss = OfLoss.PARTS if in_script else of_loss_by(options, kind)
    of_all = in_script or (of_loss is not OfLoss.PARTS and not forwards.own_loss)
    left_out = DisabledFeatures(
        schedule=options.schedule is None,
        micro_batches=options.micro_batches is None,
        corrections=options.corrections is None,
    )
    options, facts, parts = _scheduled(reading, options, in_script, of_all)
    plan = facts.plan
    devices = devices_of(options.devices, plan, parts, starts_here)
    seats = shared_seats(devices) if starts_here and options.workers != "serial" else ()
    assignment = assignment_for(
        plan.workers, options.recovery.elastic, options.recovery.elastic_wait, seats
    )
    if options.recovery.elastic is not None and options.workers == "serial":
        raise ConfigError('elastic is a number of worker processes, and workers="serial" has none')
    recompute = recomputing(training.recompute, plan.num_stages)
    corrections = correcting(options.corrections, plan, reading.optimizer)
    codecs = codecs_of(options.layout.codecs, plan)
    facts = replace(facts, corrections=corrections, feeds_back=codecs.feeds_gradients_back)
    refuse_conflicts(facts)
    return Decisions(
        options=options,
        left_out=left_out,
        facts=facts,
        assignment=assignment,
        devices=devices,
        recompute=recompute,
        codecs=codecs,
        of_loss=OfLoss.PARTS if plan.per_update == 1 else of_loss,
        # Workers elsewhere may have accelerators even if this machine has none.
        settings=settings_now(of_devices=bool(devices) or not starts_here),
    )


def _refuse_whole_own(options: Options) -> None:
    """Refuse to compute a loss of the whole that the model computes itself, of what it gets."""
    if options.training.loss == "whole" and options.micro_batches != 1:
        raise ConfigError(
            'Training(loss="whole") computes loss_fn of all outputs together, and this model '
            'computes its loss itself: give micro_batches=1, schedule="gpipe", with which it '
            "gets whole mini-batches; or loss_fn, and a model that returns the outputs alone"
        )


def _scheduled(
    reading: Reading, options: Options, in_script: bool, of_all: bool
) -> tuple[Options, Facts, list[nn.Module]]:
    """Choose a schedule if there is none; return the options, what is known, and the stages."""
    stages, modules = len(reading.split.layers), reading.model.modules.values()
    groups = [] if reading.optimizer is None else reading.optimizer.options
    known = (reading.optimizer_class, stages, [*modules], of_all, groups)
    chosen = with_schedule(options, *known)
    try:
        return chosen, *_planned(reading, chosen, in_script)
    except ConfigError:  # other options may need a schedule that flushes
        if options.schedule is not None or chosen.schedule != ASYNCHRONOUS:
            raise
    # With the micro-batches that it has where it is chosen.
    flushed = with_schedule(replace(options, schedule=FLUSHED, is_tried=True), *known)
    chosen = replace(flushed, is_tried=False)
    return chosen, *_planned(reading, chosen, in_script)


def _planned(reading: Reading, options: Options, in_script: bool) -> tuple[Facts, list[nn.Module]]:
    """Make a plan and prove it; return what is known of the job with it, and the stages."""
    plan = replace(_plan_of(reading.split, options), loss_in_script=in_script)
    parts = [reading.model.part(names) for names in plan.layers]
    return _proved(plan, reading.model, parts, options), parts


def _plan_of(split: Split, options: Options) -> Plan:
    """Make the plan of the stages of a model, without ties and norms."""
    layout = options.layout
    assert layout.replicas != "auto"
    assert options.schedule is not None
    plan = plan_for(
        options.schedule,
        num_stages=len(split.layers),
        per_update=options.micro_batches,
        stages_per_worker=layout.stages_per_worker,
        synchronous=layout.synchronous_updates,
        slack=layout.slack,
        replicas=layout.replicas,
        shard_optimizer=layout.shard_optimizer,
        credits=layout.credits,
        proved=False,  # `_proved` does, once ties and norms are in it
    )
    links = plan.links if split.links is None else split.links
    return replace(plan, layers=split.layers, links=links, entries=split.entries)


def _proved(
    plan: Plan,
    model: UnsplitModel,
    parts: Sequence[nn.Module],
    options: Options,
) -> Facts:
    """Return what is known of a job, with its plan with ties and norms, proved as it will run."""
    training, ties = options.training, ties_of(parts, model.names)
    trained = zip(parts, plan.replicas, strict=True) if options.optimizer is not None else ()
    replicated = [each for part, count in trained if count > 1 for each in part.modules()]
    of_model = facts_of_model(model.modules, model.parameters, [t.name for t in ties], replicated)
    facts = Facts(plan=plan, model=of_model, training=training)
    refuse_conflicts(facts)
    plan = replace(plan, ties=ties)
    plan = plan.with_norms() if facts.needs_norms else plan
    prove(plan, options.schedule, options.layout.credits)
    return replace(facts, plan=plan, proved=True)
