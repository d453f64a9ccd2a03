"""Modules that cast their weights once for a mini-batch, as those of Transformer Engine do."""

import pytest
import torch
from support.casts import Cast, Plain, train

from pipedream_rt import Layout, Training


@pytest.mark.parametrize(
    "options",
    [
        {"schedule": "1f1b", "micro_batches": 4},
        {"schedule": "1f1b", "micro_batches": 4, "training": Training(recompute=True)},
        {"schedule": "zero-bubble", "micro_batches": 4},
        {"schedule": "async-1f1b", "micro_batches": 1},
        {"schedule": "async-1f1b", "micro_batches": 4},
        {"schedule": "async-1f1b", "micro_batches": 2, "training": Training(recompute=True)},
        {"schedule": "2bw", "micro_batches": 5, "layout": Layout(slack=1)},
    ],
    ids=lambda options: "-".join(str(v) for v in options.values() if not isinstance(v, Layout)),
)
def test_the_bits_are_those_of_casting_every_time(options):
    losses, weights, said = train(Cast, **options)
    assert any(True in of_one for of_one in said)
    expected, expected_weights, _ = train(Plain, **options)
    assert losses == expected
    assert all(torch.equal(weights[key], value) for key, value in expected_weights.items())


def test_where_the_pipe_is_flushed_weights_are_cast_once_for_each_mini_batch():
    _, _, said = train(Cast, schedule="1f1b", micro_batches=4)
    assert said == [[True, False, False, False] * 9] * 3


def test_while_an_older_version_is_in_flight_others_keep_nothing():
    _, _, said = train(Cast, schedule="async-1f1b", micro_batches=1)
    assert None in said[0]  # the first stage has three versions in flight
    assert said[2] == [True] * 9  # and the last one has one
