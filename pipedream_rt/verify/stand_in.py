"""The stand-in for a loss in the script, where a copy of the model trains beside it.

The loss itself is plain PyTorch in the script, so there is nothing to compare it with. Its
gradients are known for a mini-batch that the script has answered (`GivenGradients`). For others
there is a loss of its own (`MeanOfOutputs`): a backward is right for any gradient, or for none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from pipedream_rt.job.job import Job
from pipedream_rt.messages.tree import flatten
from pipedream_rt.verify.compare import sampled

NOTE = (
    "the script computes the loss, in plain PyTorch, which needs no comparison; the gradients are "
    "those of a mean of the outputs in its place"
)


class MeanOfOutputs:
    """A loss of any output: the mean of its numbers, each weighed by its place in the sample."""

    def __call__(self, output: Any, target: Any) -> Tensor:
        """Return the loss; there is no target."""
        terms = [(t * _weights_like(t)).mean() for t in flatten(output)[1] if t.is_floating_point()]
        return torch.stack([term.double() for term in terms]).sum()


def _weights_like(tensor: Tensor) -> Tensor:
    """Return fixed numbers for the places of a sample, as a tensor that broadcasts over samples."""
    of_sample = tensor.shape[1:]
    numbers = torch.arange(1, of_sample.numel() + 1, device="cpu").cos()
    return numbers.view(of_sample).to(tensor)


class GivenGradients:
    """A loss whose gradients are those that a script has given: they are its target.

    Attributes:
        outputs: Those of the last call, `sampled`.
    """

    outputs: tuple[Tensor, ...] = ()

    def __call__(self, output: Any, target: Sequence[Tensor | None]) -> Tensor:
        """Return the sum of the products' sizes; its gradient is the target."""
        tensors = flatten(output)[1]
        self.outputs = tuple(map(sampled, tensors))
        products = [
            (tensor.double() * gradient.double())
            for tensor, gradient in zip(tensors, target, strict=True)
            if gradient is not None
        ]
        if not products:
            return torch.zeros((), requires_grad=True)
        total = torch.stack([each.sum() for each in products]).sum()
        # A sum in which nothing cancels out is rounded alike, however the samples are cut.
        sizes = torch.stack([each.detach().abs().sum() for each in products]).sum()
        return total + (sizes - total.detach())


def with_stand_in(job: Job) -> Job:
    """Return a job whose loss can be computed anywhere: itself unless the script computes it."""
    if not job.plan.loss_in_script:
        return job
    loss_fn = MeanOfOutputs()
    options = replace(job.options, loss_fn=loss_fn)
    return replace(
        job,
        reading=replace(job.reading, loss_fn=loss_fn),
        decisions=replace(job.decisions, options=options),
    )
