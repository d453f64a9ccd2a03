"""The oracle: the table of docs/concepts/schedules.md computed in one loop, on one thread.

It imports nothing of the project, on purpose.
"""

import copy
import hashlib

import torch
from torch.func import functional_call

from .device.references import computed_on_the_device


def layer_seed(seed, micro_batch, layer):
    text = f"{seed}/{micro_batch}/{layer}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big")


READS = {
    "async-1f1b": lambda m, s, w, k: max(0, (m - w[s]) // k),
    "vertical-sync": lambda m, s, w, k: max(0, (m - max(w)) // k),
    "2bw": lambda m, s, w, k: max(0, m // k - 1),
    "flushed": lambda m, s, w, k: m // k,
}
"""The weight version that micro-batch m reads at stage s, by schedule; w[s] is the lag of s."""


def lags(n, slack=(), replicas=()):
    """Return, for every stage, the micro-batches from a forward back to the update that it reads.

    Without replicas that is the warm-up, (n-1-s) + the slack of the hops from stage s on. With r
    replicas it is r (ceil(after / r) + 1), after being the workers behind the stage and that slack.
    """
    r = replicas or (1,) * n
    after = [sum(r[s + 1 :]) + sum(slack[s:]) for s in range(n)]
    return [a if count == 1 else count * (-(-a // count) + 1) for a, count in zip(after, r)]


@computed_on_the_device
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
    replicas=(),
    before_step=lambda model: None,
    cross=lambda edge, value: value,
):
    """Train a copy of the model as n stages would; return its state dict and the losses.

    points: the first layer of each stage. k: micro-batches per update. reads: a key of READS.
    rates: the learning rate of each mini-batch. slack: extra warm-up forwards, by hop. replicas: by
    stage. Each replica has buffers of its own, and those of replica 0 are returned. before_step:
    called with the model, whose parameters have their gradients. cross: returns what arrives of a
    value on an edge between two stages, each of which is given as its number and its replica.
    """
    model, w = copy.deepcopy(model), lags(len(points), slack, replicas)
    counts = replicas or (1,) * len(points)
    buffers = [{name: b.clone() for name, b in model.named_buffers()} for _ in range(max(counts))]
    optimizer = make_optimizer(model.parameters())
    versions = [{name: p.detach().clone() for name, p in model.named_parameters()}]
    losses = []
    for t, (x, y) in enumerate(data):
        for group in optimizer.param_groups:
            group["lr"] = rates[t] if rates else group["lr"]
        optimizer.zero_grad()
        sums = {}
        for i, (xm, ym) in enumerate(zip(x.chunk(k), y.chunk(k))):
            m, value, leaves = t * k + i, xm, {}
            for number, (layer_name, layer) in enumerate(model.named_children()):
                s = sum(number >= point for point in points) - 1
                if number and number in points:
                    ends = (s - 1, m % counts[s - 1]), (s, m % counts[s])
                    value = cross(ends, value)
                version = READS[reads](m, s, w, k)
                weights = {
                    name: versions[version][f"{layer_name}.{name}"].clone().requires_grad_()
                    for name, _ in layer.named_parameters()
                }
                of_replica = {
                    name: buffers[m % counts[s]][f"{layer_name}.{name}"]
                    for name, _ in layer.named_buffers()
                }
                torch.manual_seed(layer_seed(seed, m, layer_name))
                value = functional_call(layer, {**weights, **of_replica}, value)
                leaves.update({f"{layer_name}.{name}": (s, w) for name, w in weights.items()})
            loss = loss_fn(value, ym)
            losses.append(loss.item())
            add_to_sums(sums, loss * (len(xm) / len(x)), leaves, m, counts)
        for (_, name), gradient in sorted(sums.items(), key=lambda entry: entry[0][0]):
            parameter = model.get_parameter(name)
            before = parameter.grad
            parameter.grad = gradient if before is None else before + gradient
        before_step(model)
        optimizer.step()
        versions.append({name: p.detach().clone() for name, p in model.named_parameters()})
    return {**model.state_dict(), **buffers[0]}, losses


def add_gradients(model, loss, leaves):
    """Add the gradients of a loss, by leaf, to those of the parameters with the leaves' names."""
    gradients = torch.autograd.grad(loss, list(leaves.values()))
    for name, gradient in zip(leaves, gradients):
        parameter = model.get_parameter(name)
        summed = gradient if parameter.grad is None else parameter.grad + gradient
        parameter.grad = summed


def add_to_sums(sums, loss, leaves, m, counts):
    """Add the gradients of micro-batch m to the sums, by replica and name of the parameter."""
    gradients = torch.autograd.grad(loss, [leaf for _, leaf in leaves.values()])
    for (name, (s, _)), gradient in zip(leaves.items(), gradients):
        key = m % counts[s], name
        sums[key] = gradient if key not in sums else sums[key] + gradient


def assert_same(found, expected):
    """Compare two state dicts bit for bit."""
    assert found.keys() == expected.keys()
    differing = [key for key in expected if not torch.equal(found[key], expected[key])]
    assert not differing, f"these differ in some bit: {differing}"
