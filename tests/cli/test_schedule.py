"""The command ``schedule``, as a user types it. It starts no process."""

import pytest

from pipedream_rt.schedules import RECIPES


def test_the_schedule_is_drawn(call):
    output = call("schedule", "1f1b", "--stages", 2, "--micro-batches", 2, "--updates", 1)
    assert output.splitlines()[1:] == [
        "stage 0  F0 F1 .  B0 .  B1",
        "stage 1  .  F0 B0 F1 B1 .",
    ]


@pytest.mark.parametrize("words", [("schedule", "help"), ("simulate", "--schedule", "help")])
def test_help_lists_the_schedules(call, words):
    output = call(*words)
    for name in RECIPES:
        assert f"  {name} " in output


def test_an_unknown_schedule_lists_the_known_ones(call):
    for words in (("schedule", "zigzag"), ("simulate", "--schedule", "zigzag")):
        output = call(*words, code=1)
        assert "unknown schedule 'zigzag'" in output
        assert "zero-bubble" in output
