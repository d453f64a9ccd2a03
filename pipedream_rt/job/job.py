"""The job: all that is known of a run before anything of it runs.

`prepare` checks, splits, plans, proves and packs. It starts no process or thread, opens no
connection and writes no file, so a test makes a job in milliseconds. (To find out what passes
between the layers of a model that is no sequence, it runs the model once.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from pipedream_rt.batches.forwards import Forwards
from pipedream_rt.batches.items import Items, ScriptCall
from pipedream_rt.batches.weighing import Weighing
from pipedream_rt.errors import ConfigError
from pipedream_rt.job.codecs import Codecs, codecs_of
from pipedream_rt.job.conflicts import Facts, facts_of_model, refuse_conflicts
from pipedream_rt.job.defaults import ASYNCHRONOUS, FLUSHED, of_loss_by, with_schedule
from pipedream_rt.job.devices import devices_of, shared_seats
from pipedream_rt.job.given_optimizer import (
    GivenOptimizer,
    OptimizerParts,
    grouped_names,
    state_by_name,
)
from pipedream_rt.job.notices import (
    DisabledFeatures,
    about_alternative,
    about_balance,
    about_choice,
    about_plan,
    about_state,
)
from pipedream_rt.job.options import SPANS_KEPT, Options
from pipedream_rt.job.process_assignment import ProcessAssignment, assignment_for
from pipedream_rt.job.rules import compiling, correcting, recomputing, rule_options
from pipedream_rt.job.script_values import ScriptValues, script_values_of
from pipedream_rt.job.specs import packed_stages
from pipedream_rt.job.splitting import ForwardOptions, Split, items_of, split_model
from pipedream_rt.job.unsplit_model import UnsplitModel, parameter_names
from pipedream_rt.messages.of_loss import OfLoss
from pipedream_rt.models import ties_of
from pipedream_rt.models.settings import Settings, settings_now
from pipedream_rt.schedules import Plan, plan_for
from pipedream_rt.schedules.checker import prove
from pipedream_rt.stage.correction import Correction
from pipedream_rt.stage.evaluation import changes_modes
from pipedream_rt.stage.spec import LossFunction, StageSpec, own_loss


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A run that was prepared.

    Attributes:
        specs: By stage, its `StageSpec`, packed; see `packed_stages`.
        loss_fn: The loss function; None for a pipeline that only infers.
        items: What reads the items of loaders.
        optimizer: The optimizer that the script gave, taken apart; None without one.
        brought: The state that it already has, by name of its parameter.
        names: The names of the trainable parameters, stage by stage.
        of_loss: Of what the last stage computes the loss.
        cut_unasked: Whether the number of micro-batches was chosen, and not given.
        changes_modes: Whether a layer does something when its mode is set.
        chosen: What is said at the start of what was chosen.
        alternative: What is said of the schedule that was not, for who asks.
        notices: What is said at the start of what this costs.
        balance: How the stages were balanced, in words; empty where they were given.
    """

    options: Options
    model: UnsplitModel
    plan: Plan
    assignment: ProcessAssignment
    specs: Sequence[tuple[Tensor, ...]]
    forwards: Forwards
    loss_fn: LossFunction | None
    items: Items
    weighing: Weighing
    corrections: tuple[Correction, ...]
    codecs: Codecs
    given: GivenOptimizer
    optimizer: OptimizerParts | None
    brought: Mapping[str, dict[str, Any]]
    names: Sequence[str]
    script_values: ScriptValues
    of_loss: OfLoss
    cut_unasked: bool
    changes_modes: bool
    settings: Settings
    chosen: str
    alternative: str
    notices: Sequence[str]
    balance: str

    @property
    def averages(self) -> bool:
        """Whether every stage makes an average of its weights."""
        return self.options.training.ema is not None and self.optimizer is not None

    @property
    def without_start_data(self) -> Job:
        """A copy without specs, example and given optimizer: only the start needs these."""
        options = replace(self.options, example=None, optimizer=None)
        return replace(self, options=options, specs=(), brought={})

    @property
    def credits(self) -> int:
        """The number of mini-batches that are injected before the first result is awaited."""
        return self.options.layout.credits or self.plan.credits()


