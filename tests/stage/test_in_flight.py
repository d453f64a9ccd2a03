"""Where autograd begins and ends on a stage: what a forward leaves for its backward."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from support import diamond
from support.messages import head
from support.models import Blocked, Pair
from support.stages import ASYNC, TWO, a_stage, back, content, value
from torch import nn

from pipedream_rt.messages.tree import Value, flatten


class MakesPair(nn.Module):
    """Differentiable, integer and frozen members; a buffer and its own input among them."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x):
        self.calls += 1
        return Pair(self.linear(x), x > 0, "pair", None, {"calls": self.calls, "x": x})


def test_an_output_says_which_of_its_tensors_want_a_gradient():
    stage = a_stage([MakesPair()])
    (made,) = stage.forward(head(0), [value(torch.ones(1, 2))])
    assert made.requires_grad == (True, False, False, False)
    pair = content(made)
    assert (type(pair), pair.name, pair.nothing) == (Pair, "pair", None)
    assert not any(t.requires_grad for t in made.tensors)


def test_what_was_returned_does_not_change_with_what_the_stage_does_next():
    """A buffer that the next forward changes, and the model's input, which is the caller's."""
    stage, x = a_stage([MakesPair()], ASYNC), torch.ones(1, 2)
    made = stage.forward(head(0), [value(x)])
    stage.forward(head(1), [value(x)])
    x.zero_()
    assert content(made).extra["calls"].tolist() == [1]
    assert content(made).extra["x"].tolist() == [[1, 1]]


def test_only_the_tensors_that_asked_for_a_gradient_get_one_in_their_order():
    """None where nothing depends on a tensor."""

    class Uses(nn.Module):
        def forward(self, pair):
            return pair["a"] * pair["count"] + pair["b"] * 3

    stage = a_stage([Uses()], TWO, 1, loss_fn=lambda x, y: (x * y).sum())
    structure, tensors = flatten(
        {"a": torch.ones(1), "count": torch.tensor(2), "unused": torch.ones(1), "b": torch.ones(1)}
    )
    stage.forward(
        head(0),
        [Value(structure, tuple(tensors), (True, False, True, True))],
        value(torch.ones(1)),
    )
    ((a, unused, b),) = back(stage, 0)
    assert (a.tolist(), unused, b.tolist()) == ([2], None, [3])


def test_a_first_layer_may_work_in_place():
    """Its input is no leaf, as inside an unsplit model."""
    stage = a_stage([nn.ReLU(inplace=True)], TWO, 1, loss_fn=lambda x, y: (x * y).sum())
    x = torch.tensor([-1.0, 2.0])
    stage.forward(head(0), [value(x, wanted=True)], value(torch.tensor([5.0, 7.0])))
    ((gradient,),) = back(stage, 0)
    assert gradient.tolist() == [0, 7]


def test_gradients_keep_the_strides_that_the_unsplit_model_gives_them():
    """Not those of the input: kernels round differently for other strides."""
    stage = a_stage([nn.Flatten()], TWO, 1, loss_fn=lambda x, y: x.sum())
    x = torch.ones(2, 3, 4).transpose(1, 2)
    stage.forward(head(0), [value(x, wanted=True)], value(None))
    ((gradient,),) = back(stage, 0)
    assert gradient.shape == (2, 4, 3)
    assert gradient.stride() == (0, 0, 0)  # an expanded one, as of every sum


@pytest.mark.parametrize("halves", [False, True])
def test_gradients_of_several_consumers_are_added_in_the_order_of_the_consumers(halves):
    """Which floats can tell: (1e8 - 1e8) + 1 is 1, (1 + 1e8) - 1e8 is 0."""
    sums = []
    for given in ((1e8, -1e8, 1.0), (1.0, 1e8, -1e8)):
        fan = dataclasses.replace(diamond.plan(), links=((0, 1), (0, 2), (0, 3), (1, 3), (2, 3)))
        stage = a_stage([nn.Identity()], fan, 0)
        stage.forward(head(0), [value(torch.zeros(1), wanted=True)])
        ((gradient,),) = back(stage, 0, [[torch.tensor([g])] for g in given], halves)
        sums.append(gradient.item())
    assert sums == [1, 0]


@pytest.mark.parametrize("halves", [False, True])
def test_a_consumer_that_has_no_gradient_adds_none(halves):
    stage = a_stage([nn.Identity()], diamond.plan(), 0)
    stage.forward(head(0), [value(torch.zeros(1), wanted=True)])
    ((gradient,),) = back(stage, 0, [[None], [torch.tensor([3.0])]], halves)
    assert gradient.tolist() == [3]


@pytest.mark.parametrize("halves", [False, True])
def test_where_no_gradient_comes_to_the_entrance_none_is_sent(halves):
    """Zeros in its place would let an optimizer decay weights of the stage before."""
    stage = a_stage([Blocked(), nn.Linear(2, 2)], TWO, 1, loss_fn=F.mse_loss)
    stage.forward(head(0), [value(torch.ones(1, 2), wanted=True)], value(torch.ones(1, 2)))
    assert back(stage, 0, halves=halves) == [[None]]


def test_the_output_of_a_pass_is_not_changed_by_the_next():
    stage = a_stage([MakesPair()])
    first = stage.passes.infer(0, [value(torch.ones(1, 2))])
    stage.passes.infer(1, [value(torch.ones(1, 2))])
    assert content(first).extra["calls"].tolist() == [1]
