"""The oracle with corrections for staleness: their equations, computed in the loop of the oracle.

It imports nothing of the project, on purpose. Each stage has an optimizer of its own; version t of
a stage is a dictionary of its weights, and beside it lie the weights that a prediction makes of
it, for every distance.
"""

import copy

import torch
from torch.func import functional_call

from .device.references import computed_on_the_device
from .oracle import READS, lags, layer_seed


@computed_on_the_device
def corrected(
    model,
    points,
    data,
    loss_fn,
    make_optimizer,
    *,
    k=1,
    reads="async-1f1b",
    seed=0,
    names=(),
    tied=(),
):
    """Train a copy of the model as n stages would with corrections; return state dict and losses.

    names: the corrections, by their names in RULES.
    """
    model, n = copy.deepcopy(model), len(points)
    w = lags(n)
    layers = list(model.named_children())
    of_stage = [
        {
            f"{name}.{p}": parameter
            for number, (name, layer) in enumerate(layers)
            if sum(number >= point for point in points) - 1 == s
            for p, parameter in layer.named_parameters()
        }
        for s in range(n)
    ]
    optimizers = [make_optimizer(list(own.values())) if own else None for own in of_stage]
    rules = [[RULES[name]() for name in names] for _ in range(n)]
    versions = [[copies(own)] for own in of_stage]
    views = [{} for _ in range(n)]
    losses = []
    for t, (x, y) in enumerate(data):
        sums, reads_of = [{} for _ in range(n)], [0] * n
        for i, (xm, ym) in enumerate(zip(x.chunk(k), y.chunk(k))):
            m, read, leaves = t * k + i, [], []
            for s in range(n):
                v = READS[reads](m, s, w, k)
                read.append(v)
                reads_of[s] += v
                seen = views[s].get((v, t - v), versions[s][v])
                leaves.append({a: b.clone().requires_grad_() for a, b in seen.items()})
            value = xm
            for number, (name, layer) in enumerate(layers):
                s = sum(number >= point for point in points) - 1
                own = {
                    a.split(".", 1)[1]: b for a, b in leaves[s].items() if a.split(".")[0] == name
                }
                torch.manual_seed(layer_seed(seed, m, name))
                value = functional_call(layer, own, value)
            loss = loss_fn(value, ym)
            losses.append(loss.item())
            flat = [leaf for own in leaves for leaf in own.values()]
            gradients = iter(torch.autograd.grad(loss * (len(xm) / len(x)), flat))
            for s in range(n):
                found = {a: next(gradients) for a in leaves[s]}
                for rule in rules[s] if t > read[s] else ():
                    then = {a: b.detach() for a, b in leaves[s].items()}
                    found = rule.gradient(found, then, versions[s][t], t - read[s], k)
                for a, g in found.items():
                    sums[s][a] = g if a not in sums[s] else sums[s][a] + g
        for s in range(n):
            optimizer, own, tau = optimizers[s], of_stage[s], t - reads_of[s] / k
            if optimizer is None:
                versions[s].append({})
                continue
            for a, parameter in own.items():
                parameter.grad = sums[s][a]
            before, kept = copies(own), [dict(group) for group in optimizer.param_groups]
            for rule in rules[s]:
                rule.options(optimizer, tau, t, n)
            optimizer.step()
            with torch.no_grad():
                for rule in rules[s]:
                    rule.weights(own, before, tau)
                versions[s].append(copies(own))
                for d in range(1, n + 1):
                    seen = copies(own)
                    for rule in rules[s]:
                        seen = rule.view(seen, own, optimizer, d)
                    if any(not torch.equal(seen[a], own[a]) for a in own):
                        views[s][t + 1, d] = seen
            for group, options in zip(optimizer.param_groups, kept):
                group.update(options)
    return model.state_dict(), losses


def copies(named):
    return {name: tensor.detach().clone() for name, tensor in named.items()}


class Rule:
    """A correction that corrects nothing."""

    def gradient(self, found, then, now, tau, k):
        return found

    def options(self, optimizer, tau, t, n):
        pass

    def weights(self, own, before, tau):
        pass

    def view(self, seen, own, optimizer, d):
        return seen


class Rate(Rule):
    def options(self, optimizer, tau, t, n):
        if tau > 1 and t < 8:
            for group in optimizer.param_groups:
                group["lr"] = group["lr"] / tau ** (1.0 - t / 8)


class Damping(Rule):
    def options(self, optimizer, tau, t, n):
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] / (1 + tau) ** 0.5


