"""Modules that cast their weights once for a mini-batch, as those of Transformer Engine do."""

import pytest
import torch
from support.casts import Cast, Plain, train

from pipedream_rt import Layout, Training

RECOMPUTE = Training(recompute=True)
ONCE = [[True, False, False, False] * 9] * 3
"""What each stage says where the pipe is flushed."""


@pytest.mark.parametrize(
    ("schedule", "micro_batches", "options", "expected_of"),
    [
        ("1f1b", 4, {}, lambda said: said == ONCE),
        ("1f1b", 4, {"training": RECOMPUTE}, None),
        ("zero-bubble", 4, {}, None),
        # The first stage has three versions in flight, so nothing is kept; the last one has one.
        ("async-1f1b", 1, {}, lambda said: None in said[0] and said[2] == [True] * 9),
        ("async-1f1b", 4, {}, None),
        ("async-1f1b", 2, {"training": RECOMPUTE}, None),
        ("2bw", 5, {"layout": Layout(slack=1)}, None),
    ],
)
def test_the_bits_are_those_of_casting_every_time(schedule, micro_batches, options, expected_of):
    options = {"schedule": schedule, "micro_batches": micro_batches, **options}
    losses, weights, said = train(Cast, **options)
    assert any(True in of_one for of_one in said)
    assert expected_of is None or expected_of(said)
    expected, expected_weights, _ = train(Plain, **options)
    assert losses == expected
    assert all(torch.equal(weights[key], value) for key, value in expected_weights.items())
