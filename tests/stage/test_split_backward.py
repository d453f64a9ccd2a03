"""A backward in two halves gives the bits of a whole one, and the first half what is waited for."""

import copy

import pytest
import torch
from support.models import Blocks, Of, RunsBackwardInside, tied
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from pipedream_rt.errors import ConfigError
from pipedream_rt.stage.split_backward import SplitBackward

SEED = 11


class Entrance(torch.autograd.Function):
    """Identity that catches the gradient, as at the entrance of a stage."""

    @staticmethod
    def forward(ctx, leaf, caught):
        ctx.caught = caught
        return leaf.view_as(leaf)

    @staticmethod
    def backward(ctx, gradient):
        ctx.caught.append(gradient)
        return None, None


class Graph:
    """A module that has run forward on inputs whose gradients are caught.

    Attributes:
        outputs: Its outputs that require a gradient.
        entrances: The nodes at which the gradients of its inputs are caught.
        weights: Its leaves that want a gradient.
    """

    def __init__(self, module, inputs=1):
        torch.manual_seed(3)
        self.weights = [p for p in module.parameters() if p.requires_grad]
        self._caught = [[] for _ in range(inputs)]
        data = [torch.randn(5, 4) for _ in range(max(inputs, 1))]
        if inputs:
            entered = zip(data, self._caught, strict=True)
            data = [Entrance.apply(x.requires_grad_(), caught) for x, caught in entered]
        self.entrances = [x.grad_fn for x in data if x.grad_fn is not None]
        made = module(*data)
        self.outputs = list(made) if isinstance(made, tuple) else [made]
        self.gradients = [torch.randn_like(o) if o.dim() else None for o in self.outputs]

    def split(self):
        edges = [torch.autograd.graph.get_gradient_edge(o) for o in self.outputs]
        pairs = zip(self.gradients, self.outputs, strict=True)
        gradients = [torch.ones_like(o) if g is None else g for g, o in pairs]
        return SplitBackward(edges, gradients, self.entrances, self.weights)

    def caught(self):
        assert all(len(caught) <= 1 for caught in self._caught)
        return [caught[0].clone() if caught else None for caught in self._caught]

    def of_weights(self):
        return [None if w.grad is None else w.grad.clone() for w in self.weights]


def whole(module, inputs, before):
    """Gradients of inputs and weights by one call of autograd."""
    graph = Graph(module, inputs)
    _put(graph.weights, before)
    torch.manual_seed(SEED)
    torch.autograd.backward(graph.outputs, graph.gradients)
    return graph.caught(), graph.of_weights()


def _put(weights, before):
    """What earlier micro-batches have left in the pending update."""
    if before:
        torch.manual_seed(1)
        for weight in weights:
            weight.grad = torch.randn_like(weight)


def same(found, expected):
    return len(found) == len(expected) and all(
        (f is None and e is None) or (f is not None and e is not None and torch.equal(f, e))
        for f, e in zip(found, expected, strict=True)
    )


def in_halves(module, inputs=1, before=False):
    """Require that both halves give what one backward gives, each when it should; return these."""
    expected = whole(copy.deepcopy(module), inputs, before)
    graph = Graph(module, inputs)
    split = graph.split()
    torch.manual_seed(SEED)
    split.first_half()
    assert same(graph.caught(), expected[0])
    assert all(weight.grad is None for weight in graph.weights)
    _put(graph.weights, before)
    torch.manual_seed(SEED)
    split.second_half()
    assert same(graph.of_weights(), expected[1])
    assert same(graph.caught(), expected[0])  # no entrance has run a second time
    return expected


# -- graphs that are cut ----------------------------------------------------------------------


def chain():
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.LayerNorm(6), nn.Linear(6, 4))


def linear():
    return nn.Linear(4, 4)


def weight():
    return nn.Parameter(torch.eye(4))


def frozen():
    return linear().requires_grad_(False)


def inner():
    return nn.Sequential(linear(), nn.Dropout(0.5), nn.LayerNorm(4))


def changed(tensor, change):
    """The same tensor, whose gradient a hook changes."""
    tensor.register_hook(change)
    return tensor


def with_noise(tensor):
    return changed(tensor, lambda gradient: gradient + torch.randn_like(gradient))


def negated_often(x, layer):
    """A graph that is deeper than Python's stack."""
    x = layer(x)
    for _ in range(1500):
        x = -x
    return x


def draws():
    """Random numbers are drawn on the path."""
    return Of(lambda x, layer: with_noise(layer(x)), linear())


def draws_for_weights():
    """Random numbers are drawn off the path alone."""
    return Of(lambda x, w: x @ with_noise(w * 2), weight())


class Branches(nn.Module):
    """The input goes three ways, one of them without a weight, and comes together again."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)

    def forward(self, x):
        left, right = self.left(x).split(2, dim=1)
        return torch.cat([left * right, right], dim=1) @ self.right(x).T + x.sum()


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x, y):
        return self.second(self.first(x) * y), y.sum()


class Doubles(torch.autograd.Function):
    """A Function in Python without weights may run twice."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


def hooked(hook):
    """A hook on an activation, which is on the path, and one on a weight computed from another."""
    return Of(
        lambda x, layer, w: changed(layer(x), hook).tanh() @ changed(w * 2, hook),
        *(linear(), weight()),
    )


