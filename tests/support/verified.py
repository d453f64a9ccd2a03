"""Jobs without workers, for what compares them with plain PyTorch; and layers that are peculiar."""

import torch
from torch import nn
from torch.nn import functional as F

from pipedream_rt.batches.items import Batch
from pipedream_rt.batches.micro_batches import Cutter
from pipedream_rt.job.job import prepare
from pipedream_rt.job.options import Options
from pipedream_rt.job.unsplit_model import UnsplitModel
from pipedream_rt.verify.plain import PlainTraining, copies_of
from pipedream_rt.verify.twin import names_by_stage

SGD = (torch.optim.SGD, {"lr": 0.1})
BATCH = Batch((torch.arange(16.0).view(4, 4).sin(),), {}, torch.ones(4, 4))


def linear():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))


def job_of(model=None, loss_fn=F.mse_loss, **options):
    options = {
        "optimizer": SGD, "stages": 2, "workers": "serial", "schedule": "1f1b",
        "micro_batches": 2, **options,
    }  # fmt: skip
    return prepare(UnsplitModel(model or linear(), loss_fn), Options(loss_fn=loss_fn, **options))


def training_of(job, *budget):
    names = names_by_stage(job)
    return PlainTraining(job, copies_of(job, None), job.reading.optimizer, names, *budget)


def cut_for(job, batch=BATCH):
    return Cutter(job.reading.forwards, job.reading.weighing, job.plan.per_update).cut(batch, True)


class Noise(nn.Linear):
    """Draws in its backward, in eval mode too."""

    def forward(self, x):
        output = super().forward(x)
        output.register_hook(lambda gradient: gradient + torch.randn_like(gradient))
        return output


class NoisyForward(nn.Linear):
    def forward(self, x):
        return super().forward(x) + torch.rand(())


class LooksAround(nn.Linear):
    """Lets samples depend on each other."""

    def forward(self, x):
        return super().forward(F.dropout(x - x.mean(0), 0.1, self.training))


class Inject(torch.autograd.Function):
    """Gives a second value the gradient 1, whatever becomes of the first."""

    @staticmethod
    def forward(ctx, x, extra):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient, torch.ones(())


class Balanced(nn.Linear):
    """Asks for the gradient of another loss besides."""

    def forward(self, x):
        output = super().forward(x)
        return Inject.apply(output, self.weight.sum()) if self.training else output
