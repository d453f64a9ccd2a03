"""A call of the model in the autograd graph of the script: where it enters the stages and leaves.

A backward must reach the outputs of all calls before it asks for the gradient of an input, since
the stages do the backwards of an update in the order of the calls. Of the nodes that are ready,
autograd's engine takes the one that was made last in its thread. The nodes of the entrances are
therefore made in threads of their own, whose counts begin at 0: they come after all others.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn, Protocol

import torch
from torch import Tensor

from pipedream_rt.batches.micro_batches import MicroBatch
from pipedream_rt.errors import ConfigError
from pipedream_rt.messages.message import Key, Message
from pipedream_rt.messages.tree import flatten, unflatten
from pipedream_rt.models.program import found
from pipedream_rt.stage.joining import Part, dense_of, summed


class Stages(Protocol):
    """The part of `ScriptLoss` that a call uses in a backward."""

    def input_gradients(self, call: Call) -> list[Tensor | None]:
        """Return the gradients of those inputs that ask for one."""


class Fed(NamedTuple):
    """A micro-batch that was fed.

    Attributes:
        key: The key under which its output comes.
    """

    number: int
    position: int
    samples: int
    key: Key


class Call:
    """A forward that the script has called: one or more micro-batches of the update that it is in.

    Attributes:
        parts: Its micro-batches, and ``fed`` how they were fed.
        messages: The messages in which its output came.
        asked: The inputs that require a gradient.
        outputs: The outputs in these, by micro-batch.
        asks: Which tensors of the joined output ask for a gradient.
        gradients: The sums of the gradients that came so far, by tensor that asks for one. They
            are of the weights too: where only the gradient of an input was asked for, as by
            ``autograd.grad``, they are in ``of_inputs``.
        of_inputs: Those of the last backward.
        trains: Whether a backward was for the weights.
        is_given: Whether these went to the stages.
        is_reached: Whether a backward has reached its inputs.
        is_answered: Whether the gradients of its inputs came, in ``found``: places of inputs, and
            the message of the stage that takes them.
    """

    def __init__(
        self,
        stages: Stages,
        parts: Sequence[MicroBatch],
        fed: Sequence[Fed],
        asked: Sequence[Tensor],
    ) -> None:
        self.stages, self.parts, self.fed, self.asked = stages, parts, fed, asked
        self.messages: list[Message] = []
        self.outputs: list[Part] = []
        self.asks: list[bool] = []
        self.gradients: list[Tensor | None] = []
        self.of_inputs: list[Tensor | None] = []
        self.trains = False
        self.is_given = self.is_reached = self.is_answered = False
        self.found: list[tuple[list[int], Message]] = []

    def end(self) -> None:
        """Forget all values: its update has ended."""
        self.is_given, self.parts, self.messages, self.outputs = True, (), [], []
        self.gradients, self.of_inputs, self.found = [], [], []

    def came_back(self, gradients: Sequence[Tensor | None]) -> None:
        """Take the gradients of one backward."""
        if torch.is_grad_enabled():
            raise ConfigError(
                "create_graph=True asks for a second derivative through the stages, which keep no "
                "graph of their backward; a penalty on gradients can be computed where that part "
                "of the model is in the script"
            )
        if self.is_given and any(gradient is not None for gradient in gradients):
            raise ConfigError(
                "a backward reaches the output of a forward whose gradient has gone to the stages: "
                "by step(), or since that of an input was asked for, of it or a later one. Add the "
                "losses up and call backward once, before step(); a forward of the output of "
                "another one belongs into another update, or another pipeline"
            )
        self.of_inputs = [None if each is None else dense_of(each) for each in gradients]

    def train(self, _: Tensor) -> None:
        """Add the gradients of this backward to those of the weights."""
        pairs = zip(self.gradients, self.of_inputs, strict=True)
        self.trains, self.gradients = True, [summed(old, new) for old, new in pairs]


class _Entrance(torch.autograd.Function):
    """Where inputs enter the stages; its backward waits for their gradients."""

    @staticmethod
    def forward(ctx: Any, call: Call, *inputs: Tensor) -> Tensor:
        ctx.call, ctx.devices = call, [each.device for each in inputs]
        return torch.empty(0, device="cpu")

    @staticmethod
    def backward(ctx: Any, *_: Any) -> tuple[Tensor | None, ...]:
        found = ctx.call.stages.input_gradients(ctx.call)
        return None, *(
            gradient if gradient is None else gradient.to(device)
            for gradient, device in zip(found, ctx.devices, strict=True)
        )


class _Exit(torch.autograd.Function):
    """Where outputs leave the stages; its backward collects their gradients."""

    @staticmethod
    def forward(
        ctx: Any, call: Call, entrance: Tensor | None, weights: Tensor, outputs: list[Tensor]
    ) -> Any:
        ctx.call = call
        # Else autograd makes zeros where no gradient comes.
        ctx.set_materialize_grads(False)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        ctx.call.came_back(gradients)
        nothing = torch.empty(0, device="cpu")
        return None, nothing if ctx.needs_input_grad[1] else None, nothing, None


def _entered(call: Call) -> Tensor | None:
    """Return a tensor behind the inputs of a call that require a gradient; None if none does."""
    if not call.asked:
        return None
    made: list[Tensor] = []
    thread = threading.Thread(
        target=lambda: made.append(_Entrance.apply(call, *call.asked)),  # type: ignore[no-untyped-call]
        name="entrance",
    )
    thread.start()
    thread.join()
    return made[0]


def in_graph(call: Call, tensors: Sequence[Tensor], asks: list[bool]) -> list[Tensor]:
    """Return the outputs of a call, those that ask for a gradient in the graph."""
    mine = [tensor for tensor, wanted in zip(tensors, asks, strict=True) if wanted]
    call.asks, call.gradients = asks, [None] * len(mine)
    if not mine:
        return list(tensors)
    # It stands for the weights: a backward comes to it, and one for an input alone does not. Leaves
    # come before all other nodes that are ready, so it is known when the entrance is reached.
    weights = torch.empty(0, requires_grad=True, device="cpu")
    weights.register_post_accumulate_grad_hook(call.train)
    inside = iter(_Exit.apply(call, _entered(call), weights, mine))  # type: ignore[no-untyped-call]
    return [next(inside) if wanted else t for t, wanted in zip(tensors, asks, strict=True)]


class _NoWay(torch.autograd.Function):
    """Between the inputs and the outputs of an inference; a backward gets no further."""

    @staticmethod
    def forward(ctx: Any, outputs: list[Tensor], *inputs: Tensor) -> Any:
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> NoReturn:
        raise ConfigError(
            "pipe(x, training=True) computes no gradient of x, so no backward can go through it: "
            "make the pipeline without loss_fn, and call forward(x), loss.backward() and step()"
        )


def refusing_backward(output: Any, inputs: Any) -> Any:
    """Return the output of an inference, whose backward is refused by name if an input asks."""
    asking = [tensor for tensor in found(inputs, Tensor) if tensor.requires_grad]
    if not (asking and torch.is_grad_enabled()):
        return output
    structure, tensors = flatten(output)
    floats = [tensor for tensor in tensors if tensor.is_floating_point()]
    inside = iter(_NoWay.apply(floats, *asking))  # type: ignore[no-untyped-call]
    return unflatten(structure, [next(inside) if t.is_floating_point() else t for t in tensors])
