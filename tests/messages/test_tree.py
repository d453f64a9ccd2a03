from collections import OrderedDict, namedtuple
from dataclasses import dataclass, field

import cloudpickle
import msgpack
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.models import Pair

from pipedream_rt.errors import ConfigError
from pipedream_rt.messages.head import Mode
from pipedream_rt.messages.tree import flatten, own, places, unflatten

Point = namedtuple("Point", "x y")

plain = st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats() | st.text()
plain |= st.binary()
trees = st.recursive(
    plain,
    lambda t: (
        st.lists(t)
        | st.lists(t).map(tuple)
        | st.dictionaries(st.text() | st.integers(0, 99), t)
        | st.tuples(t, t).map(lambda p: Point(*p))
    ),
    max_leaves=12,
)


def crossed(value):
    """As on the other side of a transport."""
    structure, tensors = flatten(value)
    return unflatten(msgpack.unpackb(msgpack.packb(structure), strict_map_key=False), tensors)


@given(trees)
def test_plain_values_cross_unchanged(value):
    found = crossed(value)
    assert repr(found) == repr(value)  # repr, since a nan is not equal to itself
    assert type(found) is type(value)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.int64,
              torch.bool, torch.complex64])  # fmt: skip
def test_tensors_keep_their_place_and_dtype(dtype):
    tensor = torch.ones(2, 3).to(dtype)
    found = crossed({"a": (tensor, [tensor[0], None]), 3: Point(tensor, "text")})
    assert found["a"][0] is tensor
    assert found["a"][1][0].dtype == dtype
    assert type(found[3]).__name__ == "Point"


@dataclass(frozen=True)
class Frozen:
    tensor: torch.Tensor
    derived: int = field(init=False)

    def __post_init__(self):
        object.__setattr__(self, "derived", 7)


def test_dataclasses_cross_also_frozen_ones_and_computed_fields():
    found = crossed(Frozen(torch.ones(2)))
    assert type(found) is Frozen
    assert found.derived == 7
    pair = Pair(torch.ones(2), torch.zeros(2, dtype=torch.bool), "n", None, {"k": 1})
    assert crossed(pair).mask.dtype == torch.bool


def test_a_class_of_the_users_script_crosses():
    """Pickled by value, as cloudpickle does for __main__; read twice it is one class."""
    cls = type("Local", (), {})
    cls.__module__ = "__main__"
    made = dataclass(cls)
    first, second = crossed([made(), made()])
    assert type(first) is type(second)
    assert cloudpickle.loads(cloudpickle.dumps(made)) is made


class PickledAsInt(int):
    def __reduce__(self):
        return int, (int(self),)


def test_a_number_that_pickles_as_a_plain_one_crosses_as_that():
    found = crossed([PickledAsInt(3)])
    assert (found, type(found[0])) == ([3], int)


def test_tensors_are_named_by_where_they_stand():
    x, y = torch.ones(1), torch.zeros(1)
    structure, _ = flatten((x, {"mask": y, "more": [None, Point(x, torch.ones(2))]}))
    assert places(structure) == {0: "1.more.1.0", 1: "1.mask", 2: "1.more.1.1"}


def test_a_tensor_that_occurs_twice_is_sent_once():
    tensor = torch.ones(2)
    structure, tensors = flatten((tensor, {"again": tensor, "other": torch.ones(2)}))
    assert len(tensors) == 2
    first, found = unflatten(structure, tensors)
    assert found["again"] is first


def test_sizes_and_ordered_dicts_stay_what_they_are():
    value = {"size": torch.ones(2, 3).shape, "ordered": OrderedDict(a=1)}
    found = crossed(value)
    assert type(found["size"]) is torch.Size
    assert type(found["ordered"]) is OrderedDict


GRAPH = torch.tensor([[0.0, 2.0], [3.0, 0.0]])


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta:UserWarning")
@pytest.mark.parametrize(
    "sparse",
    [
        GRAPH.to_sparse(),
        torch.sparse_coo_tensor([[1, 1], [0, 0]], [1.0, 2.0], (2, 2), check_invariants=True),
        GRAPH.bool().to_sparse(),
        "csr",
        "csc",
        "bsr",
        "bsc",
    ],
)
def test_a_sparse_tensor_crosses_as_its_parts(sparse):
    if isinstance(sparse, str):
        blocks = [(2, 2)] if sparse.startswith("b") else []
        sparse = getattr(GRAPH.repeat(2, 2), f"to_sparse_{sparse}")(*blocks)
    found = crossed({"x": torch.ones(2), "graph": [sparse]})["graph"][0]
    assert (found.layout, found.dtype, found.shape) == (sparse.layout, sparse.dtype, sparse.shape)
    assert torch.equal(found.to_dense(), sparse.to_dense())
    if sparse.layout is torch.sparse_coo:
        assert found.is_coalesced() == sparse.is_coalesced()


def test_a_sparse_tensor_that_asks_for_a_gradient_is_refused():
    with pytest.raises(ConfigError, match=r"value\[1\] is .*sparse_coo that requires a gradient"):
        flatten((1, GRAPH.to_sparse().requires_grad_()))


class Special(dict):
    pass


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (Special(a=1), "test_tree.Special, which cannot cross"),
        (Mode.TRAIN, "Mode, which cannot cross"),
        ({"a": [1, {1, 2}]}, r"value\['a'\]\[1\] is a builtins.set, which cannot cross stages"),
        (Point(1, object()), r"value\.y is a builtins.object"),
        (torch.float32, "torch.dtype"),
        ([2**64], r"value\[0\] is an integer of more than 64 bits"),
        ({(1, 2): 3}, r"value has the key \(1, 2\)"),
        ({True: 3}, "has the key True"),
        (Pair, "type"),
    ],
)
def test_other_values_are_refused_by_path(value, words):
    with pytest.raises(ConfigError, match=words):
        flatten(value)


def test_own_drops_the_storage_behind_a_view():
    large = torch.arange(1000.0)
    view = own(large[10:13])
    assert view.untyped_storage().nbytes() == 12
    assert view.tolist() == [10, 11, 12]
    assert own(large).data_ptr() == large.data_ptr()
    assert not own(torch.ones(2, requires_grad=True)).requires_grad


def test_own_keeps_the_strides_of_a_dense_tensor():
    transposed = torch.arange(6.0).view(2, 3).t()
    assert own(transposed).stride() == transposed.stride()
    last = torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last)
    assert own(last).stride() == last.stride()


def test_own_keeps_expanded_dimensions_and_sends_them_once():
    expanded = torch.arange(6.0).view(2, 1, 3).transpose(0, 2).expand(3, 5, 2)
    owned = own(expanded)
    assert owned.stride() == expanded.stride()
    assert owned.untyped_storage().nbytes() == 24
    assert torch.equal(owned, expanded)


def test_own_copies_when_told_to():
    tensor = torch.ones(3)
    assert own(tensor).data_ptr() == tensor.data_ptr()
    assert own(tensor, copy=True).data_ptr() != tensor.data_ptr()
