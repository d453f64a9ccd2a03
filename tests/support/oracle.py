"""The oracle: the table of docs/concepts/schedules.md computed in one loop, on one thread.

It imports nothing of the project, on purpose.
"""

import copy
import hashlib

import torch
from torch.func import functional_call


def layer_seed(seed, micro_batch, layer):
    text = f"{seed}/{micro_batch}/{layer}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big")


READS = {
    "async-1f1b": lambda m, s, w, k: max(0, (m - w[s]) // k),
    "vertical-sync": lambda m, s, w, k: max(0, (m - w[0]) // k),
    "2bw": lambda m, s, w, k: max(0, m // k - 1),
    "flushed": lambda m, s, w, k: m // k,
}
"""The weight version that micro-batch m reads at stage s, by schedule; w[s] is the warm-up of s."""


def warm_ups(n, slack=()):
    """Return w(s) = (n-1-s) + the slack of the hops from stage s on, for every stage."""
    return [n - 1 - s + sum(slack[s:]) for s in range(n)]


def oracle(
    model,
    points,
    data,
    loss_fn,
    make_optimizer,
    *,
    k=1,
    reads="async-1f1b",
    seed=0,
    rates=None,
    slack=(),
):
    """Train a copy of the model as n stages would; return its state dict and the losses.

    points: the first layer of each stage. k: micro-batches per update. reads: a key of READS.
    rates: the learning rate of each mini-batch. slack: extra warm-up forwards, by hop.
    """
    model, w = copy.deepcopy(model), warm_ups(len(points), slack)
    optimizer = make_optimizer(model.parameters())
    versions = [{name: p.detach().clone() for name, p in model.named_parameters()}]
    losses = []
    for t, (x, y) in enumerate(data):
        for group in optimizer.param_groups:
            group["lr"] = rates[t] if rates else group["lr"]
        optimizer.zero_grad()
        for i, (xm, ym) in enumerate(zip(x.chunk(k), y.chunk(k))):
            m, value, leaves = t * k + i, xm, {}
            for number, (layer_name, layer) in enumerate(model.named_children()):
                s = sum(number >= point for point in points) - 1
                version = READS[reads](m, s, w, k)
                weights = {
                    name: versions[version][f"{layer_name}.{name}"].clone().requires_grad_()
                    for name, _ in layer.named_parameters()
                }
                torch.manual_seed(layer_seed(seed, m, layer_name))
                value = functional_call(layer, weights, value)
                leaves.update({f"{layer_name}.{name}": w for name, w in weights.items()})
            loss = loss_fn(value, ym)
            losses.append(loss.item())
            add_gradients(model, loss * (len(xm) / len(x)), leaves)
        optimizer.step()
        versions.append({name: p.detach().clone() for name, p in model.named_parameters()})
    return model.state_dict(), losses


def add_gradients(model, loss, leaves):
    """Add the gradients of a loss, by leaf, to those of the parameters with the leaves' names."""
    gradients = torch.autograd.grad(loss, list(leaves.values()))
    for name, gradient in zip(leaves, gradients):
        parameter = model.get_parameter(name)
        summed = gradient if parameter.grad is None else parameter.grad + gradient
        parameter.grad = summed


def assert_same(found, expected):
    """Compare two state dicts bit for bit."""
    assert found.keys() == expected.keys()
    differing = [key for key in expected if not torch.equal(found[key], expected[key])]
    assert not differing, f"these differ in some bit: {differing}"
