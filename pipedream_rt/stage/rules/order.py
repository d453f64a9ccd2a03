"""The order in which the rules of a stage act: stated here, and nowhere else."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from pipedream_rt.stage.rules.clipping import Clip
from pipedream_rt.stage.rules.coding import EdgeCodecs
from pipedream_rt.stage.rules.corrections import Correcting
from pipedream_rt.stage.rules.ema import Averaging
from pipedream_rt.stage.rules.replicas import Replicas
from pipedream_rt.stage.rules.rule import Context, Rule, RuleOption
from pipedream_rt.stage.rules.scaling import LossScale
from pipedream_rt.stage.rules.shards import Shards
from pipedream_rt.stage.rules.ties import Ties
from pipedream_rt.stage.rules.totals import Totals

ORDER: tuple[type[RuleOption], ...] = (LossScale, Clip, Correcting, Averaging, EdgeCodecs)
"""The options, in the order of their rules. Gradients are unscaled before they are clipped, and the
average is taken after the step. A new rule gets its place here."""


def rules_of(options: Sequence[RuleOption], context: Context) -> Iterator[Rule]:
    """Yield the rules of a stage in the order in which they act."""
    plan, stage = context.plan, context.stage
    # First, since all others need the gradients summed over the replicas.
    if plan.replicas[stage] > 1:
        yield Replicas(context)
    if context.weights.tied:
        yield Ties(context)
    if any(option.needs_totals(plan.num_stages) for option in options):
        yield (totals := Totals(context))
        context = replace(context, totals=totals)
    for option in sorted(options, key=lambda each: ORDER.index(type(each))):
        yield option.rule(context)
    # Last, so that the weights that go to the other replicas are final.
    if plan.shape.shards(stage):
        yield Shards(context)
