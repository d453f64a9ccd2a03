"""The base of the optimizers of matrices: groups, options, state, and the step to expect."""

import pickle

import pytest
import torch
from support.matrices import grouped, model, trained
from torch import nn

from pipedream_rt.optimizers import Muon, RotatedAdamW


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


@pytest.mark.parametrize(
    ("made", "dtype"),
    [(Muon, torch.complex64), (RotatedAdamW, torch.complex64), (RotatedAdamW, torch.bfloat16)],
)
def test_matrices_of_types_without_a_rule_are_refused(made, dtype):
    with pytest.raises(ValueError, match=str(dtype)):
        made([{"params": [nn.Parameter(torch.ones(3, 2, dtype=dtype))], "matrices": True}])


@pytest.mark.parametrize(
    ("made", "options"),
    [
        (Muon, {"momentum": 2.0}),
        (Muon, {"betas": (0.9,)}),
        (Muon, {"lr": float("nan")}),
        (RotatedAdamW, {"refresh": 2.5}),
        (RotatedAdamW, {"refresh": 0}),
        (RotatedAdamW, {"longest": -1}),
    ],
)
def test_options_of_a_group_are_checked_too(made, options):
    group = {"params": [nn.Parameter(torch.ones(3, 2))], "matrices": True, **options}
    with pytest.raises(ValueError, match=next(iter(options))):
        made([group])


def test_a_closure_is_called():
    weight = nn.Parameter(torch.ones(3, 2))
    optimizer = Muon([{"params": [weight], "matrices": True}], lr=0.1)

    def closure():
        optimizer.zero_grad()
        loss = weight.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 6.0
    assert not torch.equal(weight, torch.ones(3, 2))
