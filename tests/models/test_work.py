"""The work of operators, by shapes alone."""

import pytest
import torch
import torch.nn.functional as F
from support.between import Forward
from torch import nn

from pipedream_rt.models.recording import record
from pipedream_rt.models.work import work_of, work_of_update


def counted(model, x, layers):
    work = {}
    record(model, {name: model.get_submodule(name) for name in layers}, [x], {}, work=work)
    return work


def call(func, *args):
    made = func(*args)
    return work_of(func, args, {}, made, [made])


def test_an_operator_counts_its_flops_and_the_bytes_that_it_writes():
    a, b = torch.ones(4, 8), torch.ones(8, 16)
    assert call(torch.ops.aten.mm.default, a, b) == 2 * 4 * 8 * 16 + 8 * (4 * 16 * 4)
    assert call(torch.ops.aten.relu.default, a) == 8 * (4 * 8 * 4)
    assert call(torch.ops.aten.t.default, a) == 0  # a view writes nothing


def test_a_formula_that_raises_counts_as_none(monkeypatch):
    def broken(*args, **kwargs):
        raise ValueError("no formula for these")

    monkeypatch.setitem(torch.utils.flop_counter.flop_registry, torch.ops.aten.mm, broken)
    assert call(torch.ops.aten.mm.default, torch.ones(2, 2), torch.ones(2, 2)) == 8 * 16


def test_a_layer_on_the_meta_device_works_as_much_as_with_values():
    """And what an attempt did that failed there does not count."""

    class Reads(nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            return y if float(x.sum()) == 0 else y + 1  # there are no values on the meta device

    x = torch.zeros(4, 8)
    plain, reads = (nn.Sequential(kind(8, 8), nn.ReLU()) for kind in (nn.Linear, Reads))
    expected = counted(plain, x, ["0", "1"])
    assert expected["1"] == 8 * x.nbytes
    found = counted(reads, x, ["0", "1"])
    # It sums up the inputs too, to one number.
    assert found["0"] - expected["0"] in range(1, 200)


def test_what_is_done_between_layers_counts_for_the_one_before():
    model = Forward(lambda self, x: self.b(F.scaled_dot_product_attention(*[self.a(x)] * 3)))
    work = counted(model, torch.zeros(2, 1, 64, 4), ["a", "b"])
    attention = 2 * 2 * (2 * 64 * 64 * 4)  # two products, of two samples
    assert work["a"] - work["b"] >= attention


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_update_goes_over_the_bytes_of_the_weights(dtype):
    layer = nn.Linear(4, 4, dtype=dtype)
    assert work_of_update(layer.parameters()) == 32 * 20 * dtype.itemsize


def test_a_sparse_tensor_has_no_bytes_of_its_own_and_counts_as_a_dense_one():
    assert call(torch.ops.aten._to_sparse.default, torch.ones(4, 4)) == 8 * 64
