"""The optimizers of matrices: against torch's own, and against their equations in plain loops."""

import pickle

import pytest
import torch
from torch import nn

from pipedream_rt.optimizers import Muon, RotatedAdamW, hidden_matrices


class Model(nn.Module):
    def __init__(self, tied=False):
        super().__init__()
        self.embedding = nn.Embedding(7, 6)
        self.attention = nn.MultiheadAttention(6, 2)
        self.up = nn.Linear(6, 10)
        self.norm = nn.LayerNorm(10)
        self.down = nn.Linear(10, 6)
        self.head = nn.Linear(6, 7, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, x):
        hidden = self.embedding(x)
        hidden = hidden + self.attention(hidden, hidden, hidden)[0]
        return self.head(self.down(torch.relu(self.norm(self.up(hidden)))))


def model():
    torch.manual_seed(3)
    return Model()


def grouped(net):
    rule = hidden_matrices(net)
    named = list(net.named_parameters())
    inside = [p for name, p in named if rule(name, p)]
    others = [p for name, p in named if not rule(name, p)]
    return inside, others


def trained(net, step, updates=12):
    generator = torch.Generator().manual_seed(1)
    for _ in range(updates):
        x = torch.randint(7, (5, 3), generator=generator)
        net.zero_grad()
        nn.functional.cross_entropy(net(x).flatten(0, 1), x.flatten()).backward()
        step()
    return [p.detach().clone() for p in net.parameters()]


def test_the_matrices_inside_a_model():
    rule = hidden_matrices(model())
    names = [name for name, p in model().named_parameters() if rule(name, p)]
    assert names == [
        "attention.in_proj_weight",
        "attention.out_proj.weight",
        "up.weight",
        "down.weight",
    ]
    tied = Model(tied=True)
    assert not hidden_matrices(tied)("embedding.weight", tied.embedding.weight)


def test_muon_is_that_of_torch_beside_adamw():
    net = model()
    inside, others = grouped(net)
    optimizer = Muon(
        [{"params": inside, "matrices": True}, {"params": others}],
        lr=0.01, momentum=0.9, betas=(0.8, 0.9), weight_decay=0.1,
    )  # fmt: skip
    found = trained(net, optimizer.step)
    net = model()
    inside, others = grouped(net)
    one = torch.optim.Muon(
        inside, lr=0.01, momentum=0.9, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"
    )
    other = torch.optim.AdamW(others, lr=0.01, betas=(0.8, 0.9), weight_decay=0.1, foreach=False)

    def step():
        one.step()
        other.step()

    expected = trained(net, step)
    assert all(map(torch.equal, found, expected))


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


@pytest.mark.parametrize("kind", [Muon, RotatedAdamW])
def test_their_state_comes_back_from_a_state_dict(kind):
    def made():
        net = model()
        inside, others = grouped(net)
        return net, kind([{"params": inside, "matrices": True}, {"params": others}], lr=0.01)

    net, optimizer = made()
    expected = trained(net, optimizer.step, 8)
    assert expected is not None
    other, again = made()
    other.load_state_dict(net.state_dict())
    again.load_state_dict(pickle.loads(pickle.dumps(optimizer.state_dict())))
    assert all(map(torch.equal, trained(net, optimizer.step, 3), trained(other, again.step, 3)))


@pytest.mark.parametrize("kind", [Muon, RotatedAdamW])
def test_an_expected_step_is_the_step_without_a_gradient(kind):
    """For AdamW to the bit; in rotated bases up to what the next gradient would have changed."""
    net = model()
    inside, others = grouped(net)
    optimizer = kind(
        [{"params": inside, "matrices": True}, {"params": others}], lr=0.01, weight_decay=0.1
    )
    trained(net, optimizer.step, 5)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            with torch.no_grad():
                step = optimizer.expected_step(parameter, group)
            assert step.shape == parameter.shape
            assert 0 < step.abs().max() < 0.1


@pytest.mark.parametrize("kind", [Muon, RotatedAdamW])
@pytest.mark.parametrize(
    "options", [{"lr": -1.0}, {"betas": (1.0, 0.9)}, {"weight_decay": -0.1}, {"eps": -1e-8}]
)
def test_options_out_of_range_are_refused(kind, options):
    with pytest.raises(ValueError, match=next(iter(options))):
        kind([nn.Parameter(torch.ones(2, 2))], **options)


@pytest.mark.parametrize("kind", [Muon, RotatedAdamW])
def test_what_is_no_matrix_is_refused_in_a_group_of_matrices(kind):
    with pytest.raises(ValueError, match=r"a parameter of shape \(3,\)"):
        kind([{"params": [nn.Parameter(torch.ones(3))], "matrices": True}])


def test_a_refresh_below_one_is_refused():
    with pytest.raises(ValueError, match="refresh"):
        RotatedAdamW([nn.Parameter(torch.ones(2, 2))], refresh=0)
