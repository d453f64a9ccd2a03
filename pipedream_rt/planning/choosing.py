"""The stages that ``stages="auto"`` stands for, chosen before there is a job."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from pipedream_rt.cluster.generations import leave_to_rank_0, numbers_of_workers
from pipedream_rt.coordinator.script_environment import resolved
from pipedream_rt.errors import ConfigError
from pipedream_rt.job.defaults import of_loss_by, with_schedule
from pipedream_rt.job.given_optimizer import grouped_names
from pipedream_rt.job.options import Layout, Options
from pipedream_rt.job.reading import Request, requested, split_of
from pipedream_rt.job.requirements import refuse_unknown
from pipedream_rt.job.unsplit_model import UnsplitModel
from pipedream_rt.messages.head import OfLoss
from pipedream_rt.planning.auto_split import choose_stages


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The options of `Pipeline` that `choose` has chosen, with the others that it was given.

    Attributes:
        stages: The first layer of every stage but the first, by name.
        schedule: The schedule that the stages were chosen for; None if one stage was chosen: then
            `Pipeline` chooses.
        micro_batches: The number of micro-batches, likewise.
        layout: The layout that was given, with slack and replicas.
        why: The plan as a table, for people.
    """

    stages: list[str]
    schedule: Any
    micro_batches: int | None
    layout: Layout
    why: str

    @property
    def options(self) -> dict[str, Any]:
        """The options to give to `Pipeline` beside those that `choose` was given."""
        chosen = ("stages", "schedule", "micro_batches", "layout")
        return {name: getattr(self, name) for name in chosen}


def choose(model: nn.Module | Iterable[nn.Module], **options: Any) -> Choice:
    """Choose stages and slack for the workers of this machine, as ``stages="auto"`` does.

    It measures the layers on the example, in this process, and plans; no worker is started. With
    ``checkpoint`` the choice is kept in its folder, and read from there. Under torchrun, on one
    machine, the other ranks become workers here and do not return::

        choice = choose(model, example=loader, **options)
        print(choice.why)
        pipe = Pipeline(model, example=loader, **{**options, **choice.options})

    Args:
        model: As for `Pipeline`.
        **options: Options of `Pipeline`, with ``example`` and without ``stages``.

    Raises:
        ConfigError: The options cannot work, or it is not known how many workers there are.
    """
    refuse_unknown("Pipeline", options)
    if options.get("stages", "auto") != "auto":
        raise ConfigError("choose() chooses the stages; leave stages= to Pipeline")
    chosen_for = Options(**{**options, "stages": "auto"})
    unsplit = UnsplitModel(model, chosen_for.loss_fn, opens=chosen_for.example is not None)
    found, why = with_stages_chosen(unsplit, resolved(chosen_for))
    assert isinstance(found.stages, list)
    return Choice(
        stages=found.stages,
        schedule=found.schedule,
        micro_batches=found.micro_batches,
        layout=found.layout,
        why=why,
    )


def with_stages_chosen(model: UnsplitModel, options: Options) -> tuple[Options, str]:
    """Choose the stages by measuring the layers; say also why."""
    # What the job would refuse in any case is refused before anything is measured.
    request = requested(model, options)
    # Under torchrun, processes of other ranks become workers here and do not return.
    leave_to_rank_0(options.workers, options.layout.threads)
    numbers = numbers_of_workers(options.workers)
    parts = grouped_names(options.optimizer, model.names, model.parameters)
    kind, groups = (None, []) if parts is None else (parts.optimizer_class, parts.options)
    # One that is of the whole mini-batch, or may be, unless the model computes it itself.
    whole = options.loss_fn is None or of_loss_by(options, kind) is not OfLoss.PARTS
    of_all = kind is not None and whole and not _owns_loss(request)
    most, modules = max(numbers, default=1), model.modules.values()
    scheduled = with_schedule(options, kind, most, modules, of_all, groups)
    chosen = choose_stages(model, scheduled, numbers)
    slack = options.layout.slack or chosen.slack
    layout = replace(options.layout, slack=slack, replicas=chosen.replicas)
    if chosen.stages:  # more than one, for the schedule that they were measured for
        options = scheduled
    return replace(options, stages=chosen.stages, layout=layout), chosen.why


def _owns_loss(request: Request) -> bool:
    """Whether a model computes the loss itself, from what the example gives it."""
    whole = request._replace(options=replace(request.options, stages=1))
    return split_of(whole).forwards.own_loss
