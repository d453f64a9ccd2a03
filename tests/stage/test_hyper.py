"""Hyper-parameters cross to the stages as plain values, and are the very same there."""

import msgpack
import numpy as np
import pytest
import torch

from pipedream_rt.errors import ConfigError
from pipedream_rt.stage.hyper import pack_group, pack_hyper, packed_extra, set_hyper, unpack_hyper


@pytest.mark.parametrize(
    "value",
    [
        None, True, 3, 0.1, "text", (0.9, 0.999), [1, (2, None)], {"a": [1.5]}, {3: 1},
        np.float32(0.1), np.float64(0.1), np.int64(3), np.bool_(True),
        torch.tensor(0.1), torch.tensor([[1, 2], [3, 4]]), torch.tensor(0.1, dtype=torch.bfloat16),
    ],
)  # fmt: skip
def test_a_hyper_parameter_is_the_very_same_value_on_the_other_side(value):
    there = unpack_hyper(
        msgpack.unpackb(msgpack.packb(pack_hyper(value, "x")), strict_map_key=False)
    )
    assert type(there) is type(value)
    if isinstance(value, torch.Tensor):
        assert there.dtype == value.dtype
        assert torch.equal(there, value)
    else:
        assert there == value
        assert getattr(there, "dtype", None) == getattr(value, "dtype", None)


@pytest.mark.parametrize("value", [2**63, 2**64 - 1, -(2**63)])
def test_the_largest_integers_that_msgpack_has_are_plain(value):
    assert msgpack.unpackb(msgpack.packb(pack_hyper(value, "n"))) == value


@pytest.mark.parametrize(
    "value",
    [
        2**64, -(2**63) - 1, [1, 2**64], torch.ones(1, requires_grad=True), np.str_("text"),
        print, object(), {1, 2}, np.ones(2), {(1,): 2}, [print],
    ],
)  # fmt: skip
def test_what_would_not_be_the_same_there_is_refused_by_name(value):
    with pytest.raises(ConfigError, match=r"the hyper-parameter 'n' is .*give it as a number"):
        pack_hyper(value, "n")


def test_a_list_that_looks_like_a_packed_one_stays_a_list():
    for value in (["t", [1]], ["N", "<f4", "bits"], []):
        assert unpack_hyper(pack_hyper(value, "x")) == value


def test_a_tensor_that_is_unpacked_can_be_changed():
    packed = pack_hyper(torch.arange(6.0).reshape(2, 3).T, "x")
    unpack_hyper(packed).add_(1)
    assert unpack_hyper(packed).tolist() == [[0, 3], [1, 4], [2, 5]]


def test_a_group_is_packed_without_parameters_and_what_cannot_be():
    group = {"params": [torch.ones(1)], "lr": 0.1, "betas": (0.9, 0.99), "call": print}
    packed = pack_group(group)
    assert packed.keys() == {"lr", "betas"}
    other = {"params": [], "lr": 5.0, "call": repr}
    set_hyper(other, packed)
    assert other == {"params": [], "lr": 0.1, "betas": (0.9, 0.99), "call": repr}


def test_of_a_state_dict_only_what_is_no_tensor_is_extra():
    state = {"weight": torch.ones(1), "count": 3, "pair": (1, 2)}
    assert {k: unpack_hyper(v) for k, v in packed_extra(state).items()} == {
        "count": 3,
        "pair": (1, 2),
    }
    with pytest.raises(ConfigError, match="'odd'"):
        packed_extra({"odd": object()})
