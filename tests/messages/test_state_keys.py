"""The texts of keys: each is read as what was written, and nothing else is read at all."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipedream_rt.messages.state_keys import (
    GROUP,
    OPTIMIZER,
    StateKey,
    by_key,
    by_name,
    by_text,
    key_of,
    optimizer_state,
    parsed,
    written,
)

PARTS = st.one_of(st.text(max_size=6), st.integers(-(10**17), 10**17))


@given(st.lists(st.lists(PARTS, min_size=1, max_size=4).map(tuple), unique=True))
def test_each_key_is_parsed_as_it_was_written_and_two_never_have_one_text(keys):
    assert [parsed(written(*key)) for key in keys] == keys
    assert len({written(*key) for key in keys}) == len(keys)


def test_keys_are_readable():
    assert str(StateKey(OPTIMIZER, "0.weight", ("exp_avg",))) == "optimizer/0.weight/exp_avg"
    assert str(StateKey(GROUP, "1", (0, "step"))) == "group/1/#0/step"
    assert str(StateKey("totals", path=("totals",))) == "totals//totals"
    assert str(StateKey("rule", "a/b%c#", (-3,))) == "rule/a%2Fb%25c%23/#-3"


@pytest.mark.parametrize(
    "text",
    [
        "", "optimizer", "/0.weight", "#1/0.weight", "optimizer/#1", "optimizer/w/a/b",
        "optimizer/a%b", "optimizer/a%2f", "optimizer/w/#01", "optimizer/w/#", "optimizer/w/#x",
        "optimizer/w/##", "optimizer/w/#" + "9" * 30, "group/0/#0", "group/0/0/x", "state/0/x",
        "attribute/0", "split/0/x",
    ],
)  # fmt: skip
def test_what_is_no_key_is_refused(text):
    with pytest.raises(ValueError, match=r"is no|number"):
        key_of(text)


@pytest.mark.parametrize("part", [None, True, 1.0, b"w", 2**63, -(2**63) - 1])
def test_what_can_be_no_part_of_a_key_is_not_written(part):
    with pytest.raises(ValueError, match="can be no part of a key"):
        written(OPTIMIZER, part)


def test_a_state_has_the_texts_of_its_keys_and_parts_by_name():
    state = optimizer_state({"a": {"m": 1, 3: 2}, "b": {}}) | {StateKey("ema", "a"): 5}
    assert by_text(state) == {
        "optimizer/a/m": 1, "optimizer/a/#3": 2, "optimizer/b": {}, "ema/a": 5,
    }  # fmt: skip
    assert by_key(by_text(state)) == state
    assert by_name(state, OPTIMIZER, ["a", "b", "c"]) == {
        "a": {("m",): 1, (3,): 2}, "b": {(): {}}, "c": {},
    }  # fmt: skip
