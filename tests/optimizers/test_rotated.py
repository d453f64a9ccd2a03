"""`RotatedAdamW` against its equations in a plain loop."""

import pytest
import torch
from support.matrices import grouped, model, trained
from torch import nn

from pipedream_rt.optimizers import RotatedAdamW


def rotated_by_hand(weights, lr, b1, b2, eps, decay, refresh):
    """The equations of RotatedAdamW, one matrix after another; returns a step."""
    kept = [{} for _ in weights]

    def step():
        for w, k in zip(weights, kept):
            g = w.grad
            t = k["t"] = k.get("t", 0) + 1
            k["m"] = torch.lerp(k.get("m", torch.zeros_like(g)), g, 1 - b1)
            left, right = g @ g.T, g.T @ g
            k["l"] = torch.lerp(k["l"], left, 1 - b2) if t > 1 else left
            k["r"] = torch.lerp(k["r"], right, 1 - b2) if t > 1 else right
            v = k.get("v", torch.zeros_like(g))
            if t == 1:
                k["u"] = torch.linalg.eigh(k["l"])[1].flip(1).contiguous()
                k["w"] = torch.linalg.eigh(k["r"])[1].flip(1).contiguous()
            elif t % refresh == 0:
                for basis, mean, dim in (("u", "l", 0), ("w", "r", 1)):
                    q = k[basis]
                    order = (q * (k[mean] @ q)).sum(0).argsort(descending=True, stable=True)
                    v = v.index_select(dim, order)
                    k[basis] = torch.linalg.qr(k[mean] @ q[:, order])[0].contiguous()
            turned = k["u"].T @ g @ k["w"]
            k["v"] = torch.addcmul(v * b2, turned, turned, value=1 - b2)
            moment = k["u"].T @ k["m"] @ k["w"] / (1 - b1**t)
            scaled = moment / ((k["v"] / (1 - b2**t)).sqrt() + eps)
            direction = k["u"] @ scaled @ k["w"].T
            w.data.mul_(1 - lr * decay)
            w.data.sub_(lr * direction)

    return step


@pytest.mark.parametrize("refresh", [1, 3, 10])
def test_rotated_adamw_follows_its_equations(refresh):
    net = model()
    inside, others = grouped(net)
    optimizer = RotatedAdamW(
        [{"params": inside, "matrices": True}, {"params": others}],
        lr=0.01, betas=(0.8, 0.9), weight_decay=0.1, refresh=refresh,
    )  # fmt: skip
    found = trained(net, optimizer.step)
    net = model()
    inside, others = grouped(net)
    one = rotated_by_hand(inside, 0.01, 0.8, 0.9, 1e-8, 0.1, refresh)
    other = torch.optim.AdamW(others, lr=0.01, betas=(0.8, 0.9), weight_decay=0.1, foreach=False)

    def step():
        one()
        other.step()

    expected = trained(net, step)
    assert all(map(torch.equal, found, expected))


def test_the_second_moments_follow_their_eigenvectors_when_these_are_sorted_anew():
    """Two directions whose eigenvalues change places."""
    weight = nn.Parameter(torch.eye(2))
    optimizer = RotatedAdamW([{"params": [weight], "matrices": True}], betas=(0.0, 0.5), refresh=4)
    for number in range(4):
        weight.grad = torch.diag(torch.tensor([1.0, 0.1] if number < 1 else [0.1, 3.0]))
        optimizer.step()
        state = optimizer.state[weight]
        if number == 2:
            before = state["exp_avg_sq"].clone()
    expected = before.flip(0, 1) * 0.5 + 0.5 * torch.tensor([[9.0, 0.0], [0.0, 0.01]])
    assert torch.allclose(state["exp_avg_sq"], expected, atol=1e-5)


def test_a_side_that_is_too_long_is_not_rotated():
    weight = nn.Parameter(torch.randn(3, 5))
    optimizer = RotatedAdamW([{"params": [weight], "matrices": True}], longest=4)
    weight.grad = torch.randn(3, 5)
    optimizer.step()
    assert {"left_basis", "left_mean"} <= optimizer.state[weight].keys()
    assert not {"right_basis", "right_mean"} & optimizer.state[weight].keys()
