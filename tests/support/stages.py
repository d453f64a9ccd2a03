"""Stages by themselves, made of a job, for tests without a process or a thread."""

import dataclasses

import cloudpickle
from torch import nn

from pipedream_rt.job.job import prepare
from pipedream_rt.job.options import Options
from pipedream_rt.job.unsplit_model import UnsplitModel
from pipedream_rt.messages.tree import Value, flatten, unflatten
from pipedream_rt.schedules import plan_for
from pipedream_rt.stage.optimizer import GroupSpec, OptimizerSpec
from pipedream_rt.stage.spec import StageSpec
from pipedream_rt.stage.stage import Stage

from .models import OPTIMIZERS
from .pinned import grouped

ONE = plan_for("1f1b", num_stages=1)
TWO = plan_for("1f1b", num_stages=2)
ASYNC = plan_for("async-1f1b", num_stages=3)


def value(x, wanted=False):
    """A value as the coordinator sends it; wanted: as a producer does, who wants gradients."""
    structure, tensors = flatten(x)
    return Value(structure, tuple(tensors), (wanted,) * len(tensors))


def content(made):
    """What a value holds, or the only value that a stage has made."""
    if isinstance(made, list):
        (made,) = made
    return unflatten(made.structure, made.tensors)


def with_layers(plan, stage, module):
    """The plan of a stage that is made by hand, which is told what its layers are called."""
    layers = [()] * plan.num_stages
    layers[stage] = tuple(module._modules)
    return dataclasses.replace(plan, layers=tuple(layers))


def specs_of(model, **options):
    """The specifications of a job, as workers unpickle them."""
    options = {"micro_batches": 1, "corrections": (), "workers": "serial", **options}
    job = prepare(UnsplitModel(model, options.get("loss_fn")), Options(**grouped(options)))
    return [
        cloudpickle.loads(data.numpy().tobytes(), buffers=[b.numpy() for b in buffers])
        for data, *buffers in job.specs
    ]


def pickled(cls, kwargs, names):
    """An optimizer of some parameters, as a stage is sent it."""
    groups = (GroupSpec(names=tuple(names)),)
    return cloudpickle.dumps(OptimizerSpec(optimizer_class=cls, kwargs=kwargs, groups=groups))


def stages_of(model, **options):
    """The stages of a job, with their optimizers."""
    stages = [Stage(spec) for spec in specs_of(model, **options)]
    cls, kwargs = options["optimizer"]
    data = pickled(cls, kwargs, (n for n, p in model.named_parameters() if p.requires_grad))
    for stage in stages:
        stage.set_optimizer(data)
    return stages


def a_spec(layers, plan=ONE, index=0, *, first=0, **options):
    """What a stage is made of: layers by name, or named by their place in the unsplit model."""
    named = layers if isinstance(layers, dict) else {str(n): x for n, x in enumerate(layers, first)}
    module = nn.Sequential()
    for name, layer in named.items():
        module.add_module(name, layer)
    options = {"loss_fn": None, "seed": 0, "on_nan": "raise", **options}
    plan = with_layers(plan, index, module)
    return StageSpec(stage=index, layers=module, plan=plan, **options)


def a_stage(layers, plan=ONE, index=0, *, optimizer="sgd", **options):
    """A stage by hand, with an optimizer by name, by its class and options, or with none."""
    stage = Stage(a_spec(layers, plan, index, **options))
    if optimizer is not None:
        cls, kwargs = OPTIMIZERS[optimizer] if isinstance(optimizer, str) else optimizer
        names = (name for name, _ in stage.module.named_parameters())
        stage.set_optimizer(pickled(cls, kwargs, names))
    return stage


def back(stage, micro_batch, gradients=(), halves=False):
    """A whole backward, or both its halves, to the end of the flight."""
    if halves:
        found = stage.backward_input(micro_batch, gradients)
        stage.backward_weight(micro_batch)
    else:
        found = stage.backward(micro_batch, gradients)
    assert not stage.end(micro_batch)
    return found


def back_weight(stage, micro_batch):
    stage.backward_weight(micro_batch)
    assert not stage.end(micro_batch)
