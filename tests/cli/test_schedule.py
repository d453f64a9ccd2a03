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


def test_the_name_of_a_schedule_may_be_in_any_case(call):
    assert call("schedule", "GPipe") == call("schedule", "gpipe")
    for name in ("ASYNC_1F1B", "async-1f1b+vertical-sync"):
        output = call("schedule", name, "--vertical-sync")
        assert output.startswith("async-1f1b+vertical-sync: ")
    assert call("simulate", "--schedule", "1F1B") == call("simulate", "--schedule", "1f1b")
    assert call("simulate", "--compare", "1F1B, GPIPE") == call(
        "simulate", "--compare", "1f1b,gpipe"
    )


def test_slack_is_drawn(call):
    """One more forward ahead before the hop that has slack, and before all hops after it."""
    output = call("schedule", "async-1f1b", "--stages", 3, "--updates", 4, "--slack", "1,0")
    assert output.splitlines()[1:] == [
        "stage 0  F0 F1 F2 F3 .  B0 .  B1 .  B2 .  B3",
        "stage 1  .  F0 F1 .  B0 F2 B1 F3 B2 .  B3 .",
        "stage 2  .  .  F0 B0 F1 B1 F2 B2 F3 B3 .  .",
    ]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("async-1f1b", "--slack", "1,0"), "slack has 2 numbers, but 4 stages have 3 hops"),
        (("async-1f1b", "--slack", "more"), "slack must be integers of at least 0, not 'more'"),
        (("async-1f1b", "--slack", "-1"), "slack must be integers of at least 0, not '-1'"),
        (("gpipe", "--slack", "1"), "gpipe has no warm-up that slack could lengthen"),
        (("2bw", "--slack", "1", "--micro-batches", "4"), "a slack of 3 in all need 7"),
        (("1f1b", "--vertical-sync"), "an option of async-1f1b, not of 1f1b"),
    ],
)
def test_what_a_schedule_cannot_have_is_refused(call, words, text):
    assert text in call("schedule", *words, code=1)
