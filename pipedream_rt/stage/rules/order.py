"""The rules of a stage, in the order in which they act: stated here, and nowhere else."""

from __future__ import annotations

from collections.abc import Iterator

from pipedream_rt.stage.rules.base import Context, Rule
from pipedream_rt.stage.rules.clipping import Clipping
from pipedream_rt.stage.rules.corrections import Corrections
from pipedream_rt.stage.rules.ema import Ema
from pipedream_rt.stage.rules.replicas import Replicas
from pipedream_rt.stage.rules.scaling import Scaling
from pipedream_rt.stage.rules.shards import Shards
from pipedream_rt.stage.rules.ties import Ties
from pipedream_rt.stage.rules.totals import Totals
from pipedream_rt.stage.spec import StageSpec


def rules_of(spec: StageSpec, context: Context) -> Iterator[Rule]:
    """Yield the rules of a stage in the order in which they act.

    Replicas come first, since all others look at the sum over them. Gradients are scaled back
    before they are measured, and measured before they are clipped. The average is taken of what a
    step has made, and what goes to other replicas comes last.

    Args:
        spec: The specification of the stage.
        context: What the rules know of the stage.
    """
    plan, stage = context.plan, context.stage
    if plan.replicas[stage] > 1:
        yield Replicas(context)
    if context.weights.tied:
        yield Ties(context)
    totals = None
    clips_all = spec.clip is not None and spec.clip.of_model and plan.num_stages > 1
    if spec.scale is not None or clips_all:
        yield (totals := Totals(context))
    if spec.scale is not None:
        assert totals is not None
        yield Scaling(spec.scale, context, totals)
    if spec.clip is not None:
        yield Clipping(spec.clip, context, totals)
    if spec.corrections:
        yield Corrections(spec.corrections, context)
    if spec.ema is not None:
        yield Ema(spec.ema, context)
    if plan.shape.shards(stage):
        yield Shards(context)
