"""What a step of a program returns is what was recorded."""

import dataclasses

import pytest
import torch

from pipedream_rt.errors import ConfigError
from pipedream_rt.models.program import ContextRef, Slot, Step, put

LSTM = Step(
    name="lstm", target="lstm", slots=(0, 1), made=(Slot(0), Slot(1)),
    kinds=(((2, 3), torch.bfloat16), ((2,), torch.int64)),
)  # fmt: skip
NUMBERS = torch.tensor([1, 2])


def test_it_goes_into_the_slots_in_order():
    values = {}
    made = torch.zeros(2, 3, dtype=torch.bfloat16)
    put(LSTM, (made, NUMBERS), values)
    assert values == {0: made, 1: NUMBERS}


@pytest.mark.parametrize(
    ("result", "words"),
    [
        ((torch.zeros(2, 4, dtype=torch.bfloat16), NUMBERS), r"shape \(2, 4\), and a .*\(2, 3\)"),
        ((torch.zeros(2, 3, dtype=torch.float16), NUMBERS), "float16 tensor .*torch.bfloat16 one"),
        (torch.zeros(2, 3, dtype=torch.bfloat16), "what a layer returns beside tensors must not"),
    ],
    ids=["shape", "dtype", "structure"],
)  # fmt: skip
def test_another_is_refused(result, words):
    with pytest.raises(ConfigError, match=words):
        put(LSTM, result, {})


def test_autocast_may_give_another_floating_dtype_than_where_it_was_recorded():
    """As that of CUDA, which gives float16 of an LSTM whatever it is told."""
    made = torch.zeros(2, 3, dtype=torch.float16, device="meta")
    around = dataclasses.replace(LSTM, around=ContextRef(autocast=("cpu", True, torch.bfloat16)))
    with pytest.raises(ConfigError, match="float16"):
        put(LSTM, (made, NUMBERS), {})
    values = {}
    put(around, (made, NUMBERS), values)  # the forward itself has entered autocast
    assert values == {0: made, 1: NUMBERS}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        put(LSTM, (made, NUMBERS), {})
        with pytest.raises(ConfigError, match="int32"):
            put(LSTM, (made, NUMBERS.to(torch.int32)), {})
        with pytest.raises(ConfigError, match="float32"):  # where it was recorded, it must not
            put(LSTM, (torch.zeros(2, 3), NUMBERS), {})