class Between(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.before, self.after, self.function = linear(), linear(), function

    def forward(self, x):
        return self.after(self.function.apply(self.before(x)))


CUT = {
    "chain": chain,
    "branches": Branches,
    "a weight computed from weights, and an output that no input leads to": lambda: Of(
        lambda x, a, b: (x @ (a.exp() * b), (b * 3).sum()), weight(), nn.Parameter(torch.ones(4))
    ),
    "half frozen": lambda: Of(lambda x, a, b: a(b(a(x))), frozen(), linear()),
    "checkpoint": lambda: Of(
        lambda x, before, inside: checkpoint(inside, before(x), use_reentrant=False),
        *(linear(), inner()),
    ),
    "function": lambda: Between(Doubles),
    "lstm": lambda: Of(lambda x, lstm: lstm(x)[0], nn.LSTM(4, 4, 2)),
    # Each time by its own transposition.
    "a weight twice": lambda: Of(lambda x, a, b: b(a(x).tanh()), *tied(4)),
    "weight norm": lambda: nn.utils.parametrizations.weight_norm(linear()),
    "no weights": nn.Identity,
    "a scalar, as the loss": lambda: Of(lambda x, layer: layer(x).square().mean(), linear()),
    "hooks": lambda: hooked(lambda gradient: gradient * 3 + 1),
    "drawn on the path": lambda: nn.Sequential(draws(), linear(), draws()),
    "drawn for the weights": draws_for_weights,
    "deep": lambda: Of(negated_often, linear()),
}


@pytest.mark.parametrize("before", [False, True], ids=["first of its update", "added"])
@pytest.mark.parametrize("name", CUT)
def test_inputs_after_the_first_half_and_weights_after_the_second(name, before):
    """To the bit, also where the pending update has a sum already, which is added to as ever."""
    torch.manual_seed(0)
    caught, _ = in_halves(CUT[name](), before=before)
    assert caught[0] is not None


def test_without_an_input_that_wants_a_gradient_all_is_done_in_the_second_half():
    """On the first stage: nobody waits for anything."""
    caught, of_weights = in_halves(chain(), inputs=0)
    assert not caught
    assert len(of_weights) == 6


def test_an_input_that_does_not_lead_to_an_output_has_no_gradient():
    """Of two inputs, each has one where it does."""
    caught, of_weights = in_halves(Of(lambda x, layer: layer(x.detach()), linear()))
    assert caught == [None]
    assert all(g is not None for g in of_weights)
    assert None not in in_halves(TwoInputs(), inputs=2)[0]


def test_weights_that_no_gradient_comes_to_get_none():
    _, of_weights = in_halves(Between(Blocks))
    assert [g is None for g in of_weights] == [True, True, False, False]


class Operations(TorchDispatchMode):
    """Notes which operations run."""

    def __init__(self):
        super().__init__()
        self.ran = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ran.append(func)
        return func(*args, **(kwargs or {}))


def operations_of(half):
    with Operations() as operations:
        half()
    return operations.ran


def test_what_was_computed_is_not_computed_twice():
    """Of a linear layer: one product in each half."""
    split = Graph(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))).split()
    for half in (split.first_half, split.second_half):
        assert operations_of(half).count(torch.ops.aten.mm.default) == 2


# -- hooks ------------------------------------------------------------------------------------


def test_a_backward_that_draws_on_the_path_and_off_it_is_refused():
    """It would draw in another order, and give other bits, without a word."""
    split = Graph(nn.Sequential(draws(), draws_for_weights())).split()
    split.first_half()
    with pytest.raises(ConfigError, match=r"random .*schedule"):
        split.second_half()


def test_no_hook_is_left_behind():
    """Of those that note what comes to a node, and hold it: the graph may live on."""
    graph = Graph(hooked(lambda gradient: gradient))
    split = graph.split()
    split.first_half()
    split.second_half()
    handles = split._handles
    assert len(handles) > 1
    assert graph.outputs[0].grad_fn is not None
    assert not any(handle.id in (handle.hooks_dict_ref() or {}) for handle in handles)


# -- graphs that are not ----------------------------------------------------------------------


class Scales(torch.autograd.Function):
    """A Function in Python with a weight computes both its gradients whenever it runs."""

    ran = 0

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx, gradient):
        Scales.ran += 1
        x, w = ctx.saved_tensors
        return gradient * w, (gradient * x).sum(0)


def scaled():
    twos = nn.Parameter(torch.full((4,), 2.0))
    return Of(lambda x, before, w: Scales.apply(before(x), w), linear(), twos)


WHOLE = {
    "a bias in two places of the path, by no node between": lambda: Of(
        lambda x, layer: layer(layer(x).tanh()), linear()
    ),
    "a weight on the path and off it": lambda: Of(lambda x, w: (x @ w, w.exp()), weight()),
    "a weight that is an output": lambda: Of(lambda x, w: (x @ (v := w * 2), v), weight()),
    "function with a weight": scaled,
    "reentrant checkpoint": lambda: Of(
        lambda x, before, inside: checkpoint(inside, before(x), use_reentrant=True),
        *(linear(), inner()),
    ),
}


@pytest.mark.parametrize("before", [False, True], ids=["first of its update", "added"])
@pytest.mark.parametrize("name", WHOLE)
def test_what_cannot_be_cut_is_computed_in_the_first_half_and_added_in_the_second(name, before):
    torch.manual_seed(0)
    in_halves(WHOLE[name](), before=before)
    split = Graph(WHOLE[name]()).split()
    split.first_half()
    assert operations_of(split.second_half) == []


def test_a_function_with_a_weight_runs_once():
    """It need not bear to run twice."""
    split = Graph(scaled()).split()
    Scales.ran = 0
    split.first_half()
    split.second_half()
    assert Scales.ran == 1


def test_weights_that_get_their_gradients_past_the_graph_keep_them_for_the_second_half():
    in_halves(nn.Sequential(nn.Linear(4, 4), RunsBackwardInside(4), nn.Linear(4, 4)))
