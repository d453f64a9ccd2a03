"""The buffers of a module: where they are, how they are loaded, and what a backward finds."""

import pytest
import torch
from torch import nn

from pipedream_rt.stage.buffers import (
    ForwardBuffers,
    buffer_slots,
    load_buffers,
    load_state,
    names_of_buffers,
)


class Adds(nn.Module):
    """Changes a buffer as it is told, and multiplies by it, for which autograd saves it."""

    def __init__(self, how="in place"):
        super().__init__()
        self.how = how
        self.register_buffer("scale", torch.ones(2))
        self.register_buffer("empty", None)

    def forward(self, x):
        if self.how == "in place":
            self.scale.add_(1)
        elif self.how == "another":
            self.scale = self.scale + 1
        return x * self.scale


def shared():
    """Two modules that share a buffer."""
    module = nn.Sequential(Adds(), Adds())
    module[1].scale = module[0].scale
    return module


def test_a_shared_buffer_has_all_its_places_under_each_of_its_names():
    module = shared()
    found = buffer_slots(module)
    assert list(found) == ["0.scale", "0.empty", "1.scale", "1.empty"]
    places = [(module[0], "scale"), (module[1], "scale")]
    assert found["0.scale"] == found["1.scale"] == places
    assert [found["0.empty"], found["1.empty"]] == [[(each, "empty")] for each in module]


def test_names_are_those_of_buffers_with_a_value():
    assert names_of_buffers(shared()) == {"0.scale", "1.scale"}


def test_buffers_are_loaded_in_place_and_others_are_left_alone():
    module = shared()
    before, given = module[0].scale, torch.full((2,), 5.0)
    load_buffers(module, {"1.scale": given, "9.scale": torch.ones(1)})
    assert module[0].scale is module[1].scale is before
    assert before.tolist() == [5, 5]


@pytest.mark.parametrize(
    "given", [torch.zeros(3), torch.zeros(2, dtype=torch.float64)], ids=["shape", "dtype"]
)
def test_a_buffer_that_fits_no_more_is_replaced_at_all_its_places(given):
    module = shared()
    load_buffers(module, {"0.scale": given})
    assert module[0].scale is module[1].scale
    assert module[0].scale is not given
    assert (module[1].scale.shape, module[1].scale.dtype) == (given.shape, given.dtype)


def test_a_state_of_another_split_is_loaded_as_far_as_it_belongs_here():
    module = nn.Sequential(nn.Linear(1, 1))
    load_state(module, {"0.weight": torch.tensor([[7.0]]), "5.weight": torch.ones(1)})
    assert module[0].weight.item() == 7


@pytest.mark.parametrize("how", ["in place", "another"])
def test_a_backward_finds_what_its_forward_has_saved(how):
    module = nn.Sequential(Adds(how))
    buffers, inputs, outputs = ForwardBuffers(module), [], []
    for number in range(3):
        inputs.append(torch.ones(2, requires_grad=True))
        with buffers.kept_for_backward(others=number > 0):
            outputs.append(module(inputs[-1]))
    for x, made in zip(inputs, outputs, strict=True):
        made.sum().backward()
        assert torch.equal(x.grad, made)  # both are the scale that this forward has read
    assert [x.grad[0].item() for x in inputs] == [2, 3, 4]
    assert module[0].scale.tolist() == [4, 4]


def test_a_copy_that_is_made_for_a_forward_is_in_all_places_of_the_buffer():
    module = shared()
    buffers = ForwardBuffers(module)
    x = torch.ones(2)
    with buffers.kept_for_backward(others=False):
        module(x)
    before = module[0].scale
    with buffers.kept_for_backward(others=True):
        module(x)
    assert module[0].scale is module[1].scale
    assert module[0].scale is not before
    assert (before.tolist(), module[0].scale.tolist()) == ([3, 3], [5, 5])


@pytest.mark.parametrize("made", [nn.BatchNorm1d(2), Adds("nothing")], ids=["norm", "constant"])
def test_buffers_that_no_forward_changes_for_a_backward_are_not_copied(made):
    buffers = ForwardBuffers(made)
    before = dict(made.named_buffers())
    for number in range(3):
        with buffers.kept_for_backward(others=number > 0):
            made(torch.randn(3, 2))
    assert all(buffer is before[name] for name, buffer in made.named_buffers())


def test_earlier_buffers_are_in_their_places_for_a_while_alone():
    module = shared()
    buffers, own = ForwardBuffers(module), module[0].scale
    copies = buffers.copies()
    own.fill_(9)

    def fails():
        with buffers.put_back_for_a_while(copies):
            assert module[0].scale is module[1].scale
            assert module[0].scale.tolist() == [1, 1]
            module[0].scale.add_(1)
            raise KeyError

    for _ in range(2):  # what the body has changed is not there the second time
        with pytest.raises(KeyError):
            fails()
        assert module[0].scale is module[1].scale is own
        assert own.tolist() == [9, 9]
