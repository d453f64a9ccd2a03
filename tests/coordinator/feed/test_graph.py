"""A call of the model in the autograd graph of the script."""

import threading

import pytest
import torch

from pipedream_rt import ConfigError
from pipedream_rt.coordinator.feed.graph import Call, in_graph


class Stages:
    """Stages whose inputs get ones, and that note in which order calls ask."""

    def __init__(self):
        self.asked, self.there = [], []

    def input_gradients(self, call):
        self.asked.append(call)
        self.there.append([each.gradients[0] is not None for each in self.calls])
        return [torch.ones_like(tensor) for tensor in call.asked]

    calls: tuple = ()


def called(stages, *inputs, outputs=(2.0,), asks=(True,)):
    """A call with some inputs that ask for gradients, and the outputs that it gives."""
    call = Call(stages, (), (), [each for each in inputs if each.requires_grad])
    return call, in_graph(call, [torch.full((3,), value) for value in outputs], [*asks])


def leaf():
    return torch.zeros(3, requires_grad=True)


def test_a_backward_leaves_its_gradients_with_the_call_and_asks_the_stages_for_no_input():
    stages = Stages()
    call, (output,) = called(stages)
    (output * 3).sum().backward()
    assert call.gradients[0].tolist() == [3] * 3
    assert stages.asked == []


def test_the_gradients_of_several_backwards_are_added():
    call, (output,) = called(Stages())
    for factor in (1, 2):
        (output * factor).sum().backward(retain_graph=True)
    assert call.gradients[0].tolist() == [3] * 3


def test_an_output_without_a_gradient_has_none_and_one_that_asks_for_none_is_no_part_of_it():
    call, (one, two, count) = called(
        Stages(), outputs=(1.0, 2.0, 3.0), asks=(True, True, False)
    )  # fmt: skip
    assert not count.requires_grad
    two.sum().backward()
    assert call.gradients[0] is None
    assert call.gradients[1].tolist() == [1] * 3
    assert one.requires_grad


def test_outputs_of_which_none_asks_are_outside_of_the_graph():
    call, (output,) = called(Stages(), asks=(False,))
    assert not output.requires_grad
    assert call.gradients == []


def test_inputs_are_asked_for_when_all_outputs_have_their_gradients():
    """Whatever the order in which autograd meets the calls."""
    for turned in (False, True):
        stages, inputs = Stages(), [leaf() for _ in range(3)]
        pairs = [called(stages, each) for each in inputs]
        stages.calls = [call for call, _ in pairs]
        outputs = [outputs[0] for _, outputs in pairs]
        sum(output.sum() for output in (outputs[::-1] if turned else outputs)).backward()
        assert stages.there == [[True] * 3] * 3
        assert [each.grad.tolist() for each in inputs] == [[1] * 3] * 3


def test_gradients_flow_on_to_what_is_in_front_of_an_input():
    weight = leaf()
    _, (output,) = called(Stages(), weight * 5)
    output.sum().backward()
    assert weight.grad.tolist() == [5] * 3


def test_what_is_behind_an_output_may_be_made_in_other_threads():
    stages, weight = Stages(), leaf()
    call, (output,) = called(stages, weight)
    stages.calls, made = [call], []
    thread = threading.Thread(target=lambda: made.append(output * 2 + output * 3))
    thread.start()
    thread.join()
    made[0].sum().backward()
    assert stages.there == [[True]]
    assert call.gradients[0].tolist() == [5] * 3


def test_a_gradient_of_an_input_alone_is_none_of_the_weights():
    stages, weight = Stages(), leaf()
    call, (output,) = called(stages, weight)
    stages.calls = [call]
    torch.autograd.grad(output.sum(), weight)
    assert (call.trains, call.gradients, call.of_inputs[0].tolist()) == (False, [None], [1] * 3)
    (output * 2).sum().backward()
    assert (call.trains, call.gradients[0].tolist()) == (True, [2] * 3)


def test_a_second_derivative_is_refused():
    _, (output,) = called(Stages(), leaf())
    with pytest.raises(ConfigError, match="create_graph=True asks for a second derivative"):
        (output**2).sum().backward(create_graph=True)


def test_a_gradient_that_comes_too_late_is_refused():
    call, (output,) = called(Stages())
    call.is_given = True
    with pytest.raises(ConfigError, match="a backward reaches the output of a forward whose"):
        output.sum().backward()
