"""Corrections of stale gradients and of the updates made of them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from pipedream_rt.errors import ConfigError
from pipedream_rt.stage.correction import Correction, Moment, Named, require_number


@dataclass(eq=False)
class DelayCompensation(Correction):
    """A stale gradient, corrected by an estimate of how it has changed with the weights.

    The gradient g becomes ``g + strength * g * g * (w_now - w_then)``, element by element. It was
    computed on the weights w_then and will be applied to w_now; ``g * g`` stands for the diagonal
    of the Hessian. With k micro-batches per update, g is a k-th of the gradient of its micro-batch,
    so the term is multiplied by k.

    If it is adaptive, the strength of an element is ``strength / sqrt(s + 1e-7)`` with the moving
    average ``s = decay * s + (1 - decay) * g * g``.

    Source: Zheng et al., Asynchronous Stochastic Gradient Descent with Delay Compensation (DC-ASGD,
    ICML 2017), equations 10 and 14.

    Attributes:
        strength: The factor lambda.
        adaptive: Whether the strength adapts to each element (DC-ASGD-a).
        decay: The decay m of the moving average.

    Raises:
        ConfigError: A number is out of range.
    """

    strength: float = 0.04
    adaptive: bool = False
    decay: float = 0.95

    def __post_init__(self) -> None:
        require_number("strength", self.strength, 0.0)
        require_number("decay", self.decay, 0.0, below=1.0)
        self.copies = 1.0 if self.adaptive else 0.0
        self.passes = 30.0 if self.adaptive else 11.0

    def after_backward(self, at: Moment, gradients: Named, read: Named, newest: Named) -> None:
        """See `Correction.after_backward`."""
        for name, gradient in gradients.items():
            if self.adaptive and gradient.layout is not torch.strided:
                raise ConfigError(
                    f"DelayCompensation(adaptive=True) needs dense gradients, and that of {name!r} "
                    "is sparse; use sparse=False, or do not let it adapt"
                )
            squared = gradient * gradient
            guess = squared * (newest[name] - read[name])
            if self.adaptive:
                state = self.state.setdefault(name, {})
                if "square" in state:
                    state["square"].mul_(self.decay).add_(squared, alpha=1 - self.decay)
                else:
                    state["square"] = squared * (1 - self.decay)
                guess = guess / (state["square"] + 1e-7).sqrt()
            # g * g is a k²-th of its value for the micro-batch, and g must stay a k-th: so times k.
            gradient.add_(guess, alpha=self.strength * at.micro_batches)


@dataclass(eq=False)
class ErrorFeedback(Correction):
    """An update that also takes back the error of the stale update before it.

    u(t) is all that the optimizer adds to the weights in a step, with the learning rate and the
    weight decay in it. The weights become ``w + u(t) + c (u(t) - u(t-1))``, where
    ``c = min(staleness, limit)``. With a staleness of 1 that is the paper's
    ``w(t+1) = w(t) + 2 u(g(t-1)) - u(g(t-2))``; with a larger one it is a damped form of it. The
    first update is left as it is.

    Source: One-step delay is not a barrier (arXiv 2606.30634, ICML 2026), error feedback.

    Attributes:
        limit: The largest c.

    Raises:
        ConfigError: It is negative.
    """

    limit: float = 1.0
    copies = 1.0
    passes = 8.0

    def __post_init__(self) -> None:
        if self.limit != math.inf:
            require_number("limit", self.limit, 0.0)

    def after_step(self, at: Moment, weights: Named, before: Named) -> None:
        """See `Correction.after_step`."""
        factor = min(at.staleness, self.limit)
        for name, weight in weights.items():
            state = self.state.setdefault(name, {})
            update, last = weight - before[name], state.get("update")
            if factor and last is not None:  # out=last, since its old value is not needed again
                weight.add_(torch.sub(update, last, out=last), alpha=factor)
            state["update"] = update
