"""A plan that is no chain: a diamond of four stages, with an order of its own, and its oracle.

::

             ┌──► stage 1 ──┐
    stage 0 ─┤              ├─► stage 3
             └──► stage 2 ──┘
"""

import copy

import torch
from torch import nn
from torch.func import functional_call

from support.device.references import computed_on_the_device
from support.oracle import add_gradients, layer_seed

LINKS = ((0, 1), (0, 2), (1, 3), (2, 3))
WARM_UP = (2, 1, 1, 0)
"""The warm-up w(s) of each stage: the number of hops from it to the stage with the loss."""


class Join(nn.Module):
    """A layer that takes a pair, as the input of a stage with two producers is."""

    def __init__(self, width):
        super().__init__()
        self.left, self.right = nn.Linear(width, width), nn.Linear(width, width, bias=False)

    def forward(self, pair):
        left, right = pair
        return self.left(left).tanh() + self.right(right)


def model(width=8):
    torch.manual_seed(2)
    return nn.Sequential(
        nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width)),
        nn.Sequential(nn.Linear(width, width), nn.Dropout(0.3), nn.ReLU()),
        nn.Sequential(nn.Linear(width, width), nn.Sigmoid()),
        Join(width),
    )


class Order:
    """Asynchronous 1F1B with the warm-ups of the diamond."""

    def order(self, worker, shape, start):
        from pipedream_rt.schedules.orders import one_forward_one_backward

        return one_forward_one_backward(WARM_UP[worker], shape.per_update, start)

    def in_flight(self, stage, shape):
        return WARM_UP[stage] + 1

    def require(self, shape):
        pass


class Versions:
    """Weight stashing: a forward reads the newest version that its stage's own order has made."""

    def reads(self, stage, shape, micro_batch):
        return max(0, (micro_batch - WARM_UP[stage]) // shape.per_update)

    def kept(self, stage, shape):
        return -(-WARM_UP[stage] // shape.per_update) + 1

    def require(self, shape):
        pass


def plan(per_update=1):
    from pipedream_rt.schedules import Plan, Recipe, Shape

    recipe = Recipe(order=Order(), versions=Versions(), flushes=False, summary="a diamond")
    return Plan(
        name="diamond",
        shape=Shape(workers=4, per_update=per_update),
        recipe=recipe,
        layers=(("0",), ("1",), ("2",), ("3",)),
        links=LINKS,
    )


@computed_on_the_device
def oracle(model, data, loss_fn, make_optimizer, *, k=1, seed=0):
    """Train a copy of the model as the diamond would; return its state dict and the losses.

    It is to the diamond what `support.oracle` is to a chain: one thread and one loop.
    """
    model = copy.deepcopy(model)
    optimizer = make_optimizer(model.parameters())
    versions = [{name: p.detach().clone() for name, p in model.named_parameters()}]
    losses = []
    for t, (x, y) in enumerate(data):
        optimizer.zero_grad()
        for i, (xm, ym) in enumerate(zip(x.chunk(k), y.chunk(k))):
            m, values, leaves = t * k + i, {}, {}
            for s, inputs in enumerate(((), (0,), (0,), (1, 2))):
                version = max(0, (m - WARM_UP[s]) // k)
                weights = {
                    name: versions[version][f"{s}.{name}"].clone().requires_grad_()
                    for name, _ in model[s].named_parameters()
                }
                torch.manual_seed(layer_seed(seed, m, str(s)))
                taken = [values[j] for j in inputs] or [xm]
                taken = taken[0] if len(taken) == 1 else tuple(taken)
                values[s] = functional_call(model[s], weights, (taken,))
                leaves.update({f"{s}.{name}": w for name, w in weights.items()})
            loss = loss_fn(values[3], ym)
            losses.append(loss.item())
            add_gradients(model, loss * (len(xm) / len(x)), leaves)
        optimizer.step()
        versions.append({name: p.detach().clone() for name, p in model.named_parameters()})
    return model.state_dict(), losses
