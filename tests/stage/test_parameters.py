import copy

import pytest
import torch
from support.models import Of, tied
from torch import nn
from torch.utils.checkpoint import checkpoint

from pipedream_rt.errors import ConfigError, VersionError
from pipedream_rt.stage.parameters import VersionedParameters, same


def make(parameters, next_read, step):
    """Make a version of the pending gradients."""
    with parameters.making(parameters.take_gradients(), next_read):
        step()


def checkpointed(reentrant):
    """A module that recomputes its forward in backward, inside."""
    inner = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.LayerNorm(3))
    return Of(lambda x, inner: checkpoint(inner, x, use_reentrant=reentrant), inner)


MODULES = {
    "linear": lambda: nn.Linear(3, 3),
    "layer norm": lambda: nn.LayerNorm(3),
    "conv": lambda: nn.Conv1d(2, 2, 1),
    "checkpoint": lambda: checkpointed(False),
    "reentrant checkpoint": lambda: checkpointed(True),
    "tied": lambda: Of(lambda x, a, b: b(a(x).tanh()), *tied(3)),  # one Parameter, two names
    "lstm": lambda: Of(lambda x, lstm: lstm(x)[0], nn.LSTM(3, 3)),  # keeps a second list of them
    "weight norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)),
}


@pytest.mark.parametrize("name", MODULES)
def test_backward_uses_the_version_of_its_forward(name):
    """Forward on version 0, two updates, then backward: the gradients are those of version 0."""
    torch.manual_seed(0)
    module = MODULES[name]()
    reference = copy.deepcopy(module)
    x = torch.randn(2, 3, requires_grad=True)
    reference(x).square().sum().backward()  # a reentrant checkpoint allows nothing else
    expected = [x.grad, *(p.grad for p in reference.parameters())]
    x.grad = None

    parameters = VersionedParameters(module, 0)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    parameters.ledger.pin(0, 0)
    with parameters.reading(0):
        loss = module(x).square().sum()
    for _ in range(2):
        parameters._gradients = [torch.ones_like(p) for p in module.parameters()]
        make(parameters, 0, optimizer.step)
    assert parameters.ledger.kept == {0, 1, 2}
    with parameters.accumulating(0):
        loss.backward()
    found = [x.grad, *parameters._gradients]
    assert all(torch.equal(f, e) for f, e in zip(found, expected, strict=True))
    expected_weights = [p - 0.5 - 0.5 for p in reference.parameters()]
    assert all(torch.equal(p, e) for p, e in zip(module.parameters(), expected_weights))


def test_the_modules_own_parameters_stay_the_identity():
    module = nn.Linear(2, 2)
    weight, bias = module.weight, module.bias
    parameters = VersionedParameters(module, 0)
    parameters.ledger.pin(0, 0)
    with parameters.reading(0):
        assert module.weight is not weight
        assert type(module.weight) is nn.Parameter  # which a layer may ask
    assert module.weight is weight
    assert module.bias is bias
    with pytest.raises(ZeroDivisionError), parameters.reading(0):
        raise ZeroDivisionError
    assert module.weight is weight


def test_an_update_steps_in_place_when_nobody_reads():
    module = nn.Linear(2, 2)
    parameters = VersionedParameters(module, 0)
    address = module.weight.data_ptr()
    for version in range(5):
        parameters.ledger.pin(version, version)
        with parameters.reading(version):
            loss = module(torch.ones(1, 2)).sum()
        with parameters.accumulating(version):
            loss.backward()
        parameters.ledger.unpin(version)
        make(parameters, version + 1, torch.optim.SGD(module.parameters(), lr=0.1).step)
        assert module.weight.data_ptr() == address
    assert parameters.allocated == 1


def test_buffers_are_recycled():
    """Delay 2: after the first fill the same three sets of buffers go round."""
    module = nn.Linear(2, 2)
    parameters = VersionedParameters(module, 0)
    optimizer = torch.optim.Adam(module.parameters())
    addresses = set()
    for m in range(20):
        reads = max(0, m - 2)
        parameters.begin(m, reads, m)
        if m >= 2:
            assert parameters.end(m - 2) == max(0, m - 4)
            parameters._gradients = [torch.ones_like(p) for p in module.parameters()]
            make(parameters, max(0, m - 1), optimizer.step)
        addresses.add(module.weight.data_ptr())
    assert parameters.allocated == 3
    assert len(addresses) == 3


def test_the_views_of_a_version_go_with_it():
    """Else a later version in its buffers would have them, as if they were its own."""
    module = nn.Linear(2, 2)
    parameters = VersionedParameters(module, 0)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for version in range(5):
        parameters.begin(version, version, version)
        parameters._gradients = [torch.ones_like(p) for p in module.parameters()]
        make(parameters, version + 1, optimizer.step)
        assert parameters.end(version) == version
        assert (version + 1, 1) not in parameters.views()
        parameters.add_view(1)
    assert parameters.allocated == 4


def test_recycling_a_buffer_that_is_still_needed_is_an_error_not_a_wrong_gradient():
    """The net below the ledger: autograd sees the copy into the buffer."""
    module = nn.Linear(2, 2)
    parameters = VersionedParameters(module, 0)
    parameters.ledger.pin(0, 0)
    with parameters.reading(0):
        loss = module(torch.ones(1, 2, requires_grad=True)).square().sum()
    parameters._versions[0].buffers[0].copy_(torch.zeros(2, 2))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


class Sneaky(nn.Module):
    """Reads its weight past the module."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.kept = [self.linear.weight]

    def forward(self, x):
        return x @ self.kept[0] + self.linear.bias


def test_a_weight_used_past_its_module_is_refused():
    module = Sneaky()
    parameters = VersionedParameters(module, 2)
    parameters.ledger.pin(0, 0)
    with parameters.reading(0):
        loss = module(torch.ones(1, 2)).sum()
    with (
        pytest.raises(ConfigError, match=r"stage 2: .* parameter 'linear.weight' through a ref"),
        parameters.accumulating(0),
    ):
        loss.backward()


def test_frozen_parameters_are_left_alone():
    module = nn.Linear(2, 2)
    module.bias.requires_grad_(False)
    parameters = VersionedParameters(module, 0)
    assert list(parameters.named) == ["weight"]
    parameters.ledger.pin(0, 0)
    with parameters.reading(0):
        assert isinstance(module.bias, nn.Parameter)


def test_reading_needs_a_pin():
    parameters = VersionedParameters(nn.Linear(2, 2), 0)
    with pytest.raises(VersionError), parameters.reading(0):
        pass


def test_reset_replaces_the_weights_and_forgets_the_rest():
    module = nn.Linear(2, 2)
    parameters = VersionedParameters(module, 0)
    parameters._gradients = [torch.ones_like(p) for p in module.parameters()]
    make(parameters, 0, torch.optim.SGD(module.parameters(), lr=0.1).step)
    assert parameters.ledger.kept == {0, 1}
    with torch.no_grad():
        parameters.reset(lambda: nn.init.ones_(module.weight))
    assert parameters.ledger.kept == {1}
    parameters.ledger.pin(5, 1)
    with parameters.reading(5):
        assert module.weight.tolist() == [[1, 1], [1, 1]]


def test_nan_is_the_same_as_nan_alone():
    nan, one = torch.tensor([1.0, float("nan")]), torch.tensor([1.0, 0.0])
    assert same(nan, nan.clone())
    assert not same(nan, one)
    assert not same(torch.tensor([float("inf")]), torch.tensor([torch.finfo().max]))
    assert not same(torch.zeros(2), torch.zeros(1))
    assert same(torch.tensor([1, 2]), torch.tensor([1, 2]))
