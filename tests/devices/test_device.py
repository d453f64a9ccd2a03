"""The host as a device, and modules that are moved to another one; without an accelerator."""

import weakref

import pytest
import torch
from torch import nn

from pipedream_rt.devices.device import HOST, moved

META = torch.device("meta")


def refuse(number):
    raise ValueError(f"not {number}")


def test_a_number_is_known_on_the_host_at_once_and_checked_there():
    assert HOST.number(torch.tensor([0.5])) == 0.5
    with pytest.raises(ValueError, match=r"not 0\.5"):
        HOST.number(torch.tensor(0.5), refuse)


def test_a_copy_on_the_host_does_not_change_with_its_tensor():
    tensor = torch.zeros(2)
    copy = HOST.copied(tensor)
    HOST.settle()()
    tensor += 1
    assert copy.tolist() == [0, 0]


def test_autocast_of_the_host_is_that_of_its_processor():
    with HOST.autocast(torch.bfloat16):
        assert nn.Linear(2, 2)(torch.ones(2)).dtype is torch.bfloat16


def test_a_seed_gives_the_same_numbers_again():
    with torch.random.fork_rng():
        HOST.seed(5)
        first = torch.rand(3)
        HOST.seed(5)
        assert torch.equal(torch.rand(3), first)


def test_layers_without_values_stay_so_on_the_host():
    layer = nn.Linear(2, 2, device="meta")
    HOST.place(layer)
    assert layer.weight.is_meta


class Tied(nn.Module):
    """Two layers with one weight, a buffer under two names, and one that is saved nowhere."""

    def __init__(self):
        super().__init__()
        self.one, self.other = nn.Linear(3, 3), nn.Linear(3, 3, bias=False)
        self.other.weight = self.one.weight
        self.one.bias.requires_grad_(False)
        self.register_buffer("scale", torch.ones(3))
        self.register_buffer("same", self.scale, persistent=False)


@pytest.mark.parametrize("is_referred_to", [False, True], ids=["swapped", "replaced"])
def test_what_is_shared_stays_shared_when_a_module_is_moved(is_referred_to):
    module = Tied()
    weak = weakref.ref(module.one.weight) if is_referred_to else None
    before = {name: tensor.requires_grad for name, tensor in module.named_parameters()}
    moved(module, META)
    assert all(tensor.is_meta for tensor in (*module.parameters(), *module.buffers()))
    assert module.other.weight is module.one.weight
    assert module.same is module.scale
    assert "same" not in module.state_dict()
    assert {name: each.requires_grad for name, each in module.named_parameters()} == before
    assert weak is None or weak() is not module.one.weight


def test_what_refers_to_a_weight_refers_to_it_after_a_move():
    """As an optimizer that the script has made."""
    layer = nn.Linear(2, 2)
    layer.weight.sharded_over = "rows"
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    moved(layer, META)
    assert optimizer.param_groups[0]["params"][0] is layer.weight
    assert type(layer.weight) is nn.Parameter
    assert layer.weight.sharded_over == "rows"


def test_a_weight_that_is_referred_to_weakly_is_replaced():
    """As those of an LSTM; torch cannot swap them."""
    layer = nn.Linear(2, 2, bias=False)
    reference = weakref.ref(layer.weight)
    before = reference()
    moved(layer, META)
    assert layer.weight is not before
    assert layer.weight.is_meta
    assert isinstance(layer.weight, nn.Parameter)
    assert not before.is_meta


def test_a_module_that_is_there_already_keeps_its_memory():
    layer = nn.Linear(2, 2)
    before = layer.weight, layer.weight.data_ptr()
    moved(layer, torch.device("cpu"))
    assert (layer.weight, layer.weight.data_ptr()) == before
