"""What a model says before anything is decided: the first two of the four steps of `prepare`.

A `Request` is what the user has given, read by itself. A `Reading` is what the model says of it:
where it can be cut, what passes between its layers, and which of its weights are stepped how.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from pipedream_rt.batches.forwards import Forwards
from pipedream_rt.batches.items import Items, ScriptCall
from pipedream_rt.batches.weighing import Weighing
from pipedream_rt.job.given_optimizer import OptimizerParts, grouped_names
from pipedream_rt.job.options import Options
from pipedream_rt.job.splitting import ForwardOptions, Split, items_of, split_model
from pipedream_rt.job.unsplit_model import UnsplitModel
from pipedream_rt.models.pretrained import Pretrained
from pipedream_rt.stage.spec import LossFunction, own_loss


class Request(NamedTuple):
    """What the user has given of a model to be read.

    Attributes:
        pretrained: Where workers read the weights; None if the model has them.
        items: What reads the items of loaders.
    """

    model: UnsplitModel
    options: Options
    weighing: Weighing
    pretrained: Pretrained | None
    items: Items


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What a model says of a request.

    Attributes:
        loss_fn: The loss function; None for a pipeline that only infers, or whose script computes
            the loss.
        optimizer: The optimizer that the script gave, taken apart; None without one.
    """

    model: UnsplitModel
    weighing: Weighing
    pretrained: Pretrained | None
    items: Items
    split: Split
    loss_fn: LossFunction | None
    optimizer: OptimizerParts | None

    @property
    def forwards(self) -> Forwards:
        """What passes between the stages."""
        return self.split.forwards

    @property
    def loss_in_script(self) -> bool:
        """Whether the script computes the loss that is trained on."""
        return self.optimizer is not None and self.loss_fn is None

    @property
    def optimizer_class(self) -> type | None:
        """The class of the optimizer; None without one."""
        return None if self.optimizer is None else self.optimizer.optimizer_class


def requested(model: UnsplitModel, options: Options) -> Request:
    """Check what was given of a model by itself, without a look at its layers."""
    weighing = Weighing(options.training.weigh, options.loss_fn)
    pretrained = model.pretrained(options.layout.weights)
    items = items_of(model, options.loss_fn, options.prepare)
    return Request(model, options, weighing, pretrained, items)


def split_of(request: Request) -> Split:
    """Split the model of a request, for which one that is no sequence is run once."""
    options, loss_fn = request.options, request.options.loss_fn
    may_own_loss = loss_fn is None and not isinstance(options.example, ScriptCall)
    trained = options.optimizer is not None or loss_fn is not None
    forward = ForwardOptions(trained, may_own_loss, options.training.autocast, loss_fn)
    return split_model(request.model, options.stages, options.example, forward, request.items)


def read_model(request: Request) -> Reading:
    """Read a model, and the groups of its parameters in the optimizer."""
    model, options = request.model, request.options
    split, loss_fn = split_of(request), options.loss_fn
    if split.forwards.own_loss and loss_fn is None:
        loss_fn = own_loss
    return Reading(
        model=model,
        weighing=request.weighing,
        pretrained=request.pretrained,
        items=request.items,
        split=split,
        loss_fn=loss_fn,
        optimizer=grouped_names(options.optimizer, model.names, model.parameters),
    )
