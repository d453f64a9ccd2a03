"""Hyper-parameters cross to the stages as plain values, and are the very same there."""

import msgpack
import numpy as np
import pytest
import torch

from pipedream_rt.errors import ConfigError
from pipedream_rt.stage.hyper import pack_hyper, unpack_hyper


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


@pytest.mark.parametrize("value", [print, object(), {1, 2}, np.ones(2), {(1,): 2}, [print]])
def test_other_hyper_parameters_are_refused_by_name(value):
    with pytest.raises(ConfigError, match="the hyper-parameter 'lr' is"):
        pack_hyper(value, "lr")
