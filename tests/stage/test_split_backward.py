"""A backward in two halves gives the bits of a whole one, and the first half what is waited for."""

import copy

import pytest
import torch
from support.models import Blocks, RunsBackwardInside
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


class Branches(nn.Module):
    """The input goes three ways, one of them without a weight, and comes together again."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)

    def forward(self, x):
        left, right = self.left(x).split(2, dim=1)
        return torch.cat([left * right, right], dim=1) @ self.right(x).T + x.sum()


class OffThePath(nn.Module):
    """A weight that is computed from weights, and an output that no input leads to."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Parameter(torch.eye(4)), nn.Parameter(torch.ones(4))

    def forward(self, x):
        return x @ (self.a.exp() * self.b), (self.b * 3).sum()


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x, y):
        return self.second(self.first(x) * y), y.sum()


class HalfFrozen(nn.Module):
    def __init__(self):
        super().__init__()
        self.frozen, self.trained = nn.Linear(4, 4), nn.Linear(4, 4)
        self.frozen.requires_grad_(False)

    def forward(self, x):
        return self.frozen(self.trained(self.frozen(x)))


class InsideCheckpoint(nn.Module):
    def __init__(self, reentrant=False):
        super().__init__()
        self.before = nn.Linear(4, 4)
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.LayerNorm(4))
        self.reentrant = reentrant

    def forward(self, x):
        return checkpoint(self.inner, self.before(x), use_reentrant=self.reentrant)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(4, 4, 2)

    def forward(self, x):
        return self.lstm(x)[0]


class Tied(nn.Module):
    """One weight in two places of the path, each by its own transposition."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.second(self.first(x).tanh())


class Doubles(torch.autograd.Function):
    """A Function in Python without weights may run twice."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


class Between(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.before, self.after, self.function = nn.Linear(4, 4), nn.Linear(4, 4), function

    def forward(self, x):
        return self.after(self.function.apply(self.before(x)))


@pytest.mark.parametrize("before", [False, True], ids=["first of its update", "added"])
@pytest.mark.parametrize(
    "make",
    [
        chain,
        Branches,
        OffThePath,
        HalfFrozen,
        InsideCheckpoint,
        lambda: Between(Doubles),
        Recurrent,
        Tied,
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)),
        nn.Identity,
    ],
)
def test_inputs_after_the_first_half_and_weights_after_the_second(make, before):
    """To the bit, also where the pending update has a sum already, which is added to as ever."""
    torch.manual_seed(0)
    in_halves(make(), before=before)


def test_every_input_has_its_gradient_after_the_first_half():
    in_halves(TwoInputs(), inputs=2)


def test_a_scalar_needs_no_gradient_given():
    """The loss, on the stage that computes it."""
    caught, _ = in_halves(Loss())
    assert caught[0] is not None


class Loss(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x).square().mean()


def test_without_an_input_that_wants_a_gradient_all_is_done_in_the_second_half():
    """On the first stage: nobody waits for anything."""
    caught, of_weights = in_halves(chain(), inputs=0)
    assert not caught
    assert len(of_weights) == 6


class Detaches(nn.Module):
    """The input does not lead to the output."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x.detach())


def test_an_input_that_does_not_lead_to_an_output_has_no_gradient():
    caught, of_weights = in_halves(Detaches())
    assert caught == [None]
    assert all(g is not None for g in of_weights)


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


class Hooked(nn.Module):
    """A hook on an activation, which is on the path, and one on a weight computed from another."""

    def __init__(self, hook):
        super().__init__()
        self.a, self.w, self.hook = nn.Linear(4, 4), nn.Parameter(torch.eye(4)), hook

    def forward(self, x):
        hidden = self.a(x)
        hidden.register_hook(self.hook)
        w = self.w * 2
        w.register_hook(self.hook)
        return hidden.tanh() @ w


def test_what_a_hook_changes_is_changed_once():
    in_halves(Hooked(lambda gradient: gradient * 3 + 1))


class Draws(nn.Module):
    """A hook that draws random numbers on the path."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x):
        hidden = self.a(x)
        hidden.register_hook(lambda g: g + torch.randn_like(g))
        return hidden


def test_what_is_drawn_on_the_path_is_drawn_as_in_a_whole_backward():
    in_halves(nn.Sequential(Draws(), nn.Linear(4, 4), Draws()))


class DrawsForWeights(nn.Module):
    """A hook that draws random numbers off the path alone."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.eye(4))

    def forward(self, x):
        w = self.w * 2
        w.register_hook(lambda g: g + torch.randn_like(g))
        return x @ w


def test_what_is_drawn_for_the_weights_alone_is_too():
    in_halves(DrawsForWeights())


def test_a_backward_that_draws_on_the_path_and_off_it_is_refused():
    """It would draw in another order, and give other bits, without a word."""
    split = Graph(nn.Sequential(Draws(), DrawsForWeights())).split()
    split.first_half()
    with pytest.raises(ConfigError, match=r"random .*schedule"):
        split.second_half()


def test_no_hook_is_left_behind():
    """Of those that note what comes to a node, and hold it: the graph may live on."""
    graph = Graph(Hooked(lambda gradient: gradient))
    split = graph.split()
    split.first_half()
    split.second_half()
    handles = split._handles
    assert len(handles) > 1
    assert graph.outputs[0].grad_fn is not None
    assert not any(handle.id in (handle.hooks_dict_ref() or {}) for handle in handles)


# -- graphs that are not ----------------------------------------------------------------------


class RunsTwice(nn.Module):
    """One bias in two places of the path, by no node between."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(self.linear(x).tanh())


class TiedOffThePath(nn.Module):
    """One weight on the path and off it."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.eye(4))

    def forward(self, x):
        return x @ self.w, self.w.exp()


class WeightIsAnOutput(nn.Module):
    """A computed weight is used on the path, and is itself an output."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.eye(4))

    def forward(self, x):
        w = self.w * 2
        return x @ w, w


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


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.before, self.w = nn.Linear(4, 4), nn.Parameter(torch.full((4,), 2.0))

    def forward(self, x):
        return Scales.apply(self.before(x), self.w)


@pytest.mark.parametrize("before", [False, True], ids=["first of its update", "added"])
@pytest.mark.parametrize(
    "make", [RunsTwice, TiedOffThePath, WeightIsAnOutput, Scaled, lambda: InsideCheckpoint(True)]
)
def test_what_cannot_be_cut_is_computed_in_the_first_half_and_added_in_the_second(make, before):
    torch.manual_seed(0)
    in_halves(make(), before=before)
    split = Graph(make()).split()
    split.first_half()
    assert operations_of(split.second_half) == []


def test_a_function_with_a_weight_runs_once():
    """It need not bear to run twice."""
    split = Graph(Scaled()).split()
    Scales.ran = 0
    split.first_half()
    split.second_half()
    assert Scales.ran == 1


def test_weights_that_get_their_gradients_past_the_graph_keep_them_for_the_second_half():
    in_halves(nn.Sequential(nn.Linear(4, 4), RunsBackwardInside(4), nn.Linear(4, 4)))


def test_a_graph_may_be_deeper_than_pythons_stack():
    class Deep(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            x = self.linear(x)
            for _ in range(1500):
                x = -x
            return x

    in_halves(Deep())
