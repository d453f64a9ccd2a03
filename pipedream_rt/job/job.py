"""The job: all that is known of a run before anything of it runs.

`prepare` goes from value to value in four steps: what was given (`requested`), what the model says
(`read_model`), what is decided (`decide`), and what is packed for the stages (`packed`). It starts
no process or thread, opens no connection and writes no file, so a test makes a job in milliseconds.
(To find out what passes between the layers of a model that is no sequence, it runs the model once.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from pipedream_rt.job.decisions import Decisions, decide
from pipedream_rt.job.defaults import is_corrected
from pipedream_rt.job.given_optimizer import GivenOptimizer, state_by_name
from pipedream_rt.job.notices import (
    about_alternative,
    about_balance,
    about_choice,
    about_plan,
    about_state,
)
from pipedream_rt.job.options import SPANS_KEPT, Options
from pipedream_rt.job.reading import Reading, read_model, requested
from pipedream_rt.job.rules import compiling, rule_options
from pipedream_rt.job.script_values import ScriptValues, script_values_of
from pipedream_rt.job.specs import packed_stages
from pipedream_rt.job.unsplit_model import UnsplitModel, parameter_names
from pipedream_rt.schedules import Plan
from pipedream_rt.stage.evaluation import changes_modes
from pipedream_rt.stage.spec import StageSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A run that was prepared.

    Attributes:
        reading: What its model says.
        decisions: What was decided of it.
        specs: By stage, its `StageSpec`, packed; see `packed_stages`.
        given: The optimizer as the script gave it.
        brought: The state that it already has, by name of its parameter.
        names: The names of the trainable parameters, stage by stage.
        changes_modes: Whether a layer does something when its mode is set.
    """

    reading: Reading
    decisions: Decisions
    specs: Sequence[tuple[Tensor, ...]]
    given: GivenOptimizer
    brought: Mapping[str, dict[str, Any]]
    names: Sequence[str]
    script_values: ScriptValues
    changes_modes: bool

    @property
    def options(self) -> Options:
        """The options, with what was decided of them."""
        return self.decisions.options

    @property
    def model(self) -> UnsplitModel:
        """The model as the script has it."""
        return self.reading.model

    @property
    def plan(self) -> Plan:
        """The plan of the stages."""
        return self.decisions.plan

    @property
    def averages(self) -> bool:
        """Whether every stage makes an average of its weights."""
        return self.options.training.ema is not None and self.reading.optimizer is not None

    @property
    def without_start_data(self) -> Job:
        """A copy without specs, example and given optimizer: only the start needs these."""
        options = replace(self.options, example=None, optimizer=None)
        decisions = replace(self.decisions, options=options)
        return replace(self, decisions=decisions, specs=(), brought={})

    @property
    def credits(self) -> int:
        """The number of mini-batches that are injected before the first result is awaited."""
        return self.options.layout.credits or self.plan.credits()

    @property
    def chosen(self) -> str:
        """What is said at the start of what was chosen; empty for nothing."""
        kind, decided = self.reading.optimizer_class, self.decisions
        return about_choice(self.plan, decided.corrections, decided.left_out, kind) if kind else ""

    @property
    def alternative(self) -> str:
        """What is said of the schedule that was not chosen, for who asks; empty for nothing."""
        optimizer, left_out = self.reading.optimizer, self.decisions.left_out
        if optimizer is None:
            return ""
        kind, replicas = optimizer.optimizer_class, max(self.plan.replicas)
        corrected = is_corrected(self.options, kind, optimizer.options, replicas)
        return about_alternative(self.plan, left_out, kind, corrected)

    @property
    def notices(self) -> list[str]:
        """What is said at the start of what this costs."""
        said, split = [], self.reading.split
        if self.reading.optimizer is not None:
            said += about_plan(self.plan, self.decisions.left_out) + about_state(self.model)
        if isinstance(self.options.stages, int):
            said += about_balance(self.model, split.layers, split.work)
        return said


def prepare(model: UnsplitModel, options: Options, starts_here: bool = True) -> Job:
    """Prepare a run; `starts_here` says whether its workers start on this machine."""
    reading = read_model(requested(model, options))
    return packed(reading, decide(reading, options, starts_here))


def packed(reading: Reading, decisions: Decisions) -> Job:
    """Pack what each stage is sent."""
    model, plan, options = reading.model, decisions.plan, decisions.options
    training, codecs = options.training, decisions.codecs
    parts = [model.part(names) for names in plan.layers]
    common = StageSpec(
        stage=0,
        layers=nn.Module(),
        loss_fn=None,
        plan=plan,
        seed=options.seed,
        on_nan=training.on_nan,
        blueprint=replace(model.blueprint, seed=options.seed),
        pretrained=reading.pretrained,
        autocast=training.autocast,
        rules=rule_options(training, decisions.corrections, codecs),
        norm_dtype=model.norm_dtype,
        codecs=codecs.of_graph,
        compile=compiling(training.compile, model.modules.values()),
        trace_spans=SPANS_KEPT if options.observe.trace else 0,
        trace_shown=options.observe.shown,
        modes=reading.split.modes,
        devices=decisions.devices,
        settings=decisions.settings,
    )
    stages = packed_stages(
        model,
        parts,
        common,
        loss_fn=reading.loss_fn,
        recompute=decisions.recompute,
        programs=[reading.split.programs(stage) for stage in range(plan.num_stages)],
        compared=options.workers != "serial",
    )
    plugged = (*decisions.corrections, *codecs.of_graph.values())
    return Job(
        reading=reading,
        decisions=decisions,
        specs=[each.spec for each in stages],
        given=GivenOptimizer(options.optimizer),
        brought=state_by_name(options.optimizer, model.names),
        names=parameter_names(model, parts),
        script_values=script_values_of(
            model,
            reading.forwards,
            stages,
            [(type(each).__name__, each) for each in plugged],
            reading.optimizer_class,
            shared=options.workers == "serial",
        ),
        changes_modes=any(map(changes_modes, parts)),
    )
