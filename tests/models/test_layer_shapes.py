"""The shapes of outputs of a layer, without its values."""

import pytest
import torch
from support.between import X
from torch import nn

from pipedream_rt.models.layer_shapes import NotDense, shapes_of


def shapes(layer, *args, carried=None, **kwargs):
    return shapes_of(layer, (args, kwargs), carried or {})


def test_what_a_layer_returns_has_its_shape_and_no_values():
    layer = nn.BatchNorm1d(4)
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    found = shapes(layer, X)
    assert found.result.eq(0).all()
    assert (found.result.shape, found.result.requires_grad) == (X.shape, True)
    assert found.moved == ["running_mean", "running_var", "num_batches_tracked"]
    assert all(torch.equal(before[name], value) for name, value in layer.state_dict().items())
    assert not shapes(layer.eval(), X).moved
    counting = nn.InstanceNorm1d(4, track_running_stats=True)
    assert "running_mean" in shapes(counting, torch.ones(2, 4, 3)).moved


def test_a_gradient_is_asked_for_only_where_something_learns():
    assert not shapes(nn.Linear(4, 4).requires_grad_(False), X).result.requires_grad
    learns = X.clone().requires_grad_()
    assert shapes(nn.Linear(4, 4).requires_grad_(False), learns).result.requires_grad
    with torch.no_grad():
        assert not shapes(nn.Linear(4, 4), X).result.requires_grad


class Does(nn.Module):
    def __init__(self, what):
        super().__init__()
        self.what = what

    def forward(self, *args):
        return self.what(*args)


def test_what_it_was_given_comes_back_as_itself():
    found = shapes(Does(lambda x, y: {"x": x, "sum": x + y}), X, X.clone())
    assert found.result["x"] is X
    assert found.result["sum"].shape == X.shape
    assert (found.changed, found.views) == ([], [])


def test_a_change_in_place_is_told_and_not_done():
    one, other = torch.ones(2), torch.ones(2)
    found = shapes(Does(lambda x, y: x.add_(1) * y), one, other)
    assert len(found.changed) == 1
    assert found.changed[0] is one
    assert one.eq(1).all()


def test_a_view_is_told_with_the_tensor_that_it_lies_over():
    found = shapes(Does(lambda x, y: (x[:1], y + 1)), X, X.clone())
    ((view, source),) = found.views
    assert source is X
    assert view is found.result[0]


@pytest.mark.parametrize("learns", [False, True])
def test_a_view_asks_for_a_gradient_as_what_it_lies_over_and_others_as_ever(learns):
    x, y = X.clone().requires_grad_(learns), X.clone().requires_grad_(not learns)
    found = shapes(Does(lambda x, y: (x[:1], x + y, y[:1])), x, y)
    view, total, other = found.result
    assert (view.requires_grad, other.requires_grad) == (learns, not learns)
    assert total.requires_grad
    assert view.eq(0).all()
    assert [(one is view, source is x) for one, source in found.views] == [
        (True, True),
        (False, False),
    ]
    assert found.views[1][0] is other


@pytest.mark.parametrize(
    "cut", [lambda x: x[:, ::2], lambda x: (x + 1)[:, 1:], lambda x: (x + 1)[:, :1].expand(-1, 3)]
)
def test_a_result_that_learns_has_its_strides_and_may_be_changed(cut):
    x = X.clone().requires_grad_()
    result = shapes(Does(cut), x).result
    assert (result.shape, result.stride()) == (cut(x).shape, cut(x).stride())
    assert result.requires_grad
    assert not result.is_leaf
    result[0, :1].add_(1)


def test_a_layer_that_reads_values_is_run_on_copies():
    x = torch.arange(4.0)
    found = shapes(Does(lambda x: x.add_(1)[: int(x.sum())]), x)
    assert found.result.shape == (4,)
    assert torch.equal(x, torch.arange(4.0))
    assert shapes(
        Does(lambda x: x[: int(x.sum())]), torch.tensor([1.0, 1.0, 0.0])
    ).result.shape == (2,)


def test_autocast_inside_a_layer_has_its_dtype():
    """It does nothing on the meta device, so the layer is run."""

    def cast(x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return x @ x.T

    assert shapes(Does(cast), X).result.dtype is torch.bfloat16
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert shapes(nn.Linear(4, 4), X).result.dtype is torch.bfloat16
    assert shapes(nn.Linear(4, 4), X).result.dtype is torch.float32


@pytest.mark.parametrize("fails", [False, True])
def test_an_object_that_is_carried_is_filled_once(fails):
    """An attempt that fails half-way must not have filled it too."""

    class Cache:
        def __init__(self):
            self.calls = 0

    def fill(x, cache):
        cache.calls += 1
        return x * (float(x.sum()) if fails else 1)

    cache = Cache()
    shapes(Does(fill), X, cache, carried={id(cache): ("cache", cache)})
    assert cache.calls == 1


@pytest.mark.parametrize("layout", ["sparse", "nested"])
def test_a_result_that_is_not_dense_is_told_by_its_layout(layout):
    make = (
        torch.Tensor.to_sparse if layout == "sparse" else lambda x: torch.nested.nested_tensor([x])
    )
    with pytest.raises(NotDense, match=f"^{layout}$"):
        shapes(Does(make), X)