class Momentum(Rule):
    def options(self, optimizer, tau, t, n):
        for group in optimizer.param_groups:
            share = min(tau / n, 1.0)
            if "betas" in group:
                b1, b2 = group["betas"]
                group["betas"] = (b1 + share * (0.99 - b1), b2)
            else:
                group["momentum"] += share * (0.99 - group["momentum"])


class Nesterov(Rule):
    memory, strength = 0.5, 1.0
    optimizer = None

    def options(self, optimizer, tau, t, n):
        self.optimizer = optimizer if tau else None
        (group,) = optimizer.param_groups
        self.key = "exp_avg" if "betas" in group else "momentum_buffer"
        self.old = {p: s[self.key].clone() for p, s in optimizer.state.items() if self.key in s}
        if tau and "betas" in group:
            b1, b2 = group["betas"]
            group["betas"] = (max(0.0, 1.0 - (1.0 - b1) / self.memory), b2)
        elif tau:
            before = group["momentum"]
            group["momentum"] = max(0.0, 1.0 - (1.0 - before) / self.memory)
            group["lr"] = group["lr"] * (1.0 - group["momentum"]) / (1.0 - before)

    def weights(self, own, before, tau):
        for p in own.values() if self.optimizer else ():
            (group,), state = self.optimizer.param_groups, self.optimizer.state[p]
            if p not in self.old:
                continue
            change = state[self.key] - self.old[p]
            if self.key == "exp_avg":
                t, (b1, b2) = state["step"].item(), group["betas"]
                v = state["exp_avg_sq"] / (1 - b2**t)
                change = group["lr"] * (change / (1 - b1**t) / (v.sqrt() + group["eps"]))
                p.data.sub_(change, alpha=self.strength)
            else:
                p.data.sub_(change, alpha=self.strength * group["lr"])


class Prediction(Rule):
    def view(self, seen, own, optimizer, d):
        (group,) = optimizer.param_groups
        kind, made = type(optimizer).__name__, {}
        for name, p in own.items():
            state = optimizer.state[p]
            if kind == "SGD":
                step = group["lr"] * state["momentum_buffer"]
            else:
                t, (b1, b2) = state["step"].item(), group["betas"]
                lacks = state["mu_product"].item() if kind == "NAdam" else b1**t
                m, v = state["exp_avg"] / (1 - lacks), state["exp_avg_sq"] / (1 - b2**t)
                step = m / (v.sqrt() + group["eps"])
                if kind == "AdamW":
                    step = step + group["weight_decay"] * p.detach()
                step = group["lr"] * step
            made[name] = torch.sub(seen[name], step, alpha=float(d))
        return made


class Extrapolated(Rule):
    decay = 0.0
    velocity = None

    def weights(self, own, before, tau):
        update = {name: p.detach() - before[name] for name, p in own.items()}
        if self.velocity and self.decay:
            old, part = self.velocity, 1.0 - self.decay
            update = {name: torch.lerp(old[name], u, part) for name, u in update.items()}
        self.velocity = update

    def view(self, seen, own, optimizer, d):
        return {a: torch.add(b, self.velocity[a], alpha=float(d)) for a, b in seen.items()}


class Averaged(Extrapolated):
    decay = 0.6


class Compensation(Rule):
    def gradient(self, found, then, now, tau, k):
        return {
            a: torch.add(g, g * g * (now[a] - then[a]), alpha=0.3 * k) for a, g in found.items()
        }


class Adaptive(Rule):
    def __init__(self):
        self.square = {}

    def gradient(self, found, then, now, tau, k):
        made = {}
        for a, g in found.items():
            old = self.square.get(a)
            kept = (
                g * g * (1 - 0.95) if old is None else torch.add(old * 0.95, g * g, alpha=1 - 0.95)
            )
            self.square[a] = kept
            guess = g * g * (now[a] - then[a]) / (kept + 1e-7).sqrt()
            made[a] = torch.add(g, guess, alpha=0.3 * k)
        return made


class Feedback(Rule):
    limit = 1.0

    def __init__(self):
        self.before = {}

    def weights(self, own, before, tau):
        for name, p in own.items():
            update = p.detach() - before[name]
            if name in self.before and tau:
                factor = min(float(tau), self.limit)
                p.data.add_(update - self.before[name], alpha=factor)
            self.before[name] = update


class Stronger(Feedback):
    limit = 2.0


RULES = {
    "rate": Rate,
    "damping": Damping,
    "momentum": Momentum,
    "nesterov": Nesterov,
    "prediction": Prediction,
    "extrapolation": Extrapolated,
    "averaged": Averaged,
    "compensation": Compensation,
    "adaptive": Adaptive,
    "feedback": Feedback,
    "stronger": Stronger,
}