def prepare(model: UnsplitModel, options: Options, starts_here: bool = True) -> Job:
    """Prepare a run; `starts_here` says whether its workers start on this machine."""
    training = options.training
    weighing = Weighing(training.weigh, options.loss_fn)
    pretrained = model.pretrained(options.layout.weights)
    trains, loss_fn = options.optimizer is not None, options.loss_fn
    may_own_loss = loss_fn is None and not isinstance(options.example, ScriptCall)
    trained = trains or loss_fn is not None
    forward = ForwardOptions(trained, may_own_loss, training.autocast, loss_fn)
    items = items_of(model, loss_fn, options.prepare)
    split = split_model(model, options.stages, options.example, forward, items)
    if split.forwards.own_loss and loss_fn is None:
        loss_fn = own_loss
    in_script = trains and loss_fn is None
    optimizer = grouped_names(options.optimizer, model.names, model.parameters)
    left_out = DisabledFeatures(
        schedule=options.schedule is None,
        micro_batches=options.micro_batches is None,
        corrections=options.corrections is None,
    )
    kind = None if optimizer is None else optimizer.optimizer_class
    if split.forwards.own_loss:
        _refuse_whole_own(options)
    of_loss = OfLoss.PARTS if in_script else of_loss_by(options, kind)
    of_all = in_script or (of_loss is not OfLoss.PARTS and not split.forwards.own_loss)
    options, facts, parts = _scheduled(split, model, options, kind, in_script, of_all)
    plan = facts.plan
    devices = devices_of(options.devices, plan, parts, starts_here)
    seats = shared_seats(devices) if starts_here and options.workers != "serial" else ()
    assignment = assignment_for(
        plan.workers, options.recovery.elastic, options.recovery.elastic_wait, seats
    )
    if options.recovery.elastic is not None and options.workers == "serial":
        raise ConfigError('elastic is a number of worker processes, and workers="serial" has none')
    recompute = recomputing(training.recompute, plan.num_stages)
    corrections = correcting(options.corrections, plan, optimizer)
    codecs = codecs_of(options.layout.codecs, plan)
    feeds_back = codecs.feeds_gradients_back
    refuse_conflicts(replace(facts, corrections=corrections, feeds_back=feeds_back))
    # Workers elsewhere may have accelerators even if this machine has none.
    settings = settings_now(of_devices=bool(devices) or not starts_here)
    common = StageSpec(
        stage=0,
        layers=nn.Module(),
        loss_fn=None,
        plan=plan,
        seed=options.seed,
        on_nan=training.on_nan,
        blueprint=replace(model.blueprint, seed=options.seed),
        pretrained=pretrained,
        autocast=training.autocast,
        rules=rule_options(training, corrections, codecs),
        norm_dtype=model.norm_dtype,
        codecs=codecs.of_graph,
        compile=compiling(training.compile, model.modules.values()),
        trace_spans=SPANS_KEPT if options.observe.trace else 0,
        trace_shown=options.observe.shown,
        modes=split.modes,
        devices=devices,
        settings=settings,
    )
    packed = packed_stages(
        model,
        parts,
        common,
        loss_fn=loss_fn,
        recompute=recompute,
        programs=[split.programs(stage) for stage in range(plan.num_stages)],
        compared=options.workers != "serial",
    )
    fixed = [(type(each).__name__, each) for each in (*corrections, *codecs.of_graph.values())]
    return Job(
        options=options,
        model=model,
        plan=plan,
        assignment=assignment,
        specs=[each.spec for each in packed],
        forwards=split.forwards,
        loss_fn=loss_fn,
        items=items,
        weighing=weighing,
        corrections=corrections,
        codecs=codecs,
        given=GivenOptimizer(options.optimizer),
        optimizer=optimizer,
        brought=state_by_name(options.optimizer, model.names),
        names=parameter_names(model, parts),
        script_values=script_values_of(
            model, split.forwards, packed, fixed, kind, shared=options.workers == "serial"
        ),
        of_loss=OfLoss.PARTS if plan.per_update == 1 else of_loss,
        cut_unasked=left_out.micro_batches,
        changes_modes=any(map(changes_modes, parts)),
        settings=settings,
        chosen=about_choice(plan, corrections, left_out, kind) if kind else "",
        alternative=about_alternative(plan, left_out, kind) if kind else "",
        notices=[
            *(about_plan(plan, left_out) if kind else ()),
            *(about_state(model) if kind else ()),
            *(
                about_balance(model, split.layers, split.work)
                if isinstance(options.stages, int)
                else ()
            ),
        ],
        balance=split.how,
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
    split: Split,
    model: UnsplitModel,
    options: Options,
    optimizer: type | None,
    in_script: bool,
    of_all: bool,
) -> tuple[Options, Facts, list[nn.Module]]:
    """Choose a schedule if there is none; return the options, what is known, and the stages."""
    chosen = with_schedule(options, optimizer, len(split.layers), model.modules.values(), of_all)
    try:
        return chosen, *_planned(split, model, chosen, in_script)
    except ConfigError:  # other options may need a schedule that flushes
        if options.schedule is not None or chosen.schedule != ASYNCHRONOUS:
            raise
    chosen = replace(chosen, schedule=FLUSHED)
    return chosen, *_planned(split, model, chosen, in_script)


def _planned(
    split: Split, model: UnsplitModel, options: Options, in_script: bool
) -> tuple[Facts, list[nn.Module]]:
    """Make a plan and prove it; return what is known of the job with it, and the stages."""
    plan = replace(_plan_of(split, options), loss_in_script=in_script)
    parts = [model.part(names) for names in plan.layers]
    return _proved(plan, model, parts, options), parts


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
