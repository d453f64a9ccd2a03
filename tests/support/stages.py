"""Stages by themselves, made of a job, for tests without a process or a thread."""

import dataclasses

import cloudpickle

from pipedream_rt.job.job import prepare
from pipedream_rt.job.options import Options
from pipedream_rt.job.unsplit_model import UnsplitModel
from pipedream_rt.stage.optimizer import GroupSpec, OptimizerSpec
from pipedream_rt.stage.stage import Stage

from .pinned import grouped


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


def stages_of(model, **options):
    """The stages of a job, with their optimizers."""
    stages = [Stage(spec) for spec in specs_of(model, **options)]
    cls, kwargs = options["optimizer"]
    names = tuple(name for name, p in model.named_parameters() if p.requires_grad)
    groups = (GroupSpec(names=names),)
    spec = OptimizerSpec(optimizer_class=cls, kwargs=kwargs, groups=groups)
    data = cloudpickle.dumps(spec)
    for stage in stages:
        stage.set_optimizer(data)
    return stages
