"""What does not go together: one table, with the reason and the way out of each pair of features.

It is checked before anything starts, and printed in the docs. What a schedule itself cannot do, as
slack in ``gpipe``, the schedule refuses when the plan is made.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from string import Formatter
from typing import Any, NamedTuple

import torch
from torch import nn

from pipedream_rt.errors import ConfigError
from pipedream_rt.job.options import Training
from pipedream_rt.job.rules import recomputing, scale_of
from pipedream_rt.models.tensors import gradient_hooks
from pipedream_rt.schedules import RECIPES, Plan, plan_for
from pipedream_rt.stage.correction import Correction, overrides


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What the table asks of a model: names of layers and parameters; empty for none.

    Attributes:
        tied: A weight that several stages use.
        hooked: A parameter with a hook on its gradient, also on the accumulated one.
        tied_hooked: One of these that is tied too.
        sum_hooked: A parameter with a hook on its accumulated gradient.
        half: A parameter in float16.
        sparse: A layer of a stage with replicas whose gradients are sparse.
        renormed: A layer that changes its weight in its forward (``max_norm``).
        renormed_replicated: One of a stage with replicas.
    """

    tied: str = ""
    hooked: str = ""
    tied_hooked: str = ""
    sum_hooked: str = ""
    half: str = ""
    sparse: str = ""
    renormed: str = ""
    renormed_replicated: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What is known of a job before it starts.

    Attributes:
        feeds_back: Whether codecs add what they lost of a gradient to a later one.
        proved: Whether the plan was proved; only then an order that a user wrote may be walked.
    """

    plan: Plan
    model: ModelFacts = ModelFacts()
    training: Training = field(default_factory=Training)
    corrections: tuple[Correction, ...] = ()
    feeds_back: bool = False
    proved: bool = False

    @property
    def schedule(self) -> str:
        """The schedule, in words."""
        return self.plan.title

    @property
    def replicas(self) -> int:
        """The most replicas of a stage."""
        return max(self.plan.replicas)

    @property
    def shards(self) -> bool:
        """Whether the optimizer of a stage is sharded over its replicas."""
        return self.plan.shape.shard_optimizer and self.plan.replicated

    @property
    def halves(self) -> bool:
        """Whether backwards are computed in two halves."""
        return self.proved and self.plan.cuts_backward

    @property
    def recomputes(self) -> bool:
        """Whether a stage computes its activations again."""
        return bool(recomputing(self.training.recompute, self.plan.num_stages))

    @property
    def scaled(self) -> bool:
        """Whether losses are scaled."""
        return scale_of(self.training) is not None

    @property
    def whole_loss(self) -> bool:
        """Whether the last stage computes the loss of several micro-batches together."""
        return self.training.loss == "whole" and self.plan.per_update > 1

    @property
    def over_model(self) -> bool:
        """Whether gradients are clipped by the norm of the model."""
        return self.training.clip is not None and self.training.clip.of_model

    @property
    def needs_norms(self) -> bool:
        """Whether updates need the norm of all gradients of the model, by clipping or scaling."""
        return self.scaled or self.over_model

    @property
    def correction(self) -> str:
        """The class of the first correction that changes gradients as they come; empty for none."""
        found = (c for c in self.corrections if overrides(c, "after_backward"))
        return next((type(each).__name__ for each in found), "")


class Conflict(NamedTuple):
    """Two features that do not go together.

    Attributes:
        why: The reason; names of `ModelFacts` and `Facts` in braces are filled in.
    """

    feature: str
    other: str
    why: str
    instead: str
    holds: Callable[[Facts], object]


CONFLICTS: tuple[Conflict, ...] = (
    Conflict(
        "scaled losses (float16)", "async-1f1b without vertical sync",
        "{schedule} reads updates before all stages know whether they are skipped",
        "use bfloat16, a schedule that flushes, or the schedule async-1f1b+vertical-sync",
        lambda f: f.scaled and not f.plan.reads_late,
    ),
    Conflict(
        "scaled losses (float16)", "parameters in float16",
        "{half} is float16, and its gradients cannot be scaled back",
        "keep parameters in float32 and let autocast make float16 of them",
        lambda f: f.scaled and f.model.half,
    ),
    Conflict(
        "scaled losses (float16)", "codecs that feed gradients back",
        "what a codec has lost of a gradient is added to a later one, whose loss may have another "
        "scale",
        'use bfloat16, or a codec with feedback=False or direction="forward"',
        lambda f: f.scaled and f.feeds_back,
    ),
    Conflict(
        "replicas", "tied weights on several stages",
        "{tied} is used on several stages that have replicas, and would have to be summed over all",
        "put the layers that use it into one stage, or use no replicas",
        lambda f: f.plan.replicated and f.model.tied,
    ),
    Conflict(
        "replicas", "hooks on accumulated gradients",
        "{sum_hooked} has a hook on its accumulated gradient, and each replica would call it with "
        "what it has summed alone",
        "remove the hook, or use no replicas",
        lambda f: f.plan.replicated and f.model.sum_hooked,
    ),
    Conflict(
        "replicas", "sparse gradients",
        "the gradients of {sparse} are sparse, and those of replicas are added up as dense ones",
        "use sparse=False, or no replicas",
        lambda f: f.plan.replicated and f.model.sparse,
    ),
    Conflict(
        "replicas", "embeddings with max_norm",
        "{renormed_replicated} has max_norm, which changes its weight in forward, on each replica "
        "otherwise",
        "use no replicas, or normalise the rows that were looked up",
        lambda f: f.plan.replicated and f.model.renormed_replicated,
    ),
    Conflict(
        "replicas", "corrections of gradients, without a flush",
        "{correction} needs the weights that a gradient is applied to, and replicas add their "
        "gradients up before these are there",
        "leave it out, or use no replicas",
        lambda f: f.plan.replicated and not f.plan.flushes and f.correction,
    ),
    Conflict(
        "replicas", "norms over the model, without a flush",
        "with {schedule}, replicas step before the norm of all gradients of the model can be known",
        'use Clip(..., over="stage") and no scaling of losses, or a schedule that flushes, such as '
        "1f1b",
        lambda f: f.plan.replicated
        and not f.plan.flushes
        and (f.scaled or (f.over_model and f.plan.num_stages > 1)),
    ),
    Conflict(
        "replicas", "scaled losses with fewer micro-batches than replicas",
        "with {schedule}, some replicas have no micro-batch of an update and know its scale too "
        "late",
        "give at least as many micro-batches per update as a stage has replicas",
        lambda f: f.scaled and f.plan.per_update < f.replicas,
    ),
    Conflict(
        "shard_optimizer", "norms over the model",
        "with shard_optimizer a replica sends weights at its step, and these steps would wait for "
        "the norm of all gradients of the model",
        'use Clip(..., over="stage") and no scaling of losses, or Layout(shard_optimizer=False)',
        lambda f: f.shards and f.needs_norms,
    ),
    Conflict(
        "shard_optimizer", "ema",
        "ema needs all weights of a stage after a step, of which each replica has done a part "
        "alone",
        "use Layout(shard_optimizer=False)",
        lambda f: f.shards and f.training.ema is not None,
    ),
    Conflict(
        "shard_optimizer", "corrections",
        "corrections need all weights of a stage after a step, of which each replica has done a "
        "part alone",
        "use Layout(shard_optimizer=False)",
        lambda f: f.shards and f.corrections,
    ),
    Conflict(
        "corrections of gradients", "scaled losses",
        "{correction} changes gradients as they come, and losses are scaled: the gradients are not "
        "those of the loss",
        "use bfloat16",
        lambda f: f.scaled and not f.plan.flushes and f.correction,
    ),
    Conflict(
        "corrections of gradients", "exact norms over the model, without a flush",
        "{correction} needs the weights that a gradient is applied to, and with {schedule} and "
        "Clip(norm=...) over the model updates wait for the norm of all gradients, so they are not "
        "there yet",
        'use Clip(..., over="stage"), or another schedule',
        lambda f: f.over_model and f.plan.reads_late and not f.plan.flushes and f.correction,
    ),
    Conflict(
        "corrections of gradients", "hooks on accumulated gradients, with several micro-batches",
        "{sum_hooked} has a hook on its accumulated gradient, and {correction} changes gradients "
        "before they are added up, so the hook would find those of one micro-batch",
        "remove one of the two, or use micro_batches=1",
        lambda f: f.model.sum_hooked and f.plan.per_update > 1 and f.correction,
    ),
    Conflict(
        "zero-bubble", "recompute",
        "{schedule} computes gradients in two halves, each of which would compute the activations "
        "again",
        "use recompute with another schedule",
        lambda f: f.recomputes and f.halves,
    ),
    Conflict(
        "zero-bubble", "hooks on gradients",
        "{hooked} has a hook on its gradient, and {schedule} computes gradients in two halves",
        "remove the hook, or use a schedule that does not split the backward",
        lambda f: f.model.hooked and f.halves,
    ),
    Conflict(
        "tied weights on several stages", "hooks on gradients",
        "{tied_hooked} has a hook on its gradient and is used on several stages, each of which has "
        "a part of the gradient alone",
        "remove the hook, or choose split points that keep all uses in one stage",
        lambda f: f.model.tied_hooked,
    ),
    Conflict(
        "a loss in the script", "scaled losses (float16)",
        "the script computes the loss, so no stage can scale it",
        "use bfloat16, or loss_fn, which computes the loss on the last stage",
        lambda f: f.plan.loss_in_script and f.scaled,
    ),
    Conflict(
        "a loss in the script", "weigh",
        "the script computes the loss of whole mini-batches, in which no micro-batch weighs",
        "leave weigh out, or compute the loss on the last stage, by loss_fn",
        lambda f: f.plan.loss_in_script and f.training.weigh is not None,
    ),
    Conflict(
        "a loss in the script", 'loss="whole"',
        "the script computes the loss, and it has whole mini-batches",
        'leave Training(loss="whole") out, or give loss_fn',
        lambda f: f.plan.loss_in_script and f.training.loss == "whole",
    ),
    Conflict(
        'loss="whole"', "weigh",
        "a loss of the whole mini-batch is one number, in which no micro-batch weighs",
        "leave one of the two out",
        lambda f: f.whole_loss and f.training.weigh is not None,
    ),
    Conflict(
        'loss="whole"', "schedules that begin a backward before all outputs have come",
        "with {schedule}, the last stage begins backwards before it has all outputs of a "
        "mini-batch, and the loss is computed of all of them",
        'use schedule="gpipe", without replicas of the last stage; or micro_batches=1',
        lambda f: f.whole_loss and f.proved and not f.plan.outputs_come_first,
    ),
    Conflict(
        "schedules without a flush", "embeddings with max_norm",
        "{renormed} has max_norm, which changes its weight in forward, and {schedule} keeps "
        "several versions of it",
        "use a schedule that flushes (1f1b, gpipe), or normalise the rows that were looked up",
        lambda f: not f.plan.flushes and f.model.renormed,
    ),
)  # fmt: skip
"""The table; the first row that holds becomes the error."""


def refuse_conflicts(facts: Facts) -> None:
    """Refuse a job with two features that do not go together."""
    for row in CONFLICTS:
        if row.holds(facts):
            names = {name: _named(facts, name) for name in _fields_of(row.why)}
            raise ConfigError(f"{row.why.format(**names)};\n{row.instead}")


def _named(facts: Facts, name: str) -> str:
    """Return what stands for a name in braces: of the model, or of the job."""
    found: str = getattr(facts.model if hasattr(facts.model, name) else facts, name)
    return found


def may_replicate(facts: Facts) -> bool:
    """Whether a plan may have the replicas that it has: no row of the table speaks against it."""
    return not any(row.feature == "replicas" and row.holds(facts) for row in CONFLICTS)


def facts_of_model(
    modules: Mapping[str, nn.Module],
    parameters: Mapping[str, nn.Parameter],
    tied: Collection[str] | None = None,
    replicated: Collection[nn.Module] | None = None,
) -> ModelFacts:
    """Return the facts that the model alone decides."""
    if tied is None:  # before the split: whatever has two names may be used on two stages
        uses = Counter(map(id, parameters.values()))
        tied = [name for name, p in parameters.items() if uses[id(p)] > 1]
    named = [pair for name, whole in modules.items() for pair in whole.named_modules(prefix=name)]
    tables = [(n, each) for n, each in named if isinstance(each, nn.Embedding | nn.EmbeddingBag)]
    renormed = [name for name, each in tables if each.max_norm is not None]
    often = named
    if replicated is not None:
        trained = {id(e) for e in replicated if any(p.requires_grad for p in e.parameters())}
        often = [(name, each) for name, each in tables if id(each) in trained]
    hooks = {n: gradient_hooks(p) for n, p in parameters.items() if p.requires_grad}
    return ModelFacts(
        tied=_first(tied),
        hooked=_first(name for name, (each, of_sum) in hooks.items() if each or of_sum),
        tied_hooked=_first(name for name in tied if any(hooks.get(name, ()))),
        sum_hooked=_first(name for name, (_, of_sum) in hooks.items() if of_sum),
        half=_first(name for name, p in parameters.items() if p.dtype is torch.float16),
        sparse=_first(name for name, each in often if getattr(each, "sparse", False) is True),
        renormed=_first(renormed),
        renormed_replicated=_first(name for name, _ in often if name in renormed),
    )


def _first(names: Iterable[str]) -> str:
    """Return the first of some names; empty if there is none."""
    return next(iter(names), "")


_OF_SCHEDULES: dict[str, dict[str, Any]] = {
    "replicas": {"replicas": (2, 1, 1, 1)},
    "slack": {"slack": 1},
    "synchronous_updates": {"synchronous": 2},
    "stages_per_worker": {"stages_per_worker": 2},
}
"""Options of a `Layout` that only some schedules have, and arguments of `plan_for` to try them."""


def as_markdown() -> str:
    """Return the page of the docs: the table, and which schedule has which options."""
    rows = [
        (row.feature, row.other, row.why.format(**_placeholders(row.why)), row.instead)
        for row in CONFLICTS
    ]
    schedules = [
        (f"`{name}`", *("yes" if _takes(name, each) else "-" for each in _OF_SCHEDULES.values()))
        for name in RECIPES
    ]
    named = [f"`{name}`" for name in _OF_SCHEDULES]
    return "\n".join(
        (
            "# What does not go together",
            "",
            "<!-- Made by `python -m pipedream_rt.job.conflicts`. -->",
            "",
            "Each row is refused before anything starts, with the reason and the way out.",
            "",
            *_table(("feature", "with", "why not", "instead"), rows),
            "",
            "## Options of schedules",
            "",
            "A schedule of your own has slack if it says so (`takes_slack`), several stages on a",
            "worker, and none of the others.",
            "",
            *_table(("schedule", *named), schedules),
            "",
        )
    )


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a table in Markdown."""
    first, *rest = (f"| {' | '.join(row)} |" for row in (head, *rows))
    return [first, "|---" * len(head) + "|", *rest]


def _takes(schedule: str, options: dict[str, Any]) -> bool:
    """Whether a schedule takes these arguments of `plan_for`."""
    try:
        plan_for(schedule, num_stages=4, per_update=8, **options)
    except ConfigError:
        return False
    return True


def _placeholders(text: str) -> dict[str, str]:
    """Return what the docs put for the names in braces in a text."""
    words = {"schedule": "this schedule", "correction": "the correction"}
    return {name: words.get(name, "a layer or parameter") for name in _fields_of(text)}


def _fields_of(text: str) -> list[str]:
    """Return the names in braces in a text."""
    return [name for _, name, _, _ in Formatter().parse(text) if name]


if __name__ == "__main__":
    print(as_markdown(), end="")
